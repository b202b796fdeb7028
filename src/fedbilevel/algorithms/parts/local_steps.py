"""Make the local steps of a client, on one variable or on x, y and v together, by one of several local optimizers.

The optimizers are those of Jianyu Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization" (FedNova), NeurIPS 2020, section 4. Their total update is a linear combination of the directions d_k:

    z_0 − z_τ = η Σ_{k<τ} a_k d_k,   where d_k is computed at z_k

Except for plain steps, the a_k depend on τ. The same holds for the iterate after k < τ steps,
z_k = z_0 − η Σ_{j<k} a_j d_j: its a_j are those for k steps in all, and not those for τ steps. A client therefore does
not store the a_k. It stores the sum q of its steps so far and the memory of its optimizer. The sum of the a_k, ‖a‖₁,
depends only on τ, and not on η and the gradients. The quotient q/‖a‖₁ is a weighted mean of the d_k.
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
from fedbilevel.core.field_types import Number, StepSizes
from fedbilevel.core.tree import XYV, PyTree, move, scaled
from fedbilevel.oracles.products import Directions, directions, independent_directions

Gradient = Callable[[PyTree, Draw], PyTree]
"""A function (point, draw) -> the gradient of the client's loss at this point, on the samples of the draw."""
Count = int | Array
LIKE_XYV = XYV("x", "y", "y")
"""The declaration of an `XYV` that a phase takes or gives: its entries have the shapes of x, y and y (see `phase`)."""


class LocalSteps(NamedTuple):
    """Hold the number of a client's local steps and their samples."""

    tau: Count
    draw: Callable[[Array | int], Draw]  # maps k to the samples of step k

    @classmethod
    def drawn(cls, tau: Count, key: Array) -> LocalSteps:
        """Return `tau` steps. Each step draws samples with replacement, by its own key, derived from `key`."""
        return cls(tau, partial(jax.random.fold_in, key))


class LocalWork(Part):
    """Set the number of local steps that a client makes when it is asked, and their samples.

    An epoch goes through a client's samples in a new random order, with a batch of B samples for each step. E epochs
    take E⌈n_i/B⌉ steps for n_i samples; without short batches they take E⌊n_i/B⌋ steps, and at least E. A short batch
    has the same weight as any other batch: a step takes the mean over the samples of its batch.

    Args:
        local_steps: τ_i, the number of a client's local steps in a round; `Clients.local_steps` takes precedence.
        local_epochs: E, the number of passes through the client's samples without replacement, in place of
            `local_steps`; None: `local_steps` is used.
        drop_last: whether an epoch leaves out its short last batch, unless it has no other batch.
    """

    steps_on: ClassVar[Literal["outer", "inner"]]
    """The loss whose samples the steps take."""

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
        """Return a client's local steps, whose samples are drawn by the key."""
        if self.local_epochs is None:
            return LocalSteps.drawn(self.tau(client), key)
        samples: Samples = getattr(client, self.steps_on)
        assert client.batch_size is not None
        return LocalSteps(*samples.in_epochs(key, self.local_epochs, client.batch_size, self.drop_last))


