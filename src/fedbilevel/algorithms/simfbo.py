"""SimFBO and ShroFBO: single-loop federated bilevel optimization with one exchange per round.

Yifan Yang, Peiyao Xiao, Kaiyi Ji. "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning". NeurIPS 2023, arXiv:2305.19442. Algorithm 1.

x is the outer variable, y the inner one, and v, of y's shape, tracks the solution of ∇²yy G v = ∇y F. Of the M clients,
client i has the weight p_i and the losses f_i and g_i; P of them form the round's cohort C (docs/glossary.md).

The server sends (x, y, v). Client i makes τ_i steps on all three at once, along                            (3)

    d_x = ∇x f_i − ∇²xy g_i v        d_y = ∇y g_i        d_v = ∇²yy g_i v − ∇y f_i

by plain steps (x, y, v) ← (x, y, v) − (η_x d_x, η_y d_y, η_v d_v), by heavy ball, by FedProx (`local_optimizer`), or
each client by its own (`Mixed`), or with local variance reduction (`Anchored`), and replies with
q_i = Σ_k a_k (d_x, d_y, d_v) = (start − end)/η. a_k is the weight of the k-th of its τ_i directions, 1 for plain steps,
and ‖a_i‖₁ = Σ_k a_k. The server, with proj_r the projection on the ball of radius r about 0,

    SimFBO    (x, y, v) ← (x − γ_x q_x, y − γ_y q_y, proj_r(v − γ_v q_v)),   q = Σ_{i∈C} (M/P) p_i q_i          (4), (5)
    ShroFBO   the same with ρ h for q:   h = Σ_{i∈C} (M/P) p_i q_i / ‖a_i‖₁,   ρ = Σ_j p_j ‖a_j‖₁               (6)-(8)

so that with unequal τ_i SimFBO solves the problem with weights p_i‖a_i‖₁ / Σ_j p_j‖a_j‖₁ (Theorem 1) and ShroFBO the
problem that was posed (Theorem 2).

Messages: the server sends x, y and v, and clients reply with vectors of these three shapes (ShroFBO: and two numbers).

Departures from the paper:
1. A single draw of inner and of outer samples serves all three directions of a local step, each direction being
   unbiased by itself; the paper's analysis draws separately for each, as `independent_batches` does.
2. ρ sums over all clients. Where a round sees a cohort, ShroFBO takes the mean, over the rounds before, of
   Σ_{i∈C} p_i‖a_i‖₁ / Σ_{i∈C} p_i (round 0: its own). The estimate of the same round would multiply h by something
   that is large exactly when hard-working clients are in it, and so bring back the bias that h is free of.
3. The server's step is an optax transformation of q, scaled by γ; the paper's is the default, plain descent.
4. The paper's (3) multiplies the k-th step by a_k, of all τ_i steps: under momentum the largest step comes first, under
   a proximal pull last. That is heavy ball or FedProx, whose a_k these are, for vanishing η only. Here clients make the
   steps of heavy ball and FedProx: q_i is Σ_k a_k d_k as in the paper, with d_k at the points that these come to.
5. The default radius, infinity, leaves out the projection of (5), whose r = L_f/μ_g nobody knows beforehand; `diagnose`
   measures one.
6. Clients of limited capacity step on submodels; every entry of q is then the mean over the clients that hold it.
7. v⁽⁰⁾ is 0, of all that the paper allows; a subclass's `init` can begin elsewhere.
8. (3) takes directions at the z_k alone, whose combinations only average noise: `Anchored` takes some at z_0 too.

Checked in tests/algorithms/test_simfbo.py (closed forms, both theorems), test_asynchronous.py, test_local_x.py,
test_own_leaves.py and tests/engines/test_agreement.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.local_steps import (
    LIKE_XYV,
    Anchored,
    JointSteps,
    LocalDirections,
    LocalOptimizer,
    Mixed,
    Momentum,
    Plain,
    Proximal,
    descend,
)
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, static, step_sizes
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Facts, No, OwnParts
from fedbilevel.core.fed import Fed, Public, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER, UnitPolicy
from fedbilevel.core.tables import optimizer
from fedbilevel.core.tree import XYV, PyTree


class State(NamedTuple):
    """The server's state."""

    iterate: XYV
    optimizer: optax.OptState

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


