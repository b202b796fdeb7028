"""If Matplotlib is not installed, do commands do everything but draw, and say what to install?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import without_remarks

from fedbilevel import experiments
from fedbilevel.experiments import federation, load_run
from fedbilevel.experiments.export import write_page
from fedbilevel.flower.launch.in_process import InProcess
from refusals import refuses
from run_folders import write_run

INSTALL = 'matplotlib, which is not installed: in a clone of the repository, pip install ".[cli]"\n'
SAID = f"fedbilevel: no picture is drawn: pictures need {INSTALL}"
REFUSED = f"fedbilevel: plots need {INSTALL}"
SMALL = ["quadratic", "--rounds", 2, "--set", "clients=2", "--set", "samples=[2, 2]"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    return tmp_path


@pytest.fixture
def finished(here) -> Path:
    """Return the folder of a finished run."""
    return write_run(here / "finished", experiments.configure(task="quadratic"))


def pictures(folder: Path) -> list[Path]:
    return [path for suffix in ("png", "pdf", "svg") for path in folder.rglob(f"*.{suffix}")]


def test_runs_are_played_continued_and_read_again(run, here) -> None:
    first = ["run", *SMALL, "--out", "one"]
    again = ["run", "--resume", "one", "--rounds", 3]
    seeds = ["run", *SMALL, "--seeds", "0,1", "--out", "seeds"]
    for command in (first, again, seeds, seeds):
        code, shown, error = run(*command)
        assert (code, without_remarks(error), "plot" in shown, "mean ± sd" in shown) == (
            0,
            SAID,
            False,
            command == seeds,
        )
    assert load_run("one").summary["rounds"] == 3
    assert sorted(path.name for path in (here / "seeds").iterdir()) == ["seed-0", "seed-1"]
    assert pictures(here) == []


@pytest.mark.slow
def test_methods_are_compared(run, here) -> None:
    code, shown, error = run("compare", *SMALL, "--algorithms", "simfbo,fedbio", "--out", "both", "--csv")
    assert (code, without_remarks(error), "plot" in shown) == (0, SAID, False)
    assert "presets for quadratic: simfbo, fedbio\n" in shown
    assert {path.name for path in (here / "both").iterdir()} >= {"simfbo", "fedbio", "comparison.csv"}
    code, shown, error = run("compare", "both")
    assert (code, without_remarks(error), "plot" in shown) == (0, SAID, False)
    assert "relative_error" in shown
    assert pictures(here) == []


@pytest.mark.parametrize("option", [("--out", "mine.pdf"), ("--panel", "exchanges"), ("--size", "3x3")])
def test_a_picture_that_is_asked_for_is_refused(option, run, here, finished) -> None:
    assert run("compare", finished, *option) == (2, "", REFUSED)
    assert [path.name for path in here.iterdir()] == ["finished"]


def test_a_page_and_a_run_in_python_that_is_to_be_drawn_are_refused(run, here, finished) -> None:
    assert run("report", finished, "--out", "page.html") == (2, "", REFUSED)
    with refuses("", fact="matplotlib"):
        write_page([finished])
    with refuses("", fact="matplotlib"):
        experiments.run(experiments.configure(task="quadratic"), here / "one")
    assert [path.name for path in here.iterdir()] == ["finished"]


@pytest.mark.slow
def test_a_federation_is_played(here, capsys) -> None:
    spec = experiments.configure(task="quadratic", settings=["clients=2", "samples=[8, 8]", "rounds=2"])
    federation.serve(spec, InProcess(federation.client_app(spec), 2), {"out": "played"})
    assert SAID in capsys.readouterr().err
    assert load_run("played").summary["rounds"] == 2
    assert pictures(here) == []
