"""A federated saddle point problem with a closed form: the synthetic minimax problem of FedNest.

    min over x, max over y of Σ_i p_i f_i,   f_i(x, y) = ½λ xᵀP_i x − [½ yᵀC_i y − b_iᵀy + yᵀA_i x],   x, y ∈ R^d

In the paper (Tarzanagh et al., ICML 2022, section 4.3), P_i = C_i = I, A_i = t_i I with t_i uniform on (0, 0.1), and
b_i is normal and centred over clients. Then x* = y* = 0, which even a method that ignores b finds. All clients have the
same curvature, so that methods which alternate between x and y have no bias. With `general`, A_i is dense, P_i and C_i
are diagonal, and all differ between clients. Let bars denote weighted means. Then

    y* = C̄⁻¹(b̄ − Āx*)        (λP̄ + ĀᵀC̄⁻¹Ā) x* = ĀᵀC̄⁻¹b̄.

The solution differs from 0 only if b is not centred or the weights of clients differ.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Minimax
from fedbilevel.tasks.task import Floats, Task, client_means, require_memory

COUPLING = 0.1  # the largest t_i


class SaddlePoint(NamedTuple):
    """Hold a point (x, y)."""

    x: Floats
    y: Floats


def loss(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Return f_i(x, y), a mean over the samples of the batch.

    `batch` has the diagonals of λP_i under "P", (n, d), and of C_i under "C", (n, d); "A" is (n, d, d), and "b" (n, d).
    """
    inside = 0.5 * batch["C"] @ y**2 - batch["b"] @ y + jnp.einsum("i,nij,j->n", y, batch["A"], x)
    return jnp.mean(0.5 * batch["P"] @ x**2 - inside)


def saddle(
    *,
    clients: int = 100,
    dim: int = 10,
    ridge: float = 10.0,
    spread: float = 1.0,
    centred: bool = True,
    weighted: bool = False,
    general: bool = False,
    seed: int = 0,
) -> Task:
    """Draw a saddle point problem with a known solution; each client has one sample, its coefficients.

    Args:
        clients: the number of clients, M; 1,000 in the paper.
        dim: the dimension d of x and of y.
        ridge: λ.
        spread: the standard deviation of the entries of b_i.
        centred: whether the unweighted mean over clients is subtracted from b_i, as in the paper; False: all entries of
            b_i have the expected value 1.
        weighted: whether the weights of clients differ; False: each weight is 1/M.
        general: whether A_i is dense with normal entries of variance 1/d, and the diagonals of P_i and C_i are uniform
            on (½, 3/2).
        seed: the seed of the draw and of the starting point, which is normal.
    """
    require_count("clients", clients)
    require_count("dim", dim)
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    require(0 <= spread < np.inf, "spread", spread, "at least 0 and finite")
    require_memory(dim * (dim + 3), clients=clients)
    rng = np.random.default_rng(seed)
    size = (clients, dim)
    linear = spread * rng.normal(size=size)
    linear = linear - linear.mean(0) if centred else linear + 1
    if general:
        coupling = rng.normal(size=(*size, dim)) / dim**0.5
        outer_curve, inner_curve = rng.uniform(0.5, 1.5, (2, *size))
    else:
        coupling = COUPLING * rng.uniform(size=(clients, 1, 1)) * np.eye(dim)
        outer_curve = inner_curve = np.ones(size)
    samples = {"P": ridge * outer_curve, "C": inner_curve, "A": coupling, "b": linear}
    population = Clients(
        outer={name: array[:, None] for name, array in samples.items()},
        weights=rng.uniform(0.5, 2.0, size=clients) if weighted else None,
    )
    exact = solution(population)
    metrics = {
        "x_distance": lambda x, y: jnp.sum((x - exact.x) ** 2),
        "y_distance": lambda x, y: jnp.sum((y - exact.y) ** 2),
    }
    norm = float(np.linalg.norm(exact.x))
    if weighted or not centred:  # otherwise x* = 0, and a relative error does not exist
        metrics = {"relative_error": lambda x, y: jnp.linalg.norm(x - exact.x) / norm, **metrics}
    x0, y0 = jnp.asarray(rng.normal(size=(2, dim)))
    return Task(name="saddle", problem=Minimax(loss), clients=population, x0=x0, y0=y0, metrics=metrics)


def solution(clients: Clients, weights: np.ndarray | None = None) -> SaddlePoint:
    """Return the saddle point for the clients' weights, or for `weights`, which sum to 1."""
    p, means = clients.weights if weights is None else weights, client_means(clients)
    outer_curve, inner_curve, coupling, linear = (np.tensordot(p, means[name], 1) for name in "PCAb")
    scaled = coupling.T / inner_curve  # AᵀC⁻¹
    x = np.linalg.solve(np.diag(outer_curve) + scaled @ coupling, scaled @ linear)
    return SaddlePoint(x, (linear - coupling @ x) / inner_curve)
