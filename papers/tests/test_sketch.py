"""The sketch of FedNest's Figure 4 finds what the runs of the figure's file have found."""

from pathlib import Path

import pytest
from papers import page
from papers.figure import PAPERS, load
from papers.sketch import fednest_4

PROBLEMS = {"the paper's problem": "the paper's", "dense, unequal curvatures": "dense"}


def expected() -> dict[tuple[str, str, str], str]:
    """Return the findings that were stored when the figure's file was run."""
    kept = page.kept(load(PAPERS / "fednest" / "fednest-4.toml"))
    assert kept is not None
    return {(PROBLEMS[one["panel"]], one["better"], one["than"]): one["state"] for one in kept["findings"]}


def test_the_sketch_plays_its_claims_and_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fednest_4, "SEEDS", (0,))
    monkeypatch.setattr(fednest_4, "ROUNDS", 4)
    claim = ("LFedNest", "FedAvg-S")
    monkeypatch.setattr(fednest_4, "CLAIMS", [claim])
    monkeypatch.setattr(fednest_4, "METHODS", {name: fednest_4.METHODS[name] for name in claim})
    wanted = {(problem, *names): "open" for problem, *names in expected() if tuple(names) == claim}
    assert fednest_4.main() == wanted  # a single seed decides nothing
    assert len(wanted) == len(PROBLEMS)
    assert (tmp_path / "fednest_4.png").is_file()


@pytest.mark.slow
def test_the_sketch_finds_what_the_file_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fednest_4.main() == expected()
