"""Annotate fields of methods that accept more types than they hold, in a way that type checkers understand.

`SimFBO(client_lr=0.1)` accepts a number, and `method.client_lr` is an XYV of three step sizes. For type checkers such
an annotation is a descriptor: they take the type of the argument from `__set__`, and the type of the attribute from
`__get__`. At run time the annotation is the type that the field holds, by which specs and messages are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from fedbilevel.core.tree import XYV

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from jax import Array

    Held = TypeVar("Held")
    Accepted = TypeVar("Accepted", contravariant=True)

    class Converted(Generic[Held, Accepted]):
        """Describe a field that holds one type, and for which another type is accepted."""

        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type) -> Held: ...
        def __get__(self, instance: object, owner: type) -> Any: ...
        def __set__(self, instance: object, value: Accepted) -> None: ...

    Constant = float | np.number[Any] | Array
    Function = Callable[..., Any]
    """A schedule: a function of the round, or of the round and the inner round."""

    Number = Converted[float, Constant | Function]
    Step = Converted[float, Constant | Function | None]
    StepByRound = Converted[float | tuple[float, ...], Constant | Function | Sequence[Constant | Function] | None]
    StepSizes = Converted[XYV, XYV | Mapping[str, Any] | Constant | Function | None]
    Count = Converted[int, int | Function]
else:
    Number = float
    """A number, or a schedule of numbers."""

    Step = float
    """A step size, or a schedule of step sizes; None if the step size adapts."""

    StepByRound = float | tuple[float, ...]
    """A step size; several, one for each inner round; or a function of the round and the inner round."""

    StepSizes = XYV
    """The step sizes of x, y and v; a single number or schedule is used for all three."""

    Count = int
    """A positive integer, or a function of the round that returns a positive integer."""
