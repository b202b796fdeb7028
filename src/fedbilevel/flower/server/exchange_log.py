"""One line for each exchange: the phase, the clients that answered, bytes and seconds."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError
from fedbilevel.flower.server.clock import ServerClock
from fedbilevel.flower.wire.messages import RequestMessage, ResponseMessage

log = logging.getLogger("fedbilevel.server")


class ExchangeRecord:
    """The line of one attempt at an exchange."""

    def __init__(self, clock: ServerClock, round: int, exchange: int, phase: str, attempt: int = 0) -> None:
        self.clock, self.began = clock, clock.time()
        self.line: dict[str, Any] = {"round": round, "exchange": exchange, "phase": phase, "attempt": attempt}

    def done(
        self, requests: Iterable[RequestMessage], answers: Sequence[ResponseMessage], refused: Mapping[int, str]
    ) -> None:
        """Complete the line with the requests sent, the responses that count, and client -> why another does not."""
        down = [len(request.payload) for request in requests]
        up = sum(len(response.payload) for response in answers)
        answered = sorted(response.client for response in answers)
        seconds = round(self.clock.time() - self.began, 4)
        self.line |= {"asked": len(down), "answered": answered, "bytes_down": sum(down), "bytes_up": up}
        self.line |= {"seconds": seconds}
        if (epsilon := max((response.epsilon for response in answers), default=0.0)) > 0:
            self.line["epsilon"] = epsilon  # the most that any of them says to have spent of its privacy so far
        if refused:
            self.line["refused"] = {str(client): why for client, why in sorted(refused.items())}


class ExchangeLog:
    """Writes exchanges to the program's log and, where a file is given, there as JSON lines.

    Raises:
        CheckpointError: the file cannot be written. It is tried at once; a run without exchanges leaves none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        there = path is None or path.exists()
        self.write("")
        if path is not None and not there:
            path.unlink()

    def __call__(self, exchange: ExchangeRecord) -> None:
        line = exchange.line
        text = "round %d exchange %d %s: %d of %d answered, %d bytes down, %d up, %.3f s"
        numbers = (line["bytes_down"], line["bytes_up"], line["seconds"])
        head = (line["round"], line["exchange"], line["phase"])
        log.info(text, *head, len(line["answered"]), line["asked"], *numbers)
        for client, why in line.get("refused", {}).items():
            log.warning("round %d exchange %d %s: client %s does not count: %s", *head, client, why)
        self.note(line)

    def note(self, line: Mapping[str, Any]) -> None:
        """Write a line of the file."""
        self.write(json.dumps(line) + "\n")

    def write(self, text: str) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(f"could not write {self.path}: {error.strerror or error}") from error
