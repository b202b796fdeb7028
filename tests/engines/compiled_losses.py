"""Losses that are compiled even within `jax.disable_jit()`, because they take most of the time of a test.

The engine Reference compiles each phase, except within `jax.disable_jit()`, where it compiles nothing else than these
losses. Outside of it, a loss that several phases share is traced once.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import jax

from fedbilevel.core.problem import Problem

P = TypeVar("P", bound=Problem)


def with_compiled_losses(problem: P) -> P:
    """Return the problem with each loss compiled as one program."""
    return problem.with_losses(_compiled)


@cache
def _compiled(loss: Callable[..., Any]) -> Callable[..., Any]:
    compiled = jax.jit(loss)

    @wraps(loss)
    def call(*arguments: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(*arguments)

    return call
