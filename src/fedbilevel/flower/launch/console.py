"""`flwr` commands in one process that stays: importing Flower takes seconds, a command then milliseconds.

`python -m fedbilevel.flower.launch.console` reads one command per line (a JSON list of words) and prints the output of
`flwr`, then END and the exit status.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedbilevel.core.errors import ExchangeError

END = "\x04"


class CommandError(ExchangeError):
    """A `flwr` command failed; the message has its output."""


class Console:
    """Gives commands to one `flwr` process, started at the first of them; `close` ends it."""

    def __init__(self, env: Mapping[str, str], directory: Path) -> None:
        self.env, self.directory = dict(env), directory
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, *words: str, timeout: float = 60.0) -> str:
        """The output of `flwr WORDS…`.

        Raises:
            CommandError: it failed, or took longer than `timeout` seconds.
        """
        return "".join(self.lines(*words, timeout=timeout))

    def lines(self, *words: str, timeout: float) -> Iterator[str]:
        """The output of `flwr WORDS…`, line by line as it comes. Raises like `__call__`."""
        process = self.started()
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        printed: list[str] = []
        try:
            for line in process.stdout:
                if line.startswith(END):
                    if line.rstrip() != END + "0":
                        raise CommandError(f"flwr {' '.join(words)} failed:\n{''.join(printed)}")
                    return
                printed.append(line)
                yield line
        finally:
            watchdog.cancel()
        self.close()
        raise CommandError(f"flwr {' '.join(words)} ended, or took longer than {timeout:.0f} s:\n{''.join(printed)}")

    def started(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fedbilevel.flower.launch.children",
                    str(os.getpid()),
                    sys.executable,
                    "-m",
                    __name__,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self.env,
                cwd=self.directory,
                start_new_session=True,
            )
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def main() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="flwr")
    app = command.load()
    for line in sys.stdin:
        try:
            status = app(json.loads(line), standalone_mode=False) or 0
        except SystemExit as exit:
            status = exit.code
        except Exception as error:  # noqa: BLE001 - printed, for the one who asked
            print(getattr(error, "message", error) or type(error).__name__)
            status = 1
        failed = status not in (0, None)
        print(f"\n{END}{int(failed)}", flush=True)
        if failed:  # Flower ends a process some seconds after an error, whatever else it does
            return


if __name__ == "__main__":
    main()
