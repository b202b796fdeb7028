"""Compute the hypergradient of given clients by the implicit function theorem, for comparison with closed forms."""

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.exact import ExactHypergradient, dense_implicit
from fedbilevel.oracles.population import Population


def implicit_gradient(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> ExactHypergradient:
    """Solve ∇²yy G·v = ∇y F densely, over all samples."""
    return dense_implicit(Population.of(problem, clients), x, y)
