"""Check the functions of a layer: their arguments, and what they return while JAX traces them.

Errors name the layer and the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import check_arguments, check_numbers, described, difference, explained, not_an_array
from fedbilevel.core.errors import ConfigurationError, nearest, require
from fedbilevel.core.facts import Allows
from fedbilevel.core.fed import Coded, Reply, Total, decoded
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, is_none

RETURNS: dict[str, tuple[type, str]] = {
    "before_round": (Algorithm, "a method"),
    "exchange": (Total, "a Total"),
    "reply": (Reply, "a Reply"),
    "after_round": (object, "the method's state"),
}


def check_functions(cls: type) -> None:
    """Refuse functions of a class that override functions of its base class, and have other arguments.

    The library calls them with the arguments of the base class.

    Functions whose names begin with an underscore are helpers, and are not checked.
    """
    for name, function in vars(cls).items():
        known = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if name[0] != "_" and inspect.isfunction(function) and inspect.isfunction(known):
            check_arguments(
                function, f"this function of a {known.__qualname__.split('.')[0]}", inspect.signature(known).parameters
            )


def check_names_and_attributes(cls: Any, layers: type, places: Sequence[str]) -> None:
    """Check the public names of a class of layers, and its attributes `kind`, `place` and `needs`.

    Args:
        cls: the class.
        layers: the base class of layers, whose names the error may suggest.
        places: the names of all places.

    Raises:
        ConfigurationError: a public name is not a field, and no base class or abstract function declares it, so that it
            may be a misspelt function; or an attribute is missing or wrong.
    """
    known = {name for base in cls.__mro__[1:] for name in dir(base)}
    known |= {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    for name, value in vars(cls).items():
        if name[0] != "_" and name not in known and not getattr(value, "__isabstractmethod__", False):
            near = nearest(name, [name for name in dir(layers) if name[0] != "_"])
            meant = f": did you mean {near!r}?" if near else ""
            own = "names of your own begin with an underscore, unless they are fields"
            raise ConfigurationError(f"{cls.__name__}.{name} is not a function or attribute of layers{meant}; {own}")
    if not inspect.isabstract(cls):
        kind, place = getattr(cls, "kind", None), getattr(cls, "place", None)
        require(place is not None, f"{cls.__name__}.place", place, ", ".join(places))
        require(isinstance(kind, str), f"{cls.__name__}.kind", kind, "a name")
        require(cls.needs in ("", *Allows._fields), f"{cls.__name__}.needs", cls.needs, ", ".join(Allows._fields))


def first_slot(layer: Any, make: str, given: tuple[Any, ...]) -> PyTree:
    """Return the first state of a layer, which its function `make` returns for the arguments `given`, after a check.

    Raises:
        ConfigurationError: a leaf of the state is not an array.
    """
    slot = getattr(layer, make)(*given)
    if wrong := not_an_array(slot):
        raise ConfigurationError(
            f"the leaves of a layer's state must be arrays: {wrong}", where=f"{layer.label}.{make}"
        )
    return slot


def checked(
    layer: Any, function: str, given: tuple[Any, ...], slots: Mapping[str, Any], like: Any = None, undone: bool = False
) -> tuple[Any, Any]:
    """Call a function of a layer, and return its result, a pair of its value and the layer's new state, after a check.

    The check runs while JAX traces, and adds nothing to the compiled program.

    Args:
        layer: the layer.
        function: the name of its function.
        given: the arguments of the function.
        slots: the states of all layers on the same side (server or client), by the kind of layer.
        like: what the value must be like: the state that the layer got, or its argument `run` or `ask`, as a `Noted`,
            whose last result counts.
        undone: whether the layer also has a function on the other side that reverses the changes which this function
            makes to updates.

    Raises:
        ConfigurationError: the result is not such a pair; the layer's new state differs from its first state in
            structure, shapes or dtypes; or an update, a state or a metric does not have the required shapes.
    """
    where, (kind, name) = f"{layer.label}.{function}", RETURNS[function]
    with explained(where):
        returned = getattr(layer, function)(*given)
    inside = like.returned if isinstance(like, Noted) else like
    if type(returned) is not tuple or len(returned) != 2 or not isinstance(returned[0], kind):
        got = described(returned)
        raise ConfigurationError(f"{where} returned {got}: it must return {name} and the layer's new state")
    what, kept = returned
    make = "client_slot" if function == "reply" else "server_slot"
    if layer.kind not in slots and kept is not None:
        nothing = f"{make} says that nothing is kept"
        nothing += ", or this is a fresh cohort, in which layers keep nothing: `kept` is None" * (function == "reply")
        raise ConfigurationError(f"{where} keeps {described(kept)}, but {nothing}")
    if layer.kind in slots and (wrong := difference(kept, slots[layer.kind])):
        raise ConfigurationError(
            f"the state that it returns must be like the state that {make} made: {wrong}", where=where
        )
    if function == "after_round" and (wrong := difference(what, inside)):
        raise ConfigurationError(f"{where} must return a state like `after`: {wrong}")
    if isinstance(what, Reply):
        _check_reply(layer, where, what, inside, undone)
    if isinstance(what, Total):
        _check_total(where, what, inside, undone)
    return returned


def _check_reply(layer: Any, where: str, reply: Reply, inside: Reply | None, undone: bool) -> None:
    """Refuse a layer's reply if its update, state, metrics or counts do not have the required shapes."""
    own, got = reply.metrics, (inside.metrics if inside else None) or {}
    known = got.keys() if isinstance(own, Mapping) else ()
    check_numbers(where, reply, own or () if layer._vectors else [k for k in known if (own or {}).get(k) is got[k]])
    update = plain_update(where, reply.update)
    if inside is None:
        return
    if wrong := difference(reply.state, inside.state):
        raise ConfigurationError(f"Reply.state must be like that of `run`; use reply._replace(…): {wrong}", where=where)
    if undone:
        return
    like = plain_update(where, inside.update)
    if layer.place == "kept":
        like = _without(update, like)
    same_shapes(f"{where}: Reply.update must have the shapes of the update that `run` returned", update, like)


