"""FedAvg-S: local descent on x and local ascent on y together, for minimax problems, min_x max_y F(x, y).

Charlie Hou, Kiran K. Thekumparampil, Giulia Fanti, Sewoong Oh. "Efficient Algorithms for Federated Saddle Point
Optimization". 2021, arXiv:2102.06333. The method is federated averaging for saddle points. This paper and FedNest's
paper use it as a baseline.

    x_{i,ν+1} = x_{i,ν} − (α/τ_i) ∇x f_i(x_{i,ν}, y_{i,ν}; ξ_ν)
    y_{i,ν+1} = y_{i,ν} + (β/τ_i) ∇y f_i(x_{i,ν}, y_{i,ν}; ξ_ν)       both from the same point, on the same samples
    (x, y) ← mean_i (x_{i,τ_i}, y_{i,τ_i})                                                              one exchange

For τ = 1 the fixed point is the saddle point. For τ > 1 it is another point if clients differ.

Departures from the paper:
1. Server and clients exchange changes: the server adds Σ p̃_i (z_{i,τ} − z) to z = (x, y), with p̃_i = (M/P) p_i. Here
   p_i is the client's weight, and P of M clients take part in the round. For equal weights or full participation this
   gives the mean of the z_{i,τ}. For unequal weights, the sum is unbiased too.
2. A client's step sizes are α/τ_i and β/τ_i, so that different numbers of local steps do not re-weight the clients.

Checked in tests/algorithms/test_fedavg_s.py (closed form of the fixed point) and tests/engines/test_agreement.py.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LocalWork
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.facts import Allows, Facts
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Number
from fedbilevel.core.problem import Minimax, Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, PyTree, move


class FedAvgS(LocalWork, Algorithm):
    """Run FedAvg on both variables of a saddle-point problem together: descent on x, and ascent on y.

    Args:
        outer_lr: α, the total size of a client's τ_i steps on x; each has the size α/τ_i.
        inner_lr: β, the total size of a client's τ_i steps on y; each has the size β/τ_i.
        batch_size: the number of samples for a step. They are drawn with replacement, but without replacement
            if the client makes `local_epochs`. None: all samples.
    """

    name = "fedavg-s"
    facts = Facts(
        paper="Hou et al. 2021, arXiv:2102.06333",
        good_for="similar clients and expensive exchanges; biased if clients differ and τ > 1",
        exchanges="one",
        up="1 like x, 1 like y",
        cost="a gradient of f in (x, y)",
        bias="drift if τ > 1",
    )
    allows = Allows(late=("descent_ascent",), submodels=UnitPolicy())
    solves: ClassVar[tuple[type[Problem], ...]] = (Minimax,)
    steps_on = "outer"

    outer_lr: Number = positive(default=0.1, own=True)
    inner_lr: Number = positive(default=0.1, own=True)
    batch_size: int | None = positive_integer(default=32, optional=True)

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    @phase(takes=XY("x", "y"), gives=XY("x", "y"))
    def descent_ascent(self, client: Client, start: XY, key: Array) -> Reply:
        """Take τ_i simultaneous steps, of descent on x and of ascent on y. Reply with the changes of x and y."""
        tau, draw = self.steps(client, key)
        value_and_gradients = jax.value_and_grad(client.problem.outer, (0, 1))

        def step(k: Array, carry: tuple[XY, Array]) -> tuple[XY, Array]:
            change, total = carry
            x, y = optax.tree.add(start, change)
            loss, (dx, dy) = value_and_gradients(x, y, client.outer_batch(draw(k)))
            moved = XY(move(change.x, -self.outer_lr / tau, dx), move(change.y, self.inner_lr / tau, dy))
            return moved, total + loss

        batch = jax.eval_shape(lambda k: client.outer_batch(draw(k)), 0)
        loss = jax.eval_shape(client.problem.outer, *start, batch)
        begin = (optax.tree.zeros_like(start), jnp.zeros((), loss.dtype))
        change, total = jax.lax.fori_loop(0, tau, step, begin)
        return Reply(change, metrics={"outer_loss": total / tau}, gradients=tau)

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        return optax.tree.add(state, fed.mean(self.descent_ascent, state, key, unbiased=True))
