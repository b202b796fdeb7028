"""The sketch finds what the figure's file has found."""

from pathlib import Path

import pytest
from papers import page
from papers.figure import PAPERS, load
from papers.sketch import fednest_4

PROBLEMS = {"the paper's problem": "the paper's", "dense, unequal curvatures": "dense"}


def test_the_sketch_finds_what_the_file_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kept = page.kept(load(PAPERS / "fednest" / "fednest-4.toml"))
    assert kept is not None
    expected = {(PROBLEMS[one["panel"]], one["better"], one["than"]): one["state"] for one in kept["findings"]}
    assert fednest_4.main() == expected
    assert (tmp_path / "fednest_4.png").is_file()
