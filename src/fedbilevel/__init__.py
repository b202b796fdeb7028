"""Federated bilevel optimization: choose x so that the model y trained on it, by many clients, is best."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.algorithms import *  # noqa: F403
    from fedbilevel.public import *  # noqa: F403

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Hand out a public name; they are loaded on first use, so that `fedbilevel --help` does not wait for JAX."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = import_module("fedbilevel.public")
    if name != "__all__" and name not in public.__all__:
        found = _elsewhere(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {found}" if found else ""))
    return getattr(public, name)


def _elsewhere(name: str) -> str:
    """The public place of a name that `fedbilevel` itself does not have, or what stands in its place; or ""."""
    for module in ("fedbilevel.errors", "fedbilevel.parts", "fedbilevel.authoring"):
        if name in import_module(module).__all__:
            return f"{module}.{name}"
    return import_module("fedbilevel.core.renames").PUBLIC.get(name, "")


class _Moved:
    """Asked last for a module: refuses one of an earlier version, and such a name in `from fedbilevel import …`.

    Python asks here for such a name, too. What `__getattr__` says of it, Python leaves out of its own ImportError.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, rest = name.partition(".")
        if package != __name__:
            return
        if now := import_module("fedbilevel.core.renames").MODULES.get(rest):
            raise ModuleNotFoundError(f"no {name}: it is now {now}")
        if now := _elsewhere(rest.removeprefix("experiments.")):
            place, _, last = name.rpartition(".")
            raise ImportError(f"cannot import name {last!r} from {place!r}: it is now {now}")


sys.meta_path.append(_Moved)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *import_module("fedbilevel.public").__all__]
