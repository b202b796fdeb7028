"""Define the rules for operators of PyTorch: a function of JAX arrays for each, with the operator's arguments.

This module does not import PyTorch. At a kink or a tie, derivatives are those of PyTorch: relu'(0) = 0, clamp'(edge) =
1, and the first of equal maxima gets the gradient. NaN propagates as in PyTorch. The result of a rule may have another
dtype than in PyTorch; `Graph.run` casts the result.

The rule of an operator that draws random numbers has a function `key` as its first argument. `key()` returns a key of
JAX, or raises ConfigurationError if the caller gave none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.errors import ConfigurationError

Rule = Callable[..., Any]

RULES: dict[str, Rule] = {}
"""The rules by the names of operators in PyTorch, such as "aten.add.Tensor"."""

DRAWING: set[str] = set()
"""The names of operators whose rules have `key` as their first argument."""

GROUP_NORM = "use nn.GroupNorm or nn.LayerNorm, or call .eval() to use its present statistics"
BATCH_NORM = "aten._native_batch_norm_legit"  # the operator that uses the statistics of the batch
PADDED = "has packed sequences: pad them to one length"
REFUSED = {
    "aten._local_scalar_dense": "reads a number out of a tensor, as .item() does: keep it a tensor",
    "aten.nonzero": "has one result per nonzero entry, so that its shape varies: use torch.where with three arguments",
    BATCH_NORM: f"mixes the samples of a batch: {GROUP_NORM}",
    "aten.lstm.data": PADDED,
    "aten.gru.data": PADDED,
    "aten.rnn_tanh.data": PADDED,
    "aten.rnn_relu.data": PADDED,
}
"""Reasons why operators are not supported, each with a remedy, by the beginnings of operators' names."""


def rule(*names: str, draws: bool = False) -> Callable[[Rule], Rule]:
    """Make a function the rule of some operators: "add.Tensor" is aten.add.Tensor, and "relu" is aten.relu.default."""

    def enter(function: Rule) -> Rule:
        full = [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names]
        RULES.update(dict.fromkeys(full, function))
        DRAWING.update(full if draws else ())
        return function

    return enter


def enter_all(functions: dict[str, Rule]) -> None:
    """Enter functions as rules of the operators in their keys, which are separated by spaces."""
    for names, function in functions.items():
        rule(*names.split())(function)


