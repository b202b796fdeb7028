"""Do CSV, JSON and LaTeX files of a comparison have its numbers, and names as they were written?"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re

import pytest
from made_up import made_up_groups, made_up_run

from fedbilevel.experiments import export
from fedbilevel.experiments.compare import RunGroup, comparison
from fedbilevel.experiments.tables import escaped, latex, markdown, number

STRANGE = ["50% of_a & b", 'a, "b"', "$x^2$ {#1} ~\\end", "[a] 1 < 2", "*star\nline"]


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def cells(table: str) -> list[list[str]]:
    """Return the cells of a tabular's rows, split as LaTeX splits them."""
    lines = [line for line in table.splitlines() if line.endswith(r"\\")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", line[:-2])] for line in lines]


def test_a_table_for_a_readme_has_the_best_in_bold_and_no_markup() -> None:
    head, rule, first, *_, last = markdown(comparison(made_up_groups(STRANGE, 1))).splitlines()
    assert head.startswith("| run | algorithm | rounds | exchanges |")
    assert rule.startswith("| --- | --- | ---: |")
    assert first.startswith("| 50% of_a &#38; b | SimFBO | 1,000 | 123,450 | 61,700.0 |")
    assert "| **6.789e-06** |" in last
    assert len({line.count("|") for line in (head, rule, first, last)}) == 1


def test_a_line_for_each_run_and_one_for_each_row_of_its_history() -> None:
    """One CSV file has a line for each run, and the other a line for each row of each history."""
    groups = made_up_groups(STRANGE, 2)
    rows = read(export.runs_csv(groups))
    assert [row["method"] for row in rows] == [name for name in STRANGE for _ in range(2)]
    assert [int(row["seed"]) for row in rows] == [0, 1] * 5
    assert float(rows[1]["final"]) == 0.0678912 + 0.0001234
    assert (rows[0]["exchanges"], rows[0]["bytes_down"], rows[0]["rounds"]) == ("123450", "1000000000", "1000")
    # the first seeds end at 6.8e-2, 6.8e-3, … and the second ones 1.2e-4 higher, so that one run ends below 1e-5
    assert [row["exchanges_to_1e-05"] for row in rows] == ["", "", "", "", "", "", "", "", "123450", ""]
    groups[0].runs[0].history.rows[1]["outer_loss"] = 3.5
    curves = read(export.curves_csv(groups))
    assert len(curves) == 5 * 2 * 2
    assert [[row[name] for name in ("method", "round", "relative_error", "outer_loss")] for row in curves[:2]] == [
        [STRANGE[0], "0", "1.0", ""],
        [STRANGE[0], "1000", "0.0678912", "3.5"],
    ]


def test_the_numbers_of_the_json_file_are_finite() -> None:
    """The JSON file has the means and deviations of all groups, and null in place of numbers that are not finite."""
    groups = made_up_groups(["a", "b"], 2)
    groups[1].runs[0].history.rows[0]["relative_error"] = math.nan
    groups[1].runs[0].summary["best"] = math.inf
    found = export.as_json(groups)
    read_back = json.loads(json.dumps(found, allow_nan=False))
    assert read_back == found
    assert (found["schema"], found["metric"], found["larger_is_better"]) == (1, "relative_error", False)
    a, b = found["methods"]
    assert a["final"]["mean"] == pytest.approx(0.0678912 + 0.0001234 / 2)
    assert a["final"]["sd"] == pytest.approx(0.0001234 / math.sqrt(2))  # two values a and b have the sd (b - a) / √2
    assert a["costs"]["exchanges"] == {"mean": 123_450, "sd": 0}
    assert [(one["target"], one["reached"], one["of"]) for one in b["targets"]] == [(0.1, 2, 2), (0.01, 2, 2)]
    assert b["best"] == {"mean": None, "sd": None}
    assert b["runs"][0]["history"][0]["relative_error"] is None
    assert b["runs"][1]["history"][1] == groups[1].runs[1].history.rows[1]


def test_a_tabular_says_when_its_letters_are_beyond_pdflatex() -> None:
    """The first line of a tabular asks for LuaLaTeX if, and only if, pdfLaTeX cannot set one of its letters.

    pdfLaTeX sets é and ·, and stops with an error at ε.
    """
    first = [latex(comparison(made_up_groups([name, "b"], 1))).splitlines()[0] for name in ("é · b_1", "ε日")]
    assert ["LuaLaTeX" in line for line in first] == [False, True]
    assert "for ε 日 LuaLaTeX" in first[1]


def test_a_tabular_has_as_many_cells_in_each_row_and_the_best_in_bold() -> None:
    table = latex(comparison(made_up_groups(STRANGE, 2)))
    head, *rows = cells(table)
    assert table.splitlines()[1] == rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}"
    assert {len(row) for row in rows} == {len(head)}
    assert len(rows) == 5
    for line in table.splitlines()[1:]:
        plain = re.sub(r"\\[\\{}%$&#_]", "", line)
        assert plain.count("{") == plain.count("}")
        assert plain.count("$") % 2 == 0
        assert not set("%#~") & set(plain)
    assert all(ord(char) < 128 for char in table)
    column = head.index("final relative error")
    # first row: 0.0678912 and 0.0680146 have the mean 0.0679529 and the sd 0.0001234 / √2 = 0.0000873
    # last row: 6.789e-6 and 1.302e-4
    assert rows[0][column] == r"$0.06795 \pm 0.00009$"
    assert rows[-1][column] == r"$\mathbf{(6.849 \pm 8.726) \times 10^{-5}}$"
    assert sum("mathbf" in row[column] for row in rows) == 1
    all_of_three, some_of_two = (head.index(f"exchanges to $10^{{{power}}}$") for power in (-3, -4))
    assert [row[all_of_three] for row in rows] == ["--", "--", *[r"\textbf{123,450}"] * 3]
    assert [row[some_of_two] for row in rows] == ["--", "--", "--", *["123,450 (1 of 2)"] * 2]


