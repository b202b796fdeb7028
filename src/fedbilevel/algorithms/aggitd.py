"""FBO-AggITD: the exchanges that bring y near y*(x) also accumulate the hypergradient.

Peiyao Xiao, Kaiyi Ji. "Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
Differentiation". ICML 2023, arXiv:2302.04969.

A round makes N exchanges on y, beginning with y^0 = y, and then an exchange on x. Let H_i = ∇²yy g_i, let F, G and H be
the means of f_i, g_i and H_i, and draw Q uniformly from {0..N−1}. Exchange n = 0..N−1 computes

    y^{n+1} = mean_i y_{i,τ_i},   y_{i,0} = y^n,   y_{i,ν+1} = y_{i,ν} − (λ/τ_i) ∇y g_i(x, y_{i,ν}; ζ_ν)
    r = mean_i ∇y f_i(x, y^n)                      if n = Q
    r ← r − λ mean_i H_i(x, y^n) r                 if n > Q

and the last exchange computes

    x ← x − α mean_i [∇x f_i(x, y^N) − λN ∇²xy g_i(x, y^N) r],   y ← y^N

The default is the expectation over Q: r ← r − λ H r + ∇y F(x, y^n) in every exchange n, and λ r in place of λN r. The
paper's method is sampling="random", in which λN r has a variance that grows with N.

Relation to unrolling: let y^N(x) be the result of N gradient steps from a fixed y^0. Unrolling computes the derivative
of F(x, y^N(x)) in x exactly. It takes ∇y F at y^N and multiplies by the factors I − λH(y^n) from the last to the first,
which requires a second pass over the iterates. The method, as in the paper, takes ∇y F at y^Q, and the factors in the
order of the iterates. For general losses, the method and unrolling agree only in the limit y^0 → y*(x). The expectation
over Q equals the derivative exactly under three conditions: τ = 1; H and ∇²xy G do not depend on y; and ∇y F is the
same at y^0..y^N, since f is linear in y or y^0 = y*(x). At y^0 = y*(x) the expectation also equals ∇x F − ∇²xy G v,
where v = λ Σ_{k<N} (I − λH)^k ∇y F is the truncated Neumann series of H⁻¹∇y F. As in the paper, ∇²xy G is evaluated at
y^N, and H only at y^n, even if a client makes τ > 1 steps.

Departures from the paper:
1. The default is the expectation over Q.
2. Server and clients exchange changes of y, and means are Σ p̃_i u_i with p̃_i = (M/P) p_i: see FedNest.
3. All exchanges of a round ask the same cohort, so that products of means are biased under partial participation.
4. The samples for r are drawn independently of the samples for the steps on y.

Checked in tests/algorithms/test_aggitd.py (closed forms, unrolling, exchanges) and tests/engines/test_agreement.py.
"""

from typing import Literal, NamedTuple

import jax
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Exact, hypergradient_given, outer_gradient
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import check_neumann_step
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, positive_integer, static
from fedbilevel.core.errors import require_count, unknown
from fedbilevel.core.facts import Allows, Facts, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.field_types import Step
from fedbilevel.core.hyperparameters import at as at_round
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, PyTree, move, scaled
from fedbilevel.machinery.threefry import uniform_below
from fedbilevel.oracles.products import hess_v


class InnerIterate(NamedTuple):
    """Hold the state within a round: the inner iterate y^n, and the vector r of `AggITD`, which has the shape of y."""

    y: PyTree
    r: PyTree


