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

    Differences    (7), each product with ∇²g by central differences along its vector
    Coordinates    h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p over |P| of the d coordinates of x_i, drawn anew,
                   δ_p = [y_N(x_i + μe_p) − y_N(x_i)]/μ, y_N(·) the end of N steps s from y_i on the same batches
    PrintedSlopes  δ_p = [∇y g_i(x_i + μe_p, y_i) − ∇y g_i(x_i, y_i)]/μ, without d/|P|: (10) of Algorithm 2

Where every client holds the whole model, RABO is LFedNest with one step on x, to rounding with full batches, and
RABO(hypergradient=Implicit()) is FedMBO, draw by draw.

Departures from the paper:
1. Line 10 prints G = (y_T − y_0)/β and line 18 subtracts β·mean G, which climbs; here y descends. A client's step is
   β/τ_i, and means weigh clients: Σ p̃_i u_i as FedNest has it, times Σ p_i over the cohort / Σ p_i over the holders.
2. The printed δ_p is a column of ∇²yx g, not of ∂y*/∂x, and its sign is the opposite: its h_i had a median cosine
   of −0.95 with the hypergradient over 200 draws of the quadratic task. What the text before (9) asks for is the
   Jacobian of the inner solution, `Coordinates`. Its y_N has ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g for quadratic g: it
   is the Neumann series with its N and s, seen from x, and for N = 1 −s times the printed δ_p.
3. `LocalImplicit`, the default of both, whose cost does not depend on the dimension of x: RAFBO's by `Differences`.
4. (7) averages clients' own hypergradients, which is biased where clients differ. With `Implicit` (RABO) every
   product is a mean over clients. Entry by entry over other holders each, such a mean of products is no symmetric
   operator, which conjugate gradient needs: it is for `LocalImplicit` alone.
5. The paper has RAFBO at two thirds of RABO's operations, and does not say what it counts. Here both take nearly the
   same where x is layers: a pass over samples makes features for both gradients of a product, as for an exact one, and
   ∇f and the way back to x are left. (10) needs ∇f too, and for g 1 + |P| passes: no third less with any P.

Checked in tests/algorithms/test_rabo.py (closed forms, dense hypergradients, drawn coordinates), test_rabo_submodels.py
(sliced problems), tests/oracles/test_differences.py, tests/engines/test_agreement.py and test_submodels.py.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Estimate, Exact, Hypergradient, Implicit, LocalImplicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import SolveInfo, check_neumann_step
from fedbilevel.algorithms.parts.nested import ALL_BILEVEL, Nested, State, allowed_by, own_alone
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Allows, Facts, No, OwnParts
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.oracles.differences import Differences, coordinate_slopes
from fedbilevel.oracles.fixed_x import inner_loss_at

OWN_SYSTEMS = "local_hypergradient", "slopes"  # phases in which a client finds the hypergradient alone


