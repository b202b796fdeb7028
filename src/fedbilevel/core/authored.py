"""Check the values that `init`, `round` and phases of a method return while JAX traces these functions.

Errors name the class and the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax import Array

from fedbilevel.core.client import Client
from fedbilevel.core.errors import ConfigurationError, UnsupportedError
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.inputs import NOT_YET_A_NUMBER, not_yet_a_number
from fedbilevel.core.tree import PyTree, dtype_of, shapes

SEVERAL = ". If the update has several parts, pass them as one tuple: Reply((dx, dy))"


class Server(Protocol):
    """Describe what every `Algorithm` defines for the server: a label, `init` and `round`."""

    @property
    def label(self) -> str: ...

    def init(self, x: PyTree, y: PyTree) -> Any: ...

    def round(self, fed: Fed, state: Any, key: Array) -> Any: ...


def check_arguments(
    function: Callable[..., Any], kind: str = "a phase", names: Collection[str] = ("self", "client", "message", "key")
) -> None:
    """Refuse a function that cannot be called with these arguments; `kind` says what it is, for the message."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError:
        name, takes = function.__qualname__.rpartition("<locals>.")[2], inspect.signature(function)
        raise ConfigurationError(f"{kind} takes ({', '.join(names)}), got {takes}", where=name) from None


def checked_init(algorithm: Server, x: PyTree, y: PyTree) -> Any:
    """Return the server's state before round 0 from the algorithm's `init`, after a check.

    Raises:
        ConfigurationError: the state has no x or no y, or they differ from `x` and `y` in structure, shapes or types.
            If `y` is None, the y of the state may be anything, such as an average of x.
    """
    where = f"{algorithm.label}.init"
    with explained(where):
        state = algorithm.init(x, y)
    if not (hasattr(state, "x") and hasattr(state, "y")):
        needs = "it must return a state with the attributes x and y, such as a NamedTuple State(x, y)"
        raise ConfigurationError(f"it returned {described(state)}: {needs}", where=where)
    for name, start in {"x": x, "y": y}.items():
        wrong = "" if start is None else difference(getattr(state, name), start)
        if wrong:
            raise ConfigurationError(f"the state's {name} must be like {name}0: {wrong}", where=where)
    return state


def checked_round(algorithm: Server, fed: Fed, state: Any, key: Array) -> Any:
    """Return the server's state after a round from the algorithm's `round`, after a check.

    Raises:
        ConfigurationError: the state has another type, or other leaves, shapes or dtypes than before the round.
    """
    where = f"{algorithm.label}.round"
    with explained(where):
        new = algorithm.round(fed, state, key)
    if wrong := difference(new, state):
        text = f"it must return a state with the shapes and dtypes that init returned: {wrong}"
        raise ConfigurationError(text, where=where)
    return new


def with_x(algorithm: Server, state: Any, x: PyTree, cause: str = "with a project_x") -> Any:
    """Return the server's state with another x; `cause` says in messages why x is replaced.

    Raises:
        UnsupportedError: the x of the state is a computed property and not among the state's leaves.
    """
    new = {id(old): leaf for old, leaf in zip(jax.tree.leaves(state.x), jax.tree.leaves(x), strict=True)}
    changed = jax.tree.map(lambda leaf: new.get(id(leaf), leaf), state)
    if any(a is not b for a, b in zip(jax.tree.leaves(changed.x), jax.tree.leaves(x), strict=True)):
        raise UnsupportedError(f"{cause} the state's x must be among its leaves", where=algorithm.label)
    return changed


def reply_of(where: str, phase: Phase, client: Client, message: PyTree, key: Array) -> Reply:
    """Run a phase and return its reply after a check; `where` names the phase in messages.

    Raises:
        ConfigurationError: the result is not a Reply, or a part of it does not have the form that engines need.
    """
    with explained(where):
        reply = phase(client, message, key)
    if not isinstance(reply, Reply):
        text = f"it returned {described(reply)}: it must return a Reply(update){SEVERAL}"
        raise ConfigurationError(text, where=where)
    check_numbers(where, reply)
    check_state(where, reply.state, client.state)
    return reply


def check_numbers(where: str, reply: Reply, known: Collection[str] = ()) -> None:
    """Refuse metrics and counts of a reply that are not single numbers; metrics in `known` may be arrays."""
    if not isinstance(reply.metrics, Mapping | None):
        got = described(reply.metrics)
        raise ConfigurationError(f"Reply.metrics is {got}: it must be a dict of numbers by name{SEVERAL}", where=where)
    for name, value in (reply.metrics or {}).items():
        if not isinstance(name, str) or (np.shape(value) != () and name not in known):
            raise ConfigurationError(f"the metric {name!r} is {described(value)}: it must be one number", where=where)
    for name in ("gradients", "hvps"):
        if np.shape(count := getattr(reply, name)) != ():
            raise ConfigurationError(f"Reply.{name} is {described(count)}: it must be one number, a count", where=where)


def check_state(where: str, new: PyTree, kept: PyTree) -> None:
    """Refuse a client's new state that differs from its present state, `kept`, in structure, shapes or dtypes."""
    if new is None:
        return
    if kept is None:
        nothing = "a client that has none: init_client makes the state, and clients of a fresh cohort have no state"
        raise ConfigurationError(f"Reply.state is {described(new)}, from {nothing}{SEVERAL}", where=where)
    if wrong := difference(new, kept):
        raise ConfigurationError(f"Reply.state must be like client.state, as init_client made it: {wrong}", where=where)


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Turn JAX's error for a traced value that is used as a Python number into an error that says what to write.

    `where` names the function of a method or a layer, such as "SimFBO.round".
    """
    try:
        yield
    except NOT_YET_A_NUMBER as error:
        traced = not_yet_a_number(where, error)
        traced.append("a field whose value Python needs, such as a size, is made by static(…)")
        raise traced from error


def difference(got: PyTree, like: PyTree, dtypes: bool = True) -> str:
    """Return the first difference of two trees in structure, shapes or, with `dtypes`, dtypes; "" if there is none."""
    form: Callable[[PyTree], Any] = jax.tree.structure
    if form(got) != form(like):
        return f"got {described(got)}, not {described(like)}"
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(like), strict=True):
        if np.shape(one) != np.shape(other) or (dtypes and dtype_of(one) != dtype_of(other)):
            return f"{jax.tree_util.keystr(path) or 'it'} is {described(one)}, not {described(other)}"
    return ""


def not_an_array(tree: PyTree) -> str:
    """Describe the first leaf that is neither an array that JAX supports nor a number; "" if there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            jax.eval_shape(lambda array: array, leaf)
        except TypeError:
            return f"{jax.tree_util.keystr(path) or 'it'} is {described(leaf)}"
    return ""


def described(value: Any) -> str:
    """Describe a value in a few words for messages: its type, and the shapes of its arrays."""
    if value is None:
        return "None"
    if jax.tree_util.all_leaves([value]):
        array = hasattr(value, "shape") and hasattr(value, "dtype")
        return f"{value.dtype}{list(value.shape)}" if array else f"{type(value).__name__} {str(value)[:80]!r}"
    return f"{type(value).__name__} of {shapes(value)}"
