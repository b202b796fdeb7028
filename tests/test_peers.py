"""The hand-written programs of benchmarks/peers are short, and compute the same numbers as the library's methods."""

from pathlib import Path

import pytest
from benchmarks import floor

PEERS = Path(floor.__file__).parent / "peers"
SHARED = {"__init__", "problems", "work"}  # files that all contenders use, which are not part of a program
PROGRAMS = [program for program in sorted(PEERS.glob("*.py")) if program.stem not in SHARED]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_a_program_is_short_and_knows_nothing_of_the_library(program):
    text = program.read_text(encoding="utf-8")
    assert "fedbilevel" not in text
    assert len(text.splitlines()) <= 65


@pytest.mark.slow
@pytest.mark.parametrize("name", floor.ROWS)
def test_a_program_makes_the_iterates_of_the_library(name):
    """A program has the iterates of the library's method up to rounding, and they have moved far more than rounding."""
    apart, way = floor.compared(name)
    assert apart <= 1e-10
    assert way >= 1e-3
