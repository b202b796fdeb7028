"""A client's state between rounds, saved in such a way that no message is ever applied twice: in a folder, or in
Flower's memory of the client."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import PyTree
from fedbilevel.core.writing import write_text
from fedbilevel.engines import checkpoint, lock
from fedbilevel.flower.client.approval import Approvals
from fedbilevel.flower.client.audit import Audit
from fedbilevel.flower.client.limits import RequestCounts
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import RAW, from_bytes, layout, to_bytes

Tag = tuple[int, int]
"""(round, exchange) of a reply; (-1, -1) before the first."""


class Versions(NamedTuple):
    """What a client keeps of a run: its latest states, in order, each under the tag of the message that made it."""

    tags: tuple[Tag, ...] = ()
    states: tuple[PyTree, ...] = ()

    def up_to(self, counted: Tag, round: int) -> Versions:
        """Select the states that the next message goes on from: a reply that was lost, late or refused leaves no
        trace, a message that comes again sees what it saw the first time, and so does a round that is played again.

        Args:
            counted: the tag of this client's last reply that counted, as the message names it.
            round: the message's.

        Raises:
            Refusal: the state after that reply is no longer kept.
        """
        number = bisect_right(self.tags, counted)
        if self.tags and not number and counted >= (0, 0):
            latest = self.tags[-1][0]
            text = f"this client's state is of round {latest}, and round {round} is over for it"
            raise Refusal(Code.STATE, text)
        return Versions(self.tags[:number], self.states[:number])

    def then(self, tag: Tag, state: PyTree) -> Versions:
        """Add a new state, and keep of the others those that a server may go back to: the latest; where this round
        began, or the state before (the latest may not have counted when it began); and where the round before began."""
        here, before = bisect_left(self.tags, (tag[0], 0)), bisect_left(self.tags, (tag[0] - 1, 0))
        kept = sorted({len(self.tags) - 1, here - 1, here - 2, before - 1} - {-1, -2})
        tags, states = [self.tags[i] for i in kept], [self.states[i] for i in kept]
        return Versions((*tags, tag), (*states, state))


RUNS = 20  # of which a client keeps its state in a folder: whoever serves may name as many as it likes


class FolderStore:
    """One file for each of a client's latest RUNS runs; it outlives the client's process, and its node.

    Clients may share the folder. A run's name is part of a file's: it must be checked before (`is_run`).
    """

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client = folder, client
        self.count = folder / f"client-{client}-requests.json"
        self.lock = folder / f".client-{client}-requests.lock"
        self.agreed = folder / f"client-{client}-agreement.json"
        self.audit, self.approvals = Audit(folder), Approvals(folder)

    def path(self, run: str) -> Path:
        return self.folder / f"client-{self.client}-run-{run}.npz"

    def load(self, run: str, like: PyTree) -> Versions:
        """Load the states saved for the run; `like` has the shapes of a state.

        Raises:
            CheckpointError: they are of another model, or damaged.
        """
        path = self.path(run)
        if not path.exists():
            return Versions()
        with checkpoint.as_checkpoint_error(path):
            tags = tuple((int(round), int(exchange)) for round, exchange in checkpoint.load_meta(path)["tags"])
        states, _ = checkpoint.load(path, (like,) * len(tags))
        return Versions(tags, states)

    def save(self, run: str, kept: Versions) -> None:
        path = self.path(run)
        checkpoint.save(path, kept.states, {"tags": kept.tags})
        others = set(self.folder.glob(path.name.replace(run, "*"))) - {path}
        for old in sorted(others, key=lambda other: other.stat().st_mtime_ns)[: -RUNS + 1]:
            old.unlink(missing_ok=True)

    def other_samples(self, hashes: Mapping[str, Any], known: bool) -> str:
        """Say that the client had other samples before, or "".

        Args:
            hashes: of its samples.
            known: whether these are the known ones from now on.
        """
        file, now = self.folder / f"client-{self.client}-samples.json", json.dumps(hashes)
        before = file.read_text(errors="replace") if file.exists() else ""
        if before != now and (known or not before):
            write_text(file, now)
        other = before not in ("", now)
        return (
            f"its samples, as they are prepared, are not those of before; delete {file} to accept them" if other else ""
        )

    def agreement(self, run: str) -> str:
        """Return the text that was agreed on in a run, "" before there is one."""
        try:
            kept = json.loads(self.agreed.read_text(encoding="utf-8")) if self.agreed.exists() else {}
            return str(kept["text"]) if kept.get("run") == run else ""
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.agreed} is damaged: delete it, and submit the run again") from error

    def keep_agreement(self, run: str, text: str) -> None:
        """Keep the text of a run, in place of that of the run before."""
        write_text(self.agreed, json.dumps({"run": run, "text": text}))

    def counting(self) -> AbstractContextManager[None]:
        """Hold this from reading the count of requests until it is written: nobody else can do either meanwhile."""
        return lock.wait_for_lock(self.lock)

    def request_counts(self) -> RequestCounts:
        """Read the count of requests so far; a CheckpointError where it is damaged."""
        if not self.count.exists():
            return RequestCounts()
        try:
            return RequestCounts(**json.loads(self.count.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.count} is damaged: restore it, or delete it to count anew") from error

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        write_text(self.count, json.dumps(asdict(request_counts)))

    def note(self, event: str, **entries: Any) -> None:
        """Append a line to the audit; a CheckpointError where it cannot be written."""
        self.audit.append(event, client=self.client, request=self.request_counts().total, **entries)

    def require_approval(self, text: str) -> None:
        """Refuse what nobody at the site has approved."""
        self.approvals.require(text)


def requests_in(folder: Path) -> dict[int, int]:
    """Read how many requests each client has counted that keeps its state in a folder."""
    found = sorted(re.findall(r"^client-(\d{1,9})-requests\.json$", file.name) for file in folder.iterdir())
    return {int(one): FolderStore(folder, int(one)).request_counts().total for (one,) in filter(None, found)}


class ContextStore:
    """Flower's own per-run memory of a client (`Context.state`); it is lost when the SuperNode restarts."""

    FIELDS, TREE, COUNT = "fedbilevel.tag", "fedbilevel.state", "fedbilevel.requests"
    AGREED = "fedbilevel.agreement"
    audit: ClassVar[None] = None  # it is in folders alone

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, run: str, like: PyTree) -> Versions:
        tag, tree = self.records.get(self.FIELDS), self.records.get(self.TREE)
        if not isinstance(tag, ConfigRecord) or not isinstance(tree, ArrayRecord) or tag["run"] != run:
            return Versions()
        fields: Any = tag  # as `save` wrote them
        places = zip(fields["rounds"], fields["exchanges"], strict=True)
        tags = tuple((int(round), int(exchange)) for round, exchange in places)
        shapes = (like,) * len(tags)
        if tag["layout"] != layout(shapes):
            raise Refusal(Code.STATE, "this client's state of the run is of another algorithm or model")
        return Versions(tags, from_bytes(tree[RAW].data, shapes))

    def save(self, run: str, kept: Versions) -> None:
        data = to_bytes(kept.states)
        leaves = Array(dtype="uint8", shape=(len(data),), stype=RAW, data=data)
        rounds, exchanges = zip(*kept.tags, strict=True)
        fields: Any = {"run": run, "rounds": list(rounds), "exchanges": list(exchanges), "layout": layout(kept.states)}
        self.records[self.FIELDS] = ConfigRecord(fields)
        self.records[self.TREE] = ArrayRecord({RAW: leaves})

    def agreement(self, run: str) -> str:
        kept = self.records.get(self.AGREED)
        return str(kept["text"]) if isinstance(kept, ConfigRecord) and kept["run"] == run else ""

    def keep_agreement(self, run: str, text: str) -> None:
        self.records[self.AGREED] = ConfigRecord({"run": run, "text": text})

    def counting(self) -> AbstractContextManager[None]:
        return nullcontext()  # Flower hands a run's memory to one message at a time

    def request_counts(self) -> RequestCounts:
        count = self.records.get(self.COUNT)
        return RequestCounts(**dict(count)) if isinstance(count, ConfigRecord) else RequestCounts()  # type: ignore[arg-type]

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        self.records[self.COUNT] = ConfigRecord(asdict(request_counts))

    def note(self, event: str, **entries: Any) -> None:
        """Keep nothing: there is no audit without a folder."""

    def require_approval(self, text: str) -> None:
        raise Refusal(Code.APPROVAL, "nobody at this site can approve: there is no state-folder")


Store = FolderStore | ContextStore
"""Keeps `Versions` for each run, and the count of requests; a folder also has an audit."""
