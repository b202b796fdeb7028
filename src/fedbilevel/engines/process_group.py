"""The processes that run one simulation, as one of them knows them: what they say to each other, and how a process ends
when another one has an error or is lost.

Sums over clients go through XLA's collectives. Everything else (the spec, how many rounds come next, whether anybody
pressed Ctrl-C, the bytes of a checkpoint) goes through the key-value store of JAX's coordination service, which
process 0 hosts: a process that waits there can look at Ctrl-C, and learns who has ended and why.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import jax

from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    NonFiniteError,
    NumericalError,
    warn,
)

LISTEN_MILLISECONDS = 2000  # between two looks at Ctrl-C while waiting for another process
PIECE = 2**20  # bytes of a message in an entry of the store; gRPC carries at most 4 MiB
PARTING_SECONDS = 5  # in which an error that all processes have comes up in all of them
LEFT = "fedbilevel/left"  # keys of the notes of processes that have ended
LONGEST = 10_000  # characters of a note
KINDS = {kind.__name__: kind for kind in (CheckpointError, NonFiniteError, NumericalError)}
"""Errors of process 0 that are of the same kind there; all other kinds become ConfigurationErrors."""


class LostProcess(ExchangeError):
    """Another process of the simulation has ended, or cannot be reached any more."""


@dataclass
class KeyValueStore:
    """The key-value store of JAX's coordination service, which all processes of a simulation read and write.

    All of its functions raise JAX's and gRPC's own errors where the store cannot be reached.
    """

    service: Any  # JAX's client of the store

    def put(self, key: str, data: bytes) -> None:
        """Write a message, its last piece first: who finds the first piece finds them all."""
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
        for number, piece in reversed(list(enumerate(pieces))):
            self.service.key_value_set_bytes(f"{key}/{number}", len(pieces).to_bytes(4) + piece)

    def piece(self, key: str, number: int) -> tuple[int, bytes] | None:
        """Read how many pieces a message has, and one of them; None where it does not come in LISTEN_MILLISECONDS."""
        try:
            piece = bytes(self.service.blocking_key_value_get_bytes(f"{key}/{number}", LISTEN_MILLISECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return int.from_bytes(piece[:4]), piece[4:]

    def delete(self, key: str) -> None:
        """Take a message out of the store."""
        self.service.key_value_delete(key)

    def leave(self, process: int, why: str) -> None:
        """Write a note, for those who will wait for this process, that it ends; `why`: "" at the end of its work."""
        self.service.key_value_set(f"{LEFT}/{process}", why[:LONGEST])

    def who_left(self) -> str:
        """Say who has written a note, and why; nothing if nobody has."""
        for key, why in self.service.key_value_dir_get(LEFT):
            who = f"process {key.rpartition('/')[2]} has ended"
            return f"{who} with {why}" if why else f"{who} before the others"
        return ""

    def wait_for_all(self, seconds: float) -> None:
        """Wait, at the end, until all processes have come here, but no longer than that."""
        self.service.wait_at_barrier("fedbilevel/part", int(1000 * seconds))


@dataclass
class ProcessGroup:
    """The processes of one simulation, as one of them knows them. Without arguments: this process alone.

    All processes of a group call `gather`, `first`, `decide`, `require_same` and `copy_of` in the same order.
    """

    store: KeyValueStore | None = None  # once the process has joined others
    processes: int = 1
    process: int = 0  # the number of this process, 0 … processes − 1
    coordinator: str = ""  # HOST:PORT
    saved: str = ""  # the path of this run's last checkpoint
    advice: str = ""  # how to continue from it
    trouble: str = ""  # the explanation that is printed if JAX's runtime aborts this process now
    reported: bool = False  # whether this process has already said that another process was lost
    ending: int | None = None  # exit code of a process that has said why it ends
    messages: int = 0  # so far; all processes count alike, since all make the same calls
    mine: list[str] = field(default_factory=list)  # keys of messages that others may not have read yet

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.process == 0

    @property
    def shared(self) -> KeyValueStore:
        """The store of a process that has joined others."""
        assert self.store is not None
        return self.store

    @contextmanager
    def meanwhile(self, trouble: str) -> Iterator[None]:
        """Print `trouble` as the explanation if JAX's runtime aborts this process while the block runs."""
        self.trouble = trouble
        try:
            yield
        finally:
            self.trouble = ""

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Turn what XLA and JAX's service raise when another process is gone into `LostProcess`."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            gone = any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE"))
            if self.processes == 1 or not gone:
                raise
            self.reported = True
            raise LostProcess(self.sentence(self.trouble or self.lost())) from error

    def lost(self) -> str:
        """Say that another process was lost, and which."""
        other = f"process {1 - self.process}" if self.processes == 2 else "another process"
        return f"{other} was lost (killed, crashed or cut off)"

    def sentence(self, what: str) -> str:
        """Say what has happened, what stays, and how to go on."""
        if not self.saved:
            return f"{what}; no checkpoint had been written"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{what}; the last checkpoint is {self.saved}, of process 0{advice}"

    def part(self, code: int, why: str) -> NoReturn:
        """End this process after an error: with the others if they have it too, else alone, leaving them a note."""
        alone, self.reported = self.reported, True
        sys.stdout.flush()
        sys.stderr.flush()
        self.ending = code
        if not alone:
            with suppress(jax.errors.JaxRuntimeError):
                self.shared.leave(self.process, why)
            with suppress(jax.errors.JaxRuntimeError):  # jax.distributed.shutdown would wait for a minute
                self.shared.wait_for_all(PARTING_SECONDS)
        os._exit(code)

    def gather(self, word: Any) -> list[Any]:
        """Get the values of `word`, which JSON can hold, on every process, in the order of their numbers."""
        if self.processes == 1:
            return [word]
        self._say(json.dumps(word).encode())
        words = [word if k == self.process else json.loads(self._hear(k)) for k in range(self.processes)]
        self.messages += 1
        earlier, self.mine = self.mine[:-1], self.mine[-1:]  # who speaks now has heard all that was said before
        for key in earlier:
            self.shared.delete(key)
        return words

    def first(self, word: Any) -> Any:
        """Get the value of `word`, which JSON can hold, on process 0."""
        return json.loads(self._first(json.dumps(word).encode()))

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Get the value (JSON) of a function that process 0 alone calls; its error is everybody's error."""
        if self.processes == 1:
            return choose()
        value, kind, said = None, "", ""
        if self.is_first:
            try:
                value = choose()
            except Exception as error:
                kind, said = type(error).__name__, str(error)
                own = isinstance(error, FedbilevelError | OSError)
                self.first([None, kind, said if own and said else f"{kind}: {said}"])
                raise
        value, kind, said = self.first([value, kind, said])
        if kind:
            raise KINDS.get(kind, ConfigurationError)(f"process 0: {said}")
        return value

    def require_same(self, fields: dict[str, Any]) -> None:
        """Refuse values (JSON, by name) that are not the same on every process."""
        words = self.gather(fields)
        for process, theirs in enumerate(words):
            for name in sorted(words[0].keys() | theirs.keys()):
                of_first, other = words[0].get(name), theirs.get(name)
                if of_first != other:
                    said = f"{name} differs between processes: {of_first} on process 0, {other} on process {process}"
                    raise ConfigurationError(f"{said}; it must be the same")

    @contextmanager
    def copy_of(self, path: Path) -> Iterator[Path]:
        """Get process 0's file `path`, as a file that this process can read."""
        if self.processes == 1:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            content = self._first(path.read_bytes() if self.is_first and path.is_file() else b"")
            copy = Path(folder) / path.name
            if content:
                copy.write_bytes(content)
            yield path if self.is_first else copy

    def _first(self, data: bytes) -> bytes:
        if self.processes == 1:
            return data
        if self.is_first:
            self._say(data)
        else:
            data = self._hear(0)
        self.messages += 1
        return data

    def _say(self, data: bytes) -> None:
        """Put a message into the store."""
        key = f"fedbilevel/{self.messages}/{self.process}"
        with self.exchange():
            self.shared.put(key, data)
        self.mine.append(key)

    def _hear(self, process: int) -> bytes:
        """Wait for that process's message, and look between whiles whether somebody has left."""
        key, content, total, number = f"fedbilevel/{self.messages}/{process}", b"", 1, 0
        whom, gone = "" if self.processes == 2 else f" while waiting for process {process}", ""
        with self.meanwhile(f"{self.lost()}{whom}"):
            while number < total:
                with self.exchange():
                    found = self.shared.piece(key, number)
                if found is not None:
                    total, content, number = found[0], content + found[1], number + 1
                    continue
                if gone:  # and had said nothing before it left
                    raise LostProcess(self.sentence(gone))
                with self.exchange():
                    gone = self.shared.who_left()
        return content

    def end(self) -> None:
        """Say that this process has come to its end, before JAX waits for the others."""
        self.trouble = "this process had come to its end, and the others had not"
        with suppress(jax.errors.JaxRuntimeError):
            self.shared.leave(self.process, "")


_OF_THIS_PROCESS = ProcessGroup()


def current_group() -> ProcessGroup:
    """Get the group that this process belongs to: the group that it joined (see `join`), or itself alone."""
    return _OF_THIS_PROCESS


def warn_on_first(warning: Warning) -> None:
    """Warn; where several processes run together, process 0 alone does."""
    if current_group().is_first:
        warn(warning)
