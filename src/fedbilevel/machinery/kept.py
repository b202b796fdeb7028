"""Cache compiled programs, and results of tracing, within a process; hash arrays and traced functions.

The keys of the cache are hashes of traced functions. The cache contains no data of a run and no function of a user. If
a function closes over much data, or calls back into Python, it is not cached, and is compiled again for each run.
"""

from __future__ import annotations

import hashlib
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

T = TypeVar("T")
LIMIT = 64  # the largest number of cached objects
MUCH = 2**20  # a program whose constants have more bytes is not cached
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

_KEPT: OrderedDict[Hashable, Any] = OrderedDict()
_LOCK = threading.Lock()


def kept(key: Hashable | None, make: Callable[[], T]) -> T:
    """Return the object that is cached under this key, or call `make` and cache its result.

    If there are more than `LIMIT` objects, the least recently used one is dropped. If the key is None or cannot be
    hashed, nothing is cached.
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
            cached: T = _KEPT[key]
            return cached
    made = make()
    with _LOCK:
        _KEPT[key] = made
        while len(_KEPT) > LIMIT:
            _KEPT.popitem(last=False)
    return made


def forget() -> None:
    """Free compiled programs and all else that this process has cached for later runs."""
    with _LOCK:
        _KEPT.clear()


def compiled(
    function: Callable[..., Any], *like: Any, key: Hashable | None = None, quickly: bool = False
) -> Callable[..., Any]:
    """Compile a function for arguments of the shapes and types of `like`, or take its program from the cache.

    If a later call has arguments on other devices, the function is compiled for these at that call.

    Args:
        key: all that the function depends on, except its name and the leaves of its arguments. If an equal key was used
            before, the function is not traced again. None: the function is traced, and if an earlier trace was equal,
            its program is used.
        quickly: whether to compile faster, on CPUs, to a program that runs more slowly.
    """
    leaves, tree = jax.tree.flatten(like)
    options = QUICKLY if quickly and jax.default_backend() == "cpu" else None

    @jax.disable_jit(False)  # jax_disable_jit is for stepping through a user's functions; the library's remain compiled
    def program_for(leaves: list[Any]) -> tuple[Callable[[list[Any]], list[Any]], Any]:
        structures = []

        def of_leaves(leaves: list[Any]) -> list[Any]:
            results, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            structures.append(structure)
            return results

        def make() -> tuple[Callable[[list[Any]], list[Any]], Any]:
            traced = jax.jit(of_leaves).trace(leaves)
            trace_key = None if key is not None else program_key(traced.jaxpr, leaves, quickly)
            return kept(trace_key, lambda: traced.lower().compile(options)), structures[0]

        return kept(key and (key, function.__qualname__, shapes_of(leaves)), make)

    programs = {_placement(leaves): program_for(leaves)}

    @jax.disable_jit(False)
    def call(*arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        place = _placement(leaves)
        if place not in programs:
            programs[place] = program_for(leaves)
        program, structure = programs[place]
        return jax.tree.unflatten(structure, program(leaves))

    return call


def program_key(traced: ClosedJaxpr, leaves: list[Any], *more: Hashable) -> Hashable | None:
    """Return the cache key of a program that was traced for the arguments `leaves`; None if it must not be cached.

    Args:
        more: further arguments of the compiler.
    """
    trace_hash = hash_of(traced)
    return trace_hash and (trace_hash, shapes_of(leaves), more)


def hash_of(*traced: ClosedJaxpr) -> str | None:
    """Return a hash of traced functions and of the content of their constants.

    The result is None if a function calls back into Python, or if the constants have more than `MUCH` bytes.
    """
    programs = [program for function in traced for program in _every(function)]
    calls_back = any("callback" in step.primitive.name for program in programs for step in program.eqns)
    constants = [constant for program in programs for constant in _constants(program)]
    if calls_back or sum(int(getattr(constant, "nbytes", 0)) for constant in constants) > MUCH:
        return None
    return " ".join(map(of_program, traced))


def has_rules(traced: ClosedJaxpr) -> bool:
    """Return whether a traced function has custom derivative rules, which its hash does not cover."""
    return any(step.primitive.name.startswith("custom_") for program in _every(traced) for step in program.eqns)


def shapes_of(arguments: Any) -> Hashable:
    """Return all that a trace depends on: the structure, shapes and types of the arguments, and JAX's settings.

    The static fields 1, 1.0 and True are equal but are traced differently, so the result also contains the structure as
    a text. The result keeps the nodes of the structure in memory. If nodes may be objects of a user, pass only the
    leaves.
    """
    leaves, structure = jax.tree.flatten(arguments)
    kinds = tuple((aval.shape, str(aval.dtype), aval.weak_type) for aval in map(jax.typeof, leaves))
    return structure, str(structure), kinds, _placement(leaves), _settings()


def _placement(leaves: list[Any]) -> Hashable:
    """Return the sharding of each leaf that is a JAX array, and None for other leaves."""
    return tuple(leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves)


def _every(program: ClosedJaxpr | Jaxpr) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yield a program and all programs among the parameters of its operations, such as the bodies of loops."""
    yield program
    for step in program.eqns:
        for inner in _programs(step.params):
            yield from _every(inner)


