"""Report to experiment trackers which runs begin, what their rows are, and how they end.

A `Tracker` is a callback that a `Tracking` block also calls when a run begins and ends. `solve` opens such a block. If
the run has a folder, or is part of a sweep, an outer block has begun the run already, and the block of `solve` adds the
fields of the algorithm, and whether the run continues from a checkpoint. The outer block ends the run once its files
are written.

A run appears in a tracker's service with its first row, so that arguments that are refused leave nothing there. An
error of a tracker does not end the run: a warning gives the reason, and rows wait until the service works again.
Trackers get rows, parameters and files of the run's folder, and nothing from the environment or the command line. If a
run without a folder ends without an error, its ledger and its result are written to a temporary folder for trackers.

The noise of a simulation under privacy is drawn from the run's seed, so that anyone with the seed can subtract the
noise. So trackers of such a run get no seed: it is left out of the name, the parameters, the files and the reason of an
error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal

from fedbilevel.core.card import shortened
from fedbilevel.core.errors import ConfigurationError, TrackerWarning, warn
from fedbilevel.core.tables import plain
from fedbilevel.core.writing import write_json
from fedbilevel.engines.history import Result, Row
from fedbilevel.engines.lock import wait_for_lock
from fedbilevel.engines.process_group import current_group
from fedbilevel.reading import read_json
from fedbilevel.wording import READ, in_a_line, missing, names_secret, without_secrets, without_seed

SHARE = 0.1  # the share of the run's time that failing attempts may take
LONGEST = 500  # the largest number of characters of a parameter
MEMORY = "trackers.json"
"""The file in a run's folder with the run's identifier in each tracker, by which a resumed run is found there."""
Ending = Literal["finished", "failed", "killed"]


@dataclass
class TrackedRun:
    """Describe a run to trackers, or a group of runs such as a sweep.

    Args:
        name: the name of the run; it may have slashes.
        parameters: the values that determine the run, by name: tables, and objects whose fields are read as tables.
        folder: the folder of the run, or None.
        memory: the file with the run's identifier in each tracker; None: the run cannot be found there again.
        resumed: whether the run continues a run whose identifiers may be in `memory`.
        files: files that belong to the run; those that exist at its end are attached.
        is_group: whether this is a group of runs.
        with_seed: the files among `files` that contain the parameters, and so the seed of the run or of the group.
        is_private: whether the run is under privacy, so that the seed is left out of the whole description.
        result: the result of a run without a folder, once the run has ended without an error.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    memory: Path | None = None
    resumed: bool = False
    files: Sequence[Path] = ()
    is_group: bool = False
    with_seed: Collection[Path] = ()
    is_private: bool = False
    result: Result | None = None

    def __post_init__(self) -> None:
        if self.is_private:
            self.leave_out_seed()

    def leave_out_seed(self) -> None:
        """Leave the seed out of the description, since the run is under privacy."""
        self.is_private = True
        self.name = without_seed(self.name)
        self.parameters = _without_seeds(plain(self.parameters))
        self.files = [file for file in self.files if file not in self.with_seed]

    def adopt(self, inner: TrackedRun) -> None:
        """Take the values that this description lacks from `inner`, another description of the same run."""
        self.parameters = {**inner.parameters, **self.parameters}
        self.memory = self.memory or inner.memory
        self.resumed = self.resumed or inner.resumed
        if inner.is_private:
            self.leave_out_seed()

    def flat_parameters(self) -> dict[str, str | float]:
        """Return the parameters by dotted names: numbers, truth values, and texts without secrets for other values."""
        shown = {name: _shown(name, value) for name, value in _flat("", plain(self.parameters))}
        return {name: shortened(one, LONGEST) if isinstance(one, str) else one for name, one in shown.items()}

    def attached(self) -> list[Path]:
        """Return the files to attach: those that exist; if a parameter is secret, only those without parameters."""
        has_secret = any(_shown(name, value) != _read(value) for name, value in _flat("", plain(self.parameters)))
        left_out = set(self.with_seed) if has_secret else set()
        return [file for file in self.files if file.is_file() and file not in left_out]

    @contextmanager
    def at_end(self) -> Iterator[list[Path]]:
        """Yield the files to attach. Files of the result are among them, and exist only within the block."""
        if self.result is None:
            yield self.attached()
            return
        with TemporaryDirectory() as place:
            ledger, model = Path(place, "ledger.json"), Path(place, "result.npz")
            write_json(ledger, asdict(self.result.ledger))
            self.result.save(model)
            yield [*self.attached(), ledger, model]

    def remembered(self) -> dict[str, str]:
        """Return the run's identifiers by tracker; none if this is a new run.

        Raises:
            ConfigurationError: the file with the identifiers is damaged.
        """
        if not self.resumed or self.memory is None or not self.memory.is_file():
            return {}
        try:
            found = read_json(self.memory)
            if not (isinstance(found, dict) and all(isinstance(one, str) for one in found.values())):
                raise ValueError("a JSON object with a text for each tracker is expected")
        except (OSError, ValueError) as error:
            remedy = "delete it, and trackers record the run as a new one, with the rows so far"
            raise ConfigurationError(f"{self.memory} is damaged ({in_a_line(error)}): {remedy}") from error
        return found

    def remember(self, tracker: str, identifier: str) -> None:
        """Write the run's identifier in a tracker to `memory`."""
        if self.memory is not None and self.remembered().get(tracker) != identifier:
            write_json(self.memory, {**self.remembered(), tracker: identifier})
            self.resumed = True


