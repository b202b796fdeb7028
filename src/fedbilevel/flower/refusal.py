"""Describe why the server does not count a reply or a client, in the same words at the site and on the server.

A refusal is sent as a code and a line of text. Each side looks up the code in its own table of who can fix the problem,
and how, so advice never comes from the other side. No decision depends on the text. The same description appears in the
site's log, in the server's log and errors, and in the server's file `exchanges.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fedbilevel.core.card import counted
from fedbilevel.core.errors import FedbilevelError
from fedbilevel.wording import printable

LONGEST = 1000  # the largest number of characters of a text
MOST_NAMES = 20  # the largest number of clients that a text names
SITE, OPERATOR, EITHER = "the site", "the operator", "the site or the operator"


class Code(Enum):
    """The kinds of problems. Each has a name in messages, the party that can fix it, and the advice for this party."""

    ABSENT = "absent", SITE, "start its SuperNode; the SuperNode's log says whether it reaches the SuperLink"
    FLOOR = (
        "floor",
        SITE,
        "lower min-local-samples or min-batch-size in the node configuration, if the site's rules allow it",
    )
    LIMIT = "limit", EITHER, "raise the limit in the node configuration, or request less work"
    SETTABLE = "settable", EITHER, "add the field to settable in the node configuration, or leave it out of settings"
    LAYER = (
        "layer",
        EITHER,
        "add the layer to layers in the node configuration, if the site's rules allow it, or run without this layer",
    )
    BUDGET = (
        "budget",
        SITE,
        "raise budget in the node configuration, if the site's rules allow it; without this client, the run goes on if "
        "enough others reply",
    )
    APPROVAL = (
        "approval",
        SITE,
        "read the request (asked-HASH.txt in the state-folder), and approve it, if the site's rules allow it",
    )
    AUDIT = "audit", SITE, "free space on the disk of the state-folder; the site's log says more"
    DISK = (
        "disk",
        SITE,
        "free space on the disk of the state-folder, or let the site write there; the site's log names the file",
    )
    ACCOUNT = "account", SITE, "restore the newest account.json of the state-folder (see docs/how-to/backup.md)"
    SETTINGS = "settings", SITE, "correct the node configuration or the data; the site's log says which"
    FAILED = "failed", SITE, "the site's log says more"
    HIDDEN = "hidden", SITE, "the site's log says more; under privacy the reason does not leave the site"
    SILENT = (
        "silent",
        SITE,
        "set tell-metrics in the node configuration, if the site's rules allow it; the run goes on without the metrics",
    )
    NUMBERS = "numbers", OPERATOR, "lower the step sizes; fb.diagnose suggests values"
    CONTRACT = "contract", EITHER, "give both sides the same app and the same version of fedbilevel"
    SHAPES = "shapes", EITHER, "compare the site's data, fields of the task and JAX_ENABLE_X64 with the server's"
    METHOD = "method", OPERATOR, "choose a method, or fields, that support noise in replies"
    KEY = "key", OPERATOR, "compare client-keys with the key that the node has registered"
    PLACE = "place", SITE, "correct the node's partition-id, or stop the other node with this partition-id"
    STATE = (
        "state",
        EITHER,
        "the site's state-folder is missing, from another run, or newer than the server's checkpoint; "
        "restore it, or begin a new run",
    )
    LATE = (
        "late",
        EITHER,
        "start its SuperNode if it has stopped; if it is running, raise deadline in --run-config, since a slow "
        "machine may need minutes to compile before its first replies, or request less work",
    )
    STALLED = (
        "stalled",
        OPERATOR,
        "raise deadline in --run-config if the sites are still starting, compiling or computing; otherwise check the "
        "SuperLink's load and log, since a huge message delays all others",
    )
    BOUND = "bound", OPERATOR, "look at this client's data; norm-factor, message-factor and norm-bound set the bounds"
    UNSENT = (
        "unsent",
        OPERATOR,
        "find out whether the SuperLink runs, and whether the run was stopped (flwr list); then submit the run again "
        "with the same out",
    )
    LARGE = "large", EITHER, "send less: metrics and layouts have to be short"
    MALFORMED = "malformed", EITHER, "compare the apps and the versions of fedbilevel: the two protocols differ"
    FLOWER = "flower", SITE, "its worker or SuperNode has failed; the site's log says more"
    OTHER = "other", SITE, "the site's log says more"  # a code that this version does not know

    def __init__(self, word: str, who: str, how: str) -> None:
        self.word, self.who, self.how = word, who, how

    @classmethod
    def of(cls, word: object) -> Code:
        """Return the code with this name in messages; OTHER for a name that this version does not know."""
        return next((code for code in cls if code.word == word), cls.OTHER)

    @property
    def of_state(self) -> bool:
        """Return whether the cause may be the state that the server sent, and not the client."""
        return self in (Code.NUMBERS, Code.HIDDEN)


@dataclass(eq=False)
class Refusal(FedbilevelError):
    """A message that must not count, or a client that does not take part, with the reason.

    The reason, `why`, contains no value of the data.

    Parts of `why` may come from the other side. The text is therefore reduced to a single line of bounded length,
    without control characters for a terminal.
    """

    code: Code
    why: str
    client: int | None = None  # the client whose message is refused, if known

    def __post_init__(self) -> None:
        self.why = printable(" ".join(self.why[:LONGEST].split()), LONGEST)

    def __str__(self) -> str:
        return self.why

    @property
    def line(self) -> str:
        """Return the reason together with who can fix the problem, and how."""
        return f"{self.why} ({self.code.who} can fix this: {self.code.how})"

    def told(self) -> dict[str, str]:
        """Return the refusal as an entry of a line of `exchanges.jsonl`."""
        return {"code": self.code.word, "why": self.why, "who": self.code.who, "how": self.code.how}

    @classmethod
    def read(cls, told: Mapping[str, Any], client: int | None = None) -> Refusal:
        """Return the refusal from an entry that `told` made, with the advice that belongs to the refusal's code."""
        return cls(Code.of(told.get("code")), str(told.get("why", "")), client)


