"""Time, so that an in-process federation can have its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some moment, and waiting."""

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's."""

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
