"""Search for good fields of a spec: a sweep whose points are drawn by an Optuna study.

The objective of the study makes a run for each seed. The runs have folders such as

    trial-003/seed-0

If the same command is run again, it continues the study. If several processes run it, they share the trials. If a
process is killed, another point is drawn in place of its trial. A draw depends on the number of the trial and on the
results of earlier trials. A pruner may end a trial early; it judges trials by the history of the first seed's run.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    FedbilevelError,
    NumericalError,
    is_number,
    require,
)
from fedbilevel.core.metrics import directions
from fedbilevel.display import Display
from fedbilevel.engines import lock
from fedbilevel.engines.history import History, Result, Row
from fedbilevel.engines.progress import showing
from fedbilevel.engines.tracking import Tracker
from fedbilevel.experiments import toml
from fedbilevel.experiments.folder import own_code
from fedbilevel.experiments.outer_search import require_optuna
from fedbilevel.experiments.sweep import (
    InFolders,
    PrintLine,
    SpecOf,
    chosen_metric,
    in_a_line,
    other_runs,
    require_sweepable,
)
from fedbilevel.reading import require_regular
from fedbilevel.sweeps import PRUNED, PointValues, Sweep, in_table, row_of, row_of_failed
from fedbilevel.wording import in_a_line as quoted
from fedbilevel.wording import without_secrets

if TYPE_CHECKING:
    import optuna

STUDY, JOURNAL, LOCK = "fedbilevel", "study.journal", ".study.lock"
BEAT, GRACE = 10, 60  # a worker has a heartbeat every BEAT seconds; after GRACE seconds without, its trial is retried
DIGITS = 4  # the number of significant digits of a drawn number, so that a paper can quote it exactly
PRUNERS = {"halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner", "median": "MedianPruner"}
UNREADABLE = (ImportError, OSError, ValueError, LookupError, TypeError, AttributeError)  # errors of drivers, journals
Space = Mapping[str, "Range | Sequence[Any]"]
"""A field -> the range of numbers, or the list of values, from which it is drawn."""


@dataclass(frozen=True)
class Range:
    """A range from which numbers are drawn, uniformly or on a logarithmic scale.

    If both ends are integers, integers are drawn.
    """

    low: float
    high: float
    log: bool = False

    @classmethod
    def parse(cls, option: str, text: str, *, linear: bool = False) -> Range:
        """Read a range from the text of an option: "0.001:1:log", "0:0.5" or, for whole numbers, "1:8".

        Args:
            option: the name of the option, for the message.
            text: the range.
            linear: whether to reject ":log".

        Raises:
            ConfigurationError: the text has none of these forms.
        """
        form = "of the form LOW:HIGH or LOW:HIGH:log, with LOW below HIGH, and LOW above 0 if log"
        form = "of the form LOW:HIGH, with LOW below HIGH" if linear else form
        low, *rest = text.split(":")
        try:
            ends = [toml.parse_value(low.strip()), toml.parse_value(rest[0].strip())] if rest else []
        except ConfigurationError:
            ends = []
        log = rest[1:] == ["log"]
        fits = len(ends) == 2 and all(map(is_number, ends)) and (log or not rest[1:]) and ends[0] < ends[1]
        require(fits and not (log and (linear or ends[0] <= 0)), option, text, form)
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
    trackers: Sequence[Tracker] = (),
) -> Sweep:
    """Draw points and run them until `trials` trials have ended.

    Trials of other processes with the same storage are included in this number.

    Args:
        spec_of, folder, seeds, select, select_on_test, say, progress, trackers: see `sweep_specs`.
        space: field -> the range or the list of values from which it is drawn.
        trials: the number of trials, including trials of other processes. If two processes end a trial at the same
            time, there may be one more.
        storage: the URL of a database, as SQLAlchemy takes it (sqlite:///…, postgresql://…), or the path of a file;
            None: a file in the folder.
        pruner: the name in PRUNERS of a rule that ends bad trials early; None: all trials run to their ends.

    Raises:
        ConfigurationError: the input is wrong, the storage or the folder has another sweep, or Optuna is not installed.
        CheckpointError: a file or the storage cannot be written.
    """
    require_optuna("--search")
    import optuna

    require_sweepable(space)
    first = spec_of({name: of.low if isinstance(of, Range) else of[0] for name, of in space.items()})
    # checks that the upper ends of ranges and the last values of lists are allowed, too
    spec_of({name: of.high if isinstance(of, Range) else of[-1] for name, of in space.items()})
    keep = len(seeds or (first.run.seed,))
    player = InFolders(
        spec_of, folder, seeds, first, name=lambda number, point: trial_name(number), keep=keep, trackers=trackers
    )
    first = player.seeded(first, player.seeds[0])
    select = chosen_metric(first, select, select_on_test, player.tasks)
    task = player.tasks(first)
    larger = History(directions=directions({**task.metrics_per_client, **task.metrics})).larger_is_better(select)
    definition: dict[str, Any] = {"seeds": list(player.seeds), "select": select}
    for section, fields in first.tables().items():
        definition |= {f"{section}.{name}": value for name, value in fields.items()}
    for name, of in space.items():
        definition[f"--search {name}"] = str(of) if isinstance(of, Range) else list(of)
    definition |= {f"code.{name}": digest for name, digest in own_code(first).items()}
    place = storage or str(folder / JOURNAL)
    study = open_study(folder, place, json.loads(json.dumps(definition)), larger, pruner)
    player.plan = {"select": select, "runs": trials * len(player.seeds), "fields": list(space)}

    def objective(trial: optuna.Trial) -> float:
        study.sampler = optuna.samplers.TPESampler(seed=trial.number)
        point = {name: drawn(trial, name, of) for name, of in space.items()}
        rows = played(trial, point)
        trial.set_user_attr("point", point)
        trial.set_user_attr("rows", rows)
        for row in rows:
            say(in_a_line(f"{trial_name(trial.number)}/seed-{row['seed']}", row, select))
        for error in filter(None, (row["error"] for row in rows)):
            raise optuna.TrialPruned(error)
        return statistics.fmean(row[select] for row in rows)

    def played(trial: optuna.Trial, point: PointValues) -> list[dict[str, Any]]:
        """Return the row of each seed's run. If the trial ended early, every row contains the error."""

        def report(result: Result, row: Row | None) -> None:
            if row and select in row and row["round"]:
                trial.report(row[select], int(row["round"]))
                if trial.should_prune():
                    pruned.update(in_table(row))
                    raise optuna.TrialPruned(f"{PRUNED} {row['round']:,.0f} rounds")

        rows: list[dict[str, Any]] = []
        pruned: dict[str, Any] = {}  # the last row of a run that was pruned
        try:
            for seed in player.seeds:
                history = player.run(trial.number, point, seed, display, [] if rows else [report])
                rows.append(row_of(history, seed, select))
        except (ConfigurationError, NumericalError, optuna.TrialPruned) as error:
            ended = [{**row, "error": str(error)} for row in rows]
            now, *others = player.seeds[len(rows) :]
            later = [{"seed": seed, "error": str(error)} for seed in others]
            return [*ended, {**row_of_failed(error, now), **pruned}, *later]
        return rows

    ends = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED
    with showing(progress) as display, storing(place, CheckpointError):
        if len(study.get_trials(deepcopy=False, states=ends)) < trials:
            study.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(trials, states=ends)])
        attributes = [one.user_attrs for one in study.get_trials(deepcopy=False, states=ends)]
    points, runs = ([one[name] for one in attributes] for name in ("point", "rows"))
    found = Sweep.of(player, points, runs, select, larger)
    names = [trial_name(trial.number) for trial in study.get_trials(deepcopy=False)]
    found.others = other_runs(folder, names, player.seeds)
    return found


