"""Pages about papers say what the stored outcomes of figures say."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from papers import page
from papers.claims import Finding, statements
from papers.figure import PAPERS, files, load
from papers.leaderboard import __main__ as leaderboard
from papers.numbers import POINTS


def test_what_is_generated_is_what_is_written() -> None:
    """The generated parts of pages are up to date; `python -m papers --keep` writes them."""
    for file, text in page.written():
        assert file.read_text("utf-8") == text, file


def test_the_short_summary_is_a_whole_paragraph() -> None:
    """The short summary of a page has all lines of its paragraph, and not the paragraphs around it."""
    head = "# A, B: method\n\nIn short: A is better\nthan B.\n\nA is older.\n"
    assert page.title_and_short(head) == ("A, B", "A is better than B.")


def test_a_first_figure_of_your_own_gets_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "mine-1.toml"
    own.write_bytes((PAPERS / "fednest" / "fednest-4.toml").read_bytes())
    monkeypatch.setattr(page, "files", lambda: [own])
    written = dict(page.written())
    head, found, rest = written[tmp_path / "README.md"].partition(page.MARK)
    assert (head, found) == (f"# {tmp_path.name}\n\n", page.MARK)
    assert (
        "| FedNest is the first to come within 1e-10 of the solution | [mine-1](#mine-1) | ? open | 1 ? | – |" in rest
    )
    assert "\n## mine-1\n" in rest
    row = f"| [{tmp_path.name}]({tmp_path.name}/README.md) | 1 | 2: 2 open |  |"
    assert row in written[PAPERS / "README.md"]


def test_statements_of_ours_are_not_counted_among_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two open statements of a figure, the second is made ours."""
    own, given = tmp_path / "mine-1.toml", (PAPERS / "fednest" / "fednest-4.toml").read_text("utf-8")
    own.write_text(given.replace("\nlog = true", "\nlog = true\nours = true"), "utf-8")
    monkeypatch.setattr(page, "files", lambda: [own])
    written = dict(page.written())
    assert "| 1 | 1: 1 open; 1 ours |  |" in written[PAPERS / "README.md"]
    assert "\n| Ours: LFedNest ends nearer" in written[tmp_path / "README.md"]
    told = written[PAPERS.parent / "README.md"]
    assert "we tried [1 statements]" in told
    assert "Another 1 statements, such as corrections of printed formulas, are ours and are not counted." in told


def test_a_kept_outcome_that_is_stale_is_said_to_be_of_unequal_arms() -> None:
    """If a stored outcome is stale, the field `found` of its figure says that the arms of the outcome are unequal."""
    stale = [figure for figure in map(load, files()) if page.state_of(figure, page.kept(figure)) == page.STALE]
    assert [figure.id for figure in stale if "unequal arms" not in figure.found] == []


def test_the_leaderboards_page_is_what_is_written() -> None:
    board = tomllib.loads((PAPERS / "leaderboard" / "board.toml").read_text("utf-8"))
    found = page.json.loads((PAPERS / "leaderboard" / "board.json").read_text("utf-8"))
    assert (PAPERS / "leaderboard" / "README.md").read_text("utf-8") == leaderboard.written(board, found)


def test_a_statement_has_a_row_with_its_cells_and_its_effect() -> None:
    """The effect of a statement is a range over its cells, and a single cell is given with its interval.

    Three cells with differences from 9 to 17 points give this range. Costs are given as shares of the other's.
    """

    def cell(difference: float, unit: str, **more: Any) -> Finding:
        return Finding(
            says="-",
            panel="",
            better="A",
            than="B",
            state="holds",
            difference=difference,
            unit=unit,
            half_width=0.01,
            **more,
        )

    points = statements([cell(0.09, POINTS), cell(0.17, POINTS), cell(0.1, POINTS)])[0]
    assert page.effect(points) == f"9 to 17 {POINTS}"
    shares = [cell(3.0, "exchanges", better_mean=better, than_mean=40.0) for better in (10.0, 20.0)]
    assert page.effect(statements(shares)[0]) == "0.25 to 0.5 times the other method's cost"
    alone = [replace(share, than="A") for share in shares]
    assert page.effect(statements(alone)[0]) == "0.25 to 0.5 times the other setting's cost"
    assert page.effect(statements([cell(0.034, POINTS)])[0]) == f"3.4 ± 1 {POINTS}"
    slope = Finding(says="-", panel="", better="A", better_mean=-0.53, difference=-0.03, half_width=0.04)
    assert page.effect(statements([slope])[0]) == "slope −0.53 ± 0.04"


