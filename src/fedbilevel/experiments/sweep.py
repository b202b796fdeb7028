"""A sweep over the fields of a spec: every point is a spec, and each of its runs has a folder named by its values.

    server_lr.x-0.01-local_steps-5/seed-0

What is finished there is read, what is not is continued, the rest is started. So the same command goes on where it was,
several processes with the same command share the runs, since a run is locked by who plays it, and with more values only
the new points are played.

A search draws its points: an ordinary study of Optuna, whose objective is a run for each seed, in folders.

    trial-003/seed-0

The same command goes on with the study, and several processes with it share the trials. The trial of a process that was
killed is no loss: another point is drawn. Draws depend on the number of the trial and on what came of those before. The
rows of the first seed's run are the intermediate values by which a pruner may end a trial.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.table

from fedbilevel import __version__
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    FedbilevelError,
    NumericalError,
    is_number,
    require,
)
from fedbilevel.core.metrics import directions, mean_and_sd, text
from fedbilevel.data import DataError
from fedbilevel.display import Display
from fedbilevel.engines import lock
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.engines.history import LOSSES, History, Result, Row
from fedbilevel.engines.progress import showing
from fedbilevel.experiments import toml
from fedbilevel.experiments.export import csv_text
from fedbilevel.experiments.folder import Folder, own_code, path_word
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.runner import first_metric, run_of
from fedbilevel.experiments.series import TaskCache, seeded
from fedbilevel.experiments.spec import Spec
from fedbilevel.experiments.tables import Cell, Column, Table, terminal, text_column
from fedbilevel.reading import require_regular
from fedbilevel.sweeps import (
    ENDS,
    PRUNED,
    PointValues,
    Sweep,
    allowed,
    in_table,
    made,
    measured_on_test,
    played,
    product,
    require_holdout,
    require_known,
    require_seeds,
)
from fedbilevel.tasks import Task
from fedbilevel.wording import in_a_line as quoted
from fedbilevel.wording import missing

if TYPE_CHECKING:
    import optuna

SHARE = "0.2"  # of the training data, as a message suggests to hold out
LONGEST = 100  # characters of a folder's name
CHOSEN, TABLE = "chosen.toml", "sweep.csv"
SpecOf = Callable[[PointValues], Spec]
"""(values of the swept fields) -> the spec with these values; a ConfigurationError where it is refused."""
PrintLine = Callable[[str], None]
STUDY, JOURNAL, LOCK = "fedbilevel", "study.journal", ".study.lock"
BEAT, GRACE = 10, 60  # seconds between a worker's signs of life in a database, and until another gets its point
DIGITS = 4  # of a number that is drawn: as many as a paper quotes
PRUNERS = {"halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner", "median": "MedianPruner"}
UNREADABLE = (ImportError, OSError, ValueError, LookupError, TypeError, AttributeError)  # of a driver, or a journal
Space = Mapping[str, "Range | Sequence[Any]"]
"""What each field is drawn from: a range of numbers, or some values."""


def sweep_specs(
    spec_of: SpecOf,
    grid: Mapping[str, Sequence[Any]],
    folder: Path,
    *,
    seeds: Sequence[int] | None = None,
    select: str | None = None,
    select_on_test: bool = False,
    say: PrintLine = lambda line: None,
    progress: bool | Display | None = False,
) -> Sweep:
    """Play every combination of the values of some fields, or what of it is not finished, each run in its folder.

    Args:
        spec_of: makes the spec of a point.
        grid: the values of each field, by its dotted path.
        folder: new, or with runs of this sweep or of a part of it.
        seeds: of every point; None takes the spec's own.
        select: the metric that decides; None takes the task's first.
        select_on_test: it may be measured on test data.
        say: called with a line about each run that has ended.
        progress: see `fedbilevel.solve`.

    Returns:
        The sweep; its `algorithm` is the spec of the best point.

    Raises:
        ConfigurationError: wrong input, or the folder holds other runs; nothing was run.
        CheckpointError: something cannot be written.
    """
    require_sweepable(grid)
    points, tasks = product(grid), TaskCache()
    specs = made(points, spec_of)
    first = next(one for one in specs if isinstance(one, Spec))
    plan = PointRuns(seeds, [first.run.seed] if seeds is None else seeds)
    select = chosen_metric(plan.spec(first, plan.seeds[0]), select, select_on_test, tasks)
    for spec, point in zip(specs, points, strict=True):
        for seed in plan.seeds if isinstance(spec, Spec) else ():
            there = Folder(folder / point_name(point) / f"seed-{seed}")
            if changed := there.difference(plan.spec(allowed(spec), seed)):
                raise ConfigurationError(
                    f"{there.path} holds another run ({changed}): choose another folder with --out"
                )

    def play(number: int, seed: int) -> History:
        name = point_name(points[number])
        display.begin(f"{name}, seed {seed}")
        return plan.play(allowed(specs[number]), seed, folder / name, tasks, progress=display)

    def said(row: Mapping[str, Any]) -> None:
        say(in_a_line(f"{point_name({name: row[name] for name in grid})}/seed-{row['seed']}", row, select))

    with showing(progress) as display:
        found = played(points, specs, plan.seeds, select, play, said)
    found.others = other_runs(folder, map(point_name, points), plan.seeds)
    return found


def other_runs(folder: Path, points: Iterable[str], seeds: Sequence[int]) -> int:
    """Count the runs in a sweep's folder that are of other points, which are named by their folders, or seeds."""
    own = {folder / point / f"seed-{seed}" for point in points for seed in seeds}
    return sum(file.parent not in own for file in folder.glob(f"*/seed-*/{Folder(folder).spec.name}"))


