"""A client's state between rounds, saved in such a way that no message is ever applied twice: in a folder, or in
Flower's memory of the client."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import checkpoint, lock
from fedbilevel.flower.client.limits import RequestCounts
from fedbilevel.flower.wire import RAW, Refusal, from_bytes, layout, to_bytes

Tag = tuple[int, int]
"""(round, exchange) of a reply; (-1, -1) before the first."""


class SavedState(NamedTuple):
    """A client's own state, tagged with the last message that changed it."""

    round: int
    exchange: int
    counted: Tag  # which reply `before` is the state after
    at_start: PyTree  # of that message's round, as the server had it: what was under way then had not counted
    before: PyTree  # that message
    now: PyTree

    def after(self, tag: Tag) -> PyTree:
        """The state after the client's last reply up to the one with this tag, or else the oldest state."""
        if (self.round, self.exchange) <= tag:
            return self.now
        return self.before if self.counted <= tag else self.at_start


def states_for(kept: SavedState | None, first: PyTree, round: int, counted: Tag, settled: Tag) -> tuple[PyTree, PyTree]:
    """The state from which the round is played again, should it be, and the one that its next message has to see.

    They are those after the client's last replies that counted when the round began and that count by now, which the
    server names in `settled` and `counted`. A reply that was lost, late or refused leaves no trace, a message that
    comes again sees what it saw the first time, and so does a round that a restarted server plays again. `first` is
    the state of a client that keeps nothing yet.

    Raises:
        Refusal: the round lies before the last one that was kept.
    """
    if kept is None:
        return first, first
    if round < kept.round:
        raise Refusal(f"this client's state is of round {kept.round}, and round {round} is over for it")
    return kept.after(settled), kept.after(counted)


TREES = ("at_start", "before", "now")
RUNS = 20  # of which a client keeps its state in a folder: whoever serves may name as many as it likes


class FolderStore:
    """One file for each of a client's latest RUNS runs; it outlives the client's process, and its node.

    Clients may share the folder. A run's name is part of a file's: it must be checked before (`is_run`).
    """

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client = folder, client
        self.count = folder / f"client-{client}-questions.json"
        self.turns = folder / f".client-{client}-questions.lock"

    def path(self, run: str) -> Path:
        return self.folder / f"client-{self.client}-run-{run}.npz"

    def load(self, run: str, like: SavedState) -> SavedState | None:
        """The state saved last for the run, None where there is none; `like` has its shapes.

        Raises:
            CheckpointError: it is of another model, or damaged.
        """
        path = self.path(run)
        if not path.exists():
            return None
        trees, tag = checkpoint.load(path, {name: getattr(like, name) for name in TREES})
        with checkpoint.as_checkpoint_error(path):
            round, exchange = tag["counted"]
            counted = int(round), int(exchange)
            return SavedState(int(tag["round"]), int(tag["exchange"]), counted, *(trees[name] for name in TREES))

    def save(self, run: str, kept: SavedState) -> None:
        tag = {"round": kept.round, "exchange": kept.exchange, "counted": kept.counted}
        path = self.path(run)
        checkpoint.save(path, {name: getattr(kept, name) for name in TREES}, tag)
        others = set(self.folder.glob(path.name.replace(run, "*"))) - {path}
        for old in sorted(others, key=lambda other: other.stat().st_mtime_ns)[: -RUNS + 1]:
            old.unlink(missing_ok=True)

    def counting(self) -> AbstractContextManager[None]:
        """To hold from reading the count of questions until it is written: nobody else can do either meanwhile."""
        return lock.wait_for_lock(self.turns)

    def request_counts(self) -> RequestCounts:
        """The count of questions so far; a CheckpointError where it is damaged."""
        if not self.count.exists():
            return RequestCounts()
        try:
            return RequestCounts(**json.loads(self.count.read_text()))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{self.count} is damaged: restore it, or delete it to count anew") from error

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        checkpoint.write_text(self.count, json.dumps(asdict(request_counts)))


class ContextStore:
    """Flower's own per-run memory of a client (`Context.state`); it is lost when the SuperNode restarts."""

    FIELDS, TREE, COUNT = "fedbilevel.tag", "fedbilevel.state", "fedbilevel.questions"

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, run: str, like: SavedState) -> SavedState | None:
        tag, tree = self.records.get(self.FIELDS), self.records.get(self.TREE)
        if not isinstance(tag, ConfigRecord) or not isinstance(tree, ArrayRecord) or tag["run"] != run:
            return None
        shapes = [getattr(like, name) for name in TREES]
        if tag["layout"] != layout(shapes):
            raise Refusal("this client's state of the run is of another algorithm or model")
        round, exchange, counted = tag["round"], tag["exchange"], tag["counted"]
        assert type(round) is type(exchange) is int  # as `save` wrote them
        assert isinstance(counted, list)
        return SavedState(round, exchange, (int(counted[0]), int(counted[1])), *from_bytes(tree[RAW].data, shapes))

    def save(self, run: str, kept: SavedState) -> None:
        trees = [getattr(kept, name) for name in TREES]
        data = to_bytes(trees)
        leaves = Array(dtype="uint8", shape=(len(data),), stype=RAW, data=data)
        self.records[self.FIELDS] = ConfigRecord(
            {
                "run": run,
                "round": kept.round,
                "exchange": kept.exchange,
                "counted": list(kept.counted),
                "layout": layout(trees),
            }
        )
        self.records[self.TREE] = ArrayRecord({RAW: leaves})

    def counting(self) -> AbstractContextManager[None]:
        return nullcontext()  # Flower hands a run's memory to one message at a time

    def request_counts(self) -> RequestCounts:
        count = self.records.get(self.COUNT)
        return RequestCounts(**dict(count)) if isinstance(count, ConfigRecord) else RequestCounts()  # type: ignore[arg-type]

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        self.records[self.COUNT] = ConfigRecord(asdict(request_counts))


Store = FolderStore | ContextStore
"""Keeps one `SavedState` for each run, and the count of questions."""
