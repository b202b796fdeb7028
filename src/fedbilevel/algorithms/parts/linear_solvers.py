"""Approximate v = H⁻¹ b by products with H = ∇²yy G: by a Neumann series or by conjugate gradient.

Let s be the step, which is 1/ℓ in papers, and N the number of terms:

    Neumann                       v = s Σ_{n<N} (I − sH)^n b
    sampling="random"             v = N s (I − sH)^N' b,  N' uniform on {0..N−1}                    FedIHGP (FedNest)
    sampling="random_per_client"  v = mean over clients of N s (I − sH)^N'_i ∇y f_i, each with its own N'_i  (FedMBO)
    CG                            conjugate gradient, until ‖b − H v‖ ≤ tolerance·‖b‖

The first is the expectation of the second and the third, whose variances grow with N.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.algorithm import Part
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import counts, positive, positive_integer, static
from fedbilevel.core.errors import ConfigurationError, NumericalWarning, require, unknown, warn
from fedbilevel.core.facts import Findings
from fedbilevel.core.fed import Withheld
from fedbilevel.core.field_types import Number, Step
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.machinery.kept import compiled
from fedbilevel.machinery.threefry import uniform_below
from fedbilevel.oracles.operators import Iteration, extreme_eigenvalues
from fedbilevel.oracles.population import Population, WeightedLoss, hess_v

Sampling = Literal["random", "random_per_client"]
Product = Callable[[Any, PyTree, Array, Any], PyTree]
"""A function (the object that runs loops, v, key, number of the fresh cohort) -> H v."""
SAMPLES_FOR_CHECK, CLIENTS_FOR_CHECK = 1024, 8
ENTRIES_FOR_CHECK = 10_000  # for a y with more entries, no method looks for negative curvature at the start
FLAT = 1e-3  # a curvature below this share of the largest one is treated as 0, because of rounding
FAR = 100  # the distance of the far points from y is this number times the norm of y, or times 1 if that is larger


class SolveInfo(NamedTuple):
    """Hold diagnostics of an approximate solution v."""

    negative_curvature: Array  # the number of the first product that showed that H is not positive definite; -1: none
    residual: Array  # ‖b − H v‖ / ‖b‖ at the end of conjugate gradient; 0 for a Neumann series, where it is unknown

    @classmethod
    def unknown(cls) -> SolveInfo:
        return cls(jnp.asarray(-1), jnp.zeros(()))

    @classmethod
    def of_clients(cls, means: Withheld) -> SolveInfo:
        """Return diagnostics of all clients; `means` has the share with negative curvature, and the mean residual."""
        met, residual = means.withheld
        return cls(jnp.where(met > 0, 0, -1), residual)

    def to_average(self) -> Withheld:
        """Return the diagnostics that a client sends, in a form of which means over clients can be taken.

        Under privacy zeros are sent instead, since noise would look like negative curvature.
        """
        return Withheld(((self.negative_curvature >= 0).astype(float), self.residual))


class Solved(NamedTuple):
    """Hold an approximate solution of H v = b."""

    v: PyTree
    hvps: Array  # the number of products with H
    info: SolveInfo


class Neumann(Part):
    """Solve the linear system by a truncated Neumann series, or by a random product of its factors.

    Args:
        terms: N, the number of terms. If each client solves its own system, this can also be several numbers N_i, one
            for each client, in the order of clients. These numbers are not in `Clients.own`, since the largest is the
            length of the compiled series. The truncation error is largest along the eigenvector of H's smallest
            eigenvalue μ. There it is (1 − sμ)^N times v.
        step: s, often 1/ℓ and always below 2/ℓ, where ℓ is the largest eigenvalue of H. It is checked at the start of a
            run. None: s adapts during the run (`AdaptiveSteps`).
        sampling: None: the whole series; "random": a product with a random number of factors; "random_per_client": for
            each client a product with its own random number of factors, if all clients solve one system together.
    """

    kind: ClassVar[str] = "neumann"

    terms: int | tuple[int, ...] = counts(default=20)
    step: Step = positive(default=None, adaptive="shared")
    sampling: Sampling | None = static(default=None)

    def validate(self) -> None:
        """Refuse an unknown value of `sampling`."""
        if self.sampling is not None and self.sampling not in get_args(Sampling):
            raise unknown("Neumann.sampling", self.sampling, get_args(Sampling))

    @property
    def most_terms(self) -> int:
        """Return N, or the largest N_i."""
        return self.terms if isinstance(self.terms, int) else max(self.terms)

    def terms_of(self, client: Client) -> int | Array:
        """Return N, or the client's N_i."""
        return self.terms if isinstance(self.terms, int) else jnp.array(self.terms)[client.id]

    def solve(self, loop: Any, product: Product, b: PyTree, key: Array, terms: int | Array) -> Solved:
        """Compute v ≈ H⁻¹ b. On the server, `loop.repeat` and `product` make exchanges; at a client they do not.

        The n-th step, n = 1, 2, …, is v ← (I − sH) v + e_n. For the series, e_n is s b. For one random length, e_n is
        0. If each client draws its own length, the leaves of `b` have the shape (N, …), and row l is the sum over the
        clients that drew the length l. If l more products follow step n, then e_n is row l.
        """
        draw_key, loop_key = jax.random.split(key)
        count: Any = terms - 1
        enters: Callable[[Array], PyTree]
        if self.sampling == "random":
            count = uniform_below(draw_key, terms)
            first, enters = scaled(terms * self.step, b), lambda n: optax.tree.zeros_like(b)
        elif self.sampling == "random_per_client":
            enters = lambda n: jax.tree.map(lambda leaf: leaf[count - n], b)  # noqa: E731
            first = enters(jnp.asarray(0))
        else:
            first, enters = scaled(self.step, b), lambda n: scaled(self.step, b)

        def shrink(loop: Any, carry: tuple[PyTree, Array, Array], key: Array) -> tuple[PyTree, Array, Array]:
            v, n, negative = carry
            hv = product(loop, v, key, n)
            negative = jnp.where((negative < 0) & curves_down(v, hv), n - 1, negative)
            return optax.tree.add(move(v, -self.step, hv), enters(n)), n + 1, negative

        start = first, jnp.asarray(1), jnp.asarray(-1)
        v, _, negative = loop.repeat(count, shrink, start, loop_key)
        return Solved(v, jnp.asarray(count), SolveInfo(negative, jnp.zeros(())))

    def findings(self, info: SolveInfo, where: str) -> Findings:
        """Return a warning if there was negative curvature. It is not an error: a truncated series is always finite."""
        return Findings(warning=negative_curvature(info, "product", where))


