"""Check functions and samples of users: messages name the field, the client and the key.

An error in a user's function is reported with the line and with the shapes of the arguments.
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
"""The errors that a function may raise because it was written for other arguments."""
NOT_YET_A_NUMBER = (
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
)
NOT_OF_USERS = (str(Path(__file__).parents[1]), os.path.dirname(os.__file__), "site-packages", "dist-packages")
NOT_NUMBERS = {
    "S": "holds strings; encode them as integers, the same for all clients",
    "O": "holds Python objects; encode categories as integers, the same for all clients, and put the arrays of several "
    "clients in a list",
    "M": "holds dates; convert them to numbers, such as days since the first",
}
NOT_NUMBERS |= {"U": NOT_NUMBERS["S"], "T": NOT_NUMBERS["S"], "m": NOT_NUMBERS["M"]}
"""The problem and the remedy for arrays that do not hold numbers, by NumPy's letters for kinds of dtypes."""


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
        message = f"{field} takes {signature}; it must be {allowed}"
        raise ConfigurationError(path=field, got=str(signature), allowed=allowed, message=message) from None


def declares_key(function: object, arguments: str) -> bool:
    """Return whether a function declares exactly one positional argument after `arguments`, named `key`."""
    signature = _signature(function)
    parameters = signature.parameters.values() if signature else ()
    positional = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return [parameter.name for parameter in positional[len(arguments.split(", ")) :]] == ["key"]


def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function; None for other values, and for some functions written in C."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@contextmanager
def explained(what: str, **arguments: PyTree) -> Iterator[None]:
    """Turn an error in a user's function, called `what`, into one that names the line and the arguments' shapes."""
    try:
        yield
    except FedbilevelError:
        raise
    except NOT_YET_A_NUMBER as error:
        raise not_yet_a_number(what, error) from error
    except MISUSED as error:
        given = "; ".join(f"{name}: {shapes(tree)}" for name, tree in arguments.items())
        failure = f"{what} fails ({type(error).__name__}: {error}); it was given {given}"
        raise ConfigurationError(f"{users_line(error)}{failure}{_advice(error, arguments)}") from error


def _advice(error: Exception, arguments: dict[str, PyTree]) -> str:
    """Return a remedy for frequent causes of an error in a user's function; "" for other causes.

    These causes are a call of PyTorch, a dict, list or tuple that is used as an array, and a missing axis of clients.
    """
    message = str(error)
    if _calls_torch(error):
        how = "fedbilevel.torch.from_torch(module, example) turns a module into a function that can"
        return f"; PyTorch cannot compute with arrays of JAX: {how}; for single operations of PyTorch, use jax.numpy"
    for name, tree in [part for argument in reversed(arguments.items()) for part in _containers(*argument)]:
        kind = "dict" if isinstance(tree, dict) else type(tree).__name__
        if kind in ("dict", "list", "tuple") and tree and re.search(rf"\b({kind}|slice)\b|^\d+$", message):
            part = f"{name}[{next(iter(tree)) if kind == 'dict' else 0!r}]"
            array = "; np.asarray turns it into one array" if kind != "dict" else ""
            if name == "batch":
                array = "; to get one array, give a list of clients whose samples are arrays, such as frame.to_numpy()"
            return f"; {name} is a {kind} with parts such as {part}{array}"
    if isinstance(error, IndexError) and getattr(arguments.get("batch"), "ndim", None) == 1:
        axes = "the first two axes of an array in Clients are the client and the sample"
        return f"; each sample of the batch is a single number, since {axes}: for one client with rows, pass rows[None]"
    return ""


