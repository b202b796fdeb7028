"""Is every number of a table complete on a narrow terminal? Columns without room are named, and texts are wrapped."""

from __future__ import annotations

import io
import re

import pytest
from made_up import made_up_groups
from rich.console import Console

from fedbilevel.experiments import names, tables
from fedbilevel.experiments.compare import comparison_table
from fedbilevel.experiments.tables import Cell, Column, Table, terminal


def fitted(columns: dict[str, list[str]], width: int, texts: tuple[str, ...] = (), goes: tuple[str, ...] = ()):
    """Return a table of words as a terminal shows it; the columns named in `goes` are left out first."""
    order = {name: place for place, name in enumerate(goes)}
    made = [Column(name, [*map(Cell, of)], order.get(name), is_text=name in texts) for name, of in columns.items()]
    return terminal(Table("t", made), width)


WIDTHS = [*range(40, 90, 4), 91, 110, 141, 200]
NAMES = ["sim", "a name that has several words", "[bold]no markup[/bold]", "a-name-of-more-than-twenty-letters"]


def shown(table, width: int | None, terminal: bool = True) -> list[str]:
    """Return the lines of a table on a terminal, or in a file."""
    console = Console(width=width, file=io.StringIO(), force_terminal=terminal, color_system=None)
    console.print(table)
    return console.file.getvalue().splitlines()


def columns_of(table) -> dict[str, list[str]]:
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def in_the_caption(table) -> list[str]:
    return str(table.caption).partition(": ")[2].split(", ") if table.caption else []


def holds(lines: list[str], cell: str) -> bool:
    """Return whether a line contains the whole cell, neither cut nor folded."""
    return any(re.search(rf"(^|\s\s|│ ){re.escape(cell)}(\s|$)", line) for line in lines)


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("terminal", [True, False])
def test_no_number_of_a_comparison_is_cut(seeds, terminal) -> None:
    groups = made_up_groups(NAMES, seeds)
    everything = columns_of(comparison_table(groups))
    for width in WIDTHS:
        table = comparison_table(groups, width)
        lines = shown(table, width, terminal)
        columns = columns_of(table)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        left_out = [name for name in everything if name not in columns]
        assert sorted(name.replace("\n", " ") for name in left_out) == sorted(in_the_caption(table))
        assert {"run", "final"} <= columns.keys()
        for name, cells in columns.items():
            assert cells == everything[name]
            if name not in ("run", "algorithm", "task"):
                assert [cell for cell in cells if not holds(lines, cell)] == []
        letters = "".join(lines).replace(" ", "")
        assert all(char in letters for name in NAMES for char in name if char != " ")
    assert in_the_caption(table) == (["hvps", "gradients"] if seeds == 3 else [])  # left out so that names are whole


def test_the_least_important_columns_go_first_then_texts_fold_and_numbers_last() -> None:
    """If a terminal is narrow, the least important columns are left out, then texts are wrapped, and numbers last."""
    columns = {"name": ["of two words"], "a": ["123,456"], "b": ["0.001 ± 0.002"], "c": ["7"]}
    seen = {}
    for width in range(60, 5, -1):
        table = fitted(columns, width, texts=("name",), goes=("b", "a"))
        seen[tuple(columns_of(table))] = width
        assert max(map(len, shown(table, width))) <= width
    # characters of cells, then 3 for each column (a space at each side and a line), and 1 for the line at the end
    whole, one_less = 12 + 7 + 13 + 1 + 4 * 3 + 1, 12 + 7 + 1 + 3 * 3 + 1
    assert list(seen.items())[:2] == [(("name", "a", "b", "c"), whole), (("name", "a", "c"), one_less)]
    assert list(seen)[2] == ("name", "c")
    lines = shown(fitted({"a": ["1234567890"], "b": ["9"]}, 12), 12)
    assert max(map(len, lines)) <= 12
    assert sorted(re.sub(r"\D", "", "".join(lines))) == sorted("12345678909")


def test_a_word_is_broken_only_where_a_column_could_go_no_more() -> None:
    """A word is broken only if no other column is left that could be left out."""
    columns = {"name": ["a-name-of-more-than-twenty-letters of it"], "a": ["123,456"], "b": ["0.001"]}
    whole = {}
    for width in range(60, 20, -1):
        table = fitted(columns, width, texts=("name",), goes=("b", "a"))
        whole[width] = any("a-name-of-more-than-twenty-letters" in line for line in shown(table, width))
        assert whole[width] or len(table.columns) == 1
    assert min(width for width in whole if whole[width]) == 34 + 3 + 1  # letters, column and line, as above


def test_a_list_goes_on_below_itself_on_a_terminal_and_has_a_line_for_each_in_a_file(monkeypatch) -> None:
    """A list is wrapped to the width of a terminal. In a file, each entry has one line."""
    one_each = names.listed("algorithm").splitlines()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = names.listed("algorithm").splitlines()
    assert max(map(len, lines)) <= 80 < max(map(len, one_each))
    assert " ".join(" ".join(lines).split()) == " ".join(" ".join(one_each).split())


@pytest.mark.parametrize("terminal", [True, False])
def test_no_number_of_the_seeds_and_of_a_run_is_cut(terminal) -> None:
    summaries = [run.summary for run in made_up_groups(["x"], 3)[0].runs]
    for width in WIDTHS:
        table = tables.seeds_table(summaries, width)
        lines = shown(table, width, terminal)
        assert [cell for cells in columns_of(table).values() for cell in cells if not holds(lines, cell)] == []
        assert len(table.columns) + len(in_the_caption(table)) == 4
        assert max(map(len, lines)) <= width
        lines = shown(tables.summary_table(summaries[0]), width, terminal)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        numbers = ("123,450", "1,000.00", "60,700.00", "9,876,500", "1,234,500", "500,000", "0.06789", "1234.5")
        assert [number for number in numbers if not any(number in line for line in lines)] == []


def test_the_table_of_a_run_has_the_bytes_down_before_the_bytes_up() -> None:
    lines = shown(tables.summary_table(made_up_groups(["x"], 1)[0].runs[0].summary), 200, terminal=False)
    assert any(re.search(r"down / up .* 1,000\.00 / 60,700\.00 MB", line) for line in lines)


def test_words_in_brackets_are_no_markup() -> None:
    summary = {**made_up_groups(["x"], 1)[0].runs[0].summary, "stopped": "[red]word[/red] [x", "task": "[blue]t[/blue]"}
    text = "\n".join(shown(tables.summary_table(summary), 80))
    assert "[red]word[/red] [x" in text
    assert "[blue]t[/blue]" in text
