"""Bilevel optimization compared with hyperparameter search, with equal exchanges and 1 to 64 hyperparameters.

In the problems of `benchmarks/search_problems.py`, x contains penalties of groups of features, weights of clients, or
the loss of a long tail of classes. All methods begin at the same x and at y = 0. An exchange uses all samples of all
clients, or of a share of the clients (--share). SimFBO and FedNest have their default steps. A search spends the budget
on trials of 40 exchanges. A trial trains y at a fixed x, from the best y so far, by SimFBO's local steps on y, whose
size adapts to the curvature. For a search, only exchanges that move y are counted; measuring the validation loss of all
clients costs nothing. "No search" trains y at the starting x. Each budget is a run of its own. Its result is the (x, y)
with the best validation loss, which is measured after every tenth exchange (or after every round if a round makes
more). Only this (x, y) is measured on test samples.

Differences are to SimFBO's run with the same number d of hyperparameters, with 95 % intervals. The intervals over
splits are Nadeau and Bengio's if splits divide the same samples again, and Student's if splits draw new samples. There
are also intervals over test samples. With --folder, measurements are stored in a folder, and those that it has are not
repeated.
"""

import itertools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna

import fedbilevel as fb
from benchmarks.harness import head, row
from benchmarks.hospitals import interval
from benchmarks.search_problems import DEALT, PROBLEMS, Setting, losses, setting
from fedbilevel.display.curves import COLOURS, LEVEL, encoded, new_figure, typography
from fedbilevel.tasks.regularization import logits

BUDGETS = 100, 1000  # exchanges
TRIAL = 40  # exchanges; on split 100, which no result uses, better than 10 and 20 in three of four problems
FIXED = fb.SimFBO(server_lr=fb.XYV(x=1e-30, y=None, v=None), batch_size=None)  # x does not move
METHODS = {"SimFBO": fb.SimFBO(batch_size=None), "FedNest": fb.FedNest(batch_size=None), "no search": FIXED}
ALL = "SimFBO", "TPE", "no search", "FedNest", "random search", "halving"
MIDDLE = 300  # the larger budget is also evaluated after so many exchanges
TICKS = 1, 2, 4, 13, 20, 54  # ticks of the axis of d
EVERY = 10  # exchanges between measurements of the validation loss; a trial has one at its end, too
QUICK = {"problems": ["hospitals"], "splits": [0, 1], "budgets": [100], "methods": ["SimFBO", "TPE", "no search"]}
optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", fb.errors.NumericalWarning)  # a trial may end worse than it began


class End(NamedTuple):
    """The result of a run: its least validation losses after 0, 1, … exchanges, and values for each test sample."""

    least: np.ndarray
    loss: np.ndarray
    right: np.ndarray
    sample: np.ndarray
    shared: np.ndarray  # the factor of Nadeau and Bengio if splits divide the same samples; else 0


def solved(method: Any, at: Setting, x: Any, y: Any, rounds: int, every: int = EVERY) -> Any:
    given = {"rounds": rounds, "eval_every": every, "metrics": at.metrics, "best_by": "validation", "progress": False}
    return fb.solve(method, at.posed.problem, at.clients, x, y, cohort=at.cohort, **given)


