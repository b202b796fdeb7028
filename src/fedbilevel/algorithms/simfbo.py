"""SimFBO and ShroFBO: single-loop federated bilevel optimization with one exchange per round.

Yifan Yang, Peiyao Xiao, Kaiyi Ji. "SimFBO: Towards Simple, Flexible and Communication-efficient Federated Bilevel
Learning". NeurIPS 2023, arXiv:2305.19442. Algorithm 1.

x is the outer variable and y is the inner variable. There are M clients. Client i has the weight p_i and the losses f_i
and g_i, and F = Σ p_i f_i and G = Σ p_i g_i. P clients form the round's cohort C (docs/glossary.md). Φ is the loss that
is minimised over x: Φ(x) is the value of F at x and at the minimiser y*(x) of G(x, ·). Its gradient is ∇Φ = ∇x F − ∇²xy
G v, where v solves ∇²yy G v = ∇y F, and all derivatives are taken at y = y*(x). The method keeps a vector v, of y's
shape, which comes closer to this solution during the run. A single loop moves x, y and v together.

Numbers in brackets, such as (3), are those of the paper's equations. The server sends (x, y, v). Client i makes τ_i
local steps, one after the other. Each step moves x, y and v at the same time, along the directions             (3)

    d_x = ∇x f_i − ∇²xy g_i v        d_y = ∇y g_i        d_v = ∇²yy g_i v − ∇y f_i

The field `local_optimizer` sets the kind of step: plain, (x, y, v) ← (x, y, v) − (η_x d_x, η_y d_y, η_v d_v); heavy
ball; FedProx; another kind for each client (`Mixed`); or plain with local variance reduction (`Anchored`). The client
replies with q_i = Σ_k a_{i,k} (d_x, d_y, d_v) = (start − end)/η. Here a_{i,k} is the weight of the k-th of the client's
τ_i directions. It is 1 for plain steps. The sum of the client's weights is ‖a_i‖₁ = Σ_k a_{i,k}. Let proj_r be the
projection onto the ball of radius r about 0. The server computes

    SimFBO    (x, y, v) ← (x − γ_x q_x, y − γ_y q_y, proj_r(v − γ_v q_v)),   q = Σ_{i∈C} (M/P) p_i q_i          (4), (5)
    ShroFBO   the same with ρ h in place of q:   h = Σ_{i∈C} (M/P) p_i q_i / ‖a_i‖₁,   ρ = Σ_j p_j ‖a_j‖₁       (6)-(8)

With unequal τ_i SimFBO therefore solves the problem with weights p_i‖a_i‖₁ / Σ_j p_j‖a_j‖₁ (Theorem 1), and ShroFBO
solves the original problem (Theorem 2).

Messages: the server sends x, y and v. Clients reply with vectors of these three shapes. In ShroFBO they also send two
numbers: ‖a_i‖₁, and a 1. The server needs the weighted sum of the ones, Σ_{i∈C} p_i, for the quotients in departure 2
below. The method uses only weighted sums of the replies over the cohort (in a federation, the server still receives
each reply).

Departures from the paper:
1. A single draw of inner and of outer samples serves all three directions of a local step. Each direction is unbiased.
   The paper's analysis draws separately for each direction, as `independent_batches` does.
2. ρ is a sum over all clients. If only a cohort takes part in a round, ShroFBO estimates ρ by the mean of the quotients
   Σ_{i∈C} p_i‖a_i‖₁ / Σ_{i∈C} p_i over the earlier rounds. In round 0, ρ is the quotient of round 0 itself. If ρ always
   came from the present round, ρ and h would depend on the same cohort, and the product ρh would be biased, although h
   itself is unbiased.
3. The server's step is an optax transformation of q, scaled by γ. The default is plain descent, as in the paper.
4. In the paper's (3), a client multiplies its k-th direction by a_{i,k} and makes a step of this size. But with heavy
   ball or FedProx, a_{i,k} is the weight that the k-th direction has in the client's whole movement, when all its steps
   are done. It is not the size of the k-th step. If it were, the first steps would be the largest with heavy ball, and
   the last steps with FedProx. Steps of the sizes a_{i,k} and the actual steps of heavy ball or FedProx give the same
   q_i only in the limit η → 0. Here clients make the actual steps of heavy ball and FedProx. As in the paper, q_i is
   Σ_k a_{i,k} d_k, with the directions d_k at the points of these steps.
5. The default radius is infinity, which omits the projection in (5), since r = L_f/μ_g is not known beforehand.
   `fedbilevel diagnose` estimates it.
6. Clients of limited capacity, which hold only a part of the model (a submodel), make their steps on this part. Every
   entry of q is then the mean over the clients that hold the same entry of the model.
7. The first v, v⁽⁰⁾, is 0, which is one of the starting points that the paper allows. The `init` of a subclass can
   choose another.
8. The paper has no counterpart of `Anchored`, which reduces the variance of local steps. Let z_0, z_1, … be the points
   of a client's local steps. In (3) the k-th direction is computed at z_k only, with new samples. So only averaging
   reduces the noise of the sum of all directions. `Anchored` computes the direction at z_k and at z_0 on the same
   samples. If z_k is near z_0, the difference of these two contains less noise than each of them. To this difference
   `Anchored` adds the direction at z_0 on all samples of the client.

Checked in tests/algorithms/test_simfbo.py (closed forms, both theorems), test_asynchronous.py, test_local_x.py,
test_own_leaves.py and tests/engines/test_agreement.py.
"""