def _calls_torch(error: Exception) -> bool:
    """Return whether PyTorch was called with an array of JAX, or such an array was used as a tensor."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    folder = f"{os.path.dirname(str(torch.__file__))}{os.sep}"
    if any(frame.filename.startswith(folder) for frame in traceback.extract_tb(error.__traceback__)):
        return True
    if isinstance(error, AttributeError):
        return isinstance(error.obj, jax.Array) and hasattr(torch.Tensor, error.name or "")
    return re.search(r"Tensor|'Parameter'|expected np\.ndarray", str(error)) is not None


def _containers(name: str, tree: PyTree) -> Iterator[tuple[str, PyTree]]:
    """Yield an argument, and the lists and tuples inside it, with their names."""
    yield name, tree
    within = lambda node: node is not tree and isinstance(node, list | tuple)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=within):
        if within(node):
            yield f"{name}{jax.tree_util.keystr(path)}", node


def not_yet_a_number(what: str, error: Exception) -> ConfigurationError:
    """Return the error for a traced value that is used as a Python number, with what to write instead."""
    return ConfigurationError(
        f"{users_line(error)}{what} is traced by JAX, and uses a traced value, which is not known yet, as a number of "
        "Python: write jnp for np (import jax.numpy as jnp), jax.lax.fori_loop(0, n, …) for range(n), jnp.where or "
        f"jax.lax.cond for `if`, and leave out int(…) and float(…). JAX says: {str(error).splitlines()[0]}"
    )


def users_line(error: Exception) -> str:
    """Return the line of the user's code in which an error arose, to begin a message; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not any(place in frame.filename for place in NOT_OF_USERS)]
    return f"{users[-1].filename}:{users[-1].lineno}, `{users[-1].line}`: " if users else ""


def require_start(name: str, given: PyTree, variable: PyTree) -> None:
    """Check a starting point, and warn of Python integers in it.

    Args:
        name: "x0" or "y0", for messages.
        given: the starting point in the form in which the user gave it.
        variable: the floating arrays of `given`, which the run optimises.

    Raises:
        ConfigurationError: `given` has running statistics, tracers, no floating array, or numbers that are not finite.
    """
    require_no_statistics(name, given)
    require_not_traced(name, given)
    some = "a pytree with at least one array of floats (write 0.0 in place of 0, or use .astype(float))"
    if given is None:
        message = f"{name} is missing: a {name[0]} at which the run starts, such as np.zeros(3)"
        raise ConfigurationError(path=name, got=None, allowed=some, message=message)
    require(bool(jax.tree.leaves(variable)), name, given, some)
    if bad := nonfinite_leaves(variable):
        where = "" if bad == ["value"] else f" in {', '.join(bad)}"
        message = f"{name} holds NaN or infinity{where}; it must be finite in every leaf"
        raise ConfigurationError(path=name, got=bad, allowed="finite in every leaf", message=message)
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        if type(leaf) is int and not in_a_module(given, path):
            text = (
                f"{name}{jax.tree_util.keystr(path)} = {leaf} is a whole number and stays constant: write {leaf}.0 to "
                "optimise it"
            )
            warn(InfluenceWarning(text))