def has_line(number: int) -> bool:
    """Return whether a log gets a line for a refusal with this number in a row: the 1st, 2nd, 4th, 8th, … get one."""
    return number & (number - 1) == 0


@dataclass(frozen=True)
class ClientNames:
    """Name clients in messages, by the names of their sites if these are known.

    Args:
        sites: the names of the sites, in the order of clients; (): the sites have no names.
    """

    sites: Sequence[str] = ()

    def site(self, client: int) -> str | None:
        """Return the name of a client's site; None if it has none."""
        return self.sites[client] if 0 <= client < len(self.sites) else None

    def one(self, client: int) -> str:
        """Name a client: "chur (client 2)", or "client 2" if its site has no name."""
        site = self.site(client)
        return f"client {client}" if site is None else f"{site} (client {client})"

    def several(self, clients: Iterable[int]) -> str:
        """Name some clients: "aarhus (client 0), dole (client 3)", or "clients 0, 3". At most MOST_NAMES are named."""
        known = sorted(set(clients))
        shown, more = known[:MOST_NAMES], len(known) - MOST_NAMES
        end = f" and {more} more" if more > 0 else ""
        if self.sites:
            return ", ".join(map(self.one, shown)) + end
        return f"client{'s' if len(known) > 1 else ''} {', '.join(map(str, shown))}{end}"

    def in_words(self, refusals: Iterable[Refusal], most: int = 5) -> str:
        """Return refusals as one line of text; clients with the same refusal are named together."""
        alike: dict[str, list[int]] = {}
        for refusal in refusals:
            alike.setdefault(refusal.line, []).extend([] if refusal.client is None else [refusal.client])
        said = [f"{self.several(clients)}: {line}" if clients else line for line, clients in alike.items()]
        return "; ".join(
            [*said[:most], *([f"and {counted(len(said) - most, 'more reason')}"] if len(said) > most else [])]
        )
