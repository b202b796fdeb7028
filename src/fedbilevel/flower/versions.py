"""The version of Flower that is installed, and whether its private names were tried."""

from __future__ import annotations

import importlib.metadata

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.extras import missing

TESTED = ("1.41", "1.42")


def installed() -> str | None:
    """The version of the installed Flower, None where there is none. Does not import it."""
    try:
        return importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_flower() -> str:
    """The version of the installed Flower.

    Raises:
        ConfigurationError: there is none; the message says which command installs it.
    """
    version = installed()
    if version is None:
        raise ConfigurationError(f"this needs {missing('Flower', 'flower')}")
    return version


def tested(version: str) -> bool:
    """Whether `version` belongs to a release whose private names were tried."""
    return ".".join(version.split(".")[:2]) in TESTED
