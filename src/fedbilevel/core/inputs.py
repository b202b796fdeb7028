"""What users hand over, functions and samples: refused where they are not what is needed, by field, client and key; a
function that fails is explained by what it was given.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import ConfigurationError, FedbilevelError, InfluenceWarning, require, warn
from fedbilevel.core.foreign import as_numpy, kind_of, tree_of
from fedbilevel.core.tree import PyTree, in_a_module, nonfinite_leaves, shapes

MISUSED = (TypeError, ValueError, LookupError, AttributeError)
"""What a function may raise because its arguments are not those that it was written for."""
NOT_YET_A_NUMBER = (
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)
NOT_OF_USERS = (str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "site-packages", "dist-packages")
NOT_NUMBERS = {
    "S": "holds strings; encode them as integers, the same for all clients",
    "O": "holds Python objects; make numbers of categories (integers, the same for all clients), and a list of the "
    "arrays of several clients",
    "M": "holds dates; make numbers of them, such as days since one of them",
}
NOT_NUMBERS |= {"U": NOT_NUMBERS["S"], "T": NOT_NUMBERS["S"], "m": NOT_NUMBERS["M"]}
"""What to do about arrays of these kinds of dtypes, by NumPy's letters."""


def require_function(field: str, got: object, arguments: str, otherwise: str = "") -> None:
    """Raise ConfigurationError unless `got` can be called with these positional arguments, e.g. "x, y, batch"."""
    allowed = f"a function ({arguments}){otherwise}"
    require(callable(got), field, got, allowed)
    assert callable(got)
    if (signature := _signature(got)) is None:
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        raise ConfigurationError(f"{field} takes {signature}; it must be {allowed}") from None


def declares_key(function: object, arguments: str) -> bool:
    """Whether a function declares one positional argument after these, of the name `key`."""
    signature = _signature(function)
    found = signature.parameters.values() if signature else ()
    after = [one for one in found if one.kind is one.POSITIONAL_OR_KEYWORD][len(arguments.split(", ")) :]
    return [one.name for one in after] == ["key"]


def _signature(function: Any) -> inspect.Signature | None:
    """What a function takes; None of what is no function, and of some that are written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@contextmanager
def explained(what: str, **arguments: PyTree) -> Iterator[None]:
    """Say of a user's function that fails in which line, and what it was given: the shapes of `arguments`, by name."""
    try:
        yield
    except FedbilevelError:
        raise
    except NOT_YET_A_NUMBER as error:
        raise not_yet_a_number(what, error) from error
    except MISUSED as error:
        given = "; ".join(f"{name}: {shapes(tree)}" for name, tree in arguments.items())
        said = f"{what} fails ({type(error).__name__}: {error}); it was given {given}"
        raise ConfigurationError(f"{users_line(error)}{said}{_advice(error, arguments)}") from error


def _advice(error: Exception, arguments: dict[str, PyTree]) -> str:
    """Say what to write where PyTorch was called, or where a dict, list or tuple was taken for an array."""
    said = str(error)
    if _calls_torch(error):
        how = "fedbilevel.torch.from_torch(module, example) turns a module into a function that can"
        return f"; PyTorch cannot compute with arrays of JAX: {how}, and jax.numpy has its other operations"
    for name, tree in [part for one in reversed(arguments.items()) for part in _containers(*one)]:
        kind = "dict" if isinstance(tree, dict) else type(tree).__name__
        if kind in ("dict", "list", "tuple") and tree and re.search(rf"\b({kind}|slice)\b|^\d+$", said):
            part = f"{name}[{next(iter(tree)) if kind == 'dict' else 0!r}]"
            array = "; np.asarray makes one array of it" if kind != "dict" else ""
            if name == "batch":
                array = "; clients come in a list, and samples that are an array, as frame.to_numpy(), stay one"
            return f"; {name} is a {kind} with parts such as {part}{array}"
    return ""


