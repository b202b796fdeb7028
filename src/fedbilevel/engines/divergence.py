"""What a run that diverged had met: how far x had gone, and what the inner curvature then allowed."""

import jax
import numpy as np
import optax

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.operators import extreme_eigenvalues
from fedbilevel.oracles.population import Population

SAMPLES = 2_000  # of the inner loss, on which curvature is measured
PRODUCTS = 20  # with its Hessian
ENTRIES = 1_000_000  # of y at most: twice as many vectors as products are kept


def what_was_met(problem: Problem, clients: Clients, start: tuple[PyTree, PyTree], last: tuple[PyTree, PyTree]) -> str:
    """Say which part of x had moved most from the start to the last finite point, and which steps on y it allowed."""
    size = sum(leaf.size for leaf in jax.tree.leaves(last[1]))
    if problem.implicit_term != "inverse" or not 0 < size <= ENTRIES:
        return ""
    population = Population.of(problem, clients, SAMPLES)

    def largest(x: PyTree, y: PyTree) -> float:
        found = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, 0, iterations=PRODUCTS)
        return max(abs(found.smallest), abs(found.largest))

    before, after = largest(*start), largest(*last)
    leaves = zip(jax.tree_util.tree_leaves_with_path(start[0]), jax.tree.leaves(last[0]), strict=True)
    moved = {f"x{jax.tree_util.keystr(path)}": float(np.max(np.abs(np.subtract(b, a)))) for (path, a), b in leaves}
    name = max(moved, key=lambda one: moved[one])
    if not (after > 0 and np.isfinite([before, after, moved[name]]).all()):
        return ""
    far = float(optax.tree.norm(jax.tree.map(np.subtract, last[1], start[1])))
    bounds = "; bounds on x (project_x, in a spec run.x_bounds) keep L where it is" if after > 2 * before else ""
    return (
        f"{name} had moved by up to {moved[name]:.3g}, y by {far:.3g} in norm, and the largest curvature of the inner "
        f"loss in y was L = {after:.3g}, {before:.3g} at the start: there a step on y must be below 2/L = "
        f"{2 / after:.3g}{bounds}"
    )
