"""The hand-written programs of benchmarks/peers are short, and the same mathematics as the library's methods."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import floor  # noqa: E402

PROGRAMS = sorted(set((BENCHMARKS / "peers").glob("*.py")) - {BENCHMARKS / "peers" / "problems.py"})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_is_short_and_knows_nothing_of_the_library(program):
    text = program.read_text(encoding="utf-8")
    assert "fedbilevel" not in text
    assert len(text.splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", floor.ROWS)
def test_a_program_makes_the_iterates_of_the_library(name):
    """Equal but for rounding, after a way that is not."""
    apart, way = floor.compared(name)
    assert apart <= 1e-10
    assert way >= 1e-3