def _programs(value: Any) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Yield the programs in a parameter of an operation."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _programs(entry)


def _constants(program: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    """Return the constants of a program.

    Before JAX 0.11, a Jaxpr has only names for its constants, and the result is empty.
    """
    return getattr(program, "consts", ())


def _settings() -> Hashable:
    """Return the settings of JAX that change how a function is traced or compiled."""
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


WHOLE = 2**24  # bytes: of larger memory-mapped arrays, only rows are read; larger arrays in memory are hashed by CRC-32
BLOCKS = 64  # the number of blocks of clients that have a hash each, so that a message can name the clients that differ
ROWS = 32  # the number of evenly spaced rows that are read of each block of a larger memory-mapped array
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # the address of an object in this process


def short(*parts: str | bytes) -> str:
    """Return a hash of the parts and of their lengths, in 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()[:16]


def of_program(program: ClosedJaxpr) -> str:
    """Return a hash of what a traced function computes.

    It is the same in every process, since names and addresses are left out.
    """
    return short(*description(program))


def of_array(leaf: Any) -> str:
    """Return a hash of an array's type, shape and content.

    Of a large memory-mapped array, only some rows are read.
    """
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    content, large = array, array.nbytes > WHOLE
    if mapped := large and isinstance(leaf, np.memmap):
        content = array[np.linspace(0, len(array) - 1, min(len(array), BLOCKS * ROWS)).astype(np.int64)]
    return short(str(array.dtype), str(array.shape), bytes_of(content, quickly=large and not mapped))


def bytes_of(array: np.ndarray, quickly: bool) -> bytes:
    """Return the content of an array as bytes, in JAX's precision.

    float64 becomes float32, unless JAX computes in float64.

    Args:
        quickly: whether to return the CRC-32 of the content. It takes half the time of SHA-256, but does not resist an
            attacker.
    """
    if array.dtype == object:
        return ADDRESS.sub("", repr(array.tolist())).encode()
    content = np.ascontiguousarray(array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False))
    return zlib.crc32(content.reshape(-1).view(np.uint8).data).to_bytes(4) if quickly else content.tobytes()


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of PRNG keys."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def description(value: Any) -> Iterator[str]:
    """Yield texts that describe a program, or a parameter of an operation, for a hash."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield from map(of_array, _constants(value))
        yield from _steps(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        yield of_array(value)
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield f"{name}="
            yield from description(value[name])
    elif isinstance(value, tuple | list):
        yield f"{len(value)}("
        for entry in value:
            yield from description(entry)
    elif callable(value) and not isinstance(value, type):
        yield type(value).__name__
    elif isinstance(value, set | frozenset):
        yield from sorted(ADDRESS.sub("", repr(entry)) for entry in value)
    else:
        yield ADDRESS.sub("", repr(value))


def _steps(program: Jaxpr) -> Iterator[str]:
    """Yield texts that describe a program's operations.

    Variables are numbered in the order of their first use.
    """
    numbered: dict[Any, tuple[str, str]] = {}

    def named(v: Any) -> Iterator[str]:
        if isinstance(v, Literal):
            yield from (*description(v.val), f":{v.aval}")
        else:
            if v not in numbered:
                numbered[v] = str(len(numbered)), f":{v.aval}"
            yield from numbered[v]

    for variable in (*program.constvars, *program.invars):
        yield from named(variable)
    for step in program.eqns:
        yield step.primitive.name
        # The parameter "name" is the name of a user's function.
        yield from description({name: value for name, value in step.params.items() if name != "name"})
        for operand in (*step.invars, *step.outvars):
            yield from named(operand)
    for result in program.outvars:
        yield from named(result)
