"""A federated compositional quadratic problem with a closed form: a quadratic function of an affine map of x.

    min over x of F(R(x)),   r_i(x) = B_i x + c_i,   f_i(y) = ½ (y − t_i)ᵀD_i (y − t_i)

B_i is dense with at least as many rows as columns, and D_i is diagonal and positive. All coefficients differ between
clients. A sample of client i has its own c and t, drawn around c_i and t_i. Let bars denote weighted means, and D̄t the
weighted mean of D_i t_i. Then y*(x) = R(x) = B̄x + c̄, and x* solves

    B̄ᵀD̄B̄ x* = B̄ᵀ(D̄t − D̄c̄)

Metrics: `relative_error` is ‖x − x*‖/‖x*‖, and `squared_gradient` is ‖∇(F∘R)(x)‖².
"""

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Compositional
from fedbilevel.tasks.task import Floats, Task, client_means, require_memory, scattered


def outer(y: Array, batch: dict[str, Array]) -> Array:
    """Return f_i(y), a mean over the samples of the batch."""
    return 0.5 * jnp.mean(jnp.sum(batch["D"] * (y - batch["t"]) ** 2, axis=-1))


def inner(x: Array, batch: dict[str, Array]) -> Array:
    """Return r_i(x), the inner function of client i, of shape (dim_y,), as the mean over the samples of the batch."""
    return jnp.mean(batch["B"] @ x + batch["c"], axis=0)


def compositional(
    *,
    clients: int = 10,
    dim_x: int = 5,
    dim_y: int = 8,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    samples: tuple[int, int] = (5, 10),
    weighted: bool = True,
    seed: int = 0,
) -> Task:
    """Draw a compositional quadratic problem with a known x*.

    Args:
        clients: the number of clients, M.
        dim_x, dim_y: the dimensions of x and y; dim_y is at least dim_x.
        heterogeneity: the size of the differences between clients' coefficients; 0: all clients have the same
            coefficients.
        noise: the standard deviation of a sample's c and t around its client's c_i and t_i.
        samples: the least and the largest number of samples per client and loss.
        weighted: whether the weights of clients differ; False: each weight is 1/M.
        seed: the seed of the draw.
    """
    require_count("clients", clients)
    require_count("dim_x", dim_x)
    require(dim_y >= dim_x, "dim_y", dim_y, f"at least dim_x = {dim_x}, so that x* is unique")
    require(heterogeneity >= 0, "heterogeneity", heterogeneity, "at least 0")
    require(noise >= 0, "noise", noise, "at least 0")
    require(1 <= samples[0] <= samples[1], "samples", samples, "a pair (fewest, most), at least 1 each")
    require_memory(sum(samples) / 2 * dim_y * (dim_x + 3), clients=clients)
    rng = np.random.default_rng(seed)
    axes, shift, target = np.linalg.qr(rng.normal(size=(dim_y, dim_x)))[0], *rng.normal(size=(2, dim_y))

    outside, inside = [], []
    for _ in range(clients):
        counts = rng.integers(samples[0], samples[1] + 1, size=2)
        map_ = axes + heterogeneity * rng.normal(size=axes.shape) / 2 / dim_y**0.5
        moved = shift + heterogeneity * rng.normal(size=dim_y)
        curve = 1 + heterogeneity * rng.uniform(size=dim_y)
        wanted = target + heterogeneity * rng.normal(size=dim_y)
        inside.append(scattered(rng, {"B": map_, "c": moved}, "c", counts[0], noise))
        outside.append(scattered(rng, {"D": curve, "t": wanted}, "t", counts[1], noise))
    population = Clients(
        outer=outside,
        inner=inside,
        weights=rng.uniform(0.5, 2.0, size=clients) if weighted else None,
    )
    exact, (b, _, d, _) = solution(population), coefficients(population)
    size, hessian = float(np.linalg.norm(exact)), b.T * d @ b
    return Task(
        name="compositional",
        problem=Compositional(outer, inner),
        clients=population,
        x0=jnp.zeros(dim_x),
        y0=jnp.zeros(dim_y),
        metrics={
            "relative_error": lambda x, y: jnp.linalg.norm(x - exact) / size,
            "squared_gradient": lambda x, y: jnp.sum((hessian @ (x - exact)) ** 2),  # ‖∇(F∘R)(x)‖²
        },
    )


def coefficients(clients: Clients, weights: np.ndarray | None = None) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the weighted means over clients of B, c, D and Dt: B̄, c̄, D̄ and D̄t.

    `weights` sum to 1; None: the clients' own weights.
    """
    p = clients.weights if weights is None else weights
    own = client_means(clients)  # D is the same in all samples of a client
    b, c, d, dt = (np.tensordot(p, part, 1) for part in (own["B"], own["c"], own["D"], own["D"] * own["t"]))
    return b, c, d, dt


def solution(clients: Clients, weights: np.ndarray | None = None) -> Floats:
    """Return the solution x*, of shape (dim_x,), for the clients' weights, or for `weights`, which sum to 1."""
    b, c, d, dt = coefficients(clients, weights)
    return np.asarray(np.linalg.solve(b.T * d @ b, b.T @ (dt - d * c)))
