"""Prepare a client's inner loss at a fixed x for many steps on y: values that do not depend on y are computed once.

If x is the first layers of a network, these values are the features of the samples, and the steps on the head use the
features in place of the images. The loss is traced on a sample or on a batch. Its operations are then sorted by their
inputs: x alone, x and the samples, or y.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, Literal, Var

from fedbilevel.core.client import Client, Draw, Places
from fedbilevel.core.problem import Loss, Problem
from fedbilevel.core.tree import PyTree, join, split

BYTES_AT_ONCE = 2**24
"""The bytes of a client's intermediate values that are computed together; more would not fit into a cache."""
FIXED, SAMPLE, VARIABLE = range(3)
"""Kinds of operations.

FIXED operations depend only on x and on constants. SAMPLE operations depend on the sample, and not on y. VARIABLE
operations depend on y.
"""


class InnerLoss(NamedTuple):
    """Hold g_i(x, ·), a client's inner loss at a fixed x: `loss(y, take(draw))` is its value on a draw of samples."""

    take: Callable[[Draw], PyTree]
    loss: Callable[[PyTree, PyTree], Array]

    def gradient(self, y: PyTree, draw: Draw) -> PyTree:
        """Return ∇y g_i(x, y) on the samples that `draw` selects, in the shape of y."""
        return jax.grad(self.loss)(y, self.take(draw))


