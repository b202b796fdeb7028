"""The names for writing a method of your own, and the types of results.

A method is a subclass of `Algorithm`. Functions such as `static` and `positive` make its fields, and `phase` marks the
methods that clients run; see docs/how-to/own-method.md. To run published methods, `fedbilevel` alone is enough.
"""

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.parts.hypergradients import Implicit, LocalImplicit
from fedbilevel.algorithms.parts.layers import Asked, Layer
from fedbilevel.algorithms.parts.local_steps import LocalDirections, LocalOptimizer, Plain, descend
from fedbilevel.algorithms.parts.memory import Compressor
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import config, counts, fraction, positive, positive_integer, static, step_sizes
from fedbilevel.core.facts import Allows, Asks, Facts, Findings, No, OwnParts
from fedbilevel.core.fed import Coded, Fed, Public, PublicRange, Reply, Request, Total, Withheld
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import XY, XYV
from fedbilevel.diagnostics.check import HypergradientReport
from fedbilevel.diagnostics.diagnose import Diagnosis
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import History
from fedbilevel.oracles.operators import conjugate_gradient
from fedbilevel.oracles.products import cross_v, directions, hess_v, hypergradient

__all__ = [
    "ALGORITHMS",
    "XY",
    "XYV",
    "Algorithm",
    "Allows",
    "Asked",
    "Asks",
    "Client",
    "Coded",
    "Compressor",
    "Diagnosis",
    "Facts",
    "Fed",
    "Findings",
    "History",
    "HypergradientReport",
    "Implicit",
    "Layer",
    "Ledger",
    "LocalDirections",
    "LocalImplicit",
    "LocalOptimizer",
    "No",
    "OwnParts",
    "Plain",
    "Public",
    "PublicRange",
    "Reply",
    "Request",
    "Total",
    "UnitPolicy",
    "Withheld",
    "config",
    "conjugate_gradient",
    "counts",
    "cross_v",
    "descend",
    "directions",
    "fraction",
    "hess_v",
    "hypergradient",
    "phase",
    "positive",
    "positive_integer",
    "static",
    "step_sizes",
]
