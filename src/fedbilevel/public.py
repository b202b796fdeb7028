"""The public names of the library, which `fedbilevel` hands out; import them from there."""

from fedbilevel import errors, parts
from fedbilevel.algorithms import (
    ADBO,
    AFBO,
    FISM,
    IRG,
    IRIG,
    RABO,
    RAFBO,
    SDBO,
    AggITD,
    BiFISTA,
    FedAvg,
    FedAvgS,
    FedBiO,
    FedBiOAcc,
    FedLin,
    FedMBO,
    FedNest,
    FedNestSGD,
    LFedNest,
    ShroFBO,
    SimFBO,
)
from fedbilevel.algorithms.parts.asynchronous import Asynchronous
from fedbilevel.algorithms.parts.submodels import Submodels
from fedbilevel.core import projections
from fedbilevel.core.client import Clients, Ragged
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, SimpleBilevel, SingleLevel
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import XYV
from fedbilevel.diagnostics.check import check_hypergradient
from fedbilevel.diagnostics.diagnose import diagnose
from fedbilevel.diagnostics.structure import check_structure
from fedbilevel.engines.evaluation import PerClient
from fedbilevel.engines.local.cpu import tune_cpu
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.result import Result, stop_when, stop_without_progress
from fedbilevel.engines.solve import solve
from fedbilevel.engines.virtual_time.clock import Clock
from fedbilevel.sweeps.sweep import sweep

__all__ = [
    "ADBO",
    "AFBO",
    "FISM",
    "IRG",
    "IRIG",
    "RABO",
    "RAFBO",
    "SDBO",
    "XYV",
    "AggITD",
    "Asynchronous",
    "BiFISTA",
    "Bilevel",
    "Clients",
    "Clock",
    "Compositional",
    "FedAvg",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedLin",
    "FedMBO",
    "FedNest",
    "FedNestSGD",
    "LFedNest",
    "Local",
    "Metric",
    "Minimax",
    "PerClient",
    "Ragged",
    "Reference",
    "RemoteClients",
    "Result",
    "ShroFBO",
    "SimFBO",
    "SimpleBilevel",
    "SingleLevel",
    "Structure",
    "Submodels",
    "check_hypergradient",
    "check_structure",
    "diagnose",
    "errors",
    "parts",
    "projections",
    "solve",
    "stop_when",
    "stop_without_progress",
    "sweep",
    "tune_cpu",
]
