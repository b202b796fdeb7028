"""Whether a Neumann step suits the inner Hessian, seen before the first round."""

import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NumericalWarning, require
from fedbilevel.core.kept import compiled
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.lanczos import extreme_eigenvalues
from fedbilevel.oracles.population import Population, Total, hess_v

SAMPLES_FOR_CHECK, CLIENTS_FOR_CHECK = 1024, 8


def check_neumann_step(
    field: str,
    step: Any,
    problem: Problem,
    clients: Clients,
    x: PyTree,
    y: PyTree,
    local: bool = False,
    batch_size: int | None = None,
) -> None:
    """Refuse a step of 2/ℓ or more, ℓ being the largest eigenvalue of ∇²yy G, or, if `local`, of any client's ∇²yy g_i.

    With a `batch_size` it is that of one drawn batch of each client: where a batch serves all products, its Hessian is
    what they are with. Others may have more, as those that draw a sample more often. Warn where an eigenvalue is
    negative.

    ℓ is taken at the start of a run, by a few Lanczos steps on at most SAMPLES_FOR_CHECK samples of CLIENTS_FOR_CHECK
    clients; x and y move on, and it with them.
    """
    whose = "the"
    if local:
        whose = "a client's own" if batch_size is None else "a batch's own"
        few = min(CLIENTS_FOR_CHECK, -(-SAMPLES_FOR_CHECK // (batch_size or 1)))
        ids = np.unique(np.linspace(0, len(clients) - 1, few).astype(int)).tolist()
        if batch_size is None:
            several = Population.each(problem, clients, ids, SAMPLES_FOR_CHECK).inner
        else:
            several = Population.batches(problem, clients, ids, batch_size, seed=0).inner
        product = compiled(_hess_v, several, np.int32(0), x, y, y)
        operators = [partial(product, several, np.int32(k), x, y) for k in range(len(ids))]
    else:
        whole = Population.of(problem, clients, SAMPLES_FOR_CHECK).inner
        operators = [partial(compiled(hess_v, whole, x, y, y), whole, x, y)]
    ends = [extreme_eigenvalues(operator, y, seed=0, iterations=8) for operator in operators]
    largest, smallest = max(end.largest for end in ends), min(end.smallest for end in ends)
    if smallest < -1e-3 * abs(largest):
        text = (
            f"at the start {whose} inner Hessian has a negative eigenvalue, at most {smallest:.3g}: y*(x) and v are not"
        )
        warnings.warn(NumericalWarning(f"{text} defined there, and the hypergradient may point anywhere"), stacklevel=4)
    if largest > 0:
        allowed = (
            f"below 2/ℓ = {2 / largest:.4g}: at the start {whose} inner Hessian's largest eigenvalue is about ℓ = "
        )
        require(float(step) * largest < 2, field, float(step), f"{allowed}{largest:.4g}")


def _hess_v(several: Total, k: Array, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """The product with the Hessian in y of one of several losses, whose leaves are stacked."""
    return hess_v(jax.tree.map(lambda leaf: leaf[k], several), x, y, v)
