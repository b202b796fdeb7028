"""How a method finds ∇x F − ∇²xy G·v with ∇²yy G·v = ∇y F: one set of choices for all that invert the inner Hessian.

With b = ∇y F, H = ∇²yy G, s the Neumann step (1/ℓ in papers) and N terms:

    random     N' uniform on {0..N−1};  v = N s (I − sH)^N' b                  FedIHGP (FedNest, Algorithm 3)
    parallel   v = mean over clients of N s (I − sH)^N'_i ∇y f_i, each with its own N'_i           (FedMBO)
    series     v = s Σ_{n<N} (I − sH)^n b, the expectation of the two above; the default, as their variance grows with N
    cg         conjugate gradient, until ‖b − H v‖ ≤ tolerance·‖b‖

"global": every product is a mean over clients and costs an exchange. "local": every client does all of it with its own
loss and the results are averaged, in one exchange; where clients differ that is another vector than the hypergradient.

Exchanges of a global one, without and with `merged`, N' ≤ N − 1 being the length (for "parallel" the longest), K the
iterations:

    random N' + 2, N' + 2        parallel N + 1, N' + 2        series N + 1, N + 1        cg K + 2, K + 1

Merged, conjugate gradient gets ∇x F with b, and each H p_k brings ∇²xy G·p_k with it; as v = Σ α_k p_k, these give
h = ∇x F − Σ α_k ∇²xy G·p_k without an exchange of its own. Neumann products cannot be had in fewer: their N' + 2
factors, from b to ∇²xy G, are means over clients, each applied to what the mean before it gave.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.algorithms.parts.batches import Batches
from fedbilevel.algorithms.parts.neumann_step import check_neumann_step
from fedbilevel.core.algorithm import phase
from fedbilevel.core.answers import Withheld
from fedbilevel.core.client import Client, Clients, uniform_below
from fedbilevel.core.config import at, counts, positive, static
from fedbilevel.core.errors import require, require_count, unknown
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.oracles import products as exact_products
from fedbilevel.oracles.fixed_x import inner_loss_at, inner_loss_on
from fedbilevel.oracles.inverse import Iteration
from fedbilevel.oracles.products import cross_v, hess_v

Inverse = Literal["random", "parallel", "series", "cg"]
Product = Callable[[Any, PyTree, Array, Any], PyTree]
"""(where exchanges are made, v, key, number of the fresh cohort) -> H v."""


class Quality(NamedTuple):
    """What the products with H told on the way."""

    negative_curvature: Array  # the first product that met any, or -1: H is then not positive definite
    residual: Array  # ‖b − H v‖ / ‖b‖ at which conjugate gradient ended; 0 for the others, which do not know it

    @classmethod
    def unknown(cls) -> "Quality":
        return cls(jnp.asarray(-1), jnp.zeros(()))

    @classmethod
    def of_clients(cls, means: Withheld) -> "Quality":
        """From the share of clients that met negative curvature, and their mean residual."""
        met, residual = means.withheld
        return cls(jnp.where(met > 0, 0, -1), residual)

    def to_average(self) -> Withheld:
        """What a client tells of its own: not under privacy, where the least noise would be negative curvature."""
        return Withheld(((self.negative_curvature >= 0).astype(float), self.residual))


class Estimate(NamedTuple):
    """A hypergradient and how far to trust it."""

    h: PyTree
    quality: Quality


class Solved(NamedTuple):
    """An approximate H⁻¹b."""

    v: PyTree
    products: Array  # with H, spent on it
    quality: Quality


class Own(NamedTuple):
    """What a client computes by itself."""

    loss: Array  # f_i
    estimate: Estimate
    gradients: int
    products: Array


class OuterGradients(Batches):
    """The two phases of every hypergradient that the federation makes together: how it begins and how it ends.

    Args: that of `Batches`.
    """

    @property
    def second_order(self) -> Any:
        """Who makes `hess_v`, `hess_of`, `cross_of`, `hypergradient`, with arguments as in oracles/products.py."""
        return exact_products

    def counted(self, reply: Reply) -> Reply:
        """The reply with the counts that these products cost."""
        return reply

    @phase(takes=("x", "y"), gives="y")
    def outer_gradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇y f_i, to be averaged into b."""
        b = jax.grad(client.problem.outer, 1)(*at, client.outer_batch(key, self.batch_size))
        return Reply(b, gradients=1)

    @phase(takes=("x", "y", "y"), gives="x")
    def hypergradient_given(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇x f_i − ∇²xy g_i v."""
        outer_key, inner_key = jax.random.split(key)
        outer_batch = client.outer_batch(outer_key, self.batch_size)
        inner_batch = client.inner_batch(inner_key, self.batch_size)
        loss, h = self.second_order.hypergradient(client.problem, *at, outer_batch, inner_batch)
        return self.counted(Reply(h, metrics={"outer_loss": loss}, gradients=1, hvps=0 if at[2] is None else 1))


class Hypergradient(OuterGradients):
    """The fields of every method that inverts the inner Hessian.

    Args: that of `Batches`, and
        hypergradient: "global" or "local".
        inverse: "random", "parallel" (global only), "series" or "cg".
        neumann_terms: N; of "local" also a number of its own for each client, N_i in the order of the clients. What a
            series leaves out is (1 − sμ)^N of v along the smallest eigenvalue μ.
        neumann_step: s = 1/ℓ, below 2/ℓ for ℓ the largest eigenvalue of the inner Hessian; checked at the start with
            all samples, if `paired` with drawn batches. Where each of n samples has inner unknowns of its own, these
            have n/B times the curvature, and k n/B times where one is drawn k times.
        cg_iterations: products at the most.
        cg_tolerance: relative residual at which conjugate gradient ends.
        fresh_cohorts: ask another cohort for each factor of a Neumann product, so that with partial participation its
            expectation is the product of the expectations; otherwise the round's own cohort gives them all.
        merged: as few exchanges as give the same numbers, with full batches (drawn samples: the same expectation):
            what can rides with another reply, and what the server knows to be zero is not asked for. Conjugate gradient
            then costs a client a cross product with each H p. Refused where it would leave out nothing.
        paired: of "local": one draw serves all of a hypergradient, of samples whose rows belong together, as a task's
            support and query images do: it is then that of the drawn samples' own problem. Independent draws rarely
            meet in the inner unknowns that each sample has for itself.
    """

    hypergradient: Literal["global", "local"] = static(default="global")
    inverse: Inverse = static(default="series")
    neumann_terms: int | tuple[int, ...] = counts(default=20)
    neumann_step: float = positive(default=0.1)
    cg_iterations: int = static(default=20)
    cg_tolerance: float = positive(default=1e-3)
    fresh_cohorts: bool = static(default=True)
    merged: bool = static(default=False)
    paired: bool = static(default=False)

    def validate(self) -> None:
        super().validate()
        name = self.label
        for field, allowed in {"hypergradient": ("global", "local"), "inverse": get_args(Inverse)}.items():
            if getattr(self, field) not in allowed:
                raise unknown(f"{name}.{field}", getattr(self, field), allowed)
        require_count(f"{name}.cg_iterations", self.cg_iterations)
        one = self.hypergradient == "local" or isinstance(self.neumann_terms, int)
        require(one, f"{name}.neumann_terms", self.neumann_terms, "one number where hypergradient = 'global'")
        both = self.hypergradient == "local" and self.inverse == "parallel"
        require(not both, f"{name}.inverse", "parallel", "'random', 'series' or 'cg' where hypergradient = 'local'")
        alone = self.hypergradient == "local" or not self.paired
        require(alone, f"{name}.paired", True, "False where hypergradient = 'global': clients draw at different times")
        fits = not self.merged or self.mergeable
        require(fits, f"{name}.merged", True, "False: with the other fields as they are it leaves out no exchange")

    def check_problem(self, problem: Problem, population: int, x: PyTree) -> None:
        """Refuse numbers of terms for more or fewer clients than there are."""
        terms = self.neumann_terms
        fits = isinstance(terms, int) or len(terms) == population
        allowed = f"a positive integer, or one for each of the {population} clients"
        require(fits, f"{self.label}.neumann_terms", terms, allowed)

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        """Refuse a Neumann step at which the products grow, and pairs of which one is missing."""
        if self.paired:
            sizes = [(int(a), int(b)) for a, b in zip(clients.outer.size, clients.inner.size, strict=True) if a != b]
            require(not sizes, f"{self.label}.paired", True, f"False: outer and inner samples differ, {sizes[:3]}")
        if self.inverse != "cg" and problem.implicit_term == "inverse":
            name, local = f"{self.label}.neumann_step", self.hypergradient == "local"
            alike = self.batch_size if self.paired else None
            check_neumann_step(name, at(self, 0).neumann_step, problem, clients, x, y, local, alike)

    @property
    def mergeable(self) -> bool:
        """Whether any exchange of a round is left out by `merged`."""
        return self.hypergradient == "global" and self.inverse in ("cg", "parallel")

    @property
    def most_terms(self) -> int:
        """N, or the largest N_i."""
        return self.neumann_terms if isinstance(self.neumann_terms, int) else max(self.neumann_terms)

    def terms_of(self, client: Client) -> int | Array:
        """N, or the client's N_i."""
        return self.neumann_terms if isinstance(self.neumann_terms, int) else jnp.array(self.neumann_terms)[client.id]

    @property
    def extra_cohorts(self) -> int:
        """Fresh cohorts per round: one for ∇y F, one for each product, one for h."""
        apart = self.fresh_cohorts and self.hypergradient == "global" and self.inverse != "cg"
        return self.most_terms + 1 if apart else 0

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """The estimate of ∇Φ(x) at y, in the shape of x."""
        return self.estimate(fed, x, y, key).h

    def estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """The same, and whether it may be trusted."""
        if self.hypergradient == "local":
            h, means = fed.mean(self.local_hypergradient, (x, y), key, unbiased=True)
            return Estimate(h, Quality.of_clients(means))
        if self.merged and self.inverse == "cg" and fed.problem.implicit_term == "inverse":
            return self.merged_estimate(fed, x, y, key)
        gradient_key, system_key, last_key = jax.random.split(key, 3)
        v, quality = None, Quality.unknown()
        if fed.problem.implicit_term != "none":
            each = self.inverse == "parallel" and fed.problem.implicit_term == "inverse"
            ask = self.outer_gradients_by_length if each else self.outer_gradient
            v = fed.mean(ask, (x, y), gradient_key, unbiased=True, fresh=self.cohort(0))
        if fed.problem.implicit_term == "inverse":

            def product(fed: Fed, v: PyTree, key: Array, number: Any) -> PyTree:
                return fed.mean(self.hessian_product, (x, y, v), key, unbiased=True, fresh=self.cohort(number))

            v, _, quality = self.solve_system(fed, product, v, system_key, self.most_terms)
        h = fed.mean(self.hypergradient_given, (x, y, v), last_key, unbiased=True, fresh=self.cohort(self.most_terms))
        return Estimate(h, quality)

    def merged_estimate(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> Estimate:
        """By conjugate gradient, all that ∇²xy G is needed for coming with the products."""
        gradient_key, system_key = jax.random.split(key)
        f_x, b = fed.mean(self.outer_gradients, (x, y), gradient_key, unbiased=True)

        def products(fed: Fed, p: PyTree) -> tuple[PyTree, PyTree]:
            both: tuple[PyTree, PyTree] = fed.mean(self.both_products, (x, y, p), system_key, unbiased=True)
            return both

        end, quality = self.conjugate_gradient(fed, products, b, system_key, optax.tree.zeros_like(x))
        return Estimate(optax.tree.sub(f_x, end.image), quality)

    def cohort(self, number: Any) -> Any:
        return number if self.extra_cohorts else None

    def solve_system(self, loop: Any, product: Product, b: PyTree, key: Array, terms: int | Array) -> Solved:
        """H⁻¹b by the chosen inverse, with `loop.repeat` and `product` doing the exchanges, or a client's own loops."""
        step = self.neumann_step
        draw_key, loop_key = jax.random.split(key)
        if self.inverse == "cg":  # one key: the same samples in every product
            end, quality = self.conjugate_gradient(loop, lambda loop, p: (product(loop, p, loop_key, 0), None), b, key)
            return Solved(end.v, end.spent, quality)

        def shrink(loop: Any, carry: tuple[PyTree, Array, Array], key: Array) -> tuple[PyTree, Array, Array]:
            """v ← (I − sH) v + what the inverse adds before its n-th product."""
            v, n, negative = carry
            hv = product(loop, v, key, n)
            negative = jnp.where((negative < 0) & curves_down(v, hv), n - 1, negative)
            return optax.tree.add(move(v, -step, hv), addition(n)), n + 1, negative

        def nothing(n: Array) -> PyTree:
            return optax.tree.zeros_like(b)

        one = jnp.asarray(1)
        if self.inverse == "random":
            count: Any = uniform_below(draw_key, terms)
            addition = nothing
            first = scaled(terms * step, b)
        elif self.inverse == "parallel":  # b holds, for each length, the mean over the clients that drew it
            count = longest(b) if self.merged else terms - 1
            addition = lambda n: jax.tree.map(lambda leaf: leaf[count - n], b)  # noqa: E731
            first = addition(jnp.asarray(0))
        else:
            count, addition = terms - 1, lambda n: scaled(step, b)
            first = scaled(step, b)
        v, _, negative = loop.repeat(count, shrink, (first, one, jnp.asarray(-1)), loop_key)
        return Solved(v, jnp.asarray(count), Quality(negative, jnp.zeros(())))

    def conjugate_gradient(
        self,
        loop: Any,
        products: Callable[[Any, PyTree], tuple[PyTree, PyTree]],
        b: PyTree,
        key: Array,
        image: PyTree = None,
    ) -> tuple[Iteration, Quality]:
        """Its last iteration; `products` gives H p and, for an `image` (see `Iteration`), C p."""
        start = Iteration.start(b, self.cg_tolerance, image)
        iterate = lambda loop, it, key: it.advanced(*products(loop, it.p))  # noqa: E731
        end = loop.repeat(self.cg_iterations, iterate, start, key, until=Iteration.ended)
        size = optax.tree.vdot(b, b)
        residual = jnp.sqrt(end.rr / jnp.where(size > 0, size, 1))
        return end, Quality(end.negative, residual.astype(float))

    @phase(takes=("x", "y"), gives=("x", "y"))
    def outer_gradients(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """∇x f_i and ∇y f_i, by one pass."""
        batch = client.outer_batch(key, self.batch_size)
        loss, gradients = jax.value_and_grad(client.problem.outer, (0, 1))(*at, batch)
        return Reply(gradients, metrics={"outer_loss": loss}, gradients=1)

    @phase(takes=("x", "y", "y"), gives=("y", "x"))
    def both_products(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇²yy g_i p and ∇²xy g_i p, each on a draw of its own: v comes from the first and is multiplied by the second,
        and one draw for both would bias their product."""
        hess_key, cross_key = jax.random.split(key)
        hess_batch, cross_batch = (client.inner_batch(k, self.batch_size) for k in (hess_key, cross_key))
        both = hess_v(client.problem, *at, hess_batch), cross_v(client.problem, *at, cross_batch)
        return Reply(both, hvps=2)

    @phase
    def outer_gradients_by_length(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """N s ∇y f_i in the place of this client's N'_i, zeros in all others: leaves (N, …)."""
        draw_key, batch_key = jax.random.split(key)
        terms = self.most_terms
        reply = self.outer_gradient(client, at, batch_key)
        chosen = (jnp.arange(terms) == uniform_below(draw_key, terms)) * terms * self.neumann_step
        slots = jax.tree.map(lambda leaf: jnp.multiply.outer(chosen, leaf).astype(leaf.dtype), reply.update)
        return reply._replace(update=slots)

    @phase(takes=("x", "y", "y"), gives="y")
    def hessian_product(self, client: Client, at: tuple[PyTree, PyTree, PyTree], key: Array) -> Reply:
        """∇²yy g_i v."""
        product = self.second_order.hess_v(client.problem, *at, client.inner_batch(key, self.batch_size))
        return self.counted(Reply(product, hvps=1))

    @phase(takes=("x", "y"), gives=("x", "whole"))
    def local_hypergradient(self, client: Client, at: tuple[PyTree, PyTree], key: Array) -> Reply:
        """The hypergradient of the client's own f_i and g_i."""
        own = self.own_hypergradient(client, *at, key)
        update = (own.estimate.h, own.estimate.quality.to_average())
        metrics = {"outer_loss": own.loss}
        return self.counted(Reply(update, metrics=metrics, gradients=own.gradients, hvps=own.products))

    def own_hypergradient(self, client: Client, x: PyTree, y: PyTree, key: Array) -> Own:
        problem, size = client.problem, self.batch_size
        outer_key, system_key, last_key = jax.random.split(key, 3)
        last_key = outer_key if self.paired else last_key
        outer_batch, inner_batch = client.outer_batch(outer_key, size), client.inner_batch(last_key, size)
        loss, (h, v) = jax.value_and_grad(problem.outer, (0, 1))(x, y, outer_batch)
        spent, quality = jnp.asarray(0), Quality.unknown()
        if problem.implicit_term == "none":
            return Own(loss, Estimate(h, quality), 1, spent)
        inner = inner_loss_on(problem, x, y, inner_batch)
        if problem.implicit_term == "inverse":
            product = self.own_products(client, x, y, inner.loss if self.paired else None, system_key)
            v, spent, quality = self.solve_system(Alone, product, v, system_key, self.terms_of(client))
        cross = inner.pull(self.second_order.cross_of(inner.of_y, inner.features, y, v))
        return Own(loss, Estimate(optax.tree.sub(h, cross), quality), 1, spent + 1)

    def own_products(
        self, client: Client, x: PyTree, y: PyTree, loss: Callable[[PyTree], Array] | None, key: Array
    ) -> Product:
        """∇²yy v of `loss`; None: of g_i on what each product draws, the same for all of conjugate gradient's.

        What depends on x alone, as features do, is computed once for all of them.
        """
        if loss is None and self.inverse == "cg":
            loss = inner_loss_on(client.problem, x, y, client.inner_batch(key, self.batch_size)).loss
        if loss is not None:
            return lambda loop, v, key, number: self.second_order.hess_of(loss, y, v)
        inner = inner_loss_at(client, x, y, self.batch_size, self.most_terms - 1)

        def product(loop: Any, v: PyTree, key: Array, number: Any) -> PyTree:
            samples = inner.draw(key)
            return self.second_order.hess_of(lambda y: inner.loss(y, samples), y, v)

        return product


def curves_down(v: PyTree, hv: PyTree) -> Array:
    """Whether vᵀHv < 0 beyond rounding."""
    curvature = optax.tree.vdot(v, hv)
    return curvature < -jnp.sqrt(jnp.finfo(curvature.dtype).eps) * optax.tree.norm(v) * optax.tree.norm(hv)


def longest(by_length: PyTree) -> Array:
    """The last place of leaves (N, …) where any is not zero; 0 where there is none."""
    some = [jnp.any(leaf.reshape(len(leaf), -1) != 0, axis=1) for leaf in jax.tree.leaves(by_length)]
    places = jnp.any(jnp.stack(some), axis=0)
    return jnp.max(jnp.where(places, jnp.arange(len(places)), 0))


class Alone:
    """A client's own loops in the words of the federation's, `Fed.repeat`, so that one solver serves both."""

    @staticmethod
    def repeat(n: Any, body: Callable[..., Any], carry: PyTree, key: Array, *, until: Any = None) -> PyTree:
        if until is None:  # a loop of known length, if n is one
            return jax.lax.fori_loop(0, n, lambda i, carry: body(Alone, carry, jax.random.fold_in(key, i)), carry)

        def unfinished(loop: tuple[Array, PyTree]) -> Array:
            return (loop[0] < n) & ~until(loop[1])

        def step(loop: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return loop[0] + 1, body(Alone, loop[1], jax.random.fold_in(key, loop[0]))

        return jax.lax.while_loop(unfinished, step, (jnp.asarray(0), carry))[1]
