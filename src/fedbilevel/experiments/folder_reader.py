"""Read the progress of a run, a federation or a sweep from its folder, for the views of `fedbilevel watch`.

Nothing in the folder is changed or executed. Incomplete lines are not used; their number is shown.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbilevel.core.card import counted
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, NumericalError, require
from fedbilevel.core.metrics import text
from fedbilevel.engines import lock
from fedbilevel.engines.divergence import grown
from fedbilevel.engines.history import LONGEST, History, Row, columns_of, cost
from fedbilevel.engines.history import in_words as budget_text
from fedbilevel.experiments.federation_status import Status, is_count
from fedbilevel.experiments.folder import KINDS, Folder, as_damage
from fedbilevel.experiments.snapshot import STATES, MetricTrace, Snapshot
from fedbilevel.experiments.spec import Spec, read_finished
from fedbilevel.experiments.sweep import PLAN, TABLE, in_words
from fedbilevel.experiments.tables import Cell, Column, Table, text_column
from fedbilevel.reading import Kinds, parse_printable, read_bytes, read_json
from fedbilevel.wording import in_a_line, printable

RECENT = 100  # the number of last exchanges whose delays are shown
DEPTH = ("*/", "*/*/", "*/*/*/")  # the depths at which folders of runs are searched; a sweep has them in POINT/seed-N
LONG = 100  # the largest number of characters of the reason why a run of a sweep has ended


class FolderReader:
    """A reader of snapshots of a folder. A file that has not changed is not read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[Path, tuple[tuple[int, int], Any]] = {}  # file -> (time, size), content

    def snapshot(self) -> Snapshot:
        """Read the folder as it is now.

        Raises:
            ConfigurationError: the folder contains no run, or a file in it is damaged.
        """
        require(
            self.path.is_dir(),
            "FOLDER",
            str(self.path),
            "an existing folder, or the URL that `fedbilevel watch --serve` has printed",
        )
        places = self._runs()
        if (self.path / PLAN).is_file() or len(places) > 1:
            return self._several(places)
        return self._run(places[0] if places else Folder(self.path))

    def _runs(self) -> list[Folder]:
        """Return the folders of runs in the folder, or the folder itself.

        The spec in the package of an app is not a run.
        """
        here = Folder(self.path)
        if any(file.is_file() for file in (here.spec, here.exchanges, here.model)):
            return [here]
        names = here.spec.name, here.exchanges.name
        files = (file for depth in DEPTH for name in names for file in self.path.glob(depth + name))
        found = sorted({file.parent for file in files if not (file.parent / "__init__.py").exists()})
        if not found and not (self.path / PLAN).is_file() and here.remains() is None:
            there = ", ".join(sorted(printable(file.name, 40) for file in self.path.iterdir())[:5])
            sought = f"the folder of a run (it has no {' and no '.join(names)}), or one with such folders in it"
            raise ConfigurationError(path="FOLDER", got=str(self.path), allowed=f"{sought}; it has {there}")
        return [Folder(place) for place in found]

    def _content(self, file: Path, read: Callable[[Path], Any]) -> Any:
        """Return the content of a file, read again only if it has changed; None if the file does not exist."""
        try:
            there = file.stat()
        except FileNotFoundError:
            return None
        stamp = there.st_mtime_ns, there.st_size
        if file not in self.known or self.known[file][0] != stamp:
            self.known[file] = stamp, read(file)
        return self.known[file][1]

    def _run(self, place: Folder) -> Snapshot:
        spec: Spec | None = self._content(place.spec, read_finished)
        rows, unread = self._content(place.history, read_rows) or ([], 0)
        status: Status | None = self._content(place.exchanges, lambda file: Status.of(place))
        summary: dict[str, Any] = self._content(place.summary, read_summary) or {}
        history = History(rows, summary.get("directions", {}))
        state, error = state_of(place, status, bool(rows))
        why = "" if error is None else printable(str(error), 1000)
        if state == "finished":
            why = f"diverged: {grew}" if (grew := grown(history)) else summary.get("stopped", "")
        elif state == "idle" and status is not None:
            out = printable(str(place.path.resolve()), None)
            why = f"no process runs it; to continue, submit the run again with out='{out}'"
        elif state == "idle" and spec is not None:
            why = f"no process runs it; continue it by: fedbilevel run --resume {printable(str(place.path), None)}"
        damage = {place.history.name: unread, place.exchanges.name: status.unread if status else 0}
        files = [file for file in (place.history, place.exchanges, place.summary, place.model) if file.is_file()]
        written = max((file.stat().st_mtime for file in files), default=0.0)
        made = Snapshot(
            title=spec.title if spec else printable(place.path.resolve().name),
            state=state,
            why=why,
            facts={**facts(history, status), **({"last written": clock(written)} if written else {})},
            traces=[*traces(history), *(exchange_traces(status) if status else ())],
            tables=[absent_table(status)] if status and status.absent else [],
            notes=[f"{counted(count, 'line')} of {name} cannot be read" for name, count in damage.items() if count],
            directions=history.directions,
            error=error,
            fields=spec.tables() if spec else {},
            is_private=bool(spec and spec.privacy.terms),
        )
        return made if spec is None else replace(made, **progress(spec, history, status))

    def _several(self, places: Sequence[Folder]) -> Snapshot:
        runs = {printable(str(place.path.relative_to(self.path)), None): self._one_of(place) for place in places}
        plan, table = self.path / PLAN, self.path / TABLE
        planned = self._content(plan, read_plan) or {}
        over = bool(planned) and table.is_file() and table.stat().st_mtime >= plan.stat().st_mtime
        count = Counter(run.state for run in runs.values())
        ended, whole = count["finished"] + count["failed"], max(len(runs), 0 if over else planned.get("runs", 0))
        lines = {"runs": ", ".join(f"{count[state]} {state}" for state in STATES if count[state]) or "none yet"}
        select = planned.get("select", "")
        if best := best_runs(runs, select):
            mean = mean_of(best.values())
            several = f" (mean of {len(best)} runs)" if len(best) > 1 else ""
            lines["best" if over else "best so far"] = (
                f"{point_of(next(iter(best)))}, {select} {text(select, mean)}{several}"
            )
        metric = select or next((run.traces[0].name for run in runs.values() if run.traces), "")
        return Snapshot(
            title=printable(self.path.resolve().name),
            state="running" if count["running"] else "finished" if over else "idle" if runs else "waiting",
            done=ended,
            whole=whole,
            amount=f"{ended} of {whole} runs have ended",
            facts=lines,
            tables=[runs_table(runs, metric, best, planned.get("fields", []))] if runs else [],
            notes=[f"{name}: {note}" for name, run in runs.items() for note in run.notes],
            is_private=any(run.is_private for run in runs.values()),
        )

    def _one_of(self, place: Folder) -> Snapshot:
        """Read one of several runs.

        If it is damaged, the snapshot has a note, so that the other runs can still be shown.
        """
        try:
            return self._run(place)
        except (ConfigurationError, OSError) as error:
            where = f"{error.filename}: " if isinstance(error, OSError) else ""
            return Snapshot("", "idle", notes=[f"{where}{in_a_line(error)}"])