from abc import abstractmethod
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
from fedbilevel.algorithms.parts.outer_optimizer import require_direction
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, static, step_sizes
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Facts, No, OwnParts
from fedbilevel.core.fed import Fed, Public, PublicRange, Reply, Request
from fedbilevel.core.field_types import Number, StepSizes
from fedbilevel.core.own import LOCAL_STEPS
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER, UnitPolicy
from fedbilevel.core.tables import optimizer
from fedbilevel.core.tree import XYV, PyTree


class State(NamedTuple):
    """Hold the server's state of SimFBO, F2SA and MEHA."""

    iterate: XYV
    optimizer: optax.OptState

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


class SingleLoop(JointSteps):
    """Base class of SimFBO and similar methods, such as MEHA, with their fields, local steps and the server's step.

    Args:
        server_lr: γ, the server's step sizes for x, y and v. Each is a number or a schedule over rounds, and a single
            value serves all three. In a round, the server moves by γ times the mean of the clients' sums of directions.
            A step size of None is adapted (`AdaptiveSteps`).
        local_optimizer: the rule of the local steps: `Plain`, heavy ball (`Momentum`), FedProx (`Proximal`), different
            rules for each client (`Mixed`), or plain steps with local variance reduction (`Anchored`). It also
            determines the weight a_k of the k-th direction in a client's sum.
        server_optimizer: an optimizer of Optax with learning rate 1. In place of a gradient it gets the mean of the
            clients' sums of directions, and its updates are scaled by γ. If the problem's `project_x` keeps x in a set
            other than a box, use an optimizer that steps along the gradient in x, such as `optax.sgd`. Adam has a step
            size for each entry, so that with the projection x would converge to a wrong point of the set.
    """

    server_lr: StepSizes = step_sizes(default=None, adaptive="shared")
    local_optimizer: Plain | Momentum | Proximal | Mixed | Anchored | LocalOptimizer = Plain()
    server_optimizer: optax.GradientTransformation = static(default=optimizer("sgd"))

    def check_optimizer(self, problem: Problem, x: PyTree, y: PyTree) -> None:
        """Refuse a server optimizer with a step size for each entry of x, if x is kept in a set other than a box."""
        field = f"{self.label}.server_optimizer"
        require_direction(field, self.server_optimizer, problem, XYV(x, y, y), lambda iterate: iterate.x)

    def own_updates(self, client: Client, start: XYV, key: Array, mean: XYV | None = None) -> Reply:
        """Return a reply with q_i, the weighted sum of a client's directions along its τ_i local steps from `start`.

        If a `mean` direction is given, these steps are corrected by it (`local_sum`).
        """
        tau, anchored = client.local_steps(self.local_steps), self.local_optimizer.anchored
        total = self.local_sum(client, start, tau, key, self.local_optimizer, mean)
        return self.counted(total, tau, evaluations=1 + (anchored or mean is not None), more=int(anchored))

    @abstractmethod
    def server_update(self, iterate: XYV, optimizer: optax.OptState, q: XYV) -> tuple[XYV, optax.OptState]:
        """Return the iterate (x, y, v) and the optimizer's state after the server's step along the mean reply q."""

    def server_step(self, iterate: XYV, optimizer: optax.OptState, q: XYV) -> tuple[XYV, optax.OptState]:
        """Take the server's step along q, without a projection (equation (5), line 14 of the paper's Algorithm 1).

        Returns:
            The new iterate (x, y, v), and the new state of the optimizer.
        """
        updates, optimizer = self.server_optimizer.update(q, optimizer, iterate)
        direction = optax.tree.scale(-1, updates)  # Optax's updates are to be added, and `descend` subtracts
        return descend(iterate, self.server_lr, direction), optimizer


