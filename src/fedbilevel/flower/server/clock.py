"""Time, so that an in-process federation can have its own."""

from __future__ import annotations

import time
from typing import Protocol


class ServerClock(Protocol):
    """Seconds since some moment, and waiting; `tick`: the shortest wait that makes sense."""

    tick: float

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's. A SuperLink that is asked more often than every tick has less time for the messages."""

    tick = 0.03

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
