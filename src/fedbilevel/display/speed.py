"""How fast a run goes, and how long it still takes."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW = 5.0  # seconds over which the speed is taken


class Speed:
    """How fast something grows, over the last few seconds, with what is no round left out."""

    def __init__(self, unit: str = "rounds", clock: Callable[[], float] = time.monotonic) -> None:
        self.unit, self.clock = unit, clock
        self.marks: list[tuple[float, float]] = []
        self.paused = False

    def pause(self) -> None:
        """What comes up to the next mark is not counted."""
        self.paused = True

    def mark(self, done: float) -> None:
        """So much is done now."""
        now = self.clock()
        self.marks = [] if self.paused else [mark for mark in self.marks if now - mark[0] < WINDOW] or self.marks[-1:]
        self.marks.append((now, done))
        self.paused = False

    def text(self, whole: float) -> str:
        """The speed, and how long it takes until `whole` is done; "" as long as it is not known."""
        if not self.marks:
            return ""
        (then, before), (now, done) = self.marks[0], self.marks[-1]
        if done == before or now <= then:
            return ""
        rate = (done - before) / (now - then)
        return f"{rate:.3g} {self.unit}/s  ETA {clock_text(max(0, whole - done) / rate)}"


def clock_text(seconds: float) -> str:
    """Seconds as 1:23 or 4:05:06."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
