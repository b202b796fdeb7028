"""What a client lets a server ask of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from fedbilevel.core.config import hyperparameters
from fedbilevel.core.errors import require, require_count
from fedbilevel.flower.wire import Refusal

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's own limits. What exceeds them is refused, whoever asks.

    Args:
        local_steps: at most so many local steps, whether the algorithm or the message says how many; also of the
            algorithm's other counts (`inner_rounds`, `neumann_terms`, …), which are work for the client too.
        batch_size: samples of a mini-batch at most.
        seconds: for one phase, compilation included. A phase that takes longer is answered by a refusal, and further
            messages are refused until it ends.
        message_bytes: of a message's arrays.
    """

    local_steps: int = 10_000
    batch_size: int = 100_000
    seconds: float = 600.0
    message_bytes: int = 2**30

    def __post_init__(self) -> None:
        for name in ("local_steps", "batch_size", "message_bytes"):
            require_count(f"Limits.{name}", getattr(self, name))
        require(self.seconds > 0, "Limits.seconds", self.seconds, "positive")

    def check_algorithm(self, algorithm: Any) -> None:
        """Refuse hyperparameters that ask for too much work."""
        for name, value in hyperparameters(algorithm).items():
            if name == "batch_size" and value is not None and value > self.batch_size:
                raise Refusal(f"{name} = {value} is above this client's limit of {self.batch_size}")
            if type(value) is int and name != "batch_size" and value > self.local_steps:
                raise Refusal(f"{name} = {value} is above this client's limit of {self.local_steps} steps")

    def check_message(self, work: int, size: int) -> None:
        """Refuse a number of local steps, or of bytes, that is too large."""
        if work > self.local_steps:
            raise Refusal(f"{work} local steps are above this client's limit of {self.local_steps}")
        if size > self.message_bytes:
            raise Refusal(f"{size} bytes are above this client's limit of {self.message_bytes}")


class Patience:
    """Runs one thing at a time, and does not wait for it longer than some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.thread: threading.Thread | None = None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; a Refusal when it takes too long, or while an earlier one still runs."""
        if self.thread is not None and self.thread.is_alive():
            raise Refusal(f"a phase that was given up after {self.seconds:g} s still runs here")
        outcome: list[T | BaseException] = []

        def play() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001  handed on to the caller's thread
                outcome.append(error)

        self.thread = threading.Thread(target=play, name="fedbilevel-phase", daemon=True)
        self.thread.start()
        self.thread.join(self.seconds)
        if not outcome:
            raise Refusal(f"the phase takes longer than this client's limit of {self.seconds:g} s")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]
