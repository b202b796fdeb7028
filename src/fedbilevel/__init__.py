"""Federated bilevel optimization: many clients train a model y, and x is chosen so that the trained y is best."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import fedbilevel.core.forked  # noqa: F401  (records forks from now on, and imports no JAX)

if TYPE_CHECKING:
    from fedbilevel import estimators as estimators
    from fedbilevel.algorithms import *  # noqa: F403
    from fedbilevel.public import *  # noqa: F403

__version__ = "0.2.0"


if not TYPE_CHECKING:  # type checkers read only the imports above, by which they find a misspelt name

    def __getattr__(name: str) -> Any:
        """Return a public name.

        Names are loaded on first use, so that `fedbilevel --help` does not wait for JAX.
        """
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "estimators":  # estimators is not among the public names, since it needs scikit-learn
            return import_module("fedbilevel.estimators")
        public = import_module("fedbilevel.public")
        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_elsewhere(name, public.__all__)}")
        return getattr(public, name)


def _elsewhere(name: str, here: list[str]) -> str:
    """Return words that name the module that has this name, or the nearest public name; "" if there is neither."""
    for module in ("fedbilevel.errors", "fedbilevel.parts", "fedbilevel.authoring"):
        if name in import_module(module).__all__:
            plural = f"; or did you mean {name + 's'!r}?" if name + "s" in here else ""  # Clients, and not Client
            return f", but {module} has it{plural}"
    near = import_module("fedbilevel.wording").nearest(name, here)
    return f"; did you mean {near!r}?" if near else ""


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *import_module("fedbilevel.public").__all__]
