"""FedLin and FedAvg: the ordinary federated problem min over x of F(x) = Σ p_i f_i(x), without an inner problem.

    FedLin   q = mean_i ∇f_i(x; ξ_i)                                                                    one exchange
             x_{i,ν+1} = x_{i,ν} − (α/τ_i) [∇f_i(x_{i,ν}; ξ_ν) − ∇f_i(x; ξ_ν) + q]
             x ← mean_i x_{i,τ_i}                                                                       one exchange
    FedAvg   x_{i,ν+1} = x_{i,ν} − η ∇f_i(x_{i,ν}; ξ_ν);  x ← mean_i x_{i,τ_i}                          one exchange

FedLin is FedNest's FedOut without an inner problem. The minimiser x* is its fixed point for any number of local steps.
The fixed point of FedAvg is another point if clients differ and τ > 1.

Departures from the papers:
1. Server and clients exchange changes. FedAvg's server adds Σ p̃_i (x_{i,τ} − x) to x, with p̃_i = (M/P) p_i if P of M
   clients take part in the round. For equal weights or full participation this gives the mean of the x_{i,τ}. For
   unequal weights, the sum is unbiased too. In FedLin, the change of every client contains the part −αq. FedLin's
   server adds this part once, and then the mean of the rest of the clients' changes, their drifts (see FedNest).
2. A client's step size in FedLin is α/τ_i, so that different numbers of local steps do not re-weight the clients. In
   FedAvg the step size is η for any τ_i, as in its paper, so that different numbers of local steps re-weight the
   clients.
3. A client of FedLin makes its first corrected step along q and computes no gradient for it, since the two gradients in
   the bracket are then equal. The numbers do not change. Replies are not compressed.
4. Batches are drawn with replacement. With `local_epochs` they are drawn without replacement, as in FedAvg's paper.

Checked in tests/algorithms/test_single_level.py (closed forms of both fixed points), test_local_epochs.py and
tests/engines/test_agreement.py.
"""

from typing import ClassVar

import jax
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import Gradient, LocalWork, corrected_drift, local_descent
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client, Draw
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.facts import Allows, Facts
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Number
from fedbilevel.core.problem import Problem, SingleLevel
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, PyTree, move


class LocalDescent(LocalWork, Algorithm):
    """Base class of FedLin and FedAvg, with their common fields and start.

    Args:
        batch_size: the number of samples for a step. They are drawn with replacement, but without replacement
            if the client makes `local_epochs`. None: all samples.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = (SingleLevel,)
    steps_on = "outer"

    batch_size: int | None = positive_integer(default=32, optional=True)

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    def gradient_of(self, client: Client) -> Gradient:
        """Return the function (x, draw) -> ∇f_i(x), in the shape of x, on the samples of a draw."""

        def gradient(x: PyTree, draw: Draw) -> PyTree:
            return jax.grad(client.problem.outer)(x, None, client.outer_batch(draw))

        return gradient


class FedLin(LocalDescent):
    """Run federated SVRG: local steps with a correction for the differences between clients.

    Aritra Mitra, Rayana Jaafar, George J. Pappas, Hamed Hassani. "Linear Convergence in Federated Learning: Tackling
    Client Heterogeneity and Sparse Gradients". NeurIPS 2021, arXiv:2102.07053. As federated SVRG: Jakub Konečný et al.,
    arXiv:1610.02527.

    Args:
        outer_lr: α, the total size of a client's τ_i steps; each has the size α/τ_i.
    """

    name = "fedlin"
    facts = Facts(
        paper="Mitra et al. 2021, arXiv:2102.07053",
        good_for="different clients: with full batches it converges to x* itself",
        exchanges="two",
        up="2 like x",
        cost="two gradients of f",
        bias="nothing",
    )
    allows = Allows(late=("outer_gradient", "corrected_outer_descent"), submodels=UnitPolicy())

    outer_lr: Number = positive(default=0.1)

    @phase(takes="x", gives="x")
    def outer_gradient(self, client: Client, x: PyTree, key: Array) -> Reply:
        """Reply with the client's gradient ∇f_i(x), in the shape of x; the mean of these replies is q."""
        batch = client.outer_batch(key)
        loss, gradient = jax.value_and_grad(client.problem.outer)(x, None, batch)
        return Reply(gradient, metrics={"outer_loss": loss}, gradients=1)

    @phase(takes=("x", "x"), gives="x")
    def corrected_outer_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of x after τ_i corrected steps without the part −αq, which all clients share."""
        x, q = at
        steps = self.steps(client, key)
        drift = corrected_drift(self.gradient_of(client), x, q, steps, self.outer_lr)
        return Reply(drift, gradients=2 * (steps.tau - 1))

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        gradient_key, descent_key = jax.random.split(key)
        q = fed.mean(self.outer_gradient, state.x, gradient_key, unbiased=True)
        drift = fed.mean(self.corrected_outer_descent, (state.x, q), descent_key)
        return state._replace(x=optax.tree.add(move(state.x, -self.outer_lr, q), drift))


class FedAvg(LocalDescent):
    """Make local gradient steps, then average the clients' x.

    H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas. "Communication-Efficient
    Learning of Deep Networks from Decentralized Data". AISTATS 2017, arXiv:1602.05629.

    Args:
        lr: η, the size of a client's local step.
    """

    name = "fedavg"
    facts = Facts(
        paper="McMahan et al. 2017, arXiv:1602.05629",
        good_for="similar clients and expensive exchanges; biased if clients differ and τ > 1",
        exchanges="one",
        up="1 like x",
        cost="a gradient of f",
        bias="drift if τ > 1",
    )
    allows = Allows(late=("outer_descent",), submodels=UnitPolicy())

    lr: Number = positive(default=0.1, own=True)

    @phase(takes="x", gives="x")
    def outer_descent(self, client: Client, x: PyTree, key: Array) -> Reply:
        """Reply with the change of x after τ_i plain gradient steps, in the shape of x."""
        steps = self.steps(client, key)
        return Reply(local_descent(self.gradient_of(client), x, steps, self.lr), gradients=steps.tau)

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        change = fed.mean(self.outer_descent, state.x, key, unbiased=True)
        return state._replace(x=optax.tree.add(state.x, change))
