"""Store a client's state between rounds, in a folder or in Flower's memory.

Earlier states are kept too, so that a repeated message does not change the state twice.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import PyTree
from fedbilevel.core.writing import write_text
from fedbilevel.engines import checkpoint, lock
from fedbilevel.flower.client.approval import Approvals
from fedbilevel.flower.client.approval_rule import Proposal
from fedbilevel.flower.client.audit import Audit
from fedbilevel.flower.client.limits import RequestCounts
from fedbilevel.flower.refusal import Code, Refusal, has_line
from fedbilevel.flower.wire import RAW, digest, from_bytes, layout, to_bytes

Tag = tuple[int, int]
"""The (round, exchange) of a reply; (-1, -1) before the first reply."""


class Versions(NamedTuple):
    """The latest states of a client in a run, in order.

    Each state has the tag of the message after which it was stored.
    """

    tags: tuple[Tag, ...] = ()
    states: tuple[PyTree, ...] = ()

    def up_to(self, counted: Tag, round: int, differences: bool = False) -> Versions:
        """Return the states up to the last reply that counted. The next message continues from the last state.

        A reply that was lost, late or refused therefore has no effect on the state. A repeated message or round
        continues from the same state as the first time.

        Args:
            counted: the tag of this client's last reply that counted, which the message contains.
            round: the round of the message.
            differences: whether the client sends changes of its state (`Asks.differences`). It must then neither begin
                anew nor continue from an earlier state, for example from a restored copy of its folder.

        Raises:
            Refusal: all stored states are later than the reply `counted`; or the state after this reply is not stored,
                and the client sends changes of its state.
        """
        number = bisect_right(self.tags, counted)
        if counted >= (0, 0):
            if self.tags and not number:
                latest = self.tags[-1][0]
                text = f"this client's state is of round {latest}, and cannot return to round {round}"
                raise Refusal(Code.STATE, text)
            if differences and counted not in self.tags:
                lost = f"this client has lost its state, which it had after round {counted[0]}"
                raise Refusal(Code.STATE, f"{lost}: it sends changes of this state, which the server adds up")
        return Versions(self.tags[:number], self.states[:number])

    def then(self, tag: Tag, state: PyTree) -> Versions:
        """Add a new state, and drop old states to which a server cannot return.

        A server may return to the latest state and to the state at the start of the previous round. It may also return
        to the state at the start of this round or, if the last reply did not count, to the state before this reply.
        """
        here, before = bisect_left(self.tags, (tag[0], 0)), bisect_left(self.tags, (tag[0] - 1, 0))
        kept = sorted({len(self.tags) - 1, here - 1, here - 2, before - 1} - {-1, -2})
        tags, states = [self.tags[i] for i in kept], [self.states[i] for i in kept]
        return Versions((*tags, tag), (*states, state))


class Agreed(NamedTuple):
    """The text on which sites have agreed in a run, and the client's `Site.source`.

    Both are "" until they are known.
    """

    text: str = ""
    source: str = ""


REFUSED = "refused"  # the name of the event of a refusal in the audit
RUNS = 20  # the largest number of runs whose states are stored, since a server may send any number of names


class FolderStore:
    """A folder with a client's states: a file for each of its latest RUNS runs.

    The files outlive the client's process and its node, and clients may share the folder. The name of a run is a part
    of a file's name, so the caller must have checked the name by `is_run`.
    """

    def __init__(self, folder: Path, client: int) -> None:
        self.folder, self.client = folder, client
        self.count = folder / f"client-{client}-requests.json"
        self.lock = folder / f".client-{client}-requests.lock"
        self.agreed = folder / f"client-{client}-agreement.json"
        self.audit, self.approvals = Audit(folder), Approvals(folder)

    def path(self, run: str) -> Path:
        """Return the path of the client's states in a run."""
        return self.folder / f"client-{self.client}-run-{run}.npz"

    def load(self, run: str, like: PyTree) -> Versions:
        """Return the states that are stored for a run; `like` is a state with the expected shapes.

        Raises:
            CheckpointError: the states belong to another model, or are damaged.
        """
        path = self.path(run)
        if not path.exists():
            return Versions()
        with checkpoint.as_checkpoint_error(path):
            tags = tuple((int(round), int(exchange)) for round, exchange in checkpoint.load_meta(path)["tags"])
        states, _ = checkpoint.load(path, (like,) * len(tags))
        return Versions(tags, states)

    def save(self, run: str, kept: Versions) -> None:
        """Store the states of a run. If there are more than RUNS runs, delete the states of the oldest ones."""
        path = self.path(run)
        checkpoint.save(path, kept.states, {"tags": kept.tags})
        self.keep_latest(path, self.folder.glob(path.name.replace(run, "*")))

    def keep_latest(self, file: Path, files: Iterable[Path]) -> None:
        """Delete the oldest of these files until RUNS files are left; the new `file` is kept."""
        for old in sorted({*files} - {file}, key=lambda other: other.stat().st_mtime_ns)[: -RUNS + 1]:
            old.unlink(missing_ok=True)

    def other_samples(self, hashes: Mapping[str, Any], serving: bool, same_data: bool, subject: str = "") -> str:
        """Compare the client's samples with its earlier samples. Return a sentence if they differ, else "".

        Args:
            hashes: the hashes of the client's samples.
            serving: whether the client takes part from now on; otherwise nothing is stored.
            same_data: whether changed samples are refused; the stored hashes then remain those of the first samples.
            subject: the text of the study to which the samples belong. Only samples of the same study are compared, and
                hashes of the latest RUNS studies are stored. Empty: all samples of the client are compared.
        """
        start = f"client-{self.client}-samples"
        file, now = self.folder / f"{start}{'-' + digest(subject) if subject else ''}.json", json.dumps(hashes)
        before = file.read_text(errors="replace") if file.exists() else ""
        if serving and before == now:
            file.touch()
        elif serving and (not before or not same_data):
            write_text(file, now)
            self.keep_latest(file, self.folder.glob(f"{start}-*.json") if subject else ())
        other = before not in ("", now)
        return f"its prepared samples differ from its earlier ones; delete {file} to accept them" if other else ""

    def agreement(self, run: str) -> Agreed:
        """Return the agreement of a run; its texts are empty if there is no agreement yet.

        Raises:
            CheckpointError: the file is damaged.
        """
        try:
            kept = json.loads(self.agreed.read_text(encoding="utf-8")) if self.agreed.exists() else {}
            return Agreed(str(kept["text"]), str(kept["source"])) if kept.get("run") == run else Agreed()
        except (ValueError, KeyError, AttributeError) as error:
            text = f"{self.agreed} is damaged: delete it, and submit the run again"
            raise CheckpointError(text, path=self.agreed) from error

    def keep_agreement(self, run: str, agreed: Agreed) -> None:
        """Store the agreement of a run, in place of the agreement of an earlier run."""
        write_text(self.agreed, json.dumps({"run": run, **agreed._asdict()}))

    def counting(self) -> AbstractContextManager[None]:
        """Lock the count of requests: within this context manager, no other process can read or write it."""
        return lock.wait_for_lock(self.lock)

    def request_counts(self) -> RequestCounts:
        """Return the counts of requests so far.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.count.exists():
            return RequestCounts()
        try:
            return RequestCounts(**json.loads(self.count.read_text()))
        except (ValueError, TypeError) as error:
            text = f"{self.count} is damaged: restore it, or delete it to count from 0"
            raise CheckpointError(text, path=self.count) from error

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        """Store the counts of requests in place of the earlier ones."""
        write_text(self.count, json.dumps(asdict(request_counts)))

    def note(self, event: str, **entries: Any) -> None:
        """Append a line to the audit.

        Refusals that do not count as requests, such as refusals above a limit, cost a server nothing, and their lines
        could fill the disk. Of such refusals in a row, only the first, second, fourth, eighth, … gets a line, with
        their number.

        Raises:
            CheckpointError: the line cannot be written.
        """
        with self.counting():
            request_counts = self.request_counts()
            if event == REFUSED:
                request_counts = replace(request_counts, refusals=request_counts.refusals + 1)
                self.save_request_counts(request_counts)
        if event == REFUSED and (number := request_counts.refusals) > 1:
            if not has_line(number):
                return
            entries["refusals"] = number
        self.audit.append(event, client=self.client, request=request_counts.total, **entries)

    def require_approval(self, proposal: Proposal, approve: str) -> str:
        """Return who has approved a proposal at the site, or raise a Refusal."""
        return self.approvals.require(proposal, approve)


def requests_in(folder: Path) -> dict[int, int]:
    """Return client -> its total number of requests, for all clients that keep their state in a folder."""
    found = sorted(re.findall(r"^client-(\d{1,9})-requests\.json$", file.name) for file in folder.iterdir())
    return {int(one): FolderStore(folder, int(one)).request_counts().total for (one,) in filter(None, found)}


class ContextStore:
    """A client's state in Flower's memory of a run, `Context.state`. A restart of the SuperNode deletes it."""

    FIELDS, TREE, COUNT = "fedbilevel.tag", "fedbilevel.state", "fedbilevel.requests"
    AGREED = "fedbilevel.agreement"
    audit: ClassVar[None] = None  # only folders have an audit

    def __init__(self, records: RecordDict) -> None:
        self.records = records

    def load(self, run: str, like: PyTree) -> Versions:
        tag, tree = self.records.get(self.FIELDS), self.records.get(self.TREE)
        if not isinstance(tag, ConfigRecord) or not isinstance(tree, ArrayRecord) or tag["run"] != run:
            return Versions()
        fields: Any = tag  # the fields that `save` wrote
        places = zip(fields["rounds"], fields["exchanges"], strict=True)
        tags = tuple((int(round), int(exchange)) for round, exchange in places)
        shapes = (like,) * len(tags)
        if tag["layout"] != layout(shapes):
            raise Refusal(Code.STATE, "this client's stored state belongs to another algorithm or model")
        return Versions(tags, from_bytes(tree[RAW].data, shapes))

    def save(self, run: str, kept: Versions) -> None:
        data = to_bytes(kept.states)
        leaves = Array(dtype="uint8", shape=(len(data),), stype=RAW, data=data)
        rounds, exchanges = zip(*kept.tags, strict=True)
        fields: Any = {"run": run, "rounds": list(rounds), "exchanges": list(exchanges), "layout": layout(kept.states)}
        self.records[self.FIELDS] = ConfigRecord(fields)
        self.records[self.TREE] = ArrayRecord({RAW: leaves})

    def agreement(self, run: str) -> Agreed:
        kept = self.records.get(self.AGREED)
        if not isinstance(kept, ConfigRecord) or kept["run"] != run:
            return Agreed()
        return Agreed(str(kept["text"]), str(kept["source"]))

    def keep_agreement(self, run: str, agreed: Agreed) -> None:
        self.records[self.AGREED] = ConfigRecord({"run": run, **agreed._asdict()})

    def counting(self) -> AbstractContextManager[None]:
        return nullcontext()  # Flower lets one message at a time use a run's memory

    def request_counts(self) -> RequestCounts:
        count = self.records.get(self.COUNT)
        return RequestCounts(**dict(count)) if isinstance(count, ConfigRecord) else RequestCounts()  # type: ignore[arg-type]

    def save_request_counts(self, request_counts: RequestCounts) -> None:
        self.records[self.COUNT] = ConfigRecord(asdict(request_counts))

    def note(self, event: str, **entries: Any) -> None:
        """Do nothing, since there is no audit without a folder."""

    def require_approval(self, proposal: Proposal, approve: str) -> str:
        raise Refusal(Code.APPROVAL, "nothing can be approved at this site: it has no state-folder")


Store = FolderStore | ContextStore
"""A store of each run's `Versions` and of the counts of requests. A `FolderStore` also has an audit and approvals."""
