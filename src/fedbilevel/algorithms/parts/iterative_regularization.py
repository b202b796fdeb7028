"""Provide the fields, the steps and the stopping rule of methods that solve simple bilevel problems by regularization.

    min H(x) over the minimisers of F over X:   follow the minimisers of F + λ_k H over X, with λ_k → 0

In round k = 1, 2, … the step is γ_k, and the weight of H is λ_k = λ₁/k^b. Here F is the mean over samples, as
everywhere in this library. In papers F is the sum over m samples, so that the λ of a paper is m times the λ here.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client
from fedbilevel.core.config import Schedule, positive, static
from fedbilevel.core.errors import ConfigurationError, is_number, require
from fedbilevel.core.facts import Allows, Asks, No
from fedbilevel.core.field_types import Number
from fedbilevel.core.problem import Problem, SimpleBilevel
from fedbilevel.core.projections import INEXACT, as_rows, check_set, of_each
from fedbilevel.core.tree import PyTree, epsilon, move


class Standstill(NamedTuple):
    """Hold the quantities that the stopping rule compares from one round to the next."""

    x: PyTree  # the x at which the last round began
    inner: Array  # F at this x, as a sum over all samples
    outer: Array  # H at this x
    change: Array  # the largest relative change of x, H and F since the round before; 1 if there was no round before

    @classmethod
    def before(cls, x: PyTree) -> "Standstill":
        """Return the quantities before the first round, which begins at x."""
        return cls(x, jnp.zeros(()), jnp.zeros(()), jnp.ones(()))

    def then(self, first: Array, x: PyTree, inner: Array, outer: Array) -> "Standstill":
        """Return the quantities after a round that began at x.

        Args:
            first: whether this is round 0.
            x: the x at which the round began.
            inner, outer: F and H at this x.
        """
        moved = optax.tree.norm(optax.tree.sub(x, self.x)) / (optax.tree.norm(self.x) + 1)
        inner, outer = inner.astype(float), outer.astype(float)
        pairs = ((inner, self.inner), (outer, self.outer))
        changes = [jnp.abs(new - old) / (jnp.abs(old) + 1) for new, old in pairs]
        change = jnp.max(jnp.stack([moved.astype(float), *changes]))
        return Standstill(x, inner, outer, jnp.where(first, 1.0, change))


class State(NamedTuple):
    """Hold the server's state."""

    x: PyTree
    y: PyTree  # the average iterate x̂ = Σ γ_k x_k / Σ γ_k over the rounds so far
    steps: Array  # Σ γ_k
    k: Array  # the number of rounds so far
    standstill: Standstill | None  # None without a tolerance
    own: Any  # a value of the method, such as the x of the round before


