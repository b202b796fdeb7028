"""Read and evaluate clients' own numbers: numbers of a method, such as local steps and step sizes, that can differ.

These numbers can differ between clients, between rounds, or both. Each number can be given in one of these forms:

    a number                              the same for every client and round
    (M,) numbers                          one for each client
    (T, M) numbers                        one for each round and client; a run then has at most T rounds
    (T, K, M) numbers                     one for each round, inner round and client
    (low, high) or {"low": …, "high": …}  drawn uniformly for each client and round, both ends included; if both ends
                                          are whole numbers, so are the draws
    a function (round, client, key)       of JAX's operations, compiled with the rounds; each client has its own key
    a function (round, client, key, k)    a function that also takes the inner round k, with a key for each inner round

Inner rounds are counted within `Fed.repeat`; outside of it, k is 0.

A field of a method can differ between clients if it is declared so: `positive(default=0.1, own=True)`. In a phase, the
method's field already has the number of the client that runs the phase.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.card import span
from fedbilevel.core.config import Schedule, positional
from fedbilevel.core.errors import ConfigurationError, refuse_together, require, require_count, unknown
from fedbilevel.core.hyperparameters import entries, local_epochs, replaced, tied
from fedbilevel.machinery.threefry import uniform_below

LOCAL_STEPS = "local_steps"
OwnNumbers = Mapping[str, int | float]
"""A client's own numbers in a round, by the path of the method's field."""
LARGEST = 2.0**31
PROBES = 10**6
"""The largest number of a function's values that are checked before a run; if there are more, not all are checked."""
FORMS = "a number, one for each client, one for each round and client, (low, high), or a function"
RULES = "a function (round, client, key) or (round, client, key, k) that returns a number"
AXES = "", ", one for each client", ", one for each round and client", ", one for each round, inner round and client"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Given:
    """Hold numbers that the user has listed, as an array of shape (), (M,), (T, M) or (T, K, M)."""

    values: Any

    def at(self, round: Array | int, client: Array | int, key: Array, k: Array | int = 0) -> Array:
        """Look up the value that a client has in a round."""
        values = jnp.asarray(self.values)
        places = (round, k, client) if self.by_k else (round, client)[2 - values.ndim :]
        return values[places] if values.ndim else values

    @property
    def by_k(self) -> bool:
        """Return whether the numbers differ between the inner rounds of a round."""
        return np.ndim(self.values) == 3

    @property
    def ends(self) -> tuple[Any, ...]:
        """Return the smallest and the largest number."""
        return np.min(self.values), np.max(self.values)

    @property
    def rounds(self) -> int | None:
        """Return the number of rounds for which there are numbers; None: any number of rounds."""
        return len(self.values) if np.ndim(self.values) >= 2 else None

    def __str__(self) -> str:
        return span(self.values, ",.4g") + AXES[np.ndim(self.values)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drawn:
    """Draw a number uniformly for each client and round, from one bound to the other, including the bounds."""

    low: Any
    high: Any

    rounds, by_k = None, False

    @property
    def ends(self) -> tuple[Any, ...]:
        """Return the smallest and the largest number."""
        return self.low, self.high

    def at(self, round: Array | int, client: Array | int, key: Array, k: Array | int = 0) -> Array:
        """Draw the value that a client has in a round."""
        if jnp.issubdtype(jnp.result_type(self.low), jnp.integer):
            return self.low + uniform_below(key, self.high + 1 - self.low)
        return jax.random.uniform(key, minval=self.low, maxval=self.high)

    def __str__(self) -> str:
        return f"{span(np.stack([self.low, self.high]), ',.4g')}, drawn for each client and round"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Computed:
    """Compute each number by a function of the user."""

    function: Callable[..., Any] = field(metadata={"static": True})
    rounds, ends = None, ()

    def at(self, round: Array | int, client: Array | int, key: Array, k: Array | int = 0) -> Array:
        """Compute the value that a client has in a round."""
        return jnp.asarray(self.function(round, client, key, k) if self.by_k else self.function(round, client, key))

    @property
    def by_k(self) -> bool:
        """Return whether the function takes the inner round, as a fourth argument without a default."""
        return positional(self.function) == 4

    def __str__(self) -> str:
        return f"as {getattr(self.function, '__name__', 'a function')} says"


Values = Given | Drawn | Computed


def read(path: str, given: Any, count: int, allowed: str = FORMS) -> Values:
    """Read the numbers that a user has given for `count` clients, in any of the forms that `Clients` accepts.

    Only the form is checked. Which numbers are allowed depends on the method's field, and `check_own` checks this.
    `path` and `allowed` appear in the messages of errors: the name of the field, and the allowed forms in words.
    """
    if callable(given):
        return read_rule(path, given)
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
    shaped = numbers.ndim <= 3 and numbers.size > 0 and (numbers.ndim == 0 or numbers.shape[-1] == count)
    shapes = f"(), ({count},), (rounds, {count}) or (rounds, inner rounds, {count}), because there are {count} clients"
    require(shaped, path, given, f"of shape {shapes}; its shape is {numbers.shape}")
    return Given(numbers)


def read_rule(path: str, function: Callable[..., Any], allowed: str = RULES, truths: bool = False) -> Computed:
    """Check that a function of a user returns one number or, with `truths`, one boolean, and wrap it in `Computed`.

    The texts `path` and `allowed` are used in error messages.
    """
    index, rule = jax.ShapeDtypeStruct((), jnp.int32), Computed(function)
    try:
        found = jax.eval_shape(rule.at, index, index, jax.random.key(0), index)
    except Exception as error:  # whatever a function of the user raises
        raise ConfigurationError(
            f"calling it: {str(error).partition(chr(10))[0]}", path=path, got=function, allowed=allowed
        ) from error
    kinds = (jnp.bool_,) if truths else (jnp.integer, jnp.floating)
    fits = found.shape == () and any(jnp.issubdtype(found.dtype, kind) for kind in kinds)
    require(fits, path, found, allowed)
    return rule


def check(path: str, values: Values, accept: Callable[[str, Any], Any]) -> None:
    """Refuse numbers if `accept(path, number)` raises an error for the smallest or the largest of them."""
    for number in values.ends:
        accept(path, number.item())


def check_rule(
    path: str, rule: Computed, accept: Callable[[str, Any], Any], clients: int, rounds: int, last: int = 0
) -> None:
    """Refuse a rule that returns a number for which `accept` raises an error.

    At most PROBES numbers are checked: those of all `clients`, in some or all of the `rounds`, and in the first and the
    `last` inner round.
    """
    probes = np.unique(np.linspace(0, rounds - 1, min(rounds, max(4, PROBES // clients))).astype(int))
    ids, keys = jnp.arange(clients), jax.random.split(jax.random.key(0), clients)
    probed = jax.vmap(jax.vmap(rule.at, (None, 0, 0, None)), (0, None, None, None))
    for k in dict.fromkeys((0, last)) if rule.by_k else (0,):
        within = f", inner round {k}" if rule.by_k else ""
        for round, row in zip(probes, np.asarray(probed(jnp.asarray(probes), ids, keys, k)), strict=True):
            for client in (np.argmin(row), np.argmax(row)):
                accept(f"{path} in round {round}{within}, of client {client}", row[client].item())


def check_inner_rounds(path: str, name: str, values: Values, method: Any, rounds: int) -> None:
    """Refuse numbers for each inner round that do not fit the method.

    The numbers do not fit if inner rounds do not use their field, or if the numbers are an array for another number of
    inner rounds than the method makes.
    """
    whose = method.label
    got = f"of shape {np.shape(values.values)}" if isinstance(values, Given) else str(values)
    most = inner_rounds(method, len(values.values) if isinstance(values, Given) else rounds)
    inside = name == LOCAL_STEPS or name.startswith("inner.")
    why = f"{whose} has no `inner.rounds`" if most is None else "it is used outside of the inner rounds"
    require(most is not None and inside, path, got, f"the same in all inner rounds: {why}")
    if isinstance(values, Given):
        has = np.shape(values.values)[1]
        allowed = f"of shape ({len(values.values)}, {most}, M): {whose} makes {most} inner rounds in a round"
        require(has == most, path, got, allowed)


def inner_rounds(method: Any, rounds: int = 1) -> int | None:
    """Return the largest number of inner rounds in any of the `rounds`; None for a method without inner rounds."""
    inside = [getattr(method, entry.name) for entry in fields(method) if entry.metadata.get("wrapped")]
    if inside:
        return inner_rounds(inside[0], rounds)
    number: Any = getattr(getattr(method, "inner", None), "rounds", None)
    if isinstance(number, Schedule):
        number = np.max(jax.vmap(lambda round: jnp.asarray(number.function(round)))(jnp.arange(rounds)))
    return None if number is None else int(number)


def changing(own: Mapping[str, Values]) -> dict[str, Values]:
    """Return the own numbers that differ between the inner rounds of a round."""
    return {name: values for name, values in own.items() if values.by_k}


def numbers_of(
    own: Mapping[str, Values], key: Array, round: Array | int, ids: Array, k: Array | int = 0
) -> dict[str, Array]:
    """Return the own numbers of P clients in a round, by name, each as an array of shape (P,).

    Args:
        own: the own numbers of all clients, by name.
        key: the random key of this round for own numbers.
        round: the round.
        ids: the numbers of the P clients, as an array of shape (P,).
        k: the inner round.
    """

    def each(name: str, values: Values) -> Array:
        stream = key if name == LOCAL_STEPS else jax.random.fold_in(key, zlib.crc32(name.encode()))
        stream = jax.random.fold_in(stream, k) if values.by_k else stream
        return jax.vmap(lambda id: values.at(round, id, jax.random.fold_in(stream, id), k))(ids)

    return {name: each(name, values) for name, values in own.items()}


def own_fields(method: Any) -> Iterator[tuple[str, Callable[[str, Any], Any]]]:
    """Yield the path of each field of a method or its parts that can differ between clients, with its check."""
    for entry in entries(method, unwrapped=True):
        if entry.field.metadata.get("own"):
            yield entry.path, positive_number if entry.of else entry.field.metadata["prepare"]


def positive_number(path: str, number: Any) -> None:
    """Refuse a number that is not positive."""
    require(number > 0, path, number, "a positive number")


def in_python(name: str) -> str:
    """Return the name that messages give to a client's own number: the name by which it is set in Python."""
    return f"Clients.own[{name!r}]"


def check_own(
    method: Any,
    own: Mapping[str, Values],
    clients: int = 1,
    rounds: int = 1,
    path_of: Callable[[str], str] = in_python,
) -> None:
    """Refuse numbers for a field that the method does not have, and numbers that the field does not allow.

    One error lists all mistakes. `path_of` returns the name of a number in messages.
    """
    known, wrong = {LOCAL_STEPS: require_count, **dict(own_fields(method))}, list[ConfigurationError]()
    for name, values in own.items():
        try:
            if name not in known:
                raise unknown(f"name in the clients' own numbers for {type(method).__name__}", name, known)
            check(path_of(name), values, known[name])
            for path, number in local_epochs(method).items() if name == LOCAL_STEPS else ():
                why = f"left out: {method.label}.{path} = {number} says how many steps clients make"
                raise ConfigurationError(path=path_of(name), got=str(values), allowed=why)
            if values.by_k:
                check_inner_rounds(path_of(name), name, values, method, rounds)
            if isinstance(values, Computed):
                check_rule(path_of(name), values, known[name], clients, rounds, (inner_rounds(method, rounds) or 1) - 1)
        except ConfigurationError as error:
            wrong.append(error)
    refuse_together(wrong)


def refuse_local_steps(name: str, own: Mapping[str, Values], instead: str) -> None:
    """Refuse clients' own numbers of local steps for a method without local steps; `instead` says what it does."""
    steps = own.get(LOCAL_STEPS)
    require(steps is None, "Clients.local_steps", str(steps), f"left out: {name} makes none; {instead}")


def as_client(method: Any, own: Mapping[str, Array]) -> Any:
    """Return the method with a client's own numbers in the fields to which they belong."""
    for path, number in own.items():
        if path != LOCAL_STEPS:
            method = replaced(method, path.split("."), number)
    return tied(method)
