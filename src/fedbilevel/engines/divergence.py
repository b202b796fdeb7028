"""Detect divergence of a run, and explain it by the losses and the inner curvature at its last finite point."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax

from fedbilevel.algorithms.parts.layers import layers_at
from fedbilevel.algorithms.parts.wrappers import without_wrappers
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.hyperparameters import at, given_steps, open_steps
from fedbilevel.core.metrics import text
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines.history import History
from fedbilevel.oracles.operators import Extremes, extreme_eigenvalues
from fedbilevel.oracles.population import Population, WeightedLoss

SAMPLES = 2_000  # the number of samples of the inner loss on which curvature is measured
PRODUCTS = 20  # the number of products with the Hessian of the inner loss by which curvature is measured
ENTRIES = 1_000_000  # curvature is measured for a y of at most this many entries, in memory for 2·PRODUCTS vectors
ROUNDING = 1e-3  # the relative rounding error of a curvature that is 0
FAR = 1000  # a loss above FAR·max(|first loss|, 1) is a sign of steps that are too large
HIGH = 10  # in place of FAR: the factor for a loss in two consecutive rows, if the run can return to a better row
NEAR = 0.1  # x is near its start if no entry moved by more than NEAR·max(1, largest entry at the start)
UNDEFINED = "the logarithm of a number that is 0 or negative, for the root of a negative number, for 0/0"
SHORTER = [2.0**-k for k in range(1, 21)]  # the shares of a step of size 1/L that are tried in its place
STILL = 10  # a loss still grows if it is above STILL times its median size in the rows before; less can be noise


def grown(
    history: History,
    latest: Mapping[str, Sequence[float]] | None = None,
    began: Mapping[str, float] | None = None,
) -> str:
    """Return a text that says by how much a loss has grown, if this shows that the run diverges; otherwise "".

    Metrics that should fall are examined like losses. Let s be the first value of a loss, and r = max(|s|, 1). If the
    run cannot return to a better row (`began` is None), it diverges if a loss is above FAR·r and still grows. Otherwise
    it diverges in two cases: a loss in `began` is above FAR·r; or a loss still grows, and is above HIGH·r in the last
    two rows. One row above HIGH·r is not enough, since an unusual client may cause it.

    Args:
        history: the rows so far.
        latest: the losses in each round since the row before, which show growth before there are two rows.
        began: None, or the losses in the run's first round; {} if an exchange may ask only some of the clients.
    """
    for name in history.judged:
        *before, last = [row[name] for row in history.rows if name in row]
        before = before or list((latest or {}).get(name, ()))
        if not before or history.larger_is_better(name):
            continue
        first = (began or {}).get(name, before[0])
        start, grows = max(abs(first), 1), last > STILL * float(np.median(np.abs(before)))
        far, high = last > FAR * start, last > before[-1] > HIGH * start
        if (far and grows) if began is None else (far and name in began) or (high and grows):
            span = f"from {text(name, first)} to {text(name, last)}"
            return f"round {history.rows[-1]['round']}: {name} has grown {span}"
    return ""


def far_away(round: int, start: float, norm: float) -> str:
    """Return a text if the norm of (x, y) is more than FAR²·max(start, 1), else ""; for methods without losses."""
    far = norm > FAR**2 * max(start, 1)
    return f"round {round}: the norm of x and y has grown from {start:.4g} to {norm:.4g}" if far else ""


class Movement(NamedTuple):
    """Say how far x and y are from the start of a run."""

    x: float  # the largest absolute change of an entry of x
    far: bool  # whether x is no longer near its start (see NEAR)
    y: tuple[float, float]  # the norm of y at the start, and now

    @classmethod
    def between(cls, start: PyTree, x: PyTree, y: tuple[float, float]) -> "Movement":
        """Compare x with its start; a leaf of x may have a block for each client, all of which have the same start."""
        size, moved = 1.0, 0.0
        with np.errstate(invalid="ignore"):  # x may be infinite or NaN, and is then far away
            for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(x), strict=True):
                size = max(size, float(np.max(np.abs(before), initial=0)))
                moved = np.maximum(moved, np.max(np.abs(np.subtract(after, before)), initial=0))
        return cls(float(moved), not moved <= NEAR * size, y)


def what_to_lower(algorithm: Algorithm, halvings: int, moved: Movement) -> str:
    """Return advice on what to lower: the step sizes that the user set, and the advice of the layers.

    If the step sizes adapt, the advice is about the step on x if x has moved far, and otherwise about the step on y.

    Args:
        algorithm: the method within its layers.
        halvings: how often the run halved the method's steps.
        moved: how far x and y have moved.
    """
    more = "".join(f"; {advice}" for layer in layers_at(algorithm) if (advice := layer.what_to_lower()))
    names = given_steps(without_wrappers(algorithm), halvings)
    if names:
        return f"lower {' or '.join(names)}{more}"
    if moved.far or all(step.of == "x" for step in open_steps(without_wrappers(algorithm)).values()):
        slower = "let x move more slowly (fb.layered(method, fb.AdaptiveSteps(x_lr=0.02)))"
        return f"bound x (project_x), or {slower}{more}"
    return (
        "look whether the inner loss has a minimum in y, or let y move more slowly (fb.layered(method, "
        f"fb.AdaptiveSteps(y_lr=0.1))), since the norm of y has changed from {moved.y[0]:.3g} to {moved.y[1]:.3g}, "
        f"and no entry of x has moved by more than {moved.x:.3g}{more}"
    )


def curvature_needed(algorithm: Algorithm) -> float:
    """Return the bound that all curvatures of the mean inner loss G in y must exceed, for this method.

    This is the method's attribute of the same name in round 0, or 0 if it has none. The bound is negative for methods
    that do not need an inner loss that is convex in y.
    """
    return float(getattr(at(without_wrappers(algorithm), 0), "curvature_needed", 0.0))


class Met(NamedTuple):
    """Explain why a run diverged."""

    text: str = ""
    by_steps: bool = True  # whether smaller steps may help: False if the losses, or the inner curvature, are the cause
    at_start: bool = False  # whether the cause is already present at the start


def what_was_met(
    problem: Problem,
    clients: Clients,
    start: tuple[PyTree, PyTree],
    last: tuple[PyTree, PyTree],
    needed: float = 0.0,
) -> Met:
    """Find out why a run diverged, from the losses and curvatures at its start and at its last finite point.

    The explanation is empty for problems whose clients keep x or leaves of y, and where the numbers show no cause.

    Args:
        problem, clients: the problem and the population of the run.
        start: (x, y) at the start.
        last: (x, y) at the last finite point.
        needed: the method's `curvature_needed`.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(last[1]))
    if problem.local is not None or problem.own is not None:
        return Met()
    population = Population.of(problem, clients, SAMPLES)
    for name in problem.own_losses:
        if why := not_finite_at(name, getattr(population, name), *start):
            return Met(why, by_steps=False, at_start=True)
    if problem.implicit_term != "inverse" or not 0 < size <= ENTRIES:
        return Met()
    way = jax.tree.map(np.subtract, last[1], start[1])

    def ends(x: PyTree, y: PyTree) -> Extremes:
        return extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, 0, iterations=PRODUCTS)

    before, after = ends(*start), ends(*last)
    low_x = jax.tree.map(np.minimum, start[0], last[0])
    lowered = ends(low_x, start[1])
    low = min(-ROUNDING * abs(before.largest), needed)
    if before.smallest < low and optax.tree.vdot(way, population.inner.hess_v(*start, way)) < 0:
        why = needs_proximity(before.smallest) if needed < 0 else needs_ridge(before.smallest)
        return Met(why, by_steps=False, at_start=True)
    if lowered.smallest < low <= before.smallest:
        if needed < 0:
            return Met(needs_proximity(lowered.smallest), by_steps=False)
        return Met(
            f"the inner loss was convex in y at the start, but at the lowest x of the run its curvature is as low as "
            f"{lowered.smallest:.3g}, and no step size helps. A penalty that becomes negative causes this: keep x "
            "positive (project_x, in a spec run.x_bounds), or write 10**x in place of x",
            by_steps=False,
        )
    for name in problem.own_losses:
        if why := not_finite_after_a_step(name, getattr(population, name), population.inner, before.largest, *start):
            return Met(why, by_steps=False)
    leaves = zip(jax.tree_util.tree_leaves_with_path(start[0]), jax.tree.leaves(last[0]), strict=True)
    moved = {f"x{jax.tree_util.keystr(path)}": float(np.max(np.abs(np.subtract(b, a)))) for (path, a), b in leaves}
    name = max(moved, key=lambda one: moved[one])
    first, high = (max(abs(found.smallest), abs(found.largest)) for found in (before, after))
    if not (high > 0 and np.isfinite([first, high, moved[name]]).all()):
        return Met()
    limit = f", so steps on y must be below 2/L = {2 / high:.3g}" if needed == 0 else ""
    bounds = "; bounds on x (project_x, in a spec run.x_bounds) keep L where it is" if high > 2 * first else ""
    far = float(optax.tree.norm(way))
    moves = f"an entry of {name} had moved by up to {moved[name]:.3g}, and y by {far:.3g} in norm. The"
    return Met(
        f"{moves if moved[name] or far else 'the'} largest curvature of the inner loss in y was L = {high:.3g} "
        f"({first:.3g} at the start){limit}{bounds}"
    )


