"""Does `fedbilevel run` show on a terminal which phase it is in, and then how many rounds are done?"""

from __future__ import annotations

import re

import pytest

import fedbilevel as fb
from terminals import on_a_terminal


@pytest.mark.parametrize(
    "length", [["--rounds", "20"], pytest.param(["--exchanges", "20"], marks=pytest.mark.slow)], ids=" ".join
)
def test_a_terminal_is_shown_each_phase_and_then_the_rounds(tmp_path, monkeypatch, length) -> None:
    fb.Local.forget()  # a program of an earlier test would not be compiled again
    monkeypatch.chdir(tmp_path)
    code, text = on_a_terminal(monkeypatch, "run", "quadratic", *length, "--set", "clients=3", "--out", "one")
    assert code == 0
    phases = ["tracing", "compiling", "writing"]
    if "--exchanges" in length:  # the measurement compiles the program
        phases = ["measuring a round", "tracing", "writing"]
    places = [text.index(phase) for phase in phases]
    assert places == sorted(places)
    assert re.search(r"20/20 (rounds|exchanges)", text)
    assert "relative_error" in text


@pytest.mark.slow
def test_a_terminal_is_shown_what_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = on_a_terminal(monkeypatch, "diagnose", "quadratic", "--set", "clients=3")
    assert code == 0
    assert 0 < text.index("measuring curvature at the start") < text.index("measuring how y*(x) and Φ respond")
