"""Report the progress and the end of a federated run, from the `exchanges.jsonl` that its server writes.

The report has one of three forms: lines of text, JSON, or metrics for Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedbilevel.core.card import counted
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    InUse,
    NumericalError,
)
from fedbilevel.engines import lock
from fedbilevel.engines.history import is_number
from fedbilevel.experiments.folder import LARGEST, Folder
from fedbilevel.flower.refusal import ClientNames, Refusal
from fedbilevel.reading import parse_printable

ENDS = {kind.__name__: kind for kind in (NumericalError, ExchangeError, CheckpointError, ConfigurationError)}


@contextmanager
def ending(place: Folder) -> Iterator[None]:
    """Run the block. If an error ends the run, its message also says what is kept and how to continue.

    The message is also written as the last line of `exchanges.jsonl`, where `status` finds it. If the run ends before
    its first exchange and its folder is new, this line is the only content of the folder.
    """
    try:
        yield
    except (FedbilevelError, OSError) as error:
        if isinstance(error, InUse) or (not place.begun and place.remains() is None):
            raise
        ended = _as_end(error, place.path)
        again = f"; to continue, submit the run again with out='{place.path.resolve()}'"
        if isinstance(ended, NumericalError):
            again = ""
        if not place.begun:
            again = " and can be submitted again"
        kept = "the last checkpoint is kept" if place.begun else "the run ended before its first exchange"
        if not place.finished:
            ended.append(f"{kept}{again}")
        note_end(place, ended)
        if ended is error:
            raise
        raise ended from error


def _as_end(error: FedbilevelError | OSError, folder: Path) -> FedbilevelError:
    """Return an error as one of the kinds of `ENDS`: the error itself, or a CheckpointError with its message."""
    if isinstance(error, FedbilevelError):
        return error if isinstance(error, tuple(ENDS.values())) else CheckpointError(str(error), path=folder)
    file = error.filename or folder
    return CheckpointError(f"{file}: {error.strerror}", path=file, errno=error.errno)


def note_end(place: Folder, ended: FedbilevelError) -> None:
    """Write the reason why a run ended as the last line of `exchanges.jsonl`, where `status` finds it."""
    with suppress(OSError):
        place.path.mkdir(parents=True, exist_ok=True)
        with open(place.exchanges, "a", encoding="utf-8") as file:
            kind = next(name for name, kind in ENDS.items() if isinstance(ended, kind))
            file.write(json.dumps({"ended": str(ended), "kind": kind}) + "\n")


def is_count(value: Any) -> bool:
    """Return whether a value in a file is a whole number from 0 to LARGEST.

    With this bound, sums of a few values do not overflow.
    """
    return type(value) is int and 0 <= value <= LARGEST


LINE: Mapping[str, Callable[[Any], bool]] = {
    "round": is_count,
    "exchange": is_count,
    "attempt": is_count,
    "asked": is_count,
    "phase": lambda value: isinstance(value, str),
    "sites": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "answered": lambda value: isinstance(value, list) and all(map(is_count, value)),
    "refused": lambda value: (
        isinstance(value, dict)
        and all(client.isdecimal() and len(client) < 10 and isinstance(why, dict) for client, why in value.items())
    ),
    "epsilon": lambda value: is_number(value) and value >= 0,
    "spent": lambda value: isinstance(value, dict) and all(client.isdecimal() and len(client) < 10 for client in value),
    "bytes_down": is_count,
    "bytes_up": is_count,
    "seconds": lambda value: is_number(value) and value >= 0,
    "ended": lambda value: isinstance(value, str),
    "kind": lambda value: value in list(ENDS),
}
"""The entries of a line of `exchanges.jsonl` that `status` reads, each with a test of its value."""
PLACE = ("round", "exchange", "phase")
"""The entries of a line that are equal for all attempts at an exchange."""


@dataclass
class Status:
    """The progress of a federated run.

    Args:
        path: the path of the run's `exchanges.jsonl`.
        finished: whether the run's result, or the model of a study, is in the folder.
        exchanges: the number of attempts at exchanges so far.
        requests: the number of requests to clients in these attempts.
        last: the line of the last attempt. Its entry "answered" also contains clients that replied to earlier attempts
            at the same exchange.
        replied: the clients with at least one reply that counted.
        names: the names of the clients.
        epsilon: the largest ε that a client has reported; 0 if none has.
        noised: the clients that have reported an ε.
        absent: client -> (round, reason) if the client did not count when it was last asked.
        totals: bytes down and up, and seconds, of all exchanges.
        seconds, replies: for each exchange, its duration in seconds, and the number of replies that counted.
        unread: the number of lines that cannot be read. A process that was killed may leave an incomplete line.
        modified: when the file was last written, in seconds since 1970.
        ended: the error with which the server ended, if there is one.
        running: whether a server's process is at work in the folder.
    """

    path: Path
    finished: bool
    modified: float
    exchanges: int = 0
    requests: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    replied: set[int] = field(default_factory=set)
    names: ClientNames = field(default_factory=ClientNames)
    epsilon: float = 0.0
    noised: set[int] = field(default_factory=set)
    absent: dict[int, tuple[int, Refusal]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("bytes_down", "bytes_up", "seconds"), 0))
    seconds: list[float] = field(default_factory=list)
    replies: list[int] = field(default_factory=list)
    unread: int = 0
    ended: FedbilevelError | None = None
    running: bool = False

    @classmethod
    def of(cls, place: Folder) -> Status:
        """Read the status of the run in a folder.

        Raises:
            ConfigurationError: the folder has no exchanges.
        """
        if not place.exchanges.is_file():
            there = place.exchanges.exists()
            absent = "does not exist. Either no exchange has ended yet, or no run has begun"
            how = "`fedbilevel flower status --connection NAME` says whether the SuperLink starts runs"
            what = "is not a regular file" if there else absent
            raise ConfigurationError(f"the file {what}. {how}", where=str(place.exchanges))
        finished = place.finished or place.model.is_file()
        found = cls(place.exchanges, finished, place.exchanges.stat().st_mtime, running=lock.is_held(place.lock))
        for text in place.exchanges.read_text(errors="replace").splitlines():
            try:
                found.read(parse_printable(text, LINE))
            except (ValueError, KeyError):
                found.unread += 1
        return found

    def read(self, line: dict[str, Any]) -> None:
        """Add a line of the file to the status; raise KeyError if an entry is missing."""
        ended = ENDS[line["kind"]](line["ended"]) if "ended" in line else None
        if "exchange" in line:
            round, answered, refused = line["round"], line["answered"], line.get("refused", {})
            place = [line.get(name) for name in PLACE]
            self.names = ClientNames(tuple(line["sites"])) if "sites" in line else self.names
            whys = {int(client): (round, Refusal.read(why, int(client))) for client, why in refused.items()}
            self.absent = {client: why for client, why in self.absent.items() if client not in answered} | whys
            if line.get("attempt") and place == [self.last.get(name) for name in PLACE]:  # the same exchange again
                line = line | {"answered": sorted({*self.last["answered"], *answered})}
            self.last, self.replied, self.exchanges = line, self.replied | set(answered), self.exchanges + 1
            self.requests += line.get("asked", 0)
            self.epsilon = max(self.epsilon, line.get("epsilon", 0.0))
            self.noised |= set(map(int, line.get("spent", {})))
            self.totals = {name: total + line.get(name, 0) for name, total in self.totals.items()}
            self.seconds.append(line.get("seconds", 0.0))
            self.replies.append(len(answered))
        self.ended = ended

    @property
    def privacy(self) -> str:
        """Say in words how large ε is, and which clients reply without noise; "" if no client has reported an ε."""
        if not self.epsilon:
            return ""
        exact = self.replied - self.noised if self.noised else set()
        without = f" (no noise, and so no bound on ε: {self.names.several(exact)})" if exact else ""
        return f"ε = {self.epsilon:.4g} spent, the largest of the clients that add noise{without}"

    @property
    def lines(self) -> list[str]:
        """Return the status as lines of text."""
        damage = [f"{counted(self.unread, 'line')} of {self.path} cannot be read"] if self.unread else []
        if not (last := self.last):
            return ["no exchange has ended", *damage]
        killed = "" if self.running or self.ended is not None else ", and no process runs it"
        state = "finished" if self.finished else f"not finished{killed}"
        phase = f" ({last['phase']})" if "phase" in last else ""  # rounds start at 0 in each part of a study
        where = f"round {last['round']}, exchange {last['exchange']}{phase}"
        said = [f"{state}; last: {where}, {len(last['answered'])} replied"]
        said += [self.privacy] if self.privacy else []
        for client, (round, why) in sorted(self.absent.items()):
            never = "" if client in self.replied else " (no reply of this client has counted yet)"
            said += [
                f"{self.names.one(client)}, round {round}: {why.why}{never}",
                f"    {why.code.who}: {why.code.how}",
            ]
        return said + damage

    @property
    def table(self) -> dict[str, Any]:
        """Return the status as an object for JSON."""
        last = {name: self.last.get(name) for name in ("round", "exchange", "phase")} | {
            "epsilon": self.epsilon or None
        }
        absent = [
            {
                "client": client,
                "site": self.names.site(client),
                "round": round,
                "ever_counted": client in self.replied,
                **why.told(),
            }
            for client, (round, why) in sorted(self.absent.items())
        ]
        ended = None if self.ended is None else {"kind": type(self.ended).__name__, "why": str(self.ended)}
        replied = sorted(self.last.get("answered", []))
        said = {"finished": self.finished, "exchanges": self.exchanges, **last, "replied": replied, "absent": absent}
        return {**said, **self.totals, "unread_lines": self.unread, "modified": self.modified, "ended": ended}

    def prometheus(self, run: str) -> str:
        """Return the status in the text format of Prometheus, as the textfile collector of node_exporter reads it.

        `run` is the value of the label "run".
        """
        label = "{run=" + json.dumps(run, ensure_ascii=False) + "}"
        last, ended, spent = self.last, self.ended is not None, "The largest privacy loss that a client has reported"
        values = {
            "finished": (self.finished, "1 once the run has its result"),
            "failed": (ended, "1 if the server ended with an error"),
            "exchanges_total": (self.exchanges, "Attempts at exchanges so far"),
            "round": (last.get("round", 0), "The round of the last exchange, in its part of a study"),
            "clients_replied": (len(last.get("answered", [])), "Clients whose replies counted in the last exchange"),
            "clients_absent": (len(self.absent), "Clients that did not count when they were last asked"),
            "bytes_down_total": (self.totals["bytes_down"], "Bytes sent to clients"),
            "bytes_up_total": (self.totals["bytes_up"], "Bytes of the replies that counted"),
            "exchange_seconds_total": (self.totals["seconds"], "Seconds that exchanges took"),
            **({"epsilon": (self.epsilon, spent)} if self.epsilon else {}),  # only with noise is there an ε
            "last_exchange_timestamp_seconds": (self.modified, "When the last line was written"),
        }
        lines = []
        for name, (value, meant) in values.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP fedbilevel_{name} {meant}.", f"# TYPE fedbilevel_{name} {kind}"]
            lines += [f"fedbilevel_{name}{label} {float(value):.17g}"]
        return "\n".join(lines) + "\n"