class Projected(SingleLoop):
    """Base class of SimFBO, ShroFBO and F2SA, which can project v onto a ball.

    Args:
        radius: r, the radius of the ball onto which v is projected, in the Euclidean norm; in theory r = L_f/μ_g,
            with f's Lipschitz constant in y and g's strong convexity in y. Infinity: v is not projected.
    """

    radius: Number = positive(default=float("inf"))

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        whole = problem.own is None or self.radius == float("inf")
        allowed = "inf if leaves of y are each client's own, since no machine has all of v"
        require(whole, f"{self.label}.radius", self.radius, allowed)
        self.check_optimizer(problem, x, y)

    def start(self, x: PyTree, y: PyTree) -> tuple[XYV, optax.OptState]:
        """Return the iterate before round 0, with v = 0, and the state of the server's optimizer."""
        iterate = XYV(x, y, optax.tree.zeros_like(y))
        return iterate, self.server_optimizer.init(iterate)

    def server_update(self, iterate: XYV, optimizer: optax.OptState, q: XYV) -> tuple[XYV, optax.OptState]:
        """Take the server's step, and project v; return the iterate and the optimizer's state."""
        moved, optimizer = self.server_step(iterate, optimizer, q)
        return moved._replace(v=project_ball(moved.v, self.radius)), optimizer


OWN_STEPS = ("y", "v"), (("y", lambda method: method.server_lr.y), ("v", lambda method: method.server_lr.v))


