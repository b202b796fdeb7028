"""Published methods, one file per paper, under one contract: a list that `make catalogue` writes."""

from fedbilevel.algorithms.adbo import ADBO, SDBO
from fedbilevel.algorithms.afbo import AFBO
from fedbilevel.algorithms.aggitd import AggITD
from fedbilevel.algorithms.corrected import CorrectedFBO
from fedbilevel.algorithms.f2sa import F2SA
from fedbilevel.algorithms.fedavg_s import FedAvgS
from fedbilevel.algorithms.fedbio import FedBiO, FedBiOAcc
from fedbilevel.algorithms.fedex import FedEx
from fedbilevel.algorithms.fedmbo import FedMBO
from fedbilevel.algorithms.fednest import FedNest, FedNestSGD, LFedNest
from fedbilevel.algorithms.fism import FISM, IRIG
from fedbilevel.algorithms.meha import MEHA
from fedbilevel.algorithms.rabo import RABO, RAFBO
from fedbilevel.algorithms.regularized_gradient import IRG, BiFISTA
from fedbilevel.algorithms.simfbo import ShroFBO, SimFBO
from fedbilevel.algorithms.single_level import FedAvg, FedLin
from fedbilevel.core.algorithm import ALGORITHMS as ALGORITHMS

__all__ = [
    "ADBO",
    "AFBO",
    "F2SA",
    "FISM",
    "IRG",
    "IRIG",
    "MEHA",
    "RABO",
    "RAFBO",
    "SDBO",
    "AggITD",
    "BiFISTA",
    "CorrectedFBO",
    "FedAvg",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedEx",
    "FedLin",
    "FedMBO",
    "FedNest",
    "FedNestSGD",
    "LFedNest",
    "ShroFBO",
    "SimFBO",
]
