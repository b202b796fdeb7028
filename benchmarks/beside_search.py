"""Bilevel optimization beside hyperparameter search, every exchange counted: penalties of logistic models.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/beside_search.py [--splits 3] [--picture FILE]

x holds the log-penalties of groups of features, in [-12, 0]; the intercept's is fixed. f is the loss on clients'
validation samples, g that on their training samples, with the penalties (as in the task `regularization`). All methods
begin at x = -6 and y = 0, and take all samples of everyone in each exchange. SimFBO and FedNest have their default
steps. A trial of a search trains y at a fixed x by SimFBO's own local steps on y, whose size adapts to the curvature,
from the best y so far; only exchanges that move y are counted. The table has the least validation loss after the
first tenth of the exchanges and at the end, its difference from SimFBO's in pairs, and what is chosen by it on test
samples, seen once: 95 % intervals are Student's over splits, and for accuracy those of the bootstrap over samples.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optuna
from matplotlib.figure import Figure
from scipy.stats import t as student

import fedbilevel as fb
from fedbilevel.data import load_heart
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.networks import cross_entropy
from fedbilevel.tasks.regularization import logits, with_one

LOW, HIGH, START, INTERCEPT = -12.0, 0.0, -6.0, -7.0
PERSON, SYMPTOM, BLOOD, HEART = range(4)
GROUPS = [PERSON, PERSON, BLOOD, BLOOD, BLOOD, HEART, SYMPTOM, HEART, SYMPTOM, SYMPTOM, SYMPTOM, HEART, HEART]
PROBLEMS = {  # by name: data, the group of each feature, exchanges
    "hospitals, d = 1": ("heart", [0] * 13, 1000),
    "hospitals, d = 4": ("heart", GROUPS, 1000),
    "hospitals, d = 13": ("heart", list(range(13)), 1000),
    "covtype, d = 54": ("covtype", list(range(54)), 1000),
    "digits, d = 64": ("digits", list(range(64)), 1000),
}
CLIENTS, SAMPLES = 18, {"covtype": 400, "digits": 79}  # of covtype and digits, each client's, half of them validation
RUNGS = {"random search": (40,), "TPE": (40,), "halving": (10, 30, 90)}  # exchanges of a trial
FIXED = fb.SimFBO(server_lr=fb.XYV(x=1e-30, y=None, v=None), batch_size=None)  # x stays
METHODS = {"SimFBO": fb.SimFBO(batch_size=None), "FedNest": fb.FedNest(batch_size=None), "x = -6": FIXED}
EVERYONE = [*METHODS, *RUNGS]
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Setting(NamedTuple):
    """A problem on a split."""

    problem: fb.Bilevel
    clients: fb.Clients
    metrics: dict[str, Callable[[Any, Any], Any]]
    x0: np.ndarray
    y0: np.ndarray
    test: dict[str, np.ndarray]


def shares(data: str, split: int) -> tuple[list[Any], list[Any], dict[str, np.ndarray]]:
    """Training and validation samples of each client, and everyone's test samples."""
    parts = []
    if data == "heart":
        for name in HOSPITALS:
            rows, labels = load_heart(name)
            mine, test = stratified(labels, TRAINING, FLAMBY + split)
            train, valid = (mine[part] for part in stratified(labels[mine], 0.6, FLAMBY + split))
            spread = np.where(np.ptp(rows[mine], axis=0) > 0, rows[mine].std(0), 1)
            rows = with_one((rows - rows[mine].mean(0)) / spread)
            parts.append([{"row": rows[part], "label": labels[part]} for part in (train, valid, test)])
        train, valid, tests = zip(*parts, strict=True)
        return list(train), list(valid), {key: np.concatenate([one[key] for one in tests]) for key in tests[0]}
    found, rng = load_rows(data, 0.0, 0).standardised(), np.random.default_rng(split)
    rows, labels = with_one(found.train_images), found.train_labels
    drawn = rng.permutation(len(labels))[: CLIENTS * SAMPLES[data]]
    dealt = [part for mine in np.array_split(drawn, CLIENTS) for part in np.array_split(mine, 2)]
    samples = [{"row": rows[part], "label": labels[part]} for part in dealt]
    tested = rng.permutation(len(found.test_labels))[:5000] if data == "covtype" else slice(None)
    return samples[::2], samples[1::2], {"row": with_one(found.test_images)[tested], "label": found.test_labels[tested]}


def setting(name: str, split: int) -> Setting:
    data, groups, _ = PROBLEMS[name]
    train, valid, test = shares(data, split)
    of, classes = np.array([*groups, max(groups) + 1]), max(int(one["label"].max()) for one in train) + 1

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(logits(y, batch["row"]), batch["label"])

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return outer(x, y, batch) + jnp.vdot(jnp.exp(jnp.append(x, INTERCEPT)[of]), jnp.sum(y**2, axis=1))

    def validation(x: Any, y: Any) -> Any:
        return sum(p * outer(x, y, batch) for p, batch in zip(clients.weights, valid, strict=True))

    clients = fb.Clients(valid, train, weights="size")
    problem = fb.Bilevel(outer, inner, project_x=fb.projections.box(LOW, HIGH))
    x0, y0 = np.full(max(groups) + 1, START), np.zeros((len(of), 1 if classes == 2 else classes))
    return Setting(problem, clients, {"validation": validation}, x0, y0, test)


def solved(method: Any, at: Setting, x: Any, y: Any, rounds: int) -> Any:
    given = {"rounds": rounds, "eval_every": 1, "metrics": at.metrics, "best_by": "validation", "progress": False}
    return fb.solve(method, at.problem, at.clients, x, y, **given)


