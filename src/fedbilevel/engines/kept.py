"""What a process keeps of earlier runs: facts found by tracing, and compiled programs.

A later run with the same losses, method and shapes finds them again, whatever its step sizes, seeds, weights and
samples, which are arguments of the programs. Nothing of a run's data is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from fedbilevel.core.algorithm import Algorithm, Part
from fedbilevel.core.config import Schedule
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.code_key import class_key, code_key

T = TypeVar("T")


class BoundedCache:
    """At most `limit` values by key; the one that was not asked for longest goes first."""

    def __init__(self, limit: int) -> None:
        self.limit, self.lock = limit, threading.Lock()
        self.values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable | None, make: Callable[[], T]) -> T:
        """The value of a key, made if it is not there; without a key it is made and not kept."""
        if key is None:
            return make()
        with self.lock:
            if key in self.values:
                self.values.move_to_end(key)
                found: T = self.values[key]
                return found
        value = make()
        with self.lock:
            self.values[key] = value
            while len(self.values) > self.limit:
                self.values.popitem(last=False)
        return value

    def clear(self) -> None:
        with self.lock:
            self.values.clear()


FACTS, PROGRAMS = BoundedCache(256), BoundedCache(32)


def forget() -> None:
    """Free all that is kept: the next run of each kind is traced and compiled anew."""
    FACTS.clear()
    PROGRAMS.clear()


def trace_key(algorithm: Algorithm, problem: Problem, *trees: PyTree) -> Hashable | None:
    """A key that is equal where tracing rounds gives the same; None where that is not known.

    It is made of what the losses and a method of one's own read, of the method's static fields, of the shapes of
    `trees`, and of JAX's settings.
    """
    leaves, method = jax.tree.flatten(algorithm)
    own = [class_key(type(part)) for part in _parts(algorithm)]
    read = code_key(problem, _schedules(algorithm))
    if read is None or None in own:
        return None
    try:
        hash(method)
    except TypeError:  # a static field that cannot be compared
        return None
    return type(problem), read, tuple(own), method, shape_key((leaves, *trees)), _settings()


def fact_key(name: str, algorithm: Algorithm, problem: Problem, *trees: PyTree) -> Hashable | None:
    """The key of a fact that tracing tells."""
    traced = trace_key(algorithm, problem, *trees)
    return traced and (name, traced)


def shape_key(tree: PyTree) -> Hashable:
    """Structure, shapes, dtypes and devices of a pytree."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_of_leaf, leaves))


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, str(leaf.dtype)
    aval = jax.typeof(leaf)
    return aval.shape, str(aval.dtype), aval.weak_type, leaf.sharding if isinstance(leaf, jax.Array) else None


def _parts(part: Part) -> list[Part]:
    return [part, *(inner for one in part.parts.values() for inner in _parts(one))]


def _schedules(algorithm: Algorithm) -> list[Schedule]:
    leaves = jax.tree.leaves(algorithm, is_leaf=lambda node: isinstance(node, Schedule))
    return [leaf for leaf in leaves if isinstance(leaf, Schedule)]


def _settings() -> Hashable:
    """What of JAX's settings changes a program."""
    named = ("jax_default_matmul_precision", "jax_debug_nans", "jax_disable_jit", "jax_threefry_partitionable")
    return str(jnp.result_type(float)), jax.default_backend(), tuple(str(getattr(jax.config, name)) for name in named)