class PointRuns:
    """The runs of each point: a run for each seed, or a single run with the spec's own."""

    def __init__(self, given: Sequence[int] | None, seeds: Sequence[int]) -> None:
        require_seeds(seeds)
        self.given, self.seeds = given, seeds

    def spec(self, spec: Spec, seed: int) -> Spec:
        return spec if self.given is None else seeded(spec, seed)

    def play(self, spec: Spec, seed: int, place: Path, task: Callable[[Spec], Task], **given: Any) -> History:
        """Return what a point's run with a seed has measured, see `run_of`; `place` is the folder of the point."""
        try:
            return run_of(self.spec(spec, seed), place / f"seed-{seed}", task, **given)
        except DataError as error:
            raise ConfigurationError(str(error)) from error


def require_sweepable(fields: Mapping[str, Any]) -> None:
    """Refuse to choose among seeds."""
    for name in fields:
        if name.rpartition(".")[2] == "seed":
            raise ConfigurationError(f"{name} cannot be swept: no seed is better than another; --seeds gives several")


def point_name(point: PointValues) -> str:
    """Name a point's folder: its values, and a hash where they are too long for it or hold other characters than
    such names do."""
    exact = "-".join(f"{name}-{in_words(value)}" for name, value in point.items())
    if re.fullmatch(r"[\w.-]+", exact) and len(exact) <= LONGEST:
        return exact
    return f"{path_word(exact)[:LONGEST]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def in_words(value: Any) -> str:
    return value if isinstance(value, str) else toml.value(value)


def in_a_line(name: str, row: Mapping[str, Any], select: str) -> str:
    """Say what came of a run, in a line."""
    if row["error"]:
        return f"{name}  failed: {row['error']}"
    return f"{name}  {select} {text(select, row[select])}  ({row['round']:,.0f} rounds)"


def chosen_metric(spec: Spec, select: str | None, on_test: bool, tasks: Callable[[Spec], Task]) -> str:
    """Return the metric that decides: `select`, or the first of the task.

    Raises:
        ConfigurationError: it is not measured, or measured on test data.
    """
    task = tasks(spec)
    own = task.metrics_per_client if spec.run.metrics_per_client else {}
    known = [*task.metrics, *(f"{name}.{end}" for name in own for end in ENDS), *LOSSES]
    select = select or first_metric(task)
    on_holdout = next((one.replace("test", "validation") for one in known if measured_on_test(one)), "")
    if spec.task.fields.get("holdout") == 0 and on_holdout:
        advice = f"--set task.holdout={SHARE} holds training data out and measures {on_holdout} in its place"
    else:
        others = " or ".join(one for one in known if not measured_on_test(one))
        advice = f"Task {label(spec.task.name)} holds no data out; it can be chosen by {others}"
    if select not in known and "validation" in select and on_holdout:
        raise ConfigurationError(f"task {label(spec.task.name)} does not measure {select}: {advice}")
    require_known(select, known)
    require_holdout(select, on_test, f"{advice}; --select-on-test chooses by test data all the same")
    return select


