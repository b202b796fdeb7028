"""The hypergradient by dense linear algebra over every sample of every client: the yardstick of the tests."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Bilevel, Loss
from fedbilevel.core.tree import PyTree


class Implicit(NamedTuple):
    """The implicit gradient at (x, y): equal to ∇Φ(x) where y = y*(x)."""

    hypergradient: PyTree  # ∇x F − ∇²xy G·v, like x
    v: PyTree  # (∇²yy G)⁻¹ ∇y F, like y
    inner_gradient: PyTree  # ∇y G, like y: zero where y = y*(x)


def implicit_gradient(problem: Bilevel, clients: Clients, x: PyTree, y: PyTree) -> Implicit:
    """Solve ∇²yy G·v = ∇y F densely: O(dim y³) time and O(dim y·(dim x + dim y)) memory. For tests, in float64."""
    flat_x, to_x = ravel_pytree(x)
    flat_y, to_y = ravel_pytree(y)

    def total(name: str) -> Loss:
        """F or G itself, on flat vectors: the weighted mean over all clients of their losses on all samples."""
        loss, rows = getattr(problem, name), getattr(clients, name)

        def mean(a: Array, b: Array, batch: None = None) -> Array:
            values = [loss(to_x(a), to_y(b), rows.row(i)) for i in range(len(clients))]
            return jnp.dot(jnp.asarray(clients.weights), jnp.stack(values))

        return mean

    outer, inner = total("outer"), total("inner")
    grad_x, grad_y = jax.grad(outer, (0, 1))(flat_x, flat_y)
    hessian = jax.hessian(inner, 1)(flat_x, flat_y)
    cross = jax.jacfwd(jax.grad(inner, 0), 1)(flat_x, flat_y)  # (dim x, dim y)
    v = jnp.linalg.solve(hessian, grad_y)
    return Implicit(to_x(grad_x - cross @ v), to_y(v), to_y(jax.grad(inner, 1)(flat_x, flat_y)))
