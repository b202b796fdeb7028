"""FedLin and FedAvg: the ordinary federated problem min over x of F(x) = Σ p_i f_i(x), without an inner problem.

    FedLin   q = mean_i ∇f_i(x; ξ_i)                                                                    one exchange
             x_{i,ν+1} = x_{i,ν} − (α/τ_i) [∇f_i(x_{i,ν}; ξ_ν) − ∇f_i(x; ξ_ν) + q]
             x ← mean_i x_{i,τ_i}                                                                       one exchange
    FedAvg   x_{i,ν+1} = x_{i,ν} − η ∇f_i(x_{i,ν}; ξ_ν);  x ← mean_i x_{i,τ_i}                          one exchange

FedLin is FedNest's FedOut without an inner problem. x* is its fixed point with any number of local
steps; FedAvg's is another point where clients differ and τ > 1.

Departures from the papers:
1. Server and clients exchange changes, Σ p̃_i (x_{i,τ} − x) with p̃_i = (M/P) p_i, which for equal weights or full
   participation is the mean of x_{i,τ}, and is unbiased for unequal weights too. FedLin's server takes the common
   part −αq itself, and averages what clients drift beyond it: see FedNest.
2. FedLin's client steps by α/τ_i, so that unequal work does not re-weight the clients; FedAvg's, as in its paper, by η
   whatever τ_i is, and does.
3. FedLin's first corrected step is along q itself, its correction being zero whatever is drawn; nothing is compressed.
4. Batches are drawn with replacement; as in FedAvg's paper with `local_epochs`.

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
from fedbilevel.core.problem import Problem, SingleLevel
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, PyTree, move


class LocalDescent(LocalWork, Algorithm):
    """Base of FedLin and FedAvg: the fields and the start.

    Args:
        batch_size: samples per draw, with replacement but in `local_epochs`; None: all.
    """

    solves: ClassVar[tuple[type[Problem], ...]] = (SingleLevel,)
    steps_on = "outer"

    batch_size: int | None = positive_integer(default=32, optional=True)

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    def gradient_of(self, client: Client) -> Gradient:
        """Make the function (x, draw) -> ∇f_i(x) on drawn samples."""

        def gradient(x: PyTree, draw: Draw) -> PyTree:
            return jax.grad(client.problem.outer)(x, None, client.outer_batch(draw))

        return gradient


class FedLin(LocalDescent):
    """Federated SVRG: local steps corrected for the difference between clients.

    Aritra Mitra, Rayana Jaafar, George J. Pappas, Hamed Hassani. "Linear Convergence in Federated Learning: Tackling
    Client Heterogeneity and Sparse Gradients". NeurIPS 2021, arXiv:2102.07053. As federated SVRG: Jakub Konečný et al.,
    arXiv:1610.02527.

    Args:
        outer_lr: α; a client's step is α/τ_i.
    """

    name = "fedlin"
    facts = Facts(
        paper="Mitra et al. 2021, arXiv:2102.07053",
        good_for="clients that differ: with full batches it ends at x* itself",
        exchanges="two",
        up="2 like x",
        cost="two gradients of f",
        bias="nothing",
    )
    allows = Allows(late=("outer_gradient", "corrected_outer_descent"), submodels=UnitPolicy())

    outer_lr: float = positive(default=0.1)

    @phase(takes="x", gives="x")
    def outer_gradient(self, client: Client, x: PyTree, key: Array) -> Reply:
        """Reply with ∇f_i, whose mean is q."""
        batch = client.outer_batch(key)
        loss, gradient = jax.value_and_grad(client.problem.outer)(x, None, batch)
        return Reply(gradient, metrics={"outer_loss": loss}, gradients=1)

    @phase(takes=("x", "x"), gives="x")
    def corrected_outer_descent(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the change of x by τ_i corrected steps, less −αq, which all clients have in common."""
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
    """Local gradient steps, then the mean of the clients' x.

    H. Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas. "Communication-Efficient
    Learning of Deep Networks from Decentralized Data". AISTATS 2017, arXiv:1602.05629.

    Args:
        lr: η, the size of each of a client's local steps.
    """

    name = "fedavg"
    facts = Facts(
        paper="McMahan et al. 2017, arXiv:1602.05629",
        good_for="clients that are alike, where exchanges are expensive; biased where clients differ and τ > 1",
        exchanges="one",
        up="1 like x",
        cost="a gradient of f",
        bias="drift where τ > 1",
    )
    allows = Allows(late=("outer_descent",), submodels=UnitPolicy())

    lr: float = positive(default=0.1, own=True)

    @phase(takes="x", gives="x")
    def outer_descent(self, client: Client, x: PyTree, key: Array) -> Reply:
        """Reply with the change of x by τ_i plain steps."""
        steps = self.steps(client, key)
        return Reply(local_descent(self.gradient_of(client), x, steps, self.lr), gradients=steps.tau)

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        change = fed.mean(self.outer_descent, state.x, key, unbiased=True)
        return state._replace(x=optax.tree.add(state.x, change))
