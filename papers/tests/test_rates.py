"""Stored means of SimFBO, ShroFBO and FedNest agree with expected values, which are computed by linear algebra."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from papers.figure import find
from papers.play import runs_of

from fedbilevel import experiments
from representatives import slow_but


def expected(spec: Any, task: Any, taus: np.ndarray, *, even: bool) -> np.ndarray:
    """Return E ‖∇Φ(x_t)‖² for all rounds t = 0, 1, …

    Let z be (x, y, v). A client's step is z ← z − H(K_i z + k_i + noise), and its reply is the sum of the brackets over
    τ_i steps, which is a linear function of z with noise. A sample of g adds noise to y through its c, and one of f
    adds noise to v through its Dt. With `even`, the replies of all clients count as if they had made the mean number of
    steps.
    """
    rows = [{**task.clients.inner.row(i), **task.clients.outer.row(i)} for i in range(len(taus))]
    own = [{name: np.mean(row[name], 0, dtype=float) for name in "ABcDEt"} for row in rows]
    a, b, d, e = (np.mean([one[name] for one in own], 0) for name in "ABDE")
    (q, p), n, method = b.shape, len(taus), spec.algorithm.value
    h, steps = (np.repeat([float(lr) for lr in of], [p, q, q]) for of in (method.client_lr, method.server_lr))
    size, none = p + 2 * q, np.zeros((q, q))
    mean, constant, noise = np.zeros((size, size)), np.zeros(size), np.zeros((size, size))
    system, target = np.zeros((size, size)), np.zeros(size)
    for row, one, tau in zip(rows, own, taus, strict=True):
        k = np.block(
            [[np.eye(p), one["E"], one["B"].T], [-one["B"], one["A"], none], [-one["E"].T, -one["D"], one["A"]]]
        )
        added = np.concatenate([np.zeros(p), -one["c"], one["D"] @ one["t"]])
        of_sample = np.zeros((size, size))
        of_sample[p : p + q, p : p + q] = np.diag(np.var(row["c"], 0))
        of_sample[p + q :, p + q :] = one["D"] @ np.diag(np.var(row["t"], 0)) @ one["D"].T
        reply, shift, scatter, turn = np.zeros_like(k), np.zeros(size), np.zeros_like(k), np.eye(size) - k * h
        for _ in range(tau):
            reply, shift, scatter = turn @ reply + k, turn @ shift + added, turn @ scatter @ turn.T + of_sample
        weight = (taus.mean() / tau if even else 1) / n
        mean, constant, noise = mean + weight * reply, constant + weight * shift, noise + weight**2 * scatter
        system, target = system + k / n, target + added / n
    j = np.linalg.solve(a, b)
    hessian = np.eye(p) + e @ j + j.T @ e.T + j.T @ d @ j
    x = np.linalg.solve(system, -target)[:p]
    turn, noise = np.eye(size) - steps[:, None] * mean, steps[:, None] * noise * steps
    z, variance, found = np.zeros(size), np.zeros((size, size)), []
    for _ in range(spec.run.rounds + 1):
        found.append(float(np.sum((hessian @ (z[:p] - x)) ** 2) + np.sum(hessian @ hessian * variance[:p, :p])))
        z, variance = turn @ z - steps * constant, turn @ variance @ turn.T + noise
    return np.array(found)


def stored(id: str, panel: str, method: str, taus: list[int], *, even: bool) -> tuple[dict[str, Any], Iterator[Any]]:
    """Return the stored curve of a method in a panel, and the expected curves of its runs."""
    (figure,) = find([id])
    kept, tasks = json.loads(figure.file.with_suffix(".json").read_text("utf-8")), experiments.TaskCache()
    specs = [run.spec for run in runs_of(figure, (panel, method), "quick", figure.file, {}, kept["seeds"])]
    curves = (expected(spec, tasks(spec), np.resize(taus, 8), even=even) for spec in specs)
    return kept["panels"][panel][method]["curve"], curves


@pytest.mark.parametrize(("method", "taus"), [("SimFBO", [2]), ("ShroFBO", [1, 3])])
def test_kept_means_are_those_of_the_linear_rounds(method: str, taus: list[int]) -> None:
    """The stored mean of ‖∇Φ‖² over 300 rounds agrees with `expected`, to three times the error that comes from few
    seeds.

    The stored curve contains about every fifth round. With 8 seeds, the noise causes an error of about 4 % in the mean.
    """
    curve, curves = stored("theory-rate-simfbo", "T = 300", method, taus, even=method == "ShroFBO")
    measured = np.trapezoid(curve["mean"], curve["cost"]) / curve["cost"][-1]
    assert measured == pytest.approx(np.mean([one.mean() for one in curves]), rel=0.12)


@pytest.mark.parametrize("panel", slow_but("T = 100", of=["T = 100", "T = 2,000"]))
@pytest.mark.parametrize(
    ("method", "taus", "rel"), [("SimFBO", [8], 0.03), ("ShroFBO", [4, 12], 0.03), ("SimFBO, σ = 3", [8], 0.3)]
)
def test_kept_errors_of_local_steps_are_those_of_the_linear_rounds(
    panel: str, method: str, taus: list[int], rel: float
) -> None:
    """The stored mean of ‖∇Φ‖² over the second half of the rounds agrees with `expected`, which has all local steps.

    With little noise it comes from drift, which is the same for all draws of samples.
    """
    curve, curves = stored("theory-rate-drift-rounds", panel, method, taus, even=method == "ShroFBO")
    cost, mean = np.array(curve["cost"]), np.array(curve["mean"])
    measured = mean[cost >= cost[-1] / 2].mean()
    assert measured == pytest.approx(np.mean([one[len(one) // 2 :].mean() for one in curves]), rel=rel)


def of_draws(spec: Any, task: Any) -> float:
    """Return E ‖∇Φ(x)‖² after many rounds with all samples, one direction per client, and P of n clients drawn.

    The direction of client i at z = (x, y, v) is K_i z + k_i. For the difference ζ of z and the limit, whose mean is 0,
    and for the step s of a round, S = E ζζᵀ solves

        S = (1 − sK) S (1 − sK)ᵀ + c s [mean of (K_i − K) S (K_i − K)ᵀ + e_i e_iᵀ] s    with    c = (n − P)/(P(n − 1)),

    where K is the mean of the K_i, and e_i is the direction of client i at the limit.
    """
    n, drawn, method = len(task.clients.weights), spec.run.cohort, spec.algorithm.value
    own = []
    for i in range(n):
        row = {**task.clients.inner.row(i), **task.clients.outer.row(i)}
        own.append({name: np.mean(row[name], 0, dtype=float) for name in "ABcDEt"})
    q, p = own[0]["B"].shape
    none, start = np.zeros((q, q)), np.zeros(p)
    k = np.array(
        [
            np.block(
                [[np.eye(p), one["E"], one["B"].T], [-one["B"], one["A"], none], [-one["E"].T, -one["D"], one["A"]]]
            )
            for one in own
        ]
    )
    added = np.array([np.concatenate([start, -one["c"], one["D"] @ one["t"]]) for one in own])
    steps = method.local_steps * np.repeat([float(lr) for lr in method.server_lr], [p, q, q])
    mean = k.mean(0)
    residual = (k @ np.linalg.solve(mean, -added.mean(0)) + added) * steps
    share, turned = (n - drawn) / (drawn * (n - 1) * n), steps[:, None] * (k - mean)
    found, constant = np.zeros_like(mean), share * residual.T @ residual
    for _ in range(12):  # the part with turned is small: each pass makes the error of S much smaller
        found = constant + share * np.sum(turned @ found @ turned.transpose(0, 2, 1), 0)
        turn = np.eye(len(mean)) - steps[:, None] * mean
        for _ in range(24):  # the sum of turnʲ found turnʲᵀ over 2²⁴ numbers j
            found, turn = found + turn @ found @ turn.T, turn @ turn
    a, b, d, e = (np.mean([one[name] for one in own], axis=0) for name in "ABDE")
    j = np.linalg.solve(a, b)  # the derivative of y*(x); ∇Φ is linear in x with the following Hessian
    hessian = np.eye(p) + e @ j + j.T @ e.T + j.T @ d @ j
    return float(np.sum(hessian @ hessian * found[:p, :p]))


@pytest.mark.parametrize("panel", ["T = 64,000", "τ̄ = 64"])
def test_kept_errors_of_drawn_clients_are_those_of_their_covariance(panel: str) -> None:
    """The stored mean of ‖∇Φ‖² over the second half of the rounds agrees with `of_draws`.

    In these two panels the steps of all rounds together are the longest, so that a run has the most independent values.
    The mean of 8 seeds errs by less than a tenth. With τ̄ = 1 it errs by a quarter, mostly because of a single seed.
    """
    (figure,) = find(["theory-participation-steps"])
    kept, tasks = json.loads(figure.file.with_suffix(".json").read_text("utf-8")), experiments.TaskCache()
    specs = [run.spec for run in runs_of(figure, (panel, "SimFBO"), "quick", figure.file, {}, kept["seeds"])]
    curve = kept["panels"][panel]["SimFBO"]["curve"]
    cost, mean = np.array(curve["cost"]), np.array(curve["mean"])
    expected = np.mean([of_draws(spec, tasks(spec)) for spec in specs])
    assert mean[cost >= cost[-1] / 2].mean() == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("panel", ["κ = 4, N = 8", "κ = 4, N = 16", "κ = 16, N = 32", "κ = 16, N = 64"])
def test_kept_errors_of_a_series_are_those_of_its_fixed_point(panel: str) -> None:
    """The stored errors of FedNest agree with the x at which its biased hypergradient is zero.

    For y*(x) = Jx + k, the hypergradient with N terms is x + E y* + J_Nᵀ(D y* − Dt + Eᵀx), where J_N = Σ_{n<N} (I − A)ⁿ
    B. The runs are in single precision, which changes the smallest errors by a tenth.
    """
    (figure,) = find(["theory-series"])
    kept, tasks = json.loads(figure.file.with_suffix(".json").read_text("utf-8")), experiments.TaskCache()
    for run, value in zip(
        runs_of(figure, (panel, "FedNest"), "quick", figure.file, {}, kept["seeds"]),
        kept["panels"][panel]["FedNest"]["values"],
        strict=True,
    ):
        task = tasks(run.spec)
        row = {**task.clients.inner.row(0), **task.clients.outer.row(0)}  # all clients are alike
        a, b, c, d, e, t = (np.mean(row[name], 0, dtype=float) for name in "ABcDEt")
        terms, exact = run.spec.algorithm.value.hypergradient.solver.terms, np.linalg.inv(a)
        series = sum(np.linalg.matrix_power(np.eye(len(a)) - a, n) for n in range(terms))
        j, k = exact @ b, exact @ c
        ends = []
        for inverse in (exact, series):
            turned = (inverse @ b).T
            system = np.eye(b.shape[1]) + e @ j + turned @ (d @ j + e.T)
            ends.append(np.linalg.solve(system, -e @ k - turned @ (d @ k - d @ t)))
        assert value == pytest.approx(np.linalg.norm(ends[1] - ends[0]) / np.linalg.norm(ends[0]), rel=0.12)