def _check_total(where: str, total: Total, inside: Total | None, undone: bool) -> None:
    """Refuse a layer's total if its update or its numbers do not have the required shapes."""
    for name in ("weight", "responders", "population"):
        if np.shape(number := getattr(total, name)) != ():
            raise ConfigurationError(f"Total.{name} is {described(number)}: it must be one number", where=where)
    if inside is not None and not undone:
        same_shapes(
            f"{where}: Total.update must have the shapes of the update that `ask` returned", total.update, inside.update
        )


def same_shapes(must: str, update: PyTree, like: PyTree) -> None:
    """Raise an error whose message begins with the text `must` if two trees differ in structure or shapes."""
    if wrong := difference(update, like, dtypes=False):
        raise ConfigurationError(f"{must}: {wrong}")


def check_declared(where: str, phase: str, declared: PyTree, update: PyTree, state: Any) -> None:
    """Refuse an update whose parts have other shapes than its phase declares: those of x or y, or numbers."""
    must = f"{where}: Total.update must have the shapes of the update of {phase}"

    def one(kind: str, part: PyTree) -> None:
        if kind in ("x", "y") and part is not None:
            got, like = jax.tree.leaves(part), jax.tree.leaves(getattr(state, kind))
            same_shapes(f"{must}, its part like {kind}", got, like)
        if kind == NUMBER:
            same_shapes(f"{must}, its number", jax.tree.leaves(part), [np.zeros(())])

    jax.tree.map(one, declared, update)


def _without(update: PyTree, like: PyTree) -> PyTree:
    """Return the tree `like` with None at the places where the update has None."""
    try:
        return jax.tree.map(lambda u, part: None if u is None else part, update, like, is_leaf=is_none)
    except ValueError:
        return like


def plain_update(where: str, update: PyTree) -> PyTree:
    """Return the shapes and dtypes that an update has once its compressed parts (`Coded`) are decoded.

    Raises:
        ConfigurationError: the `decode` of a coded part is not a function, or a leaf is not an array.
    """
    for part in jax.tree.leaves(update, is_leaf=lambda part: isinstance(part, Coded)):
        if isinstance(part, Coded) and not callable(part.decode):
            takes = "it must be a function of the wire that a module defines, or a frozen dataclass"
            raise ConfigurationError(f"Coded.decode is {described(part.decode)}: {takes}", where=where)
    if wrong := not_an_array(update):
        raise ConfigurationError(f"the leaves of an update must be arrays: {wrong}", where=where)

    def plain(update: PyTree) -> PyTree:
        if wrong := not_an_array(found := decoded(update)):
            raise ConfigurationError(f"Coded.decode must return arrays: {wrong}", where=where)
        return found

    return jax.eval_shape(plain, update)


class Noted:
    """Wrap the function `run` or `ask` of a layer, and record its last result, whose shapes are checked later."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.returned = function, None

    def __call__(self, *given: Any) -> Any:
        self.returned = self.function(*given)
        return self.returned