def read_plan(file: Path) -> dict[str, Any]:
    """Read the plan that a sweep has written."""
    kinds: Kinds = {
        "select": lambda value: isinstance(value, str),
        "runs": is_count,
        "fields": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    }
    with as_damage(file):
        found: dict[str, Any] = read_json(file, kinds)
        return found


def read_summary(file: Path) -> dict[str, Any]:
    """Read why a run has stopped, and whether larger values of its metrics are better."""
    with as_damage(file):
        found = read_json(file, KINDS)
        return {
            "stopped": found.get("stopped", ""),
            "directions": History.of([], found.get("larger_is_better")).directions,
        }


def read_rows(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a history, and the number of lines that cannot be read, such as an incomplete last line."""
    rows, unread = [], 0
    for line in filter(str.strip, read_bytes(file, LONGEST).decode(errors="replace").splitlines()):
        try:
            rows += History.of([parse_printable(line)]).rows
        except ValueError:
            unread += 1
    return rows, unread


def state_of(place: Folder, status: Status | None, measured: bool) -> tuple[str, FedbilevelError | None]:
    """Return the state of a run, which is one of STATES, and the error with which the run has ended, if any."""
    if place.failed.is_file():
        return "failed", NumericalError(read_bytes(place.failed).decode(errors="replace"))
    if place.finished or place.model.is_file():
        return "finished", None
    if lock.is_held(place.lock):
        return "running", None
    if status is not None and status.ended is not None:
        return "failed", status.ended
    return "idle" if place.begun or measured or status is not None else "waiting", None


def progress(spec: Spec, history: History, status: Status | None) -> dict[str, Any]:
    """Return the progress of a run, in units of its budget, as fields of a `Snapshot`."""
    name, whole = spec.run.budget
    last: Row = {name: float(value) for name, value in history.rows[-1].items()} if history.rows else {}
    done = cost(last, name) if set(columns_of(name)) <= set(last) else 0
    if name == "rounds" and status is not None:
        done = max(done, status.last.get("round", 0))
    so_far = f"{done / 1e6:,.6g}" if name == "bytes" else f"{done:,.6g}"
    return {"done": done, "whole": whole, "amount": f"{so_far} of {budget_text((name, whole))}"}


def facts(history: History, status: Status | None) -> dict[str, str]:
    """Return lines of text about replies, delays, bytes sent and privacy spent, by name."""
    row: dict[str, Any] = dict(history.rows[-1]) if history.rows else {}
    lines: dict[str, str] = {}
    if status is not None and (last := status.last):
        replied, absent = last["answered"], last.get("refused", {})
        short = [status.names.site(client) or str(client) for client in replied[:20]]
        who = f": {', '.join(short)}{', …' * (len(replied) > 20)}" if replied else ""
        place = f"round {last['round']}, exchange {last['exchange']}"
        lines["replied"] = f"{len(replied)} of {len(replied) + len(absent)} in {place}{who}"
        lines["delay"] = (
            f"{status.seconds[-1]:.3g} s; the median is {statistics.median(status.seconds[-RECENT:]):.3g} s"
        )
        row = {**row, "exchanges": status.exchanges, **status.totals, "seconds": row.get("seconds")}
    if "exchanges" in row:
        lines["exchanges"] = f"{row['exchanges']:,}"
    if "bytes_down" in row and "bytes_up" in row:
        lines["sent"] = f"{row['bytes_down'] / 1e6:,.2f} MB down, {row['bytes_up'] / 1e6:,.2f} MB up"
    if status is not None and status.privacy:
        lines["privacy"] = status.privacy
    elif "epsilon" in row:
        lines["privacy"] = f"ε = {row['epsilon']:.4g} spent, the largest of any client"
    return lines | ({"seconds in rounds": f"{row['seconds']:,.1f}"} if row.get("seconds") is not None else {})


def traces(history: History) -> list[MetricTrace]:
    """Return the traces of a history's metrics. For metrics per client, these are only the mean and the worst value."""
    names = [name for name in history.measured if not re.search(r"\.(best|p\d0)$", name)]
    return [MetricTrace(name, [row[name] for row in history.rows if name in row]) for name in names]


def exchange_traces(status: Status) -> list[MetricTrace]:
    """Return the delays of the last exchanges, and how many clients replied in each."""
    series: dict[str, Sequence[float]] = {
        "seconds of an exchange": status.seconds,
        "clients that replied": status.replies,
    }
    return [MetricTrace(name, values[-RECENT:]) for name, values in series.items() if values]


def absent_table(status: Status) -> Table:
    """Return a table of the clients that did not count when they were last asked, with reason and remedy."""
    clients = sorted(status.absent.items())
    never = ["" if client in status.replied else " (no reply of this client has counted yet)" for client, _ in clients]
    columns = [
        text_column("client", [status.names.one(client).removeprefix("client ") for client, _ in clients], 0),
        Column("round", [Cell(str(round)) for _, (round, _) in clients]),
        text_column("why", [why.why + more for (_, (_, why)), more in zip(clients, never, strict=True)]),
        text_column("who can fix it, and how", [f"{why.code.who}: {why.code.how}" for _, (_, why) in clients], 0),
    ]
    return Table("Clients that did not count when they were last asked", columns)


def point_of(name: str) -> str:
    """Return the name of the point of a sweep to which a run belongs, from the run's path in the folder."""
    return name.rpartition("/")[0] or name


def best_runs(runs: Mapping[str, Snapshot], metric: str) -> dict[str, float]:
    """Return run -> metric for the finished runs of the point with the best mean.

    The result is {} if no finished run has a value.
    """
    points: dict[str, dict[str, float]] = {}
    for name, run in runs.items():
        if run.state == "finished" and (value := run.value(metric)) is not None and math.isfinite(value):
            points.setdefault(point_of(name), {})[name] = value
    directions = {name: larger for run in runs.values() for name, larger in run.directions.items()}
    sign = 1 if History(directions=directions).larger_is_better(metric) else -1
    return max(points.values(), key=lambda point: sign * mean_of(point.values()), default={})


def mean_of(values: Collection[float]) -> float:
    """Return the mean of finite values, even if their sum would overflow."""
    return sum(value / len(values) for value in values)


def value_in(sections: Mapping[str, Any], path: str) -> str:
    """Return the value of a swept field as a text. For a part, this is its name; for a missing value, a dash.

    `path` is the dotted path of the field, with or without the section.
    """
    for section in (sections, sections.get("algorithm", {}), *sections.values()):
        found: Any = section
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None:
            return in_words(found.get("name", "–") if isinstance(found, Mapping) else found)
    return "–"


def runs_table(runs: Mapping[str, Snapshot], metric: str, best: Collection[str], fields: Sequence[str]) -> Table:
    """Return a table of runs. Runs in progress come first, and the best runs are marked."""
    names = sorted(runs, key=lambda name: (STATES.index(runs[name].state), name not in best))
    cells = [Cell(runs[name].last(metric) + " ★" * (name in best), best=name in best) for name in names]
    columns = [
        text_column("run", names),
        *(text_column(path, [value_in(runs[name].fields, path) for name in names]) for path in fields),
        text_column("state", [runs[name].state for name in names]),
        text_column("done", [runs[name].amount for name in names], 1),
        *([Column(metric, cells)] if metric else []),
    ]
    why = [runs[name].why if runs[name].error or runs[name].state == "finished" else "" for name in names]
    short = [f"{one[:LONG]}…" if len(one) > LONG else one for one in why]
    return Table("Runs", [*columns, *([text_column("why", short, 0)] if any(short) else [])])


def clock(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as local time in words."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
