"""Manage the folder of a run: its path, the names of its files, and how they are read and cleared."""

from __future__ import annotations

import hashlib
import re
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ChangedValues, CheckpointWarning, ConfigurationError, refuse_together, require
from fedbilevel.core.privacy import SPENT
from fedbilevel.engines import checkpoint, lock
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.divergence import grown
from fedbilevel.engines.history import History, is_number
from fedbilevel.engines.tracking import MEMORY
from fedbilevel.experiments import toml
from fedbilevel.experiments.loader import label, own_file
from fedbilevel.experiments.spec import Spec, read_finished, resolve, sections
from fedbilevel.reading import parse_printable, read_bytes, read_json
from fedbilevel.wording import in_a_line, require_object


def default_path(*names: str | None) -> Path:
    """Return the path runs/<names>-<time>. If this path exists, a counter is added."""
    base = Path("runs") / "-".join([*map(path_word, filter(None, names)), time.strftime("%Y%m%d-%H%M%S")])
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def path_word(name: str) -> str:
    """Return a name in a form that can be part of a path, such as mine-task for mine.py:task."""
    return re.sub(r"(\.py)?[^\w.-]+", "-", name)


def require_free(path: Path) -> None:
    """Raise a ConfigurationError if a file or a folder that is not empty exists at a path."""
    if path.exists() and not path.is_dir():
        raise ConfigurationError("it is a file, and a run needs a folder", where=str(path))
    if path.is_dir() and any(path.iterdir()):
        begun = (path / "checkpoint.npz").exists()
        hint = f"; to continue the run in it: {how_to_continue(Folder(path))}" if begun else ""
        raise ConfigurationError(f"the folder is not empty, and a run needs an empty one{hint}", where=str(path))


COSTS = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "seconds")  # columns of every history
LARGEST = 1e300  # the largest allowed cost, so that sums of a few costs do not overflow
EVENTS = "events.out.tfevents.*"  # TensorBoard's files
SHORT_LOG = 2**20  # a log of more bytes is assumed to have lines of exchanges, and is not searched
SECONDS = ("seconds_in_rounds", "seconds_compiling_this_time", "seconds_this_time")
KINDS: dict[str, Callable[[Any], bool]] = {  # tests of the values in a summary, by name
    **dict.fromkeys(("task", "algorithm", "metric", "stopped"), lambda value: isinstance(value, str)),
    "data": lambda value: isinstance(value, str | None),
    **dict.fromkeys(("seed", "rounds", "best_round"), lambda value: type(value) is int and 0 <= value <= LARGEST),
    **dict.fromkeys(SECONDS, lambda value: is_number(value) and 0 <= value <= LARGEST),
    **dict.fromkeys(("final", "best", "delta"), is_number),
}


