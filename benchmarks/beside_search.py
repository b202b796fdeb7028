"""Bilevel optimization beside hyperparameter search, every exchange counted: penalties and weights of logistic models.

x holds the log-penalties of groups of features, in [-12, 0]; the intercept's is fixed. f is the loss on clients'
validation samples, g that on their training samples, with the penalties (as in the task `regularization`). "Noise" adds
40 columns of random numbers to the patients' 13. Where x has a weight for each client, their training losses are
multiplied by exp(x), over the mean of these, and every second client has a random label in half of its training
samples; all penalties are exp(-7). All methods begin at x = -6 and y = 0, and take all samples of everyone in each
exchange, or of as many clients as --cohort says. SimFBO and FedNest have their default steps. A trial of a search
trains y at a fixed x by SimFBO's own local steps on y, whose size adapts to the curvature, from the best y so far; only
exchanges that move y are counted, and everyone's validation loss costs nothing. "One penalty" is a search along the
diagonal, and "x = -6" no search at all. Data sets are read from $FEDBILEVEL_DATA.

Differences are to SimFBO, with 95 % intervals; the last column has the exchanges after which SimFBO was as low.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optuna
from scipy.stats import t as student

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.data import load_heart
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.display.curves import Curve, draw_panel, encoded, new_figure, typography
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.networks import cross_entropy
from fedbilevel.tasks.regularization import logits, with_one

LOW, HIGH, START, INTERCEPT = -12.0, 0.0, -6.0, -7.0
PERSON, SYMPTOM, BLOOD, HEART = range(4)
GROUPS = [PERSON, PERSON, BLOOD, BLOOD, BLOOD, HEART, SYMPTOM, HEART, SYMPTOM, SYMPTOM, SYMPTOM, HEART, HEART]
PROBLEMS = {  # by name: data, and the group of each feature; none: a weight for each client
    "hospitals, d = 1": ("heart", [0] * 13),
    "hospitals, d = 4": ("heart", GROUPS),
    "hospitals, d = 13": ("heart", list(range(13))),
    "hospitals and noise, d = 53": ("noisy heart", list(range(53))),
    "covtype, d = 54": ("covtype", list(range(54))),
    "digits, d = 64": ("digits", list(range(64))),
    "digits, wrong labels, d = 18": ("wrong digits", []),
    "covtype, wrong labels, d = 18": ("wrong covtype", []),
}
NOISE = 40  # columns
BUDGET, EARLY = 1000, 100  # exchanges of each method, and after how many it is also looked at
QUICK = {"problems": ["hospitals, d = 4"], "splits": [0, 1]}
CLIENTS, SAMPLES = 18, {"covtype": 400, "digits": 79}  # of each client of covtype and digits, half of them validation
RUNGS = {"random search": (40,), "TPE": (40,), "TPE, one penalty": (40,), "halving": (20, 60, 180)}
"""Of each search the exchanges of a trial, or its rungs: the best of a few on split 100, which is in no result."""
FIXED = fb.SimFBO(server_lr=fb.XYV(x=1e-30, y=None, v=None), batch_size=None)  # x stays
METHODS = {"SimFBO": fb.SimFBO(batch_size=None), "FedNest": fb.FedNest(batch_size=None), "x = -6": FIXED}
EVERYONE = [*METHODS, *RUNGS]
optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", fb.errors.NumericalWarning)  # a trial may end worse than it began


class Setting(NamedTuple):
    """A problem on a split, and how many clients an exchange asks; None: all."""

    problem: fb.Bilevel
    clients: fb.Clients
    metrics: dict[str, Callable[[Any, Any], Any]]
    x0: np.ndarray
    y0: np.ndarray
    test: dict[str, np.ndarray]
    cohort: int | None


def shares(data: str, split: int) -> tuple[list[Any], list[Any], dict[str, np.ndarray]]:
    """Return the training and validation samples of each client, and the test samples of all."""
    parts, rng = [], np.random.default_rng(split)
    if data.endswith("heart"):
        for name in HOSPITALS:
            rows, labels = load_heart(name)
            mine, test = stratified(labels, TRAINING, FLAMBY + split)
            train, valid = (mine[part] for part in stratified(labels[mine], 0.6, FLAMBY + split))
            spread = np.where(np.ptp(rows[mine], axis=0) > 0, rows[mine].std(0), 1)
            noise = rng.normal(size=(len(rows), NOISE if data.startswith("noisy") else 0))
            rows = with_one(np.hstack([(rows - rows[mine].mean(0)) / spread, noise]))
            parts.append([{"row": rows[part], "label": labels[part]} for part in (train, valid, test)])
        train, valid, tests = zip(*parts, strict=True)
        return list(train), list(valid), {key: np.concatenate([one[key] for one in tests]) for key in tests[0]}
    wrong, name = data.startswith("wrong"), data.removeprefix("wrong ")
    found = load_rows(name, 0.0, 0).standardised()
    rows, labels = with_one(found.train_images), found.train_labels
    drawn = rng.permutation(len(labels))[: CLIENTS * SAMPLES[name]]
    dealt = [part for mine in np.array_split(drawn, CLIENTS) for part in np.array_split(mine, 2)]
    samples = [{"row": rows[part], "label": labels[part]} for part in dealt]
    tested = rng.permutation(len(found.test_labels))[:5000] if name == "covtype" else slice(None)
    train = samples[::2]
    for client in range(CLIENTS) if wrong else ():
        own = train[client]["label"].copy()
        if client % 2:
            own[::2] = rng.permutation(labels)[: len(own[::2])]
        train[client] |= {"label": own, "client": np.full(len(own), client)}
    return train, samples[1::2], {"row": with_one(found.test_images)[tested], "label": found.test_labels[tested]}


def setting(name: str, split: int, cohort: int | None) -> Setting:
    data, groups = PROBLEMS[name]
    train, valid, test = shares(data, split)
    features, classes = train[0]["row"].shape[1], max(int(one["label"].max()) for one in train) + 1
    of = np.array([*groups, max(groups) + 1]) if groups else None

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return cross_entropy(logits(y, batch["row"]), batch["label"])

    def inner(x: Any, y: Any, batch: Any) -> Any:
        if of is None:
            weight = jnp.exp(x[batch["client"][0]]) / jnp.mean(jnp.exp(x))
            return weight * outer(x, y, batch) + jnp.exp(INTERCEPT) * jnp.sum(y**2)
        return outer(x, y, batch) + jnp.vdot(jnp.exp(jnp.append(x, INTERCEPT)[of]), jnp.sum(y**2, axis=1))

    def validation(x: Any, y: Any) -> Any:
        return sum(p * outer(x, y, batch) for p, batch in zip(clients.weights, valid, strict=True))

    clients = fb.Clients(valid, train, weights="size")
    problem = fb.Bilevel(outer, inner, project_x=fb.projections.box(LOW, HIGH))
    x0, y0 = (
        np.full(CLIENTS if of is None else max(groups) + 1, START),
        np.zeros((features, classes if classes > 2 else 1)),
    )
    return Setting(problem, clients, {"validation": validation}, x0, y0, test, cohort)


def solved(method: Any, at: Setting, x: Any, y: Any, rounds: int) -> Any:
    given = {"rounds": rounds, "eval_every": 1, "metrics": at.metrics, "best_by": "validation", "progress": False}
    return fb.solve(method, at.problem, at.clients, x, y, cohort=at.cohort, **given)


def by_method(name: str, at: Setting) -> tuple[np.ndarray, Any]:
    """Return the losses (rows of exchanges and loss) and the best (x, y) of a method with its default steps."""
    one = solved(METHODS[name], at, at.x0, at.y0, 1).ledger.exchanges
    run = solved(METHODS[name], at, at.x0, at.y0, BUDGET // one)
    return np.column_stack([run.history["exchanges"], run.history["validation"]]), run.best


def by_search(name: str, at: Setting, seed: int) -> tuple[np.ndarray, Any]:
    """Return the same of a search; a solve's first round only measures curvature, and is not counted."""
    sampler = (optuna.samplers.TPESampler if "TPE" in name else optuna.samplers.RandomSampler)(seed=seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=RUNGS[name][0], reduction_factor=3)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    names = [f"x{i}" for i in range(1 if "one penalty" in name else len(at.x0))]
    study.enqueue_trial(dict.fromkeys(names, START))
    rows, best, spent = [], None, 0
    while spent < BUDGET:
        trial, y, pruned, done = study.ask(), at.y0 if best is None else best.y, False, 0
        x = np.resize([trial.suggest_float(one, LOW, HIGH) for one in names], len(at.x0))
        for rung in RUNGS[name]:
            run = solved(FIXED, at, x, y, 1 + min(rung - done, BUDGET - spent))
            losses, y = run.history["validation"][1:], run.y
            rows += [(spent + i, loss) for i, loss in enumerate(losses)]
            best = run.best if best is None or run.best.value < best.value else best
            spent, done = spent + len(losses) - 1, rung
            trial.report(losses[-1], done)
            pruned = trial.should_prune()
            if pruned or spent >= BUDGET:
                break
        study.tell(trial, None if pruned else losses[-1], optuna.trial.TrialState.PRUNED if pruned else None)
    return np.array(rows), best


