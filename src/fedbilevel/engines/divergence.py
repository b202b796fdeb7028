"""Whether a run diverges, and what one that did had met: how far x had gone, what the inner curvature then allowed."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax

from fedbilevel.algorithms.parts.adaptive_steps import AdaptiveSteps
from fedbilevel.algorithms.parts.private import Private
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.config import given_steps
from fedbilevel.core.metrics import text
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.history import History
from fedbilevel.oracles.operators import extreme_eigenvalues
from fedbilevel.oracles.population import Population

SAMPLES = 2_000  # of the inner loss, on which curvature is measured
PRODUCTS = 20  # with its Hessian
ENTRIES = 1_000_000  # of y at most: twice as many vectors as products are kept
FAR = 1000  # times what a loss was at first, or 1 if that is more: so high only steps that are too large bring it
STILL = 10  # times the median of what it was before: else it is noise about a level


def grown(history: History, latest: Mapping[str, Sequence[float]] | None = None) -> str:
    """Say which loss, or metric that is to fall, is FAR above its start in the last row, and grows still; or "".

    Args:
        latest: losses in each round since the row before, which tell of growth within the first row.
    """
    for name in history.judged:
        *before, last = [row[name] for row in history.rows if name in row]
        before = before or list((latest or {}).get(name, ()))
        if not before or history.larger_is_better(name):
            continue
        if last > FAR * max(before[0], 1) and last > STILL * float(np.median(before)):
            span = f"from {text(name, before[0])} to {text(name, last)}"
            return f"round {history.rows[-1]['round']}: {name} has grown {span}"
    return ""


def far_away(round: int, start: float, norm: float) -> str:
    """Say that (x, y) is FAR² times as long as at the start, or than 1, as of a method that measures no loss; or ""."""
    far = norm > FAR**2 * max(start, 1)
    return f"round {round}: the norm of x and y has grown from {start:.4g} to {norm:.4g}" if far else ""


def what_to_lower(algorithm: Algorithm) -> str:
    """Say which step sizes of a method were given as numbers, and what noise they multiply."""
    if isinstance(algorithm, Private):
        return f"{what_to_lower(algorithm.algorithm)}; {algorithm.privacy.what_to_lower()}"
    names = given_steps(algorithm.algorithm if isinstance(algorithm, AdaptiveSteps) else algorithm)
    return f"lower {' or '.join(names)}" if names else "give step sizes of your own"


def what_was_met(problem: Problem, clients: Clients, start: tuple[PyTree, PyTree], last: tuple[PyTree, PyTree]) -> str:
    """Say which part of x had moved most from the start to the last finite point, and which steps on y it allowed."""
    size = sum(leaf.size for leaf in jax.tree.leaves(last[1]))
    if problem.implicit_term != "inverse" or not 0 < size <= ENTRIES:
        return ""
    population = Population.of(problem, clients, SAMPLES)
    for name, total in ("outer", population.outer), ("inner", population.inner):
        if not np.isfinite(total.value(*start)):
            return (
                f"the {name} loss is not finite at the start already, whatever the steps: look for labels that are "
                "beyond the classes, log(0) and 0/0"
            )

    def largest(x: PyTree, y: PyTree) -> float:
        found = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, 0, iterations=PRODUCTS)
        return max(abs(found.smallest), abs(found.largest))

    before, after = largest(*start), largest(*last)
    leaves = zip(jax.tree_util.tree_leaves_with_path(start[0]), jax.tree.leaves(last[0]), strict=True)
    moved = {f"x{jax.tree_util.keystr(path)}": float(np.max(np.abs(np.subtract(b, a)))) for (path, a), b in leaves}
    name = max(moved, key=lambda one: moved[one])
    if not (after > 0 and np.isfinite([before, after, moved[name]]).all()):
        return ""
    far = float(optax.tree.norm(jax.tree.map(np.subtract, last[1], start[1])))
    bounds = "; bounds on x (project_x, in a spec run.x_bounds) keep L where it is" if after > 2 * before else ""
    return (
        f"{name} had moved by up to {moved[name]:.3g}, y by {far:.3g} in norm, and the largest curvature of the inner "
        f"loss in y was L = {after:.3g}, {before:.3g} at the start: there a step on y must be below 2/L = "
        f"{2 / after:.3g}{bounds}"
    )