class AggITD(Algorithm):
    """Estimate the hypergradient by iterative differentiation within the inner loop.

    The N exchanges on y also update a vector r, which has the shape of y: they multiply r by I − λ∇²yy G, and add ∇y F.
    With sampling=None, ∇y F is added in every exchange. With "random", it is added only in one exchange, which is drawn
    at random. The last exchange of the round multiplies r by ∇²xy G.

    Args:
        inner: the rounds on y: N is its field `rounds`, and λ its field `lr`. λ must be below 2/ℓ, where ℓ is the
            largest eigenvalue of the inner Hessian.
        sampling: how to choose Q, the exchange in which ∇y F is added to r: "random" draws Q, as in the paper; None
            takes the expectation over Q.
        outer_lr: α, the server's step size on x; None: it adapts during the run (`AdaptiveSteps`).
        batch_size: the number of samples that a client draws for each loss, with replacement; None: all samples.
    """

    name = "aggitd"
    facts = Facts(
        paper="Xiao et al. 2023, arXiv:2302.04969",
        needs="g strongly convex in y, with products of its second derivatives",
        good_for="long inner loops: the hypergradient costs only one exchange more",
        exchanges="N + 1",
        up="1 like x, 2N like y",
        hvps="N",
        cost="a gradient of g; in each exchange after Q, one product more (by default also a gradient of f)",
        bias="truncation (1 − λμ)^N; drift of y if τ > 1",
    )
    allows = Allows(
        late=No(
            "each exchange asks for a product with the vector r that the exchange before it has computed, so that an "
            "earlier reply belongs to another r"
        ),
        submodels=UnitPolicy(),
    )

    inner: LocalSGD = LocalSGD(rounds=5)
    sampling: Literal["random"] | None = static(default=None)
    outer_lr: Step = positive(default=None, adaptive="x")
    batch_size: int | None = positive_integer(default=32, optional=True)

    def validate(self) -> None:
        if self.sampling not in (None, "random"):
            raise unknown("AggITD.sampling", self.sampling, ["random"])
        require_count("AggITD.inner.rounds", self.inner.rounds)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        """Refuse a λ at which r would grow, even if local steps on y of size λ/τ would still converge with this λ."""
        check_neumann_step("AggITD.inner.lr", at_round(self, 0).inner.lr, problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    @phase(takes=("x", "y"), gives=InnerIterate("y", "y"), measures=True)
    def descent_with_gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Take τ_i local steps on y from y^n. Reply with the change of y, and with ∇y f_i at y^n, in the shape of y."""
        descent_key, gradient_key = jax.random.split(key)
        reply = self.inner.descent(client, at, descent_key)
        gradient = outer_gradient(client, at, gradient_key).update
        return reply._replace(update=InnerIterate(reply.update, gradient), gradients=reply.gradients + 1)

    @phase(takes=("x", InnerIterate("y", "y")), gives=InnerIterate("y", "y"))
    def descent_with_product(self, client: Client, at: tuple[PyTree, InnerIterate], key: Array) -> Reply:
        """Take τ_i local steps on y from y^n. Reply with the change of y, and with −λ H_i r, the change of r.

        H_i is ∇²yy g_i at (x, y^n), and λ is the step size on y.
        """
        x, (y, r) = at
        descent_key, product_key = jax.random.split(key)
        reply = self.inner.descent(client, (x, y), descent_key)
        product = hess_v(client.problem, x, y, r, client.inner_batch(product_key))
        return reply._replace(update=InnerIterate(reply.update, scaled(-self.inner.lr, product)), hvps=1)

    @phase(takes=("x", InnerIterate("y", "y")), gives=InnerIterate("y", "y"))
    def descent_with_both(self, client: Client, at: tuple[PyTree, InnerIterate], key: Array) -> Reply:
        """Take τ_i local steps on y from y^n. Reply with the change of y, and with ∇y f_i − λ H_i r, the change of r.

        H_i is ∇²yy g_i, and λ is the step size on y. Both H_i and ∇y f_i are evaluated at (x, y^n). Rounds ask for this
        phase if `sampling` is None.
        """
        x, (y, _) = at
        product_key, gradient_key = jax.random.split(key)
        reply = self.descent_with_product(client, at, product_key)
        gradient = outer_gradient(client, (x, y), gradient_key).update
        change = optax.tree.add(reply.update.r, gradient)
        return reply._replace(update=reply.update._replace(r=change), gradients=reply.gradients + 1)

    @phase(takes=("x", "y", "y"), gives="x")
    def hypergradient(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with ∇x f_i − ∇²xy g_i v for v = λ r, in the shape of x.

        The step size λ on y may differ between clients.
        """
        x, y, r = at
        return hypergradient_given(client, (x, y, scaled(self.inner.lr, r)), key, Exact())

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        draw_key, before_key, at_key, after_key, last_key = jax.random.split(key, 5)
        x, y = state
        terms = self.inner.rounds
        series = self.sampling is None
        begin = 0 if series else uniform_below(draw_key, terms)
        if not series:
            y = self.inner.descend(fed, x, y, before_key, rounds=begin)
        change = fed.mean(self.descent_with_gradient, (x, y), at_key, unbiased=True)
        inner = InnerIterate(optax.tree.add(y, change.y), change.r)
        ask = self.descent_with_both if series else self.descent_with_product

        def once(fed: Fed, inner: InnerIterate, key: Array) -> InnerIterate:
            return optax.tree.add(inner, fed.mean(ask, (x, inner), key, unbiased=True))

        inner = fed.repeat(terms - 1 - begin, once, inner, after_key)
        r = inner.r if series else scaled(terms, inner.r)
        h = fed.mean(self.hypergradient, (x, inner.y, r), last_key, unbiased=True)
        return XY(move(x, -self.outer_lr, h), inner.y)
