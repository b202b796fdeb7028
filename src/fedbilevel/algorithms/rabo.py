"""RABO and RAFBO: clients of limited capacity train submodels, and what they send is averaged entry by entry.

Mingyi Li, Xiao Zhang, Ruisheng Zheng, Hongjian Shi, Yuan Yuan, Xiuzhen Cheng, Dongxiao Yu. "Distributed Bilevel
Optimization with Dual Pruning for Resource-limited Clients". 2025, arXiv:2512.24667. Algorithms 1 and 2, eqs. (3)-(10).

Client i holds the units that the policy leaves it, by importance if `Submodels` says no other, and x_i, y_i are what
these have of x and y. A round:

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x_i, y_{i,ν}; ζ_ν),  ν < τ_i            (5)
    y ← y + η mean_i (y_{i,τ_i} − y_i),  η = `inner_server_lr`, 1 in the paper    (6)     T times, one exchange each
    h_i = ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x_i, y_i; ξ, ζ)               (7)
    x ← x − α mean_i h_i                                                          (8)     one exchange

with mean_i of an entry over the clients that hold it; what nobody holds stays. Down go x_i and y_i, up of y_i's shape
(5) or x_i's (7). RAFBO's h_i needs no second derivatives:

    adjoint      (7), each product with ∇²g by central differences along its vector, of gradients or of what has one
    coordinate   h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p over |P| of the d coordinates of x_i, drawn anew,
                 δ_p = [y_N(x_i + μe_p) − y_N(x_i)]/μ, y_N(·) being the end of N steps s on the same batches from y_i
    printed      δ_p = [∇y g_i(x_i + μe_p, y_i) − ∇y g_i(x_i, y_i)]/μ, without d/|P|: Algorithm 2, for the record

Departures from the paper:
1. Line 10 prints G = (y_T − y_0)/β and line 18 subtracts β·mean G, which climbs; here y descends. A client's step is
   β/τ_i, and means weigh clients: Σ p̃_i u_i as FedNest has it, times Σ p_i over the cohort / Σ p_i over the holders.
2. The printed δ_p is a column of ∇²yx g, not of ∂y*/∂x, and its sign is the opposite one. What the text before (9) asks
   for is the Jacobian of the inner solution, "coordinate". Its y_N has ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g for
   quadratic g: it is "series" with N = `neumann_terms`, s = `neumann_step`, seen from x, and for N = 1 −s times the
   printed δ_p.
3. "adjoint", the default, whose cost does not depend on the dimension of x.
4. (7) averages clients' own hypergradients, which is biased where clients differ. With hypergradient = "global" every
   product is a mean over clients. Entry by entry over other holders each, such a mean of products is no symmetric
   operator, which conjugate gradient needs: it is for "local" alone.

Checked in tests/algorithms/test_rabo.py (closed forms, dense hypergradients, drawn coordinates), test_rabo_submodels.py
(sliced problems), tests/oracles/test_differences.py, tests/engines/test_agreement.py and test_submodels.py.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.fednest import Alternating, State
from fedbilevel.algorithms.parts.hypergradient import Estimate, Inverse, Own, Quality
from fedbilevel.algorithms.parts.local_descent import local_descent
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive, static
from fedbilevel.core.errors import require, require_count, unknown
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree, scaled
from fedbilevel.oracles.differences import Differences, coordinate_slopes
from fedbilevel.oracles.fixed_x import inner_loss_at

SlopeEstimator = Literal["adjoint", "coordinate", "printed"]


class Adaptive(Alternating):
    """What the two share: FedAvg on y, then one step on x, all on submodels.

    Args: those of `Alternating`, where a step on x is α; `merged` has nothing to leave out.
    """

    hypergradient: Literal["global", "local"] = static(default="local")
    inverse: Inverse = static(default="series")

    def validate(self) -> None:
        super().validate()
        fits = self.hypergradient == "local" or self.inverse in ("random", "series")
        allowed = "'random' or 'series' where hypergradient = 'global': means over unequal holders are not symmetric"
        require(fits, f"{self.label}.inverse", self.inverse, allowed)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner_rounds_of_fedavg(fed, state, inner_key)
        h, quality = self.estimate(fed, state.x, y, outer_key)
        return self.moved(state, scaled(-self.outer_lr, h), y, quality)


class RABO(Adaptive):
    """Submodels for weak clients, with exact products. Fields: see `Adaptive`.

    Exchanges per round: T + 1; "global" T + N' + 2, by "series" T + N + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model; biased where clients differ, less so with "global".
    Cost per local step: a gradient of g; on x: one of f and the products with the client's own ∇²g.
    Client state: none.
    """

    name = "rabo"
    trains_submodels = True


class RAFBO(Adaptive):
    """Submodels for weak clients, without second derivatives. Fields: see `Adaptive`, and

    Args:
        estimator: "adjoint", or, for local hypergradients, "coordinate" or "printed"; these invert nothing, and want
            `inverse` = "series", whose `neumann_terms` and `neumann_step` are N and s of "coordinate".
        coordinates: |P|, of x's coordinates that a client holds, if it has as many; None: all.
        perturbation: of differences, in units of what balances their two errors (see oracles/differences.py).

    Exchanges per round: T + 1; "global" T + N' + 2, by "series" T + N + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model whose losses have no cheap second derivatives.
    Cost per local step: a gradient of g; on x: one of f, and of g "adjoint" 2N, "coordinate" N(|P| + 1), "printed"
        |P| + 1.
    Client state: none.
    """

    name = "rafbo"
    trains_submodels = True

    estimator: SlopeEstimator = static(default="adjoint")
    coordinates: int | None = static(default=None)
    perturbation: float = positive(default=1.0)

    def validate(self) -> None:
        super().validate()
        if self.estimator not in get_args(SlopeEstimator):
            raise unknown("RAFBO.estimator", self.estimator, get_args(SlopeEstimator))
        require_count("RAFBO.coordinates", self.coordinates, optional=True)
        along_v = self.estimator == "adjoint"
        allowed = f"{{}} where estimator = {self.estimator!r}"
        require(along_v or not self.paired, "RAFBO.paired", True, allowed.format("False"))
        none = self.coordinates is None
        require(not along_v or none, "RAFBO.coordinates", self.coordinates, allowed.format("None"))
        own = along_v or self.hypergradient == "local"
        require(own, "RAFBO.hypergradient", self.hypergradient, allowed.format("'local'"))
        require(along_v or self.inverse == "series", "RAFBO.inverse", self.inverse, allowed.format("'series'"))

    @property
    def second_order(self) -> Differences:
        return Differences(self.perturbation)

    def counted(self, reply: Reply) -> Reply:
        return reply._replace(gradients=reply.gradients + 2 * reply.hvps, hvps=0)

    def own_hypergradient(self, client: Client, x: PyTree, y: PyTree, key: Array) -> Own:
        if self.estimator == "adjoint" or client.problem.implicit_term != "inverse":
            return super().own_hypergradient(client, x, y, key)
        outer_key, inner_key, draw_key = jax.random.split(key, 3)
        batch = client.outer_batch(outer_key, self.batch_size)
        loss, (f_x, f_y) = jax.value_and_grad(client.problem.outer, (0, 1))(x, y, batch)
        answer, each = self.answer(client, y, inner_key)
        dim = sum(leaf.size for leaf in jax.tree.leaves(x))
        count = min(self.coordinates or dim, dim)
        places = jnp.arange(dim) if count == dim else jax.random.choice(draw_key, dim, (count,), replace=False)
        along = coordinate_slopes(answer, x, f_y, places, self.perturbation)
        share = 1.0 if self.estimator == "printed" else dim / count
        h = optax.tree.add(f_x, scaled(share, along))
        return Own(loss, Estimate(h, Quality.unknown()), 1 + each * (count + 1), jnp.asarray(0))

    def answer(self, client: Client, y: PyTree, key: Array) -> tuple[Callable[[PyTree], PyTree], Any]:
        """How y answers x, on batches that do not depend on x, and the gradients that one answer takes."""
        terms: Any = self.terms_of(client) if self.estimator == "coordinate" else 1
        most = self.most_terms if self.estimator == "coordinate" else 1

        def end(x: PyTree) -> PyTree:
            gradient = inner_loss_at(client, x, y, self.batch_size, most).gradient
            if self.estimator == "printed":
                return gradient(y, key)
            return local_descent(gradient, y, terms, terms * self.neumann_step, key)  # the change: y itself cancels

        return end, terms
