"""Compare errors by their fields, so that a test does not fail if only the words of a message change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedbilevel.errors import ConfigurationError

ANY: Any = object()


@contextmanager
def refuses(
    path: str, got: Any = ANY, fact: str = "", near: str = "", where: str = ""
) -> Iterator[pytest.ExceptionInfo]:
    """Expect a ConfigurationError about one field, as a context manager.

    Args:
        path: the field; "" for an error without fields, which has only a text.
        got: the value that the error reports; ANY, the default, accepts any value.
        fact: a text that the error's description of what is allowed must contain, or its text if it has no fields. It
            should be a bound, the name of another field or an allowed name, and not a wording.
        near: the name that the error suggests.
        where: the place with which the message begins, such as a file.

    Yields:
        What `pytest.raises` yields: after the block, its `value` is the error.
    """
    with pytest.raises(ConfigurationError) as error:
        yield error
    (wrong,) = error.value.wrong
    assert (wrong.where, wrong.path, wrong.near) == (where, path, near)
    assert wrong.allowed != "" if path else fact != ""
    assert fact in str(wrong.allowed if path else wrong)
    assert got is ANY or (type(wrong.got), repr(wrong.got)) == (type(got), repr(got)), wrong.got


@contextmanager
def raises_with(kind: type[Exception], fact: str = "", **fields: Any) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error by its class and its fields, as a context manager.

    Args:
        kind: the class.
        fact: a text that the message must contain: a name or a number that no field has, and not a wording.
        fields: names of attributes, and their values.

    Yields:
        What `pytest.raises` yields: after the block, its `value` is the error.
    """
    with pytest.raises(kind) as error:
        yield error
    assert {name: getattr(error.value, name) for name in fields} == fields
    assert fact in str(error.value)


@contextmanager
def warns_with(kind: type[Warning], fact: str = "", **fields: Any) -> Iterator[None]:
    """Expect a warning by its class and its fields, as `raises_with` expects an error."""
    with pytest.warns(kind) as caught:
        yield
    found = [one.message for one in caught if isinstance(one.message, kind)]
    seen = [({name: getattr(one, name, None) for name in fields}, str(one)) for one in found]
    assert any(of == fields and fact in said for of, said in seen), seen


def codes(error: pytest.ExceptionInfo) -> dict[int | None, Any]:
    """Return client -> the kind of the refusal that an ExchangeError reports for this client."""
    return {why.client: why.code for why in error.value.refusals}
