"""The public names of the library, which `fedbilevel` hands out; import them from there."""

from fedbilevel.algorithms import (
    ADBO,
    AFBO,
    ALGORITHMS,
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
from fedbilevel.algorithms.parts.local_optimizers import Momentum, Plain, Proximal
from fedbilevel.algorithms.parts.submodels import Submodels
from fedbilevel.core import projections
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.answers import Public, Withheld
from fedbilevel.core.client import Client, Clients, Ragged
from fedbilevel.core.config import fraction, positive, static, steps
from fedbilevel.core.errors import (
    AbsenceWarning,
    CapacityWarning,
    CheckpointError,
    CheckpointWarning,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    InfluenceWarning,
    NonFiniteError,
    NumericalError,
    NumericalWarning,
)
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, SimpleBilevel, SingleLevel
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import XYV
from fedbilevel.diagnostics.check import HypergradientReport, check_hypergradient
from fedbilevel.diagnostics.diagnose import Diagnosis, diagnose
from fedbilevel.diagnostics.structure import check_structure
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.evaluation import PerClient
from fedbilevel.engines.history import History
from fedbilevel.engines.local.cpu import tune_cpu
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.result import Result, load_result, stop_when, stop_without_progress
from fedbilevel.engines.solve import solve
from fedbilevel.engines.virtual_time.clock import Clock

__all__ = [
    "ADBO",
    "AFBO",
    "ALGORITHMS",
    "FISM",
    "IRG",
    "IRIG",
    "RABO",
    "RAFBO",
    "SDBO",
    "XYV",
    "AbsenceWarning",
    "AggITD",
    "Algorithm",
    "Asynchronous",
    "BiFISTA",
    "Bilevel",
    "CapacityWarning",
    "CheckpointError",
    "CheckpointWarning",
    "Client",
    "Clients",
    "Clock",
    "Compositional",
    "ConfigurationError",
    "Diagnosis",
    "ExchangeError",
    "Fed",
    "FedAvg",
    "FedAvgS",
    "FedBiO",
    "FedBiOAcc",
    "FedLin",
    "FedMBO",
    "FedNest",
    "FedNestSGD",
    "FedbilevelError",
    "History",
    "HypergradientReport",
    "InfluenceWarning",
    "LFedNest",
    "Ledger",
    "Local",
    "Metric",
    "Minimax",
    "Momentum",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
    "PerClient",
    "Plain",
    "Proximal",
    "Public",
    "Ragged",
    "Reference",
    "RemoteClients",
    "Reply",
    "Result",
    "ShroFBO",
    "SimFBO",
    "SimpleBilevel",
    "SingleLevel",
    "Structure",
    "Submodels",
    "Withheld",
    "check_hypergradient",
    "check_structure",
    "diagnose",
    "fraction",
    "load_result",
    "phase",
    "positive",
    "projections",
    "solve",
    "static",
    "steps",
    "stop_when",
    "stop_without_progress",
    "tune_cpu",
]
