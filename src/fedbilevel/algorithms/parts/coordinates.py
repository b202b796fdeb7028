"""RAFBO's hypergradients from how y answers single coordinates of x, by forward differences of first derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Differences, Estimate, LocalImplicit
from fedbilevel.algorithms.parts.linear_solvers import Neumann, SolveInfo
from fedbilevel.algorithms.parts.local_descent import local_descent
from fedbilevel.algorithms.parts.neumann_step import check_neumann_step
from fedbilevel.core.algorithm import Part, phase
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import at, positive, static
from fedbilevel.core.errors import require_count
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, scaled
from fedbilevel.oracles.differences import coordinate_slopes
from fedbilevel.oracles.fixed_x import inner_loss_at


class Coordinates(Part):
    """h_i = ∇x f_i + (d/|P|) Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p, δ_p = [y_N(x + μe_p) − y_N(x)]/μ, on a client's own loss.

    P are |P| of the d coordinates of x, drawn anew; y_N(·) is the end of N steps s on y on the same batches, so that
    for quadratic g this is the Neumann series of N terms with step s, seen from x.

    Args:
        count: |P|, of the coordinates that a client holds, if it has as many; None: all.
        terms: N.
        step: s, below 2/ℓ for ℓ the largest eigenvalue of any ∇²yy g_i.
        perturbation: of differences, in units of what balances their two errors (see oracles/differences.py).
    """

    kind: ClassVar[str] = "coordinates"

    count: int | None = static(default=None)
    terms: int = static(default=20)
    step: float = positive(default=0.1)
    perturbation: float = positive(default=1.0)
    solver: ClassVar[Neumann] = Neumann()  # of the sentences on curvature: nothing is met here
    extra_cohorts: ClassVar[int] = 0

    def validate(self) -> None:
        require_count("Coordinates.count", self.count, optional=True)
        require_count("Coordinates.terms", self.terms)

    def check_problem(self, population: int) -> None:
        """Nothing depends on how many clients there are."""

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Refuse a step at which the steps on y grow."""
        if problem.implicit_term == "inverse":
            check_neumann_step("Coordinates.step", at(self, 0).step, problem, clients, x, y, True)

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """The mean of the clients' estimates, in one exchange."""
        return Estimate(fed.mean(self.slopes, (x, y), key, unbiased=True), SolveInfo.unknown())

    @phase(takes=("x", "y"), gives="x")
    def slopes(self, client: Client, point: tuple[PyTree, PyTree], key: Array) -> Reply:
        """h_i at (x, y)."""

        def answer(x: PyTree, y: PyTree, key: Array) -> PyTree:
            gradient = inner_loss_at(client, x, y, client.batch_size, self.terms).gradient
            return local_descent(gradient, y, self.terms, self.terms * self.step, key)  # the change: y itself cancels

        return slopes_of(answer, client, point, key, self.count, self.terms, self.perturbation)


class PrintedSlopes(Part):
    """`Coordinates` as Algorithm 2 prints it, for the record: δ_p = [∇y g_i(x + μe_p, y) − ∇y g_i(x, y)]/μ, no d/|P|.

    Args:
        count: |P|, of the coordinates that a client holds, if it has as many; None: all.
        perturbation: of differences, in units of what balances their two errors (see oracles/differences.py).
    """

    kind: ClassVar[str] = "printed"

    count: int | None = static(default=None)
    perturbation: float = positive(default=1.0)
    solver: ClassVar[Neumann] = Neumann()
    extra_cohorts: ClassVar[int] = 0

    def validate(self) -> None:
        require_count("PrintedSlopes.count", self.count, optional=True)

    def check_problem(self, population: int) -> None:
        """Nothing depends on how many clients there are."""

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Nothing is solved, so that no step can be too long."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """The mean of the clients' estimates, in one exchange."""
        return Estimate(fed.mean(self.slopes, (x, y), key, unbiased=True), SolveInfo.unknown())

    @phase(takes=("x", "y"), gives="x")
    def slopes(self, client: Client, point: tuple[PyTree, PyTree], key: Array) -> Reply:
        """h_i at (x, y)."""

        def answer(x: PyTree, y: PyTree, key: Array) -> PyTree:
            return inner_loss_at(client, x, y, client.batch_size, 1).gradient(y, key)

        return slopes_of(answer, client, point, key, self.count, 1, self.perturbation, scaling=False)


def slopes_of(
    answer: Callable[[PyTree, PyTree, Array], PyTree],
    client: Client,
    point: tuple[PyTree, PyTree],
    key: Array,
    count: int | None,
    gradients: int,
    perturbation: Any,
    scaling: bool = True,
) -> Reply:
    """∇x f_i and the slopes of ⟨answer, ∇y f_i⟩ along `count` coordinates of x; an answer costs so many gradients."""
    x, y = point
    if client.problem.implicit_term != "inverse":  # nothing is solved: there are no slopes of y to take
        alone = LocalImplicit(second_order=Differences(perturbation=perturbation))
        own = alone.own(client, x, y, key)
        reply = Reply(own.estimate.h, metrics={"outer_loss": own.loss}, gradients=own.gradients, hvps=own.hvps)
        return alone.second_order.counted(reply)
    outer_key, inner_key, draw_key = jax.random.split(key, 3)
    loss, (f_x, f_y) = jax.value_and_grad(client.problem.outer, (0, 1))(x, y, client.outer_batch(outer_key))
    dim = sum(leaf.size for leaf in jax.tree.leaves(x))
    count = min(count or dim, dim)
    places = jnp.arange(dim) if count == dim else jax.random.choice(draw_key, dim, (count,), replace=False)
    along = coordinate_slopes(lambda x: answer(x, y, inner_key), x, f_y, places, perturbation)
    h = optax.tree.add(f_x, scaled(dim / count if scaling else 1.0, along))
    return Reply(h, metrics={"outer_loss": loss}, gradients=1 + gradients * (count + 1))