def by_method(name: str, at: Setting, budget: int) -> tuple[np.ndarray, Any]:
    """The losses (rows of exchanges and loss) and the best (x, y) of a method with its default steps."""
    one = solved(METHODS[name], at, at.x0, at.y0, 1).ledger.exchanges
    run = solved(METHODS[name], at, at.x0, at.y0, budget // one)
    return np.column_stack([run.history["exchanges"], run.history["validation"]]), run.best


def by_search(name: str, at: Setting, budget: int, seed: int) -> tuple[np.ndarray, Any]:
    """The same of a search; a solve's first round only measures curvature, and is not counted."""
    sampler = optuna.samplers.TPESampler(seed=seed) if name == "TPE" else optuna.samplers.RandomSampler(seed=seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[name][0], reduction_factor=3)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.enqueue_trial({f"x{i}": START for i in range(len(at.x0))})
    rows, best, spent = [], None, 0
    while spent < budget:
        trial, y, pruned, done = study.ask(), at.y0 if best is None else best.y, False, 0
        x = np.array([trial.suggest_float(f"x{i}", LOW, HIGH) for i in range(len(at.x0))])
        for rung in RUNGS[name]:
            run = solved(FIXED, at, x, y, 1 + min(rung - done, budget - spent))
            losses, y = run.history["validation"][1:], run.y
            rows += [(spent + i, loss) for i, loss in enumerate(losses)]
            best = run.best if best is None or run.best.value < best.value else best
            spent, done = spent + len(losses) - 1, rung
            trial.report(losses[-1], done)
            pruned = trial.should_prune()
            if pruned or spent >= budget:
                break
        study.tell(trial, None if pruned else losses[-1], optuna.trial.TrialState.PRUNED if pruned else None)
    return np.array(rows), best


def play(name: str, split: int, budget: int) -> dict[str, np.ndarray]:
    """Of each method: the least loss so far, after 0 to `budget` exchanges, and loss and accuracy on test samples."""
    at, found = setting(name, split), {}
    for method in EVERYONE:
        rows, best = by_method(method, at, budget) if method in METHODS else by_search(method, at, budget, split)
        least = np.full(budget + 1, np.inf)
        np.minimum.at(least, rows[:, 0].astype(int), rows[:, 1])
        z, labels = np.asarray(logits(jnp.asarray(best.y), at.test["row"])), at.test["label"]
        found[f"{method}/least"] = np.minimum.accumulate(least)
        loss = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - z[np.arange(len(z)), labels]
        found[f"{method}/test"] = np.array([loss, z.argmax(1) == labels])
        found[f"{method}/x"] = np.asarray(best.x)
    return found


def half(values: np.ndarray) -> float:
    """Half the 95 % interval of a mean over splits."""
    return float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)


def sampled(hits: list[np.ndarray]) -> float:
    """Half the 95 % interval of the mean accuracy, by drawing test samples of each split anew."""
    rng = np.random.default_rng(0)
    drawn = [np.mean([rng.choice(hit, len(hit)).mean() for hit in hits]) for _ in range(500)]
    return float(np.subtract(*np.quantile(drawn, [0.975, 0.025])) / 2)


def print_table(name: str, runs: list[dict[str, np.ndarray]], budget: int) -> None:
    print(f"\n{name}: {budget:,} exchanges, {len(runs)} splits")
    print(f"{'':15}{'a tenth':>9}{'end':>9}{'less SimFBO':>18}{'test loss':>11}{'accuracy':>18}")
    for method in EVERYONE:
        early, end, pair = (
            np.array([one[f"{method}/least"][at] - less * one["SimFBO/least"][at] for one in runs])
            for at, less in ((budget // 10, 0), (budget, 0), (budget, 1))
        )
        loss = np.mean([one[f"{method}/test"][0].mean() for one in runs])
        hits = [one[f"{method}/test"][1] for one in runs]
        accuracy = f"{100 * np.mean([hit.mean() for hit in hits]):.1f} ± {100 * sampled(hits):.1f} %"
        print(
            f"{method:15}{early.mean():9.4f}{end.mean():9.4f}{pair.mean():+10.4f} ± {half(pair):.4f}"
            f"{loss:11.4f}{accuracy:>18}",
            flush=True,
        )


def draw(found: dict[str, list[dict[str, np.ndarray]]], file: str) -> None:
    """Draw the mean over splits of the least validation loss so far, against exchanges."""
    figure = Figure(figsize=(3.2 * len(found), 3), layout="constrained")
    for axes, (name, runs) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for place, method in enumerate(EVERYONE):
            mean = np.mean([one[f"{method}/least"] for one in runs], axis=0)
            shown = np.isfinite(mean)
            axes.plot(np.arange(len(mean))[shown], mean[shown], "-" if method in METHODS else "--", c=f"C{place}")
        tail = np.concatenate([np.mean([one[f"{m}/least"] for one in runs], axis=0)[30:] for m in EVERYONE])
        axes.set(title=name, xlabel="exchanges", xscale="log", xlim=(10, None))
        axes.set_ylim(tail.min() - 0.02 * np.ptp(tail), np.quantile(tail, 0.98))
    figure.axes[0].set_ylabel("least validation loss so far")
    figure.legend(figure.axes[0].lines, EVERYONE, loc="outside lower center", ncols=len(EVERYONE), frameon=False)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--picture", default="beside-search.png")
    asked, found = parser.parse_args(), {}
    for name, (_, _, budget) in PROBLEMS.items():
        found[name] = [play(name, split, budget) for split in range(asked.splits)]
        print_table(name, found[name], budget)
        draw(found, asked.picture)


if __name__ == "__main__":
    main()
