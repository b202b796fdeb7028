"""Run the command line on a pseudo-terminal, as a person would."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from fedbilevel import cli


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, *arguments: str, kind: str = "xterm") -> tuple[int, str]:
    """Run the command line on a terminal of this kind. Return the exit code and all that was sent to the terminal.

    What a program writes to a terminal can be read a moment later, and in pieces. So it is read until the end.
    """
    master, slave = os.openpty()
    shown: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(master, 65536):
                shown.append(chunk)
        except OSError:
            pass  # on Linux this means that the other end is closed

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with monkeypatch.context() as patched, os.fdopen(slave, "w") as stream:
        patched.setattr(sys, "stdout", stream)
        patched.setattr(sys, "stderr", stream)
        patched.setenv("TERM", kind)
        code = cli.main(arguments)
    reader.join(timeout=60)
    assert not reader.is_alive(), "the terminal is still open a minute after the command has ended"
    os.close(master)
    return code, b"".join(shown).decode()