def parse_values(text: str) -> list[Any]:
    """Read the TOML values between commas; commas within lists, tables and quotes do not end a value.

    Raises:
        ConfigurationError: a text is no value.
    """
    found: list[Any] = []
    rest = ""
    for part in text.split(","):
        rest = f"{rest},{part}" if rest else part
        try:
            found.append(toml.parse_value(rest.strip()))
        except ConfigurationError:
            if rest.strip()[:1] not in ("[", "{", '"', "'"):
                raise
            continue
        rest = ""
    if rest:
        toml.parse_value(rest.strip())
    return found


def sweep_table(found: Sweep, width: int | None = None) -> rich.table.Table:
    """Make a table with a line for each point, best first; costs are means over the seeds."""
    columns = [
        Column(
            name,
            [Cell(in_words(row[name])) for row in found.rows],
            is_text=any(isinstance(row[name], str) for row in found.rows),
        )
        for name in found.fields
    ]
    columns.append(
        Column(found.select, [Cell(mean_and_sd(found.select, row[found.select], row["sd"])) for row in found.rows])
    )
    for name, goes in (("rounds", 1), ("exchanges", 0)):
        if name not in found.fields:
            cells = [Cell("–") if row[name] is None else Cell(values=[row[name]], kind="count") for row in found.rows]
            columns.append(Column(name, cells, goes))
    if any("epsilon" in row for row in found.rows):
        columns.append(Column("ε", [Cell(f"{row['epsilon']:.4g}" if "epsilon" in row else "–") for row in found.rows]))
    if any(row["error"] for row in found.rows):
        columns.append(text_column("failed", [row["error"] for row in found.rows]))
    return terminal(Table(f"Chosen by {found.chosen_on}", columns, [f"{found.effort}."]), width)


def write_files(found: Sweep, folder: Path) -> dict[str, Path]:
    """Write a line for each run, and the spec of the best point if any; return the paths. Numbers that depend on
    this machine's speed are left out: a sweep that was interrupted leaves the same files."""
    written = {"table": folder / TABLE, "chosen": folder / CHOSEN}
    rows = [row | {name: in_words(row[name]) for name in found.fields} for row in found.trials]
    write_text(folder / TABLE, csv_text(rows))
    if found.algorithm is None:
        written.pop("chosen").unlink(missing_ok=True)
    else:
        write_text(folder / CHOSEN, chosen_toml(found))
    return written


def chosen_toml(found: Sweep) -> str:
    """Write the spec of the best point, with the number of runs it was chosen among."""
    row, seeds = found.rows[0], list(dict.fromkeys(str(row["seed"]) for row in found.trials))
    values = ", ".join(f"{name} = {in_words(row[name])}" for name in found.fields)
    spread = f" ± {row['sd']!r} (sample standard deviation over {len(seeds)} seeds)" if len(seeds) > 1 else ""
    several = f" --seeds {','.join(seeds)}" if len(seeds) > 1 else ""
    lines = [
        f"The best of a sweep of fedbilevel {__version__}: {values}.",
        f"Chosen by {found.chosen_on}: {row[found.select]!r}{spread}.",
        f"{found.effort}.",
        f"Run it with: fedbilevel run --spec {CHOSEN}{several}",
    ]
    return str(found.algorithm.to_toml("\n".join(lines)))


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, drawn uniformly or by their logarithm; whole ones where both ends are."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> Range:
        """Read "0.001:1:log", "0:0.5" or, of whole numbers alone, "1:8".

        Raises:
            ConfigurationError: it is none of these.
        """
        form = "of the form LOW:HIGH or LOW:HIGH:log, LOW below HIGH, and above 0 with log"
        low, *rest = text.split(":")
        try:
            ends = [toml.parse_value(low.strip()), toml.parse_value(rest[0].strip())] if rest else []
        except ConfigurationError:
            ends = []
        log = rest[1:] == ["log"]
        fits = len(ends) == 2 and all(map(is_number, ends)) and rest[1:] in ([], ["log"]) and ends[0] < ends[1]
        require(fits and (not log or ends[0] > 0), f"--search {name}", text, form)
        return cls(ends[0], ends[1], log)

    def __str__(self) -> str:
        return f"{self.low}:{self.high}{':log' * self.log}"

    def drawn(self, trial: optuna.Trial, name: str) -> float:
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        number = float(f"{trial.suggest_float(name, self.low, self.high, log=self.log):.{DIGITS}g}")
        return min(max(number, float(self.low)), float(self.high))


