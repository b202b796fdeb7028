"""Are users told which values are presets or defaults, and which rows of a comparison went wrong?"""

from __future__ import annotations

import math

import pytest
from made_up import made_up_run

from fedbilevel.experiments import configure
from fedbilevel.experiments.compare import RunGroup, comparison_table, doubts
from fedbilevel.experiments.spec import said_of_several

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


def test_presets_for_all_methods_are_for_the_librarys(mine) -> None:
    """A task's presets for all methods apply to the library's methods only, and not to a user's subclass.

    For every method of the library, the quadratic task has full batches and τ = 5. Presets of the subclass itself
    apply.
    """
    own = configure(task="quadratic", algorithm="method.py:Mine").algorithm.fields
    assert (own["batch_size"], own["local_steps"]) == (32, 2)
    assert configure(task="quadratic", algorithm="method.py:Prepared").algorithm.fields == {**own, "local_steps": 3}
    of_library = configure(task="quadratic", algorithm="fedbio").algorithm.fields
    assert (of_library["batch_size"], of_library["local_steps"]) == (None, 5)


def test_a_comparison_says_which_rows_have_presets(mine) -> None:
    names = ["simfbo", "method.py:Mine", "method.py:Prepared"]
    assert said_of_several([configure(task="quadratic", algorithm=name) for name in names]) == (
        "presets for quadratic: simfbo, method.py:Prepared; with the defaults of their classes: method.py:Mine"
    )
    assert said_of_several([configure(task="quadratic")]) == "presets for quadratic: simfbo"


def test_rows_that_went_wrong_are_told_in_words() -> None:
    """Under a table, sentences name the rows that end worse than they began, or far from the best row."""
    wild = comparison_table([RunGroup("wild", [made_up_run("wild", 0, [1.0, 3.0])])])
    assert "wild ends worse than it began, 3 after 1" in str(wild.caption)
    ends = {"good": (1.0, 1e-4), "far": (1.0, 0.2), "near": (1.0, 0.05), "worse": (1.0, 3.0)}
    assert doubts("error", ends, larger_is_better=False) == [
        "far ends at 0.2, more than 1,000 times the best: other steps may help, or the method is biased on this "
        "problem",
        "worse ends worse than it began, 3 after 1: it diverges, or its steps are too large",
    ]
    accuracies = {"good": (0.1, 0.9), "poor": (0.1, 0.0005), "worse": (0.5, 0.4)}
    assert [line.split()[0] for line in doubts("accuracy", accuracies, larger_is_better=True)] == ["poor", "worse"]
    assert doubts("error", {"unknown": (math.nan, 1.0), "exact": (1.0, 0.0), "rest": (1.0, 1e-9)}, False) == []
