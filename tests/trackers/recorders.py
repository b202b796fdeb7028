"""A service that keeps runs in memory, a tracker for it, and a run to record, for tests of trackers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import fedbilevel as fb
from fedbilevel.tasks import quadratic

TASK = quadratic(clients=2, dim_x=2, dim_y=2, samples=(2, 2))
METHOD = fb.SimFBO(server_lr=fb.XYV(0.05, 0.1, 0.1), client_lr=0.05)


@dataclass
class Kept:
    """What the service has of a run."""

    run: fb.trackers.TrackedRun
    group: str
    rows: list[dict[str, float]] = field(default_factory=list)
    ending: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    content: list[bytes] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [int(row["round"]) for row in self.rows]


class Service:
    """A service that keeps runs by their identifiers, and that answers as long as `works` is true."""

    def __init__(self) -> None:
        self.runs: dict[str, Kept] = {}
        self.works = True

    def require_works(self) -> None:
        if not self.works:
            raise ConnectionError("http://me:secret@tracker.example does not answer")

    def named(self) -> dict[str, Kept]:
        return {kept.run.name: kept for kept in self.runs.values()}


class InMemory(fb.trackers.Tracker):
    """A tracker as a user would write one."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self.service = service

    def open(self, run, group, identifier, last):
        self.service.require_works()
        if identifier not in self.service.runs:
            identifier = f"run-{len(self.service.runs)}"
            self.service.runs[identifier] = Kept(run, group.identifier if group else "")
        return InMemoryRun(self.service, identifier)


class InMemoryRun(fb.trackers.Record):
    def __init__(self, service: Service, identifier: str) -> None:
        self.service, self.kept = service, service.runs[identifier]
        super().__init__(identifier, max(self.kept.steps, default=-1))

    def add(self, row) -> None:
        self.service.require_works()
        self.kept.rows.append(dict(row))

    def close(self, ending, outcome, files) -> None:
        self.service.require_works()
        self.kept.ending, self.kept.outcome = ending, dict(outcome)
        self.kept.files = [file.name for file in files]
        self.kept.content = [file.read_bytes() for file in files]


def solved(rounds: int, *callbacks: Any, **given: Any) -> fb.Result:
    """Solve the task, with a row after every second round."""
    given = {"eval_every": 2, "metrics": TASK.metrics, "progress": False, **given}
    return fb.solve(
        METHOD, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=rounds, callbacks=list(callbacks), **given
    )
