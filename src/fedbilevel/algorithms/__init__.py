"""Published methods, one file per paper, under one contract."""

from typing import Any

from fedbilevel.algorithms.fednest import FedNest, FedNestSGD, LFedNest
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO

ALGORITHMS: dict[str, Any] = {
    "fednest": FedNest,
    "fednest-sgd": FedNestSGD,
    "lfednest": LFedNest,
    "shrofbo": ShroFBO,
    "simfbo": SimFBO,
}
"""Every algorithm by its command-line name."""

__all__ = ["ALGORITHMS", "FedNest", "FedNestSGD", "LFedNest", "ShroFBO", "SimFBO"]
