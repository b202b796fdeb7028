"""What is kept of earlier runs: by a process compiled programs, by what tracing gives; in a series what tracing gave.

A later run whose tracing gives the same program finds it compiled, whatever its step sizes, seeds, weights and samples,
which are arguments. Nothing of a run's data is kept, but for small constants of its losses. A series of runs, such as a
sweep, does not trace again what it has traced of the same functions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedbilevel.core.hashes import of_program
from fedbilevel.core.tree import PyTree

T = TypeVar("T")


class BoundedCache:
    """At most `limit` values by key; the one that was not asked for longest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.lock = limit, threading.Lock()
        self.values: OrderedDict[Hashable, Any] = OrderedDict()
        self.made = 0  # values so far, kept or not

    def get(self, key: Hashable | None, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not there; without a key it is made and not kept."""
        with self.lock:
            if key is not None and key in self.values:
                self.values.move_to_end(key)
                found: T = self.values[key]
                return found
        value = make()
        with self.lock:
            self.made += 1
            if key is not None:
                self.values[key] = value
            while len(self.values) > self.limit:
                self.values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self.lock:
            self.values.clear()


PROGRAMS = BoundedCache(32)
MUCH = 2**20  # bytes of constants, with which a program is not kept


_SERIES: ContextVar[BoundedCache | None] = ContextVar("series", default=None)


@contextmanager
def series() -> Iterator[None]:
    """Runs that nobody interferes with: within it, and no longer, a loss that is the same object is the same function.

    What a function reads could have changed between two runs of a user's own: there, each is traced anew.
    """
    if _SERIES.get() is not None:
        yield
        return
    token = _SERIES.set(BoundedCache(64))
    try:
        yield
    finally:
        _SERIES.reset(token)


def recalled(key: Hashable | None, make: Callable[[], T]) -> T:
    """In a series, what `make` gave for this key; else, or where the key is None or has no hash, what it gives now."""
    known = _SERIES.get()
    try:
        hash(key)
    except TypeError:
        known = None
    return make() if known is None else known.get(key, make)


class Same:
    """An object as itself, whatever it says of equality."""

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


def shapes_of(given: PyTree) -> Hashable:
    """What a program traced for such arguments depends on: their structure, shapes and types, and JAX's settings.

    Of static fields 1, 1.0 and True are equal, and traced differently: what is printed of them tells them apart.
    """
    leaves, structure = jax.tree.flatten(given)
    return structure, str(structure), tuple(map(_of_leaf, leaves)), _settings()


def compiled(function: Callable[..., PyTree], *like: PyTree) -> Callable[..., PyTree]:
    """The function compiled for arguments like these: traced anew, and the program of an earlier one where it gives the
    same. Arguments that lie on other devices later are compiled for when they come."""
    leaves, tree = jax.tree.flatten(like)
    structures = []

    def of_leaves(leaves: list[Any]) -> list[Any]:
        results, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
        structures.append(structure)
        return results

    def program_for(leaves: list[Any]) -> Callable[[list[Any]], list[Any]]:
        traced = jax.jit(of_leaves).trace(leaves)
        return PROGRAMS.get(program_key(traced.jaxpr, leaves), lambda: traced.lower().compile())

    programs = {_placement(leaves): program_for(leaves)}

    def call(*arguments: PyTree) -> PyTree:
        leaves = jax.tree.leaves(arguments)
        place = _placement(leaves)
        if place not in programs:
            programs[place] = program_for(leaves)
        return jax.tree.unflatten(structures[0], programs[place](leaves))

    return call


def _placement(leaves: list[Any]) -> Hashable:
    """Where arrays lie; nothing of others."""
    return tuple(leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves)


def program_key(traced: ClosedJaxpr, given: PyTree, *more: Hashable) -> Hashable | None:
    """A key of what tracing gave for the arguments `given`; None where it calls back into Python, or holds much data.

    Constants count by content. `given` are lists of leaves: a structure would keep what its nodes hold. `more`: what
    else the compiler is given.
    """
    programs = list(_every(traced))
    calls_back = any("callback" in step.primitive.name for program in programs for step in program.eqns)
    held = [constant for program in programs if isinstance(program, ClosedJaxpr) for constant in program.consts]
    if calls_back or sum(int(getattr(constant, "nbytes", 0)) for constant in held) > MUCH:
        return None
    return of_program(traced), shapes_of(given), more


def _of_leaf(leaf: Any) -> Hashable:
    aval = jax.typeof(leaf)
    return aval.shape, str(aval.dtype), aval.weak_type, leaf.sharding if isinstance(leaf, jax.Array) else None


def _every(program: ClosedJaxpr | Jaxpr) -> Iterator[ClosedJaxpr | Jaxpr]:
    """A program and all programs among the parameters of its operations, such as the bodies of loops."""
    yield program
    for step in program.eqns:
        for inner in _programs(step.params):
            yield from _every(inner)


def _programs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The programs in a parameter of an operation."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _programs(one)


def _settings() -> Hashable:
    """The settings of JAX by which one function is traced, or one traced program compiled, differently."""
    named = (
        "jax_default_matmul_precision",
        "jax_debug_nans",
        "jax_debug_infs",
        "jax_disable_jit",
        "jax_default_device",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
        "jax_numpy_dtype_promotion",
        "jax_numpy_rank_promotion",
    )
    return str(jnp.result_type(float)), jax.default_backend(), tuple(str(getattr(jax.config, name)) for name in named)
