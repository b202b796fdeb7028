"""RABO and RAFBO: clients of limited capacity train submodels, and what they send is averaged entry by entry.

Mingyi Li, Xiao Zhang, Ruisheng Zheng, Hongjian Shi, Yuan Yuan, Xiuzhen Cheng, Dongxiao Yu. "Distributed Bilevel
Optimization with Dual Pruning for Resource-limited Clients". 2025, arXiv:2512.24667. Algorithms 1 and 2, eqs. (3)-(10).

Client i holds the units that the policy leaves it, by importance if `Submodels` says no other, and x_i, y_i are what
these have of x and y. A round:

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x_i, y_{i,ν}; ζ_ν),  ν < τ_i            (5)
    y ← y + η mean_i (y_{i,τ_i} − y_i),  η = `inner.server_lr`, 1 in the paper    (6)     T times, one exchange each
    h_i = ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x_i, y_i; ξ, ζ)               (7)
    x ← x − α mean_i h_i                                                          (8)     one exchange

with mean_i of an entry over the clients that hold it; what nobody holds stays. Down go x_i and y_i, up of y_i's shape
(5) or x_i's (7). RAFBO's h_i needs no second derivatives:

    LocalImplicit   (7), each product with ∇²g by central differences along its vector: second_order=Differences()
    Coordinates     h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p over |P| of the d coordinates of x_i, drawn anew,
                    δ_p = [y_N(x_i + μe_p) − y_N(x_i)]/μ, y_N(·) being the end of N steps s on the same batches from y_i
    PrintedSlopes   δ_p = [∇y g_i(x_i + μe_p, y_i) − ∇y g_i(x_i, y_i)]/μ, without d/|P|: Algorithm 2, for the record

Departures from the paper:
1. Line 10 prints G = (y_T − y_0)/β and line 18 subtracts β·mean G, which climbs; here y descends. A client's step is
   β/τ_i, and means weigh clients: Σ p̃_i u_i as FedNest has it, times Σ p_i over the cohort / Σ p_i over the holders.
2. The printed δ_p is a column of ∇²yx g, not of ∂y*/∂x, and its sign is the opposite one. What the text before (9) asks
   for is the Jacobian of the inner solution, `Coordinates`. Its y_N has ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g for
   quadratic g: it is the Neumann series with its N and s, seen from x, and for N = 1 −s times the
   printed δ_p.
3. `LocalImplicit`, the default, whose cost does not depend on the dimension of x.
4. (7) averages clients' own hypergradients, which is biased where clients differ. With `Implicit` every
   product is a mean over clients. Entry by entry over other holders each, such a mean of products is no symmetric
   operator, which conjugate gradient needs: it is for `LocalImplicit` alone.

Checked in tests/algorithms/test_rabo.py (closed forms, dense hypergradients, drawn coordinates), test_rabo_submodels.py
(sliced problems), tests/oracles/test_differences.py, tests/engines/test_agreement.py and test_submodels.py.
"""

import jax
from jax import Array

from fedbilevel.algorithms.fednest import Nested, State
from fedbilevel.algorithms.parts.coordinates import Coordinates, PrintedSlopes
from fedbilevel.algorithms.parts.hypergradients import Differences, Implicit, LocalImplicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import Neumann
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Fed
from fedbilevel.core.tree import scaled


class Adaptive(Nested):
    """RABO and RAFBO: FedAvg on y, then one step on x, all on submodels.

    Args:
        inner: the rounds on y.
        hypergradient: how it is found.
        outer_lr: α, a step on x.
        batch_size: samples per draw for each loss, with replacement; None takes all samples.
    """

    trains_submodels = True

    inner: LocalSGD = LocalSGD()

    def validate(self) -> None:
        super().validate()
        shared = isinstance(self.hypergradient, Implicit)
        solver = self.hypergradient.solver if shared else None
        fits = not shared or (isinstance(solver, Neumann) and solver.sampling != "random_per_client")
        allowed = "Neumann(sampling=None or 'random') with Implicit: means over unequal holders are not symmetric"
        require(fits, f"{self.label}.hypergradient.solver", solver, allowed)

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key)
        h, info = self.hypergradient.estimate(fed, state.x, y, outer_key)
        return self.moved(state, scaled(-self.outer_lr, h), y, info)


class RABO(Adaptive):
    """Submodels for weak clients, with exact products. Fields: see `Adaptive`.

    Exchanges per round: T + 1; `Implicit`: T + N' + 2, by the whole series T + N + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model; biased where clients differ, less so with `Implicit`.
    Vectors up per client: 1 like x, T like y; `Implicit`: T + N like y. Hvps per client: N.
    Bias: clients' own hypergradients (not with `Implicit`); truncation; drift of y where τ > 1; submodels.
    Cost per local step: a gradient of g; on x: one of f and the products with the client's own ∇²g.
    Client state: none.
    """

    name = "rabo"

    hypergradient: LocalImplicit | Implicit = LocalImplicit()


class RAFBO(Adaptive):
    """Submodels for weak clients, without second derivatives. Fields: see `Adaptive`.

    Exchanges per round: T + 1; `Implicit`: T + N' + 2, by the whole series T + N + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model whose losses have no cheap second derivatives.
    Vectors up per client: 1 like x, T like y; `Implicit`: T + N like y. Hvps per client: none.
    Bias: clients' own hypergradients (not with `Implicit`); truncation; drift of y where τ > 1; submodels.
    Cost per local step: a gradient of g; on x: one of f, and of g 2N by differences, N(|P| + 1) by `Coordinates`,
        |P| + 1 by `PrintedSlopes`.
    Client state: none.
    """

    name = "rafbo"

    hypergradient: LocalImplicit | Implicit | Coordinates | PrintedSlopes = LocalImplicit(second_order=Differences())

    def validate(self) -> None:
        super().validate()
        if isinstance(self.hypergradient, LocalImplicit | Implicit):
            kind = self.hypergradient.second_order
            allowed = "Differences(); RABO has the exact products"
            require(isinstance(kind, Differences), "RAFBO.hypergradient.second_order", kind, allowed)