class CG(Part):
    """Solve H v = b by conjugate gradient, with as many products with H as a given accuracy needs.

    All products use the same samples.

    Args:
        max_steps: the largest number of products with H.
        tolerance: the relative residual ‖b − H v‖/‖b‖ at which the iteration ends.
    """

    kind: ClassVar[str] = "cg"
    most_terms: ClassVar[int] = 1
    """The number of draws of samples for products: all products share one draw."""

    max_steps: int = positive_integer(default=20)
    tolerance: Number = positive(default=1e-3)

    def solve(self, loop: Any, product: Product, b: PyTree, key: Array, terms: int | Array) -> Solved:
        """Compute v ≈ H⁻¹ b, with all products on the same samples."""
        _, loop_key = jax.random.split(key)

        def once(loop: Any, it: Iteration, _: Array) -> Iteration:
            return it.advanced(product(loop, it.p, loop_key, 0))

        end = loop.repeat(self.max_steps, once, Iteration.start(b, self.tolerance), key, until=Iteration.ended)
        size = optax.tree.vdot(b, b)
        residual = jnp.sqrt(end.rr / jnp.where(size > 0, size, 1))
        return Solved(end.v, end.spent, SolveInfo(end.negative, residual.astype(float)))

    def findings(self, info: SolveInfo, where: str) -> Findings:
        """Return an error if there was negative curvature, and a warning if the residual is above `tolerance`."""
        error, residual = negative_curvature(info, "iteration", where), float(info.residual)
        if residual <= 1.01 * float(np.max(self.tolerance)):
            return Findings(error)
        few = f"max_steps = {self.max_steps} is too small"
        return Findings(
            error, f"conjugate gradient ended at a relative residual of {residual:.2g}, above its tolerance: {few}"
        )


