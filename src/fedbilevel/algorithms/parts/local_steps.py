"""The local steps of a client: on one variable, on x, y and v at once, and the optimizers that make steps of gradients.

Jianyu Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (FedNova),
NeurIPS 2020, section 4: local optimizers whose total update is a linear combination of their gradients,

    z_0 − z_τ = η Σ_{k<τ} a_k d_k,   d_k taken at z_k.

The a_k depend on τ, but for plain steps: on its way the iterate is z_k = z_0 − η Σ_{j<k} a_j d_j with the a_j of k
steps. So a client carries the sum q of the steps so far and what its optimizer remembers, and no a_k. Their sum ‖a‖₁
depends on τ alone, whatever η and the gradients are; q/‖a‖₁ is a weighted mean of the d_k.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.algorithm import Algorithm, Part
from fedbilevel.core.client import Client, Draw, Samples
from fedbilevel.core.config import fraction, positive_integer, share, static, step_sizes
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Reply
from fedbilevel.core.tree import XYV, PyTree, move, scaled
from fedbilevel.oracles.products import Directions, directions, independent_directions

Gradient = Callable[[PyTree, Draw], PyTree]
"""(point, draw) -> the client's own gradient at that point, on the samples that are drawn."""
Count = int | Array
LIKE_XYV = XYV("x", "y", "y")
"""What a phase takes or gives that is an `XYV`: its entries are shaped like x, y and, for v, y again (see `phase`)."""


class LocalSteps(NamedTuple):
    """The local steps of a client."""

    tau: Count
    draw: Callable[[Array | int], Draw]  # k -> the samples of step k

    @classmethod
    def drawn(cls, tau: Count, key: Array) -> LocalSteps:
        """So many steps, each on samples that a key of its own draws with replacement."""
        return cls(tau, partial(jax.random.fold_in, key))


class LocalWork(Part):
    """How many local steps a client makes when it is asked, and on which samples.

    Each epoch takes a client's own samples in a new random order, a batch a step: E⌈n_i/B⌉ steps, or E⌊n_i/B⌋, at
    least E, without short batches. A short batch counts as any other, with the mean of its samples.

    Args:
        local_steps: τ_i, a client's local steps in a round; `Clients.local_steps` takes precedence.
        local_epochs: E passes through its own samples, without replacement, in place of `local_steps`.
        drop_last: leave out an epoch's short last batch, unless it is alone.
    """

    steps_on: ClassVar[Literal["outer", "inner"]]
    """Whose samples the steps take."""

    local_steps: int = positive_integer(default=5)
    local_epochs: int | None = positive_integer(default=None, optional=True)
    drop_last: bool = static(default=False)

    def validate(self) -> None:
        idle = self.drop_last and self.local_epochs is None
        require(not idle, f"{type(self).__name__}.drop_last", True, "False without local_epochs")

    def tau(self, client: Client) -> Count:
        """Return τ_i, a client's number of local steps."""
        if self.local_epochs is None:
            return client.local_steps(self.local_steps)
        samples: Samples = getattr(client, self.steps_on)
        assert client.batch_size is not None
        return self.local_epochs * samples.batches(client.batch_size, self.drop_last)

    def steps(self, client: Client, key: Array) -> LocalSteps:
        """Return a client's local steps; the key draws their samples."""
        if self.local_epochs is None:
            return LocalSteps.drawn(self.tau(client), key)
        samples: Samples = getattr(client, self.steps_on)
        assert client.batch_size is not None
        return LocalSteps(*samples.in_epochs(key, self.local_epochs, client.batch_size, self.drop_last))


