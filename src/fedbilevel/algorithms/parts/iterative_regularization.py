"""What methods for simple bilevel problems share that work by iterative regularization.

    min H(x) over the minimisers of F over X:   follow the minimisers of F + λ_k H over X, with λ_k → 0

In round k = 1, 2, … the step is γ_k and the weight λ_k = λ₁/k^b; F is the mean, as everywhere in this library: the
sum over m samples, as papers have it, with their λ is F with λ/m.
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
from fedbilevel.core.problem import Problem, SimpleBilevel
from fedbilevel.core.projections import INEXACT, as_rows, check_set, of_each
from fedbilevel.core.tree import PyTree, epsilon, move


class Standstill(NamedTuple):
    """What the stopping rule compares."""

    x: PyTree  # of the last round
    inner: Array  # F at that x, as a sum over all samples
    outer: Array  # H at that x
    change: Array  # the largest relative change of x, H and F since the round before; 1 where there was none

    @classmethod
    def before(cls, x: PyTree) -> "Standstill":
        """Begin before the first round, which starts at x."""
        return cls(x, jnp.zeros(()), jnp.zeros(()), jnp.ones(()))

    def then(self, first: Array, x: PyTree, inner: Array, outer: Array) -> "Standstill":
        """Go on by a round that began at x; `first`: whether it was the first of all."""
        moved = optax.tree.norm(optax.tree.sub(x, self.x)) / (optax.tree.norm(self.x) + 1)
        inner, outer = inner.astype(float), outer.astype(float)
        pairs = ((inner, self.inner), (outer, self.outer))
        changes = [jnp.abs(new - old) / (jnp.abs(old) + 1) for new, old in pairs]
        change = jnp.max(jnp.stack([moved.astype(float), *changes]))
        return Standstill(x, inner, outer, jnp.where(first, 1.0, change))


class State(NamedTuple):
    """The server's state."""

    x: PyTree
    y: PyTree  # the average iterate x̂ = Σ γ_k x_k / Σ γ_k over the rounds so far
    steps: Array  # Σ γ_k
    k: Array  # rounds done
    standstill: Standstill | None  # where a tolerance is given
    own: Any  # what else a method keeps


