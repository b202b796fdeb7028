"""A federated quadratic bilevel problem with a closed form: the instrument on which methods are tested.

    g_i(x, y) = ½ yᵀA_i y − yᵀ(B_i x + c_i)            f_i(x, y) = ½ (y − t_i)ᵀD_i(y − t_i) + xᵀE_i y + ½ ρ‖x‖²

with symmetric positive definite A_i, D_i, dense B_i and E_i of no symmetry, all different between clients; the
samples of a client scatter c_i and t_i about their means. With bars for means weighted by any w:

    y*(x) = Ā⁻¹(B̄x + c̄),   v*(x) = Ā⁻¹∇y F,   Φ quadratic, hence x* the solution of a linear system.

With units, for clients of limited capacity, x and y are a core (x_0, y_0), which everyone holds, and units (x_u, y_u),
u = 1..U, each with these losses for itself, c_i and t_i being s times as large for units, and tied to the core by κ:

    g_i = Σ_u g_i(x_u, y_u) + κ y_0ᵀ Σ_{u≥1} y_u          f_i = Σ_u f_i(x_u, y_u) + κ x_0ᵀ Σ_{u≥1} x_u

so that a client that lacks units is wrong about the core by what κ times these are. Without ties it is right.
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
NORMS = {"B": 1.0, "E": 0.5}  # spectral; ‖E‖² < ρ·λ_min(D) makes Φ strongly convex: ∇²Φ ⪰ ρ − ‖E‖²/λ_min(D) = ¾
UNITS = {"core": "_", "units": "unit _"}  # the structure of x and of y, where they have units


@dataclass(frozen=True)
class ClosedForm:
    """Hold the exact solution for given client weights."""

    x: np.ndarray
    y: np.ndarray
    v: np.ndarray


def outer(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Compute f_i, a mean over the samples of the batch."""
    gap = y - batch["t"]
    value = 0.5 * jnp.einsum("ni,nij,nj->n", gap, batch["D"], gap) + jnp.einsum("i,nij,j->n", x, batch["E"], y)
    return jnp.mean(value) + 0.5 * RIDGE * jnp.vdot(x, x)


def inner(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Compute g_i, a mean over the samples of the batch."""
    linear = jnp.einsum("nij,j->ni", batch["B"], x) + batch["c"]
    return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", y, batch["A"], y) - linear @ y)


@dataclass(frozen=True)
class TiedUnits:
    """Describe a core and the units tied to it.

    Args:
        count: U.
        scale: s, the size of a unit's c and t.
        tie: κ.
    """

    count: int
    scale: float
    tie: float

    @property
    def scales(self) -> np.ndarray:
        """Return the sizes of c and t for the core and for each unit, (1 + U,)."""
        return np.array([1.0, *[self.scale] * self.count])

    def tied(self, size: int) -> np.ndarray:
        """Return the Hessian of κ z_0ᵀ Σ z_u, each z of this size."""
        star = np.zeros((1 + self.count, 1 + self.count))
        star[0, 1:] = star[1:, 0] = self.tie
        return np.kron(star, np.eye(size))

    def each(self, matrix: np.ndarray) -> np.ndarray:
        """Return the block diagonal matrix that repeats this matrix for the core and for each unit."""
        return np.kron(np.eye(1 + self.count), matrix)

    def loss(self, plain: Callable[..., Array], vector: str, variable: int) -> Callable[..., Array]:
        """Return the loss of core and units, from the plain loss: units' `vector` is scaled, x (0) or y (1) is tied."""

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
    """Draw a problem.

    Args:
        clients: M.
        dim_x, dim_y: dimensions.
        condition: κ of every A_i: eigenvalues from 1/κ to 1, their axes different at each client.
        heterogeneity: how far clients' problems differ (0: all have the same).
        noise: standard deviation of a sample's c and t about those of its client.
        samples: fewest and most samples per client and loss.
        weighted: unequal client weights; else 1/M each.
        units: U, beside the core, what clients of limited capacity may lack; 0: x and y are plain vectors.
        unit_scale: s, how large a unit's c and t are beside the core's.
        tie: κ, of units to the core.
        seed: of the draw.
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
    require(units > 0 or tie == 0, "units", units, "1 or more, with a tie")
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
        own = {name: scatter(name) for name in common}
        own["A"] = turn * spectrum @ turn.T
        own["D"] = np.diag(1 + heterogeneity * rng.uniform(size=dim_y))
        members.append(own)

    def draw(own: dict[str, Floats], *names: str, vector: str) -> dict[str, Floats]:
        count = int(rng.integers(samples[0], samples[1] + 1))
        return scattered(rng, {name: own[name] for name in (*names, vector)}, vector, count, noise)

    population = Clients(
        outer=[draw(own, "D", "E", vector="t") for own in members],
        inner=[draw(own, "A", "B", vector="c") for own in members],
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
        metrics={"relative_error": lambda x, y: jnp.linalg.norm(_flat(x) - exact.x) / size},
    )


def _start(size: int, units: int) -> PyTree:
    return {"core": jnp.zeros(size), "units": jnp.zeros((units, size))} if units else jnp.zeros(size)


def _flat(x: PyTree) -> Array:
    """Flatten x as in the closed form: the core, then the units in order."""
    return jnp.concatenate([x["core"], x["units"].ravel()]) if isinstance(x, dict) else x


def solution(
    clients: Clients, weights: np.ndarray | None = None, units: TiedUnits = TiedUnits(0, 1.0, 0.0)
) -> ClosedForm:
    """Compute the closed form for the clients' own weights or others (summing to 1); the core first, then units."""
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
    return ClosedForm(x, y, np.linalg.solve(a, d @ y - dt + e.T @ x))