def compare(name: str, split: int, cohort: int | None) -> dict[str, np.ndarray]:
    """Return of each method the least loss so far, after 0, 1, … exchanges, and loss and accuracy on test samples."""
    at, found = setting(name, split, cohort), {}
    several_penalties = len(PROBLEMS[name][1]) > 0 and len(at.x0) > 1
    for method in EVERYONE if several_penalties else [one for one in EVERYONE if "one penalty" not in one]:
        rows, best = by_method(method, at) if method in METHODS else by_search(method, at, split)
        least = np.full(BUDGET + 1, np.inf)
        np.minimum.at(least, rows[:, 0].astype(int), rows[:, 1])
        z, labels = np.asarray(logits(jnp.asarray(best.y), at.test["row"])), at.test["label"]
        losses = np.logaddexp.reduce(z, axis=1) - z[np.arange(len(z)), labels]
        found |= {f"{method}/least": np.minimum.accumulate(least), f"{method}/x": np.asarray(best.x)}
        found |= {f"{method}/loss": losses, f"{method}/right": z.argmax(1) == labels}
    return found


def measured(name: str, splits: Sequence[int], cohort: int | None) -> dict[str, np.ndarray]:
    """Return the same for several splits, stacked."""
    found = [compare(name, split, cohort) for split in splits]
    return {key: np.stack([one[key] for one in found]) for key in found[0]}


