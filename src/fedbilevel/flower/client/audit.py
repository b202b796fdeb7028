"""Write and verify the audit of a site: a file with a line for each reply, for each approval, and for refusals.

Refusals that do not count as requests, such as refusals above a limit, may be many. If they follow each other, only the
first, second, fourth, eighth, and so on, get a line.

The file `audit.jsonl` in the site's state folder only grows. A line contains names, counts, norms and ε, and no value
of the data. Its entry `before` is the SHA-256 of the previous line, so a changed, removed or inserted line breaks the
chain. Lines that were removed at the end leave the chain whole: to notice this, note the hash of the last line
elsewhere, and look for it later.

The line about a reply is on the disk before the reply leaves the site. If the line cannot be written, nothing leaves
the site.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.writing import writing
from fedbilevel.engines import lock
from fedbilevel.reading import parse_printable, require_regular

LONGEST = 2**15  # the largest number of bytes of a line; a refusal has 1,000 characters at most
CUT = "cut"  # the event that records an incomplete line of a process that was killed


def hash_of(line: bytes) -> str:
    """Return the hash of a line; the next line has it as its entry `before`."""
    return hashlib.sha256(line).hexdigest()


@dataclass
class AuditReport:
    """The result of a check of an audit: how many lines it has, and whether their chain is complete.

    Args:
        count: the number of complete lines.
        cut: the numbers of lines that are incomplete because a process was killed.
        broken: where the chain breaks first, in words; "" if the chain is complete.
        last: the hash of the last line, which a later check can look for.
        first, latest: the times of the first and the last line.
        requests: client -> the number of the request in the client's last line.
        found: whether a line has the hash `wanted` of `Audit.verify`.
    """

    count: int = 0
    cut: list[int] = field(default_factory=list)
    broken: str = ""
    last: str = ""
    first: str = ""
    latest: str = ""
    requests: dict[int, int] = field(default_factory=dict)
    found: bool = False


class Audit:
    """The audit in a state folder. All clients that use the folder share it, and one process writes at a time."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / "audit.jsonl", folder / ".audit.lock"

    def append(self, event: str, **entries: Any) -> None:
        """Append a line to the audit, and return when the line is on the disk.

        Raises:
            CheckpointError: the line cannot be written; the audit is unchanged.
        """
        with lock.wait_for_lock(self.lock), writing(self.path):
            if self.path.exists():
                require_regular(self.path)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            try:
                self._append(descriptor, {"time": now(), "event": event, **entries})
            finally:
                os.close(descriptor)

    def _append(self, descriptor: int, line: dict[str, Any]) -> None:
        """Write a line.

        If the last line of the file is incomplete, end it first, and record this in a line of its own.
        """
        size = os.lseek(descriptor, 0, os.SEEK_END)
        os.lseek(descriptor, max(0, size - 2 * LONGEST), os.SEEK_SET)
        text = os.read(descriptor, 2 * LONGEST)
        whole = not text or text.endswith(b"\n")
        *earlier, last = text.removesuffix(b"\n").split(b"\n")
        if len(last) > LONGEST or (not earlier and size > len(text)):
            raise OSError(0, "the file has a line that is longer than any line of an audit")
        before, content = hash_of(last) if text else "", b""
        if not whole:
            note = _bytes({"time": line["time"], "event": CUT, "bytes": len(last)}, before)
            before, content = hash_of(note), b"\n" + note + b"\n"
        content += _bytes(line, before) + b"\n"
        try:
            written = os.write(descriptor, content)
            if written < len(content):
                raise OSError(0, f"{written} of {len(content)} bytes were written: is the disk full?")
            os.fsync(descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise

    def verify(self, wanted: str = "") -> AuditReport:
        """Check the chain of lines from the first line on, up to the last line or the place where the chain breaks.

        Args:
            wanted: the hash of a line that was noted earlier; `AuditReport.found` says whether the audit still has this
                line.

        Raises:
            ConfigurationError: there is no audit.
        """
        if not self.path.is_file():
            text = "the file is missing: this is not the state folder of a site that has replied"
            raise ConfigurationError(text, where=str(self.path))
        report, number, ended = AuditReport(), 0, True
        with open(self.path, "rb") as file:
            while raw := file.readline(LONGEST + 1):
                number, line, ended = number + 1, raw.removesuffix(b"\n"), raw.endswith(b"\n")
                entries = _entries(line)
                noted = entries is not None and entries.get("event") == CUT
                if report.cut[-1:] == [number - 1] and not noted:
                    report.broken = f"line {number - 1} is not a line of an audit"
                elif entries is not None and entries.get("before") != report.last:
                    report.broken = _gap(number)
                elif len(line) > LONGEST:
                    report.broken = f"line {number} is not a line of an audit"
                if report.broken:
                    return report
                if entries is None or not ended:  # a process was killed, if the next line says so or is missing
                    report.cut.append(number)
                if entries is not None:
                    report.count += 1
                    report.first, report.latest = report.first or str(entries.get("time")), str(entries.get("time"))
                    if isinstance(request := entries.get("request"), int):
                        report.requests[entries.get("client", -1)] = request
                report.last = hash_of(line)
                report.found |= report.last == wanted
        if ended and report.cut[-1:] == [number]:
            report.broken = f"line {number} is not a line of an audit"
        return report


def _gap(number: int) -> str:
    if number == 1:
        return "line 1 follows another line, which is missing"
    between = "one of them was changed, or lines between them were removed or inserted"
    return f"line {number - 1} does not have the hash that line {number} names: {between}"


def _entries(line: bytes) -> dict[str, Any] | None:
    """Return the entries of a line; None if the line is not a JSON object, for example because it is incomplete."""
    try:
        found = parse_printable(line)
    except ValueError:  # not JSON, or not text
        return None
    return found if isinstance(found, dict) else None


def _bytes(line: dict[str, Any], before: str) -> bytes:
    """Return a line as JSON; its entry `before` is the hash of the previous line."""
    return json.dumps({**line, "before": before}).encode()


def now() -> str:
    """Return the present time in UTC, in the form of the lines of the audit."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
