"""Pages say what the kept outcomes say, and are short."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from papers import page
from papers.figure import PAPERS, files, load
from papers.leaderboard import __main__ as leaderboard

BOUND = 10_050  # words of all pages, of which the table of what differs between arms has 800


def test_what_is_generated_is_what_is_written() -> None:
    """`python -m papers --keep` writes it anew."""
    for file, text in page.written():
        assert file.read_text("utf-8") == text, file


def test_a_first_figure_of_your_own_gets_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine-1.toml"
    own.write_bytes((PAPERS / "fednest" / "fednest-4.toml").read_bytes())
    monkeypatch.setattr(page, "files", lambda: [own])
    written = dict(page.written())
    head, found, rest = written[tmp_path / "README.md"].partition(page.MARK)
    assert (head, found) == (f"# {tmp_path.name}\n\n", page.MARK)
    assert rest.startswith("\n## mine-1\n")
    assert f"| [{tmp_path.name}]({tmp_path.name}/README.md) | 1 | 0 of 0 |  |" in written[PAPERS / "README.md"]


def test_a_kept_outcome_that_is_stale_is_said_to_be_of_unequal_arms() -> None:
    stale = [figure for figure in map(load, files()) if page.state_of(figure, page.kept(figure)) == page.STALE]
    assert [figure.id for figure in stale if "unequal arms" not in figure.found] == []


def test_the_leaderboards_page_is_what_is_written() -> None:
    board = tomllib.loads((PAPERS / "leaderboard" / "board.toml").read_text("utf-8"))
    found = page.json.loads((PAPERS / "leaderboard" / "board.json").read_text("utf-8"))
    assert (PAPERS / "leaderboard" / "README.md").read_text("utf-8") == leaderboard.written(board, found)


def test_pages_are_short() -> None:
    assert sum(len(file.read_text("utf-8").split()) for file in PAPERS.rglob("*.md")) <= BOUND


def test_a_page_has_a_row_a_claim_and_a_state_a_rival() -> None:
    figure = load(PAPERS / "simfbo" / "simfbo-2.toml")
    lines = list(page.section(figure, page.kept(figure)))
    row = next(line for line in lines if line.startswith("| SimFBO ends at a higher training accuracy"))
    assert "SimFBO / FBO-AggITD, FedNest, LFedNest | ✔✔✔ 97.6 / 88.9, 89.1, 93.5 % |" in row
    assert row.endswith("| ??? 13.1 / 10.6, –, 9.6 % |")
    assert "Here: ◐ **partly reproduced**, 15 of 18 hold. " + figure.found + "\n" in lines
    assert any(line.startswith("FedNest failed with 1 of 3 seeds") for line in lines)
    assert f"Revised: {figure.revised}\n" in lines


def test_a_page_says_what_is_stale_or_was_not_played() -> None:
    figure = load(PAPERS / "rabo" / "rabo-2.toml")
    found = page.kept(figure)
    assert found is not None
    lines = list(page.section(figure, {**found, "played_for": "another"}))
    assert lines[2:] == [f"Here: ! **stale: play it again**. {figure.found}\n"]  # no table, and nothing holds
    lines = list(page.section(figure, {**found, "played_for": figure.fingerprint("quick")}))
    assert "Open, as not played at this scale: 5-way 5-shot; 20-way 1-shot; 20-way 5-shot.\n" in lines
    assert "`python -m papers rabo-2` plays it" in list(page.section(figure, None))[2]


@pytest.mark.parametrize(("value", "said"), [(None, "–"), (1234.5, "1,234"), (-2.5e-7, "−2.5e−07"), (49.67, "49.7")])
def test_numbers_are_written_for_people(value: float | None, said: str) -> None:
    assert page.text("loss", value) == said
    assert page.text("test_accuracy", 0.5) == "50.0"
