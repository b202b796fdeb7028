"""Run a real federation over Flower, with clients on their own machines. Only this package imports flwr.

    from fedbilevel.flower import Flower, Site, client_app, server_app

These names are loaded when they are first used. If Flower is not installed, the error says which command installs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.flower.client.limits import Limits
    from fedbilevel.flower.client.site import Site, client_app
    from fedbilevel.flower.launch.in_process import InProcess
    from fedbilevel.flower.server.engine import Flower, server_app
    from fedbilevel.flower.server.terms import Terms

__all__ = ["Flower", "InProcess", "Limits", "Site", "Terms", "client_app", "server_app"]

_MODULES = {
    "Flower": "server.engine",
    "InProcess": "launch.in_process",
    "Limits": "client.limits",
    "Site": "client.site",
    "Terms": "server.terms",
    "client_app": "client.site",
    "server_app": "server.engine",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fedbilevel.flower.versions import require_flower

    require_flower()
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
