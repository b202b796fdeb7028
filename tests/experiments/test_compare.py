"""Does a comparison find all runs, count each once, and show their numbers correctly side by side?"""

from __future__ import annotations

import json
import re
import shutil

import pytest

from fedbilevel import experiments
from fedbilevel.display import curves
from fedbilevel.engines.history import History
from fedbilevel.experiments import compare, export, tables
from fedbilevel.experiments.compare import common_targets, comparison_table, default_panels, load_groups
from refusals import ANY, refuses
from run_folders import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with three seeds of SimFBO and one of ShroFBO on the quadratic task."""
    root = tmp_path_factory.mktemp("runs")
    for name, algorithm, seeds in (("sim", "simfbo", (0, 1, 2)), ("shro", "shrofbo", (0,))):
        for seed in seeds:
            spec = experiments.configure(task="quadratic", algorithm=algorithm, settings=["rounds=60"])
            spec = spec.replace(run={"seed": seed}, task={"seed": seed})
            experiments.run(spec, root / name / f"seed-{seed}", plot=False)
    return root


def test_seeds_of_one_spec_form_one_group_in_which_each_run_counts_once(runs) -> None:
    """Runs of one spec with different seeds are one group, in which a run that is named several times counts once."""
    again = [runs / "sim" / "seed-0", runs / "shro" / ".." / "sim" / "seed-1"]
    groups = load_groups([runs / "sim", *again, runs / "shro" / "seed-0"])
    assert [(group.label, len(group.runs)) for group in groups] == [("sim (3 seeds)", 3), ("shro", 1)]


@pytest.mark.parametrize("named", [".", "*", "*/seed-*"])
def test_runs_are_found_at_any_depth(runs, named, tmp_path, run) -> None:
    """A comparison finds runs one or two levels below a folder, and ignores other files there.

    `compare --out` and `run --seeds` write such folders, with pictures and tables beside the runs.
    """
    folder = tmp_path / "c"
    shutil.copytree(runs, folder)
    (folder / "comparison.png").touch()
    (folder / "comparison.csv").touch()
    (folder / "sim" / "seed-2" / "summary.json").unlink()
    if named != ".":
        shutil.rmtree(folder / "sim" / "seed-2")
    groups = load_groups([folder] if named == "." else sorted(folder.glob(named)))
    assert {group.label for group in groups} == {"sim (2 seeds)", "shro"}
    if named == ".":
        code, shown, error = run("compare", folder, "--out", tmp_path / "c.svg")
        assert code == 0
        assert error == f"fedbilevel: left out, not finished: {folder / 'sim' / 'seed-2'}\n"
        assert all(words in shown for words in ("sim (2 seeds)", "ShroFBO", "±", "to 0.1"))
        assert (tmp_path / "c.svg").is_file()


def test_runs_are_labelled_columns_and_levels_chosen(tmp_path, run) -> None:
    """Labels, columns and levels of a table can be chosen, and unknown ones are refused with the nearest name.

    The relative error of these runs is 1, 1/11 and 1/21 after 0, 10 and 20 exchanges.
    """
    for name, steps in (("simfbo", 5), ("mine", 1)):
        write_run(tmp_path / name, experiments.configure(task="quadratic", settings=[f"local_steps={steps}"]))
    groups = load_groups([tmp_path / "simfbo", tmp_path / "mine"])
    assert compare.legend(groups) == ["SimFBO", "mine, SimFBO"]
    look = compare.Look({"mine": "Ours & more"}, ["final", "exchanges to 0.5", "MB"], [0.5])
    groups = load_groups([tmp_path / "simfbo", tmp_path / "mine"], look)
    assert compare.legend(groups) == ["SimFBO", "Ours & more"]
    table = compare.comparison(groups)
    assert [column.heading for column in table.columns if column.paper] == ["", "final", "exchanges\nto 0.5", "MB"]
    assert "SimFBO & " in tables.latex(table)
    assert r"Ours \& more & " in tables.latex(table)
    assert "exchanges to 0.5 & MB" in tables.latex(table)
    chosen = ["--label", "simfbo=A", "--columns", "final", "--out", tmp_path / "c.png"]
    code, shown, _ = run("compare", tmp_path / "simfbo", tmp_path / "mine", *chosen)
    assert (code, "exchanges" in shown) == (0, False)
    for wrong, words in (
        (["--label", "sim=A"], "unknown run 'sim' in labels; did you mean 'simfbo'?"),
        (["--label", "A"], "'A' is not of the form NAME=TEXT"),
        (["--columns", "finl"], "unknown column 'finl'; did you mean 'final'?"),
        (["--levels", "low"], "'low' is not a positive number"),
    ):
        code, _, error = run("compare", tmp_path / "simfbo", *wrong, "--out", tmp_path / "c.png")
        assert (code, words in error) == (2, True)


def test_groups_of_one_name_are_told_apart_and_no_run_counts_twice(runs, tmp_path) -> None:
    """Groups of the same name get different labels, and two runs of the same spec and seed are refused."""
    for name, condition in (("a", "2.0"), ("b", "3.0")):
        shutil.copytree(runs / "shro", tmp_path / name / "shro")
        spec = tmp_path / name / "shro" / "seed-0" / "spec.toml"
        spec.write_text(re.sub(r"condition = \S+", f"condition = {condition}", spec.read_text()))
    assert [group.label for group in load_groups([tmp_path, runs / "sim"])] == ["a/shro", "b/shro", "sim (3 seeds)"]
    shutil.copytree(runs / "shro", tmp_path / "again")
    with refuses("runs", [str(runs / "shro" / "seed-0"), str(tmp_path / "again" / "seed-0")]):
        load_groups([runs / "shro", tmp_path / "again"])


def test_a_run_that_a_folder_has_twice_is_left_out(runs, tmp_path, run) -> None:
    """A run that a folder contains twice is counted once, and the command names the copy that it leaves out.

    Such copies occur if a search draws a point again, or if a later grid has fewer fields and therefore other names of
    folders. If the user names both copies, this is an error.
    """
    for name in ("a", "b"):
        shutil.copytree(runs / "shro", tmp_path / "dup" / name)
    code, _, error = run("compare", tmp_path / "dup", "--out", tmp_path / "c.svg")
    again = f"left out, the same run as another there: {tmp_path / 'dup' / 'b' / 'seed-0'}"
    assert (code, error) == (0, f"fedbilevel: {again}\n")
    assert [run.folder.path.parent.name for group in load_groups([tmp_path / "dup"]) for run in group.runs] == ["a"]
    assert run("report", tmp_path / "dup", "--out", tmp_path / "page.html")[0] == 0
    assert again.removeprefix("left out") in (tmp_path / "page.html").read_text(encoding="utf-8")
    with refuses("runs", [str(tmp_path / "dup" / one / "seed-0") for one in "ab"]):
        load_groups([tmp_path / "dup" / "a", tmp_path / "dup" / "b"])


@pytest.mark.drawn
def test_files_for_a_paper_stand_beside_the_picture(runs, tmp_path, run) -> None:
    paper = ["--panel", "megabytes", "--size", "3.3x2.6", "--csv", "--json", "--latex"]
    code, shown, error = run("compare", runs, "--out", tmp_path / "fig.pdf", *paper)
    assert (code, error) == (0, "")
    names = ["fig-curves.csv", "fig.csv", "fig.json", "fig.pdf", "fig.tex"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [name for name in names if str(tmp_path / name) not in shown] == []
    assert (tmp_path / "fig.pdf").read_bytes().startswith(b"%PDF-")
    assert re.search(rb"/MediaBox \[ ?0 0 237\.6 187\.2 ?\]", (tmp_path / "fig.pdf").read_bytes())  # 72 points an inch


def test_operations_are_shown_where_every_run_knows_them(runs, tmp_path) -> None:
    """A comparison shows floating-point operations if all runs counted them, and otherwise evaluations."""
    for name, new in (("sim", "sim"), ("shro", "older")):
        shutil.copytree(runs / name / "seed-0", tmp_path / new)
    known = load_groups([tmp_path / "sim", runs / "shro"])
    for name in ("summary.json", "history.jsonl"):  # like runs from before operations were counted
        file = tmp_path / "older" / name
        file.write_text(re.sub(r'"flops": \d+,\s*', "", file.read_text()))
    for groups in (known, load_groups([tmp_path / "sim", tmp_path / "older"])):
        counted = groups is known
        assert ("GFLOP" in [column.header for column in comparison_table(groups).columns]) == counted
        assert default_panels(groups)[2] == ("gflop" if counted else "evaluations")


def test_operations_in_three_digits_or_more() -> None:
    flops = (0, 737_000, 911_428_080, 123_456_789_000_000)
    assert list(map(curves.gflop, flops)) == ["0", "0.000737", "0.911", "123,457"]


def test_milestones_and_the_exchanges_to_them(runs) -> None:
    """The cost to reach a level is read at the first row that reaches it, and is unknown if no row does."""
    rising = History(
        [{"round": r, "exchanges": 3 * r, "accuracy": a} for r, a in ((0, 0.1), (10, 0.91), (20, 0.89), (30, 0.96))]
    )
    assert compare.cost_to(rising, "accuracy", 0.9) == 30
    assert compare.cost_to(rising, "accuracy", 0.97) is None
    assert common_targets(load_groups([runs / "sim"]), "relative_error")[0] == 0.1
    assert str(tables.Cell(values=[0.9, 0.92], kind="accuracy")) == "91.00 ± 1.41 %"


def test_runs_that_measure_different_things_or_disagree_on_the_better_way_are_refused(tmp_path) -> None:
    spec = experiments.configure(task="quadratic", settings=["rounds=20"])
    write_run(tmp_path / "a", spec, larger=True)
    other = write_run(tmp_path / "b", spec.replace(run={"seed": 1}), larger=False)
    with refuses("metrics of the runs", ["relative_error, better when larger", "relative_error"]):
        load_groups([tmp_path])
    for file in (other / "summary.json", other / "history.jsonl"):
        file.write_text(file.read_text().replace('"relative_error"', '"test_loss"'))
    with refuses("metrics of the runs", ["relative_error, better when larger", "test_loss"]):
        load_groups([tmp_path])


@pytest.mark.parametrize("declared", [True, False])
def test_the_better_way_is_what_was_declared_when_the_run_was_made(declared, tmp_path) -> None:
    """The declaration in the run decides whether larger is better, and the metric's name does not.

    The metric falls from 1 to 1/31 and 1/21. The best value is therefore 1 if larger was declared better.
    """
    spec = experiments.configure(task="quadratic", settings=["rounds=30"])
    write_run(tmp_path / "long", spec, rounds=30, larger=declared)
    write_run(tmp_path / "short", spec.replace(run={"rounds": 20}), rounds=20, larger=declared)
    groups = load_groups([tmp_path / "long", tmp_path / "short"])
    assert [group.values("best") for group in groups] == ([[1.0], [1.0]] if declared else [[1 / 31], [1 / 21]])
    assert export.as_json(groups)["larger_is_better"] is declared
    row = tables.latex(compare.comparison(groups)).splitlines()[5 + declared]
    assert row.startswith("short" if declared else "long")
    assert row.count(r"$\mathbf{") == 2  # final and best
    assert bool(common_targets(groups, "relative_error")) is not declared


def test_a_summary_may_say_no_better_way_and_then_the_names_is_taken_but_not_a_wrong_one(tmp_path) -> None:
    """If a summary does not say whether larger is better, the metric's name decides. A damaged statement is refused."""
    place = write_run(tmp_path / "a", experiments.configure(task="quadratic", settings=["rounds=20"]))
    summary = json.loads((place / "summary.json").read_text())
    assert summary.pop("larger_is_better") == {}
    (place / "summary.json").write_text(json.dumps(summary))
    assert not load_groups([place])[0].larger_is_better
    (place / "summary.json").write_text(json.dumps(summary | {"larger_is_better": {"m": 1}}))
    with refuses("", fact="larger_is_better", where=str(place / "summary.json")):
        load_groups([place])


