"""Check the installed version of Flower, and adjust when Flower asks again for a message, and when it gives up.

The adjustments use private names of Flower, which another version may not have. The private names that concern Flower's
processes are used in the package `fedbilevel.flower.launch`.
"""

from __future__ import annotations

import importlib.metadata

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.wording import missing

__all__ = ["TESTED", "be_server", "quick_pulls", "require_flower", "tested"]

TESTED = ("1.41", "1.42")
BACKOFF = 0.02  # the seconds before the first repeated request for an object that is still being uploaded
LONGEST_PULL = 7200.0  # the largest number of seconds to wait for a message's objects; Flower's default


def installed() -> str | None:
    """Return the version of the installed Flower, or None if it is not installed, without importing it."""
    try:
        return importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_flower() -> str:
    """Return the version of the installed Flower.

    Raises:
        ConfigurationError: Flower is not installed; the message says which command installs it.
    """
    version = installed()
    if version is None:
        raise ConfigurationError(f"this needs {missing('Flower', 'flower')}")
    return version


def tested(version: str) -> bool:
    """Return whether this library was tested with the private names of this version of Flower."""
    return ".".join(version.split(".")[:2]) in TESTED


def be_server() -> None:
    """Give this process the identity of a ServerApp.

    A process needs an identity to create messages, and Flower sets it only in the processes that Flower starts.
    """
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0


def quick_pulls(longest: float) -> None:
    """Make this process ask sooner for the objects of messages, and give up incomplete messages sooner.

    An object that is still being uploaded is requested again after 0.02 s, then after twice that time, and so on.
    Flower itself begins with 1 s. If a message is incomplete after `longest` seconds, or after 2 h if `longest` is
    larger, it is given up, because all other messages wait for it. Flower itself waits 2 h.
    """
    from flwr.supercore.inflatable import inflatable_utils

    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    defaults |= {"initial_backoff": BACKOFF, "max_time": min(longest, LONGEST_PULL)}