def difference(values: np.ndarray, to: np.ndarray) -> str:
    """Write the mean paired difference over splits, and half its 95 % Student interval."""
    change, n = values - to, len(values)
    return f"{change.mean():+.4f} ± {student.ppf(0.975, n - 1) * change.std(ddof=1) / np.sqrt(n):.4f}"


def interval(right: np.ndarray) -> str:
    """Write a 95 % bootstrap interval, in %, of the mean over splits, for which the same test samples are drawn."""
    each, rng = 100 * right.mean(0), np.random.default_rng(0)
    low, high = np.quantile([rng.choice(each, len(each)).mean() for _ in range(2000)], [0.025, 0.975])
    return f"[{low:.1f}, {high:.1f}]"


def rows(name: str, of: dict[str, np.ndarray]) -> None:
    """Print the rows of a problem."""
    for method in (one for one in EVERYONE if f"{one}/least" in of):
        valid, test, right = of[f"{method}/least"][:, -1], of[f"{method}/loss"].mean(1), 1.0 * of[f"{method}/right"]
        early = of[f"{method}/least"][:, EARLY]
        cells = [f"{early.mean():.4f}", f"{valid.mean():.4f}", difference(valid, of["SimFBO/least"][:, -1])]
        cells += [f"{test.mean():.4f}", difference(test, of["SimFBO/loss"].mean(1))]
        cells += [f"{100 * right.mean():.1f} {interval(right)}"]
        cells += [f"{100 * (right - of['SimFBO/right']).mean():+.1f} {interval(right - of['SimFBO/right'])}"]
        after = np.argmax(of["SimFBO/least"].mean(0) <= valid.mean())  # 0 where never
        row(name, method, *cells, after or "never")


def draw(found: dict[str, dict[str, np.ndarray]], file: Path) -> None:
    """Draw the least validation loss so far, the mean over splits, against exchanges; a panel for each problem."""
    with typography((13.0, 11.4)):
        figure = new_figure((13.0, 11.4))
        grid = figure.subplots(3, 3).flat
        for axes, (name, of) in zip(grid, found.items(), strict=False):
            means = {method: of[f"{method}/least"].mean(0) for method in EVERYONE if f"{method}/least" in of}
            curves = [Curve(method, {"exchanges": np.arange(len(mean))}, mean) for method, mean in means.items()]
            draw_panel(axes, curves, "exchanges", percent=False, places=[EVERYONE.index(one) for one in means])
            low, high = min(mean[-1] for mean in means.values()), means["x = -6"][20]  # most fall from far above
            axes.set(title=name, ylim=(low - 0.05 * (high - low), high + 0.05 * (high - low)), yscale="linear")
            axes.set_ylabel("validation loss, best so far")
        grid[-1].axis("off")
        grid[-1].legend(*axes.get_legend_handles_labels(), loc="center", frameon=False, handlelength=3.5)
        file.write_bytes(encoded(figure, file))


def main(
    problems: tuple[str, ...] = tuple(PROBLEMS),
    splits: tuple[int, ...] = tuple(range(10)),
    cohort: int = 0,
    picture: str = "",
) -> None:
    losses = (
        f"after {EARLY}",
        "validation loss",
        "difference",
        "test loss",
        "difference",
        "test accuracy, %",
        "difference",
    )
    head("problem", "method", *losses, "SimFBO after")
    found = {}
    for name in problems:
        found[name] = measured(name, splits, cohort or None)
        rows(name, found[name])
    if picture:
        draw(found, Path(picture))
