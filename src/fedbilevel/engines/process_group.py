"""Exchange messages between the processes of one simulation, and end a process when another one fails or is lost.

Sums over clients go through XLA's collectives. Everything else (the spec, the number of rounds that come next, whether
Ctrl-C was pressed, the bytes of a checkpoint) goes through the key-value store of JAX's coordination service, which
process 0 hosts. A process that waits for the store can still handle Ctrl-C, and learns which process has ended and why.
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

LISTEN_MILLISECONDS = 2000  # the time between two checks for Ctrl-C while a process waits for another one
PIECE = 2**20  # bytes of a message in one entry of the store; gRPC allows at most 4 MiB
PARTING_SECONDS = 5  # if all processes have the same error, all of them have raised it within this time
LEFT = "fedbilevel/left"  # the prefix of the keys under which processes note that they have ended
LONGEST = 10_000  # the largest number of characters of a note
KINDS = {kind.__name__: kind for kind in (CheckpointError, NonFiniteError, NumericalError)}
"""Errors of process 0 that other processes raise as the same class; all others become ConfigurationErrors there."""


class LostProcess(ExchangeError):
    """Report that another process of the simulation has ended, or cannot be reached any more."""


@dataclass
class KeyValueStore:
    """Access the key-value store of JAX's coordination service, which all processes of a simulation read and write.

    All methods raise errors of JAX and gRPC if the store cannot be reached.
    """

    service: Any  # JAX's client of the store

    def put(self, key: str, data: bytes) -> None:
        """Write a message, its last piece first, so that all pieces can be read once the first piece can be read."""
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
        for number, piece in reversed(list(enumerate(pieces))):
            self.service.key_value_set_bytes(f"{key}/{number}", len(pieces).to_bytes(4) + piece)

    def piece(self, key: str, number: int) -> tuple[int, bytes] | None:
        """Read a piece of a message, as (the number of its pieces, this piece); None after LISTEN_MILLISECONDS."""
        try:
            piece = bytes(self.service.blocking_key_value_get_bytes(f"{key}/{number}", LISTEN_MILLISECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return int.from_bytes(piece[:4]), piece[4:]

    def delete(self, key: str) -> None:
        """Delete a message from the store."""
        self.service.key_value_delete(key)

    def leave(self, process: int, why: str) -> None:
        """Tell the processes that wait for this one that it ends; `why` is the error, or "" if its work is done."""
        self.service.key_value_set(f"{LEFT}/{process}", why[:LONGEST])

    def who_left(self) -> str:
        """Return which processes have noted that they ended, and why; "" if no process has."""
        for key, why in self.service.key_value_dir_get(LEFT):
            who = f"process {key.rpartition('/')[2]} has ended"
            return f"{who} with {why}" if why else f"{who} before the others"
        return ""

    def wait_for_all(self, seconds: float) -> None:
        """Wait, at the end, until all processes have called this method, but at most `seconds`."""
        self.service.wait_at_barrier("fedbilevel/part", int(1000 * seconds))


@dataclass
class LastCheckpoint:
    """Hold the path of a run's last checkpoint, and advice on how to continue from it; "" if these are not known."""

    path: str = ""
    advice: str = ""

    def after(self, what: str) -> str:
        """Return a message that begins with `what`, and says which checkpoint remains and how to continue from it."""
        if not self.path:
            return f"{what}; no checkpoint had been written"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{what}; the last checkpoint is {self.path}, of process 0{advice}"


