"""Every benchmark of `python -m benchmarks` can be imported and has a command line; pages name those that exist."""

import os
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks.harness import in_process, turns

ROOT = Path(__file__).resolve().parent.parent
NAMES = list(command.benchmarks())


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_has_a_command_line_with_a_smallest_setting(name):
    module = import_module(f"benchmarks.{name}")
    parser = command.parser_of(name, module)
    assert f"benchmarks {name}" in parser.format_help()
    assert set(getattr(module, "QUICK", {})) <= set(vars(parser.parse_args([])))


def test_without_a_name_all_are_listed(capsys):
    assert command.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == NAMES


def test_a_misspelt_name_gets_the_nearest_one(capsys):
    assert command.main(["flor"]) == 2
    assert "'floor'" in capsys.readouterr().err


def test_pages_name_benchmarks_that_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "src").rglob("*.py")]
    command = r"python\s+-m\s+benchmarks\s+(\w+)"
    named = {name for page in pages for name in re.findall(command, page.read_text("utf-8"))}
    assert {"hospitals", "sites"} <= named - {"NAME"} <= set(NAMES)


def test_contenders_take_turns():
    calls = []
    contenders = {name: partial(lambda name: calls.append(name) or len(calls), name) for name in "ab"}
    assert turns(contenders, 2) == {"a": [1, 3], "b": [2, 4]}
    assert calls == ["a", "b", "a", "b"]


def test_a_function_runs_in_a_process_of_its_own():
    assert in_process(os.getpid) != os.getpid()
