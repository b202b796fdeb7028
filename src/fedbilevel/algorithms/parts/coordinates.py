"""RAFBO's hypergradients from how y responds to single coordinates of x, by forward differences of gradients."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Estimate, Hypergradient, LocalDifferences
from fedbilevel.algorithms.parts.linear_solvers import SolveInfo
from fedbilevel.algorithms.parts.local_descent import local_descent
from fedbilevel.algorithms.parts.neumann_step import check_neumann_step
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import at, positive, positive_integer
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, scaled
from fedbilevel.oracles.differences import coordinate_slopes
from fedbilevel.oracles.fixed_x import inner_loss_at


class CoordinateSlopes(Hypergradient):
    """∇x f_i and the slopes of ⟨response, ∇y f_i⟩ along some coordinates of x, on a client's own losses.

    Args:
        count: |P|, how many coordinates of x a client draws anew in every round, of those that it holds; all of them
            where it holds fewer. None: all.
        perturbation: the length of differences, in units of (ε(1 + ‖x‖))^½, ε being the precision of the numbers.
    """

    count: int | None = positive_integer(default=None, optional=True)
    perturbation: float = positive(default=1.0)

    @property
    @abstractmethod
    def gradients(self) -> int:
        """How many gradients of g a response costs."""

    @abstractmethod
    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """The vector, of the shape of y, whose change with x is taken."""

    @abstractmethod
    def scaling(self, dim: int, drawn: int) -> float:
        """The factor that multiplies the sum of slopes along `drawn` of the `dim` coordinates of x."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool = False) -> Estimate:
        return Estimate(fed.mean(self.slopes, (x, y), key, unbiased=True), SolveInfo.unknown())

    @phase(takes=("x", "y"), gives="x")
    def slopes(self, client: Client, point: tuple[PyTree, PyTree], key: Array) -> Reply:
        """h_i at (x, y)."""
        x, y = point
        if client.problem.implicit_term != "inverse":  # no linear system: y needs no slopes
            alone = LocalDifferences(perturbation=self.perturbation)
            own = alone.own(client, x, y, key)
            return alone.second_order.counted(own.reply(own.estimate.h))
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
        step: s, below 2/ℓ for ℓ the largest eigenvalue of any ∇²yy g_i.
    """

    kind: ClassVar[str] = "coordinates"

    terms: int = positive_integer(default=20)
    step: float = positive(default=0.1)

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Refuse a step at which the steps on y grow."""
        if problem.implicit_term == "inverse":
            check_neumann_step("Coordinates.step", at(self, 0).step, problem, clients, x, y, True)

    @property
    def gradients(self) -> int:
        return self.terms

    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """y_N(x) − y: y itself cancels."""
        gradient = inner_loss_at(client, x, y, client.batch_size, self.terms).gradient
        return local_descent(gradient, y, self.terms, self.terms * self.step, key)

    def scaling(self, dim: int, drawn: int) -> float:
        return dim / drawn


class PrintedSlopes(CoordinateSlopes):
    """Algorithm 2 of RAFBO's paper as it is printed: δ_p = [∇y g_i(x + μe_p, y) − ∇y g_i(x, y)]/μ, without d/|P|.

    h_i = ∇x f_i + Σ_{p∈P} ⟨δ_p, ∇y f_i⟩ e_p is not the hypergradient; it is here for the record. P are |P| of the
    coordinates of x, drawn anew.
    """

    kind: ClassVar[str] = "printed"

    @property
    def gradients(self) -> int:
        return 1

    def response(self, client: Client, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return inner_loss_at(client, x, y, client.batch_size, 1).gradient(y, key)

    def scaling(self, dim: int, drawn: int) -> float:
        return 1.0