class SingleLoop(JointSteps):
    """Base of SimFBO, ShroFBO and F2SA: the fields, the client's side, the server's step.

    Args:
        server_lr: γ, the server's step sizes for x, y and v: numbers or schedules over rounds; a single value serves
            all three. In a round the server moves by γ times the mean of the sums that clients make of their
            directions. None, for each: adapted (`AdaptiveSteps`).
        radius: r, the radius of the ball that v is projected on, in the norm of y; r = L_f/μ_g in theory; infinity does
            not project.
        local_optimizer: the local steps and their a_k: plain ones, heavy ball (`Momentum`) or FedProx (`Proximal`), or
            each client's own (`Mixed`); or plain ones with local variance reduction (`Anchored`).
        server_optimizer: an optax optimizer of learning rate 1, fed with q; its updates are scaled by γ.
    """

    server_lr: XYV = step_sizes(default=None, adaptive="shared")
    radius: float = positive(default=float("inf"))
    local_optimizer: Plain | Momentum | Proximal | Mixed | Anchored | LocalOptimizer = Plain()
    server_optimizer: optax.GradientTransformation = static(default=optimizer("sgd"))

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        whole = problem.own is None or self.radius == float("inf")
        allowed = "inf where leaves of y are each client's own: no machine has all of v"
        require(whole, f"{self.label}.radius", self.radius, allowed)

    def start(self, x: PyTree, y: PyTree) -> tuple[XYV, optax.OptState]:
        """Return the iterate before round 0, with v = 0, and the server optimizer's state."""
        iterate = XYV(x, y, optax.tree.zeros_like(y))
        return iterate, self.server_optimizer.init(iterate)

    def own_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Reply with q_i, the sum of a client's directions over its τ_i local steps from `start`."""
        tau = client.local_steps(self.local_steps)
        total, anchored = self.local_sum(client, start, tau, key, self.local_optimizer), self.local_optimizer.anchored
        return self.counted(total, tau, evaluations=1 + anchored, more=int(anchored))

    def server_update(self, iterate: XYV, optimizer: optax.OptState, q: XYV) -> tuple[XYV, optax.OptState]:
        """Take the server's step (5), line 14, bring v back into its ball; return iterate and optimizer's state."""
        updates, optimizer = self.server_optimizer.update(q, optimizer, iterate)
        direction = optax.tree.scale(-1, updates)  # optax's updates already point downhill, and `descend` subtracts
        moved = descend(iterate, self.server_lr, direction)
        return moved._replace(v=project_ball(moved.v, self.radius)), optimizer


OWN_STEPS = ("y", "v"), (("y", lambda method: method.server_lr.y), ("v", lambda method: method.server_lr.v))