def test_an_unfinished_run_and_a_folder_of_something_else_are_refused(runs, tmp_path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs / "shro" / "seed-0", unfinished)
    (unfinished / "summary.json").unlink()
    (tmp_path / "empty").mkdir()
    for name in ("c.csv", "notes.txt"):
        (tmp_path / name).touch()
    for paths, refusal in [
        ([unfinished], ("", ANY, "fedbilevel run --resume")),
        (
            [runs / "sim", tmp_path / "empty"],
            (
                "run folder",
                str(tmp_path / "empty"),
                "spec.toml",
            ),
        ),
        ([tmp_path], ("", ANY, f"{unfinished} have not finished")),
        ([tmp_path / "c.csv"], ("", ANY, f"{tmp_path / 'c.csv'} are not folders of runs")),
        (
            [runs, tmp_path / "notes.txt"],
            ("run folder", str(tmp_path / "notes.txt")),
        ),
    ]:
        with refuses(*refusal):
            load_groups(paths)


def test_a_loaded_run_has_what_the_result_had(runs) -> None:
    """A run read from its folder has the spec, metric, rows, costs and summary of the run that wrote it."""
    spec = experiments.configure(task="quadratic", settings=["rounds=60"])
    loaded = experiments.load_run(runs / "sim" / "seed-0")
    assert loaded.spec.tables() == spec.tables()
    assert experiments.resolve(loaded.spec.tables()) == spec
    with refuses("spec", fact="resolve(spec.tables"):
        experiments.build(loaded.spec)
    assert loaded.metric == "relative_error"
    assert len(loaded.history) == 7
    assert loaded.ledger["exchanges"] == 60
    assert loaded.summary["final"] == loaded.history["relative_error"][-1]