def trial_name(number: int) -> str:
    """Return the name of a trial's folder, from the trial's number."""
    return f"trial-{number:03d}"


def drawn(trial: optuna.Trial, name: str, of: Range | Sequence[Any]) -> Any:
    """Draw a field's value for a trial, from a range or a list."""
    if isinstance(of, Range):
        return of.drawn(trial, name)
    choices = {toml.value(value): value for value in of}
    return choices[trial.suggest_categorical(name, list(choices))]


def open_study(
    folder: Path, place: str, definition: Mapping[str, Any], larger: bool, pruner: str | None
) -> optuna.Study:
    """Open the Optuna study in a storage, or create it.

    Raises:
        ConfigurationError: the storage cannot be used, or has another search.
    """
    import optuna

    with storing(place, ConfigurationError, *UNREADABLE):
        require_reachable(place)
    with lock.wait_for_lock(folder / LOCK), storing(place, ConfigurationError, *UNREADABLE):  # one process creates it
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
                changed = f"{name} was {was!r} and is now {now!r}" if file == name else f"{file} has changed since then"
                option = "--out" if place == str(folder / JOURNAL) else "--storage"
                where = without_secrets(place)
                raise ConfigurationError(f"it has another search: {changed}; choose another {option}", where=where)
        study.set_user_attr("definition", definition)
    return study


def require_reachable(place: str) -> None:
    """Check that the server of a database can be reached. A database that is a file is not opened.

    This is called before anything is written to the folder.
    """
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
    """Return Optuna's storage in a file, or in the database at a URL.

    In a database, the trial of a lost worker is retried.
    """
    from optuna.storages import JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
    from optuna.storages.journal import JournalFileBackend

    if "://" not in place:
        return JournalStorage(JournalFileBackend(place, lock_obj=JournalLock(Path(place))))  # type: ignore[arg-type]
    again = RetryHeartbeatStaleTrialCallback(max_retry=2)
    return RDBStorage(place, heartbeat_interval=BEAT, grace_period=GRACE, heartbeat_stale_trial_callback=again)


class JournalLock:
    """A lock of a journal file, in place of Optuna's own locks.

    If a process is killed, Optuna's own locks remain for half a minute, or forever if the path is relative.
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
    """Lock a journal, so that only this process writes it within the block.

    The system frees the lock if the process is killed.

    An incomplete last line is removed, since Optuna would append to it, and could then never read the file again.
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
    """Turn errors of the database, and `others`, into an error of class `kind` that names storage and reason."""
    from sqlalchemy.exc import SQLAlchemyError

    wrong: tuple[type[Exception], ...] = (SQLAlchemyError, *others)
    try:
        yield
    except wrong as error:
        if isinstance(error, FedbilevelError):
            raise
        raise kind(without_secrets(f"the study in {place} cannot be used: {quoted(error)}")) from error
