"""Estimate the hypergradient ∇Φ(x) ≈ ∇x F − ∇²xy G·v, where v solves ∇²yy G·v = ∇y F.

`Implicit` computes the hypergradient of all clients together: every product is a mean over clients and costs an
exchange. Let N be the number of terms of a Neumann series, N' ≤ N − 1 a random length, and C the number of iterations
of conjugate gradient. An estimate takes N + 1 exchanges by the whole series or with "random_per_client", N' + 2 with
"random", and C + 2 by `CG`.

`LocalImplicit` takes a single exchange: every client computes a hypergradient from its own f_i and g_i. If clients
differ, the mean of these is not the hypergradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.linear_solvers import CG, InClient, Neumann, Product, SolveInfo, check_neumann_step
from fedbilevel.core.algorithm import Part, phase
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import static
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.facts import Allows, Findings, No, OwnParts
from fedbilevel.core.fed import Fed, Reply, Withheld
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER, UnitPolicy
from fedbilevel.core.tree import PyTree
from fedbilevel.machinery.threefry import uniform_below
from fedbilevel.oracles import products
from fedbilevel.oracles.differences import Differences
from fedbilevel.oracles.fixed_x import inner_loss_at, inner_loss_on


class Exact(Part):
    """Compute exact products with second derivatives, by differentiating the loss twice, without forming a matrix."""

    kind: ClassVar[str] = "exact"

    hess_v = staticmethod(products.hess_v)
    hess_of = staticmethod(products.hess_of)
    cross_of = staticmethod(products.cross_of)
    hypergradient = staticmethod(products.hypergradient)

    def counted(self, reply: Reply) -> Reply:
        """Return the reply as it is: exact products are counted as second-order products (hvps)."""
        return reply


class Estimate(NamedTuple):
    """Hold an estimate of the hypergradient, in the shape of x, and diagnostics of its linear system."""

    h: PyTree
    info: SolveInfo


def outer_gradient(client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
    """Return a reply with ∇y f_i at (x, y), in the shape of y; the mean of all replies is the right-hand side."""
    return Reply(jax.grad(client.problem.outer, 1)(*at, client.outer_batch(key)), gradients=1)


def hypergradient_given(
    client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array, second_order: Exact | Differences
) -> Reply:
    """Return a reply with ∇x f_i − ∇²xy g_i v at (x, y, v) = `at`, in the shape of x; with ∇x f_i if v is None."""
    outer_key, inner_key = jax.random.split(key)
    outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(inner_key)
    loss, h = second_order.hypergradient(client.problem, *at, outer_batch, inner_batch)
    hvps = 0 if at[2] is None else 1
    return second_order.counted(Reply(h, metrics={"outer_loss": loss}, gradients=1, hvps=hvps))


class Hypergradient(Part):
    """Base class of the parts of methods that estimate the hypergradient ∇Φ(x); every function has a default."""

    alone: ClassVar[bool] = False
    """Whether each client solves its own linear system, with its own Hessian."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """Estimate ∇Φ(x) at y by exchanges; the estimate has the shape of x.

        A part that does not define this function can only be used by methods whose rounds do not call it, such as AFBO.
        """
        raise ConfigurationError(f"{type(self).__name__} estimates no hypergradient at a given point")

    def start(self, y: PyTree) -> PyTree:
        """Return the state of this part on the server before round 0; None: it has no state."""
        return None

    @property
    def fresh(self) -> int:
        """Return the largest number of fresh cohorts that an estimate asks, besides the round's cohort."""
        return 0

    @property
    def allows(self) -> Allows:
        """Return the optional features of a method with this part; phases have the names that they have in the part."""
        return Allows(late=tuple(sorted(self.phases)), submodels=UnitPolicy())

    @property
    def stops(self) -> bool:
        """Return whether negative curvature of the inner loss ends the run with an error."""
        return False

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Raise ConfigurationError if the fields do not fit the problem or the clients."""
        return

    def findings(self, info: SolveInfo) -> Findings:
        """Return an error or a warning about the last solution of the linear system, if there is one."""
        return Findings()


class SolvedSystem(Hypergradient):
    """Estimate the hypergradient from a linear system with the inner Hessian, solved by products with the Hessian.

    Args:
        solver: the solver of the linear system: a Neumann series or conjugate gradient.
        second_order: how clients compute products with second derivatives: exactly, or by differences of gradients.
        all_samples: whether clients use all their samples for an estimate of the hypergradient, and for FedNest's local
            steps on x. False: they use batches of the method's `batch_size`.
    """

    system: ClassVar[str]
    """The name of the system in messages about negative curvature; "" for the system of all clients together."""

    solver: Neumann | CG = Neumann()
    second_order: Exact | Differences = Exact()
    all_samples: bool = static(default=False)

    def sampled(self, client: Client) -> Client:
        """Return the client with the batch size of an estimate, which is None for all samples."""
        return replace(client, batch_size=None) if self.all_samples else client

    @property
    def stops(self) -> bool:
        return isinstance(self.solver, CG)

    def findings(self, info: SolveInfo) -> Findings:
        return self.solver.findings(info, self.system)


class Implicit(SolvedSystem):
    """Estimate the hypergradient of all clients together: every product with ∇²yy G is a mean over clients.

    Args:
        solver: the solver of ∇²yy G·v = ∇y F: a Neumann series or conjugate gradient.
        fresh_cohorts: whether each factor of a Neumann product comes from a fresh cohort. The expectation of the
            product is then the product of the expectations, also under partial participation. False: all factors come
            from the round's cohort.
    """

    kind: ClassVar[str] = "implicit"
    system: ClassVar[str] = ""

    fresh_cohorts: bool = static(default=True)

    def validate(self) -> None:
        """Refuse a number of terms for each client, since all clients compute one Neumann series together."""
        terms = self.solver.terms if isinstance(self.solver, Neumann) else 1
        allowed = "a single number: only LocalImplicit takes a number for each client"
        require(isinstance(terms, int), "Implicit.solver.terms", terms, allowed)

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        gradient_key, system_key, last_key = jax.random.split(key, 3)
        v, info, terms = None, SolveInfo.unknown(), self.solver.most_terms
        if fed.problem.implicit_term != "none":  # b = ∇y F; if H = I, then v = b
            each = isinstance(self.solver, Neumann) and self.solver.sampling == "random_per_client"
            by_length = each and fed.problem.implicit_term == "inverse"  # each client draws its own length
            ask = self.outer_gradients_by_length if by_length else self.outer_gradient
            v = fed.mean(ask, (x, y), gradient_key, unbiased=True, fresh=self.cohort(0))
        if fed.problem.implicit_term == "inverse":  # v = H⁻¹ b

            def product(fed: Fed, v: PyTree, key: Array, number: Any) -> PyTree:
                return fed.mean(self.hessian_product, (x, y, v), key, unbiased=True, fresh=self.cohort(number))

            v, _, info = self.solver.solve(fed, product, v, system_key, terms)
        h = fed.mean(self.hypergradient_given, (x, y, v), last_key, unbiased=True, fresh=self.cohort(terms))
        return Estimate(h, info)

    @phase(takes=("x", "y"), gives="y")
    def outer_gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with ∇y f_i, in the shape of y; the mean of these replies is the system's right-hand side, ∇y F."""
        return outer_gradient(self.sampled(client), at, key)

    @phase
    def outer_gradients_by_length(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Draw the client's length N'_i, and reply with N s ∇y f_i at index N'_i of a leading axis of length N.

        At all other indices the reply is 0. N is the number of terms and s the step of the Neumann series.
        """
        assert isinstance(self.solver, Neumann)
        draw_key, batch_key = jax.random.split(key)
        terms = self.solver.most_terms
        reply = outer_gradient(self.sampled(client), at, batch_key)
        chosen = (jnp.arange(terms) == uniform_below(draw_key, terms)) * terms * self.solver.step
        slots = jax.tree.map(lambda leaf: jnp.multiply.outer(chosen, leaf).astype(leaf.dtype), reply.update)
        return reply._replace(update=slots)

    @phase(takes=("x", "y", "y"), gives="y", multiplies=True)
    def hessian_product(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with ∇²yy g_i v at the (x, y, v) of the message, in the shape of y."""
        product = self.second_order.hess_v(client.problem, *at, self.sampled(client).inner_batch(key))
        return self.second_order.counted(Reply(product, hvps=1))

    @phase(takes=("x", "y", "y"), gives="x")
    def hypergradient_given(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """Reply with ∇x f_i − ∇²xy g_i v at the message's (x, y, v), in the shape of x; with ∇x f_i if v is None."""
        return hypergradient_given(self.sampled(client), at, key, self.second_order)

    @property
    def fresh(self) -> int:
        """Return the number of fresh cohorts per round: one for ∇y F, one for each product, and one for h."""
        apart = self.fresh_cohorts and isinstance(self.solver, Neumann)
        return self.solver.most_terms + 1 if apart else 0

    def cohort(self, number: Any) -> Any:
        """Return the number of an exchange's fresh cohort; None if all exchanges of a round ask the same cohort."""
        return number if self.fresh else None

    @property
    def allows(self) -> Allows:
        late = No(
            "it asks for products with vectors that the server computes from all replies of the same round, so that an "
            "earlier reply belongs to another vector (replies may be late with hypergradient = LocalImplicit())"
        )
        own_y = No("clients multiply vectors of the server by ∇²yy g_i, and the server has no own leaves of clients")
        if isinstance(self.solver, CG):
            return Allows(
                late,
                No("means of products over different holders are not symmetric, as CG requires; use a Neumann series"),
                No("conjugate gradient mistakes noise on products for negative curvature; use a Neumann series"),
                own_y=own_y,
            )
        if self.solver.sampling == "random_per_client":
            submodels = No(
                "its clients reply with a vector for each random length; use Neumann(sampling=None or 'random')"
            )
            return Allows(late, submodels, own_y=own_y)
        return Allows(late, UnitPolicy(), own_y=own_y)

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Refuse a step at which the Neumann series diverges."""
        if isinstance(self.solver, Neumann) and problem.implicit_term == "inverse":
            check_neumann_step("Neumann.step", at(self.solver, 0).step, problem, clients, x, y)


class LocalEstimate(NamedTuple):
    """Hold the hypergradient of a client's own f_i and g_i, in the shape of x, with its diagnostics and costs."""

    h: PyTree
    info: SolveInfo
    loss: Array  # f_i
    gradients: int
    hvps: Array


class LocalImplicit(SolvedSystem):
    """Estimate the hypergradient by the mean of the clients' own hypergradients; it is biased if clients differ.

    A client computes its own hypergradient from its losses f_i and g_i alone.

    Args:
        solver: the solver of each client's own system, ∇²yy g_i·v = ∇y f_i: a Neumann series or conjugate gradient.
        paired: whether a single draw of samples serves the whole hypergradient. This is needed if outer and inner
            samples are pairs, such as support and query images.
    """

    kind: ClassVar[str] = "local"
    alone: ClassVar[bool] = True
    system: ClassVar[str] = "a client's own system"

    paired: bool = static(default=False)

    @property
    def allows(self) -> Allows:
        return super().allows._replace(own_y={"local_hypergradient": OwnParts(("y",), alone=True)})

    def validate(self) -> None:
        """Refuse a Neumann series with sampling "random_per_client".

        With this sampling all clients solve one system together, while here each client solves its own system.
        """
        sampling = self.solver.sampling if isinstance(self.solver, Neumann) else None
        allowed = "None or 'random', since each client solves its own system"
        require(sampling != "random_per_client", "LocalImplicit.solver.sampling", sampling, allowed)

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """Estimate ∇Φ(x) by the mean of the clients' own hypergradients, in the shape of x."""
        h, means = fed.mean(self.local_hypergradient, (x, y), key, unbiased=True)
        return Estimate(h, SolveInfo.of_clients(means))

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def local_hypergradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """Reply with the hypergradient of the client's own f_i and g_i, in the shape of x."""
        own = self.own(client, *at, key)
        update = own.h, own.info.to_average()
        return self.second_order.counted(Reply(update, None, {"outer_loss": own.loss}, own.gradients, own.hvps))

    def own(self, client: Client, x: PyTree, y: PyTree, key: Array) -> LocalEstimate:
        """Compute the client's own hypergradient ∇x f_i − ∇²xy g_i [∇²yy g_i]⁻¹ ∇y f_i at (x, y).

        Products that are computed by differences of gradients are also counted as second-order products (hvps) here.
        """
        client, problem = self.sampled(client), client.problem
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
        """Return a function that multiplies a vector by the Hessian in y of `loss`.

        If `loss` is None, the Hessian is that of g_i, on samples that are drawn for each product; `CG` uses the same
        samples for all products. Values that depend only on x, such as features, are computed once for all products.
        """
        hess_of = self.second_order.hess_of
        if loss is None and isinstance(self.solver, CG):
            loss = inner_loss_on(client.problem, x, y, client.inner_batch(key)).loss
        if loss is not None:
            return lambda loop, v, key, number: hess_of(loss, y, v)
        assert isinstance(self.solver, Neumann)
        inner = inner_loss_at(client, x, y, client.batch_size, self.solver.most_terms - 1)

        def product(loop: Any, v: PyTree, key: Array, number: Any) -> PyTree:
            samples = inner.take(key)
            return hess_of(lambda y: inner.loss(y, samples), y, v)

        return product

    def check(
        self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree, batch_size: int | None
    ) -> None:
        """Refuse a wrong number of terms, samples that are not pairs, and a step at which the series diverges."""
        if self.paired and isinstance(clients, Clients):
            sizes = [(int(a), int(b)) for a, b in zip(clients.outer.size, clients.inner.size, strict=True) if a != b]
            alike = f"False: some clients have different numbers of outer and inner samples, {sizes[:3]}"
            require(not sizes, "LocalImplicit.paired", True, alike)
        if not isinstance(self.solver, Neumann):
            return
        terms, each = self.solver.terms, f"a positive integer, or a number for each of the {len(clients)} clients"
        require(isinstance(terms, int) or len(terms) == len(clients), "Neumann.terms", terms, each)
        if problem.implicit_term == "inverse":
            drawn = batch_size if self.paired and not self.all_samples else None
            check_neumann_step("Neumann.step", at(self.solver, 0).step, problem, clients, x, y, True, drawn)