def inner_loss_at(client: Client, x: PyTree, y: PyTree, batch_size: int | None, steps: int) -> InnerLoss:
    """Prepare a client's inner loss at a fixed x for about `steps` draws; only the shapes and types of `y` matter.

    Values of single samples are computed once only if the loss is a mean over samples, which a `WholeLoss` is not.
    """
    problem, samples = client.problem, client.inner
    few = steps * (batch_size or samples.longest) <= samples.longest  # on average, each sample is drawn at most once
    if few or "inner" in (*problem.draws, *problem.whole):
        take_batch = partial(client.inner_batch, batch_size=batch_size)
        return InnerLoss(take_batch, lambda y, batch: problem.inner(x, y, batch))
    everything = samples.everything()
    rows = everything.samples
    sample = jax.tree.map(lambda a: a[0], rows)
    function = lambda x, y, row: problem.inner(x, y, jax.tree.map(lambda a: a[None], row))  # noqa: E731
    parts = partition_by_dependence(function, x, y, sample)
    fixed = parts.fixed(x)
    features = _in_blocks(partial(parts.of_sample, fixed), rows, max(1, BYTES_AT_ONCE // max(1, parts.bytes_of_sample)))

    def take(draw: Draw) -> tuple[PyTree, Any]:
        if isinstance(draw, Places):
            return jax.tree.map(lambda a: a[draw.places], features), True if draw.valid is None else draw.valid
        if batch_size is None:
            return features, everything.mask
        chosen = samples.drawn(draw, batch_size)
        return jax.tree.map(lambda a: a[chosen], features), True

    def loss(y: PyTree, batch: tuple[PyTree, Any]) -> Array:
        chosen, mask = batch
        if not chosen:  # the loss does not depend on the samples
            return parts.of_y(fixed, chosen, y)
        return jnp.mean(jax.vmap(lambda row: parts.of_y(fixed, row, y))(chosen), where=mask)

    return InnerLoss(take, loss)


class OnBatch(NamedTuple):
    """Hold g(x, ·) on a batch, as `of_y(features, y)`.

    The features are the floating-point values that do not depend on y and that operations with y use. Integers, through
    which no derivative passes, are constants of `of_y`.
    """

    of_y: Callable[[PyTree, PyTree], Array]
    features: PyTree
    pull: Callable[[PyTree], PyTree]  # maps a gradient in the features to the gradient in x

    def loss(self, y: PyTree) -> Array:
        """Return g(x, y) on the batch, a scalar."""
        return self.of_y(self.features, y)


def inner_loss_on(problem: Problem, x: PyTree, y: PyTree, batch: PyTree) -> OnBatch:
    """Prepare the inner loss on a batch for many y, and for gradients in x; only shapes and types of `y` matter."""
    parts = partition_by_dependence(problem.inner, x, y, batch)

    def features(x: PyTree) -> tuple[PyTree, PyTree]:
        fixed = parts.fixed(x)
        both = fixed, parts.of_sample(fixed, batch)
        return split(both, lambda a: bool(jnp.issubdtype(a.dtype, jnp.inexact)))  # floating and complex values

    def of_y(numbers: PyTree, y: PyTree) -> Array:
        fixed, sample = join(numbers, others)
        return parts.of_y(fixed, sample, y)

    numbers, pull, others = jax.vjp(features, x, has_aux=True)
    return OnBatch(of_y, numbers, lambda slope: pull(slope)[0])


def loss_at_points(
    loss: Loss, x: PyTree, y: PyTree, batch: PyTree
) -> Callable[[PyTree, Sequence[PyTree]], list[Array]]:
    """Return the function (x, several y) -> [loss(x, y, batch) for each y], which is differentiable in x and each y.

    Values that do not depend on y are computed once, and differentiated once. The points y are evaluated one after the
    other, which is quicker on a CPU than a `vmap`: in a `vmap`, matrix products would have other weights for each
    point. Only the shapes and types of `x` and `y` matter.
    """
    parts = partition_by_dependence(loss, x, y, batch)

    def losses(x: PyTree, points: Sequence[PyTree]) -> list[Array]:
        fixed = parts.fixed(x)
        sample = parts.of_sample(fixed, batch)
        return [parts.of_y(fixed, sample, point) for point in points]

    return losses


class Parts(NamedTuple):
    """Hold a function in three parts: function(x, y, sample) = of_y(fixed(x), of_sample(fixed(x), sample), y)."""

    fixed: Callable[[PyTree], list[Array]]
    of_sample: Callable[[list[Array], PyTree], list[Array]]
    of_y: Callable[[list[Array], list[Array], PyTree], Array]
    bytes_of_sample: int  # the size of all results in `of_sample`, if the compiler fuses none of its operations


def partition_by_dependence(function: Callable[..., Array], x: PyTree, y: PyTree, sample: PyTree) -> Parts:
    """Divide a scalar function into the parts of `Parts`; each operation is in the first part that has its inputs."""
    closed = jax.make_jaxpr(_inlined(function, x, y, sample))(x, y, sample)
    jaxpr = closed.jaxpr
    kinds = [kind for kind, tree in ((FIXED, x), (VARIABLE, y), (SAMPLE, sample)) for _ in jax.tree.leaves(tree)]
    level = dict.fromkeys(jaxpr.constvars, FIXED) | dict(zip(jaxpr.invars, kinds, strict=True))
    needed: dict[int, dict[Var, None]] = {FIXED: {}, SAMPLE: {}, VARIABLE: {}}
    equations: dict[int, list[Any]] = {FIXED: [], SAMPLE: [], VARIABLE: []}

    def use(atoms: Any, by: int) -> None:
        for v in _variables(atoms):
            if level[v] < by:
                needed[level[v]][v] = None

    for equation in jaxpr.eqns:
        own = max([FIXED, *(level[v] for v in _variables(equation.invars))])
        level |= dict.fromkeys(equation.outvars, own)
        equations[own].append(equation)
        use(equation.invars, own)
    use(jaxpr.outvars, VARIABLE)
    inputs = {kind: [v for v in jaxpr.invars if level[v] == kind] for kind in needed}
    fixed_vars, sample_vars = list(needed[FIXED]), list(needed[SAMPLE])

    def run(kind: int, given: list[Var], values: list[Any], wanted: list[Any]) -> list[Array]:
        names = jaxpr.debug_info.with_unknown_names()
        part = jaxpr.replace(
            constvars=[], invars=given, eqns=equations[kind], outvars=wanted, debug_info=names, effects=jaxpr.effects
        )
        return jax.core.eval_jaxpr(part, [], *values)

    def fixed(x: PyTree) -> list[Array]:
        given = [*jaxpr.constvars, *inputs[FIXED]]
        return run(FIXED, given, [*closed.consts, *jax.tree.leaves(x)], fixed_vars)

    def of_sample(fixed: list[Array], sample: PyTree) -> list[Array]:
        return run(SAMPLE, [*fixed_vars, *inputs[SAMPLE]], [*fixed, *jax.tree.leaves(sample)], sample_vars)

    def of_y(fixed: list[Array], features: list[Array], y: PyTree) -> Array:
        given = [*fixed_vars, *sample_vars, *inputs[VARIABLE]]
        return run(VARIABLE, given, [*fixed, *features, *jax.tree.leaves(y)], jaxpr.outvars)[0]

    results = [out.aval for equation in equations[SAMPLE] for out in equation.outvars]
    return Parts(fixed, of_sample, of_y, sum(result.size * result.dtype.itemsize for result in results))


def _in_blocks(function: Callable[[PyTree], PyTree], rows: PyTree, size: int) -> PyTree:
    """Apply `function` to every row, with `size` rows at a time."""
    if size >= len(jax.tree.leaves(rows)[0]):
        return jax.vmap(function)(rows)
    return lax.map(function, rows, batch_size=size)


def _variables(atoms: Any) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _inlined(function: Callable[..., Array], *like: PyTree) -> Callable[..., Array]:
    """Rewrite `function` without inner `jit`s, since each of them would be treated as a single operation."""
    closed = jax.make_jaxpr(function)(*like)

    def evaluate(jaxpr: Jaxpr, consts: Any, *arguments: Any) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for equation in jaxpr.eqns:
            read = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                inner = equation.params["jaxpr"]
                out = evaluate(inner.jaxpr, inner.consts, *read)
            else:
                single = jaxpr.replace(
                    constvars=[], invars=_variables(equation.invars), eqns=[equation], outvars=equation.outvars
                )
                out = jax.core.eval_jaxpr(single, [], *(values[v] for v in _variables(equation.invars)))
            values |= dict(zip(equation.outvars, out, strict=True))
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    return lambda *arguments: evaluate(closed.jaxpr, closed.consts, *jax.tree.leaves(arguments))[0]
