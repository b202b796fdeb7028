"""Run a figure: for every panel and method, choose values by trials on a holdout, and then run every seed.

A run is stored only in its folder. So several processes can share the runs of a figure, and an interrupted figure
continues from the folders that exist. Below OUT/<id>/<scale> there are:

    trials/<panel>/<method>/<values>/seed-N   the trials
    runs/<panel>/<method>/seed-N              the runs
    outcome.json, figure.png                  what came of them

If a run fails, the reason is stored in its folder, and it is not run again. A run whose network is dead (see `dead`)
also counts as failed.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.authoring import History
from fedbilevel.errors import ConfigurationError, InUse, NumericalError
from fedbilevel.experiments import COSTS, costs_of
from fedbilevel.extending import errors_in
from papers.claims import cells_of, comparison, findings, verdict
from papers.effort import seeds_in
from papers.figure import COUNTED, Claim, Figure, Scale, merged, require, require_known
from papers.numbers import rounded, value_in

POLL = 1.0  # seconds between two checks of a run that another process is running
CURVE = 60  # the number of points of a curve that are stored
CHANCE = 1e-3  # the relative distance from the loss of constant predictions below which a network counts as dead
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A trial or a run: its name, the tables of its spec, its seed and its folder.

    With `budgets`, by names of COSTS, it ends at the first row at which all of them are spent. If it is `counted`, the
    costs of its round are found without running it, and no folder is made.
    """

    name: str
    tables: Mapping[str, Any]
    seed: int
    folder: Path
    budgets: Mapping[str, float] = field(default_factory=dict)
    counted: bool = False

    @property
    def spec(self) -> experiments.Spec:
        """Return the complete spec."""
        return experiments.seeded(experiments.resolve(self.tables), self.seed)

    def play(self, tasks: experiments.TaskCache) -> History | str:
        """Return the history, from the folder or by running it; or the reason why the run failed.

        Raises:
            ConfigurationError, CheckpointError: the folder has a file that is damaged or does not belong to this run.
            InUse: another process is running it.
        """
        try:
            if self.counted:
                ledger = experiments.build(self.spec, tasks(self.spec)).cost_of_round()
                return History([{"round": 1, "seconds": 0.0, **ledger.columns()}])
            history = experiments.run_of(self.spec, self.folder, tasks, callbacks=[self.spent] if self.budgets else [])
            return dead(history, self.spec.task.fields.get("way")) or history
        except (ConfigurationError, NumericalError) as error:  # e.g., a step is too large for this seed's samples
            if isinstance(error, ConfigurationError) and str(error).startswith(str(self.folder)):
                raise  # a file of the folder is damaged, which says nothing about the method
            return str(error)

    def spent(self, result: fb.Result, row: Mapping[str, float] | None) -> str | None:
        """Return why the run should stop, or None. It stops when all budgets are spent; `solve` calls this function."""
        over = row is not None and all(costs_of(row)[name] >= amount for name, amount in self.budgets.items())
        return "all budgets are spent" if over else None


