"""How a method finds ∇Φ(x) by hypergradients that every client finds alone, with its own f_i and g_i, in a single
exchange. Their mean is another vector than the hypergradient where clients differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.hypergradients import Estimate, SolvedSystem
from fedbilevel.algorithms.parts.linear_solvers import CG, InClient, Neumann, Product, SolveInfo, check_neumann_step
from fedbilevel.core.algorithm import phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import at, static
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Fed, Reply, Withheld
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.fixed_x import inner_loss_at, inner_loss_on


class LocalEstimate(NamedTuple):
    """The hypergradient of a client's own f_i and g_i, with what it cost."""

    h: PyTree
    info: SolveInfo
    loss: Array  # f_i
    gradients: int
    hvps: Array


class LocalImplicit(SolvedSystem):
    """The mean of the clients' own hypergradients, each with its own f_i and g_i: biased where clients differ.

    Args:
        solver: of each client's own ∇²yy g_i·v = ∇y f_i: a Neumann series or conjugate gradient.
        paired: use a single draw of samples for the whole hypergradient. Needed where outer and inner samples are
            pairs, such as support and query images.
    """

    kind: ClassVar[str] = "local"
    system: ClassVar[str] = "a client's own system"

    paired: bool = static(default=False)

    def validate(self) -> None:
        """Refuse a Neumann series with sampling "random_per_client", which has no meaning on a client alone."""
        sampling = self.solver.sampling if isinstance(self.solver, Neumann) else None
        allowed = "None or 'random': a client alone has a single length"
        require(sampling != "random_per_client", "LocalImplicit.solver.sampling", sampling, allowed)

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """Estimate ∇Φ(x) by the mean of the clients' own hypergradients, in the shape of x."""
        h, means = fed.mean(self.local_hypergradient, (x, y), key, unbiased=True)
        return Estimate(h, SolveInfo.of_clients(means))

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def local_hypergradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the hypergradient of the client's own f_i and g_i."""
        own = self.own(client, *at, key)
        update = own.h, own.info.to_average()
        return self.second_order.counted(Reply(update, None, {"outer_loss": own.loss}, own.gradients, own.hvps))

    def own(self, client: Client, x: PyTree, y: PyTree, key: Array) -> LocalEstimate:
        """Find ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x, y); a product by differences counts among `hvps`."""
        problem = client.problem
        outer_key, system_key, last_key = jax.random.split(key, 3)
        last_key = outer_key if self.paired else last_key
        outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(last_key)
        loss, (h, v) = jax.value_and_grad(problem.outer, (0, 1))(x, y, outer_batch)
        spent, info = jnp.asarray(0), SolveInfo.unknown()
        if problem.implicit_term == "none":
            return LocalEstimate(h, info, loss, 1, spent)
        inner = inner_loss_on(problem, x, y, inner_batch)
        if problem.implicit_term == "inverse":
            product = self.products(client, x, y, inner.loss if self.paired else None, system_key)
            terms = self.solver.terms_of(client) if isinstance(self.solver, Neumann) else 1
            v, spent, info = self.solver.solve(InClient, product, v, system_key, terms)
        cross = inner.pull(self.second_order.cross_of(inner.of_y, inner.features, y, v))
        return LocalEstimate(optax.tree.sub(h, cross), info, loss, 1, spent + 1)

    def products(
        self, client: Client, x: PyTree, y: PyTree, loss: Callable[[PyTree], Array] | None, key: Array
    ) -> Product:
        """Make the product ∇²yy v of `loss`; None: of g_i on samples drawn for each product, for `CG` all the same.

        What depends on x alone, as features do, is computed once for all of them.
        """
        hess_of = self.second_order.hess_of
        if loss is None and isinstance(self.solver, CG):
            loss = inner_loss_on(client.problem, x, y, client.inner_batch(key)).loss
        if loss is not None:
            return lambda loop, v, key, number: hess_of(loss, y, v)
        assert isinstance(self.solver, Neumann)
        inner = inner_loss_at(client, x, y, client.batch_size, self.solver.most_terms - 1)

        def product(loop: Any, v: PyTree, key: Array, number: Any) -> PyTree:
            samples = inner.draw(key)
            return hess_of(lambda y: inner.loss(y, samples), y, v)

        return product

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Refuse terms for other clients, samples without their pair, and a step at which the products grow."""
        if self.paired and isinstance(clients, Clients):
            sizes = [(int(a), int(b)) for a, b in zip(clients.outer.size, clients.inner.size, strict=True) if a != b]
            alike = f"False: outer and inner samples differ, {sizes[:3]}"
            require(not sizes, "LocalImplicit.paired", True, alike)
        if not isinstance(self.solver, Neumann):
            return
        terms, each = self.solver.terms, f"a positive integer, or one for each of the {len(clients)} clients"
        require(isinstance(terms, int) or len(terms) == len(clients), "Neumann.terms", terms, each)
        if problem.implicit_term == "inverse":
            drawn = batch_size if self.paired else None
            check_neumann_step("Neumann.step", at(self.solver, 0).step, problem, clients, x, y, True, drawn)
