"""What the author of a method returns from its hooks, checked where it is traced: the error names class and hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Client
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.inputs import NOT_YET_A_NUMBER, not_yet_a_number
from fedbilevel.core.tree import PyTree, shapes

SEVERAL = "; an update of several parts is one tuple, Reply((dx, dy))"


class Server(Protocol):
    """What an `Algorithm` does on the server: its hooks that have to be defined."""

    @property
    def label(self) -> str: ...

    def init(self, x: PyTree, y: PyTree) -> Any: ...

    def round(self, fed: Fed, state: Any, key: Array) -> Any: ...


def check_arguments(function: Callable[..., Any]) -> None:
    """Refuse a phase that does not take (self, client, message, key)."""
    try:
        inspect.signature(function).bind("self", "client", "message", "key")
    except TypeError:
        name, takes = function.__qualname__.rpartition("<locals>.")[2], inspect.signature(function)
        raise ConfigurationError(f"{name}: a phase takes (self, client, message, key), got {takes}") from None


def checked_init(algorithm: Server, x: PyTree, y: PyTree) -> Any:
    """Make the server's state before round 0 by the algorithm's `init`, and check it.

    Raises:
        ConfigurationError: it has no x or y, or they are not like `x` and `y`. Where `y` is None, so may be the
            state's, which may also be a result of its own, such as an average.
    """
    where = f"{algorithm.label}.init"
    with explained(where):
        state = algorithm.init(x, y)
    if not (hasattr(state, "x") and hasattr(state, "y")):
        needs = "a state has the attributes x and y, such as a NamedTuple State(x, y)"
        raise ConfigurationError(f"{where} returned {described(state)}: {needs}")
    for name, start in {"x": x, "y": y}.items():
        wrong = "" if start is None else difference(getattr(state, name), start)
        if wrong:
            raise ConfigurationError(f"{where}: the state's {name} must be like {name}0: {wrong}")
    return state


def checked_round(algorithm: Server, fed: Fed, state: Any, key: Array) -> Any:
    """Make the server's state after a round by the algorithm's `round`, and check it.

    Raises:
        ConfigurationError: it is not like the state before: another type, other leaves, shapes or dtypes.
    """
    where = f"{algorithm.label}.round"
    with explained(where):
        new = algorithm.round(fed, state, key)
    if wrong := difference(new, state):
        raise ConfigurationError(f"{where} must return a state like that which it got, as init made it: {wrong}")
    return new


def with_x(algorithm: Server, state: Any, x: PyTree, cause: str = "with a project_x") -> Any:
    """Return the server's state with this x in place of its own; `cause` says in messages why.

    Raises:
        ConfigurationError: the x of the state is computed, and none of its leaves.
    """
    new = {id(old): leaf for old, leaf in zip(jax.tree.leaves(state.x), jax.tree.leaves(x), strict=True)}
    changed = jax.tree.map(lambda leaf: new.get(id(leaf), leaf), state)
    if any(a is not b for a, b in zip(jax.tree.leaves(changed.x), jax.tree.leaves(x), strict=True)):
        raise ConfigurationError(f"{algorithm.label}: {cause} the state's x must be among its leaves")
    return changed


def reply_of(where: str, phase: Phase, client: Client, message: PyTree, key: Array) -> Reply:
    """Run a phase and check its reply; `where` names it in messages.

    Raises:
        ConfigurationError: it is no Reply, or a part of it has another form than the engines need.
    """
    with explained(where):
        reply = phase(client, message, key)
    if not isinstance(reply, Reply):
        raise ConfigurationError(f"{where} returned {described(reply)}: a phase returns a Reply(update){SEVERAL}")
    check_numbers(where, reply)
    check_state(where, reply.state, client.state)
    return reply


def check_numbers(where: str, reply: Reply, known: Collection[str] = ()) -> None:
    """Refuse metrics and counts of a reply that are no single numbers, but for the metrics that are `known`."""
    if not isinstance(reply.metrics, Mapping | None):
        got = described(reply.metrics)
        raise ConfigurationError(f"{where}: Reply.metrics is {got}: it must be a dict of numbers by name{SEVERAL}")
    for name, value in (reply.metrics or {}).items():
        if not isinstance(name, str) or (np.shape(value) != () and name not in known):
            raise ConfigurationError(f"{where}: the metric {name!r} is {described(value)}: a metric is one number")
    for name in ("gradients", "hvps"):
        if np.shape(count := getattr(reply, name)) != ():
            raise ConfigurationError(f"{where}: Reply.{name} is {described(count)}: it must be one number, a count")


def check_state(where: str, new: PyTree, kept: PyTree) -> None:
    """Refuse a client's new state that is not like what it keeps."""
    if new is None:
        return
    if kept is None:
        nothing = "a client that keeps none: init_client says what clients keep, and a fresh cohort is asked without it"
        raise ConfigurationError(f"{where}: Reply.state is {described(new)}, from {nothing}{SEVERAL}")
    if wrong := difference(new, kept):
        raise ConfigurationError(f"{where}: Reply.state must be like client.state, as init_client made it: {wrong}")


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Say in a sentence what to write where traced values were taken for numbers of Python."""
    try:
        yield
    except NOT_YET_A_NUMBER as error:
        raise not_yet_a_number(where, error) from error


def difference(got: PyTree, like: PyTree, dtypes: bool = True) -> str:
    """Say how a tree is not like another, in structure, shapes or, unless they may differ, dtypes; "" if it is."""
    form: Callable[[PyTree], Any] = jax.tree.structure
    if form(got) != form(like):
        return f"got {described(got)}, not {described(like)}"
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(like), strict=True):
        if np.shape(one) != np.shape(other) or (dtypes and jnp.result_type(one) != jnp.result_type(other)):
            return f"{jax.tree_util.keystr(path) or 'it'} is {described(one)}, not {described(other)}"
    return ""


def described(value: Any) -> str:
    """Describe a value in a few words for messages: its type, and the shapes in it."""
    if value is None:
        return "None"
    if jax.tree_util.all_leaves([value]):
        array = hasattr(value, "shape") and hasattr(value, "dtype")
        return f"{value.dtype}{list(value.shape)}" if array else f"{type(value).__name__} {str(value)[:80]!r}"
    return f"{type(value).__name__} of {shapes(value)}"