def negative_curvature(info: SolveInfo, unit: str, where: str) -> str:
    """Return a sentence about negative curvature in the linear system; "" if there was none.

    `where` names the system, and is "" for the system of all clients together. `unit` is "product" or "iteration".
    """
    met = int(info.negative_curvature)
    if met < 0:
        return ""
    place = where or f"{unit} {met}"
    doubt = "" if where else "; if clients add noise to their replies, the noise may be the cause"
    return (
        f"negative curvature at {place}: the inner Hessian is not positive definite there, and v is not defined; "
        f"the hypergradient may point anywhere (add a ridge in y to the inner loss){doubt}"
    )


class InClient:
    """Run a client's own loops, with the interface of `Fed.repeat`, so that a solver works on server and client."""

    @staticmethod
    def repeat(n: Any, body: Callable[..., Any], carry: PyTree, key: Array, *, until: Any = None) -> PyTree:
        if until is None:  # a loop of fixed length if n is a Python number
            return jax.lax.fori_loop(0, n, lambda i, carry: body(InClient, carry, jax.random.fold_in(key, i)), carry)

        def unfinished(loop: tuple[Array, PyTree]) -> Array:
            return (loop[0] < n) & ~until(loop[1])

        def step(loop: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return loop[0] + 1, body(InClient, loop[1], jax.random.fold_in(key, loop[0]))

        return jax.lax.while_loop(unfinished, step, (jnp.asarray(0), carry))[1]


def curves_down(v: PyTree, hv: PyTree) -> Array:
    """Return whether vᵀHv is below 0 by more than a rounding error; `hv` is H v."""
    curvature = optax.tree.vdot(v, hv)
    return curvature < -jnp.sqrt(jnp.finfo(curvature.dtype).eps) * optax.tree.norm(v) * optax.tree.norm(hv)


def check_neumann_step(
    field: str,
    step: Any,
    problem: Problem,
    clients: Clients | RemoteClients,
    x: PyTree,
    y: PyTree,
    local: bool = False,
    batch_size: int | None = None,
) -> None:
    """Refuse a step of 2/ℓ or more, where ℓ is the largest eigenvalue of the inner Hessian at the start of a run.

    A few Lanczos steps estimate ℓ, on at most SAMPLES_FOR_CHECK samples, and for local Hessians on at most
    CLIENTS_FOR_CHECK clients. ℓ may change later, as x and y move. A negative eigenvalue leads to a warning. Nothing is
    checked if the samples are on other machines.

    Args:
        field: the name of the step in messages.
        step: the step.
        problem, clients, x, y: as for `solve`.
        local: whether ℓ is the largest eigenvalue of any client's ∇²yy g_i; otherwise it is that of ∇²yy G.
        batch_size: for methods in which one batch serves all products, the number of samples of each client on which
            the Hessian is taken. Other batches may have a larger ℓ, for example if they draw a sample more often. None:
            all samples.

    Raises:
        ConfigurationError: the step is too long. The message has ℓ and the largest step.
    """
    if not isinstance(clients, Clients):
        return
    whose, key = "the", problem.key and (problem.key, jax.tree.structure(y))
    if local:
        whose = "a client's own" if batch_size is None else "a batch's own"
        few = min(CLIENTS_FOR_CHECK, -(-SAMPLES_FOR_CHECK // (batch_size or 1)))
        ids = np.unique(np.linspace(0, len(clients) - 1, few).astype(int)).tolist()
        if batch_size is None:
            several = Population.each(problem, clients, ids, SAMPLES_FOR_CHECK).inner
        else:
            several = Population.batches(problem, clients, ids, batch_size, seed=0).inner
        product = compiled(_hess_v, several, np.int32(0), x, y, y, key=key)
        operators = [partial(product, several, np.int32(k), x, y) for k in range(len(ids))]
    else:
        whole = Population.of(problem, clients, SAMPLES_FOR_CHECK).inner
        operators = [product_at(whole, x, y, key)]
    ends = [extreme_eigenvalues(operator, y, seed=0, iterations=8) for operator in operators]
    largest, smallest = max(end.largest for end in ends), min(end.smallest for end in ends)
    concave = smallest < -FLAT * abs(largest)
    if concave and (local or not without_minimum(problem, clients, x, y)):  # else `warn_without_minimum` warns of it
        warn(NumericalWarning(negative_eigenvalue(whose, smallest)))
    if largest > 0:
        allowed = (
            f"below 2/ℓ = {2 / largest:.4g}: at the start {whose} inner Hessian's largest eigenvalue is about ℓ = "
        )
        require(float(step) * largest < 2, field, float(step), f"{allowed}{largest:.4g}")


def warn_without_minimum(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
    """Warn if G(x, ·) has negative curvature at the start and also far away, so that there is no y*(x)."""
    try:
        smallest = without_minimum(problem, clients, x, y)
    except ConfigurationError:  # a sample on disk is not finite: the engine names it when it reads the sample
        return
    if smallest:
        warn(NumericalWarning(negative_eigenvalue("the", smallest)))


def without_minimum(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> float:
    """Return the smallest curvature of G(x, ·) at y if curvatures are negative at y and at two far points, else 0.

    The far points are at the distance FAR from y, on both sides, along the direction of the smallest curvature. The
    loss of a network can have negative curvature near a start, but is flat or rises far away.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(y))
    if problem.implicit_term != "inverse" or problem.local is not None or not 0 < size <= ENTRIES_FOR_CHECK:
        return 0.0
    key = problem.key and (problem.key, jax.tree.structure(y))
    whole = Population.of(problem, clients, SAMPLES_FOR_CHECK).inner
    ends = extreme_eigenvalues(product_at(whole, x, y, key), y, seed=0, iterations=20)
    flat = -FLAT * max(abs(ends.largest), abs(ends.smallest))
    if not ends.smallest < flat:
        return 0.0
    u, far = ends.smallest_vector, FAR * max(1.0, float(optax.tree.norm(y)))
    for length in (-far, far):
        there = jax.tree.map(lambda a, b, length=length: (a + length * b).astype(a.dtype), y, u)
        if not optax.tree.vdot(u, product_at(whole, x, there, key)(u)) < flat:
            return 0.0
    return ends.smallest


def product_at(whole: WeightedLoss, x: PyTree, y: PyTree, key: Any) -> partial[PyTree]:
    """Return the function v -> ∇²yy G·v at (x, y), for trees v with the shapes of y."""
    return partial(compiled(hess_v, whole, x, y, y, key=key), whole, x, y)


def negative_eigenvalue(whose: str, smallest: float) -> str:
    """Return a warning about negative curvature in y at the start, with the size of a ridge that removes it."""
    return (
        f"at the start {whose} inner Hessian has a negative eigenvalue, at most {smallest:.3g}: y*(x) and v are not "
        "defined there, and the hypergradient may point anywhere. A ridge on the inner loss in y removes it: add "
        f"c * (y**2).sum() with c above {abs(smallest) / 2:.3g}"
    )


def _hess_v(several: WeightedLoss, k: Array, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Return the product of v with the Hessian in y of the k-th of several losses, which are stacked in one tree."""
    return hess_v(jax.tree.map(lambda leaf: leaf[k], several), x, y, v)
