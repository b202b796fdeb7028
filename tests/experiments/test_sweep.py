"""Does `fedbilevel sweep` run every point once, also after interruptions, and choose the best one?"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import sys
from types import SimpleNamespace

import pytest
from command_line import outcome, survived, without_remarks
from test_printed_tables import WIDTHS, holds, shown

from fedbilevel import cli, experiments
from fedbilevel.engines import lock
from fedbilevel.engines.history import History
from fedbilevel.errors import ConfigurationError, NumericalError
from fedbilevel.experiments import configure, experiment, runner
from fedbilevel.experiments.sweep import chosen_metric, parse_values, point_name, sweep_table
from fedbilevel.sweeps import played, product
from refusals import refuses
from representatives import slow_but

SMALL = ["quadratic", "--set", "clients=3", "--set", "samples=[2, 2]", "--set", "dim_y=2", "--rounds", "4"]
GRID = ["--grid", "server_lr.x=0.05,0.1", "--grid", "cohort=2,9", "--seeds", "0,1"]
"""Four points with two seeds. Two points fail in their runs, since a cohort of nine is more than three clients."""
FILES = ("sweep.csv", "chosen.toml")


class Terminal(io.StringIO):
    """A text stream that counts as a terminal."""

    def isatty(self) -> bool:
        return True


def swept(*arguments: object) -> int:
    return cli.main(["sweep", *map(str, arguments), "--quiet"])


def contents(folder) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def lines(folder) -> list[dict[str, str]]:
    with open(folder / "sweep.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def place(folder, x: float, seed: int):
    return folder / f"server_lr.x-{x}-cohort-2" / f"seed-{seed}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the folder of a sweep of four points with two seeds."""
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    assert swept(*SMALL, *GRID, "--out", folder) == 0
    return folder


@pytest.mark.slow
def test_the_csv_has_a_line_for_each_run(folder) -> None:
    rows = lines(folder)
    points = [(x, cohort, seed) for x in ("0.05", "0.1") for cohort in "29" for seed in "01"]
    assert [(row["server_lr.x"], row["cohort"], row["seed"]) for row in rows] == points
    assert "seconds" not in rows[0]
    errors = {row["cohort"]: row["error"] for row in rows}
    assert errors["2"] == ""
    assert "cohort = 9 is not allowed" in errors["9"]
    found = experiments.load_run(place(folder, 0.1, 1)).summary["last_row"]
    assert float(rows[5]["relative_error"]) == found["relative_error"]


def test_what_is_swept_can_be_watched(folder, run) -> None:
    assert json.loads((folder / "sweep.json").read_text()) == {"select": "relative_error", "runs": 8}
    code, shown_text, _ = run("watch", folder)
    assert code == 0
    assert "4 of 4 runs have ended" in shown_text  # the other four were refused, and have no folder
    ends = {
        x: sum(float(row["relative_error"]) for row in lines(folder) if row["server_lr.x"] == x and not row["error"])
        for x in ("0.05", "0.1")
    }
    assert f"server_lr.x-{min(ends, key=ends.__getitem__)}-cohort-2, relative_error" in shown_text


def test_the_chosen_spec_is_that_of_the_best_point_and_run_to_the_same_numbers(folder, tmp_path) -> None:
    finals = {
        x: [experiments.load_run(place(folder, x, seed)).summary["final"] for seed in (0, 1)] for x in (0.05, 0.1)
    }
    best = min(finals, key=lambda x: sum(finals[x]))
    text = (folder / "chosen.toml").read_text(encoding="utf-8")
    assert f"server_lr.x = {best}, cohort = 2." in text
    assert "# 8 runs (4 points × 2 seeds), 4 failed; in all 16 rounds" in text
    assert "fedbilevel run --spec chosen.toml --seeds 0,1" in text
    cli.main(["run", "--spec", str(folder / "chosen.toml"), "--seed", "1", "--out", str(tmp_path / "run"), "--quiet"])
    assert outcome(tmp_path / "run") == outcome(place(folder, best, 1))