def search_specs(
    spec_of: SpecOf,
    space: Space,
    folder: Path,
    *,
    trials: int,
    seeds: Sequence[int] | None = None,
    select: str | None = None,
    select_on_test: bool = False,
    storage: str | None = None,
    pruner: str | None = None,
    say: PrintLine = lambda line: None,
    progress: bool | Display | None = False,
) -> Sweep:
    """Draw and play points until so many trials have ended, by this process and others with the same storage.

    Args:
        spec_of, folder, seeds, select, select_on_test, say, progress: see `sweep_specs`.
        space: what each field is drawn from.
        trials: how many, those of other processes included; two processes that end at once may make another.
        storage: a database URL of SQLAlchemy (sqlite:///…, postgresql://…), or the path of a file; None keeps a file in
            the folder.
        pruner: a name of PRUNERS, which ends trials early; None plays all to their ends.

    Raises:
        ConfigurationError: wrong input, another sweep in the storage or the folder, or Optuna is not installed.
        CheckpointError: something cannot be written.
    """
    require_optuna()
    import optuna

    require_sweepable(space)
    first = spec_of({name: of.low if isinstance(of, Range) else of[0] for name, of in space.items()})
    spec_of({name: of.high if isinstance(of, Range) else of[-1] for name, of in space.items()})  # is allowed, too
    plan = PointRuns(seeds, [first.run.seed] if seeds is None else seeds)
    tasks = TaskCache(keep=len(plan.seeds))
    first = plan.spec(first, plan.seeds[0])
    select = chosen_metric(first, select, select_on_test, tasks)
    task = tasks(first)
    larger = History(directions=directions({**task.metrics_per_client, **task.metrics})).larger_is_better(select)
    definition: dict[str, Any] = {"seeds": list(plan.seeds), "select": select}
    for section, fields in first.tables().items():
        definition |= {f"{section}.{name}": value for name, value in fields.items()}
    for name, of in space.items():
        definition[f"--search {name}"] = str(of) if isinstance(of, Range) else list(of)
    definition |= {f"code.{name}": digest for name, digest in own_code(first).items()}
    place = storage or str(folder / JOURNAL)
    study = open_study(folder, place, json.loads(json.dumps(definition)), larger, pruner)

    def objective(trial: optuna.Trial) -> float:
        study.sampler = optuna.samplers.TPESampler(seed=trial.number)
        point = {name: drawn(trial, name, of) for name, of in space.items()}
        rows, ended = played(trial, point)
        trial.set_user_attr("point", point)
        trial.set_user_attr("rows", rows)
        for row in rows:
            say(in_a_line(f"{trial_name(trial)}/seed-{row['seed']}", row, select))
        if ended:
            raise optuna.TrialPruned(ended)
        return statistics.fmean(row[select] for row in rows)

    def played(trial: optuna.Trial, point: PointValues) -> tuple[list[dict[str, Any]], str]:
        """Return the row of each seed's run, and why the trial came to no end."""

        def report(result: Result, row: Row | None) -> None:
            if row and select in row and row["round"]:
                trial.report(row[select], int(row["round"]))
                if trial.should_prune():
                    pruned.update(in_table(row))
                    raise optuna.TrialPruned(f"{PRUNED} {row['round']:,.0f} rounds")

        rows: list[dict[str, Any]] = []
        pruned: dict[str, Any] = {}  # the last row of a run that is ended early
        try:
            spec = spec_of(point)
            for seed in plan.seeds:
                display.begin(f"{trial_name(trial)}, seed {seed}")
                watching = [] if rows else [report]
                history = plan.play(spec, seed, folder / trial_name(trial), tasks, callbacks=watching, progress=display)
                rows.append({"seed": seed, "error": "", **in_table(history.rows[-1])})
        except (ConfigurationError, NumericalError, optuna.TrialPruned) as error:
            begun, *others = ({"seed": seed, "error": str(error)} for seed in plan.seeds)
            return [{**begun, **pruned}, *others], str(error)
        return rows, ""

    ends = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    with showing(progress) as display, storing(place, CheckpointError):
        if len(study.get_trials(deepcopy=False, states=ends)) < trials:
            study.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(trials, states=ends)])
        attributes = [one.user_attrs for one in study.get_trials(deepcopy=False, states=ends)]
    points, runs = ([one[name] for one in attributes] for name in ("point", "rows"))
    found = Sweep.of(points, points, runs, select, larger)
    found.others = other_runs(folder, map(trial_name, study.get_trials(deepcopy=False)), plan.seeds)
    found.algorithm = None if found.algorithm is None else spec_of(found.algorithm)
    return found


