"""Steps that adapt, compared with the best of several fixed steps, on a family of random problems and on tasks.

**The family.** A member is drawn by the seeds (family, group, number). GROUPS has the properties that members of a
group have in common. In ridge, logistic and Cox regression ("mix") and in softmax regression, x contains the exponents
of penalties b^x_j y_j², one for each feature. In "raw", x contains the penalties themselves, which become negative if a
step is too long. In "clean", a third of the samples have the wrong label, and sample i has the weight σ(x_i). In
"representation", x is a linear map.

For each member these are drawn: the base b, from e, 10 and 100; x0 in [-5, 2], one value for all entries or a value for
each; the scales of features, all 1 or from 0.1 to 30; how many features are always zero; how much clients differ in
their true models and in the scale of their samples; and the weights of clients.

The columns are the number of runs whose steps adapt; how many of them ended with numbers that are not finite; how many
ended above 1.001 times the outer loss of the start ("worse"); how many of these have a result that does not say so
("unsaid"); and quantiles of the loss at the end over the best of 12 pairs of fixed steps. The best of 12 is read from
family.json; with --fixed, it is computed.

**The tasks.** For each of twelve tasks there are two runs of SimFBO with the preset's batches and local steps, and with
the same number of exchanges. "Tuned" has the steps that were chosen from 16 pairs, by the outer loss at the end of runs
of this length. In the other run, steps adapt. The column "holds" says whether it ends within one percentage point of
accuracy, or of error, of the tuned run, or does so after twice the exchanges. Data sets are read from $FEDBILEVEL_DATA.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.algorithms.parts.adaptive_steps import with_steps
from fedbilevel.core.hyperparameters import OpenStep
from fedbilevel.experiments import resolve
from fedbilevel.experiments.runner import build, first_metric

FAMILY = 7  # the seed of the members for which the best of 12 is stored
KEPT = Path(__file__).with_suffix(".json")  # by method and group: the best of 12 for each member
ROUNDS = {"SimFBO": 300, "ShroFBO": 300, "FedBiO": 300, "AFBO": 150, "RABO": 150, "AggITD": 100, "FedNest": 60}
ROUNDS["FedMBO"] = 60  # each method makes 300 exchanges or more
FIXED = [(x, y) for x in (0.03, 0.3, 3.0) for y in (0.1, 0.3, 1.0, 3.0)]
"""The 12 pairs of fixed steps: (the step on x, the step on y and v).