def _without_seeds(value: Any) -> Any:
    """Return nested tables without seeds.

    An entry is left out if its name, or the last part of its name, is `seed` or `seeds`, as in `run.seed`. Seeds of a
    task and of a clock are left out too, because they are often equal to the seed of the run.
    """
    if not isinstance(value, Mapping):
        return value
    kept = {name: one for name, one in value.items() if str(name).rpartition(".")[2] not in ("seed", "seeds")}
    return {name: _without_seeds(one) for name, one in kept.items()}


def _flat(path: str, value: Any) -> Iterator[tuple[str, str | float]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _flat(f"{path}.{name}" if path else str(name), one)
    elif isinstance(value, int | float):
        yield path, value
    else:
        yield path, getattr(value, "__qualname__", None) or ("none" if value is None else str(value))


def _read(value: str | float) -> str | float:
    """Return the part of a parameter's value that is searched for secrets."""
    return value[:READ] if isinstance(value, str) else value


def _shown(name: str, value: str | float) -> str | float:
    """Return the value of a parameter without secrets: "***" if it is not empty and its name is that of a secret."""
    if names_secret(name) and value not in ("none", ""):
        return "***"
    return without_secrets(value) if isinstance(value, str) else value


class Record:
    """Hold a run that is open in a tracker's service; this base class serves for groups that need no entry there.

    Args:
        identifier: the text by which the run is found in the service again.
        last: the round of the last row that the service has; -1: it has no row.
    """

    def __init__(self, identifier: str = "", last: int = -1) -> None:
        self.identifier, self.last = identifier, last

    def add(self, row: Row) -> None:
        """Add a row of the history, at the step row["round"]."""

    def close(self, ending: Ending, outcome: Mapping[str, Any], files: Sequence[Path]) -> None:
        """Close the record: store how the run has ended, the values in `outcome`, and the files.

        The files may be temporary: they are copied or sent before this method returns.
        """


@dataclass
class Recording:
    """Hold how far a tracker has recorded a run.

    Args:
        run: the run.
        record: the run in the service; None before it is opened, and after an error.
        rows: the rows that are not recorded yet; None before the tracker's first call.
        last: the round of the last row that is recorded, as far as this process knows.
        known: the round up to which the service had rows when the run was opened; these rows are left out.
        identifier: the run's identifier in the service, if there is one.
    """

    run: TrackedRun
    record: Record | None = None
    rows: list[Row] | None = None
    last: int = -1
    known: int = -1
    identifier: str = ""


class Tracker(ABC):
    """Base class of trackers, which record runs in a service for experiments; also for trackers of your own.

    A tracker is given to `fedbilevel.solve`, `fedbilevel.sweep` or `fedbilevel.experiments.run` among the callbacks. A
    subclass defines `open`, and calls `Tracker.__init__` if it has an `__init__`.
    """

    def __init__(self) -> None:
        self.recordings: list[Recording] = []  # a group, if there is one, and the run
        self.due, self.warned = -float("inf"), False

    @abstractmethod
    def open(self, run: TrackedRun, group: Record | None, identifier: str, last: int) -> Record:
        """Open a run, or a group of runs, in the service.

        Args:
            run: the name, parameters and place of the run.
            group: the group that the run belongs to, or None.
            identifier: the run's identifier in the service if it was recorded before; else "".
            last: the round of the last row that was recorded before; -1 if this is not known, or if there is no such
                row.
        """

    def library(self, package: str, extra: str) -> Any:
        """Return the tracker's library.

        Raises:
            ConfigurationError: the library is not installed.
        """
        try:
            return import_module(package)
        except ImportError as error:
            raise ConfigurationError(f"trackers.{type(self).__name__} needs {missing(package, extra)}") from error

    @property
    def is_running(self) -> bool:
        """Return whether a run has begun and not ended."""
        return bool(self.recordings) and not self.recordings[-1].run.is_group

    def begin(self, run: TrackedRun) -> None:
        """Begin a run or group. It is opened in the service when its first row is recorded."""
        if not self.recordings:
            self.due, self.warned = -float("inf"), False
        elif self.recordings[-1].run.is_private:  # the runs of a group have the same seeds
            run.leave_out_seed()
        self.recordings.append(Recording(run))

    def __call__(self, result: Result, row: Row | None) -> None:
        """Record the new row, and rows that could not be recorded before."""
        if not self.is_running:
            return
        now = self.recordings[-1]
        if now.rows is None:
            now.rows = list(result.history.rows)
            before = now.rows[:-1] if row is not None else now.rows
            now.last = int(before[-1]["round"]) if before and now.run.resumed else -1
        elif row is not None:
            now.rows.append(row)
        if now.rows or now.record is None:
            self._attempt(partial(self._write, now))

    def end(self, ending: Ending, outcome: Mapping[str, Any]) -> None:
        """End the run or group that began last."""
        now = self.recordings[-1]
        try:
            if now.record is not None or now.rows is not None:  # otherwise it ended before its first row
                self._attempt(lambda: self._close(now, ending, outcome))
        finally:
            self.recordings.pop()

    def _write(self, now: Recording) -> None:
        record = self._opened(len(self.recordings) - 1)
        while now.rows:
            if (round := int(now.rows[0]["round"])) > now.known:
                record.add(now.rows[0])
                now.last, now.known = round, -1  # from here on, a run that diverges may return to an earlier round
            now.rows.pop(0)

    def _close(self, now: Recording, ending: Ending, outcome: Mapping[str, Any]) -> None:
        self._write(now)
        with now.run.at_end() as files:
            self._opened(len(self.recordings) - 1).close(ending, outcome, files)

    def _opened(self, level: int) -> Record:
        """Open the run or group of this level in the service, unless it is open.

        If it was recorded before, it is found by its identifier.
        """
        now = self.recordings[level]
        if now.record is None:
            if level and now.run.is_private:
                self.recordings[level - 1].run.leave_out_seed()
            group = self._opened(level - 1) if level else None
            name, memory = type(self).__name__, now.run.memory if now.run.is_group else None
            with nullcontext() if memory is None else wait_for_lock(memory.with_name(f".{memory.name}.lock")):
                now.identifier = now.identifier or now.run.remembered().get(name, "")
                now.record = self.open(now.run, group, now.identifier, now.last if now.identifier else -1)
                now.identifier = now.record.identifier
                now.run.remember(name, now.identifier)
            now.known = now.record.last
        return now.record

    def _attempt(self, act: Callable[[], None]) -> None:
        """Call `act`, which may fail. After an error, nothing is tried for a while; then runs are opened again."""
        began = time.monotonic()
        if began < self.due:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a service may raise anything
            for recording in self.recordings:
                recording.record = None
            now = time.monotonic()
            self.due = now + (now - began) / SHARE
            if not self.warned:
                self.warned = True
                why = f"{type(error).__name__}: {in_a_line(error)}"
                more = "the run continues without it, and tries again with later rows"
                warn(TrackerWarning(f"{type(self).__name__} could not record the run ({why}): {more}"))


class Tracking:
    """Begin a run, or a group of runs, for the trackers among callbacks, and end it with the block.

    Of several processes, only the first has trackers. Inside another block of the same run, this block only adds to the
    description of the run.

    Args:
        callbacks: the callbacks of a run.
        run: the run or group.
    """

    def __init__(self, callbacks: object, run: TrackedRun) -> None:
        given = callbacks if isinstance(callbacks, list | tuple) and current_group().is_first else ()
        self.trackers = [one for one in given if isinstance(one, Tracker)]
        self.run, self.outcome = run, dict[str, Any]()
        self.begun: list[Tracker] = []

    def __enter__(self) -> Tracking:
        for tracker in self.trackers:
            if tracker.is_running:
                outer = tracker.recordings[-1].run
                outer.adopt(self.run)
                outer.remembered()  # so that a damaged file causes an error before anything is run
            else:
                self.begun.append(tracker)
        if self.begun:
            self.run.remembered()
        for tracker in self.begun:
            tracker.begin(self.run)
        return self

    def ended(self, result: Result) -> Result:
        """Note the result of the run, and return it."""
        self.outcome = {"stopped": result.stopped} if result.stopped else {}
        self.run.result = result if self.run.folder is None else None
        for tracker in self.begun:
            tracker(result, None)
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            why = in_a_line(error)
            self.outcome = {"stopped": without_seed(why) if self.run.is_private else why}
        for tracker in self.begun:
            tracker.end(ending_of(error), self.outcome)


def tracked_group(
    name: str,
    parameters: Mapping[str, Any],
    folder: Path | None,
    files: Sequence[Path] = (),
    with_seed: Collection[Path] = (),
    is_private: bool = False,
) -> TrackedRun:
    """Describe a group of runs; descriptions with the same folder are of the same group.

    If a run of the group is under privacy, the seeds are left out of the group's description. With `is_private`, they
    are also left out of the descriptions of all runs of the group, which share the seeds.
    """
    memory = folder and folder / MEMORY
    name = folder.resolve().name if folder else name
    return TrackedRun(
        name, parameters, folder, memory, resumed=True, files=files, is_group=True, with_seed=with_seed,
        is_private=is_private,
    )  # fmt: skip


def ending_of(error: BaseException | None) -> Ending:
    """Return how a run has ended; "killed" is for a signal, and for a search that prunes the run."""
    if error is None:
        return "finished"
    return "failed" if isinstance(error, Exception) and type(error).__name__ != "TrialPruned" else "killed"
