"""Users are told where the values come from that they did not set, and which rows of a comparison went wrong."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from fedbilevel.experiments import Folder, configure
from fedbilevel.experiments.compare import comparison_table, doubts, load_groups
from fedbilevel.experiments.spec import replaced, said_of_one, said_of_several

METHOD = """
import fedbilevel as fb
from fedbilevel.authoring import positive, static

class Mine(fb.FedBiO):
    local_steps: int = static(default=2)

class Prepared(Mine):
    presets = {"quadratic": {"local_steps": 3}}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "method.py").write_text(METHOD)


def test_a_task_that_replaces_defaults_of_ones_own_method_says_so(mine) -> None:
    """The quadratic's presets have full batches and τ = 5 for every method."""
    spec = configure(task="quadratic", algorithm="method.py:Mine")
    assert replaced(spec) == {"batch_size": None, "local_steps": 5}
    assert said_of_one(spec) == (
        'quadratic sets for every method, in place of the defaults of method.py:Mine: batch_size = "none", '
        "local_steps = 5"
    )
    assert replaced(configure(task="quadratic", algorithm="method.py:Mine", settings=["local_steps=7"])) == {
        "batch_size": None
    }
    assert replaced(configure(task="quadratic", algorithm="method.py:Prepared")) == {"batch_size": None}
    assert said_of_one(configure(task="quadratic", algorithm="fedbio")) == ""


def test_a_comparison_says_which_rows_have_presets(mine) -> None:
    names = ["simfbo", "method.py:Mine", "method.py:Prepared"]
    first, *others = said_of_several([configure(task="quadratic", algorithm=name) for name in names])
    assert first == (
        "presets for quadratic: simfbo, method.py:Prepared; at the defaults of their classes: method.py:Mine"
    )
    assert [line.partition(":")[0].rsplit(" ", 1)[1] for line in others] == ["method.py", "method.py"]
    assert said_of_several([configure(task="quadratic")]) == ["presets for quadratic: simfbo"]


def test_run_and_compare_print_it(mine, run) -> None:
    quick = ["quadratic", "--set", "task.clients=2", "--set", "task.samples=[2, 2]", "--rounds", 1]
    said = 'in place of the defaults of method.py:Mine: batch_size = "none", local_steps = 5\n'
    code, shown, error = run("run", *quick, "--algorithm", "method.py:Mine", "--out", "one")
    assert (code, error, said in shown) == (0, "", True)
    assert Folder(Path("one")).summary.is_file()
    code, shown, error = run("compare", *quick, "--algorithms", "method.py:Mine,fedbio", "--out", "two")
    assert (code, error, said in shown) == (0, "", True)
    assert "presets for quadratic: fedbio; at the defaults of their classes: method.py:Mine\n" in shown


def test_rows_that_went_wrong_are_told_in_words() -> None:
    ends = {"good": (1.0, 1e-4), "far": (1.0, 0.2), "near": (1.0, 0.05), "worse": (1.0, 3.0)}
    assert doubts("error", ends, larger_is_better=False) == [
        "far ends at 0.2, more than 1,000 times the best: other steps may help, or the method is biased on this "
        "problem",
        "worse ends worse than it began, 3 after 1: it diverges, or its steps are too large",
    ]
    accuracies = {"good": (0.1, 0.9), "poor": (0.1, 0.0005), "worse": (0.5, 0.4)}
    assert [line.split()[0] for line in doubts("accuracy", accuracies, larger_is_better=True)] == ["poor", "worse"]
    assert doubts("error", {"unknown": (math.nan, 1.0), "exact": (1.0, 0.0), "rest": (1.0, 1e-9)}, False) == []


def test_the_caption_of_a_comparison_has_them(mine, run) -> None:
    quick = ["quadratic", "--set", "task.clients=2", "--set", "task.samples=[2, 2]", "--rounds", 30]
    large = ["--set", "server_lr=2.5", "--set", "client_lr=0.01"]
    assert run("run", *quick, *large, "--out", "wild")[0] == 0
    text = io.StringIO()
    Console(file=text, width=200).print(comparison_table(load_groups(["wild"])))
    assert "wild ends worse than it began" in text.getvalue()