def several(value: Any, count: int) -> tuple[int, ...]:
    """Return a number for each of `count` axes, from one number per axis or one for all axes."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * count if len(values) == 1 else values


def axes(dim: Any) -> Any:
    """Return JAX's `axis` for PyTorch's `dim`; None and [] mean all axes."""
    return tuple(dim) or None if isinstance(dim, list | tuple) else dim


# Elementwise functions of one array.

enter_all({
    "acos": jnp.arccos, "acosh": jnp.arccosh, "asin": jnp.arcsin, "asinh": jnp.arcsinh,
    "atan": jnp.arctan, "atanh": jnp.arctanh, "bitwise_not": jnp.bitwise_not, "ceil": jnp.ceil, "cos": jnp.cos,
    "cosh": jnp.cosh, "erf": lax.erf, "erfc": lax.erfc, "erfinv": lax.erf_inv, "exp": jnp.exp, "exp2": jnp.exp2,
    "expm1": jnp.expm1, "floor": jnp.floor, "isinf": jnp.isinf, "isnan": jnp.isnan,
    "log": jnp.log, "log10": jnp.log10, "log1p": jnp.log1p, "log2": jnp.log2, "logical_not": jnp.logical_not,
    "neg": jnp.negative, "reciprocal": jnp.reciprocal, "relu": jax.nn.relu, "round": jnp.round,
    "sigmoid": jax.nn.sigmoid, "sign": jnp.sign, "silu": jax.nn.silu, "sin": jnp.sin, "sinh": jnp.sinh,
    "sqrt": jnp.sqrt, "tan": jnp.tan, "tanh": jnp.tanh, "trunc": jnp.trunc, "detach": lax.stop_gradient,
})  # fmt: skip

rule("alias", "clone", "lift_fresh_copy")(lambda x: x)
rule("abs")(lambda x: jnp.sign(x) * x)  # the derivative at 0 is 0 in PyTorch, and 1 for jnp.abs
rule("rsqrt")(lambda x: 1 / jnp.sqrt(x))
rule("gelu")(lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"))
rule("leaky_relu")(lambda x, slope=0.01: jnp.where(x > 0, x, slope * x))
rule("hardtanh")(lambda x, low=-1, high=1: jnp.where(x <= low, low, jnp.where(x >= high, high, x)))
rule("nan_to_num")(lambda x, nan=0.0, posinf=None, neginf=None: jnp.nan_to_num(x, True, nan or 0.0, posinf, neginf))


@rule("softplus")
def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(x * beta) / beta)


@rule("elu")
def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    below = alpha * jnp.expm1(jnp.where(x > 0, 0, x) * input_scale)  # finite also where x > 0
    return scale * jnp.where(x > 0, x, below)


@rule("clamp", "clamp.Tensor")
def clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


# Elementwise functions of two arrays.

enter_all({
    "mul.Tensor mul.Scalar": jnp.multiply, "remainder.Tensor remainder.Scalar": jnp.remainder,
    "fmod.Tensor fmod.Scalar": jnp.fmod, "eq.Tensor eq.Scalar": jnp.equal, "ne.Tensor ne.Scalar": jnp.not_equal,
    "lt.Tensor lt.Scalar": jnp.less, "le.Tensor le.Scalar": jnp.less_equal, "gt.Tensor gt.Scalar": jnp.greater,
    "ge.Tensor ge.Scalar": jnp.greater_equal, "bitwise_and.Tensor bitwise_and.Scalar": jnp.bitwise_and,
    "bitwise_or.Tensor bitwise_or.Scalar": jnp.bitwise_or, "bitwise_xor.Tensor bitwise_xor.Scalar": jnp.bitwise_xor,
    "maximum": jnp.maximum, "minimum": jnp.minimum, "atan2": jnp.arctan2, "logical_and": jnp.logical_and,
    "logical_or": jnp.logical_or, "logical_xor": jnp.logical_xor, "pow.Scalar pow.Tensor_Tensor": jnp.power,
    "where.self where.Scalar where.ScalarSelf where.ScalarOther": jnp.where,
})  # fmt: skip

rule("add.Tensor", "add.Scalar")(lambda a, b, alpha=1: a + (b if alpha == 1 else alpha * b))
rule("sub.Tensor", "sub.Scalar")(lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b))
rule("rsub.Tensor", "rsub.Scalar")(lambda a, b, alpha=1: b - (a if alpha == 1 else alpha * a))
rule("pow.Tensor_Scalar")(lambda x, power: x ** (int(power) if float(power).is_integer() else power))
rule("masked_fill.Scalar", "masked_fill.Tensor")(lambda x, mask, value: jnp.where(mask, value, x))


@rule("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def divide(a: Array, b: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(a, b)
    return a / b if rounding_mode is None else jnp.trunc(a / b)


# Sums, means, maxima and sorting.


def reduction(of: Rule) -> Rule:
    def reduce(x: Array, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
        return of(x if dtype is None else x.astype(dtype), axes(dim), keepdims=keepdim)

    return reduce


enter_all({
    "sum sum.dim_IntList": reduction(jnp.sum), "mean mean.dim": reduction(jnp.mean), "amax": reduction(jnp.max),
    "amin": reduction(jnp.min), "any any.dim any.dims": reduction(jnp.any), "all all.dim all.dims": reduction(jnp.all),
    "max": jnp.max, "min": jnp.min,
})  # fmt: skip

rule("logsumexp")(lambda x, dim, keepdim=False: jax.nn.logsumexp(x, axes(dim), keepdims=keepdim))
rule("cumsum")(lambda x, dim, dtype=None: jnp.cumsum(x, dim, dtype=dtype))
rule("cumprod")(lambda x, dim, dtype=None: jnp.cumprod(x, dim, dtype=dtype))
rule("argmax")(lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim))
rule("argmin")(lambda x, dim=None, keepdim=False: jnp.argmin(x, dim, keepdims=keepdim))
rule("_softmax", "softmax.int")(lambda x, dim, _=None: jax.nn.softmax(x, dim))
rule("_log_softmax", "log_softmax.int")(lambda x, dim, _=None: jax.nn.log_softmax(x, dim))


@rule("prod", "prod.dim_int")
def prod(x: Array, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return jnp.prod(x, dim, dtype=dtype, keepdims=keepdim)


@rule("var.correction")
def var(x: Array, dim: Any = None, correction: int = 1, keepdim: bool = False) -> Array:
    return jnp.var(x, axes(dim), ddof=correction, keepdims=keepdim)


@rule("std.correction")
def std(x: Array, dim: Any = None, correction: int = 1, keepdim: bool = False) -> Array:
    """Compute the standard deviation; its derivative at equal entries is 0, as in PyTorch."""
    return flat_root(var(x, dim, correction, keepdim))


def flat_root(x: Array) -> Array:
    """Compute the square root, with the derivative 0 at 0."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


