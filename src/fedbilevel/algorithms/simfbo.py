"""SimFBO and ShroFBO: single-loop federated bilevel optimization with one exchange per round.

Yifan Yang, Peiyao Xiao, Kaiyi Ji. "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning". NeurIPS 2023, arXiv:2305.19442. Algorithm 1.

The server sends (x, y, v). Client i, for k = 0..τ_i − 1, steps all three at once                                (3)

    (y, v, x) ← (y, v, x) − a_k (η_y d_y, η_v d_v, η_x d_x)
    d_y = ∇y g_i        d_v = ∇²yy g_i v − ∇y f_i        d_x = ∇x f_i − ∇²xy g_i v

and replies with q_i = Σ_k a_k (d_y, d_v, d_x). The server, with P_r the projection on the ball of radius r,

    SimFBO    (y, v, x) ← (y − γ_y q_y, P_r(v − γ_v q_v), x − γ_x q_x),   q = Σ_{i∈C} p̃_i q_i, p̃_i = (M/P) p_i  (4), (5)
    ShroFBO   the same with ρ h for q:   h = Σ_{i∈C} p̃_i q_i / ‖a_i‖₁,   ρ = Σ_j p_j ‖a_j‖₁                     (6)-(8)

so that with unequal τ_i SimFBO solves the problem with weights p_i‖a_i‖₁ / Σ_j p_j‖a_j‖₁ (Theorem 1) and ShroFBO the
one that was asked (Theorem 2).

Exchanges per round: 1. Down: x, y, v. Up: the same (ShroFBO: and two numbers). Client state: none.
Cost per local step: a gradient of g and one joint pass, which gives f's gradient and both products with ∇²g
(`independent_batches`: a gradient of g, two of f and the two products apart).

Departures from the paper:
1. One draw of inner and one of outer samples serves all three directions of a local step, each direction being
   unbiased by itself; `independent_batches` draws separately for each, as the paper's analysis does.
2. ρ sums over all clients, of which a round sees a cohort. ShroFBO takes the mean, over the rounds before, of
   Σ_{i∈C} p_i‖a_i‖₁ / Σ_{i∈C} p_i (round 0: its own). The estimate of the same round would multiply h by something
   that is large exactly when hard-working clients are in it, and so bring back the bias that h is free of.
3. The server's step is an optax transformation of q, scaled by γ; the paper's is the default, plain descent.

Checked in tests/algorithms/test_simfbo.py (closed forms, both theorems) and tests/engines/test_agreement.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.local_coefficients import Coefficients, Plain
from fedbilevel.algorithms.local_directions import LocalDirections, descend
from fedbilevel.core.algorithm import algorithm, phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import config, positive, static, steps
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import XYV, PyTree


class State(NamedTuple):
    """What the server keeps."""

    iterate: XYV
    optimizer: optax.OptState

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


@config
class SingleLoop(LocalDirections):
    """What SimFBO and ShroFBO share: the fields, the client's side, the server's step.

    Args: those of `LocalDirections`, where `client_lr` is η, and
        server_lr: γ for x, y, v: numbers or schedules over rounds.
        radius: r, in the norm of y; r = L_f/μ_g in theory; infinity does not project.
        coefficients: a_k, which make the local steps plain, momentum or proximal ones.
        server_optimizer: an optax optimizer, fed with q; its updates are scaled by γ.
    """

    server_lr: XYV = steps(x=0.01, y=0.1, v=0.1)
    radius: float = positive(float("inf"))
    coefficients: Coefficients = Plain()
    server_optimizer: optax.GradientTransformation = static(optax.sgd(1.0))

    def first_state(self, x: PyTree, y: PyTree) -> State:
        iterate = XYV(x, y, optax.tree.zeros_like(y))
        return State(iterate, self.server_optimizer.init(iterate))

    @phase
    def local_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Client, lines 5-7: τ_i simultaneous steps; the reply is the sum q_i."""
        tau = client.local_steps(self.local_steps)
        return self.counted(self.local_sum(client, start, tau, key, self.coefficients), tau)

    def server_update(self, state: State, q: XYV) -> State:
        """Server, line 14: (5), with v brought back into its ball."""
        updates, optimizer = self.server_optimizer.update(q, state.optimizer, state.iterate)
        moved = descend(state.iterate, self.server_lr, optax.tree.scale(-1, updates))
        return State(moved._replace(v=project_ball(moved.v, self.radius)), optimizer)


@algorithm
class SimFBO(SingleLoop):
    """One exchange a round; every client moves x, y and v together. Fields: see `SingleLoop`.

    Needs: a bilevel problem whose inner loss is strongly convex in y; second derivatives of it as products.
    Good for: fewest exchanges, and the cheapest ones; the first method to try. Clients should do equal work.
    """

    def init(self, x: PyTree, y: PyTree) -> State:
        return self.first_state(x, y)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        q = fed.mean(self.local_updates, state.iterate, key, unbiased=True)
        return self.server_update(state, q)


class RobustState(NamedTuple):
    """What ShroFBO's server keeps."""

    simfbo: State
    work: Array  # estimates of ρ, summed over the rounds so far
    rounds: Array

    @property
    def iterate(self) -> XYV:
        return self.simfbo.iterate

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


@algorithm
class ShroFBO(SingleLoop):
    """SimFBO made robust to unequal local work, by normalised replies. Fields: see `SingleLoop`.

    Needs: a bilevel problem whose inner loss is strongly convex in y; second derivatives of it as products.
    Good for: clients that make different numbers of local steps, where SimFBO solves a re-weighted problem.
    """

    def init(self, x: PyTree, y: PyTree) -> RobustState:
        return RobustState(self.first_state(x, y), jnp.zeros(()), jnp.zeros(()))

    @phase
    def normalised_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Client, line 8: h_i = q_i/‖a_i‖₁, ‖a_i‖₁ itself, and 1, whose mean is the cohort's share of the weights."""
        reply = self.local_updates(client, start, key)
        work = self.coefficients.total(client.local_steps(self.local_steps))
        h = jax.tree.map(lambda q: (q / work).astype(q.dtype), reply.update)
        return reply._replace(update=(h, work, jnp.ones_like(work)))

    def round(self, fed: Fed, state: RobustState, key: Array) -> RobustState:
        h, work, share = fed.mean(self.normalised_updates, state.iterate, key, unbiased=True)
        now = work / share
        rho = jnp.where(state.rounds > 0, state.work / jnp.maximum(state.rounds, 1), now)
        server = self.server_update(state.simfbo, optax.tree.scale(rho, h))
        return RobustState(server, state.work + now, state.rounds + 1)


def project_ball(v: PyTree, radius: float | Array) -> PyTree:
    """The nearest point of the Euclidean ball of that radius about 0: min{1, r/‖v‖} v."""
    norm = optax.tree.norm(v)
    shrink = jnp.where(norm > radius, radius / jnp.where(norm > radius, norm, 1), 1)
    return jax.tree.map(lambda leaf: (shrink * leaf).astype(leaf.dtype), v)
