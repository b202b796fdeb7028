"""What a client lets a server ask of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import hyperparameters
from fedbilevel.core.errors import require, require_count
from fedbilevel.flower.tally import Tally
from fedbilevel.flower.wire import Refusal

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's own limits and floors. What is outside of them is refused, whoever asks: no server overrides them.

    Floors make it dearer to learn single samples from many replies; they do not prevent it (docs/security.md).

    Args:
        local_steps: at most so many local steps, whether the algorithm or the message says how many; also of the
            algorithm's other counts (`inner_rounds`, `neumann_terms`, …), which are work for the client too.
        batch_size: samples of a mini-batch at most.
        seconds: for one phase, compilation included. A phase that takes longer is answered by a refusal, and further
            messages are refused until it ends.
        message_bytes: of a message's arrays.
        min_batch_size: samples of a mini-batch at least, and of a walk sample by sample; a method that takes all of the
            client's samples is served, too.
        min_local_samples: a client that holds fewer samples of either loss answers nothing.
        questions_per_round: questions of one round at most; those that are asked again count again. Rounds are the
            server's word: this stops mistakes, `questions` all else.
        questions: questions in all, whatever the run; counted in `Site.folder`, and without one for as long as Flower
            keeps a run's memory, that is, for each run apart. A client that has reached it answers nothing.
    """

    local_steps: int = 10_000
    batch_size: int = 100_000
    seconds: float = 600.0
    message_bytes: int = 2**30
    min_batch_size: int = 8
    min_local_samples: int = 8
    questions_per_round: int = 1_000
    questions: int = 1_000_000

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "seconds"):
            require_count(f"Limits.{name}", getattr(self, name))
        require(self.seconds > 0, "Limits.seconds", self.seconds, "positive")
        lower = self.min_batch_size <= self.batch_size
        require(lower, "Limits.min_batch_size", self.min_batch_size, f"at most batch_size = {self.batch_size}")

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Refuse hyperparameters that ask for too much work."""
        for name, value in hyperparameters(algorithm).items():
            if name == "batch_size" and value is not None and value > self.batch_size:
                raise Refusal(f"{name} = {value} is above this client's limit of {self.batch_size}")
            if name == "batch_size" and value is not None and value < self.min_batch_size:
                raise Refusal(f"{name} = {value} is below this client's floor of {self.min_batch_size}")
            largest = max(value, default=0) if isinstance(value, list) else value
            if type(largest) is int and name != "batch_size" and largest > self.local_steps:
                raise Refusal(f"{name} = {value} is above this client's limit of {self.local_steps} steps")

    def check_samples(self, count: int) -> None:
        """Refuse to answer about too few samples; how many there are is not said."""
        if count < self.min_local_samples:
            raise Refusal(f"this client has fewer samples than its floor of {self.min_local_samples}")

    def check_tally(self, tally: Tally) -> None:
        """Refuse one question more than is allowed; `tally` counts it already."""
        if tally.in_round > self.questions_per_round:
            raise Refusal(f"this client answers {self.questions_per_round} questions in one round, and no more")
        if tally.total > self.questions:
            raise Refusal(f"this client answers {self.questions} questions in all, and no more")

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
