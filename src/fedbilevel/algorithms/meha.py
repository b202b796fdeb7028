"""MEHA: one exchange per round and first derivatives only, for inner losses that are not convex in y.

Risheng Liu, Zhu Liu, Wei Yao, Shangzhi Zeng, Jin Zhang. "Moreau Envelope for Nonconvex Bi-Level Optimization: A
Single-loop and Hessian-free Solution Strategy". ICML 2024, arXiv:2405.09927. Algorithm 1, in a federated form.

F and G are the means of the clients' losses f_i and g_i. If G(x, ·) is not convex, it may have several minimisers, and
its Hessian may have no inverse. The Moreau envelope

    G_σ(x, y) = min_θ [G(x, θ) + ‖θ − y‖²/(2σ)]                                          (the paper's γ is σ here)

is at most G(x, y). Let −ρ be a lower bound of the curvatures of G(x, ·), that is, of all eigenvalues of ∇²yy G. For
σ < 1/ρ the minimiser θ is unique, and G_σ = G exactly where ∇y G = 0. The method minimises F under this condition, by
adding the penalty c (G − G_σ) ≥ 0 to F. Since G_σ is a minimum over θ, −G_σ is a maximum over θ, and the whole problem
is the saddle problem

    min over x, y, max over θ of Σ p_i ψ_i,     ψ_i = f_i(x, y) + c [g_i(x, y) − g_i(x, θ) − ‖θ − y‖²/(2σ)]

A client steps on x, y and θ together, along the derivatives of ψ_i. Both losses g_i in ψ_i are on the same samples:

    d_x = ∂ψ_i/∂x           = ∇x f_i(x, y) + c [∇x g_i(x, y) − ∇x g_i(x, θ)]
    d_y = (b/c) ∂ψ_i/∂y     = b [∇y f_i(x, y)/c + ∇y g_i(x, y) − (y − θ)/σ]              with b = ¼
    d_θ = −(1/c) ∂ψ_i/∂θ    = ∇y g_i(x, θ) + (θ − y)/σ

The local steps, the server's step and the messages are those of SimFBO, with θ in the place of v. Before the first
round θ is y. In the fields for step sizes, the entry `v` is the step size for θ. Where G is strongly convex, c (θ − y)
tends to SimFBO's v as c grows, and x has an error of O(1/c).

The factor b makes y slower than θ, since otherwise y and θ would diverge together where G has negative curvature. Take
an eigenvector of ∇²yy G with the eigenvalue a, and leave f/c out. Then the matrix of the steps on (y, θ) has the trace
(1 + b) a + (1 − b)/σ and the determinant ba². Small steps are stable if the trace is positive. With b = 1 the trace is
negative wherever a < 0. With b = ¼ it is positive for all a > −0.6/σ, and so whenever σ < 1/(2ρ), which the paper
demands, too. Then steps below 2/((1 + b)(L + 1/σ)) are stable, where L is the largest |a|.

The term f/c adds bD/c to the curvature that bounds the step size on y, where D is the largest curvature of F in y: with
L + bD/c in the place of L, the same condition ensures stability. If c is small, or if f has much curvature in y (a
large D), step sizes therefore have to be smaller. With a large c this bound hardly depends on c. `AdaptiveSteps`
measures the curvature of G + (b/c) F in y, and adds 1/σ.

Departures from the paper:
1. The paper's method is not federated. It steps on θ first, then on x, and then on y. Here it steps on all three at
   once, so that a round needs one exchange. The fixed points are the same. A federated form is MeFBO (ICLR 2025
   submission). We could not read that paper, and MEHA is not an implementation of MeFBO.
2. The paper divides ψ by c. Here d_x is not divided by c, so that d_x approximates the hypergradient for every c.
3. The paper allows y in a set, and losses with a part that is not smooth. Here y has no constraint, and both losses are
   smooth.

Checked in tests/algorithms/test_meha.py (closed forms, negative curvature) and tests/engines/test_agreement.py.
"""

import jax
import optax
from jax import Array

