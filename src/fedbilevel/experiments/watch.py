"""How far a run of a spec is: a moving bar, or plain lines where there is no terminal."""

from __future__ import annotations

from rich.console import Console

from fedbilevel.core.metrics import text
from fedbilevel.engines.bar import Bar
from fedbilevel.engines.budget import cost
from fedbilevel.engines.history import Row
from fedbilevel.engines.result import Result
from fedbilevel.engines.speed import Speed
from fedbilevel.experiments.spec import Spec

UNITS = {"rounds": "rounds", "exchanges": "exchanges", "bytes": "bytes", "time": "s of the clock"}


class Watch:
    """Shows how far a run is, in rounds or in what its budget counts.

    It is the run's display, which is told of phases, and one of its callbacks, which is told of numbers.
    """

    def __init__(self, console: Console, metric: str, spec: Spec) -> None:
        self.console, self.metric, self.spec = console, metric, spec
        self.counted, self.whole = spec.run.budget or ("rounds", float(spec.run.rounds or 0))
        self.bar = Bar(console, UNITS[self.counted]) if console.is_terminal else None
        self.speed = self.bar.speed if self.bar else Speed(UNITS[self.counted])

    def phase(self, name: str) -> None:
        if self.bar:
            self.bar.phase(name)
        else:
            self.speed.pause()

    def advance(self, round: int, rounds: int) -> None:
        """The callback knows more."""

    def close(self) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, result: Result, row: Row | None) -> None:
        if self.bar:
            self.bar.show(self.done(result), self.whole, self.numbers(result))
            return
        self.speed.mark(self.done(result))
        if row is not None:
            parts = (self.place(result), self.numbers(result), self.speed.text(self.whole))
            self.console.print("  ".join(part for part in parts if part), highlight=False, soft_wrap=True)

    def done(self, result: Result) -> float:
        return cost({"round": result.round, **result.ledger.columns()}, self.counted)

    def place(self, result: Result) -> str:
        """The progress of the run, as a text."""
        if self.counted == "exchanges":
            return f"round {result.round}  exchange {result.ledger.exchanges}/{self.whole:.0f}"
        if self.counted == "bytes":
            return f"round {result.round}  sent {self.done(result) / 1e6:,.1f}/{self.whole / 1e6:,.6g} MB"
        if self.counted == "time":
            return f"round {result.round}  clock {result.ledger.time:,.1f}/{self.whole:g} s"
        return f"round {result.round}/{self.whole:.0f}"

    def numbers(self, result: Result) -> str:
        """The objective and the first metric, as of the last row; the time, where it says more than the place does."""
        row = result.history.rows[-1] if result.history.rows else {}
        shown = {name: row[name] for name in ("outer_loss", self.metric) if name in row}
        texts = [f"{name} {text(name, value)}" for name, value in shown.items()]
        if self.spec.timed and self.counted != "time":
            texts.insert(0, f"clock {result.ledger.time:,.1f} s")
        return "  ".join(texts)
