"""CorrectedFBO: a variant of ShroFBO in which clients do not drift apart, however many local steps they make.

If clients differ, the local steps of a client lead towards the solution of this client's own problem. So with τ > 1
local steps, SimFBO and ShroFBO end at a distance from the solution of the whole federation. CorrectedFBO corrects the
direction d = (d_x, d_y, d_v) of each local step: it subtracts the client's direction at the beginning of the round, and
adds m, the mean of all clients' directions in the round before. Federated SVRG makes the same kind of correction for a
problem with a single loss.

The directions d_i, the weights a_{i,k} and p_i, the cohort C of P out of M clients, and ρ are defined as for SimFBO and
ShroFBO (simfbo.py). A round is

    z_0 = z = (x, y, v),     d̃_k = d_i(z_k; ζ_k) − d_i(z; ζ_k) + m     the step of the client's path at z_k
    h_i = Σ_k a_{i,k} d_i(z_k; ζ_k) / ‖a_i‖₁                           the reply: directions without correction
    z ← z − γ ρ Σ_{i∈C} (M/P) p_i h_i,     m ← Σ_{i∈C} (M/P) p_i h_i   at the server

If all clients take part with full batches, a round changes nothing exactly if z is a solution and m = 0. For at a
solution z* with m = 0 all d̃_k are 0. So clients stay at z*, and the mean of their replies is
Σ p_i d_i(z*) = 0, whatever the τ_i are. Conversely, if a round changes neither z nor m, the mean of the replies is 0,
and so is m. Then clients stay at z, their replies are the d_i(z), and the mean of these is 0.

With cohorts or mini-batches, m contains the noise of the draws, and a run ends near the solution. Clients keep nothing
between rounds, and their replies are as long as those of ShroFBO.

Step sizes have to be small enough, since the new m depends on the old m: replies are means over paths, and the paths
follow m. Let η and γ be the step sizes of the clients and of the server. Suppose first that all clients have the same τ
and the same Hessian, the number λ. With plain steps, and with e = y − y* (or v − v*), a round is

    m ← λ e − β m,   e ← e − γ ρ (λ e − β m),     β = 1 − (1 − (1 − ηλ)^τ)/(τηλ) ≤ ηλ(τ − 1)/2

The eigenvalues of this linear map are inside the unit circle exactly if β < 1 and γρλ/2 + β < 1. The condition
γρλ + ηλ(τ − 1) < 2 is therefore sufficient.

If τ_i and the Hessians A_i differ, the means Ā = Σ p_i A_i and B̄ = Σ p_i β_i(A_i) take the place of λ and β in this
map. Let μ be one of its eigenvalues, and scale the eigenvector so that its part m has length 1. With a = ⟨m, Ām⟩ and
b = ⟨m, B̄m⟩, this eigenvalue satisfies μ² + (γρa + b − 1)μ − b = 0. Here a is at most the largest λ, and b is at most
the largest β. So the condition is still sufficient with L, the largest eigenvalue of all A_i, in place of λ, and with
the largest τ_i in place of τ.

The method was developed for this library. Its correction follows Konečný et al., "Federated Optimization: Distributed
Machine Learning for On-Device Intelligence", 2016, arXiv:1610.02527. Sai Praneeth Karimireddy et al., "Mime: Mimicking
Centralized Stochastic Algorithms in Federated Learning", 2020, arXiv:2008.03606, also correct local steps by quantities
that the server computed after earlier rounds. For bilevel problems, FedMSA corrects steps on x, y and v by momenta with
reduced variance (Davoud Ataee Tarzanagh, Mingchen Li, Pranay Sharma, Samet Oymak, "Federated Multi-Sequence Stochastic
Approximation with Local Hypergradient Estimation", 2023, arXiv:2306.01648). CorrectedFBO is not an implementation of
FedMSA.

Messages: the server sends x, y, v and m, and clients reply with vectors of the shapes of x, y and v, and two numbers.

Checked in tests/algorithms/test_corrected.py (the closed form of the solution, a round written out, stability) and
tests/engines/test_agreement.py.
"""

from typing import NamedTuple

import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import LIKE_XYV
from fedbilevel.algorithms.simfbo import REPLY, Normalised, RobustState
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import step_sizes
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import StepSizes
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XYV, PyTree


class State(NamedTuple):
    """Hold the server's state of CorrectedFBO."""

    inside: RobustState
    mean: XYV  # m, the mean direction of the round before

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class CorrectedFBO(Normalised):
    """Run ShroFBO, and correct local steps by the mean direction of the round before, so that clients do not drift.

    Args:
        client_lr: η, a client's step sizes for x, y and v: numbers or schedules over rounds; a single value serves all
            three. With plain steps or momentum, rounds on y and v are stable if γρL + η(max‖a_i‖₁ − 1)L < 2. Here γ is
            the server's step size, L is the largest eigenvalue of the clients' inner Hessians, ‖a_i‖₁ is τ_i for plain
            steps, and ρ is the mean of the ‖a_i‖₁. Each step size that is None is a twentieth of the server's step
            size.
    """

    name = "corrected-fbo"
    facts = Facts(
        paper="after Konečný et al. 2016, arXiv:1610.02527",
        needs="g strongly convex in y; products of vectors with its second derivatives",
        good_for="clients that differ and make many local steps: if all take part with full batches, it ends at the "
        "solution",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="4τ",
        cost="two gradients of g, and two joint passes, each for f's gradient and both products with ∇²g",
        bias="nothing",
    )
    allows = Allows(
        late=No("its clients' paths follow the mean direction of the last round, and late replies follow older ones"),
        submodels=UnitPolicy(),
        local_x=No("it needs x on the server: clients' step on it would be γ_x ρ h_i, and only the server has ρ"),
        own_y=No("leaves of y that are a client's own have no mean direction by which to correct its steps on them"),
    )

    client_lr: StepSizes = step_sizes(default=None, own=True, adaptive="short", tied="server_lr")

    def validate(self) -> None:
        allowed = "plain, momentum, proximal or mixed steps, since this method already corrects all directions"
        require(not self.local_optimizer.anchored, f"{self.label}.local_optimizer", "anchored", allowed)

    def init(self, x: PyTree, y: PyTree) -> State:
        inside = self.robust_start(x, y)
        return State(inside, optax.tree.zeros_like(inside.iterate))

    @phase(takes=(LIKE_XYV, LIKE_XYV), gives=REPLY, measures=True)
    def corrected_updates(self, client: Client, at: tuple[XYV, XYV], key: Array) -> Reply:
        """Take τ_i corrected steps from z. Reply with h_i, the weighted mean of the directions on the path, and ‖a_i‖₁.

        The message is (z, m). The steps are corrected, and h_i is the mean of the directions without the correction.
        """
        start, mean = at
        return self.normalised(client, self.own_updates(client, start, key, mean))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        at = state.inside.iterate, state.mean
        replies = fed.mean(self.corrected_updates, at, key, unbiased=True)
        return State(self.robust_step(fed, state.inside, replies), replies[0])
