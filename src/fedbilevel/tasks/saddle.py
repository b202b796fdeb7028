"""A federated saddle point with a closed form: the synthetic minimax problem of FedNest.

    min over x, max over y of Σ_i p_i f_i,   f_i(x, y) = ½λ xᵀP_i x − [½ yᵀC_i y − b_iᵀy + yᵀA_i x],   x, y ∈ R^d

The paper's (Tarzanagh et al., ICML 2022, section 4.3) has P_i = C_i = I, A_i = t_i I with t_i uniform on (0, 0.1), and
b_i normal, centred over clients. Then x* = y* = 0, whatever a method makes of b, and every client has the same
curvature, so that methods which alternate between x and y are free of bias. `general` takes that away: dense A_i of no
symmetry, diagonal P_i and C_i, all different. With bars for weighted means

    y* = C̄⁻¹(b̄ − Āx*)        (λP̄ + ĀᵀC̄⁻¹Ā) x* = ĀᵀC̄⁻¹b̄

so b must not be centred, or weights must be unequal, for a solution away from 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.problem import Minimax
from fedbilevel.tasks.task import Floats, LocalSteps, Task, client_means

COUPLING = 0.1  # the largest t_i


class SaddlePoint(NamedTuple):
    """Hold a limit point (x, y) of a method."""

    x: Floats
    y: Floats


def loss(x: Array, y: Array, batch: dict[str, Array]) -> Array:
    """Compute f_i, a mean over the samples of the batch; "P" holds λ and the diagonals of P_i, "C" those of C_i."""
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
    local_steps: LocalSteps = None,
    seed: int = 0,
) -> Task:
    """Draw a problem; every client has one sample, its coefficients.

    Args:
        clients: M; the paper has 1,000.
        dim: d.
        ridge: λ.
        spread: s, the standard deviation of the entries of b_i.
        centred: subtract the clients' plain mean from b_i, as the paper does; else b_i has mean 1 in every entry.
        weighted: unequal client weights; else 1/M each.
        general: A_i dense with normal entries of variance 1/d, the diagonals of P_i and C_i uniform on (½, 3/2).
        local_steps: see Clients.
        seed: of the draw and of the starting point, which is normal.
    """
    require_count("clients", clients)
    require_count("dim", dim)
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    require(0 <= spread < np.inf, "spread", spread, "at least 0 and finite")
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
        local_steps=local_steps,
    )
    exact = solution(population)
    metrics = {
        "x_distance": lambda x, y: jnp.sum((x - exact.x) ** 2),
        "y_distance": lambda x, y: jnp.sum((y - exact.y) ** 2),
    }
    norm = float(np.linalg.norm(exact.x))
    if weighted or not centred:  # else x* = 0, and there is no relative error
        metrics = {"relative_error": lambda x, y: jnp.linalg.norm(x - exact.x) / norm, **metrics}
    x0, y0 = jnp.asarray(rng.normal(size=(2, dim)))
    return Task(name="saddle", problem=Minimax(loss), clients=population, x0=x0, y0=y0, metrics=metrics)


def solution(clients: Clients, weights: np.ndarray | None = None) -> SaddlePoint:
    """Compute the saddle point, for the clients' own weights or for others (summing to 1)."""
    p = clients.weights if weights is None else weights
    outer_curve, inner_curve, coupling, linear = (np.tensordot(p, part, 1) for part in _coefficients(clients))
    scaled = coupling.T / inner_curve  # AᵀC⁻¹
    x = np.linalg.solve(np.diag(outer_curve) + scaled @ coupling, scaled @ linear)
    return SaddlePoint(x, (linear - coupling @ x) / inner_curve)


def fedavg_point(
    clients: Clients, tau: int, alpha: float, beta: float, weights: np.ndarray | None = None
) -> SaddlePoint:
    """Compute the limit of simultaneous FedAvg (FedAvg-S): τ full steps of each client on x and y at once, then a mean.

    Client i's step is affine, (x, y) ← M_i (x, y) + s_i, with x going down by α/τ and y up by β/τ; a round is
    z ← Σ p_i (M_i^τ z + Σ_{k<τ} M_i^k s_i), and this is its fixed point.
    """
    p = clients.weights if weights is None else weights
    pull: Any = 0
    moved: Any = 0
    for weight, outer_curve, inner_curve, coupling, linear in zip(p, *_coefficients(clients), strict=True):
        field = np.block([[np.diag(outer_curve), -coupling.T], [coupling, np.diag(inner_curve)]])
        step = np.repeat([alpha / tau, beta / tau], len(linear))
        matrix, shift = np.eye(len(step)) - step[:, None] * field, step * np.concatenate([0 * linear, linear])
        powers = [np.linalg.matrix_power(matrix, k) for k in range(tau + 1)]
        pull += weight * (np.eye(len(step)) - powers[tau])
        moved += weight * sum(powers[:tau]) @ shift
    return SaddlePoint(*np.split(np.linalg.solve(pull, moved), 2))


def alternating_point(
    clients: Clients, tau: Sequence[int], alpha: float, beta: float, weights: np.ndarray | None = None
) -> SaddlePoint:
    """Compute the limit of alternating FedAvg (LFedNest): rounds of τ_y steps β/τ_y on y, then τ_x steps α/τ_x on x.

    tau: (τ_x, τ_y). At rest neither half moves the average. A client's τ steps θ ← θ − c(Hθ − r), H diagonal, move
    it by D (H⁻¹r − θ) with D = I − (I − cH)^τ, so that the averages rest where

        Σ p_i D_i^x (x − P_i⁻¹A_iᵀy/λ) = 0        Σ p_i D_i^y (y − C_i⁻¹(b_i − A_i x)) = 0

    however many rounds on y come before each round on x.
    """
    p = clients.weights if weights is None else weights
    outer_curve, inner_curve, coupling, linear = _coefficients(clients)
    pull_x = p[:, None] * (1 - (1 - alpha / tau[0] * outer_curve) ** tau[0])
    pull_y = p[:, None] * (1 - (1 - beta / tau[1] * inner_curve) ** tau[1])
    from_y = np.einsum("ni,nji->ij", pull_x / outer_curve, coupling)
    from_x = np.einsum("ni,nij->ij", pull_y / inner_curve, coupling)
    system = np.block([[np.diag(pull_x.sum(0)), -from_y], [from_x, np.diag(pull_y.sum(0))]])
    known = np.concatenate([np.zeros(len(from_y)), np.sum(pull_y / inner_curve * linear, axis=0)])
    return SaddlePoint(*np.split(np.linalg.solve(system, known), 2))


def _coefficients(clients: Clients) -> list[Floats]:
    """Return λP, C, A and b, with leading axis clients."""
    own = client_means(clients)
    return [own[name] for name in "PCAb"]
