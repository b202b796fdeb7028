"""Hashes of arrays, and of what traced functions compute."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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
    array = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
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


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def description(value: Any) -> Iterator[str]:
    """A description of a program, or of a parameter of one of its operations, to be hashed."""
    if isinstance(value, ClosedJaxpr):
        yield from (of_array(constant) for constant in value.consts)
        yield from description(value.jaxpr)
    elif isinstance(value, Jaxpr):
        yield from _steps(value)
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
