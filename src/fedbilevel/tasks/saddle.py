"""A federated saddle point problem with a closed form: the synthetic minimax problem of FedNest.

    min over x, max over y of Σ_i p_i f_i,   f_i(x, y) = ½λ xᵀP_i x − [½ yᵀC_i y − b_iᵀy + yᵀA_i x],   x, y ∈ R^d

In the paper (Tarzanagh et al., ICML 2022, section 4.3), P_i = C_i = I, A_i = t_i I with t_i uniform on (0, 0.1), and
b_i is normal and centred over clients. Then x* = y* = 0, so that even a method that ignores b finds the solution. All
clients have the same curvature, so that methods that alternate between x and y have no bias. With `general`, A_i is
dense, P_i and C_i are diagonal, and all three differ between clients. Let bars denote weighted means over clients. Then

    y* = C̄⁻¹(b̄ − Āx*)        (λP̄ + ĀᵀC̄⁻¹Ā) x* = ĀᵀC̄⁻¹b̄.

The solution differs from 0 only if b is not centred, if the weights of clients differ, or if a client's samples have
different b; then b_i is the mean over the client's samples.

Metrics: `squared_gradient` is ‖∇Φ(x)‖², where Φ(x) is the maximum over y of the weighted sum, and ∇Φ(x) = (λP̄ +
ĀᵀC̄⁻¹Ā)(x − x*).
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
    """A point (x, y)."""

    x: Floats
    y: Floats


def loss(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Return f_i(x, y), a mean over the samples of the batch.

    `batch` has the diagonals of λP_i under "P" and those of C_i under "C", both of shape (n, d). "A" has the shape
    (n, d, d), and "b" the shape (n, d).
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
    samples: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> Task:
    """Draw a saddle point problem with a known solution.

    In the paper each client has one sample, which contains its coefficients.

    Args:
        clients: the number of clients, M; 1,000 in the paper.
        dim: the dimension d of x and of y.
        ridge: λ, the factor of the term ½ xᵀP_i x.
        spread: the standard deviation of the entries of b_i.
        centred: whether the unweighted mean over clients is subtracted from b_i, as in the paper; False: all entries of
            b_i have the expected value 1.
        weighted: whether the weights of clients differ; False: each weight is 1/M.
        general: whether A_i is dense with normal entries of variance 1/d, and the diagonals of P_i and C_i are uniform
            on (½, 3/2).
        samples: the number of samples of each client.
        noise: the standard deviation of the entries of a sample's b around its client's b_i.
        seed: the seed of the draw and of the starting point, which is normal.
    """
    require_count("clients", clients)
    require_count("dim", dim)
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    require(0 <= spread < np.inf, "spread", spread, "at least 0 and finite")
    require_count("samples", samples)
    require(0 <= noise < np.inf, "noise", noise, "at least 0 and finite")
    require_memory(samples * dim * (dim + 3), clients=clients)
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
    weights = rng.uniform(0.5, 2.0, size=clients) if weighted else None
    x0, y0 = jnp.asarray(rng.normal(size=(2, dim)))
    coefficients = {"P": ridge * outer_curve, "C": inner_curve, "A": coupling, "b": linear}
    rows = {name: np.repeat(array[:, None], samples, axis=1) for name, array in coefficients.items()}
    rows["b"] = rows["b"] + noise * rng.normal(size=rows["b"].shape)
    population = Clients(outer=rows, weights=weights)
    exact, hessian = solution(population), hessian_at_best_y(*mean_coefficients(population)[:3])
    metrics = {
        "x_distance": lambda x, y: jnp.sum((x - exact.x) ** 2),
        "y_distance": lambda x, y: jnp.sum((y - exact.y) ** 2),
        "squared_gradient": lambda x, y: jnp.sum((hessian @ (x - exact.x)) ** 2),
    }
    norm = float(np.linalg.norm(exact.x))
    if weighted or not centred or noise:  # otherwise x* = 0, and the relative error is not defined
        metrics = {"relative_error": lambda x, y: jnp.linalg.norm(x - exact.x) / norm, **metrics}
    return Task(name="saddle", problem=Minimax(loss), clients=population, x0=x0, y0=y0, metrics=metrics)


def solution(clients: Clients, weights: np.ndarray | None = None) -> SaddlePoint:
    """Return the saddle point for the clients' weights, or for `weights`, which sum to 1."""
    outer_curve, inner_curve, coupling, linear = mean_coefficients(clients, weights)
    x = np.linalg.solve(hessian_at_best_y(outer_curve, inner_curve, coupling), (coupling.T / inner_curve) @ linear)
    return SaddlePoint(x, (linear - coupling @ x) / inner_curve)


def mean_coefficients(clients: Clients, weights: np.ndarray | None = None) -> list[Floats]:
    """Return the weighted means over clients of λP, C, A and b."""
    p, means = clients.weights if weights is None else weights, client_means(clients)
    return [np.tensordot(p, means[name], 1) for name in "PCAb"]


def hessian_at_best_y(outer_curve: Floats, inner_curve: Floats, coupling: Floats) -> Floats:
    """Return the Hessian of Φ, λP̄ + ĀᵀC̄⁻¹Ā."""
    return np.diag(outer_curve) + (coupling.T / inner_curve) @ coupling
