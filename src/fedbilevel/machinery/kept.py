"""What a process keeps of earlier runs: compiled programs, and what tracing said, by hashes of what was traced; and the
hashes, of arrays, and of what traced functions compute.

Nothing of a run's data is kept, and no function of a user: what closes over much data, or calls back into Python, is
made anew.
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
LIMIT = 64  # things kept
MUCH = 2**20  # bytes of constants, with which a program is not kept
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

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


def compiled(
    function: Callable[..., Any], *like: Any, key: Hashable | None = None, quickly: bool = False
) -> Callable[..., Any]:
    """Compile a function for arguments like these. Arguments that lie on other devices later are compiled for when they
    come. `quickly`: in less time, to a program that takes longer.

    Without a key the function is traced anew, and an earlier program that was traced to the same is taken. A `key` says
    all that it depends on beside its name and the leaves of its arguments: then it is traced once.
    """
    leaves, tree = jax.tree.flatten(like)
    options = QUICKLY if quickly and jax.default_backend() == "cpu" else None

    @jax.disable_jit(False)  # for users' functions that are stepped through, not for ours
    def program_for(leaves: list[Any]) -> tuple[Callable[[list[Any]], list[Any]], Any]:
        structures = []

        def of_leaves(leaves: list[Any]) -> list[Any]:
            results, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            structures.append(structure)
            return results

        def make() -> tuple[Callable[[list[Any]], list[Any]], Any]:
            traced = jax.jit(of_leaves).trace(leaves)
            known = None if key is not None else program_key(traced.jaxpr, leaves, quickly)
            return kept(known, lambda: traced.lower().compile(options)), structures[0]

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
    """A key of a program traced for the arguments `leaves`, and of what `more` the compiler is given; None where it is
    not to be kept."""
    found = hash_of(traced)
    return found and (found, shapes_of(leaves), more)


def hash_of(*traced: ClosedJaxpr) -> str | None:
    """A hash of traced functions, whose constants count by content; None where one calls back into Python, or where
    they hold much data."""
    programs = [program for one in traced for program in _every(one)]
    calls_back = any("callback" in step.primitive.name for program in programs for step in program.eqns)
    held = [constant for program in programs for constant in _constants(program)]
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
    kinds = tuple((aval.shape, str(aval.dtype), aval.weak_type) for aval in map(jax.typeof, leaves))
    return structure, str(structure), kinds, _placement(leaves), _settings()


def _placement(leaves: list[Any]) -> Hashable:
    """Where arrays lie; nothing of others."""
    return tuple(leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves)


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


def _constants(program: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    """The values that a program holds. Since JAX 0.11 every program may; a Jaxpr of before has names for them alone."""
    return getattr(program, "consts", ())


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


WHOLE = 2**24  # bytes up to which a memory-mapped array is read from end to end, and any array hashed by SHA-256
BLOCKS = 64  # of clients, each with a hash of its own, so that a message can name the clients that differ
ROWS = 32  # of a block that are read, evenly spaced, where a memory-mapped array is larger
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in this process


def short(*parts: str | bytes) -> str:
    """A hash of some parts, each counted with its length."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()[:16]


def of_program(program: ClosedJaxpr) -> str:
    """A hash of what a traced function computes, the same in every process: no names, no addresses."""
    return short(*description(program))


def of_array(leaf: Any) -> str:
    """A hash of an array's type, shape and content: of a large memory-mapped one, of rows evenly spaced."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    some, large = array, array.nbytes > WHOLE
    if mapped := large and isinstance(leaf, np.memmap):
        some = array[np.linspace(0, len(array) - 1, min(len(array), BLOCKS * ROWS)).astype(np.int64)]
    return short(str(array.dtype), str(array.shape), bytes_of(some, quickly=large and not mapped))


def bytes_of(array: np.ndarray, quickly: bool) -> bytes:
    """The content, in JAX's precision: NumPy's float64 are float32 unless JAX computes in float64; or, quickly, its
    CRC-32, which is not made to resist anybody and takes half the time of SHA-256."""
    if array.dtype == object:
        return ADDRESS.sub("", repr(array.tolist())).encode()
    content = np.ascontiguousarray(array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False))
    return zlib.crc32(content.reshape(-1).view(np.uint8).data).to_bytes(4) if quickly else content.tobytes()


def is_key(leaf: Any) -> bool:
    """Tell whether a leaf is a PRNG key, or several."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def description(value: Any) -> Iterator[str]:
    """A description of a program, or of a parameter of one of its operations, to be hashed."""
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
        for one in value:
            yield from description(one)
    elif callable(value) and not isinstance(value, type):
        yield type(value).__name__
    elif isinstance(value, set | frozenset):
        yield from sorted(ADDRESS.sub("", repr(one)) for one in value)
    else:
        yield ADDRESS.sub("", repr(value))


def _steps(program: Jaxpr) -> Iterator[str]:
    """A program's operations, its variables numbered as they come."""
    known: dict[Any, tuple[str, str]] = {}

    def named(v: Any) -> Iterator[str]:
        if isinstance(v, Literal):
            yield from (*description(v.val), f":{v.aval}")
        else:
            if v not in known:
                known[v] = str(len(known)), f":{v.aval}"
            yield from known[v]

    for given in (*program.constvars, *program.invars):
        yield from named(given)
    for step in program.eqns:
        yield step.primitive.name
        # The name is that of a user's function.
        yield from description({name: value for name, value in step.params.items() if name != "name"})
        for used in (*step.invars, *step.outvars):
            yield from named(used)
    for result in program.outvars:
        yield from named(result)