def local_descent(gradient: Gradient, start: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Return the change of `start` after τ gradient steps of size lr, which are FedAvg's local steps.

    The loop carries the iterate, and the start is subtracted at the end. In float32 this gives the change an error of
    10^-7 of the iterate. The addition of the change to the server's iterate would cause an error of this size anyway.
    """

    def step(k: Array, point: PyTree) -> PyTree:
        return move(point, -lr, gradient(point, steps.draw(k)))

    return optax.tree.sub(jax.lax.fori_loop(0, steps.tau, step, start), start)


def corrected_drift(gradient: Gradient, start: PyTree, mean_gradient: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Return the drift of federated SVRG's local steps: their change without the part −lr·q, which all clients share.

    A step has the size lr/τ and the direction ∇(point; ζ_ν) − ∇(start; ζ_ν) + q, where ∇ is the client's gradient, ζ_ν
    are the samples of step ν, and q is the mean gradient of all clients at the start. For τ = 1 the drift is zero.

    Jakub Konečný et al., arXiv:1610.02527; as FedLin: Aritra Mitra et al., NeurIPS 2021.
    """

    tau = steps.tau

    def step(k: Array, drift: PyTree) -> PyTree:
        point = move(optax.tree.add(start, drift), -lr * k / tau, mean_gradient)
        draw = steps.draw(k)
        return move(drift, -lr / tau, optax.tree.sub(gradient(point, draw), gradient(start, draw)))

    return jax.lax.fori_loop(1, tau, step, optax.tree.zeros_like(start))  # the first step is along q itself


def mean_gradient(gradient: Gradient, start: PyTree, steps: LocalSteps, lr: Any) -> PyTree:
    """Return the mean gradient (1/τ) Σ_k ∇(z_k) along τ local steps z_{k+1} = z_k − lr ∇(z_k) from `start`."""

    def step(k: Array, total: PyTree) -> PyTree:
        return optax.tree.add(total, gradient(move(start, -lr, total), steps.draw(k)))

    total = jax.lax.fori_loop(0, steps.tau, step, optax.tree.zeros_like(start))
    return jax.tree.map(lambda leaf: leaf / steps.tau, total)


class LocalOptimizer(Part):
    """Base class of rules for local steps. A client's steps add up to −η Σ_k a_k d_k, and the rule gives the a_k.

    After steps from z_0 the iterate is z_0 − ηq with q = Σ_k a_k d_k. Here d_k is the direction of step k, a_k ≥ 0 its
    coefficient, and η the step size.
    """

    anchored: ClassVar[bool] = False
    """Whether d_k is d(z_k; ζ_k) − d(z_0; ζ_k) + d(z_0), with d(z_0) on all samples; otherwise d_k is d(z_k; ζ_k)."""

    def begin(self, like: PyTree) -> PyTree:
        """Return the optimizer's memory before the first step; None: it has no memory.

        `like` is a tree with the shapes of q and d, which are the same.
        """
        return None

    @abstractmethod
    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps and the next memory.

        q is the sum so far, and d is the gradient at the present point.
        """

    def total(self, tau: Count) -> Array:
        """Return ‖a‖₁ = Σ_{k<τ} a_k, the sum of the coefficients of `tau` steps."""
        return added_up(self, tau)


class Plain(LocalOptimizer):
    """Make plain gradient steps: every direction has the coefficient a_k = 1 in the sum of the steps."""

    kind: ClassVar[str] = "plain"

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps, q + d, for the sum q so far and the gradient d; there is no memory."""
        return optax.tree.add(q, d), None

    def total(self, tau: Count) -> Array:
        """Return ‖a‖₁ = τ, the sum of the coefficients of τ steps."""
        return jnp.asarray(tau, float)


class Anchored(LocalOptimizer):
    """Make plain steps with local variance reduction as in SVRG: d_k = d(z_k; ζ_k) − d(z_0; ζ_k) + d(z_0).

    d(z_0) is on all samples of the client, and the other two terms are on the samples ζ_k of the step.
    """

    kind: ClassVar[str] = "anchored"
    anchored: ClassVar[bool] = True

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps, q + d, for the sum q so far and a corrected direction d; there is no memory."""
        return optax.tree.add(q, d), None


class Momentum(LocalOptimizer):
    """Make steps with momentum (heavy ball), from m = 0: m ← μm + d, z ← z − ηm.

    Here d is the direction of a step, and η the step size. After τ steps, the k-th direction, k = 0, 1, …, has the
    coefficient a_k = (1 − μ^{τ−k}) / (1 − μ) in the sum of the steps.

    Args:
        decay: μ, the factor of the earlier directions in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "momentum"

    decay: Number = fraction(default=0.9, own=True)

    def begin(self, like: PyTree) -> PyTree:
        """Return the momentum m before the first step: zeros in the shapes of `like`."""
        return optax.tree.zeros_like(like)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps, q + m, and the next momentum m = μ·memory + d.

        q is the sum so far, and d is the gradient.
        """
        m = move(d, self.decay, memory)
        return optax.tree.add(q, m), m


class Proximal(LocalOptimizer):
    """Make FedProx's steps, z ← z − ηd − α(z − z_0), which are gradient steps on the loss plus (α/2η)‖z − z_0‖².

    Here d is the direction of a step, η the step size, and z_0 the start. After τ steps, the k-th direction, k = 0, 1,
    …, has the coefficient a_k = (1 − α)^{τ−1−k} in the sum of the steps.

    Args:
        pull: α, the share of the way back to z_0 in each step, strictly between 0 and 1.
    """

    kind: ClassVar[str] = "proximal"

    pull: Number = fraction(default=0.1, own=True)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps, (1 − α) q + d with α = `pull`; there is no memory.

        q is the sum so far, and d is the gradient.
        """
        return optax.tree.add(scaled(1 - self.pull, q), d), None


class Mixed(LocalOptimizer):
    """Give each client a local optimizer of its own, all by the rule m ← μm + d, z ← z − ηm − α(z − z_0).

    Here d is the direction of a step, η the step size, and z_0 the start. If both μ and α are 0, a client makes plain
    steps. If only μ is above 0, it makes the steps of heavy ball, and if only α is above 0, the steps of FedProx. The
    numbers of each client are set by
    `Clients(own={"local_optimizer.decay": [0, 0.9], "local_optimizer.pull": [0.1, 0]})`.

    Args:
        decay: μ, the factor of the earlier directions in each step, at least 0 and below 1.
        pull: α, the share of the way back to z_0 in each step, at least 0 and below 1.
    """

    kind: ClassVar[str] = "mixed"

    decay: Number = share(default=0.0, own=True)
    pull: Number = share(default=0.0, own=True)

    def begin(self, like: PyTree) -> PyTree:
        """Return the momentum m before the first step: zeros in the shapes of `like`."""
        return optax.tree.zeros_like(like)

    def step(self, q: PyTree, memory: PyTree, d: PyTree) -> tuple[PyTree, PyTree]:
        """Return the next sum of steps, (1 − α) q + m, and the next momentum m = μ·memory + d.

        q is the sum so far, and d is the gradient.
        """
        m = move(d, self.decay, memory)
        return optax.tree.add(scaled(1 - self.pull, q), m), m


def added_up(optimizer: LocalOptimizer, tau: Count) -> Array:
    """Return Σ_{k<τ} a_k, computed as the q that τ gradients of 1 would give.

    This sum of positive numbers is exact up to rounding. Closed forms, such as (1 − (1 − α)^τ)/α, lose all digits in
    float32 if α or 1 − μ is small.
    """
    unit = jnp.ones(())

    def step(k: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return optimizer.step(*carry, unit)

    total, _ = jax.lax.fori_loop(0, tau, step, (jnp.zeros(()), optimizer.begin(unit)))
    return jnp.asarray(total)


class JointSteps(Algorithm):
    """Base class of methods whose clients step on x, y and v together, with their fields and local steps.

    Args:
        local_steps: τ, the number of a client's local steps in a round; `Clients.local_steps` takes precedence.
        batch_size: the number of samples that a client draws for each loss, with replacement; None: all samples.
        client_lr: η, a client's step sizes for x, y and v. Each is a number or a schedule over rounds, and a single
            value serves all three. A step size of None is adapted (`AdaptiveSteps`).
        independent_batches: whether samples are drawn separately for each of the three directions; False: a single draw
            of outer and of inner samples serves all three.
    """

    local_steps: int = positive_integer(default=5)
    batch_size: int | None = positive_integer(default=32, optional=True)
    client_lr: StepSizes = step_sizes(own=True)
    independent_batches: bool = static(default=False)

    def local_sum(
        self,
        client: Client,
        start: XYV,
        tau: int | Array,
        key: Array,
        local_optimizer: LocalOptimizer,
        mean: XYV | None = None,
    ) -> Directions:
        """Return q after `tau` local steps from `start`, and the sums of both losses over the steps.

        The vector q = Σ_k a_k d_k is the sum of the directions d_k of the steps, where the local optimizer sets the
        weights a_k. The local iterate z_k after k steps is start − η·q, with the q of these steps and the step sizes η.
        The direction d_k = d(z_k; ζ_k) is computed at z_k from the samples ζ_k of step k. If a `mean` m is given, the
        client steps along d(z_k; ζ_k) − d(start; ζ_k) + m instead, and q is still the sum of the directions d(z_k; ζ_k)
        on this path.
        """
        anchor = mean
        if local_optimizer.anchored:
            anchor = self.directions(replace(client, batch_size=None), start, key).step

        def step(k: Array, carry: tuple[Directions, PyTree]) -> tuple[Directions, PyTree]:
            # `sums` has the sum of the steps on the path, and if there is a mean, also the sum of the directions on the
            # path
            (sums, outer_loss, inner_loss), memory = carry
            local, samples = descend(start, self.client_lr, sums[0]), jax.random.fold_in(key, k)
            now = self.directions(client, local, samples)
            along = now.step
            if anchor is not None:
                there = self.directions(client, start, samples)
                along = optax.tree.add(optax.tree.sub(now.step, there.step), anchor)
            sums, memory = local_optimizer.step(sums, memory, (along,) if mean is None else (along, now.step))
            return Directions(sums, outer_loss + now.outer_loss, inner_loss + now.inner_loss), memory

        nothing = self.no_directions(client, start, key)
        zeros: PyTree = (nothing.step,) * (1 if mean is None else 2)
        begin = nothing._replace(step=zeros), local_optimizer.begin(zeros)
        total, _ = jax.lax.fori_loop(0, tau, step, begin)
        return total._replace(step=total.step[-1])

    def no_directions(self, client: Client, like: XYV, key: Array) -> Directions:
        """Return zeros in the shapes of the directions at the point `like`, to begin a sum of directions."""
        shapes = jax.eval_shape(lambda key: self.directions(client, like, key), key)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    @abstractmethod
    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """Return the three directions at `local`, on the samples that the key draws."""

    @property
    @abstractmethod
    def costs(self) -> tuple[int, int]:
        """Return how many gradients and products with ∇²g the directions of x, y and v take at one point."""

    def counted(self, total: Directions, tau: int | Array, evaluations: int = 1, more: int = 0) -> Reply:
        """Return a reply with `total.step`, the mean losses, and the costs of `evaluations`·τ + `more` evaluations.

        An evaluation computes the three directions at one point.
        """
        metrics = {"outer_loss": total.outer_loss / tau, "inner_loss": total.inner_loss / tau}
        (gradients, products), times = self.costs, evaluations * tau + more
        return Reply(total.step, metrics=metrics, gradients=gradients * times, hvps=products * times)


class LocalDirections(JointSteps):
    """Base class of methods that compute directions in x, y and v with exact Hessian-vector products of g."""

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


class FirstDerivatives(JointSteps):
    """Base class of methods whose directions in x, y and v are derivatives of one function of a client's losses.

    The class draws the samples of a local step, and a subclass defines `slopes`.
    """

    gradients: ClassVar[int]
    """The number of gradients of f and g for the three directions on one draw."""

    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """Return the directions for x, y and v at the point `local`, on samples that the key draws."""
        draws = 3 if self.independent_batches else 1
        keys = jax.random.split(key, 2 * draws)
        found = [self.slopes(client, local, outer, inner) for outer, inner in zip(keys[::2], keys[1::2], strict=True)]
        d_x, d_y, d_v = (found[k % draws].step[k] for k in range(3))
        return found[0]._replace(step=XYV(d_x, d_y, d_v))

    @abstractmethod
    def slopes(self, client: Client, local: XYV, outer_key: Array, inner_key: Array) -> Directions:
        """Return the three directions at `local` on one draw of outer and one of inner samples."""

    @property
    def costs(self) -> tuple[int, int]:
        return self.gradients * (3 if self.independent_batches else 1), 0


def descend(point: XYV, lr: XYV, direction: XYV) -> XYV:
    """Return point − lr·direction, with a step size for each variable, in the dtypes of the point."""

    def moved(size: Any, tree: PyTree, d: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, down: leaf - (size * down).astype(leaf.dtype), tree, d)

    return XYV(*map(moved, lr, point, direction))
