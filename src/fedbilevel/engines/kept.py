"""What a process keeps of earlier runs: compiled programs, by what tracing gives.

A later run whose tracing gives the same program finds it compiled, whatever its step sizes, seeds, weights and samples,
which are arguments. Nothing of a run's data is kept, but for what a schedule or an optimizer closes over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedbilevel.core.tree import PyTree
from fedbilevel.engines.fingerprint import of_program

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
            try:
                known = key is not None and key in self.values
            except (TypeError, ValueError):  # of static fields that cannot be compared, such as arrays
                key, known = None, False
            if known:
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


def program_key(traced: ClosedJaxpr, given: PyTree, *more: Hashable) -> Hashable | None:
    """A key of what tracing gave for the arguments `given`; None where it calls back into Python, or holds much data.

    Constants count by content. `more`: what else the compiler is told.
    """
    if _calls_back(traced.jaxpr) or _held(traced) > MUCH:
        return None
    leaves, structure = jax.tree.flatten(given)
    return of_program(traced), structure, tuple(map(_of_leaf, leaves)), _settings(), more


def _of_leaf(leaf: Any) -> Hashable:
    aval = jax.typeof(leaf)
    return aval.shape, str(aval.dtype), aval.weak_type, leaf.sharding if isinstance(leaf, jax.Array) else None


def _calls_back(program: Jaxpr) -> bool:
    return any(
        "callback" in step.primitive.name or any(map(_calls_back, _inside(step.params))) for step in program.eqns
    )


def _held(program: ClosedJaxpr | Jaxpr) -> int:
    """Bytes of the constants of a program, such as arrays that a loss closes over."""
    steps = (program.jaxpr if isinstance(program, ClosedJaxpr) else program).eqns
    own = sum(int(getattr(one, "nbytes", 0)) for one in program.consts) if isinstance(program, ClosedJaxpr) else 0
    return own + sum(map(_held, (inner for step in steps for inner in _programs(step.params))))


def _inside(value: Any) -> Iterator[Jaxpr]:
    """The programs among the parameters of an operation, without their constants."""
    return (one.jaxpr if isinstance(one, ClosedJaxpr) else one for one in _programs(value))


def _programs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _programs(one)


def _settings() -> Hashable:
    """What of JAX's settings changes how a program is compiled."""
    named = (
        "jax_default_matmul_precision",
        "jax_debug_nans",
        "jax_debug_infs",
        "jax_disable_jit",
        "jax_default_device",
    )
    return str(jnp.result_type(float)), jax.default_backend(), tuple(str(getattr(jax.config, name)) for name in named)
