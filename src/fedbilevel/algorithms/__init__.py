"""Published methods, one file per paper, under one contract."""

from typing import Any

from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO

ALGORITHMS: dict[str, Any] = {"shrofbo": ShroFBO, "simfbo": SimFBO}
"""Every algorithm by its command-line name."""

__all__ = ["ALGORITHMS", "ShroFBO", "SimFBO"]