class JointExchange(SingleLoop):
    """Base class of SimFBO, F2SA and MEHA: a round has one exchange, in which every client moves x, y and v together.

    Args:
        client_lr: η, a client's step sizes for x, y and v. Each is a number or a schedule over rounds, and a single
            value serves all three. A client sends the sum of its directions, which is not multiplied by η. So η only
            determines at which points it takes these directions, and how far clients drift apart. A step size of None
            is a twentieth of the server's step size γ (`server_lr`), or adapts if γ is None too.
    """

    client_lr: StepSizes = step_sizes(default=None, own=True, adaptive="drift", tied="server_lr")

    @phase(takes=LIKE_XYV, gives=LIKE_XYV, measures=True)
    def local_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Take τ_i steps on x, y and v together. Reply with q_i, the weighted sum of their directions.

        These are lines 5-7 of the paper's Algorithm 1.
        """
        return self.own_updates(client, start, key)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        q = fed.mean(self.local_updates, state.iterate, key, unbiased=True)  # q of equation (4), with its factor M/P
        return State(*self.server_update(state.iterate, state.optimizer, q))


class OneExchange(JointExchange, Projected):
    """Base class of SimFBO and F2SA, with their start and the optional features that they support."""

    @property
    def allows(self) -> Allows:
        own_y = {"local_updates": OwnParts(*OWN_STEPS)}
        return Allows(late=("local_updates",), submodels=UnitPolicy(), local_x=self.server_lr.x, own_y=own_y)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(*self.start(x, y))


class SimFBO(OneExchange, LocalDirections):
    """Move x, y and v together at every client, with one exchange per round.

    The vector v has the shape of y and tracks the solution of ∇²yy G v = ∇y F. The gradient in x is computed from it.
    """

    name = "simfbo"
    facts = Facts(
        paper="Yang et al. 2023, arXiv:2305.19442",
        needs="g strongly convex in y, with products of its second derivatives",
        good_for="the fewest and cheapest exchanges; the first method to try if clients make equally many local steps",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="2τ",
        cost="a gradient of g, and a joint pass for f's gradient and both products with ∇²g",
        bias="drift of clients, proportional to their step size; clients that make more local steps count more",
    )


def _normalised(method: Any, of: str) -> Any:
    """Return γ‖a‖₁, the step size on a client's own leaves of y, for the method's number of local steps.

    γ is the server's step size for the variable `of`. The result is None if this step size adapts. The server moves
    shared leaves by γρ, where ρ is the mean of the clients' ‖a_i‖₁, which a client does not know.
    """
    lr = getattr(method.server_lr, of)
    return None if lr is None else lr * method.local_optimizer.total(method.local_steps)


OWN_NORMALISED_STEPS = (
    ("y", "v"),
    (("y", lambda method: _normalised(method, "y")), ("v", lambda method: _normalised(method, "v"))),
)


class RobustState(NamedTuple):
    """Hold the server's state of ShroFBO."""

    iterate: XYV
    optimizer: optax.OptState
    work: Array  # the sum of the estimates of ρ over all rounds so far
    rounds: Array  # the number of these rounds

    @property
    def x(self) -> PyTree:
        return self.iterate.x

    @property
    def y(self) -> PyTree:
        return self.iterate.y


MOST_WORK = 1e4
"""The largest ‖a_i‖₁ that a server of a federation accepts for each local step that it asked for.

Usually the server knows ‖a_i‖₁. But a site may set its own number of local steps, or its own momentum, by which
‖a_i‖₁ becomes larger than τ_i. The factor equals the default of `norm_factor`, the bound on norms, and an honest site
stays far below it.
"""


def most_work(request: Request) -> float:
    """Return the largest ‖a_i‖₁ that is accepted in the reply to a request: MOST_WORK for each local step."""
    return MOST_WORK * request.own.get(LOCAL_STEPS, request.method.local_steps)


WORK, SHARE = PublicRange(0, most_work), PublicRange(1, 1)
"""The ranges of the two public numbers of `Normalised.normalised`: ‖a_i‖₁, and the number 1."""


class Normalised(Projected, LocalDirections):
    """Base class of ShroFBO and CorrectedFBO: replies are h_i = q_i/‖a_i‖₁, and the server steps along ρh.

    Here h is the mean of the h_i, ‖a_i‖₁ is the sum of the weights of client i's directions, and ρ is the mean of these
    sums.
    """

    def normalised(self, client: Client, reply: Reply) -> Reply:
        """Replace q_i, the update of a reply, by three parts: h_i, ‖a_i‖₁, and the number 1.

        From the last two, the server computes the weighted mean of the ‖a_i‖₁ over the cohort: it divides the weighted
        sum of the ‖a_i‖₁ by the weighted sum of the ones.

        The last two parts are public, since they follow from τ_i. The server has τ_i, which is a field of the algorithm
        or of the population and does not depend on the client's data. If a site of a federation has its own τ_i, the
        server does not know it, so that the range of ‖a_i‖₁ is wide (MOST_WORK).
        """
        work = self.local_optimizer.total(client.local_steps(self.local_steps))
        h = jax.tree.map(lambda q: (q / work).astype(q.dtype), reply.update)
        return reply._replace(update=(h, Public(work, WORK), Public(jnp.ones_like(work), SHARE)))

    def robust_step(self, fed: Fed, state: RobustState, replies: tuple[XYV, Public, Public]) -> RobustState:
        """Take the server's step along ρh, given the unbiased means of the parts of the replies.

        ρ is a mean of the ‖a_i‖₁, and so it is above 0. If clients send differences (TopK, late replies), false
        differences could make the sum negative. Then ρ is 0, so that the step never changes its sign.
        """
        h, work, share = replies
        now = work.public / share.public
        rho = now
        if fed.sampled:  # estimate Σ_j p_j‖a_j‖₁ over all clients by the mean over the cohorts of earlier rounds
            rho = jnp.where(state.rounds > 0, state.work / jnp.maximum(state.rounds, 1), now)
        rho = jnp.maximum(rho, 0)
        moved, optimizer = self.server_update(state.iterate, state.optimizer, optax.tree.scale(rho, h))
        return RobustState(moved, optimizer, state.work + now, state.rounds + 1)

    def robust_start(self, x: PyTree, y: PyTree) -> RobustState:
        """Return the server's state before round 0."""
        return RobustState(*self.start(x, y), work=jnp.zeros(()), rounds=jnp.zeros(()))


