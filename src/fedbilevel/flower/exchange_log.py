"""One line for each exchange: what was asked, who answered, what it cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.flower.clock import Clock
from fedbilevel.flower.wire import Ask

log = logging.getLogger("fedbilevel.server")


class Exchange:
    """An exchange as it goes on."""

    def __init__(self, clock: Clock, round: int, exchange: int, phase: str, attempt: int = 0) -> None:
        self.clock, self.began = clock, clock.time()
        self.line: dict[str, Any] = {"round": round, "exchange": exchange, "phase": phase, "attempt": attempt}

    def sent(self, asks: Iterable[Ask]) -> None:
        sizes = [len(ask.payload) for ask in asks]
        self.line |= {"asked": len(sizes), "bytes_down": sum(sizes)}

    def done(self, answers: Mapping[int, Any], refused: Mapping[int, list[str]]) -> None:
        """`answers` and the reasons of those that do not count, by client."""
        up = sum(len(counted.answer.payload) for counted in answers.values())
        seconds = round(self.clock.time() - self.began, 4)
        self.line |= {"answered": sorted(answers), "bytes_up": up, "seconds": seconds}
        if failed := {str(client): why[-1] for client, why in sorted(refused.items()) if client not in answers}:
            self.line["refused"] = failed


class ExchangeLog:
    """Writes exchanges to the program's log and, where a file is given, there as JSON lines."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def __call__(self, exchange: Exchange) -> None:
        line = exchange.line
        text = "round %d exchange %d %s: %d of %d answered, %d bytes down, %d up, %.3f s"
        numbers = (line["bytes_down"], line["bytes_up"], line["seconds"])
        head = (line["round"], line["exchange"], line["phase"])
        log.info(text, *head, len(line["answered"]), line["asked"], *numbers)
        for client, why in line.get("refused", {}).items():
            log.warning("round %d exchange %d %s: client %s does not count: %s", *head, client, why)
        if self.path is not None:
            with open(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")
