"""Provide helpers for pytrees that optax.tree does not have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.forked import refuse_forked_child

PyTree = Any
"""Nested dicts, lists and tuples of arrays, or a model, as JAX takes them."""


class XY(NamedTuple):
    """Hold one entry for each of the variables x and y.

    Args:
        x: the entry of the outer variable.
        y: the entry of the inner variable; None if a problem has no y.
    """

    x: Any
    y: Any


class XYV(NamedTuple):
    """Hold one entry for each of the variables x, y and v, such as three step sizes.

    Args:
        x: the entry of the outer variable.
        y: the entry of the inner variable.
        v: the entry of the auxiliary variable, which tracks the solution of ∇²yy G v = ∇y F.
    """

    x: Any
    y: Any
    v: Any


def move(point: PyTree, size: Any, direction: PyTree) -> PyTree:
    """Return point + size·direction, in the dtypes of `point`."""
    return jax.tree.map(lambda p, d: p + (size * d).astype(p.dtype), point, direction)


@np.errstate(invalid="ignore", over="ignore")  # for entries that are infinite or nearly so
def near(tree: PyTree, rng: np.random.Generator) -> PyTree:
    """Move floating arrays at random, by about a tenth of their root mean square, or by about 0.1 if that is 0.

    No two entries are then equal. The results are arrays of NumPy.
    """

    def moved(leaf: Any) -> np.ndarray:
        kind: Any = np.float64 if leaf.dtype == np.float64 else np.float32
        array = np.asarray(leaf, kind)
        size = 0.1 * (float(np.sqrt(np.mean(np.square(array)))) or 1.0)
        return np.asarray(array + size * rng.standard_normal(array.shape, kind)).astype(leaf.dtype)

    return jax.tree.map(moved, tree)


def scaled(size: Any, tree: PyTree) -> PyTree:
    """Return size·tree, in the dtypes of `tree`."""
    return jax.tree.map(lambda leaf: (size * leaf).astype(leaf.dtype), tree)


def over(numerator: Any, denominator: Any) -> Array:
    """Return numerator/denominator, and 0 where the denominator is 0; NaN is kept."""
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


def rows_at(tree: PyTree, index: Array) -> PyTree:
    """Return the entries of leaves of shape (n, ...) at the indices `index`.

    Indices must be from 0 to n − 1. This is not checked.
    """

    def taken(leaf: Any) -> Array:
        return jnp.asarray(leaf).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.tree.map(taken, tree)


def on_device(tree: PyTree) -> PyTree:
    """Return arrays of NumPy as arrays of JAX, in JAX's precision; unlike jnp.asarray, this compiles nothing.

    The results may share memory with the arguments, which must not change afterwards.
    """

    def in_precision(leaf: Any) -> Any:
        return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)

    return jax.device_put(jax.tree.map(in_precision, tree))


def nbytes(tree: PyTree) -> int:
    """Return the number of bytes that all leaves of a tree take in a message; leaves are arrays or shapes."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """Return the paths of the leaves that contain NaN or infinity, e.g. ['.y.weight']."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    bad = (path for path, leaf in leaves if is_floating(leaf) and not np.all(np.isfinite(np.asarray(leaf))))
    return [jax.tree_util.keystr(path) or "value" for path in bad]


def is_floating(leaf: object) -> bool:
    """Return whether a leaf is an array or a number of a real floating type, which can be differentiated."""
    dtype = getattr(leaf, "dtype", None)
    return isinstance(leaf, float) if dtype is None else bool(jnp.issubdtype(dtype, jnp.floating))


