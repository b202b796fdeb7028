"""What users write as functions: refused where they do not take what they will be given; explained where they fail."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from fedbilevel.core.errors import ConfigurationError, FedbilevelError, require
from fedbilevel.core.tree import PyTree, shapes

MISUSED = (TypeError, ValueError, LookupError, AttributeError)
"""What a function may raise because its arguments are not those that it was written for."""


def require_function(field: str, got: object, arguments: str, otherwise: str = "") -> None:
    """Raise ConfigurationError unless `got` can be called with these positional arguments, e.g. "x, y, batch"."""
    allowed = f"a function ({arguments}){otherwise}"
    require(callable(got), field, got, allowed)
    assert callable(got)
    try:
        signature = inspect.signature(got)
    except (TypeError, ValueError):  # some that are written in C have none
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError:
        raise ConfigurationError(f"{field} takes {signature}; it must be {allowed}") from None


@contextmanager
def explained(what: str, **arguments: PyTree) -> Iterator[None]:
    """Say of a user's function that fails what it was given: the shapes of `arguments`, by name."""
    try:
        yield
    except FedbilevelError:
        raise
    except MISUSED as error:
        given = "; ".join(f"{name}: {shapes(tree)}" for name, tree in arguments.items())
        raise ConfigurationError(f"{what} fails ({type(error).__name__}: {error}); it was given {given}") from error
