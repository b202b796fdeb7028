"""RABO and RAFBO: clients of limited capacity train submodels, and their replies are averaged entry by entry.

Mingyi Li, Xiao Zhang, Ruisheng Zheng, Hongjian Shi, Yuan Yuan, Xiuzhen Cheng, Dongxiao Yu. "Distributed Bilevel
Optimization with Dual Pruning for Resource-limited Clients". 2025, arXiv:2512.24667. Algorithms 1 and 2, eqs. (3)-(10).

A policy chooses the units (hidden neurons or channels, with all their weights) that client i holds, by default the most
important ones (docs/how-to/submodels.md). x_i and y_i are the entries of x and y that belong to these units. A round
computes

    y_{i,ν+1} = y_{i,ν} − (β/τ_i) ∇y g_i(x_i, y_{i,ν}; ζ_ν),  ν < τ_i            (5)
    y ← y + η mean_i (y_{i,τ_i} − y_i),  η = `inner.server_lr`, 1 in the paper    (6)     T times, one exchange each
    h_i = ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x_i, y_i; ξ, ζ)               (7)
    x ← x − α mean_i h_i                                                          (8)     one exchange

where mean_i of an entry is the mean over the clients that hold it. β is `inner.lr`, α is `outer_lr`, and T is
`inner.rounds`. ζ and ζ_ν are samples of the inner loss, and ξ are samples of the outer loss. An entry that no client
holds does not change. The server sends x_i and y_i. Clients reply with vectors of y_i's shape in (5), and of x_i's
shape in (7).

RAFBO computes h_i without second derivatives, in one of three ways:

    Differences    (7), where the product of ∇²g and a vector is a central difference of gradients along this vector
    Coordinates    h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p,  δ_p = [y_N(x_i + μe_p) − y_N(x_i)]/μ
    PrintedSlopes  h_i = ∇x f_i + Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p,  δ_p = [∇y g_i(x_i + μe_p, y_i) − ∇y g_i(x_i, y_i)]/μ

In the last two, client i draws a random set P of coordinates of x_i in every round. |P| is the number of coordinates in
P, d is the number of all coordinates of x_i, e_p is the unit vector of coordinate p, and μ is a small distance. y_N(·)
is the result of N steps of size s on y from y_i, on the same batches at x_i and at x_i + μe_p. `PrintedSlopes` is (10)
of Algorithm 2 as printed.

If every client holds the whole model, then with full batches RABO computes the same numbers as LFedNest with one step
on x, up to rounding. RABO(hypergradient=Implicit()) then computes the same numbers as FedMBO from the same draws.

Departures from the paper:
1. By lines 10 and 18 of Algorithm 1 the inner loss would rise: a client's G is (y_T − y_0)/β, which points to smaller
   g_i, and the server subtracts β·mean G from y. Here the server adds the changes of y.
2. In (5) of the paper, the size of a client's step is β. Here it is β/τ_i, so that clients that make more steps do not
   count more.
3. In (6) and (8) of the paper all clients take part, and the mean of an entry gives the same weight to all clients that
   hold the entry. Here client i has the weight p_i, and m of the M clients form the cohort C of a round. With the
   update u_i of client i, the mean of an entry is

       (Σ_{i∈C} p_i / Σ_{i∈C holds the entry} p_i) · Σ_{i∈C holds the entry} p̃_i u_i,   p̃_i = (M/m) p_i

   If all clients of the cohort hold the entry, this is FedNest's Σ p̃_i u_i.
4. The printed δ_p is a column of ∇²yx g. The hypergradient needs a column of ∂y*/∂x = −H⁻¹∇²yx g, with H = ∇²yy g. So
   H⁻¹ and the minus sign are missing. In 200 draws of the quadratic task we compared h_i − ∇x f_i, the part of h_i that
   comes through y, with the same part of the exact hypergradient. With the printed δ_p the two vectors were nearly
   opposite: the median of the cosine between them was −0.95. The text before (9) asks for the Jacobian of the inner
   solution, which `Coordinates` estimates. For quadratic g, ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g. Here
   s Σ_{n<N} (I − sH)ⁿ is the Neumann series of N terms with step s, which approximates H⁻¹. So ∂y_N/∂x approximates
   ∂y*/∂x. For N = 1 its columns are −s times the printed δ_p.
5. The default of both methods is `LocalImplicit`, whose cost does not depend on the dimension of x. RAFBO uses it with
   `Differences`.
6. (7) averages clients' own hypergradients, which is biased if clients differ. With `Implicit` (RABO) every product of
   ∇²g and a vector is a mean over clients. In this mean, each entry has its own divisor, the total weight of the
   clients that hold the entry. So if different clients hold different entries, the operator that maps the vector to
   this mean is not symmetric. Conjugate gradient needs a symmetric operator, and is therefore only for `LocalImplicit`.
7. The paper reports that RAFBO takes two thirds of RABO's operations, and does not say which operations it counts. Here
   both methods take nearly the same number if x is the first layers of a network and y the last ones. In both, one
   forward pass over the samples computes the input of the last layers (the features). A difference then needs two cheap
   gradients, and an exact product costs about the same. Both methods also pay for ∇f and for the backward pass to x.
   The printed (10) does not save a third for any P either, because it needs ∇f and 1 + |P| passes for g.

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
from fedbilevel.core.field_types import Step
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.oracles.differences import Differences, coordinate_slopes
from fedbilevel.oracles.fixed_x import inner_loss_at

OWN_SYSTEMS = "local_hypergradient", "slopes"  # phases in which a client computes a hypergradient on its own


class CoordinateSlopes(Hypergradient):
    """Estimate a client's hypergradient by ∇x f_i and the slopes of ⟨response, ∇y f_i⟩ along some coordinates of x.

    Args:
        count: |P|, the number of coordinates of x that a client draws in every round, among the coordinates that it
            holds. If it holds fewer, it uses all of them. None: all coordinates.
        perturbation: μ, the distance between the two points of a difference; None: (ε(1 + ‖x‖))^½, where ε is the
            machine precision.
    """

    count: int | None = positive_integer(default=None, optional=True)
    perturbation: float | None = positive(default=None, optional=True)

    @property
    @abstractmethod
    def gradients(self) -> int:
        """Return the number of gradients of g that `response` computes."""

    @abstractmethod
    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Return a vector in the shape of y; its differences in x estimate how the inner solution depends on x."""

    @abstractmethod
    def scaling(self, dim: int, drawn: int) -> float:
        """Return the factor by which the sum of slopes is multiplied if `drawn` of `dim` coordinates of x are used."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        return Estimate(fed.mean(self.slopes, (x, y), key, unbiased=True), SolveInfo.unknown())

    @phase(takes=("x", "y"), gives="x")
    def slopes(self, client: Client, point: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with h_i, the client's own estimate of the hypergradient at (x, y), in the shape of x."""
        x, y = point
        if client.problem.implicit_term != "inverse":  # there is no linear system, and slopes are not needed
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
    """Estimate a client's hypergradient from differences of the inner solution along coordinates of x.

    h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p with δ_p = [y_N(x + μe_p) − y_N(x)]/μ. Here P is a random set of
    |P| of the d coordinates of x, and y_N(·) is the result of N steps of size s on y, on the same batches. For
    quadratic g this is a Neumann series of N terms with step s: ∂y_N/∂x = −s Σ_{n<N} (I − sH)ⁿ ∇²yx g with H = ∇²yy g.

    Args:
        terms: N, the number of steps on y.
        step: s, the size of these steps. It must be below 2/ℓ, where ℓ is the largest eigenvalue of any ∇²yy g_i. None:
            s adapts during the run (`AdaptiveSteps`).
    """

    kind: ClassVar[str] = "coordinates"
    alone: ClassVar[bool] = True

    terms: int = positive_integer(default=20)
    step: Step = positive(default=None, own=True, adaptive="shared")

    @property
    def allows(self) -> Allows:
        return super().allows._replace(own_y={"slopes": OwnParts(("y",), alone=True)})

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Refuse a step size at which the steps on y diverge."""
        if problem.implicit_term == "inverse":
            check_neumann_step("Coordinates.step", at(self, 0).step, problem, clients, x, y, True)

    @property
    def gradients(self) -> int:
        return self.terms

    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Return y_N(x) − y, in the shape of y; y is subtracted because it cancels in the differences."""
        gradient = inner_loss_at(client, x, y, client.batch_size, self.terms).gradient

        def step(k: Array, change: PyTree) -> PyTree:  # the change of y is small and has smaller rounding errors than y
            return move(change, -self.step, gradient(optax.tree.add(y, change), jax.random.fold_in(key, k)))

        return jax.lax.fori_loop(0, self.terms, step, optax.tree.zeros_like(y))

    def scaling(self, dim: int, drawn: int) -> float:
        return dim / drawn


