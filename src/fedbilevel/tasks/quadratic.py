"""A federated quadratic bilevel problem with a closed form, for tests of methods.

    g_i(x, y) = ½ yᵀA_i y − yᵀ(B_i x + c_i)            f_i(x, y) = ½ (y − t_i)ᵀD_i(y − t_i) + xᵀE_i y + ½ ρ‖x‖²

A_i and D_i are symmetric and positive definite; B_i and E_i are dense. All coefficients differ between clients. A
sample of client i has its own c and t, drawn around c_i and t_i. Let bars denote means over clients, with any weights.
Then

    y*(x) = Ā⁻¹(B̄x + c̄)    and    v*(x) = Ā⁻¹∇y F.

Φ is quadratic, so that x* solves a linear system.

For clients of limited capacity, x and y can have a core (x_0, y_0), which all clients hold, and units (x_u, y_u) for u
= 1..U. Core and units each have the losses above; for units, c_i and t_i are multiplied by s. A tie κ couples each unit
to the core:

    g_i = Σ_u g_i(x_u, y_u) + κ y_0ᵀ Σ_{u≥1} y_u          f_i = Σ_u f_i(x_u, y_u) + κ x_0ᵀ Σ_{u≥1} x_u

If a client does not hold all units, its gradients in the core therefore lack κ times the missing units. Without a tie
(κ = 0), these gradients are exact.

Metrics: `relative_error` is ‖x − x*‖/‖x*‖, and `squared_gradient` is ‖∇Φ(x)‖², which theorems on rates bound.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.tasks.task import Floats, Task, client_means, require_memory, scattered

RIDGE = 1.0  # ρ
NORMS = {"B": 1.0, "E": 0.5}  # spectral norms, for which Φ is strongly convex: ∇²Φ ⪰ ρ − ‖E‖²/λ_min(D) = ¾ > 0
UNITS = {"core": "_", "units": "unit _"}  # the structure of x and of y if they have units


@dataclass(frozen=True)
class ClosedForm:
    """The exact x*, y* and v* for some weights of clients, each flattened, and the Hessian of Φ.

    ∇Φ(x) is hessian @ (x − x*).
    """

    x: np.ndarray
    y: np.ndarray
    v: np.ndarray
    hessian: np.ndarray


def outer(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Return f_i(x, y), a mean over the samples of the batch."""
    gap = y - batch["t"]
    value = 0.5 * jnp.einsum("ni,nij,nj->n", gap, batch["D"], gap) + jnp.einsum("i,nij,j->n", x, batch["E"], y)
    return jnp.mean(value) + 0.5 * RIDGE * jnp.vdot(x, x)


