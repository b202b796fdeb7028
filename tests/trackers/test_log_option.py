"""Does `--log` accept the names of trackers, and refuse other names and missing libraries before anything runs?"""

from __future__ import annotations

import sys

import pytest
from recorders import InMemory, Service

from fedbilevel import cli
from fedbilevel.cli import shared
from fedbilevel.trackers import BY_NAME


def test_the_names_are_those_of_the_trackers() -> None:
    assert sorted(shared.TRACKERS) == sorted(BY_NAME)


@pytest.mark.parametrize("command", ["run quadratic", "sweep quadratic", "compare quadratic", "flower demo"])
def test_a_misspelt_name_is_refused_before_anything_is_made(command, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert cli.main([*command.split(), "--log", "tensorboard,mlfow", "--out", str(out)]) == 2
    said = "unknown tracker 'mlfow' of --log; did you mean 'mlflow'? (allowed: mlflow, tensorboard, wandb)"
    assert capsys.readouterr().err == f"fedbilevel: {said}\n"
    assert not out.exists()


@pytest.mark.parametrize("names", ["", " ,"])
def test_no_name_at_all_is_refused(names, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "quadratic", "--log", names, "--out", str(out)])
    assert f"{names!r} names no tracker (allowed: mlflow, tensorboard, wandb)" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    "command",
    [
        ["run", "quadratic"],
        ["sweep", "quadratic", "--grid", "local_steps=1,2"],
        ["compare", "quadratic", "--algorithms", "simfbo,aggitd"],
        ["flower", "demo", "--task", "quadratic"],
    ],
    ids=lambda words: words[0],
)
def test_a_missing_library_is_said_before_anything_runs(command, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    out = tmp_path / "out"
    assert cli.main([*command, "--log", "mlflow", "--out", str(out)]) == 2
    assert 'pip install ".[mlflow]"' in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_comparison_is_a_run_with_a_run_of_each_algorithm_and_seed(tmp_path, monkeypatch) -> None:
    """A comparison is recorded as a run with mean results, and within it a run for each algorithm and seed."""
    service = Service()
    monkeypatch.setattr(shared, "trackers", lambda options: [InMemory(service)])
    command = ["compare", "quadratic", "--algorithms", "simfbo,aggitd", "--set", "task.clients=3", "--rounds", "4"]
    command += ["--set", "samples=[2, 2]", "--set", "dim_y=2"]
    command += ["--set", "run.eval_every=2", "--seeds", "0,1", "--csv", "--quiet", "--out", str(tmp_path / "both")]
    assert cli.main(command) == 0
    parent, *children = service.runs.values()
    assert (parent.run.name, parent.ending) == ("both", "finished")
    flat = parent.run.flat_parameters()
    assert flat["comparison.algorithms"] == "['simfbo', 'aggitd']"
    assert flat["comparison.seeds"] == "[0, 1]"
    assert parent.files == ["comparison.png", "comparison.csv", "comparison-curves.csv"]
    names = ["simfbo/seed-0", "aggitd/seed-0", "simfbo/seed-1", "aggitd/seed-1"]
    assert [(kept.run.name, kept.group, kept.ending) for kept in children] == [
        (name, "run-0", "finished") for name in names
    ]
    finals = [kept.rows[-1]["relative_error"] for kept in children]
    means = {"simfbo": (finals[0] + finals[2]) / 2, "aggitd": (finals[1] + finals[3]) / 2}
    assert parent.outcome == {f"relative_error.{name}": pytest.approx(mean) for name, mean in means.items()}
    assert cli.main([*command[:-2], "--out", str(tmp_path / "both")]) == 0  # the finished runs are read
    assert len(service.runs) == 5


def test_finished_runs_that_are_compared_are_not_recorded(tmp_path, capsys) -> None:
    assert cli.main(["compare", str(tmp_path), "--log", "tensorboard"]) == 2
    assert "--log: only allowed with --algorithms" in capsys.readouterr().err