class OneExchange(SingleLoop):
    """Base of SimFBO and F2SA: the round, with one exchange, in which every client moves x, y and v together.

    Args:
        client_lr: η, a client's step sizes for x, y and v: numbers or schedules over rounds; a single value serves all
            three. None, for each: adapted, or a twentieth of a γ that is given. They only decide how far each client
            goes while it sums its directions, and so how far clients drift apart.
    """

    client_lr: XYV = step_sizes(default=None, own=True, adaptive="drift", tied="server_lr")

    @property
    def allows(self) -> Allows:
        own_y = {"local_updates": OwnParts(*OWN_STEPS)}
        return Allows(late=("local_updates",), submodels=UnitPolicy(), local_x=self.server_lr.x, own_y=own_y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(*self.start(x, y))

    @phase(takes=LIKE_XYV, gives=LIKE_XYV, measures=True)
    def local_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Take τ_i simultaneous steps (lines 5-7); reply with the sum q_i."""
        return self.own_updates(client, start, key)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        q = fed.mean(self.local_updates, state.iterate, key, unbiased=True)  # the q of (4), with its factor M/P
        return State(*self.server_update(state.iterate, state.optimizer, q))


class SimFBO(OneExchange, LocalDirections):
    """One exchange a round; every client moves x, y and v together."""

    name = "simfbo"
    facts = Facts(
        paper="Yang et al. 2023, arXiv:2305.19442",
        needs="g strongly convex in y; second derivatives of it as products",
        good_for="fewest exchanges, and the cheapest ones; the first method to try, where clients do equal work",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="2τ",
        cost="a gradient of g and one joint pass, which gives f's gradient and both products with ∇²g",
        bias="drift of clients, proportional to their step size; unequal work re-weights them",
    )


def _normalised(method: Any, of: str) -> Any:
    """Return γ‖a‖₁ for the method's own τ, in place of the server's γρ; None where γ adapts."""
    lr = getattr(method.server_lr, of)
    return None if lr is None else lr * method.local_optimizer.total(method.local_steps)


OWN_NORMALISED_STEPS = (
    ("y", "v"),
    (("y", lambda method: _normalised(method, "y")), ("v", lambda method: _normalised(method, "v"))),
)


class RobustState(NamedTuple):
    """The server's state of ShroFBO."""

    iterate: XYV
    optimizer: optax.OptState
    work: Array  # estimates of ρ, summed over the rounds so far
    rounds: Array  # how many these are

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


class Normalised(SingleLoop, LocalDirections):
    """Base of ShroFBO and CorrectedFBO: replies h_i = q_i/‖a_i‖₁, and the server's step along ρh, lines 8 to 14."""

    def normalised(self, client: Client, reply: Reply) -> Reply:
        """Return the reply with h_i in place of q_i (line 8), ‖a_i‖₁, and 1, whose mean is the cohort's share of the
        weights.

        τ_i is the algorithm's or the population's, which the server knows, and no matter of the client's data.
        """
        work = self.local_optimizer.total(client.local_steps(self.local_steps))
        h = jax.tree.map(lambda q: (q / work).astype(q.dtype), reply.update)
        return reply._replace(update=(h, Public(work), Public(jnp.ones_like(work))))

    def robust_step(self, fed: Fed, state: RobustState, replies: tuple[XYV, Public, Public]) -> RobustState:
        """Take the server's step along ρh, the replies being the unbiased means of what clients sent."""
        h, work, share = replies
        now = work.public / share.public
        rho = now
        if fed.sampled:  # Σ_j p_j‖a_j‖₁ of everyone: the mean over the cohorts of earlier rounds
            rho = jnp.where(state.rounds > 0, state.work / jnp.maximum(state.rounds, 1), now)
        moved, optimizer = self.server_update(state.iterate, state.optimizer, optax.tree.scale(rho, h))
        return RobustState(moved, optimizer, state.work + now, state.rounds + 1)

    def robust_start(self, x: PyTree, y: PyTree) -> RobustState:
        """Return the server's state before round 0."""
        return RobustState(*self.start(x, y), work=jnp.zeros(()), rounds=jnp.zeros(()))


REPLY = (LIKE_XYV, Public(NUMBER), Public(NUMBER))
"""What a phase gives whose reply is `Normalised.normalised`."""


class ShroFBO(Normalised):
    """SimFBO made robust to unequal local work, by normalised replies.

    Args:
        client_lr: η, a client's step sizes for x, y and v: numbers or schedules over rounds; a single value serves all
            three. None, for each: adapted, or a twentieth of a γ that is given. They only decide how far each client
            goes while it sums its directions, and so how far clients drift apart.
    """

    name = "shrofbo"
    facts = Facts(
        paper="Yang et al. 2023, arXiv:2305.19442",
        needs="g strongly convex in y; second derivatives of it as products",
        good_for="clients that make different numbers of local steps, where SimFBO solves a re-weighted problem",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="2τ",
        cost="a gradient of g and one joint pass, which gives f's gradient and both products with ∇²g",
        bias="drift of clients",
    )
    allows = Allows(
        late=("normalised_updates",),
        submodels=UnitPolicy(),
        local_x=No("it needs x on the server: clients' step on it would be γ_x ρ h_i, and only the server has ρ"),
        own_y={"normalised_updates": OwnParts(*OWN_NORMALISED_STEPS)},
    )

    client_lr: XYV = step_sizes(default=None, own=True, adaptive="drift", tied="server_lr")

    def init(self, x: PyTree, y: PyTree) -> RobustState:
        return self.robust_start(x, y)

    @phase(takes=LIKE_XYV, gives=REPLY, measures=True)
    def normalised_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Take τ_i simultaneous steps (lines 5-7); reply with h_i (line 8) and ‖a_i‖₁."""
        return self.normalised(client, self.own_updates(client, start, key))

    def round(self, fed: Fed, state: RobustState, key: Array) -> RobustState:
        replies = fed.mean(self.normalised_updates, state.iterate, key, unbiased=True)  # with (6)'s factor M/P
        return self.robust_step(fed, state, replies)


def project_ball(v: PyTree, radius: float | Array) -> PyTree:
    """Return the nearest point of the Euclidean ball of that radius about 0: min{1, r/‖v‖} v."""
    norm = optax.tree.norm(v)
    shrink = jnp.where(norm > radius, radius / jnp.where(norm > radius, norm, 1), 1)
    return jax.tree.map(lambda leaf: (shrink * leaf).astype(leaf.dtype), v)
