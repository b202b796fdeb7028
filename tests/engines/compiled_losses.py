"""Losses that are compiled even in the engine Reference, because they take most of the time of a test.

Otherwise Reference compiles nothing.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import jax

from fedbilevel.core.problem import Problem

P = TypeVar("P", bound=Problem)


def with_compiled_losses(problem: P) -> P:
    """Return the problem with each loss compiled as one program.

    Phases, and loops over clients and steps, still run in Python.
    """
    return problem.with_losses(_compiled)


@cache
def _compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
    compiled = jax.jit(loss)

    @wraps(loss)
    def call(*arguments: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*arguments)

    return call
