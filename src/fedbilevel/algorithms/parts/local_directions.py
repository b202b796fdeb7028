"""The local steps of a client on x, y and v at once: what all single-loop methods share."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.parts.local_optimizers import LocalOptimizer
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive_integer, static, step_sizes
from fedbilevel.core.fed import Reply
from fedbilevel.core.tree import XYV, PyTree
from fedbilevel.oracles.products import Directions, directions, independent_directions

LIKE = XYV("x", "y", "y")
"""What messages and replies are shaped like: the entries x, y and v of an `XYV` like x, y and y (see `phase`)."""


class LocalDirections(Algorithm):
    """A method whose clients step on x, y and v at once: the fields of these steps, and the three directions.

    Args:
        local_steps: τ, a client's local steps in a round; a number that the clients bring themselves
            (`Clients.local_steps`) takes precedence.
        batch_size: samples per draw for each loss, with replacement; None takes all samples.
        client_lr: η, a client's step sizes for x, y and v: numbers or schedules over rounds; one serves all three.
        independent_batches: draw samples of its own for each of the three directions; False: one draw of outer and one
            of inner samples serves all three.
    """

    local_steps: int = positive_integer(default=5)
    batch_size: int | None = positive_integer(default=32, optional=True)
    client_lr: XYV = step_sizes(default=XYV(x=0.01, y=0.1, v=0.1))
    independent_batches: bool = static(default=False)

    def local_sum(
        self, client: Client, start: XYV, tau: int | Array, key: Array, local_optimizer: LocalOptimizer
    ) -> Directions:
        """Σ_k a_k d_k along the local steps, and the sums of the two losses.

        The local iterate is start − η·q throughout, q being the sum if these were all the steps.
        """

        def step(k: Array, carry: tuple[Directions, PyTree]) -> tuple[Directions, PyTree]:
            total, memory = carry
            local = descend(start, self.client_lr, total.step)
            now = self.directions(client, local, jax.random.fold_in(key, k))
            q, memory = local_optimizer.step(total.step, memory, now.step)
            return Directions(q, total.outer_loss + now.outer_loss, total.inner_loss + now.inner_loss), memory

        nothing = self.no_directions(client, start, key)
        total, _ = jax.lax.fori_loop(0, tau, step, (nothing, local_optimizer.begin(nothing.step)))
        return total

    def directions(self, client: Client, local: XYV, key: Array) -> Directions:
        """The three directions at `local`, on the samples that the key draws."""
        if not self.independent_batches:
            outer_key, inner_key = jax.random.split(key)
            outer, inner = (
                client.outer_batch(outer_key, self.batch_size),
                client.inner_batch(inner_key, self.batch_size),
            )
            return directions(client.problem, local, outer, inner)
        keys = jax.random.split(key, 5)
        outer_draw = [client.outer_batch(k, self.batch_size) for k in keys[:2]]
        inner_draw = [client.inner_batch(k, self.batch_size) for k in keys[2:]]
        system, hyper = (outer_draw[0], inner_draw[0]), (outer_draw[1], inner_draw[1])
        return independent_directions(client.problem, local, inner_draw[2], system, hyper)

    def no_directions(self, client: Client, like: XYV, key: Array) -> Directions:
        """Zeros, where sums of directions begin."""
        shapes = jax.eval_shape(lambda key: self.directions(client, like, key), key)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def counted(self, total: Directions, tau: int | Array, evaluations: int = 1) -> Reply:
        """The reply to `total.step`: mean losses, and the costs of `evaluations` times τ directions."""
        metrics = {"outer_loss": total.outer_loss / tau, "inner_loss": total.inner_loss / tau}
        gradients = 3 if self.independent_batches else 2
        work = evaluations * tau
        return Reply(total.step, metrics=metrics, gradients=gradients * work, hvps=2 * work)


def descend(point: XYV, lr: XYV, direction: XYV) -> XYV:
    """point − lr·direction, each variable with its own step size, in the point's own dtypes."""

    def moved(size: Any, tree: PyTree, d: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, down: leaf - (size * down).astype(leaf.dtype), tree, d)

    return XYV(*map(moved, lr, point, direction))