from fedbilevel.algorithms.parts.curvature import Added
from fedbilevel.algorithms.parts.local_steps import FirstDerivatives
from fedbilevel.algorithms.simfbo import JointExchange, State
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive
from fedbilevel.core.facts import Allows, Facts, OwnParts
from fedbilevel.core.field_types import Number
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XYV, PyTree, scaled
from fedbilevel.oracles.products import Directions

PACE = 0.25  # b, the factor that makes y slower than θ
OWN_STEPS = ("y", "theta"), (("y", lambda method: method.server_lr.y), ("theta", lambda method: method.server_lr.v))


class MEHA(JointExchange, FirstDerivatives):
    """Minimise f where the gradient of g in y is 0, by first derivatives only; g need not be convex in y.

    In the fields for step sizes, the entry `v` is the step size for θ.

    Args:
        penalty: c, the weight of the penalty, or a schedule over rounds. The error of x is O(1/c) where g is strongly
            convex. With a larger c, x and y need more rounds. The paper lets c grow as (k + 1)^p with p < ½.
        proximity: σ, which must be below 1/(2ρ), where −ρ is the least curvature of G in y. A larger σ makes y
            faster in directions of little curvature. `diagnose` measures the least curvature at a point.
    """

    name = "meha"
    facts = Facts(
        paper="Liu et al. 2024, arXiv:2405.09927",
        needs="g smooth, its curvature in y above −1/(2σ); only first derivatives",
        good_for="inner losses that are not convex in y, such as whole networks as y",
        exchanges="one",
        up="1 like x, 2 like y",
        cost="a gradient of f and two of g, at y and at θ, on the same samples",
        bias="SimFBO's bias, and an error in proportion to 1/c; y may end at a point that is not a minimum of g, "
        "because the gradient of g in y is also 0 at other points",
    )

    gradients = 3

    penalty: Number = positive(default=3.0, finite=True)
    proximity: Number = positive(default=1.0, finite=True)

    @property
    def allows(self) -> Allows:
        own_y = {"local_updates": OwnParts(*OWN_STEPS, start_at_y=("y", "theta"))}
        return Allows(late=("local_updates",), submodels=UnitPolicy(), local_x=self.server_lr.x, own_y=own_y)

    @property
    def added_curvature(self) -> Added:
        """Return the terms that steps on y add to g, for `AdaptiveSteps`: f times b/c, and a term of curvature 1/σ.

        Here b is `PACE`, c is the field `penalty`, and σ is the field `proximity`.
        """
        return Added(PACE / self.penalty, 1 / self.proximity)

    @property
    def curvature_needed(self) -> Array | float:
        """Return −1/(2σ), the bound that all curvatures of G in y must exceed; engines use it in warnings."""
        return -1 / (2 * self.proximity)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        self.check_optimizer(problem, x, y)

    def init(self, x: PyTree, y: PyTree) -> State:
        iterate = XYV(x, y, y)
        return State(iterate, self.server_optimizer.init(iterate))

    def server_update(self, iterate: XYV, optimizer: optax.OptState, q: XYV) -> tuple[XYV, optax.OptState]:
        return self.server_step(iterate, optimizer, q)

    def slopes(self, client: Client, local: XYV, outer_key: Array, inner_key: Array) -> Directions:
        """Return the directions (d_x, d_y, d_θ) by which a client steps on x, y and θ, and the losses at y.

        They are the derivatives of the client's saddle function ψ_i, with the factors 1, b/c and −1/c.
        """
        problem, c = client.problem, self.penalty
        outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(inner_key)

        def psi(x: PyTree, y: PyTree, theta: PyTree) -> tuple[Array, tuple[Array, Array]]:
            f, g = problem.outer(x, y, outer_batch), problem.inner(x, y, inner_batch)
            distance = optax.tree.norm(optax.tree.sub(theta, y), squared=True)
            envelope = problem.inner(x, theta, inner_batch) + distance / (2 * self.proximity)
            return f + c * (g - envelope), (f, g)

        (of_x, of_y, of_theta), losses = jax.grad(psi, (0, 1, 2), has_aux=True)(*local)
        return Directions(XYV(of_x, scaled(PACE / c, of_y), scaled(-1 / c, of_theta)), *losses)
