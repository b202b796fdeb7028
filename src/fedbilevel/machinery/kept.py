"""What a process keeps of earlier runs: compiled programs, and what tracing said, by hashes of what was traced.

Nothing of a run's data is kept, and no function of a user: what closes over much data, or calls back into Python, is
made anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from fedbilevel.machinery.hashes import of_program

T = TypeVar("T")
LIMIT = 64  # things kept
MUCH = 2**20  # bytes of constants, with which a program is not kept

_KEPT: OrderedDict[Hashable, Any] = OrderedDict()
_LOCK = threading.Lock()


def kept(key: Hashable | None, make: Callable[[], T]) -> T:
    """Return what `make` gave before for an equal key, or make it; of many, what was not asked for longest goes.

    Without a key, or with one that has no hash, it is made each time.
    """
    try:
        hash(key)
    except TypeError:
        key = None
    if key is None:
        return make()
    with _LOCK:
        if key in _KEPT:
            _KEPT.move_to_end(key)
            found: T = _KEPT[key]
            return found
    made = make()
    with _LOCK:
        _KEPT[key] = made
        while len(_KEPT) > LIMIT:
            _KEPT.popitem(last=False)
    return made


def forget() -> None:
    """Free the compiled programs, and all else, that this process keeps for later runs."""
    with _LOCK:
        _KEPT.clear()


def compiled(function: Callable[..., Any], *like: Any, key: Hashable | None = None) -> Callable[..., Any]:
    """Compile a function for arguments like these. Arguments that lie on other devices later are compiled for when they
    come.

    Without a key the function is traced anew, and an earlier program that was traced to the same is taken. A `key` says
    all that it depends on beside its name and the leaves of its arguments: then it is traced once.
    """
    leaves, tree = jax.tree.flatten(like)

    def program_for(leaves: list[Any]) -> tuple[Callable[[list[Any]], list[Any]], Any]:
        structures = []

        def of_leaves(leaves: list[Any]) -> list[Any]:
            results, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            structures.append(structure)
            return results

        def make() -> tuple[Callable[[list[Any]], list[Any]], Any]:
            traced = jax.jit(of_leaves).trace(leaves)
            known = None if key is not None else program_key(traced.jaxpr, leaves)
            return kept(known, lambda: traced.lower().compile()), structures[0]

        return kept(key and (key, function.__qualname__, shapes_of(leaves)), make)

    programs = {_placement(leaves): program_for(leaves)}

    def call(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        place = _placement(leaves)
        if place not in programs:
            programs[place] = program_for(leaves)
        program, structure = programs[place]
        return jax.tree.unflatten(structure, program(leaves))

    return call


def program_key(traced: ClosedJaxpr, leaves: list[Any], *more: Hashable) -> Hashable | None:
    """A key of a program traced for the arguments `leaves`, and of what `more` the compiler is given; None where it is
    not to be kept."""
    found = hash_of(traced)
    return found and (found, shapes_of(leaves), more)


def hash_of(*traced: ClosedJaxpr) -> str | None:
    """A hash of traced functions, whose constants count by content; None where one calls back into Python, or where
    they hold much data."""
    programs = [program for one in traced for program in _every(one)]
    calls_back = any("callback" in step.primitive.name for program in programs for step in program.eqns)
    held = [constant for program in programs if isinstance(program, ClosedJaxpr) for constant in program.consts]
    if calls_back or sum(int(getattr(constant, "nbytes", 0)) for constant in held) > MUCH:
        return None
    return " ".join(map(of_program, traced))


def has_rules(traced: ClosedJaxpr) -> bool:
    """Whether a traced function has rules of its own for derivatives, which its hash does not show."""
    return any(step.primitive.name.startswith("custom_") for program in _every(traced) for step in program.eqns)


def shapes_of(given: Any) -> Hashable:
    """What a program traced for such arguments depends on: their structure, shapes and types, and JAX's settings.

    Of static fields 1, 1.0 and True are equal, and traced differently: what is printed of them tells them apart. The
    structure holds its nodes: where these are a user's, give the leaves alone.
    """
    leaves, structure = jax.tree.flatten(given)
    return structure, str(structure), tuple(map(_of_leaf, leaves)), _settings()


def _placement(leaves: list[Any]) -> Hashable:
    """Where arrays lie; nothing of others."""
    return tuple(leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves)


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
    """The settings of JAX by which a function is traced, or a traced program compiled, differently."""
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
