"""Parts, which are values of methods' fields, and layers, which change the exchanges of any method.

Parts are inner rounds, hypergradients, linear solvers and local steps. The last line has a layer:

    FedNest(inner=parts.SVRG(rounds=3), hypergradient=parts.Implicit(solver=parts.CG(max_steps=20)), outer_lr=0.1)
    layered(SimFBO(server_lr=0.05, client_lr=0.05), parts.TopK(share=0.1))
"""

from fedbilevel.algorithms.adbo import Lagrangian, LinearizedADMM
from fedbilevel.algorithms.afbo import MeanGradient, SystemSteps
from fedbilevel.algorithms.fednest import SVRG
from fedbilevel.algorithms.parts.hypergradients import Exact, Implicit, LocalImplicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import CG, Neumann
from fedbilevel.algorithms.parts.local_steps import Anchored, Mixed, Momentum, Plain, Proximal
from fedbilevel.algorithms.parts.robust import CentredClipping, Krum, Median, TrimmedMean
from fedbilevel.algorithms.parts.top_k import TopK
from fedbilevel.algorithms.rabo import Coordinates, PrintedSlopes
from fedbilevel.oracles.differences import Differences

__all__ = [
    "CG",
    "SVRG",
    "Anchored",
    "CentredClipping",
    "Coordinates",
    "Differences",
    "Exact",
    "Implicit",
    "Krum",
    "Lagrangian",
    "LinearizedADMM",
    "LocalImplicit",
    "LocalSGD",
    "MeanGradient",
    "Median",
    "Mixed",
    "Momentum",
    "Neumann",
    "Plain",
    "PrintedSlopes",
    "Proximal",
    "SystemSteps",
    "TopK",
    "TrimmedMean",
]