def _calls_torch(error: Exception) -> bool:
    """Tell whether PyTorch was given an array of JAX, or such an array asked for what only a tensor has."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    folder = f"{os.path.dirname(str(torch.__file__))}{os.sep}"
    if any(frame.filename.startswith(folder) for frame in traceback.extract_tb(error.__traceback__)):
        return True
    if isinstance(error, AttributeError):
        return isinstance(error.obj, jax.Array) and hasattr(torch.Tensor, error.name or "")
    return re.search(r"Tensor|'Parameter'|expected np\.ndarray", str(error)) is not None


def _containers(name: str, tree: PyTree) -> Iterator[tuple[str, PyTree]]:
    """An argument, and the lists and tuples within it, by name."""
    yield name, tree
    within = lambda node: node is not tree and isinstance(node, list | tuple)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=within):
        if within(node):
            yield f"{name}{jax.tree_util.keystr(path)}", node


def not_yet_a_number(what: str, error: Exception) -> ConfigurationError:
    """The error that says what to write where traced values were taken for numbers of Python."""
    return ConfigurationError(
        f"{users_line(error)}{what} is traced by JAX, and took a value that is not known before it runs for a number "
        "of Python: in place of np write jnp (import jax.numpy as jnp), of range(n) jax.lax.fori_loop(0, n, …), of "
        f"`if` jnp.where or jax.lax.cond, and leave out int(…) and float(…). JAX says: {str(error).splitlines()[0]}"
    )


def users_line(error: Exception) -> str:
    """The line of the user's own where an error arose, to begin a message; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not any(place in one.filename for place in NOT_OF_USERS)]
    return f"{own[-1].filename}:{own[-1].lineno}, `{own[-1].line}`: " if own else ""


def require_start(name: str, given: PyTree, variable: PyTree) -> None:
    """Refuse a starting point with running statistics, or whose floating arrays, `variable`, are none or not finite;
    warn of whole numbers."""
    require_no_statistics(name, given)
    require_not_traced(name, given)
    some = "a pytree with at least one floating array: 0.0 in place of 0, or .astype(float)"
    require(bool(jax.tree.leaves(variable)), name, given, some)
    if bad := nonfinite_leaves(variable):
        where = "" if bad == ["value"] else f" in {', '.join(bad)}"
        raise ConfigurationError(f"{name} holds NaN or infinity{where}; it must be finite in every leaf")
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        if type(leaf) is int and not in_a_module(given, path):
            text = (
                f"{name}{jax.tree_util.keystr(path)} = {leaf} is a whole number, which stays: write {leaf}.0 to vary it"
            )
            warn(InfluenceWarning(text))