def not_finite_at(name: str, total: WeightedLoss, x: PyTree, y: PyTree) -> str:
    """Return a text if a loss or its derivatives are not finite at the start (x, y), else ""; `name` names the loss."""
    if not np.isfinite(total.value(x, y)):
        return (
            f"the {name} loss is not finite even at the start, before any step: look for {UNDEFINED}, and for labels "
            "that are not below the number of classes"
        )
    v = jax.tree.map(np.ones_like, y)
    if nonfinite_leaves((total.gradients(x, y), total.products(x, y, v))):
        return (
            f"a derivative of the {name} loss is not finite even at the start, before any step, although the loss "
            "itself is finite. A square root, a norm or a power at 0 causes this: start elsewhere, or add a small "
            "number inside, as in jnp.sqrt((y**2).sum() + 1e-12)"
        )
    return ""


def not_finite_after_a_step(
    name: str, total: WeightedLoss, inner: WeightedLoss, largest: float, x: PyTree, y: PyTree
) -> str:
    """Return a text if a loss or its gradient is not finite after a step of size 1/L on y from the start, else "".

    Here L is `largest`, the largest curvature of the inner loss at the start. If the curvature is nowhere larger, the
    step lowers the inner loss, and so does a shorter step in its direction. If the longest shorter step at which the
    losses are finite raises the inner loss, the step is too long, because the curvature grows away from the start.
    """
    if not largest > 0:
        return ""
    direction = inner.gradients(x, y)[1]

    def after(share: float) -> PyTree:
        return jax.tree.map(lambda y, g: (y - share * g / largest).astype(y.dtype), y, direction)

    def finite(y: PyTree) -> bool:
        return bool(np.isfinite(total.value(x, y))) and not nonfinite_leaves(total.gradients(x, y))

    if finite(after(1)):
        return ""
    what = f"the {name} loss, or a derivative of it, is not finite after a step of 1/L on y from the start"
    shorter = next(filter(finite, map(after, SHORTER)), y)
    if inner.value(x, shorter) > inner.value(x, y):
        return (
            f"{what}, where L = {largest:.3g} is the largest curvature of the inner loss at the start. This step is "
            "too long, because the curvature grows away from the start, as it does for exp. Start y nearer to its "
            "solution, for example the intercept of a Poisson regression at the logarithm of the mean count; or scale "
            "the features; or let y move more slowly (if its step sizes adapt, by fb.layered(method, "
            "fb.AdaptiveSteps(y_lr=0.1)))"
        )
    return (
        f"{what}, which the inner loss allows: look for {UNDEFINED}. For example, in log(sigmoid(s)) the sigmoid is 0 "
        "for an s far below 0; jax.nn.log_sigmoid(s) and jax.nn.log_softmax(s) are finite there"
    )


def needs_ridge(smallest: float) -> str:
    """Return advice for an inner loss whose smallest curvature is not positive: how large a ridge to add."""
    return (
        f"the inner loss is not strongly convex in y: its curvature is as low as {smallest:.3g}, not above 0, so that "
        f"y*(x) is not defined and no step size helps. Add a ridge to it: c * (y**2).sum() with c above "
        f"{abs(smallest) / 2:.3g}; or use fb.MEHA{with_proximity(smallest)}, which does not need y*(x)"
    )


def needs_proximity(smallest: float) -> str:
    """Return the advice for MEHA if its proximity is too large for an inner loss with this smallest curvature."""
    return (
        f"the curvature of the inner loss in y is as low as {smallest:.3g}, and no step size helps with this "
        f"proximity: use fb.MEHA{with_proximity(smallest)}"
    )


def with_proximity(smallest: float) -> str:
    """Return words for the `proximity` that MEHA needs; "" if the smallest curvature is not below 0."""
    return f" with a proximity below {1 / (2 * abs(smallest)):.3g}" if smallest < 0 else ""
