"""The outcomes of a sweep on disk, one line each, as soon as they are known; what the sweep was begun with; and the
order of play: rung by rung, and in a rung one seed after the other.

A line is written at once and flushed to the disk. Of a process that was killed while it wrote, the last line may be
torn: it is cut off, and its job is played again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError, ConfigurationError
from fedbilevel.engines import lock
from fedbilevel.engines.checkpoint import write_json
from fedbilevel.engines.history import History
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import Job, Plan, TrialOutcome, standing
from fedbilevel.wording import in_a_line, require_object

DEFINITION, LINES, LOCK = "definition.json", "trials.jsonl", ".lock"


@dataclass
class Journal:
    """The outcomes that are known; without a path they are only kept in memory."""

    path: Path | None = None
    outcomes: dict[Job, TrialOutcome] = field(default_factory=dict)

    def append(self, job: Job, outcome: TrialOutcome) -> None:
        self.outcomes[job] = outcome
        if self.path is None:
            return
        line = json.dumps(asdict(job) | asdict(outcome)) + "\n"
        try:
            with open(self.path, "ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"could not write {self.path}: {error.strerror or error}") from error


@contextmanager
def opened(folder: Path, definition: Mapping[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of the sweep in a folder, which nobody else may write to meanwhile.

    Args:
        folder: new or empty; to resume, that of the same sweep.
        definition: what the sweep was begun with, as JSON can hold it.
        resume: go on with what the folder holds.

    Raises:
        ConfigurationError: the folder holds something else, or a sweep that was defined otherwise.
        CheckpointError: another process is at it.
    """
    require_no_file(folder)
    with lock.exclusive(folder / LOCK, folder):
        claim(folder, definition, join=resume)
        yield Journal(folder / LINES, read(folder / LINES))


def require_no_file(folder: Path) -> None:
    """Refuse a file in the place of a sweep's folder."""
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"cannot write a sweep to {folder}: it is a file")


def claim(folder: Path, definition: Mapping[str, Any], *, join: bool) -> None:
    """Make the folder this sweep's, or join the sweep in it; refuse a folder with anything else."""
    begun = (folder / DEFINITION).is_file()
    if begun and join:
        require_same(folder, definition)
        return
    if begun:
        raise ConfigurationError(f"there is a sweep in {folder} already: resume it, or choose another folder")
    if any(path.name != LOCK for path in folder.iterdir()):
        raise ConfigurationError(f"cannot write a sweep to {folder}: that folder is not empty")
    write_json(folder / DEFINITION, definition)


def require_same(folder: Path, definition: Mapping[str, Any]) -> None:
    """Refuse to resume a sweep with another definition, and say what differs."""
    there = definition_in(folder)
    for name in {**there, **definition}:
        was, now = there.get(name), json.loads(json.dumps(definition.get(name)))
        if was != now:
            raise ConfigurationError(
                f"cannot resume the sweep in {folder}: {name} was {was!r} when it was begun, and is {now!r} now"
            )


def definition_in(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / DEFINITION).read_text(encoding="utf-8"))
        require_object(found, "the definition of a sweep")
        return dict(found)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(f"{folder / DEFINITION} is damaged: {in_a_line(error)}") from error


def read(path: Path) -> dict[Job, TrialOutcome]:
    """The outcomes in a file, none where there is no file; a torn last line is cut off."""
    if not path.is_file():
        return {}
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    if torn:
        os.truncate(path, len(whole) + bool(whole))
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            fields = json.loads(line)
            job = Job(**{name: int(fields.pop(name)) for name in ("point", "seed", "rung")})
            outcome = TrialOutcome(**fields)
            History.of([outcome.row] if outcome.row else [], {"": outcome.larger_is_better})
            if not isinstance(outcome.error, str) or not (outcome.row or outcome.error):
                raise TypeError("no outcome of a trial")
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ConfigurationError(f"{path} is damaged in line {number}: {in_a_line(error)}") from error
        found[job] = outcome
    return found


PlayJobs = Callable[[Sequence[Job]], Iterable[tuple[Job, TrialOutcome]]]
"""Plays jobs of one rung, in any order, and hands out each outcome as soon as it is known: one job after the other, or
several in one program."""


def play(plan: Plan, run: PlayJobs, journal: Journal) -> Sweep:
    """Bring every job of a sweep to its end; those whose outcome is in the journal are not played again."""
    going = list(range(len(plan.points)))
    for rung in range(len(plan.rungs)):
        jobs = [Job(point, seed, rung) for seed in plan.seeds for point in going]
        for job, outcome in run([job for job in jobs if job not in journal.outcomes]):
            journal.append(job, outcome)
        going = best(plan, going, {job: one for job, one in journal.outcomes.items() if job.rung == rung})
    return Sweep(plan, journal.outcomes)


def best(plan: Plan, points: Sequence[int], outcomes: Mapping[Job, TrialOutcome]) -> list[int]:
    """The points that go on, by the outcomes of one rung: one in `plan.halving` of them, the best; one at least, none
    where all failed."""
    found = [standing(plan, point, outcomes) for point in points]
    scores = {one.number: one.mean for one in found if one.mean is not None}
    larger = Sweep(plan, outcomes).larger_is_better
    ordered = sorted(scores, key=lambda point: scores[point], reverse=larger)
    return ordered[: max(1, len(points) // (plan.halving or 1))]
