"""Approve runs by a rule that a person at the site has written, a TOML file such as

    until = 2027-06-30                  # the last day, in UTC
    app = ["9c1e…"]                     # hashes of apps, as in the audit
    privacy = true                      # only if the site adds noise
    allow.estimator = ["logistic"]      # fields of the study or spec, and their allowed values
    least.sites = 3                     # fields, and their least number or length of a list
    most.rounds = 300                   # fields, and their greatest number or length of a list

A run is approved if it fits every entry of the file. The file is read for each request, so a change of the file takes
effect at once.
"""

from __future__ import annotations

import math
import operator
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedbilevel.core.errors import ConfigurationError, errors_in, is_number, require, unknown
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import digest, numbers_in
from fedbilevel.reading import parse_json, read_bytes
from fedbilevel.wording import in_a_line, printable

LONGEST = 2**20  # the largest number of bytes of a rule's file


class Proposal(NamedTuple):
    """A run to be approved: its text (a study or spec), the hash of its app, and whether the site adds noise."""

    text: str
    app: str | None  # None: the hash is not known, and is not compared
    private: bool


@dataclass(frozen=True, kw_only=True)
class ApprovalRule:
    """The entries of a rule's file; paths of fields have dots, as in "task.name"."""

    until: date = date.max
    app: list[str] | None = None  # None: any app
    privacy: bool = False
    allow: Mapping[str, Any] = field(default_factory=dict)
    least: Mapping[str, Any] = field(default_factory=dict)
    most: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(type(self.until) is date, "until", self.until, "a date, such as 2027-06-30")
        texts = isinstance(self.app, list) and bool(self.app) and all(isinstance(one, str) and one for one in self.app)
        require(self.app is None or texts, "app", self.app, "a list of one or more hashes")
        require(type(self.privacy) is bool, "privacy", self.privacy, "true or false")
        for name in ("allow", "least", "most"):
            require(isinstance(getattr(self, name), Mapping), name, getattr(self, name), "a table of fields")
            object.__setattr__(self, name, _flat(getattr(self, name)))
        for path, values in self.allow.items():
            require(isinstance(values, list) and bool(values), f"allow.{path}", values, "a list of allowed values")
        for path, bound in [*self.least.items(), *self.most.items()]:
            require(is_number(bound), f"bound of {path}", bound, "a number")
        some = bool(self.allow or self.app)
        require(some, "allow and app", "missing", "one of them: otherwise the rule would approve almost every run")

    @classmethod
    def read(cls, path: Path) -> tuple[Self, str]:
        """Read a rule's file. Return the rule, and a text for the audit: the file's name and its hash.

        Raises:
            ConfigurationError: the file cannot be read, is not TOML, or has an unknown or wrong entry.
        """
        try:
            text = read_bytes(path, LONGEST).decode()
            content, known = tomllib.loads(text), [one.name for one in fields(cls)]
            with errors_in(f"rule {path}"):
                for name in content:
                    if name not in known:
                        raise unknown("entry", name, known)
                    require(content[name] != {}, name, "an empty table", "a table of fields, or left out")
                return cls(**content), f"rule {printable(str(path))} ({digest(text)})"
        except ConfigurationError:  # a ValueError, too
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"it cannot be read: {in_a_line(error)}", where=f"rule {path}") from error

    def mismatch(self, proposal: Proposal) -> str:
        """Return in words the first entry of the rule that a proposal does not fit; "" if it fits all entries."""
        if today() > self.until:
            return f"the rule ended on {self.until}"
        if self.app is not None and proposal.app is not None and proposal.app not in self.app:
            return f"the app {proposal.app or 'has no hash and'} is not in app"
        if self.privacy and not proposal.private:
            return "privacy = true, but this site adds no noise"
        content = _content(proposal.text)
        try:
            if path := self._unbounded(content):
                return f"{path} is given, which replaces fields of the algorithm, and the rule does not bound it"
            for path, values in self.allow.items():
                if not any(_same(found := _value(content, path), one) for one in values):
                    return f"{path} = {printable(repr(found), 200)} is not in allow"
            for name, bounds, fits in (("least", self.least, operator.ge), ("most", self.most, operator.le)):
                for path, bound in bounds.items():
                    found = _value(content, path)
                    number = len(found) if isinstance(found, list) else found
                    if not is_number(number) or not fits(number, bound):
                        return f"{path} = {printable(repr(found), 200)}, but {name} is {bound}"
        except ConfigurationError as error:
            return str(error)
        return ""

    def _unbounded(self, content: Mapping[str, Any]) -> str:
        """Return which of the clients' own numbers would replace a field that the rule bounds; "" if there is none."""
        bounded, clients = {*self.allow, *self.least, *self.most}, content.get("clients")
        if not clients or not any(path.startswith("algorithm.") for path in bounded):
            return ""
        free = (p for p in _flat({"clients": clients}) if not any(f"{p}.".startswith(f"{one}.") for one in bounded))
        return next(free, "")