The second step is in units of one over the largest inner curvature at the start.
"""
SHORT = 0.05  # steps that only determine the clients' drift are this share of the other steps
TASKS: dict[str, dict[str, Any]] = {
    "quadratic, κ = 10": {"name": "quadratic", "condition": 10.0},
    "quadratic, κ = 100": {"name": "quadratic", "condition": 100.0},
    "quadratic, κ = 10⁴": {"name": "quadratic", "condition": 1e4},
    "regularization, digits": {"name": "regularization", "data": "digits"},
    "regularization, Covertype": {"name": "regularization", "data": "covtype"},
    "hyper-cleaning, digits": {"name": "hyper_cleaning", "data": "digits"},
    "hospitals": {"name": "hospitals"},
    "loss tuning": {"name": "loss_tuning"},
    "representation, digits": {"name": "hyper_representation", "data": "digits"},
    "representation, MNIST iid": {"name": "hyper_representation", "data": "mnist", "partition_by": "iid"},
    "representation, MNIST shards": {"name": "hyper_representation", "data": "mnist", "partition_by": "shards"},
    "representation, Fashion-MNIST": {"name": "hyper_representation", "data": "fashion-mnist"},
}
PAIRS = list(itertools.product((0.01, 0.1, 1.0, 10.0), (0.03, 0.1, 0.3, 1.0)))
"""The pairs of steps on tasks: the step on x, and the step on y and v."""
QUICK = {"methods": ["SimFBO"], "groups": [11], "tasks": ["quadratic, κ = 10"]}


class Group(NamedTuple):
    """The properties that all members of a group have in common."""

    kind: str
    dim: int
    clients: int
    samples: int  # the number of samples of each client, for each loss
    local_steps: int
    batch_size: int | None
    asked: int  # the number of clients that are asked in each round
    members: int
    precision: int = 64


GROUPS = [
    Group("mix", 39, 6, 30, 5, None, 6, 32),
    Group("mix", 39, 6, 30, 5, None, 6, 24, 32),
    Group("mix", 100, 3, 60, 1, None, 3, 16),
    Group("mix", 39, 12, 30, 20, 8, 4, 32, 32),
    Group("representation", 20, 6, 40, 5, None, 6, 16),
    Group("softmax", 20, 6, 40, 5, None, 6, 16, 32),
    Group("raw", 10, 6, 60, 5, None, 6, 16),
    Group("mix", 10, 50, 20, 5, 8, 17, 24, 32),
    Group("mix", 20, 9, 40, 1, 8, 3, 24),
    Group("clean", 20, 6, 30, 5, 8, 6, 16, 32),
    Group("mix", 30, 3, 40, 20, None, 3, 16),
    Group("mix", 1, 6, 30, 5, None, 6, 16, 32),
]


class Member(NamedTuple):
    """A problem, with its samples, its weights, and the starting point of runs."""

    problem: fb.Bilevel
    outer: dict[str, np.ndarray]
    inner: dict[str, np.ndarray]
    weights: np.ndarray
    x0: np.ndarray
    y0: np.ndarray

    def outer_loss(self, x: Any, y: Any) -> float:
        """Return the outer loss of all clients."""
        return float(jnp.sum(self.weights * jax.vmap(lambda batch: self.problem.outer(x, y, batch))(self.outer)))

    def largest_curvature(self) -> float:
        """Return the largest eigenvalue of the inner Hessian at the start."""

        def inner(y: Any) -> Any:
            at = jnp.asarray(self.x0), y.reshape(self.y0.shape)
            losses = jax.vmap(lambda batch: self.problem.inner(*at, batch))(self.inner)
            return jnp.sum(self.weights * losses)

        return float(jnp.linalg.norm(jax.hessian(inner)(jnp.ravel(self.y0)), 2))


def logistic(s: Any, batch: dict[str, Any]) -> Any:
    """Return the logistic loss of each sample, for labels 0 and 1."""
    return jax.nn.softplus(s) - batch["t"] * s


def cox(s: Any, batch: dict[str, Any]) -> Any:
    """Return the loss of a batch by Cox's partial likelihood; "time" is the rank of a sample's time."""
    at_risk = batch["time"][None, :] >= batch["time"][:, None]
    return jnp.mean(batch["t"] * (jax.nn.logsumexp(jnp.where(at_risk, s[None, :], -1e9), axis=1) - s))


def loss(kind: str, y: Any, batch: dict[str, Any]) -> Any:
    """Return the mean loss of a batch, without penalties."""
    s = batch["u"] @ y
    if kind == "softmax":
        return jnp.mean(jax.nn.logsumexp(s, 1) - jnp.sum(s * batch["t"], 1))
    if kind == "clean":
        return jnp.mean(logistic(s, batch))
    ridge = 0.5 * jnp.mean((s - batch["t"]) ** 2)
    if kind != "mix":
        return ridge
    which = batch["which"][0]
    return jnp.where(which == 0, ridge, jnp.where(which == 1, jnp.mean(logistic(s, batch)), cox(s, batch)))


@cache
def problem_of(kind: str, batches: bool) -> fb.Bilevel:
    """Return the problem of a kind, with its two losses.

    The loss of Cox regression is not a mean over samples. So if a group has such members, and no batches, a client
    computes its losses from all of its samples at once.
    """

    def outer(x: Any, y: Any, batch: dict[str, Any]) -> Any:
        return loss(kind, x @ y if kind == "representation" else y, batch)

    def inner(x: Any, y: Any, batch: dict[str, Any]) -> Any:
        if kind == "representation":
            return outer(x, y, batch) + 0.05 * jnp.vdot(y, y)
        if kind == "clean":
            weights = jax.nn.sigmoid(x[batch["id"]])
            return jnp.mean(weights * logistic(batch["u"] @ y, batch)) + 0.01 * jnp.vdot(y, y)
        if kind == "raw":
            return outer(x, y, batch) + jnp.sum(x * y**2) + 1e-3 * jnp.vdot(y, y)
        penalties = jnp.exp(x * batch["log base"][0])
        return outer(x, y, batch) + jnp.sum((penalties[:, None] if y.ndim == 2 else penalties) * y**2)

    if kind != "mix" or batches:
        return fb.Bilevel(outer, inner)
    return fb.Bilevel(of_all_samples(outer), of_all_samples(inner))


def of_all_samples(loss: Any) -> fb.WholeLoss:
    """Wrap a loss for clients whose samples are all their own; here all clients have equally many samples."""
    return fb.WholeLoss(lambda x, y, samples, valid: loss(x, y, samples))


def member(group: int, number: int, family: int = FAMILY) -> Member:
    """Draw a member of the family."""
    kind, d, clients, n, _, batch_size, *_ = GROUPS[group]
    r = np.random.default_rng([family, group, number])
    model = ("ridge", "logistic", "cox")[number % 3] if kind == "mix" else kind
    base = r.choice([np.e, 10.0, 100.0])
    x0 = np.full(d, r.uniform(-5, 2)) if r.random() < 0.7 else r.uniform(-5, 2, d)
    scales = np.ones(d) if r.random() < 0.5 else 10 ** r.uniform(-1, 1.477, d)
    if r.random() < 0.3:
        scales[max(1, r.integers(1, d + 1)) :] = 0
    apart, spread = r.choice([0, 0.5, 1.0]), r.choice([0, 0.5])
    truth = np.zeros((d, 3) if kind == "softmax" else d)
    truth[:5] = r.normal(size=truth[:5].shape)
    weights = np.ones(clients) if r.random() < 0.5 else r.uniform(0.3, 3, clients)

    def samples(wrong_labels: bool) -> dict[str, np.ndarray]:
        features = r.normal(size=(clients, n, d)) * np.exp(spread * r.normal(size=(clients, 1, 1)))
        own = truth + apart * r.normal(size=(clients, *truth.shape)) * (truth != 0)
        z = np.einsum("mnd,md...->mn...", features, own)
        batch = {"u": features * scales, "log base": np.full((clients, n), np.log(base))}
        if model == "softmax":
            batch["t"] = np.eye(3)[np.argmax(z + r.gumbel(size=z.shape), -1)]
        elif model in ("logistic", "clean"):
            batch["t"] = (r.random(z.shape) < 1 / (1 + np.exp(-z))).astype(float)
        elif model == "cox":
            event, censored = r.exponential(np.exp(-np.clip(z, -20, 20))), r.exponential(2.0, z.shape)
            batch["time"] = np.argsort(np.argsort(np.minimum(event, censored), -1), -1).astype(float)
            batch["t"] = (event <= censored).astype(float)
        else:
            batch["t"] = z + r.normal(size=z.shape)
        if kind == "mix":
            batch["which"] = np.full((clients, n), float(number % 3))
            batch.setdefault("time", np.zeros((clients, n)))
        if kind == "clean":
            batch["id"] = np.arange(clients * n).reshape(clients, n)
            if wrong_labels:
                batch["t"] = np.where(r.random(z.shape) < 0.3, 1 - batch["t"], batch["t"])
        return batch

    inner, outer, y0 = samples(True), samples(False), np.zeros_like(truth)
    if kind == "raw":
        x0 = np.full(d, 10 ** r.uniform(-2, 1))
    if kind == "clean":
        x0 = np.full(clients * n, r.uniform(-3, 2))
    if kind == "representation":
        x0, y0 = r.normal(size=(d, 4)) * 10 ** r.uniform(-1, 0.5) / np.sqrt(d), np.zeros(4)
    return Member(problem_of(kind, batch_size is not None), outer, inner, weights / weights.sum(), x0, y0)


def method(name: str, group: int) -> Any:
    """Return a method with the batches and the numbers of local steps of a group, and with steps that adapt."""
    made, steps = getattr(fb, name)(batch_size=GROUPS[group].batch_size), GROUPS[group].local_steps
    if hasattr(made, "local_steps"):
        return replace(made, local_steps=steps)
    return replace(made, inner=replace(made.inner, local_steps=steps))


def with_fixed(name: str, group: int, x: float, y: float) -> Any:
    """Return a method with a pair of fixed steps.

    The steps are for a round: several local steps divide them among themselves.
    """
    bare = method(name, group)
    several = getattr(bare, "local_steps", 1)

    def size(step: OpenStep) -> float:
        one = (x if step.of == "x" else y) / several
        return SHORT * one if step.kind in ("drift", "short") else one

    return with_steps(bare, size)


def run(algorithm: Any, drawn: Member, name: str, group: int) -> fb.Result:
    """Run a method on a member, for as many rounds as make 300 exchanges."""
    given = drawn.problem, fb.Clients(drawn.outer, drawn.inner, weights=drawn.weights), drawn.x0, drawn.y0
    cohort = None if GROUPS[group].asked == GROUPS[group].clients else GROUPS[group].asked
    return fb.solve(algorithm, *given, rounds=ROUNDS[name], cohort=cohort, key=group, progress=False)


class End(NamedTuple):
    """The end of a run whose steps adapt."""

    start: float  # the outer loss of all clients at the start
    loss: float  # the same at the end; infinity if it is not finite
    said: tuple[str, ...]  # the remarks of the result, and why the run stopped


def played(name: str, group: int, number: int, family: int = FAMILY) -> End:
    """Run a method with steps that adapt on a member."""
    drawn = member(group, number, family)
    with jax.enable_x64(GROUPS[group].precision == 64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = drawn.outer_loss(drawn.x0, drawn.y0)
        try:
            result = run(method(name, group), drawn, name, group)
        except fb.errors.NonFiniteError as error:
            return End(start, np.inf, (str(error),))
        end = drawn.outer_loss(result.x, result.y)
    said = tuple(filter(None, [*result.remarks, result.stopped]))
    return End(start, end if np.isfinite(end) else np.inf, said)


def best_of_12(name: str, group: int, number: int) -> float:
    """Run a method with each pair of fixed steps on a member. Return the least outer loss at the end."""
    drawn, ends = member(group, number), [np.inf]
    with jax.enable_x64(GROUPS[group].precision == 64), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = drawn.largest_curvature()
        for x, y in FIXED:
            try:
                result = run(with_fixed(name, group, x, y / top), drawn, name, group)
            except (fb.errors.NonFiniteError, fb.errors.ConfigurationError):  # a Neumann step of 2/L is refused
                continue
            ends.append(drawn.outer_loss(result.x, result.y))
    return min(end for end in ends if not np.isnan(end))


def kept(name: str, group: int) -> list[float]:
    """Read the least loss of the 12 pairs from the file, for each member of a group; infinity if all pairs diverged.

    These runs were made without `solve`, which refuses a Neumann step or a step of AggITD that is above 2/L.
    """
    return [np.inf if best is None else best for best in json.loads(KEPT.read_text("utf-8"))[name][str(group)]]


def cells(ends: list[End], tuned: list[float]) -> list[str]:
    """Return the cells of a row of the table."""
    worse = [end for end in ends if end.loss > 1.001 * end.start]
    ratios = np.array([end.loss / best for end, best in zip(ends, tuned, strict=True)])
    quantiles = [f"{one:.4g}" for one in np.quantile(ratios, [0.5, 0.9, 1.0], method="nearest")]
    counts = sum(not np.isfinite(end.loss) for end in ends), len(worse), sum(not end.said for end in worse)
    return [str(len(ends)), *map(str, counts), *quantiles]


def on_family(name: str, groups: Sequence[int], fixed: bool) -> None:
    """Print a row for each group, and one for all of them."""
    ends: list[End] = []
    tuned: list[float] = []
    for group in groups:
        g = GROUPS[group]
        of_group = [played(name, group, number) for number in range(g.members)]
        best = [best_of_12(name, group, number) for number in range(g.members)] if fixed else kept(name, group)
        label = f"{g.kind}, d = {g.dim}, {g.clients} clients, τ = {g.local_steps}, {g.precision} bits"
        row(name, label, *cells(of_group, best))
        ends += of_group
        tuned += best
    row(name, "all", *cells(ends, tuned))


def on_task(label: str) -> list[str]:
    """Return the cells of a task's row."""
    spec = resolve({"task": TASKS[label], "algorithm": "simfbo"})
    made, rounds = build(spec), spec.run.rounds
    metric = next((one for one in made.task.metrics if "accuracy" in one), first_metric(made.task))
    better = 1 if "accuracy" in metric else -1

    def ended(x: float | None, y: float | None, rounds: int) -> Any:
        """Run with one step for x, and one for y and v; None adapts. Return None if the run diverged or was refused."""
        method = replace(made.algorithm, server_lr=fb.XYV(x=x, y=y, v=y), client_lr=None)
        options: dict[str, Any] = {"rounds": rounds, "eval_every": max(1, rounds // 20), "metrics": made.task.metrics}
        try:
            return made._replace(algorithm=method).solve(spec.run, **options).history
        except (fb.errors.NonFiniteError, fb.errors.ConfigurationError):
            return None

    tried = [history for pair in PAIRS if (history := ended(*pair, rounds)) is not None]
    finite = [history for history in tried if np.isfinite(history["outer_loss"][-1])]
    tuned = float(min(finite, key=lambda history: history["outer_loss"][-1])[metric][-1])
    adapting = ended(None, None, 2 * rounds)
    ends = np.full(3, np.nan) if adapting is None else adapting[metric]
    once, twice = ends[len(ends) // 2], ends[-1]
    holds = better * (once - tuned) >= -0.01 or better * (twice - tuned) >= 0
    return [metric, *(f"{one:.4g}" for one in (tuned, once, twice)), "yes" if holds else "no"]


def main(
    methods: tuple[str, ...] = tuple(ROUNDS),
    groups: tuple[int, ...] = tuple(range(len(GROUPS))),
    fixed: bool = False,
    tasks: tuple[str, ...] = tuple(TASKS),
    parts: tuple[str, ...] = ("family", "tasks"),
) -> None:
    if "family" in parts:
        head("method", "group", "runs", "not finite", "worse", "unsaid", "median", "90 %", "largest")
        for name in methods:
            on_family(name, groups, fixed)
    if "tasks" in parts:
        warnings.simplefilter("ignore")
        head("task", "metric", "tuned", "adapting", "after twice the exchanges", "holds")
        for label in tasks:
            row(label, *on_task(label))
