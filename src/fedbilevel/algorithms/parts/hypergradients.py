"""How a method finds ∇Φ(x) ≈ ∇x F − ∇²xy G·v with ∇²yy G·v = ∇y F: by the whole federation, or by each client alone.

`Implicit`: every product is a mean over clients and costs an exchange. `LocalImplicit`: every client does all of it
with its own loss and the results are averaged, in one exchange; where clients differ that is another vector than the
hypergradient.

Exchanges of `Implicit`, without and with `merged`, N' ≤ N − 1 being the length (of "random_per_client" the longest), K
the iterations:

    random N' + 2, N' + 2    random_per_client N + 1, N' + 2    whole series N + 1, N + 1    CG K + 2, K + 1

Merged, conjugate gradient gets ∇x F with b, and each H p_k brings ∇²xy G·p_k with it; as v = Σ α_k p_k, these give
h = ∇x F − Σ α_k ∇²xy G·p_k without an exchange of its own. Neumann products cannot be had in fewer: their N' + 2
factors, from b to ∇²xy G, are means over clients, each applied to what the mean before it gave.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.linear_solvers import CG, InClient, Neumann, Product, SolveInfo, check_neumann_step
from fedbilevel.core.algorithm import Part, phase
from fedbilevel.core.client import Client, Clients, uniform_below
from fedbilevel.core.config import at, positive, static
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.fed import Fed, Reply, Withheld
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles import differences, products
from fedbilevel.oracles.fixed_x import inner_loss_at, inner_loss_on


class Estimate(NamedTuple):
    """A hypergradient and how far to trust it."""

    h: PyTree
    info: SolveInfo


class Own(NamedTuple):
    """What a client computes by itself."""

    loss: Array  # f_i
    estimate: Estimate
    gradients: int
    hvps: Array

    def reply(self, update: PyTree) -> Reply:
        """The reply with this update."""
        return Reply(update, metrics={"outer_loss": self.loss}, gradients=self.gradients, hvps=self.hvps)


class Exact(Part):
    """Exact products with second derivatives, by differentiating the loss twice. No matrix is ever formed."""

    kind: ClassVar[str] = "exact"

    @property
    def oracle(self) -> Any:
        """The module or object with the functions `hess_v`, `hess_of`, `cross_v`, `cross_of` and `hypergradient`."""
        return products

    def counted(self, reply: Reply) -> Reply:
        """The reply with what its products cost."""
        return reply


class Differences(Part):
    """Products with second derivatives by central differences of gradients: each costs two gradients.

    For losses that JAX cannot differentiate twice. The error grows as the square of the length of the differences; very
    short ones are off by rounding.

    Args:
        perturbation: the length of differences, in units of the one that balances truncation and rounding.
    """

    kind: ClassVar[str] = "differences"

    perturbation: float = positive(default=1.0)

    @property
    def oracle(self) -> Any:
        """The module or object with the functions `hess_v`, `hess_of`, `cross_v`, `cross_of` and `hypergradient`."""
        return differences.CentralDifferences(self.perturbation)

    def counted(self, reply: Reply) -> Reply:
        """The reply with what its products cost: two gradients each."""
        return reply._replace(gradients=reply.gradients + 2 * reply.hvps, hvps=0)


SecondOrder = Exact | Differences


def outer_gradient(client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
    """∇y f_i, to be averaged into b."""
    return Reply(jax.grad(client.problem.outer, 1)(*at, client.outer_batch(key)), gradients=1)


def hypergradient_given(
    client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array, second_order: SecondOrder
) -> Reply:
    """∇x f_i − ∇²xy g_i v."""
    outer_key, inner_key = jax.random.split(key)
    outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(inner_key)
    loss, h = second_order.oracle.hypergradient(client.problem, *at, outer_batch, inner_batch)
    hvps = 0 if at[2] is None else 1
    return second_order.counted(Reply(h, metrics={"outer_loss": loss}, gradients=1, hvps=hvps))


class Hypergradient(Part):
    """How a method finds ∇Φ(x): every method here is a hook with a default."""

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool = False) -> Estimate:
        """An estimate of ∇Φ(x) at y, in the shape of x; `merged=True` makes the fewest exchanges that give the same.

        Without it the part is for methods whose rounds need no estimate at a given point, such as AFBO.
        """
        raise ConfigurationError(f"{type(self).__name__} estimates no hypergradient at a given point")

    def start(self, y: PyTree) -> PyTree:
        """The state of this part on the server before round 0; None: it keeps nothing between rounds."""
        return None

    @property
    def extra_cohorts(self) -> int:
        """How many fresh cohorts an estimate may ask beside the round's own."""
        return 0

    @property
    def mergeable(self) -> bool:
        """True if `estimate` makes fewer exchanges with `merged=True` than without."""
        return False

    @property
    def stops(self) -> bool:
        """True if negative curvature of the inner loss ends the run with an error."""
        return False

    def check_problem(self, population: int) -> None:
        """Raise ConfigurationError if the fields do not fit the number of clients."""
        return

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Raise ConfigurationError if the fields do not fit the clients' samples."""
        return

    def noise_objection(self) -> str:
        """Why the estimate does not work with replies that clients clip and add noise to; "" where it does."""
        return ""

    def asynchronous_objection(self) -> str:
        """Why the replies to the exchanges of an estimate cannot be late; "" where they can."""
        return ""

    def submodels_objection(self) -> str:
        """Why clients cannot estimate on parts of the model; "" where they can."""
        return ""

    def complaint(self, info: SolveInfo) -> str:
        """Why the run must end after a solution of the linear system with this outcome; "" where it may go on."""
        return ""

    def warning(self, info: SolveInfo) -> str:
        """A warning for the user about a solution of the linear system with this outcome; "" for none."""
        return ""


