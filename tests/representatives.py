"""Mark parameters of a test as slow if they repeat, for further methods or settings, what the other parameters show.

`make test-slow` runs them. Before a parameter is marked as slow, scripts/mistakes.py has to show that the other
parameters find the same mistakes.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(*quick: Any, of: Iterable[Any]) -> list[Any]:
    """Return the parameters `of` a test, in their order; all except the quick ones are marked as slow.

    A tuple contains the values of several arguments of the test.
    """
    every = list(of)
    if unknown := [one for one in quick if one not in every]:
        raise ValueError(f"no parameter of the test: {unknown}")
    values = [one if isinstance(one, tuple) else (one,) for one in every]
    marks = [() if one in quick else (pytest.mark.slow,) for one in every]
    return [pytest.param(*several, marks=mark) for several, mark in zip(values, marks, strict=True)]