class CoordinateSlopes(Hypergradient):
    """∇x f_i and the slopes of ⟨response, ∇y f_i⟩ along some coordinates of x, on a client's own losses.

    Args:
        count: |P|, how many coordinates of x a client draws anew in every round, of those that it holds; all of them
            where it holds fewer. None: all.
        perturbation: μ, the length of differences; None: (ε(1 + ‖x‖))^½, ε being the precision of the numbers.
    """

    count: int | None = positive_integer(default=None, optional=True)
    perturbation: float | None = positive(default=None, optional=True)

    @property
    @abstractmethod
    def gradients(self) -> int:
        """How many gradients of g a response costs."""

    @abstractmethod
    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Return the vector, of the shape of y, whose change with x is taken."""

    @abstractmethod
    def scaling(self, dim: int, drawn: int) -> float:
        """Return the factor of the sum of slopes along `drawn` of the `dim` coordinates of x."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        return Estimate(fed.mean(self.slopes, (x, y), key, unbiased=True), SolveInfo.unknown())

    @phase(takes=("x", "y"), gives="x")
    def slopes(self, client: Client, point: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with h_i at (x, y)."""
        x, y = point
        if client.problem.implicit_term != "inverse":  # no linear system: y needs no slopes
            alone = LocalImplicit(second_order=Differences(perturbation=self.perturbation))
            reply = alone.local_hypergradient(client, point, key)
            return reply._replace(update=reply.update[0])
        outer_key, inner_key, draw_key = jax.random.split(key, 3)
        loss, (f_x, f_y) = jax.value_and_grad(client.problem.outer, (0, 1))(x, y, client.outer_batch(outer_key))
        dim = sum(leaf.size for leaf in jax.tree.leaves(x))
        drawn = min(self.count or dim, dim)
        places = jnp.arange(dim) if drawn == dim else jax.random.choice(draw_key, dim, (drawn,), replace=False)
        along = coordinate_slopes(lambda x: self.response(client, x, y, inner_key), x, f_y, places, self.perturbation)
        h = optax.tree.add(f_x, scaled(self.scaling(dim, drawn), along))
        return Reply(h, metrics={"outer_loss": loss}, gradients=1 + self.gradients * (drawn + 1))


class Coordinates(CoordinateSlopes):
    """h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p, δ_p = [y_N(x + μe_p) − y_N(x)]/μ, on a client's own loss.

    P are |P| of the d coordinates of x, drawn anew; y_N(·) is the end of N steps s on y on the same batches, so that
    for quadratic g this is the Neumann series of N terms with step s, seen from x.

    Args:
        terms: N, steps on y.
        step: s, below 2/ℓ for ℓ the largest eigenvalue of any ∇²yy g_i; None adapts it (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "coordinates"
    alone: ClassVar[bool] = True

    terms: int = positive_integer(default=20)
    step: float = positive(default=None, own=True, adaptive="shared")

    @property
    def allows(self) -> Allows:
        return super().allows._replace(own_y={"slopes": OwnParts(("y",), alone=True)})

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Refuse a step at which the steps on y grow."""
        if problem.implicit_term == "inverse":
            check_neumann_step("Coordinates.step", at(self, 0).step, problem, clients, x, y, True)

    @property
    def gradients(self) -> int:
        return self.terms

    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Return y_N(x) − y: y itself cancels."""
        gradient = inner_loss_at(client, x, y, client.batch_size, self.terms).gradient

        def step(k: Array, change: PyTree) -> PyTree:  # not of y: differences of responses need every digit
            return move(change, -self.step, gradient(optax.tree.add(y, change), jax.random.fold_in(key, k)))

        return jax.lax.fori_loop(0, self.terms, step, optax.tree.zeros_like(y))

    def scaling(self, dim: int, drawn: int) -> float:
        return dim / drawn


class PrintedSlopes(CoordinateSlopes):
    """Algorithm 2 of RAFBO's paper as it is printed: δ_p = [∇y g_i(x + μe_p, y) − ∇y g_i(x, y)]/μ, without d/|P|.

    h_i = ∇x f_i + Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p is not the hypergradient; it is here for the record. P are |P| of the
    coordinates of x, drawn anew.
    """

    kind: ClassVar[str] = "printed"

    @property
    def allows(self) -> Allows:
        return super().allows._replace(own_y=No("its slopes are not those of the inner solution"))

    @property
    def gradients(self) -> int:
        return 1

    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return inner_loss_at(client, x, y, client.batch_size, 1).gradient(y, key)

    def scaling(self, dim: int, drawn: int) -> float:
        return 1.0


class DualPruning(Nested):
    """RABO and RAFBO: rounds on y, then one step on x, of which every client sees the units that it holds.

    Args:
        inner: the rounds on y: FedAvg's local steps.
        outer_lr: α, the server's step on x; None adapts it (`AdaptiveSteps`).
    """

    outer_lr: float = positive(default=None, adaptive="x")
    inner: LocalSGD = LocalSGD()

    @property
    def allows(self) -> Allows:
        phase = next((name for name in self.hypergradient.phases if name in OWN_SYSTEMS), "")
        return allowed_by(self)._replace(own_y=own_alone(self, f"hypergradient.{phase}"))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        inner_key, outer_key = jax.random.split(key)
        y = self.inner.descend(fed, state.x, state.y, inner_key)  # (5), (6)
        h, info = self.hypergradient.estimate(fed, state.x, y, outer_key)  # (7)
        return self.next_state(state, scaled(-self.outer_lr, h), y, info)  # (8)


class RABO(DualPruning):
    """Submodels for clients of limited capacity, with products of second derivatives.

    Args:
        hypergradient: how the hypergradient is found: by each client alone, or by products that are means over the
            clients that hold an entry.
    """

    name = "rabo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Li et al. 2025, arXiv:2512.24667",
        needs="g_i strongly convex in y for every client; for capacities a structure",
        good_for="clients too small for the whole model; biased where clients differ, less so with `Implicit`",
        exchanges="T + 1; `Implicit`: T + N' + 2, by the whole series T + N + 1",
        up="1 like x, T like y; `Implicit`: T + N like y",
        hvps="N",
        cost="a gradient of g; on x a gradient of f and the products with the client's own ∇²g",
        bias="clients' own hypergradients (not with `Implicit`); truncation; drift of y where τ > 1; submodels",
    )

    hypergradient: LocalImplicit | Implicit = LocalImplicit()

    def validate(self) -> None:
        may = self.hypergradient.allows.submodels
        why = may.why if isinstance(may, No) else ""
        require(not why, "RABO.hypergradient", self.hypergradient, f"a hypergradient for submodels: {why}")


class RAFBO(DualPruning):
    """Submodels for clients of limited capacity, without second derivatives.

    Args:
        hypergradient: how each client finds its own, from gradients alone: by differences along the vectors that the
            linear system asks for, or along coordinates of x.
    """

    name = "rafbo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Li et al. 2025, arXiv:2512.24667",
        needs="g_i strongly convex in y for every client; for capacities a structure",
        good_for="clients too small for the whole model whose losses have no cheap second derivatives",
        exchanges="T + 1",
        up="1 like x, T like y",
        cost=(
            "a gradient of g; on x a gradient of f, and of g 2N by differences, N(|P| + 1) by `Coordinates`, |P| + 1 "
            "by `PrintedSlopes`"
        ),
        bias="clients' own hypergradients; truncation; drift of y where τ > 1; submodels",
    )

    hypergradient: LocalImplicit | Coordinates | PrintedSlopes = LocalImplicit(second_order=Differences())

    def validate(self) -> None:
        second_order = self.hypergradient.second_order if isinstance(self.hypergradient, LocalImplicit) else None
        allowed = "Differences(…): RAFBO takes no second derivatives; RABO does"
        require(not isinstance(second_order, Exact), "RAFBO.hypergradient.second_order", second_order, allowed)