def trial_name(trial: optuna.Trial | optuna.trial.FrozenTrial) -> str:
    """Name a trial's folder."""
    return f"trial-{trial.number:03d}"


def drawn(trial: optuna.Trial, name: str, of: Range | Sequence[Any]) -> Any:
    """Draw a value for a trial."""
    if isinstance(of, Range):
        return of.drawn(trial, name)
    choices = {toml.value(value): value for value in of}
    return choices[trial.suggest_categorical(name, list(choices))]


def require_optuna() -> None:
    """Say what to install where Optuna is missing, and let it say nothing of what we say ourselves."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigurationError(f"--search needs {missing('optuna', 'sweep')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def open_study(
    folder: Path, place: str, definition: Mapping[str, Any], larger: bool, pruner: str | None
) -> optuna.Study:
    """Open the study in a storage, new or of the same search.

    Raises:
        ConfigurationError: the storage cannot be used, or holds another search.
    """
    import optuna

    with storing(place, ConfigurationError, *UNREADABLE):
        require_reachable(place)
    with lock.wait_for_lock(folder / LOCK), storing(place, ConfigurationError, *UNREADABLE):  # one process makes it
        study = optuna.create_study(
            storage=storage_at(place),
            study_name=STUDY,
            direction="maximize" if larger else "minimize",
            pruner=getattr(optuna.pruners, PRUNERS[pruner])() if pruner else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        there = study.user_attrs.setdefault("definition", definition)
        for name in {**there, **definition}:
            if (was := there.get(name)) != (now := definition.get(name)):
                file = name.removeprefix("code.")
                changed = f"{name} is {was!r} there, and {now!r} here" if file == name else f"{file} has changed since"
                option = "--out" if place == str(folder / JOURNAL) else "--storage"
                raise ConfigurationError(f"{place} has another search: {changed}; choose another {option}")
        study.set_user_attr("definition", definition)
    return study


def require_reachable(place: str) -> None:
    """Connect to a database's server before there is anything in the folder; a file may lie in it."""
    import sqlalchemy

    if "://" not in place and Path(place).exists():
        require_regular(Path(place))
    if "://" not in place or place.startswith("sqlite"):
        return
    try:
        engine = sqlalchemy.create_engine(place)
    except ModuleNotFoundError as error:
        raise ImportError(f"its driver, the Python package {error.name}, is not installed") from error
    engine.connect().close()
    engine.dispose()


def storage_at(place: str) -> Any:
    """Return Optuna's storage: in a file; or in the database at a URL, where a lost worker's trial is tried again."""
    from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
    from optuna.storages.journal import JournalFileBackend

    if "://" not in place:
        return JournalStorage(JournalFileBackend(place, lock_obj=JournalLock(Path(place))))  # type: ignore[arg-type]
    again = RetryHeartbeatStaleTrialCallback(max_retry=2)
    return RDBStorage(place, heartbeat_interval=BEAT, grace_period=GRACE, heartbeat_stale_trial_callback=again)


class JournalLock:
    """The lock of a journal, as Optuna calls it.

    A process that is killed leaves Optuna's own locks behind, for half a minute, or for ever where a path is relative.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal

    def acquire(self) -> bool:
        self.held = held(self.journal)
        self.held.__enter__()
        return True

    def release(self) -> None:
        self.held.__exit__(None, None, None)


@contextmanager
def held(journal: Path) -> Iterator[None]:
    """Hold a journal for this process alone to write, by a lock that the system frees where a process is killed.

    A torn last line is cut off: Optuna would append to it, and never read the file again.
    """
    with lock.wait_for_lock(journal.with_name(f".{journal.name}.lock")):
        if journal.is_file() and journal.stat().st_size:
            with open(journal, "rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        yield


@contextmanager
def storing(place: str, kind: type[FedbilevelError], *others: type[Exception]) -> Iterator[None]:
    """Say which storage cannot be used, and why: errors of its database, and `others`, become an error of `kind`."""
    from sqlalchemy.exc import SQLAlchemyError

    wrong: tuple[type[Exception], ...] = (SQLAlchemyError, *others)
    try:
        yield
    except wrong as error:
        if isinstance(error, FedbilevelError):
            raise
        raise kind(without_password(f"the study in {place} cannot be used: {quoted(error)}")) from error


def without_password(text: str) -> str:
    """Hide the password of a database's URL in a text."""
    return re.sub(r"(://[^:/@\s]*):[^@\s]*@", r"\1:***@", text)
