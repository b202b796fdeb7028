"""Which parameters of a test run each time, where the others repeat for further methods or settings what these show.

`make test-slow` runs the others. Before a parameter is made slow, scripts/mistakes.py has to show that those that stay
find the mistakes that it finds.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(*quick: Any, of: Iterable[Any]) -> list[Any]:
    """The parameters `of` a test, in their order; all but the quick ones are marked as slow.

    A tuple is the values of several arguments of the test.
    """
    every = list(of)
    if unknown := [one for one in quick if one not in every]:
        raise ValueError(f"no parameter of the test: {unknown}")
    values = [one if isinstance(one, tuple) else (one,) for one in every]
    marks = [() if one in quick else (pytest.mark.slow,) for one in every]
    return [pytest.param(*several, marks=mark) for several, mark in zip(values, marks, strict=True)]
