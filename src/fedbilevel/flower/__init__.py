"""A real federation, over Flower: clients that are machines of their own. The only room that imports flwr.

    from fedbilevel.flower import Flower, Site, client_app, server_app

The names below are loaded when they are first used; without Flower the error says which command installs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.flower.apps import client_app, server_app
    from fedbilevel.flower.engine import Flower
    from fedbilevel.flower.in_process import InProcess
    from fedbilevel.flower.limits import Limits
    from fedbilevel.flower.privacy import Privacy
    from fedbilevel.flower.site import Site
    from fedbilevel.flower.terms import Terms

__all__ = ["Flower", "InProcess", "Limits", "Privacy", "Site", "Terms", "client_app", "server_app"]

_MODULES = {name: name.lower() for name in ("Limits", "Privacy", "Site", "Terms")}
_MODULES |= {"Flower": "engine", "InProcess": "in_process", "client_app": "apps", "server_app": "apps"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbilevel.flower.versions import require_flower

    require_flower()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