def test_accuracies_are_in_per_cent_and_a_level_is_never_the_best() -> None:
    """Accuracies are in per cent, and a pooled run, which is only a level to compare with, is never in bold."""

    def group(name: str, value: float, pooled: bool = False) -> RunGroup:
        run = made_up_run(name, 0, [0.1, value], metric="test_accuracy")
        run.spec.run = dataclasses.replace(run.spec.run, pooled=pooled)
        return RunGroup(name, [run])

    groups = [group("a", 0.9123), group("b", 0.91231), group("all", 0.99, pooled=True)]
    head, *rows = cells(latex(comparison(groups)))
    column = head.index(r"final test accuracy (\%)")
    assert [row[column] for row in rows] == [r"$\mathbf{91.23}$", r"$\mathbf{91.23}$", "$99.00$"]


def test_the_costs_of_several_runs_side_by_side() -> None:
    """The table has the megabytes of both directions and the largest ε of the seeds, and marks the least cost as best.

    After each 123,450 exchanges, a run has sent 1,000 MB down and 60,700 MB up.
    """
    quick, slow = ([made_up_run("a", seed, errors) for seed in (0, 1)] for errors in ([1.0, 5e-4], [1.0, 0.5, 5e-4]))
    for run, epsilon in zip(quick, (2.0, 1.0), strict=True):
        run.summary["last_row"]["epsilon"] = epsilon
    columns = {
        column.heading: column.cells for column in comparison([RunGroup("a", quick), RunGroup("b", slow)]).columns
    }
    assert [list(cell.values) for cell in columns["MB"]] == [[61_700], [123_400]]
    assert [list(cell.values) for cell in columns["ε"]] == [[2.0], []]
    to_target = columns["exchanges\nto 0.001"]
    assert [(str(cell), cell.best) for cell in to_target] == [("123,450", True), ("246,900", False)]


def test_a_number_in_a_paper() -> None:
    """A number has four digits in LaTeX, its sd ends at the same decimal, and extreme numbers have powers of 10."""
    assert number(0.0) == "$0.000$"
    assert number(1234.5678, 12.3) == r"$1235 \pm 12$"
    assert number(1.5e-5) == r"$1.500 \times 10^{-5}$"
    assert number(-2.5e6, 1e5) == r"$(-2.500 \pm 0.100) \times 10^{6}$"
    assert number(math.nan) == "--"


def test_a_text_is_set_as_it_is() -> None:
    """Special characters of LaTeX are escaped, so that a text appears as it was written."""
    assert escaped("50%_&$#{}") == r"50\%\_\&\$\#\{\}"
    assert escaped("~^\\") == r"\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert escaped("[a]") == "{[}a]"  # after \\ LaTeX would take [a] for a length
    assert escaped("a\n b") == "a b"
