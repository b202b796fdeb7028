"""The errors and warnings that the library raises on purpose, one class for each kind."""

from fedbilevel.core.errors import *  # noqa: F403
from fedbilevel.core.errors import __all__ as __all__
