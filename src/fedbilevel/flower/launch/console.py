"""`flwr` commands, a process each, which ends with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ExchangeError


class CommandError(ExchangeError):
    """A `flwr` command failed; the message has its output."""


class Console:
    """Gives commands to `flwr`, one after the other."""

    def __init__(self, env: Mapping[str, str], directory: Path) -> None:
        self.env, self.directory = dict(env), directory
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, *words: str) -> str:
        """Return the output of `flwr WORDS…`; CommandError if it failed."""
        return "".join(self.lines(*words, timeout=60.0))

    def read(self, *words: str) -> Any:
        """Read what a command says in JSON, whatever it warns of before."""
        text = self(*words, "--format", "json")
        return json.JSONDecoder().raw_decode(text, text.index("{"))[0]

    def lines(self, *words: str, timeout: float) -> Iterator[str]:
        """Yield the output of `flwr WORDS…`, line by line as it comes.

        Raises:
            CommandError: it failed, or took longer than `timeout` seconds.
        """
        flwr = str(Path(sys.executable).parent / "flwr")
        command = [sys.executable, "-m", "fedbilevel.flower.launch.children", str(os.getpid()), flwr, *words]
        kinds: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = process = subprocess.Popen(
            command, text=True, env=self.env, cwd=self.directory, start_new_session=True, **kinds
        )
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        printed: list[str] = []
        try:
            for line in process.stdout or []:
                printed.append(line)
                yield line
            if process.wait():
                raise CommandError(
                    f"flwr {' '.join(words)} failed, or took longer than {timeout:.0f} s:\n{''.join(printed)}"
                )
        finally:
            watchdog.cancel()
            self.close()

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