class _File:
    """A descriptor for the path of a file that has a fixed name in the folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: Folder, owner: type[Folder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class Folder:
    """The folder of a run, with the paths of its files."""

    path: Path
    spec = _File("spec.toml")
    environment = _File("environment.json")
    history = _File("history.jsonl")
    ledger = _File("ledger.json")
    checkpoint = _File("checkpoint.npz")
    result = _File("result.npz")
    summary = _File("summary.json")
    plot = _File("plot.png")
    model = _File("model.json")
    card = _File("model-card.md")
    sheet = _File("scoring-sheet.txt")
    exchanges = _File("exchanges.jsonl")
    failed = _File("failed.txt")
    trackers = _File(MEMORY)
    name_in_federation = _File("federation")
    lock = _File(".lock")

    @classmethod
    def new(cls, spec: Spec) -> Folder:
        """Return a new folder for a run, in ./runs."""
        return cls(default_path(label(spec.task.name), label(spec.algorithm.name), spec.data))

    @property
    def outcome(self) -> list[Path]:
        """Return the files of a finished run that trackers attach."""
        return [self.spec, self.history, self.ledger, self.result, self.summary, self.plot]

    @property
    def begun(self) -> bool:
        """Return whether there is a checkpoint."""
        return checkpoint.exist(self.checkpoint)

    @property
    def finished(self) -> bool:
        """Return whether the folder has the run's summary, which is the last file that a run writes."""
        return self.summary.is_file()

    def difference(self, spec: Spec) -> str:
        """Describe the first difference between a spec and the run in this folder; "" if there is none."""
        for name, values in self.differences(spec).items():
            return f"{name}: {values[0]!r} there, {values[1]!r} now" if values else f"{name} has changed since then"
        return ""

    def differences(self, spec: Spec) -> ChangedValues:
        """Return the fields in which a spec differs from the run in this folder, with the values there and here.

        The user's files that the spec names are compared too, by their hashes.

        The result is empty if the folder has no run. Two differences do not matter: fields that a spec of an earlier
        version lacks have their defaults, and without `wait_for` the other fields of [asynchronous] have no effect.
        """
        if not self.spec.is_file():
            return {}
        wrong: list[ConfigurationError] = []
        stored, asked = toml.read(self.spec), tomllib.loads(spec.to_toml())
        there, now = (sections(tables, wrong) for tables in (stored, asked))
        refuse_together(wrong)
        if all(there[name].get("name") == now[name]["name"] for name in ("task", "algorithm")):  # both are loaded
            with suppress(ConfigurationError):  # a field of an earlier version may no longer exist
                there = sections(tomllib.loads(resolve(stored, presets=False).to_toml()), wrong)
        if (code := self._code()) is not None:
            there["code"], now["code"] = code, own_code(spec)
        waits = all(tables.get("asynchronous", {}).get("wait_for") == "none" for tables in (there, now))
        found: dict[str, tuple[Any, Any] | None] = {}
        for section in there:
            for name in {} if waits and section == "asynchronous" else {**there[section], **now[section]}:
                one, other = (tables[section].get(name) for tables in (there, now))
                if one != other and section == "code":
                    found[name] = None
                elif one != other:
                    found[f"{section}.{name}"] = one, other
        return found

    def _code(self) -> dict[str, str] | None:
        """Return the recorded hashes of the user's files with which the run was started; None if there is no record."""
        first = self.environments()[:1]
        with as_damage(self.environment):
            return next((dict(begun["code"]) for begun in first if "code" in begun), None)

    def environments(self) -> list[dict[str, Any]]:
        """Return the recorded environments in which the run was started and resumed; [] if there is no record."""
        if not self.environment.is_file():
            return []
        with as_damage(self.environment):
            begun = read_json(self.environment)
            require_object(begun, "the environment of a run")
            resumed = list(begun.pop("resumed", []))
            for one in resumed:
                require_object(one, "the environment of a resumed run")
            return [begun, *resumed]

    def sweep(self) -> None:
        """Remove temporary files, which a process leaves if it is killed while it writes."""
        for file in self.path.glob(".*.tmp"):
            file.unlink(missing_ok=True)

    def remains(self) -> list[Path] | None:
        """Return the files of a run that ended before its first checkpoint; None if the folder has any other file."""
        found = list(self.path.iterdir()) if self.path.is_dir() else []
        ours = {self.spec, self.environment, self.ledger, self.trackers, self.lock}
        ours |= {self.path / f".{self.checkpoint.name}.lock"}
        for file in found:
            without = file == self.exchanges and self._without_exchanges()
            if file not in ours and not without and not file.match(".*.tmp") and not file.match(EVENTS):
                return None
        return found

    def _without_exchanges(self) -> bool:
        """Return whether the log has no exchange, but only reasons why runs ended before their first exchange."""
        if not self.exchanges.is_file() or self.exchanges.stat().st_size > SHORT_LOG:
            return False
        lines = self.exchanges.read_text(encoding="utf-8", errors="replace").splitlines()
        return all(line.startswith('{"ended": ') for line in lines)

    def require_free(self) -> None:
        """Reject a folder that is in use or has files.

        Files of a run that ended before its first checkpoint are allowed.

        Raises:
            InUse: a run is in progress in the folder; the message names its process.
            ConfigurationError: the folder has other files.
        """
        lock.require_unheld(self.lock, self.path)
        self._require_remains()

    def _require_remains(self) -> None:
        if self.remains() is None or not self.path.is_dir():
            require_free(self.path)

    def claim(self, spec: Spec) -> None:
        """Clear a free folder for a new run, except for the lock, and warn if files were removed.

        Raises:
            ConfigurationError: the folder contains a spec that may have been written or changed by hand.
        """
        self._require_remains()
        begun = self.environment.stat().st_mtime if self.environment.exists() else 0.0  # written after the spec
        if self.spec.exists() and self.spec.stat().st_mtime > begun and self.difference(spec):
            require_free(self.path)
        if names := sorted(file.name for file in self.clear() if not file.name.startswith(".")):
            text = f"{self.path}: cleared the files of a run that ended before its first checkpoint"
            warnings.warn(CheckpointWarning(f"{text} ({', '.join(names)})", path=self.path), stacklevel=2)

    def clear(self) -> list[Path]:
        """If the folder contains only the remains of a run, remove them. Return the removed paths."""
        remains = [file for file in self.remains() or [] if file != self.lock]
        for file in remains:
            file.unlink(missing_ok=True)
        return remains


