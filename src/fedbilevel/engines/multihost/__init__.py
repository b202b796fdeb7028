"""Several processes that run one simulation together."""

from fedbilevel.engines.multihost.group import LostProcess, ProcessGroup, current_group
from fedbilevel.engines.multihost.joining import join

__all__ = ["LostProcess", "ProcessGroup", "current_group", "join"]