@dataclass
class ProcessGroup:
    """Communicate with the other processes of a simulation. Without arguments, the group has only this process.

    All processes of a group must call `gather`, `first`, `decide`, `require_same` and `copy_of` in the same order.
    """

    store: KeyValueStore | None = None  # set once the process has joined others
    processes: int = 1
    process: int = 0  # the number of this process, 0 … processes − 1
    coordinator: str = ""  # HOST:PORT
    saved: LastCheckpoint = field(default_factory=LastCheckpoint)
    trouble: str = ""  # the explanation that is printed if JAX's runtime aborts this process now
    reported: bool = False  # whether this process has already reported that another process was lost
    ending: int | None = None  # the exit code, once this process has noted why it ends
    messages: int = 0  # the number of messages so far; it is the same in all processes, since all make the same calls
    mine: list[str] = field(default_factory=list)  # the keys of this process's messages that others may not have read

    @property
    def is_first(self) -> bool:
        """Return whether this is process 0, which writes files and prints."""
        return self.process == 0

    @property
    def shared(self) -> KeyValueStore:
        """Return the store; the process must have joined others."""
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
        """Raise `LostProcess` in place of those errors of XLA and JAX that mean that another process is gone."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            gone = any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE"))
            if self.processes == 1 or not gone:
                raise
            self.reported = True
            raise LostProcess(self.saved.after(self.trouble or self.lost())) from error

    def lost(self) -> str:
        """Return a text that says that another process was lost, and which process, if there is only one other."""
        other = f"process {1 - self.process}" if self.processes == 2 else "another process"
        return f"{other} was lost (killed, crashed or cut off)"

    def part(self, code: int, why: str) -> NoReturn:
        """End this process after an error.

        The process notes for the others that it ends, and why, and waits for a few seconds: if the others have the same
        error, all processes end together. It does not wait if it has already reported that another process was lost.
        """
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
        """Return every process's value of `word`, a JSON value, in the order of the processes' numbers."""
        if self.processes == 1:
            return [word]
        self._say(json.dumps(word).encode())
        words = [word if k == self.process else json.loads(self._hear(k)) for k in range(self.processes)]
        self.messages += 1
        earlier, self.mine = self.mine[:-1], self.mine[-1:]  # a process that writes now has read all earlier messages
        for key in earlier:
            self.shared.delete(key)
        return words

    def first(self, word: Any) -> Any:
        """Return process 0's value of `word`, a JSON value."""
        return json.loads(self._first(json.dumps(word).encode()))

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Return the JSON value of a function that only process 0 calls. If the function fails, all processes raise."""
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
        """Raise a ConfigurationError unless the JSON values, by name, are the same on every process."""
        words = self.gather(fields)
        for process, theirs in enumerate(words):
            for name in sorted(words[0].keys() | theirs.keys()):
                of_first, other = words[0].get(name), theirs.get(name)
                if of_first != other:
                    said = f"{name} differs between processes: {of_first} on process 0, {other} on process {process}"
                    raise ConfigurationError(f"{said}; it must be the same")

    @contextmanager
    def copy_of(self, path: Path) -> Iterator[Path]:
        """Copy process 0's file `path` to a file that this process can read, for the duration of the block."""
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
        """Write a message of this process to the store."""
        key = f"fedbilevel/{self.messages}/{self.process}"
        with self.exchange():
            self.shared.put(key, data)
        self.mine.append(key)

    def _hear(self, process: int) -> bytes:
        """Wait for a process's message, and check at intervals whether a process has ended."""
        key, content, total, number = f"fedbilevel/{self.messages}/{process}", b"", 1, 0
        whom, gone = "" if self.processes == 2 else f" while waiting for process {process}", ""
        with self.meanwhile(f"{self.lost()}{whom}"):
            while number < total:
                with self.exchange():
                    found = self.shared.piece(key, number)
                if found is not None:
                    total, content, number = found[0], content + found[1], number + 1
                    continue
                if gone:  # a process has ended, and no message was in the store when it was read once more
                    raise LostProcess(self.saved.after(gone))
                with self.exchange():
                    gone = self.shared.who_left()
        return content

    def end(self) -> None:
        """Note that this process has finished, before JAX waits for the others."""
        self.trouble = "this process had finished, and the others had not"
        with suppress(jax.errors.JaxRuntimeError):
            self.shared.leave(self.process, "")


_OF_THIS_PROCESS = ProcessGroup()


def current_group() -> ProcessGroup:
    """Return the group that this process has joined (see `join`), or a group of this process alone."""
    return _OF_THIS_PROCESS


def warn_on_first(warning: Warning) -> None:
    """Issue a warning; if several processes run together, only process 0 does."""
    if current_group().is_first:
        warn(warning)