def own_code(spec: Spec) -> dict[str, str]:
    """Return name -> SHA-256 for the user's files that a spec names, but not for files that these files import."""
    files = {file for name in (spec.task.name, spec.algorithm.name) if (file := own_file(name))}
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


@dataclass(frozen=True)
class LoadedRun:
    """The content of a run's folder, without its arrays."""

    folder: Folder
    spec: Spec
    history: History
    ledger: dict[str, Any]
    summary: dict[str, Any]

    @property
    def metric(self) -> str:
        """Return the task's first metric."""
        return str(self.summary["metric"])

    @property
    def grown(self) -> str:
        """Return in what way the run has diverged although its numbers are finite; "" if it has not diverged."""
        return grown(self.history)

    @property
    def out_of_budget(self) -> bool:
        """Return whether the run ended because a privacy budget was spent."""
        return str(self.summary["stopped"]).startswith(SPENT)


def how_to_continue(place: Folder) -> str:
    """Say in words how an unfinished run in a folder is continued."""
    if place.name_in_federation.is_file():  # clients' states are at the sites
        return f"it is the run of a federation; submit it again with out='{place.path.resolve()}'"
    return f"fedbilevel run --resume {place.path}"


def load_run(path: str | Path) -> LoadedRun:
    """Read the folder of a finished run.

    Nothing in the folder is executed, so the code of a user's own task is not needed.

    Raises:
        ConfigurationError: the folder is not the folder of a run, the run has not finished, or a file is damaged.
    """
    folder = Folder(Path(path))
    require(folder.path.is_dir(), "run folder", str(folder.path), "an existing folder")
    why = "this one has a study: read its model-card.md" if folder.model.is_file() else "it has no spec.toml"
    require(folder.spec.is_file(), "run folder", str(folder.path), f"the folder of a run ({why})")
    if not folder.finished:
        raise ConfigurationError(f"the run in {folder.path} has not finished: {how_to_continue(folder)}")
    spec = read_finished(folder.spec)
    with as_damage(folder.history):
        lines = read_bytes(folder.history).decode().splitlines()
        history = History.of([parse_printable(line) for line in lines if line.strip()])
    with as_damage(folder.ledger):
        ledger = asdict(Ledger.of(read_json(folder.ledger)))
    with as_damage(folder.summary):
        summary = _whole(read_json(folder.summary, KINDS))
        history = History.of(history.rows, summary["larger_is_better"])
    with as_damage(folder.history):
        for row in (*history.rows, summary["last_row"]):
            if wrong := [name for name in COSTS if not 0 <= row.get(name, -1) <= LARGEST]:
                raise ValueError(f"round {row['round']} has no valid cost {wrong[0]}")
        if not any(summary["metric"] in row for row in history.rows):
            raise ValueError(f"it does not have the run's metric, {summary['metric']}")
    return LoadedRun(folder, spec, history, ledger, summary)


@contextmanager
def as_damage(file: Path) -> Iterator[None]:
    """Turn errors within the block that a damaged file causes into a ConfigurationError that names the file."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigurationError(f"it is damaged: {in_a_line(error)}", where=str(file)) from error


def _whole(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a summary after a check that it is complete.

    ValueError or LookupError is raised if an entry is missing.
    """
    if lacking := [name for name in KINDS if name not in summary]:
        raise ValueError(f"it has no {lacking[0]}; another version may have written it")
    last = History.of([summary["last_row"]], summary.get("larger_is_better"))
    return {**summary, "last_row": last.rows[0], "larger_is_better": last.directions}
