"""Compare a refusal by the fields of the error, so that a test does not fail if only its words change."""

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