def test_a_page_has_a_row_a_claim_and_a_state_a_rival() -> None:
    """The page of a figure has a row for each claim, and in each panel a state for each other method."""
    figure = load(PAPERS / "simfbo" / "simfbo-2.toml")
    lines = list(page.section(figure, page.kept(figure)))
    row = next(line for line in lines if line.startswith("| SimFBO ends at a higher training accuracy"))
    assert "SimFBO / FBO-AggITD; FedNest; LFedNest | ✔✔✔ 98.2 / 88.9; 89.3; 94.9 % |" in row
    assert row.endswith("| ✔✔✔ 43.5 / 18.8; 19.9; 11.1 % |")
    assert "Here: ✔ **reproduced**; 18 of 18 comparisons hold. " + figure.found + "\n" in lines
    assert any(
        line.startswith("In “CIFAR-10, iid”: FBO-AggITD failed with 2 of 5 seeds; FedNest failed with 4 of 5 seeds; ")
        for line in lines
    )
    assert f"Revised: {figure.revised}\n" in lines


def test_methods_that_did_not_reach_a_value_share_one_note() -> None:
    found = page.kept(load(PAPERS / "fism" / "fism-3.toml"))
    assert found is not None
    assert page.notes_of(found) == [
        "Some runs of “S = 1”, of IR-IG and of “IR-IG, H counted as f” never reach the value that the claim names. "
        "Such a run counts with the cost at which it ended"
    ]


def test_the_hours_of_all_entries_count_shared_runs_once() -> None:
    """Entries that use the runs of another entry add no hours, and entries with runs on a GPU are named."""
    ids = ("fednest/fednest-3-published", "simfbo/simfbo-2", "simfbo/simfbo-3", "afbo/afbo-1")
    figures = [load(PAPERS / f"{name}.toml") for name in ids]
    said = " ".join(page.hours(figures))
    minutes = [figures[k].quick.minutes or 0 for k in (0, 1, 3)]
    assert f"take about {sum(minutes) / 60:.0f} hours" in said
    assert f"About {minutes[1] / 60:.0f} of these hours are for simfbo-2. " in said
    assert "GPU" not in " ".join(page.hours(figures[3:]))


def test_a_page_says_what_is_stale_or_was_not_played() -> None:
    figure = load(PAPERS / "simfbo" / "simfbo-5.toml")
    found = page.kept(figure)
    assert found is not None
    lines = list(page.section(figure, {**found, "played_for": "another"}))
    assert lines[2:] == [f"Here: ! **stale: run it again**. {figure.found}\n"]  # no table of claims follows
    lines = list(page.section(figure, {**found, "played_for": figure.fingerprint("quick")}))
    assert "Not run at this scale, and therefore open: CIFAR-10, iid; CIFAR-10, two shards.\n" in lines
    assert "`python -m papers simfbo-5` runs it" in list(page.section(figure, None))[2]


@pytest.mark.parametrize(
    ("seeds", "said"), [([0, 1, 2], "0, 1, 2"), ([0, 1, 2, 3], "0 to 3"), ([0, 1, 2, 3, 5, 6], "0 to 3, 5, 6")]
)
def test_seeds_that_follow_one_another_are_written_as_a_range(seeds: list[int], said: str) -> None:
    assert page.seeds_in_words({"seeds": seeds, "panels": {"iid": {}, "two shards": {}}}) == said


@pytest.mark.parametrize(("value", "said"), [(None, "–"), (1234.5, "1,234"), (-2.5e-7, "−2.5e−07"), (49.67, "49.7")])
def test_numbers_are_written_for_people(value: float | None, said: str) -> None:
    assert page.text("loss", value) == said
    assert page.text("test_accuracy", 0.5) == "50.0"
