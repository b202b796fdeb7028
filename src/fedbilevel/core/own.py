"""A client's own numbers: how many local steps it makes, its step sizes, what it can hold.

They differ from client to client, from round to round, or both. Each is given as

    a number                              the same for every client and round
    (M,) numbers                          one for each client
    (T, M) numbers                        one for each round and client; a run then has at most T rounds
    (low, high) or {"low": …, "high": …}  drawn uniformly for each client and round, both included; of two whole
                                          numbers whole ones
    a function (round, client, key)       of JAX's operations, compiled with the rounds; the key is that client's own

A method's field may be a client's own where its maker says so: `positive(default=0.1, own=True)`. A phase then finds
the client's number in the method's field, and knows no table.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.card import span
from fedbilevel.core.errors import ConfigurationError, refuse_together, require, require_count, unknown
from fedbilevel.core.tree import XYV
from fedbilevel.machinery.threefry import uniform_below

LOCAL_STEPS = "local_steps"
OwnNumbers = Mapping[str, int | float]
"""A client's own numbers in a round, by the path of the method's field."""
LARGEST = 2.0**31
PROBES = 0, 1, 10, 100
"""Rounds in which rules are looked at before a run."""
FORMS = "a number, one for each client, one for each round and client, (low, high), or a function"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Numbers that were given: of shape (), (M,) or (T, M)."""

    values: Any

    def at(self, round: Array | int, client: Array | int, key: Array) -> Array:
        """Look up the number of a client in a round."""
        values = jnp.asarray(self.values)
        return values[(round, client)[2 - values.ndim :]] if values.ndim else values

    @property
    def ends(self) -> tuple[Any, ...]:
        """The smallest and the largest number."""
        return np.min(self.values), np.max(self.values)

    @property
    def rounds(self) -> int | None:
        """For how many rounds there are numbers; None: for any."""
        return len(self.values) if np.ndim(self.values) == 2 else None

    def __str__(self) -> str:
        per = ("", ", one for each client", ", one for each round and client")
        return span(self.values, ",.4g") + per[np.ndim(self.values)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Numbers drawn uniformly for each client and round, between two bounds that are included."""

    low: Any
    high: Any

    rounds = None

    @property
    def ends(self) -> tuple[Any, ...]:
        """The smallest and the largest number."""
        return self.low, self.high

    def at(self, round: Array | int, client: Array | int, key: Array) -> Array:
        """Draw the number of a client in a round."""
        if jnp.issubdtype(jnp.result_type(self.low), jnp.integer):
            return self.low + uniform_below(key, self.high + 1 - self.low)
        return jax.random.uniform(key, minval=self.low, maxval=self.high)

    def __str__(self) -> str:
        return f"{span(np.stack([self.low, self.high]), ',.4g')}, drawn for each client and round"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Computed:
    """Numbers that a function computes."""

    function: Callable[[Any, Any, Any], Any] = field(metadata={"static": True})
    rounds, ends = None, ()

    def at(self, round: Array | int, client: Array | int, key: Array) -> Array:
        """Compute the number of a client in a round."""
        return jnp.asarray(self.function(round, client, key))

    def __str__(self) -> str:
        return f"as {getattr(self.function, '__name__', 'a function')} says"


Values = Given | Drawn | Computed


def read(path: str, given: Any, count: int, allowed: str = FORMS) -> Values:
    """Read one of the forms of numbers for `count` clients; `path` and `allowed` are for messages.

    The method's field decides which numbers are allowed: see `check_own`.
    """
    if callable(given):
        return _rule(path, given)
    if isinstance(given, Mapping):
        require(set(given) == {"low", "high"}, path, given, "{low = …, high = …}, a list, or a number")
        given = given["low"], given["high"]
    try:
        numbers = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(path=path, got=given, allowed=allowed) from error
    whole = np.issubdtype(numbers.dtype, np.integer)
    fits = (whole or np.issubdtype(numbers.dtype, np.floating)) and bool(np.all(np.abs(numbers) < LARGEST))
    require(fits, path, given, allowed)
    numbers = numbers.astype(np.int32 if whole else np.float64)
    if isinstance(given, tuple):
        pair = numbers.shape == (2,) and numbers[0] <= numbers[1]
        require(pair, path, given, "a pair (low, high) with low ≤ high; other numbers come in a list or an array")
        return Drawn(numbers[0], numbers[1])
    shaped = numbers.ndim <= 2 and numbers.size > 0 and (numbers.ndim == 0 or numbers.shape[-1] == count)
    require(shaped, path, given, f"of shape (), ({count},) or (rounds, {count}), got {numbers.shape}")
    return Given(numbers)


def _rule(path: str, function: Callable[..., Any]) -> Computed:
    index, allowed = jax.ShapeDtypeStruct((), jnp.int32), "a function (round, client, key) that gives a number"
    try:
        found = jax.eval_shape(lambda *arguments: jnp.asarray(function(*arguments)), index, index, jax.random.key(0))
    except Exception as error:  # whatever a function of the user raises
        raise ConfigurationError(
            f"calling it: {str(error).partition(chr(10))[0]}", path=path, got=function, allowed=allowed
        ) from error
    real = jnp.issubdtype(found.dtype, jnp.integer) or jnp.issubdtype(found.dtype, jnp.floating)
    require(found.shape == () and real, path, found, allowed)
    return Computed(function)


def check(path: str, values: Values, accept: Callable[[str, Any], Any]) -> None:
    """Refuse numbers that are given of which `accept(path, number)` does not take the smallest or the largest."""
    for number in values.ends:
        accept(path, number.item())


def check_rule(path: str, rule: Computed, accept: Callable[[str, Any], Any], clients: int) -> None:
    """Refuse a rule that gives some of so many clients, in a round of PROBES, a number that `accept` does not take."""
    rounds, ids, keys = jnp.array(PROBES), jnp.arange(clients), jax.random.split(jax.random.key(0), clients)
    found = np.asarray(jax.vmap(jax.vmap(rule.at, (None, 0, 0)), (0, None, None))(rounds, ids, keys))
    for round, row in zip(PROBES, found, strict=True):
        for client in (np.argmin(row), np.argmax(row)):
            accept(f"{path} in round {round}, of client {client}", row[client].item())


def numbers_of(own: Mapping[str, Values], key: Array, round: Array | int, ids: Array) -> dict[str, Array]:
    """Return the own numbers of some clients in a round, (P,) each, by name; `key` is the round's stream for them."""

    def each(name: str, values: Values) -> Array:
        stream = key if name == LOCAL_STEPS else jax.random.fold_in(key, zlib.crc32(name.encode()))
        return jax.vmap(lambda id: values.at(round, id, jax.random.fold_in(stream, id)))(ids)

    return {name: each(name, values) for name, values in own.items()}


def own_fields(method: Any, within: str = "") -> Iterator[tuple[str, Callable[[str, Any], Any]]]:
    """List the fields of a method and of its parts that may be a client's own, by path, with what checks a number."""
    for entry in fields(method):
        value, path = getattr(method, entry.name), f"{within}{entry.name}"
        if entry.metadata.get("own"):
            parts = [f".{name}" for name in XYV._fields] if isinstance(value, XYV) else [""]
            accept = positive_number if isinstance(value, XYV) else entry.metadata["prepare"]
            yield from ((path + part, accept) for part in parts)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from own_fields(value, within if entry.metadata.get("wrapped") else f"{path}.")


def positive_number(path: str, number: Any) -> None:
    """Refuse what is no positive number."""
    require(number > 0, path, number, "a positive number")


def in_python(name: str) -> str:
    """Name an own number in messages as Python has it."""
    return f"Clients.own[{name!r}]"


def check_own(
    method: Any, own: Mapping[str, Values], clients: int = 1, path_of: Callable[[str], str] = in_python
) -> None:
    """Refuse numbers that are for no field of the method, and numbers that the field does not allow; all at once.

    `path_of` names a number in messages.
    """
    known, wrong = {LOCAL_STEPS: require_count, **dict(own_fields(method))}, list[ConfigurationError]()
    for name, values in own.items():
        try:
            if name not in known:
                raise unknown(f"number of a client's own in {type(method).__name__}", name, known)
            check(path_of(name), values, known[name])
            if isinstance(values, Computed):
                check_rule(path_of(name), values, known[name], clients)
        except ConfigurationError as error:
            wrong.append(error)
    refuse_together(wrong)


def as_client(method: Any, own: Mapping[str, Array]) -> Any:
    """Return the method as a client has it: with its own numbers in the fields that they are for."""
    for path, number in own.items():
        if path != LOCAL_STEPS:
            method = _replaced(method, path.split("."), number)
    return method


def _replaced(node: Any, path: list[str], number: Any) -> Any:
    if not path:
        return number
    name, *rest = path
    inside = _replaced(getattr(node, name), rest, number)
    if isinstance(node, XYV):
        return node._replace(**{name: inside})
    changed = copy.copy(node)
    object.__setattr__(changed, name, inside)  # nothing is checked again: numbers may be of a round that is traced
    return changed