def by_method(name: str, at: Setting, budget: int) -> tuple[np.ndarray, Any]:
    """Return the losses (rows of exchanges and loss) and the best (x, y) of a method with its default steps."""
    one = solved(METHODS[name], at, at.posed.x0, at.y0, 1).ledger.exchanges if name == "FedNest" else 1
    run = solved(METHODS[name], at, at.posed.x0, at.y0, budget // one, max(1, EVERY // one))
    return np.column_stack([run.history["exchanges"], run.history["validation"]]), run.best


def by_search(name: str, at: Setting, budget: int, seed: int) -> tuple[np.ndarray, Any]:
    """Return the same for a search. The first round of each `solve` only measures curvature, and is not counted."""
    _, x0, d, low, high = at.posed
    rungs = (TRIAL // 2, 3 * TRIAL // 2, 9 * TRIAL // 2) if name == "halving" else (TRIAL,)
    sampler = (optuna.samplers.TPESampler if name == "TPE" else optuna.samplers.RandomSampler)(seed=seed)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=rungs[0], reduction_factor=3)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.enqueue_trial({f"x{i}": x0[i] for i in range(d)})
    rows, best, spent = [], None, 0
    while spent < budget:
        trial, y, pruned, done = study.ask(), at.y0 if best is None else best.y, False, 0
        x = x0.copy()
        x[:d] = [trial.suggest_float(f"x{i}", low, high) for i in range(d)]
        for rung in rungs:
            exchanges = min(rung - done, budget - spent)
            run = solved(FIXED, at, x, y, 1 + exchanges)
            values, y = run.history["validation"][1:], run.y
            rows += zip(spent + run.history["exchanges"][1:] - 1, values, strict=True)
            best = run.best if best is None or run.best.value < best.value else best
            spent, done = spent + exchanges, rung
            trial.report(values[-1], done)
            pruned = trial.should_prune()
            if pruned or spent >= budget:
                break
        study.tell(trial, None if pruned else values[-1], optuna.trial.TrialState.PRUNED if pruned else None)
    return np.array(rows), best


def ended(name: str, data: str, d: int, budget: int, split: int, share: float) -> End:
    """Run a method or a search on a split."""
    at = setting(data, d, split, share)
    rows, best = by_method(name, at, budget) if name in METHODS else by_search(name, at, budget, split)
    least = np.full(budget + 1, np.inf)
    np.minimum.at(least, rows[:, 0].astype(int), rows[:, 1])
    each, right = [np.asarray(losses(best.y, batch)) for batch in at.test], np.zeros(0)
    if data != "survival":
        right = np.concatenate([logits(best.y, one["row"]).argmax(1) == one["label"] for one in at.test])
    valid, train = int(at.clients.outer.size.sum()), int(at.clients.inner.size.sum())
    sample = np.concatenate([one["sample"] for one in at.test])
    shared = np.array([valid / train, len(sample) / (valid + train)]) * (data in DEALT)
    return End(np.minimum.accumulate(least), np.concatenate(each), right, sample, shared)


def kept(folder: str, *run: Any) -> End:
    """Return the result of a run, from a folder or by running it."""
    file = Path(folder) / f"{'_'.join(str(part).replace(' ', '-') for part in run)}.npz"
    if folder and file.is_file():
        return End(**np.load(file))
    end = ended(*run)
    if folder:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(part := file.with_suffix(".part.npz"), **end._asdict())
        part.replace(file)
    return end


def over_samples(change: np.ndarray, sample: np.ndarray) -> float:
    """Return half the 95 % interval of a mean over test samples. A sample that is in several splits counts once."""
    where = np.unique(sample, return_inverse=True)[1].ravel()
    count, total = np.bincount(where), np.bincount(where, change.ravel())
    return 1.96 * float(np.sqrt(np.sum((total - count * change.mean()) ** 2)) / count.sum())


class Compared(NamedTuple):
    """A loss minus SimFBO's: the mean over splits, and half the interval over splits and over test samples."""

    validation: tuple[float, float]
    test: tuple[float, float, float]


def compared(ends: list[End], to: list[End]) -> Compared:
    valid = np.array([a.least[-1] - b.least[-1] for a, b in zip(ends, to, strict=True)])
    test = np.array([a.loss - b.loss for a, b in zip(ends, to, strict=True)])
    shared, sample = ends[0].shared, np.array([end.sample for end in ends])
    return Compared(
        (valid.mean(), interval(valid, shared[0])),
        (test.mean(), interval(test.mean(1), shared[1]), over_samples(test, sample)),
    )


Found = dict[tuple[str, int, int, str], list[End]]  # (data, d, budget, method) -> the results of all splits


def rows(found: Found) -> None:
    """Print a row for each problem, budget and method."""
    apart = "difference", "test loss", "difference, over splits", "over samples", "accuracy, %", "SimFBO after"
    head("data", "d", "exchanges", "method", f"after {MIDDLE}", "validation loss", *apart)
    for (data, d, budget, method), ends in found.items():
        to, each = found[data, d, budget, "SimFBO"], np.mean([end.least for end in ends], axis=0)
        cells, middle = ["", "", ""], f"{each[MIDDLE]:.4f}" if budget > MIDDLE else ""
        if method != "SimFBO":
            validation, test = compared(ends, to)
            cells = [f"{mean:+.4f} ± {half:.4f}" for mean, half in (validation, test[:2])] + [f"± {test[2]:.4f}"]
        right = f"{100 * np.mean([end.right for end in ends]):.1f}" if ends[0].right.size else ""
        after = np.argmax(np.mean([end.least for end in to], axis=0) <= each[-1])  # 0 if never
        tested = f"{np.mean([end.loss for end in ends]):.4f}"
        row(data, d, budget, method, middle, f"{each[-1]:.4f}", cells[0], tested, *cells[1:], right, after or "never")


def draw(found: Found, rival: str, file: Path) -> None:
    """Draw the loss of another method minus SimFBO's against d, by kind of loss and budget, with the wider interval."""
    lines: dict[str, dict[int, dict[int, Compared]]] = {}  # data set -> budget -> d -> difference
    for (data, d, budget, method), ends in found.items():
        if method == rival:
            lines.setdefault(data, {}).setdefault(budget, {})[d] = compared(ends, found[data, d, budget, "SimFBO"])
    budgets = BUDGETS
    with typography((13.0, 8.4)):
        figure = new_figure((13.0, 8.4))
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (kind, budget) in zip(panels.flat, itertools.product(Compared._fields, budgets), strict=True):
            for place, (data, of) in enumerate(lines.items()):
                each = [getattr(one, kind) for one in of[budget].values()]
                x = np.array(list(of[budget])) * 1.03 ** (place - len(lines) / 2)  # so that lines are beside each other
                look = {"color": COLOURS[place % len(COLOURS)], "marker": "os"[place // len(COLOURS)]}
                axes.errorbar(
                    x, *zip(*((one[0], max(one[1:])) for one in each), strict=True), label=data, capsize=2, **look
                )
            axes.axhline(0, color=LEVEL, linewidth=0.8)
            axes.set(xscale="log", title=f"{kind} loss after {budget:,} exchanges")
            axes.set_xticks(TICKS, map(str, TICKS))
            axes.minorticks_off()
            axes.set_yscale("symlog", linthresh=0.01)
            axes.grid(alpha=0.3, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[1]:
            axes.set_xlabel("d, the number of hyperparameters")
        for axes in panels[:, 0]:
            axes.set_ylabel(f"loss of {rival} minus loss of SimFBO")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        file.write_bytes(encoded(figure, file))


def main(
    problems: tuple[str, ...] = tuple(PROBLEMS),
    methods: tuple[str, ...] = ALL,
    dimensions: tuple[int, ...] = (),
    budgets: tuple[int, ...] = BUDGETS,
    splits: tuple[int, ...] = tuple(range(10)),
    share: float = 1.0,
    folder: str = "",
    picture: str = "",
) -> None:
    found: Found = {}
    for data in problems:
        for d, budget, method in itertools.product(PROBLEMS[data], budgets, methods):
            if (not dimensions or d in dimensions) and (method != "no search" or d == min(PROBLEMS[data])):
                found[data, d, budget, method] = [
                    kept(folder, method, data, d, budget, split, share) for split in splits
                ]
    rows(found)
    if picture:
        draw(found, "TPE", Path(picture))