class IterativeRegularization(Algorithm):
    """Fields, start and stopping rule that these methods share.

    Args:
        lr: γ₁, the first step on one sample's loss, or on their mean; a number or a schedule over rounds.
        regularization: λ₁, the first weight of H, relative to the mean F (papers: λ₁/m); a number or a schedule. With H
            μ-strongly convex γ₁λ₁μ is at most 2.
        regularization_decay: b in λ_k = λ₁/k^b, positive.
        tolerance: the run ends when x, H and F (here the sum over all samples) change by no more from one round to the
            next, max{‖Δx‖/(‖x‖ + 1), |ΔH|/(|H| + 1), |ΔF|/(|F| + 1)}; F is computed for that, and known a round
            later. None: never.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = (SimpleBilevel,)

    lr: float = positive(default=1.0)
    regularization: float = positive(default=0.05)
    regularization_decay: float = static(default=0.35)
    tolerance: float | None = static(default=None)

    def validate(self) -> None:
        b, t = self.regularization_decay, self.tolerance
        require(is_number(b) and b > 0, f"{self.label}.regularization_decay", b, "a positive number, so that λ_k → 0")
        fits = t is None or (is_number(t) and 0 < t < 1)
        require(fits, f"{self.label}.tolerance", t, "strictly between 0 and 1, or None")

    @abstractmethod
    def step_size(self, k: Array) -> Array:
        """Return γ_k of round k = 1, 2, …"""

    @abstractmethod
    def init_own(self, x: PyTree) -> Any:
        """Return what the server keeps beside x and its average, before round 0."""

    @property
    def asks(self) -> Asks:
        """The stopping rule compares F of one round with F of the next: of the same clients."""
        return Asks(everyone=self.tolerance is not None)

    def allows_with(self, phase: str) -> Allows:
        """Allow late replies to the phase, but where the stopping rule compares F; and no submodels."""
        several = No("its tolerance compares F at one x, and late replies have it at several")
        return Allows(
            late=(phase,) if self.tolerance is None else several,
            submodels=No("the projection on X and the preference H are of the whole x"),
        )

    def check_convexity(self, problem: Problem, x: PyTree, anywhere: bool = False) -> None:
        """Refuse a projection that is none, an H that is not strongly convex, and steps too long for it; and, unless a
        start may be `anywhere`, one outside of X."""
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
        """Return γ_k and λ_k of the round that begins."""
        k = (state.k + 1).astype(float)
        return self.step_size(k), self.regularization / k**self.regularization_decay

    def inner_sum(self, client: Client, x: PyTree, key: Array) -> tuple[Array, ...]:
        """Return F_i(x) for the stopping rule, such that the mean is the sum over all samples; nothing without it."""
        if self.tolerance is None:
            return ()
        mean: Array = client.problem.inner(x, None, client.inner_batch(key, None))
        return (client.inner.size * mean / client.weight,)

    def next_state(
        self, state: State, x: PyTree, gamma: Array, inner: Sequence[Array], outer: Array, own: Any
    ) -> State:
        """Return the state after a round with step γ, whose x enters the average; `outer` is H, `inner` F at that x."""
        standstill = state.standstill and state.standstill.then(state.k == 0, state.x, inner[0], outer)
        steps = state.steps + gamma
        share = jnp.where(steps > 0, gamma / jnp.where(steps > 0, steps, 1), 0)  # a schedule may begin at 0
        average = move(state.y, share, optax.tree.sub(state.x, state.y))
        return State(x, average, steps, state.k + 1, standstill, own)

    def finished(self, state: State) -> Any:
        """Say whether nothing changed by more than the tolerance in the last round."""
        if state.standstill is None or self.tolerance is None:
            return False
        return state.standstill.change <= self.tolerance


class DecreasingSteps(IterativeRegularization):
    """Steps γ_k = γ₁/k^a.

    Convergence to the solution is proved for a > ½, a > b > 0, a + b < 1 and γ₁λ₁μ ≤ 2 with H μ-strongly convex. A
    number that breaks a condition is refused, with that condition; an optax schedule is taken as it is.

    Args:
        lr_decay: a in γ_k = γ₁/k^a, above ½ and b, below 1 − b.
    """

    lr_decay: float = static(default=0.6)

    def validate(self) -> None:
        name, a, b = self.label, self.lr_decay, self.regularization_decay
        require(is_number(a), f"{name}.lr_decay", a, "a number")
        require(a > 0.5, f"{name}.lr_decay", a, "above ½, so that Σ γ_k² is finite")
        require(a > b, f"{name}.regularization_decay", b, f"below lr_decay = {a}, so that γ_k/λ_k → 0")
        require(a + b < 1, f"{name}.lr_decay + regularization_decay", a + b, "below 1, so that Σ γ_k λ_k is infinite")

    def step_size(self, k: Array) -> Array:
        return self.lr / k**self.lr_decay


def strong_convexity(problem: SimpleBilevel, points: PyTree) -> float:
    """Check the claimed μ of H between points, leaves (count, ...); without a claim return the least curvature seen.

    Between u and v that is 2 (H(v) − H(u) − ⟨𝓗(u), v − u⟩)/‖v − u‖², known up to rounding.
    """
    values, slopes = of_each(problem.preference, points)
    h, v, s = np.asarray(values).astype(np.float64), as_rows(points), as_rows(slopes)
    finite = bool(np.all(np.isfinite(h)) and np.all(np.isfinite(s)))
    require(finite, "SimpleBilevel.outer", "NaN or infinite at a point of X", "finite there, and its gradient too")
    pairs = [_curvatures(h, v, s, u, epsilon(points)) for u in range(len(h))]
    curvature, doubt = np.concatenate(pairs, axis=1)
    if not curvature.size:
        return problem.strong_convexity or 0.0  # X is a point
    claimed, certain = problem.strong_convexity, float(np.max(curvature - doubt))
    if claimed is not None:
        least = float(np.min(curvature + doubt))
        _require_convex(least >= claimed * (1 - INEXACT), f"strongly convex with μ = {claimed:g}", least)
        return claimed
    seen = doubt <= 0.1 * certain  # the curvatures of other pairs are lost in rounding
    _require_convex(bool(np.any(seen)), "seen to be strongly convex in this precision", certain)
    least = float(np.min(curvature[seen]))
    _require_convex(bool(np.all(curvature[seen] > doubt[seen])), "strongly convex", least)
    return least


def _curvatures(h: np.ndarray, v: np.ndarray, slopes: np.ndarray, u: int, precision: float) -> np.ndarray:
    """Return the curvatures from point u to others apart from it, and how much of each rounding may be: (2, others)."""
    away = v - v[u]
    square, rise = np.sum(away**2, axis=1) / 2, away @ slopes[u]
    size = np.abs(h) + np.abs(h[u]) + np.linalg.norm(slopes[u]) * np.sqrt(2 * square)
    apart = square > 1e-12 * (1 + np.sum(v**2, axis=1))
    found = np.stack([h - h[u] - rise, 1e2 * precision * size])
    return found[:, apart] / square[apart]


def _require_convex(convex: bool, what: str, curvature: float) -> None:
    if not convex:
        raise ConfigurationError(
            f"SimpleBilevel.outer is not {what}: between two points of X its curvature is {curvature:.3g}; a little "
            "of ½‖x‖² added makes it so, and chooses among its minimisers; strong_convexity says what is known of it"
        )