def local_descent(gradient: Gradient, start: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Return the change of `start` after τ gradient steps of size lr, FedAvg's local steps.

    The iterate is carried, and the start taken off at the end: in float32 the change is wrong by 10^-7 of the iterate,
    as it is anyway once the server has added it to its own.
    """

    def step(k: Array, point: PyTree) -> PyTree:
        return move(point, -lr, gradient(point, steps.draw(k)))

    return optax.tree.sub(jax.lax.fori_loop(0, steps.tau, step, start), start)


def corrected_drift(gradient: Gradient, start: PyTree, mean_gradient: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Take federated SVRG's local steps, of size lr/τ along ∇(point; ζ_ν) − ∇(start; ζ_ν) + q, q the mean gradient.

    Returns what they change beyond −lr·q, the part that all clients have in common: nothing for τ = 1.

    Jakub Konečný et al., arXiv:1610.02527; as FedLin: Aritra Mitra et al., NeurIPS 2021.
    """

    tau = steps.tau

    def step(k: Array, drift: PyTree) -> PyTree:
        point = move(optax.tree.add(start, drift), -lr * k / tau, mean_gradient)
        draw = steps.draw(k)
        return move(drift, -lr / tau, optax.tree.sub(gradient(point, draw), gradient(start, draw)))

    return jax.lax.fori_loop(1, tau, step, optax.tree.zeros_like(start))  # the first step is along q itself


def mean_gradient(gradient: Gradient, start: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Return (1/τ) Σ_k ∇(z_k), along τ local steps z_{k+1} = z_k − lr ∇(z_k) from `start`."""

    def step(k: Array, total: PyTree) -> PyTree:
        return optax.tree.add(total, gradient(move(start, -lr, total), steps.draw(k)))

    total = jax.lax.fori_loop(0, steps.tau, step, optax.tree.zeros_like(start))
    return jax.tree.map(lambda leaf: leaf / steps.tau, total)


class LocalOptimizer(Part):
    """A local optimizer whose iterate is z_0 − ηq, q = Σ a_k d_k with a_k ≥ 0; write your own as a subclass."""

    anchored: ClassVar[bool] = False
    """Whether d_k is d(z_k; ζ_k) − d(z_0; ζ_k) + d(z_0), the last on all samples, in place of d(z_k; ζ_k)."""

    def begin(self, like: PyTree) -> PyTree:
        """Return the optimizer's memory before the first step, here none; q and d have the shapes of `like`."""
        return None

    @abstractmethod
    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next q and the next memory, d being the gradient at z_0 − ηq."""

    def total(self, tau: Count) -> Array:
        """Return ‖a‖₁ = Σ_{k<τ} a_k, the sum of the coefficients of `tau` steps."""
        return added_up(self, tau)


class Plain(LocalOptimizer):
    """Gradient steps: a_k = 1."""

    kind: ClassVar[str] = "plain"

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return q + d, and no memory: the next sum of directions after the gradient d."""
        return optax.tree.add(q, d), None

    def total(self, tau: Count) -> Array:
        """Return ‖a‖₁ = τ, the sum of the coefficients of τ steps."""
        return jnp.asarray(tau, float)


class Anchored(LocalOptimizer):
    """Local variance reduction, SVRG's: plain steps, d_k = d(z_k; ζ_k) − d(z_0; ζ_k) + d(z_0) on all samples."""

    kind: ClassVar[str] = "anchored"
    anchored: ClassVar[bool] = True

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return q + d, and no memory: the next sum of corrected directions."""
        return optax.tree.add(q, d), None


class Momentum(LocalOptimizer):
    """Heavy ball from rest: m ← μm + d, z ← z − ηm; a_k = (1 − μ^{τ−k}) / (1 − μ).

    Args:
        decay: μ, the factor of the earlier directions in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "momentum"

    decay: float = fraction(default=0.9, own=True)

    def begin(self, like: PyTree) -> PyTree:
        """Return the momentum m before the first step: zeros in the shapes of `like`."""
        return optax.tree.zeros_like(like)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return (q + m, m) with m = μ·memory + d: the next sum of steps, and the momentum after the gradient d."""
        m = move(d, self.decay, memory)
        return optax.tree.add(q, m), m


class Proximal(LocalOptimizer):
    """FedProx: z ← z − ηd − α(z − z_0), the loss having (α/2η)‖z − z_0‖² added; a_k = (1 − α)^{τ−1−k}.

    Args:
        pull: α, the part of the way back to z_0 in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "proximal"

    pull: float = fraction(default=0.1, own=True)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return ((1 − α) q + d, no memory): the next sum of steps after the gradient d."""
        return optax.tree.add(scaled(1 - self.pull, q), d), None


class Mixed(LocalOptimizer):
    """Clients with local optimizers of their own, from one rule: m ← μm + d, z ← z − ηm − α(z − z_0).

    With both numbers 0 a client makes plain steps, with μ alone heavy ball's, with α alone FedProx's; each client by
    its own: `Clients(own={"local_optimizer.decay": [0, 0.9], "local_optimizer.pull": [0.1, 0]})`.

    Args:
        decay: μ, the factor of the earlier directions in each step, at least 0 and below 1.
        pull: α, the part of the way back to z_0 in each step, at least 0 and below 1.
    """

    kind: ClassVar[str] = "mixed"

    decay: float = share(default=0.0, own=True)
    pull: float = share(default=0.0, own=True)

    def begin(self, like: PyTree) -> PyTree:
        """Return the momentum m before the first step: zeros in the shapes of `like`."""
        return optax.tree.zeros_like(like)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return ((1 − α) q + m, m) with m = μ·memory + d: the next sum of steps, and the momentum after d."""
        m = move(d, self.decay, memory)
        return optax.tree.add(scaled(1 - self.pull, q), m), m


def added_up(optimizer: LocalOptimizer, tau: Count) -> Array:
    """Return Σ_{k<τ} a_k, as the q of τ gradients that are all 1: sums of positive numbers, exact to rounding.

    Closed forms, such as (1 − (1 − α)^τ)/α, lose all digits in float32 where α or 1 − μ is small.
    """
    unit = jnp.ones(())

    def step(k: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return optimizer.step(*carry, unit)

    total, _ = jax.lax.fori_loop(0, tau, step, (jnp.zeros(()), optimizer.begin(unit)))
    return jnp.asarray(total)


class JointSteps(Algorithm):
    """A method whose clients step on x, y and v at once: the fields of these steps, and the three directions.

    Args:
        local_steps: τ, a client's local steps in a round; `Clients.local_steps` takes precedence.
        batch_size: samples per draw for each loss, with replacement; None: all.
        client_lr: η, a client's step sizes for x, y and v: numbers or schedules over rounds; a single value serves
            all three. None, for each: adapted (`AdaptiveSteps`).
        independent_batches: draw samples for each of the three directions apart; False: a single draw of outer and of
            inner samples serves all three.
    """

    local_steps: int = positive_integer(default=5)
    batch_size: int | None = positive_integer(default=32, optional=True)
    client_lr: XYV = step_sizes(own=True)
    independent_batches: bool = static(default=False)

    def local_sum(
        self, client: Client, start: XYV, tau: int | Array, key: Array, local_optimizer: LocalOptimizer
    ) -> Directions:
        """Return Σ_k a_k d_k along the local steps, and the sums of the two losses.

        The local iterate is start − η·q throughout, q being the sum if these were all the steps.
        """

        def step(k: Array, carry: tuple[Directions, PyTree]) -> tuple[Directions, PyTree]:
            total, memory = carry
            local = descend(start, self.client_lr, total.step)
            now = self.directions(client, local, jax.random.fold_in(key, k))
            if anchor is not None:
                there = self.directions(client, start, jax.random.fold_in(key, k))
                now = now._replace(step=optax.tree.add(optax.tree.sub(now.step, there.step), anchor.step))
            q, memory = local_optimizer.step(total.step, memory, now.step)
            return Directions(q, total.outer_loss + now.outer_loss, total.inner_loss + now.inner_loss), memory

        nothing, whole = self.no_directions(client, start, key), replace(client, batch_size=None)
        anchor = self.directions(whole, start, key) if local_optimizer.anchored else None
        total, _ = jax.lax.fori_loop(0, tau, step, (nothing, local_optimizer.begin(nothing.step)))
        return total

    def no_directions(self, client: Client, like: XYV, key: Array) -> Directions:
        """Return zeros, where sums of directions begin."""
        shapes = jax.eval_shape(lambda key: self.directions(client, like, key), key)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @abstractmethod
    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """Return the three directions at `local`, on the samples that the key draws."""

    @property
    @abstractmethod
    def costs(self) -> tuple[int, int]:
        """How many gradients, and how many products with ∇²g, the three directions cost at one point."""

    def counted(self, total: Directions, tau: int | Array, evaluations: int = 1, more: int = 0) -> Reply:
        """Make the reply with `total.step`, mean losses, and the costs of evaluations·τ directions and `more`."""
        metrics = {"outer_loss": total.outer_loss / tau, "inner_loss": total.inner_loss / tau}
        (gradients, products), times = self.costs, evaluations * tau + more
        return Reply(total.step, metrics=metrics, gradients=gradients * times, hvps=products * times)


class LocalDirections(JointSteps):
    """A method whose clients step on x, y and v at once, along directions with exact products with ∇²g."""

    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """Return the three directions at `local`, on the samples that the key draws."""
        if not self.independent_batches:
            outer_key, inner_key = jax.random.split(key)
            return directions(client.problem, local, client.outer_batch(outer_key), client.inner_batch(inner_key))
        keys = jax.random.split(key, 5)
        outer_draw = [client.outer_batch(k) for k in keys[:2]]
        inner_draw = [client.inner_batch(k) for k in keys[2:]]
        system, hyper = (outer_draw[0], inner_draw[0]), (outer_draw[1], inner_draw[1])
        return independent_directions(client.problem, local, inner_draw[2], system, hyper)

    @property
    def costs(self) -> tuple[int, int]:
        return 3 if self.independent_batches else 2, 2


def descend(point: XYV, lr: XYV, direction: XYV) -> XYV:
    """Return point − lr·direction, each variable with its own step size, in the point's own dtypes."""

    def moved(size: Any, tree: PyTree, d: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, down: leaf - (size * down).astype(leaf.dtype), tree, d)

    return XYV(*map(moved, lr, point, direction))
