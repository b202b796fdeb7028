"""Where a client keeps its own state of a run: in a folder, or in what Flower keeps for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbilevel.engines import checkpoint
from fedbilevel.flower.client_state import Kept
from fedbilevel.flower.records import RAW
from fedbilevel.flower.wire import Refusal, from_bytes, layout, to_bytes

TREES = ("at_start", "before", "now")


class Store(Protocol):
    """Keeps one `Kept` for each run."""

    def load(self, run: str, like: Kept) -> Kept | None:
        """What was saved last for the run, if anything was; `like` has its shapes.

        Raises:
            Refusal, CheckpointError: it is of another model, or damaged.
        """
        ...

    def save(self, run: str, kept: Kept) -> None: ...


class FolderStore:
    """One file for each run; it outlives the client's process, and its node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, run: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise Refusal(f"{run[:80]!r} is not the name of a run")
        return self.folder / f"run-{run}.npz"

    def load(self, run: str, like: Kept) -> Kept | None:
        path = self.path(run)
        if not path.exists():
            return None
        trees, tag = checkpoint.load(path, like._asdict() | {"round": None, "exchange": None})
        return Kept(tag["round"], tag["exchange"], *(trees[name] for name in TREES))

    def save(self, run: str, kept: Kept) -> None:
        trees = kept._asdict() | {"round": None, "exchange": None}
        checkpoint.save(self.path(run), trees, {"round": kept.round, "exchange": kept.exchange})


class ContextStore:
    """Flower's own per-run memory of a client (`Context.state`); it is lost when the SuperNode restarts."""

    FIELDS, TREE = "fedbilevel.tag", "fedbilevel.state"

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, run: str, like: Kept) -> Kept | None:
        tag, tree = self.records.get(self.FIELDS), self.records.get(self.TREE)
        if not isinstance(tag, ConfigRecord) or not isinstance(tree, ArrayRecord) or tag["run"] != run:
            return None
        shapes = [getattr(like, name) for name in TREES]
        if tag["layout"] != layout(shapes):
            raise Refusal("this client's state of the run is of another algorithm or model")
        round, exchange = tag["round"], tag["exchange"]
        assert type(round) is type(exchange) is int  # as `save` wrote them
        return Kept(round, exchange, *from_bytes(tree[RAW].data, shapes))

    def save(self, run: str, kept: Kept) -> None:
        trees = [getattr(kept, name) for name in TREES]
        data = to_bytes(trees)
        leaves = Array(dtype="uint8", shape=(len(data),), stype=RAW, data=data)
        self.records[self.FIELDS] = ConfigRecord(
            {"run": run, "round": kept.round, "exchange": kept.exchange, "layout": layout(trees)}
        )
        self.records[self.TREE] = ArrayRecord({RAW: leaves})