def test_options_and_points_win_against_the_spec_file_of_a_sweep(monkeypatch, tmp_path) -> None:
    """For a point of a sweep, values of the point win against options, and options win against the spec file."""
    seen = []

    def look(spec_of, grid, folder, *, seeds, **given):
        seen.append((spec_of({"local_steps": 7}), dict(grid), seeds))
        raise ConfigurationError("enough is seen")

    monkeypatch.setattr("fedbilevel.experiments.sweep.sweep_specs", look)
    file = ["rounds=9", "run.cohort=2", "local_steps=3", "task.dim_y=4", "task.clients=5"]
    (tmp_path / "mine.toml").write_text(configure(task="quadratic", settings=file).to_toml())
    options = ["--rounds", 6, "--set", "dim_y=2", "--grid", "local_steps=7,8", "--seeds", "3,1"]
    assert swept(tmp_path / "mine.toml", *options, "--out", tmp_path / "out") == 2
    ((spec, grid, seeds),) = seen
    assert (grid, seeds) == ({"local_steps": [7, 8]}, [3, 1])
    assert (spec.run.rounds, spec.run.cohort, spec.algorithm.fields["local_steps"]) == (6, 2, 7)
    assert (spec.task.fields["dim_y"], spec.task.fields["clients"]) == (2, 5)


@pytest.fixture
def copy(folder, tmp_path):
    """Return a copy of that folder without the table and the chosen spec."""
    made = shutil.copytree(folder, tmp_path / "copy")
    for name in FILES:
        (made / name).unlink()
    return made


def test_what_is_finished_is_read_and_what_is_missing_is_played(folder, copy, monkeypatch) -> None:
    calls, real = [], experiment.solve
    monkeypatch.setattr(experiment, "solve", lambda *args, **given: calls.append(given["key"]) or real(*args, **given))
    shutil.rmtree(place(copy, 0.1, 1))
    for _ in range(2):
        assert swept(*SMALL, *GRID, "--out", copy) == 0
        assert calls == [1]
        assert contents(copy) == contents(folder)
    assert swept(*SMALL, "--grid", "server_lr.x=0.02,0.05,0.1", *GRID[2:], "--out", copy) == 0
    assert calls == [1, 0, 1]
    assert [row["server_lr.x"] for row in lines(copy)] == [x for x in ("0.02", "0.05", "0.1") for _ in range(4)]


def test_on_a_terminal_the_line_of_a_run_stands_above_the_bar_and_does_not_cut_it(copy, monkeypatch) -> None:
    """On a terminal, the bar itself prints the line of a finished run, above the bar and into the same stream.

    Otherwise the line would follow the bar, and a part of the bar would remain.
    """
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    shutil.rmtree(place(copy, 0.1, 1))
    assert cli.main(["sweep", *SMALL, *GRID, "--out", str(copy)]) == 0
    assert "4/4 rounds" in err.getvalue()
    assert re.search(r"\x1b\[2K(\x1b\[0m)?server_lr\.x-0\.1-cohort-2/seed-1  ", err.getvalue())
    assert "server_lr.x-0.1-cohort-2/seed-1  " not in out.getvalue()


def test_a_smaller_grid_says_how_many_runs_are_beside_its_own(copy, run) -> None:
    """A sweep over a smaller grid says how many other runs its folder has.

    A reader of the result then knows that more points were tried than this grid has.
    """
    code, printed, _ = run("sweep", *SMALL, "--grid", "server_lr.x=0.05", *GRID[2:4], "--seeds", "0", "--out", copy)
    assert code == 0
    assert "3 other runs in this folder" in " ".join(printed.split())
    assert "2 runs (2 points × 1 seed), 1 failed" in contents(copy)["chosen.toml"]
    assert "; 3 other runs in this folder." in contents(copy)["chosen.toml"]