def check_own_numbers(text: str, own: str, of_site: Collection[str]) -> None:
    """Refuse a message with numbers of the client's own that are not in the table [clients] of the approved text.

    Otherwise a server could replace approved fields of the method by other numbers.

    Args:
        text: the approved text.
        own: the numbers in the message, as JSON.
        of_site: the names of the numbers that the site sets itself; these replace the numbers in the message.

    Raises:
        Refusal: the text does not state a number, or states other values for it.
    """
    content = _content(text)
    for name, number in numbers_in("own numbers", own).items():
        stated: list[float] = []
        with suppress(ConfigurationError):
            stated = _numbers(_value(content, f"clients.{name}"))
        slack = [1e-6 * abs(one) for one in stated]  # the server may have rounded the numbers to float32
        low = min(map(operator.sub, stated, slack), default=math.inf)
        high = max(map(operator.add, stated, slack), default=-math.inf)
        if name not in of_site and not low <= number <= high:
            raise Refusal(
                Code.CONTRACT, f"own numbers: the approved text does not state {name} = {number} in [clients]"
            )


def _numbers(value: Any) -> list[float]:
    """Return the numbers in an entry of the table [clients], whichever form the entry has."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for one in value for number in _numbers(one)]
    return [value] if is_number(value) else []


def today() -> date:
    """Return today's date in UTC."""
    return datetime.now(UTC).date()


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return path -> value for a table with inner tables.

    A key with dots is a path, with or without quotes. An inner table must not be empty.
    """
    found: dict[str, Any] = {}
    for name, one in table.items():
        require(one != {}, f"table {name}", "empty", "a table of fields, or left out")
        inner = (
            {f"{name}.{path}": value for path, value in _flat(one).items()} if isinstance(one, dict) else {name: one}
        )
        require(not found.keys() & inner.keys(), "path", name, "each field once")
        found |= inner
    return found


def _content(text: str) -> dict[str, Any]:
    """Return the fields of a study (JSON) or of a spec (TOML); an empty dictionary for any other text."""
    for parse in (parse_json, tomllib.loads):
        with suppress(ValueError):
            if isinstance(content := parse(text), dict):
                return content
    return {}


def _value(content: Any, path: str) -> Any:
    """Return the value of a field by its path; for an unknown field, raise an error that suggests the nearest name."""
    for name in path.split("."):
        if not isinstance(content, dict) or name not in content:
            raise unknown(f"part of {path!r} in this run", name, content if isinstance(content, dict) else ())
        content = content[name]
    return content


def _same(found: Any, allowed: Any) -> bool:
    """Compare two values; true and 1 differ, also within lists and tables."""
    if isinstance(found, list) and isinstance(allowed, list):
        return len(found) == len(allowed) and all(map(_same, found, allowed))
    if isinstance(found, dict) and isinstance(allowed, dict):
        return found.keys() == allowed.keys() and all(_same(found[name], allowed[name]) for name in found)
    return isinstance(found, bool) == isinstance(allowed, bool) and bool(found == allowed)