def dead(history: History, way: int | None) -> str:
    """Return a text if the network of a few-shot run is dead: it predicts the same for every image; else "".

    If the features of a network no longer depend on the image, its outer loss on tasks of N = `way` characters is log
    N, whatever its head. A run counts as dead if this loss, measured on training tasks, is within CHANCE of log N in
    every row of the second half of the run. Test data are not used.
    """
    losses = [row["outer_loss"] for row in history.rows if "outer_loss" in row] if way else []
    late = losses[len(losses) // 2 :]
    if not way or not late or any(abs(loss / math.log(way) - 1) > CHANCE for loss in late):
        return ""
    chance = f"log {way} = {math.log(way):.4f}, the loss of constant predictions"
    return f"the network is dead: in the second half of the run the outer loss stays at {chance}"


Played = Mapping[Path, History | str]
"""By the folder of a run: the history, or the reason why the run failed."""


def word(name: str) -> str:
    """Return a name in a form that can be part of a path."""
    return re.sub(r"[^\w.=,-]+", "-", name)


def with_values(tables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a spec with some values of the algorithm's fields, such as {"inner.lr": 0.1}."""
    for path, value in values.items():
        for name in reversed(["algorithm", *path.split(".")]):
            value = {name: value}
        tables = merged(tables, value)
    return dict(tables)


def place_of(figure: Figure, scale: Scale, out: Path) -> Path:
    """Return the folder of a figure's trials and runs."""
    return out / figure.runs / scale


Tried = Sequence[tuple[dict[str, Any], list[Run]]]
"""The points that are tried, each with its trials."""


def trials(
    figure: Figure, panel: str, method: str, scale: Scale, out: Path, points: Sequence[dict[str, Any]] | None = None
) -> Tried:
    """Return the trials of a method in a panel: for each point, a trial with each seed; none if no value is chosen.

    The trials of a point are in a folder that is named by the point's values.

    Args:
        points: the points to try; None: the points of the grid.
    """
    folder = place_of(figure, scale, out) / "trials" / word(panel) / word(method)
    points = figure.points(panel, method) if points is None else points
    if figure.tuning is None or points == [{}]:
        return []
    tables, found = figure.tables(panel, method, scale, tuning=True), []
    for values in points:
        at = ", ".join(f"{field}={value}" for field, value in values.items())
        name, spec, place = f"{panel} · {method} · trial {at}", with_values(tables, values), folder / word(at)
        found.append((values, [Run(name, spec, seed, place / f"seed-{seed}") for seed in figure.tuning.seeds]))
    return found


@dataclass(frozen=True)
class Choice:
    """The choice by the holdout: the values, or None if every trial failed; and the number of failed trials."""

    values: dict[str, Any] | None
    failed: int = 0


def best(every: Tried, played: Played, select: str) -> Choice:
    """Return the point whose metric in the last row, as a mean over the seeds, is best.

    Points with a failed trial are left out.
    """
    found, failed = [], 0
    for values, runs in every:
        histories = [one for run in runs if isinstance(one := played[run.folder], History)]
        known = [one.rows[-1][select] for one in histories if math.isfinite(one.rows[-1][select])]
        failed += len(runs) - len(known)
        if len(known) == len(runs):
            sign = 1 if histories[0].larger_is_better(select) else -1
            found.append((sign * float(np.mean(known)), values))
    return Choice(max(found, key=lambda one: one[0])[1] if found else None, failed)


def choose(
    figure: Figure, scale: Scale, out: Path, say: Say, pairs: Sequence[tuple[str, str]]
) -> tuple[dict[tuple[str, str], Tried], Played]:
    """Run the trials of `pairs`, each a panel and a method.

    With `tuning.trials`, further points are tried if a chosen value is the smallest or the largest that was tried.
    """
    every: dict[tuple[str, str], Tried] = {pair: trials(figure, *pair, scale, out) for pair in pairs}
    new, played = every, dict[Path, History | str]()
    while any(new.values()):
        played |= play_all([run for of in new.values() for _, runs in of for run in runs], say)
        new = {pair: trials(figure, *pair, scale, out, more(figure, of, played)) for pair, of in every.items() if of}
        every |= {pair: [*every[pair], *of] for pair, of in new.items()}
    return every, played


def more(figure: Figure, every: Tried, played: Played) -> list[dict[str, Any]]:
    """Return the points to try next, as many as trials are left; none if every chosen value lies inside the grid."""
    assert figure.tuning is not None
    points = [values for values, _ in every]
    left = (figure.tuning.trials or 0) - len(points)
    return beyond(points, best(every, played, figure.tuning.select).values)[: max(left, 0)]


def beyond(points: Sequence[dict[str, Any]], chosen: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return points with the chosen values, in which one value that lies at an end is moved one step further.

    Args:
        points: the points that were tried. Only positive numbers have a next value. The next value of integers is an
            integer.
        chosen: the chosen values. None means that every trial failed, which suggests steps that are too large; then the
            least values take the place of the chosen ones.
    """
    ladders = {name: sorted({point[name] for point in points}) for name in points[0] if positive(points, name)}
    at = chosen or {**points[0], **{name: values[0] for name, values in ladders.items()}}
    found = []
    for name, values in ladders.items():
        for end, before in ((values[0], values[1]), (values[-1], values[-2])) if len(values) > 1 else ():
            further = float(f"{end * end / before:.6g}")
            if all(isinstance(one, int) for one in values):
                further = int(further) if further.is_integer() else 0
            if at[name] == end and further:
                found.append({**at, name: further})
    return found


def positive(points: Sequence[dict[str, Any]], name: str) -> bool:
    """Return whether all values of a field are positive numbers."""
    return all(type(point[name]) in (int, float) and point[name] > 0 for point in points)


def runs_of(
    figure: Figure, pair: tuple[str, str], scale: Scale, out: Path, values: Mapping[str, Any], seeds: Sequence[int]
) -> list[Run]:
    """Return the runs of a method in a panel, one for each seed."""
    panel, method = pair
    folder = place_of(figure, scale, out) / "runs" / word(panel) / word(method)
    tables = with_values(figure.tables(panel, method, scale), values)
    return [
        Run(f"{panel} · {method} · seed {seed}", tables, seed, folder / f"seed-{seed}", counted=figure.counted)
        for seed in seeds
    ]


Seeds = Mapping[str, Sequence[int]]
"""The seeds of the runs, by panel."""


def check(figure: Figure, scale: Scale, out: Path, seeds: Seeds) -> None:
    """Check a figure and its seeds before anything is run.

    The specs of all trials and runs are resolved. If nothing of a method has been run, the method is also checked with
    the samples of its first trial, or of its first run if no value is chosen.

    Raises:
        ConfigurationError: something is wrong; the message names the panel and the method.
        DataError: the samples cannot be loaded.
    """
    both = sorted(set().union(*seeds.values()) & set(figure.tuning.seeds)) if figure.tuning else []
    require(not both, f"seeds {both} are those of the trials of {figure.id}: its runs need other seeds")
    tasks = experiments.TaskCache()
    for panel, method in figure.pairs(scale):
        with errors_in(f"{panel} · {method}"):
            first = [run for _, runs in trials(figure, panel, method, scale, out) for run in runs]
            points = figure.points(panel, method)
            runs = [run for one in points for run in runs_of(figure, (panel, method), scale, out, one, seeds[panel])]
            specs = [run.spec for run in [*first, *runs]]
            if not (first or runs)[0].folder.exists():
                known = experiments.build(specs[0], tasks(specs[0])).task.metrics
                if first and figure.tuning and not figure.tuning.select.endswith("loss"):
                    require_known("metric to choose by", [figure.tuning.select], known)


def chosen_before(
    figure: Figure, scale: Scale, found: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], Tried], dict[tuple[str, str], Choice]]:
    """Return the values that were tried and chosen in an earlier outcome of the same figure, without running trials.

    The earlier outcome may have fewer panels or methods, if the scale left some out at that time (`only`, `left_out`).
    The values of these are not in the result.

    Args:
        found: the outcome; empty if none is stored.

    Raises:
        ConfigurationError: the outcome is of another setting, or of other claims than the first claims of the file.
    """
    stored = found.get("panels", {})
    pairs = [(panel, method) for panel, method in figure.pairs(scale) if method in stored.get(panel, ())]
    known = replace(figure, claims=figure.claims[: claims_in(figure, found.get("findings", []))])
    same = (found.get("scale"), found.get("played_for")) == (scale, known.fingerprint(scale, stored))
    require(same, f"no outcome of {figure.id} with this setting is stored next to its file: run it without --chosen")
    every: dict[tuple[str, str], Tried] = {}
    choices: dict[tuple[str, str], Choice] = {}
    for panel, method in pairs:
        of = stored[panel][method]
        every[panel, method] = [(point, []) for point in of.get("tried") or []]
        choices[panel, method] = Choice(of["chosen"], of["failed_trials"])
    return every, choices


def claims_in(figure: Figure, found: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of claims, from the first one of the file, to which the findings of an outcome belong."""
    ends = list(itertools.accumulate(cells_of(figure, claim) for claim in figure.claims))
    return ends.index(len(found)) + 1 if len(found) in ends else len(figure.claims)


def play(
    figure: Figure,
    scale: Scale,
    out: Path,
    *,
    seeds: Sequence[int] | None = None,
    before: Mapping[str, Any] | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Bring all trials and runs of a figure to their end, and return the outcome.

    Args:
        out: the folder that contains the folders of all figures.
        seeds: the seeds of the runs in every panel, which must differ from the seeds of the trials. None: the numbers
            of seeds in the file.
        before: an earlier outcome, whose chosen values are used. Trials are then run only for panels and methods that
            this outcome lacks. A panel with the same seeds and methods as before is not run again, and keeps its
            numbers and its findings. If trials or panels of the earlier outcome are used, its minutes are added.
            Claims that were added at the end of the file are decided by the stored values at the end of the runs.
        say: a function that is called with a line about each run that has ended.

    Raises:
        ConfigurationError, DataError: the figure cannot be run here, for example because data are missing.
    """
    seeds_of = {panel: figure.seeds_of(panel) if seeds is None else list(seeds) for panel, _ in figure.pairs(scale)}
    check(figure, scale, out, seeds_of)
    tried, chosen = ({}, {}) if before is None else chosen_before(figure, scale, before)
    kept = set() if before is None or figure.series else unchanged(before, seeds_of, set(figure.pairs(scale)))
    if before is not None:
        check_added(figure, before, kept)
    pairs = [pair for pair in figure.pairs(scale) if pair[0] not in kept]
    tuned, played = choose(figure, scale, out, say, [pair for pair in pairs if pair not in chosen])
    select = figure.tuning.select if figure.tuning else ""
    chosen |= {pair: best(of, played, select) if of else Choice({}) for pair, of in tuned.items()}
    every = {pair: tuned[pair] if pair in tuned else tried[pair] for pair in pairs}
    choices = {pair: chosen[pair] for pair in pairs}
    runs = {
        pair: runs_of(figure, pair, scale, out, choice.values, seeds_of[pair[0]])
        for pair, choice in choices.items()
        if choice.values is not None
    }
    rows = [zip(*(of for pair, of in runs.items() if pair[0] == panel), strict=True) for panel in seeds_of]
    played = {**played, **play_all([run for row in rows for of_a_seed in row for run in of_a_seed], say)}
    usual = figure.seeds_of() if seeds is None else seeds
    found = outcome(figure, scale, usual, seeds_of, every, choices, runs, played)
    return found if before is None else joined(figure, found, before, kept)


def unchanged(before: Mapping[str, Any], seeds: Seeds, pairs: Set[tuple[str, str]]) -> set[str]:
    """Return the panels that an earlier outcome has with the same seeds and with every method of `pairs`."""
    stored = {(panel, method) for panel, of in before["panels"].items() for method in of}
    new = {panel for panel, _ in pairs - stored}
    same = {panel for panel in before["panels"] if panel in seeds and seeds_in(before, panel) == list(seeds[panel])}
    return same - new


def made_before(before: Mapping[str, Any], panel: str) -> list[dict[str, Any]]:
    """Return the environments of a panel in an earlier outcome; outcomes of earlier formats have one for all panels."""
    return list(before["environments"].get(panel, []) if "environments" in before else [before["environment"]])


def joined(figure: Figure, found: Mapping[str, Any], before: Mapping[str, Any], kept: Set[str]) -> dict[str, Any]:
    """Complete an outcome by an earlier one: the panels in `kept` have its numbers, findings and errors.

    Both outcomes have a finding for each comparison, in the same order. The earlier one may lack the last claims.
    """
    order = [panel for panel in figure.panels if panel in kept or panel in found["panels"]]
    panels = {panel: before["panels"][panel] if panel in kept else found["panels"][panel] for panel in order}
    claims = [claim for claim in figure.claims for _ in range(cells_of(figure, claim))]
    cells = []
    for claim, now, then in itertools.zip_longest(claims, found["findings"], before["findings"]):
        compared = {where for where, _ in claim.sides(now["panel"], now["than"])}
        if not compared & kept:
            cells.append(now)
        elif compared <= kept and then is not None:
            cells.append({**then, "says": now["says"]})
        else:
            cells.append(by_values(figure, claim, now["panel"], now["than"], panels))
    errors = {name: why for name, why in before["errors"].items() if name.split(" · ")[0] in kept}
    return {
        **found,
        "findings": cells,
        "verdict": verdict([one["state"] for one in cells]),
        "panels": panels,
        "errors": {**errors, **found["errors"]},
        "environments": {
            panel: made_before(before, panel) if panel in kept else found["environments"].get(panel, [])
            for panel in order
        },
        "date": before["date"] if all(panel in kept for panel in order) else found["date"],
        "minutes": round(found["minutes"] + (before["minutes"] if kept or found["trials"] else 0.0), 2),
        "trials": max(found["trials"], before.get("trials", 0)),  # outcomes of earlier formats lack the tried values
    }


def check_added(figure: Figure, before: Mapping[str, Any], kept: Set[str]) -> None:
    """Check that stored values decide the comparisons that need them, before anything is run.

    Raises:
        ConfigurationError: such a claim is about another reading than the values at the end, or a stored run failed.
    """
    known = claims_in(figure, before["findings"])
    for number, claim in enumerate(figure.claims):
        for panel in figure.panels_of(claim):
            sides = claim.sides(panel, *claim.than)
            compared = {where for where, _ in sides}
            if compared & kept and not (compared <= kept and number < known):
                ended = [before["panels"][where].get(name) for where, name in sides if where in kept]
                if stored := [one for one in ended if one]:
                    require_at_end(figure, claim, stored)


def require_at_end(figure: Figure, claim: Claim, stored: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ConfigurationError unless stored values at the end of runs decide a claim.

    These are values of the figure's metric. If it is a cost, it is not read from them.
    """
    fits = claim.by == "end" and claim.metric in (None, figure.metric) and figure.metric not in COSTS
    fits = fits and not any(one["failed_runs"] for one in stored)
    require(fits, f"the stored outcome does not decide “{claim.says}”: run {figure.id} without --chosen")


def by_values(
    figure: Figure, claim: Claim, panel: str, than: str, panels: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the finding on a comparison from the stored values at the end of runs.

    Raises:
        ConfigurationError: the claim is about another reading of the runs, or a run failed.
    """
    runs: dict[str, dict[str, list[History | None]]] = {}
    for where, name in claim.sides(panel, than):
        if one := panels.get(where, {}).get(name):
            require_at_end(figure, claim, [one])
            runs.setdefault(where, {})[name] = [
                History([{"round": 1, figure.metric: value}]) for value in one["values"]
            ]
    return dict(rounded(asdict(comparison(figure, claim, panel, than, runs))))


def devices_of(figure: Figure, scale: Scale) -> int:
    """Return the largest number of devices that a run of the figure uses."""
    tables = [figure.tables(*pair, scale) for pair in figure.pairs(scale)]
    return max(int(one.get("engine", {}).get("devices") or 1) for one in tables)


def play_all(runs: Sequence[Run], say: Say) -> dict[Path, History | str]:
    """Bring runs to their end, and return their histories.

    Runs of another process are checked again after all others.
    """
    tasks, played, waiting = experiments.TaskCache(), {}, deque(runs)
    while waiting:
        run = waiting.popleft()
        try:
            played[run.folder] = run.play(tasks)
        except InUse:
            waiting.append(run)
            time.sleep(POLL)
        else:
            came = played[run.folder]
            say(f"{run.name}: {came if isinstance(came, str) else came.last_in_words()}")
    return played


def prepare(devices: int) -> None:
    """Set the options that JAX reads at its first computation."""
    fb.tune_cpu(devices)
    fb.Local.keep_on_disk()


def rehearse(figure: Figure, scale: Scale, out: Path, say: Say = print) -> None:
    """Run one round of every method in every panel, to check that the figure can be run here.

    Raises:
        FedbilevelError: the figure cannot be run here.
    """
    once = {"rounds": 1, "exchanges": None, "bytes": None, "time": None, "eval_every": 1}
    for panel, method in figure.pairs(scale):
        (run,) = runs_of(figure, (panel, method), scale, out, figure.points(panel, method)[0], [0])
        folder = place_of(figure, scale, out) / "rehearsal" / word(panel) / word(method)
        began = time.perf_counter()
        with errors_in(f"{panel} · {method}"):
            experiments.complete(run.spec.replace(run=once), folder, plot=False, progress=False)
        say(f"{panel} · {method}: one round, {time.perf_counter() - began:.1f} s")


def outcome(
    figure: Figure,
    scale: Scale,
    usual: Sequence[int],
    seeds: Seeds,
    every: Mapping[tuple[str, str], Tried],
    choices: Mapping[tuple[str, str], Choice],
    runs: Mapping[tuple[str, str], Sequence[Run]],
    played: Played,
) -> dict[str, Any]:
    """Return the outcome of a figure, in a form that JSON can store.

    Its `seeds` are the usual seeds, and its `seeds_of` has the seeds of panels that have other ones.
    """
    panels: dict[str, dict[str, Any]] = {}
    histories: dict[str, dict[str, list[History | None]]] = {}
    errors: dict[str, str] = {}
    for (panel, method), choice in choices.items():
        of = {run.name: played[run.folder] for run in runs.get((panel, method), [])}
        errors |= {name: came for name, came in of.items() if isinstance(came, str)}
        if not of:
            errors[f"{panel} · {method}"] = "every trial failed"
        read = [None if isinstance(came, str) else came for came in of.values()] or [None] * len(seeds[panel])
        whole = [one for one in read if one is not None]
        histories.setdefault(panel, {})[method] = read
        points = [values for values, _ in every[panel, method]]
        numbers: dict[str, Any] = {"chosen": choice.values, "tried": points}
        numbers |= {"failed_trials": choice.failed, "failed_runs": len(read) - len(whole)}
        panels.setdefault(panel, {})[method] = numbers | numbers_of(figure, whole)
    found = findings(figure, histories)
    folders = [] if figure.counted else [folder for folder, came in played.items() if isinstance(came, History)]
    ended = {folder: experiments.load_run(folder) for folder in folders}
    return {
        "id": figure.id,
        "scale": scale,
        "played_for": figure.fingerprint(scale),
        "verdict": verdict([one.state for one in found]),
        "findings": [rounded(asdict(one)) for one in found],
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(usual),
        "seeds_of": {panel: list(of) for panel, of in seeds.items() if list(of) != list(usual)},
        "trials": max(map(len, every.values()), default=0),
        "selected_on": figure.tuning.select if figure.tuning else "",
        "minutes": round(sum(run.summary["seconds_this_time"] for run in ended.values()) / 60, 2),
        "environments": environments(runs, ended),
        "metric": figure.metric,
        "against": figure.against,
        "errors": errors,
        "panels": panels,
    }


def environments(
    runs: Mapping[tuple[str, str], Sequence[Run]], ended: Mapping[Path, experiments.LoadedRun]
) -> dict[str, list[dict[str, Any]]]:
    """Return, by panel, the versions and machines with which its runs were made, each once."""
    found: dict[str, list[dict[str, Any]]] = {}
    for (panel, _), of in runs.items():
        known = found.setdefault(panel, [])
        for run in of:
            made = ended[run.folder].folder.environments() if run.folder in ended else []
            known += [one for one in made if one not in known]
    return found


def numbers_of(figure: Figure, histories: Sequence[History]) -> dict[str, Any]:
    """Return the last values of the metric, their mean and sample standard deviation, mean costs, and a curve."""
    if not histories:
        return {"values": [], "mean": None, "sd": None, "costs": {}, "curve": None}
    known = [[value for row in one.rows if (value := value_in(row, figure.metric)) is not None] for one in histories]
    values, spent = [float(one[-1]) for one in known], [costs_of(one.rows[-1]) for one in histories]
    names = COUNTED if figure.counted else spent[0]
    numbers = {
        "values": values,
        "mean": float(np.mean(values)),
        "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        "costs": {name: float(np.mean([one[name] for one in spent])) for name in names},
        "curve": None if figure.metric in COSTS else curve(figure, histories),
    }
    return dict(rounded(numbers))


def curve(figure: Figure, histories: Sequence[History]) -> dict[str, list[float]]:
    """Return at most CURVE points of rounds that all histories have: cost, mean, and deviation over the seeds."""
    whole = experiments.curve(figure.id, histories, figure.metric)
    number = len(whole.value)
    kept = np.unique(np.linspace(0, number - 1, min(number, CURVE)).round().astype(int))
    spread = np.zeros(number) if whole.spread is None else whole.spread
    columns = {"cost": whole.costs[figure.against], "mean": whole.value, "sd": spread}
    return {name: column[kept].tolist() for name, column in columns.items()}


def write(file: Path, content: str | bytes) -> None:
    """Write a file atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(file)
