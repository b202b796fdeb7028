"""RABO and RAFBO: clients of limited capacity train submodels, and what they send is averaged entry by entry.

Mingyi Li, Xiao Zhang, Ruisheng Zheng, Hongjian Shi, Yuan Yuan, Xiuzhen Cheng, Dongxiao Yu. "Distributed Bilevel
Optimization with Dual Pruning for Resource-limited Clients". 2025, arXiv:2512.24667. Algorithms 1 and 2, eqs. (3)-(10).

Client i holds the units that the policy chooses, by importance unless `Submodels` names another, and x_i, y_i are what
these have of x and y. A round:

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x_i, y_{i,ν}; ζ_ν),  ν < τ_i            (5)
    y ← y + η mean_i (y_{i,τ_i} − y_i),  η = `inner.server_lr`, 1 in the paper    (6)     T times, one exchange each
    h_i = ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x_i, y_i; ξ, ζ)               (7)
    x ← x − α mean_i h_i                                                          (8)     one exchange

with mean_i of an entry over the clients that hold it; an entry that no client holds stays. The server sends x_i and
y_i; clients reply with vectors of y_i's shape (5) or x_i's (7). RAFBO's h_i needs no second derivatives:

    LocalDifferences  (7), each product with ∇²g by central differences along its vector
    Coordinates       h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p over |P| of the d coordinates of x_i, drawn anew,
                      δ_p = [y_N(x_i + μe_p) − y_N(x_i)]/μ, y_N(·) the end of N steps s from y_i on the same batches
    PrintedSlopes     δ_p = [∇y g_i(x_i + μe_p, y_i) − ∇y g_i(x_i, y_i)]/μ, without d/|P|: Algorithm 2, for the record

Departures from the paper:
1. Line 10 prints G = (y_T − y_0)/β and line 18 subtracts β·mean G, which climbs; here y descends. A client's step is
   β/τ_i, and means weigh clients: Σ p̃_i u_i as FedNest has it, times Σ p_i over the cohort / Σ p_i over the holders.
2. The printed δ_p is a column of ∇²yx g, not of ∂y*/∂x, and its sign is the opposite one. What the text before (9) asks
   for is the Jacobian of the inner solution, `Coordinates`. Its y_N has ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g for
   quadratic g: it is the Neumann series with its N and s, seen from x, and for N = 1 −s times the
   printed δ_p.
3. `LocalImplicit`, RABO's default, and `LocalDifferences`, RAFBO's, whose cost does not depend on the dimension of x.
4. (7) averages clients' own hypergradients, which is biased where clients differ. With `Implicit` (RABO) every
   product is a mean over clients. Entry by entry over other holders each, such a mean of products is no symmetric
   operator, which conjugate gradient needs: it is for `LocalImplicit` alone.

Checked in tests/algorithms/test_rabo.py (closed forms, dense hypergradients, drawn coordinates), test_rabo_submodels.py
(sliced problems), tests/oracles/test_differences.py, tests/engines/test_agreement.py and test_submodels.py.
"""

from fedbilevel.algorithms.fednest import OneStep
from fedbilevel.algorithms.parts.coordinates import Coordinates, PrintedSlopes
from fedbilevel.algorithms.parts.hypergradients import Implicit, LocalDifferences, LocalImplicit
from fedbilevel.algorithms.parts.linear_solvers import Neumann
from fedbilevel.core.errors import require


class Adaptive(OneStep):
    """RABO and RAFBO: a nested method on submodels."""

    @property
    def merges(self) -> bool:
        return False


class RABO(Adaptive):
    """Submodels for clients of limited capacity, with products of second derivatives.

    Exchanges per round: T + 1; `Implicit`: T + N' + 2, by the whole series T + N + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model; biased where clients differ, less so with `Implicit`.
    Vectors up per client: 1 like x, T like y; `Implicit`: T + N like y. Hvps per client: N.
    Bias: clients' own hypergradients (not with `Implicit`); truncation; drift of y where τ > 1; submodels.
    Cost per local step: a gradient of g; on x: one of f and the products with the client's own ∇²g.
    Client state: none.

    Args:
        hypergradient: how the hypergradient is found: by each client alone, or by products that are means over the
            clients that hold an entry.
    """

    name = "rabo"

    hypergradient: LocalImplicit | Implicit = LocalImplicit()

    def validate(self) -> None:
        if isinstance(self.hypergradient, Implicit):
            solver = self.hypergradient.solver
            fits = isinstance(solver, Neumann) and solver.sampling != "random_per_client"
            allowed = "Neumann(sampling=None or 'random') with Implicit: means over unequal holders are not symmetric"
            require(fits, "RABO.hypergradient.solver", solver, allowed)


class RAFBO(Adaptive):
    """Submodels for clients of limited capacity, without second derivatives.

    Exchanges per round: T + 1.
    Needs: a bilevel, minimax or compositional problem; g_i strongly convex in y for every client; for capacities a
        structure.
    Good for: clients too small for the whole model whose losses have no cheap second derivatives.
    Vectors up per client: 1 like x, T like y. Hvps per client: none.
    Bias: clients' own hypergradients; truncation; drift of y where τ > 1; submodels.
    Cost per local step: a gradient of g; on x: one of f, and of g 2N by differences, N(|P| + 1) by `Coordinates`,
        |P| + 1 by `PrintedSlopes`.
    Client state: none.

    Args:
        hypergradient: how each client finds its own, from gradients alone: by differences along the vectors that the
            linear system asks for, or along coordinates of x.
    """

    name = "rafbo"

    hypergradient: LocalDifferences | Coordinates | PrintedSlopes = LocalDifferences()