class PrintedSlopes(CoordinateSlopes):
    """Run Algorithm 2 of RAFBO's paper as printed, with δ_p = [∇y g_i(x + μe_p, y) − ∇y g_i(x, y)]/μ and no d/|P|.

    h_i = ∇x f_i + Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p is not the hypergradient. The class is here for comparison with the paper.
    Here P is a random set of |P| coordinates of x, drawn in every round.
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
    """Base class of RABO and RAFBO: rounds on y, then one step on x; a client gets only the units that it holds.

    Args:
        inner: the rounds on y, by FedAvg's local steps.
        outer_lr: α, the server's step size on x; None: it adapts during the run (`AdaptiveSteps`).
    """

    outer_lr: Step = positive(default=None, adaptive="x")
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
    """Train submodels at clients of limited capacity, by hypergradients with second derivatives.

    Args:
        hypergradient: how the hypergradient is computed: by each client on its own, or with products that are means
            over the clients that hold an entry.
    """

    name = "rabo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Li et al. 2025, arXiv:2512.24667",
        needs="g_i strongly convex in y for every client; with capacities, a structure",
        good_for="clients too small for the whole model; biased if clients differ, less so with `Implicit`",
        exchanges="T + 1; with `Implicit` T + N' + 2, or T + N + 1 if it sums the whole series",
        up="1 like x, T like y; with `Implicit` T + N like y",
        hvps="N",
        cost="a gradient of g; on x, a gradient of f and the products with the client's own ∇²g",
        bias="clients' own hypergradients (not with `Implicit`); truncation; drift of y if τ > 1; submodels",
    )

    hypergradient: LocalImplicit | Implicit = LocalImplicit()

    def validate(self) -> None:
        may = self.hypergradient.allows.submodels
        why = may.why if isinstance(may, No) else ""
        require(not why, "RABO.hypergradient", self.hypergradient, f"a hypergradient for submodels: {why}")


class RAFBO(DualPruning):
    """Train submodels at clients of limited capacity, by hypergradients without second derivatives.

    Args:
        hypergradient: how each client computes its own hypergradient from gradients: by differences along the vectors
            of the linear system, or along coordinates of x.
    """

    name = "rafbo"
    solves = ALL_BILEVEL
    facts = Facts(
        paper="Li et al. 2025, arXiv:2512.24667",
        needs="g_i strongly convex in y for every client; with capacities, a structure",
        good_for="clients too small for the whole model, whose losses have no cheap second derivatives",
        exchanges="T + 1",
        up="1 like x, T like y",
        cost=(
            "a gradient of g; on x, a gradient of f, and gradients of g: 2N by differences, N(|P| + 1) by "
            "`Coordinates`, |P| + 1 by `PrintedSlopes`"
        ),
        bias="clients' own hypergradients; truncation; drift of y if τ > 1; submodels",
    )

    hypergradient: LocalImplicit | Coordinates | PrintedSlopes = LocalImplicit(second_order=Differences())

    def validate(self) -> None:
        second_order = self.hypergradient.second_order if isinstance(self.hypergradient, LocalImplicit) else None
        allowed = "Differences(…): RAFBO takes no second derivatives; RABO does"
        require(not isinstance(second_order, Exact), "RAFBO.hypergradient.second_order", second_order, allowed)