REPLY = (LIKE_XYV, Public(NUMBER, WORK), Public(NUMBER, SHARE))
"""The declaration `gives` of phases whose reply is made by `Normalised.normalised`."""


class ShroFBO(Normalised):
    """Run SimFBO with normalised replies, so that different numbers of local steps do not re-weight clients.

    Args:
        client_lr: η, a client's step sizes for x, y and v. Each is a number or a schedule over rounds, and a single
            value serves all three. A client sends the sum of its directions, which is not multiplied by η. So η only
            determines at which points it takes these directions, and how far clients drift apart. A step size of None
            is a twentieth of the server's step size γ (`server_lr`), or adapts if γ is None too.
    """

    name = "shrofbo"
    facts = Facts(
        paper="Yang et al. 2023, arXiv:2305.19442",
        needs="g strongly convex in y, with products of its second derivatives",
        good_for="clients that make different numbers of local steps; SimFBO would solve a re-weighted problem",
        exchanges="one",
        up="1 like x, 2 like y",
        hvps="2τ",
        cost="a gradient of g, and a joint pass for f's gradient and both products with ∇²g",
        bias="drift of clients",
    )
    allows = Allows(
        late=("normalised_updates",),
        submodels=UnitPolicy(),
        local_x=No("it needs x on the server: a client's step on x would be γ_x ρ h_i, and only the server has ρ"),
        own_y={"normalised_updates": OwnParts(*OWN_NORMALISED_STEPS)},
    )

    client_lr: StepSizes = step_sizes(default=None, own=True, adaptive="drift", tied="server_lr")

    def init(self, x: PyTree, y: PyTree) -> RobustState:
        return self.robust_start(x, y)

    @phase(takes=LIKE_XYV, gives=REPLY, measures=True)
    def normalised_updates(self, client: Client, start: XYV, key: Array) -> Reply:
        """Take τ_i steps on x, y and v together. Reply with h_i, the weighted mean of their directions, and ‖a_i‖₁.

        These are lines 5-8 of the paper's Algorithm 1.
        """
        return self.normalised(client, self.own_updates(client, start, key))

    def round(self, fed: Fed, state: RobustState, key: Array) -> RobustState:
        replies = fed.mean(self.normalised_updates, state.iterate, key, unbiased=True)  # with M/P, as in equation (6)
        return self.robust_step(fed, state, replies)


def project_ball(v: PyTree, radius: float | Array) -> PyTree:
    """Return the projection of v onto the Euclidean ball of this radius about 0: min{1, r/‖v‖} v."""
    norm = optax.tree.norm(v)
    shrink = jnp.where(norm > radius, radius / jnp.where(norm > radius, norm, 1), 1)
    return jax.tree.map(lambda leaf: (shrink * leaf).astype(leaf.dtype), v)
