"""A federated quadratic bilevel problem with a closed form: the instrument on which methods are tested.

    g_i(x, y) = ½ yᵀA_i y − yᵀ(B_i x + c_i)            f_i(x, y) = ½ (y − t_i)ᵀD_i(y − t_i) + xᵀE_i y + ½ ρ‖x‖²

with symmetric positive definite A_i, D_i, dense B_i and E_i of no symmetry, all different between clients; the
samples of a client scatter c_i and t_i about their means. With bars for means weighted by any w:

    y*(x) = Ā⁻¹(B̄x + c̄),   v*(x) = Ā⁻¹∇y F,   Φ quadratic, hence x* the solution of a linear system.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Bilevel
from fedbilevel.tasks.task import Task

RIDGE = 1.0  # ρ
NORMS = {
    "B": 1.0,
    "E": 0.5,
}  # spectral; ‖E‖² < ρ·λ_min(D) makes Φ strongly convex: ∇²Φ ⪰ ρ − ‖E‖²/λ_min(D) = ¾


@dataclass(frozen=True)
class ClosedForm:
    """The exact solution for given client weights."""

    x: np.ndarray
    y: np.ndarray
    v: np.ndarray


def outer(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """f_i, a mean over the samples of the batch."""
    gap = y - batch["t"]
    value = 0.5 * jnp.einsum("ni,nij,nj->n", gap, batch["D"], gap) + jnp.einsum("i,nij,j->n", x, batch["E"], y)
    return jnp.mean(value) + 0.5 * RIDGE * jnp.vdot(x, x)


def inner(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """g_i, a mean over the samples of the batch."""
    linear = jnp.einsum("nij,j->ni", batch["B"], x) + batch["c"]
    return jnp.mean(0.5 * jnp.einsum("i,nij,j->n", y, batch["A"], y) - linear @ y)


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
    local_steps: Any = None,
    seed: int = 0,
) -> Task:
    """Draw a problem.

    Args:
        clients: M.
        dim_x, dim_y: dimensions.
        condition: κ of every A_i: eigenvalues from 1/κ to 1, their axes different at each client.
        heterogeneity: how far clients' problems differ (0: all have the same).
        noise: standard deviation of a sample's c and t about its client's.
        samples: fewest and most samples per client and loss.
        weighted: unequal client weights; else 1/M each.
        local_steps: see Clients.
        seed: of the draw.
    """
    require(clients >= 1, "clients", clients, "positive")
    require_count("dim_x", dim_x)
    require_count("dim_y", dim_y)
    require(condition >= 1, "condition", condition, "at least 1")
    require(heterogeneity >= 0, "heterogeneity", heterogeneity, "at least 0")
    require(noise >= 0, "noise", noise, "at least 0")
    require(1 <= samples[0] <= samples[1], "samples", samples, "a pair (fewest, most), at least 1 each")
    rng = np.random.default_rng(seed)

    def scatter(name: str) -> np.ndarray:
        drawn = common[name] + heterogeneity * rng.normal(size=common[name].shape)
        return drawn * NORMS[name] / np.linalg.norm(drawn, 2) if name in NORMS else drawn

    common = {
        "B": rng.normal(size=(dim_y, dim_x)),
        "E": rng.normal(size=(dim_x, dim_y)),
        "c": rng.normal(size=dim_y),
        "t": rng.normal(size=dim_y),
    }
    axes = np.linalg.qr(rng.normal(size=(dim_y, dim_y)))[0]
    members = []
    for _ in range(clients):
        turn = np.linalg.qr(axes + heterogeneity * 0.5 * rng.normal(size=axes.shape))[0]
        spectrum = np.geomspace(1 / condition, 1, dim_y)
        own = {name: scatter(name) for name in common}
        own["A"] = turn * spectrum @ turn.T
        own["D"] = np.diag(1 + heterogeneity * rng.uniform(size=dim_y))
        members.append(own)
    draw = lambda own, names: _samples(rng, own, names, int(rng.integers(samples[0], samples[1] + 1)), noise)  # noqa: E731
    population = Clients(
        outer=[draw(own, ("D", "E", "t")) for own in members],
        inner=[draw(own, ("A", "B", "c")) for own in members],
        weights=rng.uniform(0.5, 2.0, size=clients) if weighted else None,
        local_steps=local_steps,
    )
    exact = solution(population)
    size = float(np.linalg.norm(exact.x))
    return Task(
        name="quadratic",
        problem=Bilevel(outer=outer, inner=inner),
        clients=population,
        x0=jnp.zeros(dim_x),
        y0=jnp.zeros(dim_y),
        metrics={"relative_error": lambda x, y: jnp.linalg.norm(x - exact.x) / size},
    )


def solution(clients: Clients, weights: np.ndarray | None = None) -> ClosedForm:
    """The closed form, for the clients' own weights or for others (summing to 1)."""
    w = clients.weights if weights is None else weights
    mean: dict[str, np.ndarray] = {}
    for rows in (clients.outer, clients.inner):
        per_client = [{k: a.mean(0) for k, a in rows.row(i).items()} for i in range(len(clients))]
        mean |= {k: sum(p * own[k] for p, own in zip(w, per_client, strict=True)) for k in rows.values}
    dt = sum(p * np.mean([d @ t for d, t in zip(row["D"], row["t"], strict=True)], axis=0)
             for p, row in zip(w, (clients.outer.row(i) for i in range(len(clients))), strict=True))  # fmt: skip
    # y*(x) = Jx + k;  ∇Φ = ρx + E y* + Jᵀ(D y* − Dt + Eᵀx) = 0
    j, k = np.linalg.solve(mean["A"], mean["B"]), np.linalg.solve(mean["A"], mean["c"])
    d, e = mean["D"], mean["E"]
    hessian = RIDGE * np.eye(j.shape[1]) + e @ j + j.T @ e.T + j.T @ d @ j
    x = np.linalg.solve(hessian, -(e @ k + j.T @ (d @ k - dt)))
    y = j @ x + k
    return ClosedForm(x, y, np.linalg.solve(mean["A"], d @ y - dt + e.T @ x))


def _samples(
    rng: np.random.Generator, own: dict[str, np.ndarray], names: tuple[str, ...], count: int, noise: float
) -> dict[str, np.ndarray]:
    """`count` copies of the client's coefficients, its vectors (c or t) scattered."""
    out = {name: np.repeat(own[name][None], count, axis=0) for name in names}
    vector = names[-1]
    out[vector] = out[vector] + noise * rng.normal(size=out[vector].shape)
    return out
