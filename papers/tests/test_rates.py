"""The stored means of SimFBO and ShroFBO agree with expected values, which are computed by linear algebra."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from papers.figure import find
from papers.play import runs_of

from fedbilevel import experiments


def expected(spec: Any, task: Any, taus: np.ndarray) -> float:
    """Return the mean of E ‖∇Φ(x_t)‖² over the rounds, if all local steps of a round are taken at its first point.

    Let z be (x, y, v) minus its limit, and S the step sizes of a round. A round is z ← z − S(Kz + noise). A sample of g
    adds noise to y through its c, and a sample of f adds noise to v through its Dt. The mean of τ_i samples at each of
    n clients has the variance Σ σ_i²/(n² τ_i), where σ_i² is the variance of a sample of client i.
    """
    rows = [{**task.clients.inner.row(i), **task.clients.outer.row(i)} for i in range(len(taus))]
    means = {name: np.stack([np.mean(row[name], 0, dtype=float) for row in rows]) for name in "ABcDEt"}
    a, b, c, d, e = (means[name].mean(0) for name in "ABcDE")
    (q, p), n = b.shape, len(taus)
    k = np.block([[np.eye(p), e, b.T], [-b, a, np.zeros((q, q))], [-e.T, -d, a]])
    constant = np.concatenate([np.zeros(p), -c, np.einsum("nij,nj->i", means["D"], means["t"]) / n])
    j = np.linalg.solve(a, b)
    hessian = np.eye(p) + e @ j + j.T @ e.T + j.T @ d @ j
    steps = taus.mean() * np.repeat([float(lr) for lr in spec.algorithm.value.server_lr], [p, q, q])
    noise = np.zeros_like(k)
    for row, dense, tau in zip(rows, means["D"], taus, strict=True):
        noise[p : p + q, p : p + q] += np.eye(q) * np.var(row["c"], 0).mean() / tau / n**2
        noise[p + q :, p + q :] += dense @ dense.T * np.var(row["t"], 0).mean() / tau / n**2
    noise = steps[:, None] * noise * steps
    start, total = np.linalg.solve(k, constant), 0.0  # minus the limit, because x, y and v start at 0
    moments, step = np.outer(start, start), np.eye(len(k)) - steps[:, None] * k
    for _ in range(spec.run.rounds):
        total += float(np.sum(hessian @ hessian * moments[:p, :p]))
        moments = step @ moments @ step.T + noise
    return total / spec.run.rounds


@pytest.mark.parametrize(("method", "taus"), [("SimFBO", [2]), ("ShroFBO", [1, 3])])
def test_kept_means_are_those_of_the_linear_rounds(method: str, taus: list[int]) -> None:
    """The stored mean of ‖∇Φ‖² over 300 rounds agrees with `expected`, to three times the error that comes from few
    seeds.

    The stored curve contains about every fifth round. With 8 seeds, the noise causes an error of about 4 % in the mean.
    """
    (figure,) = find(["theory-rate-simfbo"])
    panel = "T = 300"
    kept = json.loads(figure.file.with_suffix(".json").read_text("utf-8"))
    curve = kept["panels"][panel][method]["curve"]
    measured = np.trapezoid(curve["mean"], curve["cost"]) / curve["cost"][-1]
    tasks = experiments.TaskCache()
    specs = [run.spec for run in runs_of(figure, (panel, method), "quick", figure.file, {}, kept["seeds"])]
    predicted = np.mean([expected(spec, tasks(spec), np.resize(taus, 8)) for spec in specs])
    assert measured == pytest.approx(predicted, rel=0.12)
