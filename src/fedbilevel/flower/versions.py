"""The version of Flower that is installed, whether its private names were tried, and those of messages.

Private: used without Flower promising them. `launch.private` has those of its processes; no other module imports any.
"""

from __future__ import annotations

import importlib.metadata

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.wording import missing

__all__ = ["TESTED", "be_server", "quick_pulls", "require_flower", "tested"]

TESTED = ("1.41", "1.42")
BACKOFF = 0.02  # seconds before an object that is still being uploaded is asked for again, first time
LONGEST_PULL = 7200.0  # seconds that a message's objects are waited for at most; Flower's own figure


def installed() -> str | None:
    """Return the version of the installed Flower, None where there is none. Does not import it."""
    try:
        return importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_flower() -> str:
    """Return the version of the installed Flower.

    Raises:
        ConfigurationError: there is none; the message says which command installs it.
    """
    version = installed()
    if version is None:
        raise ConfigurationError(f"this needs {missing('Flower', 'flower')}")
    return version


def tested(version: str) -> bool:
    """Tell whether `version` belongs to a release whose private names were tried."""
    return ".".join(version.split(".")[:2]) in TESTED


def be_server() -> None:
    """Let this process make messages as a ServerApp does, which Flower tells who it is."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0


def quick_pulls(longest: float) -> None:
    """Ask for an object that is still on its way again after 0.02 s, then twice that, … (Flower: 1 s), and give up the
    message whose objects have not come within `longest` seconds (Flower: 2 h, which stays the most): it holds everyone
    who waits. This is from now on, for all of this process."""
    from flwr.supercore.inflatable import inflatable_utils

    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    defaults |= {"initial_backoff": BACKOFF, "max_time": min(longest, LONGEST_PULL)}
