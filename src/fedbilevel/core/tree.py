"""The few pytree helpers that optax.tree does not have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.forked import refuse_forked_child

PyTree = Any


class XY(NamedTuple):
    """One entry for each of the outer variable x and the inner variable y.

    Args:
        x: of the outer variable.
        y: of the inner variable; None where a problem has none.
    """

    x: Any
    y: Any


class XYV(NamedTuple):
    """One entry for each of the variables x, y and v, such as a step size for each of them.

    Args:
        x: of the outer variable.
        y: of the inner variable.
        v: of the auxiliary variable, which tracks the solution of ∇²yy G v = ∇y F.
    """

    x: Any
    y: Any
    v: Any


def move(point: PyTree, size: Any, direction: PyTree) -> PyTree:
    """point + size·direction, in the point's own dtypes."""
    return jax.tree.map(lambda p, d: p + (size * d).astype(p.dtype), point, direction)


@np.errstate(invalid="ignore", over="ignore")  # of entries that are infinite, or almost
def near(tree: PyTree, rng: np.random.Generator) -> PyTree:
    """Move floating arrays at random by a tenth of their root mean square, or by a tenth where they are 0: no two
    entries are equal then. The results are NumPy's arrays."""

    def moved(leaf: Any) -> np.ndarray:
        kind: Any = np.float64 if leaf.dtype == np.float64 else np.float32
        array = np.asarray(leaf, kind)
        size = 0.1 * (float(np.sqrt(np.mean(np.square(array)))) or 1.0)
        return np.asarray(array + size * rng.standard_normal(array.shape, kind)).astype(leaf.dtype)

    return jax.tree.map(moved, tree)


def scaled(size: Any, tree: PyTree) -> PyTree:
    """size·tree, in its own dtypes."""
    return jax.tree.map(lambda leaf: (size * leaf).astype(leaf.dtype), tree)


def over(numerator: Any, denominator: Any) -> Array:
    """numerator/denominator, or 0 where the denominator is 0; NaN stays NaN."""
    return jnp.where(denominator == 0, 0, numerator / jnp.where(denominator == 0, 1, denominator))


def rows_at(tree: PyTree, index: Array) -> PyTree:
    """Leaves (n, ...) at the places `index`, which are known to be in 0..n − 1: nothing is checked."""

    def taken(leaf: Any) -> Array:
        return jnp.asarray(leaf).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.tree.map(taken, tree)


def on_device(tree: PyTree) -> PyTree:
    """NumPy's arrays as JAX's, in JAX's precision. Nothing is compiled for that, as it is by jnp.asarray."""
    return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)), tree))


def nbytes(tree: PyTree) -> int:
    """Bytes that the leaves of `tree` (arrays or shape structs) take on the wire."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def nonfinite_leaves(tree: PyTree) -> list[str]:
    """Paths of the leaves of `tree` that hold a NaN or an infinity, e.g. ['.y.weight']."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    bad = (path for path, leaf in leaves if is_floating(leaf) and not np.all(np.isfinite(np.asarray(leaf))))
    return [jax.tree_util.keystr(path) or "value" for path in bad]


def is_floating(leaf: object) -> bool:
    """Whether `leaf` is an array (or number) of a real floating type, hence something to differentiate."""
    dtype = getattr(leaf, "dtype", None)
    return isinstance(leaf, float) if dtype is None else bool(jnp.issubdtype(dtype, jnp.floating))


def shapes(tree: PyTree) -> str:
    """Every leaf's path and shape, for messages, e.g. "['b'] (), ['w'] (4,)"; of many leaves, the first eight."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    said = [f"{jax.tree_util.keystr(path) or 'leaf'} {np.shape(leaf)}" for path, leaf in leaves[:8]]
    return ", ".join([*said, *(["…"] if len(leaves) > len(said) else [])]) or "no arrays"


def epsilon(*trees: PyTree) -> float:
    """ε of the coarsest floating type among all leaves, 0 where none is floating."""
    types = [jnp.result_type(getattr(leaf, "dtype", leaf)) for leaf in jax.tree.leaves(trees) if is_floating(leaf)]
    return max((float(jnp.finfo(dtype).eps) for dtype in types), default=0.0)


def split(tree: PyTree, varies: Callable[[Any], bool] = is_floating) -> tuple[PyTree, PyTree]:
    """Split a model into (floating arrays, or what `varies`; all else); each has None where the other has a leaf.

    An Equinox module, for one, carries activation functions among its leaves, and numbers of Python in its fields, such
    as a rate of dropout; only the arrays are variables. Every call that computes begins with this, and so it is refused
    here where JAX cannot compute.
    """
    refuse_forked_child()
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in leaves:
        if is_of("torch", leaf):
            what = f"{jax.tree_util.keystr(path)}, a {type(leaf).__name__}".removeprefix(", ")
            arrays = "fedbilevel.torch.from_torch(module, example) returns a module's parameters as such"
            raise ConfigurationError(f"{what} of PyTorch is no variable: x and y are arrays of JAX or NumPy; {arrays}")
    chosen = [varies(leaf) and not (type(leaf) is float and in_a_module(tree, path)) for path, leaf in leaves]
    pairs = list(zip((leaf for _, leaf in leaves), chosen, strict=True))
    variable = jax.tree.unflatten(structure, [jnp.asarray(leaf) if own else None for leaf, own in pairs])
    return variable, jax.tree.unflatten(structure, [None if own else leaf for leaf, own in pairs])


def in_a_module(tree: PyTree, path: tuple[Any, ...]) -> bool:
    """Whether the leaf at a path is a field of a module of Equinox, which takes numbers of Python for settings."""
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
    """Whether the class of `value`, or one of its bases, is a library's."""
    return any(base.__module__.partition(".")[0] == library for base in type(value).__mro__)


def join(variable: PyTree, fixed: PyTree) -> PyTree:
    """Undo `split`."""
    return jax.tree.map(lambda a, b: b if a is None else a, variable, fixed, is_leaf=lambda leaf: leaf is None)