@pytest.mark.parametrize("number", slow_but(signal.SIGINT, of=[signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_sweep_goes_on_to_the_same_files(number, folder, tmp_path, monkeypatch, run) -> None:
    """An interrupted sweep continues with the same command, and ends with the files of an undisturbed sweep.

    The interruption comes within a run, which continues from its checkpoint.
    """
    real = runner.Scribe.__call__

    def interrupted(self, result, row) -> None:
        if row and row["round"] == 0 and self.spec.run.seed == 1:
            os.kill(os.getpid(), number)
        real(self, result, row)

    part = tmp_path / "part"
    with monkeypatch.context() as patch:
        patch.setattr(runner.Scribe, "__call__", interrupted)
        code, _, error = run("sweep", *SMALL, *GRID, "--out", part, "--quiet")
    words = f"fedbilevel: interrupted; continue with the same command and --out {part}"
    assert (code, without_remarks(error).strip()) == (128 + number, words)
    assert not (part / "sweep.csv").exists()
    assert swept(*SMALL, *GRID, "--out", part) == 0
    assert contents(part) == contents(folder)


def test_a_diverged_run_is_a_row_and_not_played_again(tmp_path, monkeypatch) -> None:
    given = [*SMALL, "--grid", "server_lr.y=0.05,1e200", "--out", tmp_path]
    assert swept(*given) == 0
    before = contents(tmp_path)
    good, bad = lines(tmp_path)
    assert "not finite" in bad["error"]
    assert (good["round"], good["exchanges"]) == ("4", "4")
    assert (bad["round"], bad["exchanges"]) == ("2", "2")  # the second round fails, and its exchange is counted
    assert int(bad["bytes_down"]) == int(good["bytes_down"]) // 2
    assert "in all 6 rounds, 6 exchanges" in before["chosen.toml"]
    monkeypatch.setattr(experiment, "solve", None)
    assert swept(*given) == 0
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_where_every_run_diverges_nothing_is_chosen(tmp_path, run) -> None:
    code, printed, error = run("sweep", *SMALL, "--grid", "server_lr.y=1e190,1e200", "--out", tmp_path)
    assert (code, error.strip()) == (
        3,
        "fedbilevel: every point failed: nothing is chosen; give other values of server_lr.y",
    )
    assert printed.count("not finite") >= 2
    assert not (tmp_path / "chosen.toml").exists()


def test_a_run_that_another_process_plays_is_waited_for(folder, copy, monkeypatch) -> None:
    """A sweep makes its other runs while another process has locked one of them, and then waits for this run.

    Here the other process releases the run without having finished it.
    """
    shutil.rmtree(place(copy, 0.05, 0))
    held = lock.exclusive(experiments.Folder(place(copy, 0.05, 0)).lock, copy)
    held.__enter__()
    waits = []
    monkeypatch.setattr("fedbilevel.sweeps.time.sleep", lambda _: waits.append(held.__exit__(None, None, None)))
    assert swept(*SMALL, *GRID, "--out", copy) == 0
    assert len(waits) == 1
    assert contents(copy) == contents(folder)


@pytest.mark.slow
def test_two_processes_share_the_runs_and_one_survives_the_other(tmp_path, start) -> None:
    """Two processes share the runs of a sweep, and when one of them is killed, the other completes the sweep.

    The first process is killed when the third run has a checkpoint.
    """
    long = ["quadratic", "--set", "clients=3", "--rounds", "8000", "--set", "run.eval_every=2000"]
    given = [*long, "--grid", "server_lr.x=0.001,0.002,0.003", "--seeds", "0,1"]
    whole = start("sweep", *given, "--out", tmp_path / "whole")
    _, said = whole.communicate(timeout=300)
    assert whole.returncode == 0, said
    first, second = (start("sweep", *given, "--out", tmp_path / "part") for _ in range(2))
    survived(first, second, tmp_path / "part" / "server_lr.x-0.003" / "seed-0" / "checkpoint.npz")
    assert contents(tmp_path / "part") == contents(tmp_path / "whole")


def test_another_setting_in_the_folder_is_named_and_nothing_is_played(copy, run, monkeypatch) -> None:
    monkeypatch.setattr(experiment, "solve", None)
    code, _, error = run("sweep", *SMALL[:-1], 5, *GRID, "--out", copy)
    assert code == 2
    assert "seed-0 has another run (run.rounds: 4 there, 5 now): choose another folder" in error


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("cg, neumann", ["cg", "neumann"]),
        ("[1, 0.5],[1]", [[1, 0.5], [1]]),
        ('{name = "adam", b1 = 0.5},sgd', [{"name": "adam", "b1": 0.5}, "sgd"]),
        ("'a,b',none", ["a,b", "none"]),
    ],
)
def test_commas_within_a_value_do_not_end_it(text, values) -> None:
    assert parse_values(text) == values


@pytest.mark.parametrize("text", ["[1, 2", "0.1;0.2", "{a = 1", "0.1,"])
def test_what_is_no_value_is_refused(text) -> None:
    with refuses("value", fact="TOML"):
        parse_values(text)


def test_a_folder_is_named_by_the_values_and_no_two_alike() -> None:
    """The name of a folder contains the values of its point, and different points have different names."""
    assert point_name({"server_lr.x": 0.01, "local_steps": 5}) == "server_lr.x-0.01-local_steps-5"
    assert point_name({"stream": True, "solver": "cg"}) == "stream-true-solver-cg"
    odd = [{"a": [1, 2]}, {"a": [1, 3]}, {"a": "1, 2"}, {"a": "x/y"}, {"a": "x y"}, {"a": ".."}, {"a": "b" * 300}]
    names = [point_name(point) for point in odd]
    assert len(set(names)) == len(odd)
    assert all(len(name) < 120 and os.sep not in name for name in names)


@pytest.mark.slow
def test_lists_and_tables_are_values(tmp_path) -> None:
    grid = ["--grid", "samples=[2, 2]", "--grid", 'server_optimizer={name = "adam", b1 = 0.5},sgd']
    assert swept("quadratic", "--set", "clients=3", "--rounds", "1", *grid, "--out", tmp_path) == 0
    rows = lines(tmp_path)
    assert [row["error"] for row in rows] == [""] * 2
    assert rows[0]["samples"] == "[2, 2]"


def metric_of(select, *, metrics=("test_accuracy",), holdout=0.0, on_test=False) -> str:
    fields = {} if holdout is None else {"holdout": holdout}
    spec = SimpleNamespace(
        task=SimpleNamespace(name="made_up", fields=fields), run=SimpleNamespace(metrics_per_client=True)
    )
    task = SimpleNamespace(clients=(), metrics=dict.fromkeys(metrics), metrics_per_client={"client_accuracy": None})
    return chosen_metric(spec, select, on_test, lambda spec: task)


def test_only_a_holdout_decides_unless_that_is_said() -> None:
    """A sweep chooses by data that is held out, and by test data only if this is asked for."""
    assert metric_of(None, metrics=["validation_accuracy"], holdout=0.2) == "validation_accuracy"
    assert metric_of("outer_loss") == "outer_loss"
    assert metric_of("client_accuracy.worst") == "client_accuracy.worst"
    assert metric_of("test_accuracy", on_test=True) == "test_accuracy"
    for select in (None, "test_accuracy"):
        with refuses("metric to select on", "test_accuracy", "--set task.holdout=0.2 "):
            metric_of(select)
    with refuses("metric to select on", "validation_accuracy", "--set task.holdout=0.2 "):
        metric_of("validation_accuracy")
    with refuses("metric to select on", "test_accuracy", "client_accuracy.mean or "):
        metric_of("test_accuracy", holdout=None)


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_no_number_of_the_table_is_cut(seeds) -> None:
    grid = {"algorithm.server_lr.x": [0.000123, 0.1], "hypergradient.solver": ["cg", "neumann"], "cohort": [3]}
    points = product(grid)

    def history(number: int, seed: int) -> History:
        if number == 3:
            raise NumericalError("round 9, phase local_updates: outer_loss is not finite; smaller steps may help")
        row = {"round": 123_456, "exchanges": 1_234_567, "relative_error": 0.0012345 * (1 + number) + 1e-5 * seed}
        return History([row])

    player = SimpleNamespace(make=lambda point: point, run=lambda number, point, seed, display: history(number, seed))
    found = played(player, points, seeds, "relative_error")
    numbers = {"algorithm.server_lr.x": "0.000123", "rounds": "123,456", "exchanges": "1,234,567"}
    for width in WIDTHS:
        table = sweep_table(found, width)
        printed = shown(table, width)
        assert max(map(len, printed)) <= width
        assert "…" not in "".join(printed)
        columns = {str(column.header).replace("\\", ""): list(column.cells) for column in table.columns}
        assert {"relative_error", *found.fields, "failed"} <= columns.keys()
        gone = str(table.caption).partition("on a wider terminal also: ")[2].partition("\n")[0]
        for name, number in numbers.items():
            assert (name in columns) != (name in gone.split(", "))
            if width >= 100 and name in columns:
                assert holds(printed, number)
    assert "smaller is better" in str(table.title)
    assert f"{4 * len(seeds)} runs" in str(table.caption)
