"""How a method finds v = H⁻¹ b, H = ∇²yy G being known by its products alone: a Neumann series, or conjugate gradient.

With s the step (1/ℓ in papers) and N terms

    Neumann                       v = s Σ_{n<N} (I − sH)^n b
    sampling="random"             v = N s (I − sH)^N' b,  N' uniform on {0..N−1}                    FedIHGP (FedNest)
    sampling="random_per_client"  v = mean over clients of N s (I − sH)^N'_i ∇y f_i, each with its own N'_i  (FedMBO)
    CG                            conjugate gradient, until ‖b − H v‖ ≤ tolerance·‖b‖

The first is the expectation of the two below it, whose variance grows with N.
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
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move, scaled
from fedbilevel.machinery.kept import compiled
from fedbilevel.machinery.threefry import uniform_below
from fedbilevel.oracles.operators import Iteration, extreme_eigenvalues
from fedbilevel.oracles.population import Population, WeightedLoss, hess_v

Sampling = Literal["random", "random_per_client"]
Product = Callable[[Any, PyTree, Array, Any], PyTree]
"""(where loops run, v, key, number of the fresh cohort) -> H v."""
SAMPLES_FOR_CHECK, CLIENTS_FOR_CHECK = 1024, 8
ENTRIES_FOR_CHECK = 10_000  # of y at most, where every method's inner loss is looked at
FLAT = 1e-3  # relative, of a curvature that is 0 but for rounding
FAR = 100  # times the norm of y, or 1 if that is more


class SolveInfo(NamedTuple):
    """How far a solution may be trusted."""

    negative_curvature: Array  # the first product that met any, or -1: H is then not positive definite
    residual: Array  # ‖b − H v‖ / ‖b‖ at which conjugate gradient ended; 0 for the others, which do not know it

    @classmethod
    def unknown(cls) -> SolveInfo:
        return cls(jnp.asarray(-1), jnp.zeros(()))

    @classmethod
    def of_clients(cls, means: Withheld) -> SolveInfo:
        """Make it from the share of clients that met negative curvature, and their mean residual."""
        met, residual = means.withheld
        return cls(jnp.where(met > 0, 0, -1), residual)

    def to_average(self) -> Withheld:
        """Make what a client sends of its own: zeros under privacy, whose noise would look like negative curvature."""
        return Withheld(((self.negative_curvature >= 0).astype(float), self.residual))


class Solved(NamedTuple):
    """An approximate H⁻¹ b."""

    v: PyTree
    hvps: Array  # products with H, spent on it
    info: SolveInfo


class Neumann(Part):
    """A truncated Neumann series, or a random product of its factors.

    Args:
        terms: N; where each client solves a system of its own also a number for each client, N_i in their order: a
            table here, not `Clients.own`, since the largest is the length of the compiled series. What the series
            leaves out is (1 − sμ)^N of v along the smallest eigenvalue μ of H.
        step: s = 1/ℓ, below 2/ℓ for ℓ the largest eigenvalue of H; checked at the start; None adapts it
            (`AdaptiveSteps`).
        sampling: None, the whole series; "random", a random length; "random_per_client", a random length for each
            client, where the federation solves one system.
    """

    kind: ClassVar[str] = "neumann"

    terms: int | tuple[int, ...] = counts(default=20)
    step: float = positive(default=None, adaptive="shared")
    sampling: Sampling | None = static(default=None)

    def validate(self) -> None:
        """Refuse a value of `sampling` that is not known."""
        if self.sampling is not None and self.sampling not in get_args(Sampling):
            raise unknown("Neumann.sampling", self.sampling, get_args(Sampling))

    @property
    def most_terms(self) -> int:
        """N, or the largest N_i."""
        return self.terms if isinstance(self.terms, int) else max(self.terms)

    def terms_of(self, client: Client) -> int | Array:
        """Return N, or the client's N_i."""
        return self.terms if isinstance(self.terms, int) else jnp.array(self.terms)[client.id]

    def solve(self, loop: Any, product: Product, b: PyTree, key: Array, terms: int | Array) -> Solved:
        """Find v; `loop.repeat` and `product` make the exchanges, or a client's own loops.

        v ← (I − sH) v + what enters before the n-th product, n = 1, 2, …: in the series s b each time, with a random
        length nothing more, and with a length for each client what those bring who have as many products ahead. Then
        b holds, for each length, the mean over the clients that drew it: leaves (N, …).
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
        """Warn of negative curvature: a Neumann series can be summed where it meets any."""
        return Findings(warning=negative_curvature(info, "product", where))


class CG(Part):
    """Conjugate gradient: v = H⁻¹ b by as many products with H as a given accuracy needs, on the same samples.

    Args:
        max_steps: the largest number of products with H.
        tolerance: the relative residual ‖b − H v‖/‖b‖ at which it ends.
    """

    kind: ClassVar[str] = "cg"
    most_terms: ClassVar[int] = 1
    """How many draws of samples there are for products: all products have the same."""

    max_steps: int = positive_integer(default=20)
    tolerance: float = positive(default=1e-3)

    def solve(self, loop: Any, product: Product, b: PyTree, key: Array, terms: int | Array) -> Solved:
        """Find v, with all products on the same samples."""
        _, loop_key = jax.random.split(key)

        def once(loop: Any, it: Iteration, _: Array) -> Iteration:
            return it.advanced(product(loop, it.p, loop_key, 0))

        end = loop.repeat(self.max_steps, once, Iteration.start(b, self.tolerance), key, until=Iteration.ended)
        size = optax.tree.vdot(b, b)
        residual = jnp.sqrt(end.rr / jnp.where(size > 0, size, 1))
        return Solved(end.v, end.spent, SolveInfo(end.negative, residual.astype(float)))

    def findings(self, info: SolveInfo, where: str) -> Findings:
        """End at negative curvature, where there is no solution; warn of a residual above `tolerance`."""
        error, residual = negative_curvature(info, "iteration", where), float(info.residual)
        if residual <= 1.01 * float(np.max(self.tolerance)):
            return Findings(error)
        few = f"max_steps = {self.max_steps} are too few"
        return Findings(
            error, f"conjugate gradient ended at a relative residual of {residual:.2g}, above its tolerance: {few}"
        )


def negative_curvature(info: SolveInfo, unit: str, where: str) -> str:
    """Say in a sentence that negative curvature was met; `where`: "" for a system of the whole federation."""
    met = int(info.negative_curvature)
    if met < 0:
        return ""
    place = where or f"{unit} {met}"
    doubt = "" if where else "; where clients noise their replies the noise may be its cause"
    return (
        f"negative curvature at {place}: the inner Hessian is not positive definite there, and v is not defined; "
        f"the hypergradient may point anywhere (a ridge on the inner loss in y mends that){doubt}"
    )


class InClient:
    """A client's own loops in the form of `Fed.repeat`, so that the same solver serves both."""

    @staticmethod
    def repeat(n: Any, body: Callable[..., Any], carry: PyTree, key: Array, *, until: Any = None) -> PyTree:
        if until is None:  # a loop of known length, if n is known
            return jax.lax.fori_loop(0, n, lambda i, carry: body(InClient, carry, jax.random.fold_in(key, i)), carry)

        def unfinished(loop: tuple[Array, PyTree]) -> Array:
            return (loop[0] < n) & ~until(loop[1])

        def step(loop: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return loop[0] + 1, body(InClient, loop[1], jax.random.fold_in(key, loop[0]))

        return jax.lax.while_loop(unfinished, step, (jnp.asarray(0), carry))[1]


def curves_down(v: PyTree, hv: PyTree) -> Array:
    """Say whether vᵀHv < 0 beyond rounding."""
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
    """Refuse a step of 2/ℓ or more, ℓ being the largest eigenvalue of ∇²yy G, or, if `local`, of any client's ∇²yy g_i;
    nothing where the samples are elsewhere.

    With a `batch_size` ℓ is that of a drawn batch of each client: where a batch serves all products, these are products
    with its Hessian. Other batches may have a larger ℓ, as when they draw a sample more often. Warn where an eigenvalue
    is negative.

    ℓ is taken at the start of a run, by a few Lanczos steps on at most SAMPLES_FOR_CHECK samples of CLIENTS_FOR_CHECK
    clients; x and y move on, and it with them.
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
    if concave and (local or not without_minimum(problem, clients, x, y)):  # else every method has been warned
        warn(NumericalWarning(negative_eigenvalue(whose, smallest)))
    if largest > 0:
        allowed = (
            f"below 2/ℓ = {2 / largest:.4g}: at the start {whose} inner Hessian's largest eigenvalue is about ℓ = "
        )
        require(float(step) * largest < 2, field, float(step), f"{allowed}{largest:.4g}")


def warn_without_minimum(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
    """Warn where G(x, ·) curves downwards at the start and however far y goes, so that no method can find y*(x)."""
    try:
        smallest = without_minimum(problem, clients, x, y)
    except ConfigurationError:  # a sample on disk is not finite: the engine says which when it reads it
        return
    if smallest:
        warn(NumericalWarning(negative_eigenvalue("the", smallest)))


def without_minimum(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> float:
    """Return the curvature of G(x, ·) along its most downward direction at y if it is negative there and FAR away on
    both sides, else 0: a network's loss curves downwards near a start, but rises or is flat far from it."""
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
    """Return v -> ∇²yy G·v at (x, y)."""
    return partial(compiled(hess_v, whole, x, y, y, key=key), whole, x, y)


def negative_eigenvalue(whose: str, smallest: float) -> str:
    """Say of a curvature in y that is negative at the start what follows, and which ridge mends it."""
    return (
        f"at the start {whose} inner Hessian has a negative eigenvalue, at most {smallest:.3g}: y*(x) and v are not "
        "defined there, and the hypergradient may point anywhere. A ridge on the inner loss in y mends that: add "
        f"c * (y**2).sum() with c above {abs(smallest) / 2:.3g}"
    )


def _hess_v(several: WeightedLoss, k: Array, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Multiply by the Hessian in y of the k-th of several losses, whose leaves are stacked."""
    return hess_v(jax.tree.map(lambda leaf: leaf[k], several), x, y, v)