@rule("linalg_vector_norm")
def vector_norm(x: Array, order: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Array:
    """Compute a norm of order 1, 2 or infinity; that of order 2 has the derivative 0 at 0, as in PyTorch."""
    if order in (1, math.inf):
        return (jnp.sum if order == 1 else jnp.max)(jnp.sign(x) * x, axes(dim), keepdims=keepdim)
    if order != 2:
        raise ConfigurationError(f"a vector norm of order {order} is not supported: use 1, 2 or infinity")
    return flat_root(jnp.sum(x * x, axes(dim), keepdims=keepdim))


@rule("sort")
def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    at = jnp.argsort(x, dim, descending=descending)
    return jnp.take_along_axis(x, at, dim), at


@rule("topk")
def topk(x: Array, k: int, dim: int = -1, largest: bool = True, ordered: bool = True) -> list[Array]:
    return [lax.slice_in_dim(a, 0, k, axis=dim) for a in sort(x, dim, largest)]


def extreme(place: Rule) -> Rule:
    def values_and_places(x: Array, dim: int, keepdim: bool = False) -> list[Array]:
        at = place(x, dim, keepdims=True)
        both = [jnp.take_along_axis(x, at, dim), at]
        return both if keepdim else [jnp.squeeze(a, dim) for a in both]

    return values_and_places


enter_all({"max.dim": extreme(jnp.argmax), "min.dim": extreme(jnp.argmin)})


# Shapes.

rule("view", "_unsafe_view", "reshape")(lambda x, shape: x.reshape(tuple(shape)))
rule("permute")(lambda x, dims: jnp.transpose(x, dims))
rule("transpose.int")(jnp.swapaxes)
rule("t")(jnp.transpose)
rule("squeeze")(jnp.squeeze)
rule("squeeze.dim", "squeeze.dims")(lambda x, dim: jnp.squeeze(x, tuple(d for d in several(dim, 1) if x.shape[d] == 1)))
rule("unsqueeze")(jnp.expand_dims)
rule("cat")(lambda arrays, dim=0: jnp.concatenate([a for a in arrays if a.shape != (0,)], dim))
rule("stack")(lambda arrays, dim=0: jnp.stack(arrays, dim))
rule("unbind.int")(lambda x, dim=0: list(jnp.moveaxis(x, dim, 0)))
rule("repeat")(lambda x, times: jnp.tile(x, tuple(times)))
rule("flip")(lambda x, dims: jnp.flip(x, tuple(dims)))
rule("roll")(lambda x, shifts, dims=(): jnp.roll(x, shifts if dims else shifts[0], axes(dims)))
rule("tril")(jnp.tril)
rule("triu")(jnp.triu)
rule("copy")(lambda x, source, non_blocking=False: jnp.broadcast_to(source, x.shape))
rule("_to_copy")(lambda x, dtype=None, non_blocking=False: x if dtype is None else x.astype(dtype))
rule("sym_size.int")(lambda x, dim: x.shape[dim])
rule("sym_numel")(lambda x: x.size)
rule("split.Tensor")(lambda x, size, dim=0: jnp.split(x, list(range(size, x.shape[dim], size)), dim))
rule("split_with_sizes")(lambda x, sizes, dim=0: jnp.split(x, list(itertools.accumulate(sizes))[:-1], dim))
rule(
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async.msg", "sym_constrain_range",
    "sym_constrain_range_for_size",
)(lambda *_, **__: None)  # fmt: skip


@rule("expand")
def expand(x: Array, shape: Sequence[int], implicit: bool = False) -> Array:
    lengths = (None,) * (len(shape) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [a if b == -1 else b for a, b in zip(lengths, shape, strict=True)])


@rule("constant_pad_nd")
def pad(x: Array, edges: Sequence[int], value: float = 0) -> Array:
    """Pad x by `edges`: (before, after) for the last axis, then for the one before it, …; negative numbers cut."""
    pairs = list(zip(edges[::2], edges[1::2], strict=True))[::-1]
    outer = [(0, 0, 0)] * (x.ndim - len(pairs))
    return lax.pad(x, jnp.asarray(value, x.dtype), outer + [(before, after, 0) for before, after in pairs])


# New arrays. Entries that PyTorch leaves undefined are 0.

rule("empty.memory_format")(lambda shape, dtype=None: jnp.zeros(tuple(shape), dtype))
rule("empty_permuted")(lambda shape, order, dtype=None: jnp.zeros(tuple(shape), dtype))
rule("full")(lambda shape, value, dtype=None: jnp.full(tuple(shape), value, dtype))
rule("full_like")(lambda x, value, dtype=None: jnp.full_like(x, value, dtype))
rule("scalar_tensor")(lambda value, dtype=None: jnp.asarray(value, dtype))
rule("arange.start_step")(lambda start, stop, step=1, dtype=None: jnp.arange(start, stop, step, dtype))


# Indexing.


def along(x: Array, dim: int, index: Any) -> tuple[Any, ...]:
    """Return the index with `index` on axis `dim`, and with all entries on the other axes."""
    return (slice(None),) * (dim % x.ndim) + (index,)


def places(indices: Sequence[Array | None]) -> tuple[Any, ...]:
    if any(index is not None and index.dtype == bool for index in indices):
        raise ConfigurationError(
            "a mask as an index gives one entry for each true value, so the shape of the result is not known in "
            "advance: use torch.where with three arguments"
        )
    return tuple(slice(None) if index is None else index for index in indices)


def around(dim: int, index: Array) -> tuple[Array, ...]:
    """Return an index for gather and scatter: `index` on axis `dim`, and the places of its entries on other axes."""
    grid = list(jnp.ogrid[tuple(map(slice, index.shape))])
    grid[dim] = index
    return tuple(grid)


def corner(source: Any, index: Array) -> Any:
    """Return the entries of `source` that have an index: those within the shape of `index`."""
    return source[tuple(map(slice, index.shape))] if isinstance(source, jax.Array) else source


rule("select.int")(lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False))
rule("slice.Tensor")(lambda x, dim=0, start=None, end=None, step=1: x[along(x, dim, slice(start, end, step))])
rule("gather")(lambda x, dim, index: x[around(dim, index)])
rule("index_select")(lambda x, dim, index: jnp.take(x, index, dim))
rule("index.Tensor")(lambda x, indices: x[places(indices)])
rule("select_scatter")(lambda x, source, dim, index: x.at[along(x, dim, index)].set(source))
rule("scatter.src", "scatter.value")(lambda x, dim, index, a: x.at[around(dim, index)].set(corner(a, index)))
rule("scatter_add")(lambda x, dim, index, source: x.at[around(dim, index)].add(corner(source, index)))
rule("index_add")(lambda x, dim, index, source, alpha=1: x.at[along(x, dim, index)].add(alpha * source))


