"""When do two functions compute the same? Where their code is the same, and all that it reads outside its arguments.

A compiled program may serve a later run only if tracing its functions anew would give the same program. What a function
reads is compared by content: variables of the functions and modules around it, default values, attributes of instances.
Whatever cannot be compared so has no key, and the function is traced anew.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import sys
import types
import weakref
from collections.abc import Hashable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), np.generic, np.dtype, slice, range)
HASHED_WHOLE = 2**26  # bytes; of larger arrays every so many-th entry is hashed, and they must be the same object
MOST = 4000  # objects that are looked at


class Unreadable(Exception):
    """What a function reads cannot be compared by content."""


class Same:
    """An object as a part of a key: equal to itself alone, while it lives; it is not kept alive."""

    def __init__(self, of: object) -> None:
        try:
            self.of = weakref.ref(of)
        except TypeError:
            raise Unreadable(f"a {type(of).__name__}") from None
        self.id = id(of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of() is not None and self.of() is other.of()

    def __hash__(self) -> int:
        return self.id


def code_key(*read: object) -> Hashable | None:
    """A key that is equal for functions, or objects that they read, of equal content; None where that is not known.

    Numbers, texts, arrays, containers, functions and instances of ordinary classes have content. Nothing that a key is
    made of is kept alive by it.
    """
    try:
        reader = _Reader()
        return tuple(reader.key(one) for one in read)
    except (Unreadable, RecursionError):
        return None


def class_key(cls: type) -> Hashable | None:
    """The same of the methods of a class and of its bases, as far as these are not of installed packages."""
    own = [base for base in cls.__mro__ if not _installed(base.__module__)]
    members = [(name, value) for base in own for name, value in sorted(vars(base).items()) if _is_code(value)]
    return code_key(cls, members)


class _Reader:
    """Goes through all that functions read, each object once."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.kept: list[object] = []  # alive while keys are made, so that no id is given twice

    def key(self, value: Any) -> Hashable:
        if isinstance(value, PLAIN):
            return type(value), repr(value) if isinstance(value, float | complex | slice | np.generic) else value
        if id(value) in self.seen:
            return "again", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        if len(self.seen) > MOST:
            raise Unreadable(f"more than {MOST} objects")
        return self.content(value)

    def content(self, value: Any) -> Hashable:
        if isinstance(value, np.ndarray | jax.Array):
            return _of_array(value)
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, types.BuiltinFunctionType | np.ufunc):
            bound = getattr(value, "__self__", None)
            own = () if bound is None or isinstance(bound, types.ModuleType) else self.key(bound)
            return "built in", getattr(value, "__module__", None), value.__name__, own
        if isinstance(value, type):
            return Same(value)
        if isinstance(value, Enum):
            return Same(type(value)), value.name
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return "method", self.key(value.__func__), self.key(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self.key(value.func), self.key(value.args), self.key(value.keywords)
        if isinstance(value, tuple | list):
            return Same(type(value)), tuple(map(self.key, value))
        if isinstance(value, dict):
            return Same(type(value)), tuple((self.key(name), self.key(one)) for name, one in value.items())
        if isinstance(value, set | frozenset):
            return Same(type(value)), frozenset(map(self.key, value))
        if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
            inner = [getattr(value, name, None) for name in ("fget", "__func__", "func")]
            return Same(type(value)), tuple(map(self.key, inner))
        if callable(value) and hasattr(value, "__wrapped__"):  # jax.jit, jax.custom_jvp, functools.cache and the like
            return Same(type(value)), self.key(value.__wrapped__), self.attributes(value)
        return Same(type(value)), self.attributes(value)

    def attributes(self, value: Any) -> Hashable:
        if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return tuple((name, self.key(getattr(value, name))) for name in names if hasattr(value, name))
        state = getattr(value, "__dict__", None)
        if not isinstance(state, dict):
            raise Unreadable(f"a {type(value).__name__}")
        return self.key({name: one for name, one in state.items() if name != "__wrapped__"})

    def function(self, function: types.FunctionType) -> Hashable:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
        outside = () if _installed(function.__module__) else tuple(self.read_outside(function))
        given = function.__defaults__, function.__kwdefaults__
        return function.__code__, tuple(map(self.key, cells)), self.key(given), outside

    def read_outside(self, function: types.FunctionType) -> Iterator[Hashable]:
        """The variables of its module that a function names, and, of other modules there, their attributes."""
        names = list(dict.fromkeys(_names(function.__code__)))
        for name in names:
            if name in function.__globals__:
                yield from self.named(name, function.__globals__[name], names)

    def named(self, name: str, value: Any, names: list[str]) -> Iterator[Hashable]:
        if not isinstance(value, types.ModuleType):
            yield name, self.key(value)
        elif not _installed(value.__name__) and id(value) not in self.seen:
            self.seen[id(value)] = len(self.seen)
            for inner in names:
                if inner in vars(value):
                    yield from self.named(f"{name}.{inner}", vars(value)[inner], names)


def _of_array(array: Any) -> Hashable:
    if isinstance(array, jax.core.Tracer):
        raise Unreadable("a value that JAX traces")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return "key", str(array.dtype), _of_array(jax.random.key_data(array))
    if array.dtype.hasobject or (isinstance(array, jax.Array) and not array.is_fully_addressable):
        raise Unreadable("an array of objects, or of other processes")
    value = np.asarray(array)
    weak = getattr(array, "weak_type", False)
    if value.nbytes <= HASHED_WHOLE:
        same: Hashable = None
    else:
        same, value = Same(array), value.reshape(-1)[:: -(-value.nbytes // HASHED_WHOLE)]
    digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).digest()
    return type(array).__name__, array.shape, str(array.dtype), weak, digest, same


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_code(value: object) -> bool:
    kinds = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property)
    return isinstance(value, kinds)


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether a module is of an installed package or of Python itself, whose variables nobody changes."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    if root in (*sys.stdlib_module_names, __name__.partition(".")[0]):
        return True
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is not None and bool({"site-packages", "dist-packages"} & set(Path(file).parts))