def shapes(tree: PyTree) -> str:
    """Return the paths and shapes of leaves for messages, e.g. "['b'] (), ['w'] (4,)"; at most the first eight."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    texts = [f"{jax.tree_util.keystr(path) or 'shape'} {np.shape(leaf)}" for path, leaf in leaves[:8]]
    return ", ".join([*texts, *(["…"] if len(leaves) > len(texts) else [])]) or "no arrays"


def epsilon(*trees: PyTree) -> float:
    """Return ε of the coarsest floating type among all leaves, or 0 if no leaf is floating."""
    types = [jnp.result_type(getattr(leaf, "dtype", leaf)) for leaf in jax.tree.leaves(trees) if is_floating(leaf)]
    return max((float(jnp.finfo(dtype).eps) for dtype in types), default=0.0)


def split(tree: PyTree, varies: Callable[[Any], bool] = is_floating) -> tuple[PyTree, PyTree]:
    """Split a model into two trees, its variables and all other leaves. Each has None in place of the other's leaves.

    Variables are the leaves for which `varies` is true, by default floating arrays. Other leaves are, for example, the
    activation functions of an Equinox module, and Python numbers in its fields, such as a dropout rate. Variables
    become arrays of JAX, except tables on disk.

    Raises:
        ConfigurationError: a leaf is a tensor or parameter of PyTorch, or JAX cannot compute in this process. The
            process is checked here because every call that computes begins with this function.
    """
    refuse_forked_child()
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        if is_of("torch", leaf):
            what = f"{jax.tree_util.keystr(path)}, a {type(leaf).__name__}".removeprefix(", ")
            remedy = "fedbilevel.torch.from_torch(module, example) returns a module's parameters as arrays of JAX"
            raise ConfigurationError(
                f"{what} of PyTorch cannot be a variable: x and y are arrays of JAX or NumPy; {remedy}"
            )
    chosen = [varies(leaf) and not (type(leaf) is float and in_a_module(tree, path)) for path, leaf in leaves]
    pairs = list(zip((leaf for _, leaf in leaves), chosen, strict=True))
    # The dtype of a Python number would be weak until the first step, and the dtypes of losses would then change.
    variables = [
        (leaf if is_table(leaf) else jnp.asarray(leaf, dtype_of(leaf))) if varied else None for leaf, varied in pairs
    ]
    others = [None if varied else leaf for leaf, varied in pairs]
    return jax.tree.unflatten(structure, variables), jax.tree.unflatten(structure, others)


def dtype_of(leaf: Any) -> Any:
    """Return the dtype that JAX gives to an array or a number. It is never a weak type, also for a Python number."""
    given = getattr(leaf, "dtype", None)
    return jnp.result_type(leaf) if given is None else jax.dtypes.canonicalize_dtype(given, allow_extended_dtype=True)


def in_a_module(tree: PyTree, path: tuple[Any, ...]) -> bool:
    """Return whether the leaf at a path is a field of a module of Equinox, where Python numbers are settings."""
    *above, last = path or (None,)
    for key in above:
        if isinstance(key, jax.tree_util.GetAttrKey):
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.DictKey | jax.tree_util.SequenceKey):
            tree = tree[getattr(key, "key", getattr(key, "idx", None))]
        else:
            return False
    return is_of("equinox", tree) and isinstance(last, jax.tree_util.GetAttrKey)


def is_of(library: str, value: object) -> bool:
    """Return whether the class of a value, or a base of this class, belongs to a library."""
    return any(base.__module__.partition(".")[0] == library for base in type(value).__mro__)


def is_table(leaf: object) -> bool:
    """Return whether a leaf is a table on disk (core/on_disk.py): a memory map of a file that has no name.

    A copy of such a table in memory is also a `numpy.memmap`, but it maps no file.
    """
    return isinstance(leaf, np.memmap) and leaf.filename is None and getattr(leaf, "_mmap", None) is not None


def is_none(leaf: object) -> bool:
    """Return whether a leaf is None; used as `is_leaf` for trees that have None in place of leaves kept elsewhere."""
    return leaf is None


def join(variable: PyTree, fixed: PyTree) -> PyTree:
    """Return the model that `split` divided into `variable` and `fixed`."""
    return jax.tree.map(lambda a, b: b if a is None else a, variable, fixed, is_leaf=is_none)
