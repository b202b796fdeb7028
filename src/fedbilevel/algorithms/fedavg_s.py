"""FedAvg-S: local descent on x and ascent on y at once, for minimax problems, min over x of max over y of F(x, y).

Charlie Hou, Kiran K. Thekumparampil, Giulia Fanti, Sewoong Oh. "Efficient Algorithms for Federated Saddle Point
Optimization". 2021, arXiv:2102.06333. The baseline there, and of FedNest's paper: federated averaging carried over to
saddle points.

    x_{i,ν+1} = x_{i,ν} − (α/τ_i) ∇x f_i(x_{i,ν}, y_{i,ν}; ξ_ν)
    y_{i,ν+1} = y_{i,ν} + (β/τ_i) ∇y f_i(x_{i,ν}, y_{i,ν}; ξ_ν)       both from the same point, on the same samples
    (x, y) ← mean_i (x_{i,τ_i}, y_{i,τ_i})                                                              one exchange

The fixed point is the saddle point for τ = 1, another point where clients differ and τ > 1.

Departures from the paper:
1. Server and clients exchange changes, Σ p̃_i (z_{i,τ} − z) with p̃_i = (M/P) p_i, which for equal weights or full
   participation is the mean of z_{i,τ}, and is unbiased for unequal weights too.
2. A client's steps are α/τ_i and β/τ_i, so that unequal work does not re-weight the clients.

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
from fedbilevel.core.problem import Minimax, Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, PyTree, move


class FedAvgS(LocalWork, Algorithm):
    """FedAvg on both players of a saddle-point problem, simultaneously.

    Args:
        outer_lr: α; a client's step on x is α/τ_i.
        inner_lr: β; a client's step on y is β/τ_i.
        batch_size: samples per draw, with replacement but in `local_epochs`; None: all.
    """

    name = "fedavg-s"
    facts = Facts(
        paper="Hou et al. 2021, arXiv:2102.06333",
        good_for="clients that are alike, where exchanges are expensive; biased where clients differ and τ > 1",
        exchanges="one",
        up="1 like x, 1 like y",
        cost="a gradient of f in (x, y)",
        bias="drift where τ > 1",
    )
    allows = Allows(late=("descent_ascent",), submodels=UnitPolicy())
    solves: ClassVar[tuple[type[Problem], ...]] = (Minimax,)
    steps_on = "outer"

    outer_lr: float = positive(default=0.1, own=True)
    inner_lr: float = positive(default=0.1, own=True)
    batch_size: int | None = positive_integer(default=32, optional=True)

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    @phase(takes=XY("x", "y"), gives=XY("x", "y"))
    def descent_ascent(self, client: Client, start: XY, key: Array) -> Reply:
        """Take τ_i simultaneous steps, down on x and up on y; reply with the change of both."""
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