def require_not_traced(name: str, given: PyTree) -> None:
    """Refuse a traced value: a run cannot be inside `jax.vmap`, `jax.jit` or `jax.grad`."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given)):
        allowed = "outside of jax.vmap, jax.jit and jax.grad"
        message = f"{name} is traced by JAX: a run must be {allowed}; run several in a loop"
        raise ConfigurationError(path=name, got="traced by JAX", allowed=allowed, message=message)


def arrays_of(field: str, data: PyTree, whose: str = "") -> PyTree:
    """Return samples as a pytree of arrays of numbers; a table or dataset becomes a dict of its columns.

    Raises:
        ConfigurationError: `data` has lists of plain numbers, strings, dates, objects or PRNG keys. The message begins
            with `field`, the key, and `whose`, such as " of client 3".
    """
    data, encode = tree_of(field, data, whose)
    leaves = jax.tree_util.tree_leaves_with_path(data, is_leaf=_is_plain)
    arrays = [_array(f"{field}{jax.tree_util.keystr(path)}{whose}", leaf, path, encode) for path, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(data, is_leaf=_is_plain), arrays)


def _is_plain(node: Any) -> bool:
    """Return whether a value is a list or tuple, at any depth, of plain numbers and strings."""
    plain = int | float | complex | str | bytes | np.generic
    return isinstance(node, list | tuple) and len(node) > 0 and all(isinstance(a, plain) or _is_plain(a) for a in node)


def _array(name: str, leaf: Any, path: Any, encode: str) -> Any:
    if _is_plain(leaf):
        try:
            np.asarray(leaf)
            how = "convert it to an array by np.asarray(…)"
        except ValueError:
            how = "its parts have different lengths: pad them to one length, and mark the padding under another key"
        raise ConfigurationError(f"it is a {type(leaf).__name__} of plain values; {how}", where=name)
    if hasattr(leaf, "toarray"):
        text = f"it is a sparse {type(leaf).__name__}; convert it to an array by .toarray()"
        raise ConfigurationError(text, where=name)
    if isinstance(leaf, np.ma.MaskedArray):
        text = "it is a masked array; fill its gaps by .filled(…), and mark them under another key"
        raise ConfigurationError(text, where=name)
    if kind_of(leaf):
        kind = type(leaf).__name__
        text = f"it is a {kind}; a table or dataset must be all samples of a client, not a part of them"
        raise ConfigurationError(text, where=name)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        text = "it holds PRNG keys; store their jax.random.key_data, and call jax.random.wrap_key_data in the loss"
        raise ConfigurationError(text, where=name)
    try:
        array = leaf if isinstance(leaf, np.ndarray | jax.Array) else as_numpy(leaf)
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"it is a {type(leaf).__name__}, which NumPy cannot convert to an array of numbers ({error})"
        raise ConfigurationError(text, where=name) from error
    words = array.dtype.kind == "O" and array.size and isinstance(np.ravel(array)[0], str)
    kind = "U" if words else array.dtype.kind
    if advice := NOT_NUMBERS.get(kind):
        how = f": {encode.format(path[-1].key)}" if kind in "UST" and encode else ""
        raise ConfigurationError(f"it {advice}{how}", where=name)
    return array


def require_no_statistics(field: str, tree: PyTree) -> None:
    """Refuse running statistics of Flax (Linen and NNX) or Equinox among variables, since no method updates them."""

    def is_one(node: Any) -> bool:
        kind = type(node)
        return (kind.__module__.partition(".")[0], kind.__name__) in {("flax", "BatchStat"), ("equinox", "State")}

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_one)
    places = [jax.tree_util.keystr(path) for path, leaf in leaves if is_one(leaf)]
    places += [place for path, _ in leaves if "['batch_stats']" in (place := jax.tree_util.keystr(path))]
    if places:
        raise ConfigurationError(
            f"{field}{places[0]} is a running statistic, which no method updates: normalise by GroupNorm or LayerNorm, "
            "or close the loss over constant statistics"
        )


def require_alike(field: str, entries: Sequence[PyTree]) -> None:
    """Refuse clients whose samples differ from those of most clients in keys, structure or shapes.

    The message names the first such client.
    """
    keys = [frozenset(_shapes_by_key(entry)) for entry in entries]
    if odd := _odd_one(keys):
        one, other = odd
        more, less = ", ".join(sorted(keys[one] - keys[other])), ", ".join(sorted(keys[other] - keys[one]))
        differences = [f"has {more}, which client {other} lacks"] * bool(more)
        differences += [f"lacks {less}, which client {other} has"] * bool(less)
        raise ConfigurationError(f"client {one} {', and '.join(differences)}", where=field)
    structures = [jax.tree.structure(entry) for entry in entries]
    if odd := _odd_one(structures):
        one, other = odd
        text = f"client {one} is a {structures[one]}, client {other} a {structures[other]}"
        raise ConfigurationError(text, where=field)
    for key in sorted(keys[0]):
        trailing = [_shapes_by_key(entry)[key][1:] for entry in entries]
        if odd := _odd_one(trailing):
            one, other = odd
            text = f"of shape {trailing[one]} in client {one}, {trailing[other]} in client {other}"
            raise ConfigurationError(f"a sample's {key} is {text}", where=field)


def _shapes_by_key(entry: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(entry)
    return {jax.tree_util.keystr(path) or "array": np.shape(leaf) for path, leaf in leaves}


def _odd_one(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """Return the first index with an unusual value and the first with the most frequent value; None if all agree."""
    (usual, count), *_ = Counter(values).most_common(1)
    if count == len(values):
        return None
    return next(i for i, value in enumerate(values) if value != usual), values.index(usual)