def require_not_traced(name: str, given: PyTree) -> None:
    """Refuse a value that JAX traces, as within `jax.vmap`, where a run cannot be."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given)):
        raise ConfigurationError(
            f"{name} is traced by JAX: a run cannot be within jax.vmap, jax.jit or jax.grad. Make several in a loop"
        )


def arrays_of(field: str, data: PyTree, whose: str = "") -> PyTree:
    """The pytree `data` with arrays of numbers as leaves; of a table or dataset (`foreign.py`), that of its columns.

    Raises:
        ConfigurationError: plain lists of numbers, strings, dates, objects, PRNG keys; the message begins with `field`,
            the key and `whose` (" of client 3").
    """
    data, encode = tree_of(field, data, whose)
    found = jax.tree_util.tree_leaves_with_path(data, is_leaf=_is_plain)
    arrays = [_array(f"{field}{jax.tree_util.keystr(path)}{whose}", leaf, path, encode) for path, leaf in found]
    return jax.tree.unflatten(jax.tree.structure(data, is_leaf=_is_plain), arrays)


def _is_plain(node: Any) -> bool:
    """Whether this is a list or tuple, at any depth, of numbers and strings that are no arrays."""
    plain = int | float | complex | str | bytes | np.generic
    return isinstance(node, list | tuple) and len(node) > 0 and all(isinstance(a, plain) or _is_plain(a) for a in node)


def _array(name: str, leaf: Any, path: Any, encode: str) -> Any:
    if _is_plain(leaf):
        try:
            np.asarray(leaf)
            how = "make an array of it, np.asarray(…)"
        except ValueError:
            how = "its parts are of unequal lengths: pad them to one, and mark the padding by a key of its own"
        raise ConfigurationError(f"{name} is a {type(leaf).__name__} of plain values; {how}")
    if hasattr(leaf, "toarray"):
        raise ConfigurationError(f"{name} is a sparse {type(leaf).__name__}; make an array of it, .toarray()")
    if isinstance(leaf, np.ma.MaskedArray):
        raise ConfigurationError(f"{name} is a masked array; fill its gaps, .filled(…), and mark them by another key")
    if kind_of(leaf):
        raise ConfigurationError(
            f"{name} is a {type(leaf).__name__}; such a thing is all that a client holds, not a part"
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ConfigurationError(f"{name} holds PRNG keys; store jax.random.key_data of them, and wrap it in the loss")
    try:
        array = leaf if isinstance(leaf, np.ndarray | jax.Array) else as_numpy(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"{name} is a {type(leaf).__name__}, of which NumPy makes no array of numbers"
        raise ConfigurationError(f"{text} ({error})") from error
    words = array.dtype.kind == "O" and array.size and isinstance(np.ravel(array)[0], str)
    kind = "U" if words else array.dtype.kind
    if advice := NOT_NUMBERS.get(kind):
        how = f": {encode.format(path[-1].key)}" if kind in "UST" and encode else ""
        raise ConfigurationError(f"{name} {advice}{how}")
    return array


def require_no_statistics(field: str, tree: PyTree) -> None:
    """Refuse running statistics of Flax (Linen and NNX) or Equinox among variables: no method has a step for them."""

    def is_one(node: Any) -> bool:
        kind = type(node)
        return (kind.__module__.partition(".")[0], kind.__name__) in {("flax", "BatchStat"), ("equinox", "State")}

    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one)
    places = [jax.tree_util.keystr(path) for path, leaf in found if is_one(leaf)]
    places += [place for path, _ in found if "['batch_stats']" in (place := jax.tree_util.keystr(path))]
    if places:
        raise ConfigurationError(
            f"{field}{places[0]} is a running statistic, for which no method has a step: normalise by GroupNorm or "
            "LayerNorm, or close the loss over statistics that stay as they are"
        )


def require_alike(field: str, entries: Sequence[PyTree]) -> None:
    """Refuse clients whose samples are not built, or not shaped, as most clients' are; the first such is named."""
    keys = [frozenset(_shapes_by_key(entry)) for entry in entries]
    if odd := _odd_one(keys):
        one, other = odd
        more, less = ", ".join(sorted(keys[one] - keys[other])), ", ".join(sorted(keys[other] - keys[one]))
        said = [f"has {more}, which client {other} has not"] * bool(more)
        said += [f"lacks {less}, which client {other} has"] * bool(less)
        raise ConfigurationError(f"{field}: client {one} {'; '.join(said)}")
    structures = [jax.tree.structure(entry) for entry in entries]
    if odd := _odd_one(structures):
        one, other = odd
        raise ConfigurationError(f"{field}: client {one} is a {structures[one]}, client {other} a {structures[other]}")
    for key in sorted(keys[0]):
        trailing = [_shapes_by_key(entry)[key][1:] for entry in entries]
        if odd := _odd_one(trailing):
            one, other = odd
            text = f"of shape {trailing[one]} in client {one}, {trailing[other]} in client {other}"
            raise ConfigurationError(f"{field}: a sample's {key} is {text}")


def _shapes_by_key(entry: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(entry)
    return {jax.tree_util.keystr(path) or "array": np.shape(leaf) for path, leaf in leaves}


def _odd_one(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first place whose value is not the most frequent one, and the first whose value is; None where all agree."""
    (usual, count), *_ = Counter(values).most_common(1)
    if count == len(values):
        return None
    return next(i for i, value in enumerate(values) if value != usual), values.index(usual)