@rule("slice_scatter")
def slice_scatter(x: Array, source: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x.at[along(x, dim, slice(start, end, step))].set(source)


@rule("index_put")
def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    entries = x.at[places(indices)]
    return entries.add(values) if accumulate else entries.set(values)


@rule("embedding")
def embedding(weight: Array, index: Array, padding: int = -1, by_frequency: bool = False, _: bool = False) -> Array:
    """Take rows of `weight`; the row `padding` gets no gradient."""
    if by_frequency:
        raise ConfigurationError("an embedding with scale_grad_by_freq=True is not supported: set it to False")
    rows = jnp.take(weight, index, axis=0)
    return rows if padding < 0 else jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)


# Random numbers.

rule("rand", draws=True)(lambda key, shape, dtype=None: jax.random.uniform(key(), tuple(shape), dtype or float))
rule("randn", draws=True)(lambda key, shape, dtype=None: jax.random.normal(key(), tuple(shape), dtype or float))
rule("rand_like", draws=True)(lambda key, x, dtype=None: jax.random.uniform(key(), x.shape, dtype or x.dtype))
rule("randn_like", draws=True)(lambda key, x, dtype=None: jax.random.normal(key(), x.shape, dtype or x.dtype))
rule("bernoulli", draws=True)(lambda key, x: jax.random.bernoulli(key(), x).astype(x.dtype))
rule("bernoulli.p", draws=True)(lambda key, x, p=0.5: jax.random.bernoulli(key(), p, x.shape).astype(x.dtype))


@rule("uniform", draws=True)
def uniform(key: Callable[[], Array], x: Array, low: float = 0, high: float = 1) -> Array:
    return jax.random.uniform(key(), x.shape, x.dtype, low, high)


@rule("normal_functional", draws=True)
def normal(key: Callable[[], Array], x: Array, mean: float = 0, deviation: float = 1) -> Array:
    return mean + deviation * jax.random.normal(key(), x.shape, x.dtype)


@rule("dropout", draws=True)
def dropout(key: Callable[[], Array], x: Array, p: float, train: bool) -> Array:
    return native_dropout(key, x, p, train)[0]


@rule("native_dropout", draws=True)
def native_dropout(key: Callable[[], Array], x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if not train or p == 0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key(), 1 - p, x.shape)
    return x * (kept * (1 / (1 - p) if p < 1 else 0.0)).astype(x.dtype), kept