class SolvedSystem(Hypergradient):
    """A hypergradient from a linear system with the inner Hessian, solved by products with it.

    Args:
        solver: of the linear system with the inner Hessian: a Neumann series or conjugate gradient.
    """

    system: ClassVar[str]
    """Whose system may meet negative curvature, where it is not the federation's."""

    solver: Neumann | CG = Neumann()

    @property
    @abstractmethod
    def second_order(self) -> SecondOrder:
        """How clients make products with second derivatives."""

    @property
    def stops(self) -> bool:
        return isinstance(self.solver, CG)

    def complaint(self, info: SolveInfo) -> str:
        return self.solver.complaint(info, self.system)

    def warning(self, info: SolveInfo) -> str:
        return self.solver.warning(info, self.system)


class Implicit(SolvedSystem):
    """The hypergradient of the whole federation: every product with ∇²yy G is a mean over clients.

    Args:
        solver: of ∇²yy G·v = ∇y F: a Neumann series or conjugate gradient.
        second_order: how clients make products with second derivatives: exactly, or by differences of gradients.
        fresh_cohorts: ask another cohort for each factor of a Neumann product, so that with partial participation its
            expectation is the product of the expectations; otherwise the round's own cohort gives them all.
    """

    kind: ClassVar[str] = "implicit"
    system: ClassVar[str] = ""

    second_order: Exact | Differences = Exact()
    fresh_cohorts: bool = static(default=True)

    def validate(self) -> None:
        """Refuse a Neumann series with a number of terms for each client: all clients sum one series together."""
        one = not isinstance(self.solver, Neumann) or isinstance(self.solver.terms, int)
        terms = self.solver.terms if isinstance(self.solver, Neumann) else None
        require(one, "Implicit.solver.terms", terms, "one number: only LocalImplicit has one for each client")

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Refuse a Neumann step at which the products grow."""
        if isinstance(self.solver, Neumann) and problem.implicit_term == "inverse":
            check_neumann_step("Neumann.step", at(self.solver, 0).step, problem, clients, x, y)

    def noise_objection(self) -> str:
        if isinstance(self.solver, Neumann):
            return ""
        return "noise on products looks like negative curvature to conjugate gradient; use a Neumann series"

    def asynchronous_objection(self) -> str:
        return (
            "it asks for products with vectors that the server computes from all replies of the same round, so that an "
            "earlier reply belongs to another vector (a hypergradient = LocalImplicit() may be late)"
        )

    def submodels_objection(self) -> str:
        if isinstance(self.solver, CG):
            return "means of products over unequal holders are not symmetric, as CG needs; use a Neumann series"
        if self.solver.sampling == "random_per_client":
            return "its clients reply with a sum for each random length; use Neumann(sampling=None or 'random')"
        return ""

    @property
    def terms(self) -> int:
        """Factors of the longest product; 1 for conjugate gradient."""
        return self.solver.most_terms if isinstance(self.solver, Neumann) else 1

    @property
    def extra_cohorts(self) -> int:
        """Fresh cohorts per round: one for ∇y F, one for each product, one for h."""
        apart = self.fresh_cohorts and isinstance(self.solver, Neumann)
        return self.terms + 1 if apart else 0

    @property
    def mergeable(self) -> bool:
        return isinstance(self.solver, CG) or self.solver.sampling == "random_per_client"

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool = False) -> Estimate:
        inverse = fed.problem.implicit_term == "inverse"
        if merged and inverse and isinstance(self.solver, CG):
            return self.merged_estimate(self.solver, fed, x, y, key)
        gradient_key, system_key, last_key = jax.random.split(key, 3)
        v, info = None, SolveInfo.unknown()
        if fed.problem.implicit_term != "none":
            each = inverse and isinstance(self.solver, Neumann) and self.solver.sampling == "random_per_client"
            ask = self.outer_gradients_by_length if each else self.outer_gradient
            v = fed.mean(ask, (x, y), gradient_key, unbiased=True, fresh=self.cohort(0))
        if inverse:

            def product(fed: Fed, v: PyTree, key: Array, number: Any) -> PyTree:
                return fed.mean(self.hessian_product, (x, y, v), key, unbiased=True, fresh=self.cohort(number))

            v, _, info = self.solver.solve(fed, product, v, system_key, self.terms, merged)
        h = fed.mean(self.hypergradient_given, (x, y, v), last_key, unbiased=True, fresh=self.cohort(self.terms))
        return Estimate(h, info)

    def merged_estimate(self, solver: CG, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """By conjugate gradient, all that ∇²xy G is needed for coming with the products."""
        gradient_key, system_key = jax.random.split(key)
        f_x, b = fed.mean(self.outer_gradients, (x, y), gradient_key, unbiased=True)

        def both(fed: Fed, p: PyTree) -> tuple[PyTree, PyTree]:
            pair: tuple[PyTree, PyTree] = fed.mean(self.both_products, (x, y, p), system_key, unbiased=True)
            return pair

        end, info = solver.iterate(fed, both, b, system_key, optax.tree.zeros_like(x))
        return Estimate(optax.tree.sub(f_x, end.image), info)

    def cohort(self, number: Any) -> Any:
        """`number`, the fresh cohort of an exchange; None where all exchanges of a round ask the same cohort."""
        return number if self.extra_cohorts else None

    @phase(takes=("x", "y"), gives="y")
    def outer_gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇y f_i, to be averaged into b."""
        return outer_gradient(client, at, key)

    @phase(takes=("x", "y", "y"), gives="x")
    def hypergradient_given(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇x f_i − ∇²xy g_i v."""
        return hypergradient_given(client, at, key, self.second_order)

    @phase(takes=("x", "y"), gives=("x", "y"))
    def outer_gradients(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇x f_i and ∇y f_i, by one pass."""
        loss, gradients = jax.value_and_grad(client.problem.outer, (0, 1))(*at, client.outer_batch(key))
        return Reply(gradients, metrics={"outer_loss": loss}, gradients=1)

    @phase(takes=("x", "y", "y"), gives=("y", "x"))
    def both_products(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇²yy g_i p and ∇²xy g_i p, each on a draw of its own: v comes from the first and is multiplied by the second,
        and one draw for both would bias their product."""
        hess_key, cross_key = jax.random.split(key)
        oracle = self.second_order.oracle
        hess = oracle.hess_v(client.problem, *at, client.inner_batch(hess_key))
        cross = oracle.cross_v(client.problem, *at, client.inner_batch(cross_key))
        return self.second_order.counted(Reply((hess, cross), hvps=2))

    @phase
    def outer_gradients_by_length(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """N s ∇y f_i in the place of this client's N'_i, zeros in all others: leaves (N, …)."""
        assert isinstance(self.solver, Neumann)
        draw_key, batch_key = jax.random.split(key)
        terms = self.terms
        reply = outer_gradient(client, at, batch_key)
        chosen = (jnp.arange(terms) == uniform_below(draw_key, terms)) * terms * self.solver.step
        slots = jax.tree.map(lambda leaf: jnp.multiply.outer(chosen, leaf).astype(leaf.dtype), reply.update)
        return reply._replace(update=slots)

    @phase(takes=("x", "y", "y"), gives="y")
    def hessian_product(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇²yy g_i v."""
        product = self.second_order.oracle.hess_v(client.problem, *at, client.inner_batch(key))
        return self.second_order.counted(Reply(product, hvps=1))


class LocalSystem(SolvedSystem):
    """The mean of the clients' own hypergradients, each with its own f_i and g_i.

    Args:
        solver: of each client's own ∇²yy g_i·v = ∇y f_i: a Neumann series or conjugate gradient.
        paired: use one draw of samples for the whole hypergradient. Needed where outer and inner samples are pairs,
            such as support and query images.
    """

    system: ClassVar[str] = "a client's own system"

    paired: bool = static(default=False)

    def validate(self) -> None:
        """Refuse a Neumann series with sampling "random_per_client", which has no meaning on a client alone."""
        sampling = self.solver.sampling if isinstance(self.solver, Neumann) else None
        allowed = "None or 'random': a client alone has one length"
        require(sampling != "random_per_client", f"{type(self).__name__}.solver.sampling", sampling, allowed)

    def check_problem(self, population: int) -> None:
        """Refuse a list of terms whose length is not the number of clients."""
        self.solver.check_population(population)

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree, batch_size: int | None) -> None:
        """Refuse a Neumann step at which the products grow, and pairs of which one is missing."""
        if self.paired:
            sizes = [(int(a), int(b)) for a, b in zip(clients.outer.size, clients.inner.size, strict=True) if a != b]
            alike = f"False: outer and inner samples differ, {sizes[:3]}"
            require(not sizes, f"{type(self).__name__}.paired", True, alike)
        if isinstance(self.solver, Neumann) and problem.implicit_term == "inverse":
            drawn = batch_size if self.paired else None
            check_neumann_step("Neumann.step", at(self.solver, 0).step, problem, clients, x, y, True, drawn)

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array, merged: bool = False) -> Estimate:
        """The mean of the clients' own hypergradients, h in the shape of x."""
        h, means = fed.mean(self.local_hypergradient, (x, y), key, unbiased=True)
        return Estimate(h, SolveInfo.of_clients(means))

    @phase(takes=("x", "y"), gives=("x", Withheld((NUMBER, NUMBER))))
    def local_hypergradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """The hypergradient of the client's own f_i and g_i."""
        own = self.own(client, *at, key)
        return self.second_order.counted(own.reply((own.estimate.h, own.estimate.info.to_average())))

    def own(self, client: Client, x: PyTree, y: PyTree, key: Array) -> Own:
        """The client's own estimate at (x, y), by its own Hessian, with the counts of its work."""
        problem, oracle = client.problem, self.second_order.oracle
        outer_key, system_key, last_key = jax.random.split(key, 3)
        last_key = outer_key if self.paired else last_key
        outer_batch, inner_batch = client.outer_batch(outer_key), client.inner_batch(last_key)
        loss, (h, v) = jax.value_and_grad(problem.outer, (0, 1))(x, y, outer_batch)
        spent, info = jnp.asarray(0), SolveInfo.unknown()
        if problem.implicit_term == "none":
            return Own(loss, Estimate(h, info), 1, spent)
        inner = inner_loss_on(problem, x, y, inner_batch)
        if problem.implicit_term == "inverse":
            product = self.products(client, x, y, inner.loss if self.paired else None, system_key)
            v, spent, info = self.solver.solve(InClient, product, v, system_key, self.solver.terms_of(client))
        cross = inner.pull(oracle.cross_of(inner.of_y, inner.features, y, v))
        return Own(loss, Estimate(optax.tree.sub(h, cross), info), 1, spent + 1)

    def products(
        self, client: Client, x: PyTree, y: PyTree, loss: Callable[[PyTree], Array] | None, key: Array
    ) -> Product:
        """∇²yy v of `loss`; None: of g_i on what each product draws, the same for all of conjugate gradient's.

        What depends on x alone, as features do, is computed once for all of them.
        """
        oracle = self.second_order.oracle
        if loss is None and isinstance(self.solver, CG):
            loss = inner_loss_on(client.problem, x, y, client.inner_batch(key)).loss
        if loss is not None:
            return lambda loop, v, key, number: oracle.hess_of(loss, y, v)
        assert isinstance(self.solver, Neumann)
        inner = inner_loss_at(client, x, y, client.batch_size, self.solver.most_terms - 1)

        def product(loop: Any, v: PyTree, key: Array, number: Any) -> PyTree:
            samples = inner.draw(key)
            return oracle.hess_of(lambda y: inner.loss(y, samples), y, v)

        return product


class LocalImplicit(LocalSystem):
    """The mean of the clients' own hypergradients, each with its own f_i and g_i: biased where clients differ.

    Args:
        second_order: how clients make products with second derivatives: exactly, or by differences of gradients.
    """

    kind: ClassVar[str] = "local"

    second_order: Exact | Differences = Exact()


class LocalDifferences(LocalSystem):
    """The mean of the clients' own hypergradients without second derivatives: biased where clients differ.

    Products with second derivatives are central differences of gradients.

    Args:
        perturbation: the length of differences, in units of the one that balances truncation and rounding.
    """

    kind: ClassVar[str] = "local-differences"

    perturbation: float = positive(default=1.0)

    @property
    def second_order(self) -> Differences:
        return Differences(perturbation=self.perturbation)
