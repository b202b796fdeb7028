"""Compute in NumPy the limits of FedAvg-S and LFedNest on tasks with a closed form; they are not the solution."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core.client import Clients
from fedbilevel.tasks.saddle import SaddlePoint
from fedbilevel.tasks.task import Floats, client_means


def local_point(clients: Clients) -> Floats:
    """Compute the limit of LFedNest, in which the mean of the clients' own B_iᵀ∇f_i(y) at the common y = R(x) is 0."""
    p, own = clients.weights, client_means(clients)
    b, c = np.tensordot(p, own["B"], 1), np.tensordot(p, own["c"], 1)
    pull = np.einsum("n,nij,ni->ji", p, own["B"], own["D"])  # mean of B_iᵀD_i
    known = np.einsum("n,nij,ni->j", p, own["B"], own["D"] * own["t"])
    return np.asarray(np.linalg.solve(pull @ b, known - pull @ c))


def fedavg_point(clients: Clients, tau: int, alpha: float, beta: float) -> SaddlePoint:
    """Compute the limit of simultaneous FedAvg (FedAvg-S).

    In a round each client makes τ full steps on x and y at once, and the server averages the results. A step of client
    i is affine, z = (x, y) ← M_i z + s_i; it descends in x with the step size α/τ, and ascends in y with β/τ. So a
    round is z ← Σ p_i (M_i^τ z + Σ_{k<τ} M_i^k s_i), and the limit is the fixed point of this map.
    """
    p = clients.weights
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


def alternating_point(clients: Clients, tau: Sequence[int], alpha: float, beta: float) -> SaddlePoint:
    """Compute the limit of alternating FedAvg (LFedNest), with `tau` = (τ_x, τ_y).

    Rounds with τ_y steps of size β/τ_y on y alternate with rounds with τ_x steps of size α/τ_x on x. At the limit
    neither kind of round moves the average. With a diagonal H, τ steps θ ← θ − c(Hθ − r) of a client move θ by
    D (H⁻¹r − θ), with D = I − (I − cH)^τ. So the limit satisfies

        Σ p_i D_i^x (x − P_i⁻¹A_iᵀy/λ) = 0        Σ p_i D_i^y (y − C_i⁻¹(b_i − A_i x)) = 0

    for any number of rounds on y before each round on x.
    """
    p = clients.weights
    outer_curve, inner_curve, coupling, linear = _coefficients(clients)
    pull_x = p[:, None] * (1 - (1 - alpha / tau[0] * outer_curve) ** tau[0])
    pull_y = p[:, None] * (1 - (1 - beta / tau[1] * inner_curve) ** tau[1])
    from_y = np.einsum("ni,nji->ij", pull_x / outer_curve, coupling)
    from_x = np.einsum("ni,nij->ij", pull_y / inner_curve, coupling)
    system = np.block([[np.diag(pull_x.sum(0)), -from_y], [from_x, np.diag(pull_y.sum(0))]])
    known = np.concatenate([np.zeros(len(from_y)), np.sum(pull_y / inner_curve * linear, axis=0)])
    return SaddlePoint(*np.split(np.linalg.solve(system, known), 2))


def _coefficients(clients: Clients) -> list[Floats]:
    """Return λP, C, A and b; the first axis of each is over clients."""
    own = client_means(clients)
    return [own[name] for name in "PCAb"]