class IterativeRegularization(Algorithm):
    """Base class of methods for simple bilevel problems, with their fields, start and stopping rule.

    Args:
        lr: γ₁, the first step size, for the loss of one sample or for the mean loss; a number or a schedule over
            rounds.
        regularization: λ₁, the first weight of H, relative to the mean F (in papers λ₁/m); a number or a schedule over
            rounds. If H is μ-strongly convex, γ₁λ₁μ must be at most 2.
        regularization_decay: b in λ_k = λ₁/k^b, positive.
        tolerance: the run ends when max{‖Δx‖/(‖x‖ + 1), |ΔH|/(|H| + 1), |ΔF|/(|F| + 1)} is at most this number, where Δ
            is the change from one round to the next and F is the sum over all samples. This sum is computed only for
            this rule, and the server gets it one round later. None: the run does not end early.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = (SimpleBilevel,)

    lr: Number = positive(default=1.0)
    regularization: Number = positive(default=0.05)
    regularization_decay: float = static(default=0.35)
    tolerance: float | None = static(default=None)

    def validate(self) -> None:
        b, t = self.regularization_decay, self.tolerance
        require(is_number(b) and b > 0, f"{self.label}.regularization_decay", b, "a positive number, so that λ_k → 0")
        fits = t is None or (is_number(t) and 0 < t < 1)
        require(fits, f"{self.label}.tolerance", t, "strictly between 0 and 1, or None")

    @abstractmethod
    def step_size(self, k: Array) -> Array:
        """Return the step size γ_k of round k = 1, 2, …"""

    @abstractmethod
    def init_own(self, x: PyTree) -> Any:
        """Return the method's own value in the server's state before round 0, besides x and the average of x."""

    @property
    def asks(self) -> Asks:
        """Ask all clients in every round if there is a tolerance, since the rule compares F between rounds."""
        return Asks(everyone=self.tolerance is not None)

    def allows_with(self, phase: str) -> Allows:
        """Return the optional features: replies to `phase` may be late if there is no tolerance; no submodels."""
        several = No("its tolerance compares F at one x, and late replies have F at earlier x")
        return Allows(
            late=(phase,) if self.tolerance is None else several,
            submodels=No("the projection onto X and the preference H need the whole x"),
        )

    def check_convexity(self, problem: Problem, x: PyTree, anywhere: bool = False) -> None:
        """Refuse a `project` that is not a projection, an H that is not strongly convex, and steps that are too long.

        A start x outside of X is also refused, unless `anywhere` is true.
        """
        assert isinstance(problem, SimpleBilevel)
        images = check_set("SimpleBilevel.project", problem.project, x, anywhere)
        mu = strong_convexity(problem, images)
        if not isinstance(self.lr, Schedule) and not isinstance(self.regularization, Schedule):
            product = float(np.max(np.asarray(self.lr) * np.asarray(self.regularization))) * mu
            allowed = f"at most 2, with H's strong convexity μ = {mu:.3g} (assumption 6 (i) of FISM's paper)"
            require(product <= 2 * (1 + 1e-6), f"{self.label}: lr·regularization·μ", product, allowed)

    def init(self, x: PyTree, y: PyTree) -> State:
        standstill = None if self.tolerance is None else Standstill.before(x)
        return State(x, x, jnp.zeros(()), jnp.zeros((), jnp.int32), standstill, self.init_own(x))

    def step_sizes(self, state: State) -> tuple[Array, Array]:
        """Return the step size γ_k of the next round, and the weight λ_k of H in it."""
        k = (state.k + 1).astype(float)
        return self.step_size(k), self.regularization / k**self.regularization_decay

    def inner_sum(self, client: Client, x: PyTree, key: Array) -> tuple[Array, ...]:
        """Return (a multiple of F_i(x),) for the stopping rule; () if there is no tolerance.

        The multiple is such that the mean over clients is the sum of F over all samples.
        """
        if self.tolerance is None:
            return ()
        mean: Array = client.problem.inner(x, None, client.inner_batch(key, None))
        return (client.inner.size * mean / client.weight,)

    def next_state(
        self, state: State, x: PyTree, gamma: Array, inner: Sequence[Array], outer: Array, own: Any
    ) -> State:
        """Return the state after a round; the x at which the round began, state.x, enters the average.

        Args:
            state: the state before the round.
            x: the new x.
            gamma: γ, the step of the round.
            inner: (F,) at state.x, or () if there is no tolerance.
            outer: H at state.x.
            own: the method's own value.
        """
        standstill = state.standstill and state.standstill.then(state.k == 0, state.x, inner[0], outer)
        steps = state.steps + gamma
        share = jnp.where(steps > 0, gamma / jnp.where(steps > 0, steps, 1), 0)  # steps is 0 if a schedule begins at 0
        average = move(state.y, share, optax.tree.sub(state.x, state.y))
        return State(x, average, steps, state.k + 1, standstill, own)

    def finished(self, state: State) -> Any:
        """Return whether x, H and F changed by at most the tolerance in the last round; False without a tolerance."""
        if state.standstill is None or self.tolerance is None:
            return False
        return state.standstill.change <= self.tolerance


class DecreasingSteps(IterativeRegularization):
    """Base class of methods with the decreasing steps γ_k = γ₁/k^a in rounds k = 1, 2, …

    Convergence to the solution is proved for a > ½, a > b > 0, a + b < 1 and γ₁λ₁μ ≤ 2, if H is μ-strongly convex. A
    number that violates a condition is refused, and the error says which condition. A schedule is not checked.

    Args:
        lr_decay: a in γ_k = γ₁/k^a, above ½, above b and below 1 − b.
    """

    lr_decay: float = static(default=0.6)

    def validate(self) -> None:
        name, a, b = self.label, self.lr_decay, self.regularization_decay
        require(is_number(a), f"{name}.lr_decay", a, "a number")
        require(a > 0.5, f"{name}.lr_decay", a, "above ½, so that Σ γ_k², the sum of squared step sizes, is finite")
        require(a > b, f"{name}.regularization_decay", b, f"below lr_decay = {a}, so that γ_k/λ_k → 0")
        require(a + b < 1, f"{name}.lr_decay + regularization_decay", a + b, "below 1, so that Σ γ_k λ_k is infinite")

    def step_size(self, k: Array) -> Array:
        return self.lr / k**self.lr_decay


def strong_convexity(problem: SimpleBilevel, points: PyTree) -> float:
    """Return H's strong convexity μ: the problem's number, after a check, or the least curvature between two points.

    The curvature from u to v is 2 (H(v) − H(u) − ⟨𝓗(u), v − u⟩)/‖v − u‖², up to rounding errors.

    Args:
        problem: the problem with H.
        points: points of X, as a tree whose leaves have a leading axis of points.

    Raises:
        ConfigurationError: H or its subgradient is not finite, or a curvature is below μ or not positive.
    """
    values, slopes = of_each(problem.preference, points)
    h, v, s = np.asarray(values).astype(np.float64), as_rows(points), as_rows(slopes)
    finite = bool(np.all(np.isfinite(h)) and np.all(np.isfinite(s)))
    require(finite, "SimpleBilevel.outer", "NaN or infinite at a point of X", "finite there, and its gradient too")
    pairs = [_curvatures(h, v, s, u, epsilon(points)) for u in range(len(h))]
    curvature, doubt = np.concatenate(pairs, axis=1)
    if not curvature.size:
        return problem.strong_convexity or 0.0  # X has only one point
    claimed, certain = problem.strong_convexity, float(np.max(curvature - doubt))
    if claimed is not None:
        least = float(np.min(curvature + doubt))
        _require_convex(least >= claimed * (1 - INEXACT), f"strongly convex with μ = {claimed:g}", least)
        return claimed
    seen = doubt <= 0.1 * certain  # the pairs of points whose rounding error is small
    _require_convex(bool(np.any(seen)), "measurably strongly convex in this precision", certain)
    least = float(np.min(curvature[seen]))
    _require_convex(bool(np.all(curvature[seen] > doubt[seen])), "strongly convex", least)
    return least


def _curvatures(h: np.ndarray, v: np.ndarray, slopes: np.ndarray, u: int, precision: float) -> np.ndarray:
    """Return the curvatures from point u to all other points, and their rounding errors, as an array (2, points)."""
    away = v - v[u]
    square, rise = np.sum(away**2, axis=1) / 2, away @ slopes[u]
    size = np.abs(h) + np.abs(h[u]) + np.linalg.norm(slopes[u]) * np.sqrt(2 * square)
    apart = square > 1e-12 * (1 + np.sum(v**2, axis=1))
    found = np.stack([h - h[u] - rise, 1e2 * precision * size])
    return found[:, apart] / square[apart]


def _require_convex(convex: bool, what: str, curvature: float) -> None:
    if not convex:
        message = (
            f"SimpleBilevel.outer is not {what}: between two points of X its curvature is {curvature:.3g}; add a small "
            "multiple of ½‖x‖² to make it strongly convex, or set strong_convexity if you know it"
        )
        raise ConfigurationError(path="SimpleBilevel.outer", got=curvature, allowed=what, message=message)
