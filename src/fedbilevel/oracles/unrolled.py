"""The hypergradient by differentiating the training itself: iterative differentiation.

Domke, "Generic methods for optimization-based modeling", AISTATS 2012; Maclaurin, Duvenaud, Adams, "Gradient-based
hyperparameter optimization through reversible learning", ICML 2015.
"""

from functools import partial
from typing import NamedTuple

import jax
from jax import Array, lax

from fedbilevel.core.errors import require_count
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.population import Population


class Unrolled(NamedTuple):
    """What N steps of gradient descent on G made of y, and how F depends on x through them."""

    hypergradient: PyTree  # dF(x, y_N(x))/dx, like x
    y: PyTree  # y_N


@partial(jax.jit, static_argnames="steps")
def unrolled_gradient(population: Population, x: PyTree, y: PyTree, *, steps: int, lr: float | Array) -> Unrolled:
    """d/dx F(x, y_N(x)) with y_0 = y fixed and y_{n+1} = y_n − lr·∇y G(x, y_n), by reverse mode.

    Tends to ∇Φ(x) like (1 − lr·μ)^N for lr < 2/L. At y = y*(x) it equals the truncated Neumann series of N terms.
    Memory: N copies of y; the rest is computed anew on the way back.
    """
    require_count("unrolled steps", steps)

    def step(x: PyTree, y: PyTree) -> PyTree:
        return jax.tree.map(lambda a, g: a - lr * g, y, population.inner.gradients(x, y)[1])

    def train(x: PyTree) -> PyTree:
        return lax.scan(lambda y, _: (jax.checkpoint(step)(x, y), None), y, None, length=steps)[0]

    end, pull_back = jax.vjp(train, x)
    f_x, f_y = population.outer.gradients(x, end)
    return Unrolled(jax.tree.map(lambda a, b: a + b, f_x, pull_back(f_y)[0]), end)
