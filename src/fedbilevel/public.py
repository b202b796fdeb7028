"""The public names of the library. Import them from `fedbilevel`."""

from fedbilevel import algorithms, errors, parts, trackers
from fedbilevel.algorithms import *  # noqa: F403
from fedbilevel.algorithms.parts.adaptive_steps import AdaptiveSteps
from fedbilevel.algorithms.parts.layers import layered
from fedbilevel.algorithms.parts.memory import Asynchronous
from fedbilevel.algorithms.parts.outer_optimizer import OuterOptimizer
from fedbilevel.algorithms.parts.wrappers import Submodels
from fedbilevel.core import projections
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.metrics import Metric
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, SimpleBilevel, SingleLevel, WholeLoss
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import XYV
from fedbilevel.diagnostics.check import check_hypergradient
from fedbilevel.diagnostics.diagnose import diagnose
from fedbilevel.diagnostics.method import check_method
from fedbilevel.diagnostics.replies import reply_norms
from fedbilevel.diagnostics.structure import check_structure
from fedbilevel.diagnostics.task import check_task
from fedbilevel.engines.engine import Cohort
from fedbilevel.engines.evaluation import PerClient
from fedbilevel.engines.history import Result, stop_when, stop_without_progress
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.machine import tune_cpu
from fedbilevel.engines.personal import personalise
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.solve import solve
from fedbilevel.engines.virtual_time import Clock
from fedbilevel.oracles.exact import inner_solution
from fedbilevel.sweeps import sweep

__all__ = [
    "XYV",
    "AdaptiveSteps",
    "Asynchronous",
    "Bilevel",
    "Clients",
    "Clock",
    "Cohort",
    "Compositional",
    "Local",
    "Metric",
    "Minimax",
    "OuterOptimizer",
    "PerClient",
    "Privacy",
    "Ragged",
    "Reference",
    "RemoteClients",
    "Result",
    "SimpleBilevel",
    "SingleLevel",
    "Structure",
    "Submodels",
    "WholeLoss",
    "check_hypergradient",
    "check_method",
    "check_structure",
    "check_task",
    "diagnose",
    "errors",
    "inner_solution",
    "layered",
    "parts",
    "personalise",
    "projections",
    "reply_norms",
    "solve",
    "stop_when",
    "stop_without_progress",
    "sweep",
    "trackers",
    "tune_cpu",
]
__all__ += algorithms.__all__