def inner(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Return g_i(x, y), a mean over the samples of the batch."""
    linear = jnp.einsum("nij,j->ni", batch["B"], x) + batch["c"]
    return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", y, batch["A"], y) - linear @ y)


@dataclass(frozen=True)
class TiedUnits:
    """Hold a core, which all clients hold, and the units that are tied to it, which clients may leave out.

    Args:
        count: the number of units, U.
        scale: s, the factor of the coefficients c and t in the losses of units.
        tie: κ, the strength of the tie.
    """

    count: int
    scale: float
    tie: float

    @property
    def scales(self) -> np.ndarray:
        """Return the factors of c and t: one for the core, and one for each unit."""
        return np.array([1.0, *[self.scale] * self.count])

    def tied(self, size: int) -> np.ndarray:
        """Return the Hessian of κ z_0ᵀ Σ z_u, where each z has `size` entries."""
        star = np.zeros((1 + self.count, 1 + self.count))
        star[0, 1:] = star[1:, 0] = self.tie
        return np.kron(star, np.eye(size))

    def each(self, matrix: np.ndarray) -> np.ndarray:
        """Return a block diagonal matrix, in which `matrix` is the block of the core and of every unit."""
        return np.kron(np.eye(1 + self.count), matrix)

    def loss(self, plain: Callable[..., Array], vector: str, variable: int) -> Callable[..., Array]:
        """Return the loss of the core and all units together, from the loss `plain` of a core or unit alone.

        Args:
            vector: the coefficient that is multiplied by s for units: "c" or "t".
            variable: the variable that is tied: 0 for x, 1 for y.
        """

        def total(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
            small = {**batch, vector: self.scale * batch[vector]}
            units = jax.vmap(lambda x, y: plain(x, y, small))(x["units"], y["units"])
            z = (x, y)[variable]
            tie = self.tie * jnp.vdot(z["core"], jnp.sum(z["units"], axis=0))
            return plain(x["core"], y["core"], batch) + jnp.sum(units) + tie

        return total


def quadratic(
    *,
    clients: int = 10,
    dim_x: int = 5,
    dim_y: int = 8,
    condition: float = 10.0,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
    samples: tuple[int, int] = (5, 10),
    weighted: bool = True,
    units: int = 0,
    unit_scale: float = 1.0,
    tie: float = 0.0,
    seed: int = 0,
) -> Task:
    """Draw a quadratic problem with a known x*.

    Args:
        clients: the number of clients, M.
        dim_x, dim_y: the dimensions of x and y; with units, the dimensions of the core and of each unit.
        condition: the condition number of every A_i, whose eigenvalues lie between 1/condition and 1. Eigenvectors
            differ between clients.
        heterogeneity: the size of the differences between clients' coefficients; 0: all clients have the same
            coefficients.
        noise: the standard deviation of a sample's c and t around its client's c_i and t_i.
        samples: the least and the largest number of samples per client and loss.
        weighted: whether the weights of clients differ; False: each weight is 1/M.
        units: the number U of units, which clients of limited capacity may leave out; 0: x and y are plain vectors.
        unit_scale: s, the factor of c and t for units.
        tie: κ, the strength of the tie between each unit and the core.
        seed: the seed of the draw.
    """
    require(clients >= 1, "clients", clients, "positive")
    require_count("dim_x", dim_x)
    require_count("dim_y", dim_y)
    require(condition >= 1, "condition", condition, "at least 1")
    require(heterogeneity >= 0, "heterogeneity", heterogeneity, "at least 0")
    require(noise >= 0, "noise", noise, "at least 0")
    require(1 <= samples[0] <= samples[1], "samples", samples, "a pair (fewest, most), at least 1 each")
    require(isinstance(units, int) and units >= 0, "units", units, "a whole number, at least 0")
    require(unit_scale > 0, "unit_scale", unit_scale, "positive")
    most = min(1 / condition, 0.5) / max(units, 1) ** 0.5
    require(0 <= tie < most, "tie", tie, f"from 0 to below {most:.4g}, so that the losses stay convex")
    require(units > 0 or tie == 0, "units", units, "1 or more, since tie is not 0")
    require_memory(sum(samples) * dim_y * (dim_x + dim_y), clients=clients)
    rng = np.random.default_rng(seed)

    def scatter(name: str) -> np.ndarray:
        drawn = common[name] + heterogeneity * rng.normal(size=common[name].shape)
        return drawn * NORMS[name] / np.linalg.norm(drawn, 2) if name in NORMS else drawn

    shapes = {"B": (dim_y, dim_x), "E": (dim_x, dim_y), "c": (dim_y,), "t": (dim_y,)}
    common = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    axes = np.linalg.qr(rng.normal(size=(dim_y, dim_y)))[0]
    members = []
    for _ in range(clients):
        turn = np.linalg.qr(axes + heterogeneity * 0.5 * rng.normal(size=axes.shape))[0]
        spectrum = np.geomspace(1 / condition, 1, dim_y)
        coefficients = {name: scatter(name) for name in common}
        coefficients["A"] = turn * spectrum @ turn.T
        coefficients["D"] = np.diag(1 + heterogeneity * rng.uniform(size=dim_y))
        members.append(coefficients)

    def draw(coefficients: dict[str, Floats], *names: str, vector: str) -> dict[str, Floats]:
        count = int(rng.integers(samples[0], samples[1] + 1))
        return scattered(rng, {name: coefficients[name] for name in (*names, vector)}, vector, count, noise)

    population = Clients(
        outer=[draw(coefficients, "D", "E", vector="t") for coefficients in members],
        inner=[draw(coefficients, "A", "B", vector="c") for coefficients in members],
        weights=rng.uniform(0.5, 2.0, size=clients) if weighted else None,
    )
    parts = TiedUnits(units, unit_scale, tie)
    exact = solution(population, units=parts)
    size = float(np.linalg.norm(exact.x))
    problem = Bilevel(outer=outer, inner=inner)
    if units:
        problem = Bilevel(parts.loss(outer, "t", 0), parts.loss(inner, "c", 1), structure=Structure(UNITS, UNITS))
    return Task(
        name="quadratic",
        problem=problem,
        clients=population,
        x0=_start(dim_x, units),
        y0=_start(dim_y, units),
        metrics={
            "relative_error": lambda x, y: jnp.linalg.norm(_flat(x) - exact.x) / size,
            "squared_gradient": lambda x, y: jnp.sum((exact.hessian @ (_flat(x) - exact.x)) ** 2),  # ‖∇Φ(x)‖²
        },
    )


def _start(size: int, units: int) -> PyTree:
    return {"core": jnp.zeros(size), "units": jnp.zeros((units, size))} if units else jnp.zeros(size)


def _flat(x: PyTree) -> Array:
    """Flatten x in the order of the closed form: the core, then the units."""
    return jnp.concatenate([x["core"], x["units"].ravel()]) if isinstance(x, dict) else x


def solution(
    clients: Clients, weights: np.ndarray | None = None, units: TiedUnits = TiedUnits(0, 1.0, 0.0)
) -> ClosedForm:
    """Return the closed form for the clients' weights, or for `weights`, which sum to 1.

    In its vectors and matrices the core comes first, then the units.
    """
    w = clients.weights if weights is None else weights
    own = client_means(clients)  # D is the same in all samples of a client
    mean = {name: np.tensordot(w, part, 1) for name, part in own.items()}
    dt = np.einsum("n,nij,nj->i", w, own["D"], own["t"])
    # y*(x) = Jx + k;  ∇Φ = Rx + E y* + Jᵀ(D y* − Dt + Eᵀx) = 0
    b, d, e = (units.each(mean[name]) for name in "BDE")
    a = units.each(mean["A"]) + units.tied(mean["A"].shape[0])
    j, k = np.linalg.solve(a, b), np.linalg.solve(a, np.kron(units.scales, mean["c"]))
    dt, ridge = np.kron(units.scales, dt), RIDGE * np.eye(j.shape[1]) + units.tied(mean["B"].shape[1])
    hessian = ridge + e @ j + j.T @ e.T + j.T @ d @ j
    x = np.linalg.solve(hessian, -(e @ k + j.T @ (d @ k - dt)))
    y = j @ x + k
    return ClosedForm(x, y, np.linalg.solve(a, d @ y - dt + e.T @ x), hessian)
