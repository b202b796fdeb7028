"""`--log`: which names it takes, and what it says of one that cannot be used."""

from __future__ import annotations

import sys

import pytest

from fedbilevel import cli
from fedbilevel.cli import shared
from fedbilevel.trackers import BY_NAME


def test_the_names_are_those_of_the_trackers() -> None:
    assert sorted(shared.TRACKERS) == sorted(BY_NAME)


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_misspelt_name_is_refused_before_anything_is_made(command, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert cli.main([command, "quadratic", "--log", "tensorboard,mlfow", "--out", str(out)]) == 2
    said = "unknown tracker of --log 'mlfow'; did you mean 'mlflow'? (allowed: mlflow, tensorboard, wandb)"
    assert capsys.readouterr().err == f"fedbilevel: {said}\n"
    assert not out.exists()


@pytest.mark.parametrize("names", ["", " ,"])
def test_no_name_at_all_is_refused(names, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run", "quadratic", "--log", names, "--out", str(out)])
    assert f"{names!r} names no tracker (allowed: mlflow, tensorboard, wandb)" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("command", [["run"], ["sweep", "--grid", "local_steps=1,2"]])
def test_a_missing_library_is_said_before_anything_runs(command, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    out = tmp_path / "out"
    assert cli.main([*command, "--set", "task.name=quadratic", "--log", "mlflow", "--out", str(out)]) == 2
    assert 'pip install ".[mlflow]"' in capsys.readouterr().err
    assert not out.exists()
