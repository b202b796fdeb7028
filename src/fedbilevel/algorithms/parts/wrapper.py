"""A method that changes another one."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from operator import attrgetter
from typing import Any

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import wrapped

OWN = {"init_client", "validate"}
"""What a wrapper does not ask of the method inside: `client_state` has the one, and the other has run already."""


class Wrapper(Algorithm):
    """Every hook that a subclass does not define is that of the method inside.

    Args:
        algorithm: the method inside.
    """

    algorithm: Algorithm = wrapped(kw_only=False)

    def __init_subclass__(cls, **options: Any) -> None:
        for name, hook in {**vars(Algorithm), "phases": Algorithm.phases}.items():
            is_property = isinstance(hook, property)
            is_default = getattr_static(cls, name) is hook and name not in OWN
            if is_default and (is_property or callable(hook)) and not name.startswith("_"):
                inside = attrgetter(f"algorithm.{name}")
                setattr(cls, name, property(inside, doc=hook.__doc__) if is_property else _asked(inside, hook))
        super().__init_subclass__(**options)


def _asked(inside: Callable[[Any], Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, asked of the method inside; `help()` shows what it is."""

    def asked(self: Any, *given: Any) -> Any:
        return inside(self)(*given)

    asked.__doc__, asked.__name__ = hook.__doc__, hook.__name__
    return asked
