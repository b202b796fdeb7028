"""Do x and y influence the losses as the kind of problem needs it? Read off the traced losses; nothing is computed.

A derivative is there if it depends on the number that it is multiplied by: where a loss has no path to x, or none that
lets a derivative through, its derivative is a constant 0 that no factor enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum

import jax
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from fedbilevel.core.problem import Compositional, Loss, Minimax, Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import PyTree

ALONE = "x follows the outer loss's own gradient in x alone"
BLOCKED = "only where no derivative passes (stop_gradient, round, a comparison, an integer)"


class Influence(Enum):
    """How a function depends on a variable."""

    NONE = 0
    BLOCKED = 1  # by its values alone: no derivative passes
    SMOOTH = 2


def doubts(problem: Problem, x: PyTree, y: PyTree, outer_batch: PyTree, inner_batch: PyTree) -> Iterator[str]:
    """Each reason why x, or y, is not driven by the losses; batches may be shapes."""
    outer = influences(problem.outer, x, y, outer_batch)
    if isinstance(problem, SingleLevel):
        yield from _missing("x", outer[0], "the loss", "x will not move")
        return
    if isinstance(problem, Minimax):
        yield from _missing("x", outer[0], "the loss", "x will not move")
        yield from _missing("y", outer[1], "the loss", "y will not move")
        return
    inner = influences(problem.inner, x, y, inner_batch)
    if isinstance(problem, SimpleBilevel):
        if problem.subgradient is None:
            yield from _missing("x", outer[0], "the outer loss", "no minimiser of the inner one is preferred")
        yield from _missing("x", inner[0], "the inner loss", "every x minimises it")
        return
    word = "function" if isinstance(problem, Compositional) else "loss"
    stays = outer[0] is not Influence.SMOOTH
    effect = "x will not move" if stays else ALONE
    yield from _missing("x", inner[0], f"the inner {word}", effect)
    yield from _missing("y", inner[1], f"the inner {word}", f"every y minimises it, and {effect}")
    if inner == (Influence.SMOOTH, Influence.SMOOTH):
        yield from _apart(meeting(problem.inner, x, y, inner_batch), effect)
    if outer == (Influence.NONE, Influence.NONE):
        yield f"neither x nor y influences the outer {word}: x will not move"
    else:
        yield from _missing("y", outer[1], f"the outer {word}", effect)


def _missing(variable: str, influence: Influence, where: str, effect: str) -> Iterator[str]:
    if influence is Influence.NONE:
        yield f"{variable} does not influence {where}: {effect}"
    elif influence is Influence.BLOCKED:
        yield f"{variable} enters {where} {BLOCKED}: for a method that goes by derivatives {effect}"


def _apart(influence: Influence, effect: str) -> Iterator[str]:
    what = "which y minimises the inner loss"
    if influence is Influence.NONE:
        yield f"x does not influence {what}, a sum of one part with x and one with y: {effect}"
    elif influence is Influence.BLOCKED:
        yield f"x influences {what} {BLOCKED}: for a method that goes by second derivatives {effect}"


def influences(loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> tuple[Influence, Influence]:
    """How the loss depends on x and on y."""

    def value_and_slopes(x: PyTree, y: PyTree, factor: Array, batch: PyTree) -> tuple[Array, PyTree, PyTree]:
        value, back = jax.vjp(lambda x, y: loss(x, y, batch), x, y)
        return value, *back(factor)

    paths = _Paths(value_and_slopes, x, y, jax.eval_shape(loss, x, y, batch), batch)
    return (
        _influence(smooth=paths.lead(2, 1), at_all=paths.lead(0, 0)),
        _influence(smooth=paths.lead(2, 2), at_all=paths.lead(1, 0)),
    )


def meeting(loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> Influence:
    """How the loss's gradient in y depends on x."""

    def slope_and_product(x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        slope, back = jax.vjp(lambda x: jax.grad(loss, 1)(x, y, batch), x)
        return slope, back(v)

    paths = _Paths(slope_and_product, x, y, y, batch)
    return _influence(smooth=paths.lead(2, 1), at_all=paths.lead(0, 0))


def _influence(smooth: bool, at_all: bool) -> Influence:
    return Influence.SMOOTH if smooth else Influence.BLOCKED if at_all else Influence.NONE


class _Paths:
    """From which arguments of a function, traced once, there is a path to which of its results."""

    def __init__(self, function: Callable[..., tuple[PyTree, ...]], *arguments: PyTree) -> None:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self.jaxpr = closed.jaxpr
        self.arguments = [i for i, one in enumerate(arguments) for _ in jax.tree.leaves(one)]
        self.results = [i for i, one in enumerate(results) for _ in jax.tree.leaves(one)]

    def lead(self, argument: int, result: int) -> bool:
        """Whether any leaf of that result depends on any leaf of that argument."""
        _, used = dce_jaxpr(self.jaxpr, [i == result for i in self.results])
        return any(one for i, one in zip(self.arguments, used, strict=True) if i == argument)
