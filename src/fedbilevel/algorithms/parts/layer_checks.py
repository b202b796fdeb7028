"""What the functions of a layer return, checked where it is traced: the error names layer and function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import check_numbers, described, difference
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import Coded, Reply, Total, decoded
from fedbilevel.core.tree import PyTree

RETURNS: dict[str, tuple[type, str]] = {
    "before_round": (Algorithm, "a method"),
    "exchange": (Total, "a Total"),
    "reply": (Reply, "a Reply"),
    "after_round": (object, "the method's state"),
}


def checked(
    layer: Any, function: str, returned: Any, slots: Mapping[str, Any], inside: Any = None, undone: bool = False
) -> tuple[Any, Any]:
    """Return what a function of a layer returned, and what it keeps. Nothing of it is compiled.

    `inside` is what the layer got from inside: the Reply or the Total, or the state; None where it did not ask.
    `undone`: whether the layer has a function on the other side too, which undoes what this one does to updates.

    Raises:
        ConfigurationError: it is no pair of these, it keeps something else than what it began with, or an update, a
            state or a metric has other shapes than it may have.
    """
    where, (kind, name) = f"{layer.label}.{function}", RETURNS[function]
    if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[0], kind):
        got = described(returned)
        raise ConfigurationError(f"{where} returned {got}: it returns {name} and what the layer keeps")
    what, kept = returned
    make = "client_slot" if function == "reply" else "server_slot"
    if layer.kind not in slots and kept is not None:
        nothing = f"{make} says that nothing is kept"
        nothing += ", or this is a fresh cohort, where `kept` is None and so is what is kept" * (function == "reply")
        raise ConfigurationError(f"{where} keeps {described(kept)}, but {nothing}")
    if layer.kind in slots and (wrong := difference(kept, slots[layer.kind])):
        raise ConfigurationError(f"{where}: what the layer keeps must be like `kept`, as {make} made it: {wrong}")
    if function == "after_round" and (wrong := difference(what, inside)):
        raise ConfigurationError(f"{where} must return a state like `after`: {wrong}")
    if isinstance(what, Reply):
        _check_reply(layer, where, what, inside, undone)
    if isinstance(what, Total):
        _check_total(where, what, inside, undone)
    return returned


def _check_reply(layer: Any, where: str, reply: Reply, inside: Reply | None, undone: bool) -> None:
    """Refuse a layer's reply whose update, state, metrics or counts have other shapes than they may have."""
    own, got = reply.metrics, (inside.metrics if inside else None) or {}
    known = got.keys() if isinstance(own, Mapping) else ()
    check_numbers(where, reply, own or () if layer._vectors else [k for k in known if (own or {}).get(k) is got[k]])
    update = plain_update(where, reply.update)
    if inside is None:
        return
    if wrong := difference(reply.state, inside.state):
        raise ConfigurationError(f"{where}: Reply.state must be like that of `run`; use reply._replace(…): {wrong}")
    if undone:
        return
    like = plain_update(where, inside.update)
    if layer.place == "kept":
        like = _without(update, like)
    same_shapes(f"{where}: Reply.update must have the shapes of that of `run`", update, like)


def _check_total(where: str, total: Total, inside: Total | None, undone: bool) -> None:
    """Refuse a layer's total whose update or numbers have other shapes than they may have."""
    for name in ("weight", "responders", "population"):
        if np.shape(number := getattr(total, name)) != ():
            raise ConfigurationError(f"{where}: Total.{name} is {described(number)}: it must be one number")
    if inside is not None and not undone:
        same_shapes(f"{where}: Total.update must have the shapes of that of `ask`", total.update, inside.update)


def same_shapes(must: str, update: PyTree, like: PyTree) -> None:
    if wrong := difference(update, like, dtypes=False):
        raise ConfigurationError(f"{must}: {wrong}")


def _without(update: PyTree, like: PyTree) -> PyTree:
    """Take the parts from `like` that are None in the update."""
    try:
        return jax.tree.map(lambda u, part: None if u is None else part, update, like, is_leaf=lambda u: u is None)
    except ValueError:
        return like


def plain_update(where: str, update: PyTree) -> PyTree:
    """Return the shapes of an update once its coded parts are decoded.

    Raises:
        ConfigurationError: what should decode them is no function.
    """
    for part in jax.tree.leaves(update, is_leaf=lambda part: isinstance(part, Coded)):
        if isinstance(part, Coded) and not callable(part.decode):
            takes = "it must be a function of the wire, of a module, or a frozen dataclass"
            raise ConfigurationError(f"{where}: Coded.decode is {described(part.decode)}: {takes}")
    return jax.eval_shape(decoded, update)


class Noted:
    """What runs inside a layer, or asks there, with what it returned last: for checks of shapes alone."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.returned = function, None

    def __call__(self, *given: Any) -> Any:
        self.returned = self.function(*given)
        return self.returned
