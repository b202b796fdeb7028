"""Helpers for tests that run the command line, in this process or in one that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from fedbilevel import cli
from own_files import apart


@pytest.fixture(autouse=True)
def _files_of_users_go_with_their_test() -> Iterator[None]:
    """Forget users' modules after each test, since files of different tests have the same names."""
    with apart():
        yield


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the command line in this process and returns exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


@pytest.fixture
def start():
    """Return a function that starts the command line as a separate process, which is killed at the end of the test."""
    started: list[subprocess.Popen] = []

    def call(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "fedbilevel.cli", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()
