"""Does every method learn the digits with one command, its presets and nothing else said?

Each runs on the kind of problem it is for. 90 % is a floor under methods that do not run, and presets that crawl or
diverge: SimFBO with a hundredth of its steps ends at 72 %. A head on an untrained representation passes it (96 %);
that methods find the outer variable is shown on closed forms, in tests/algorithms.
"""

from __future__ import annotations

import pytest
from agreement import listed

from fedbilevel import experiments
from fedbilevel.algorithms import ALGORITHMS


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_one_command_learns_the_digits(algorithm, run, tmp_path) -> None:
    task = listed("LEARNS").get(ALGORITHMS[algorithm], "hyper_representation")
    chosen = [] if task == "hyper_representation" else [task]  # which is the task where none is named
    code, _, error = run("run", *chosen, "--algorithm", algorithm, "--quiet", "--out", tmp_path / "run")
    assert (code, error) == (0, "")
    found = experiments.load_run(tmp_path / "run")
    assert (found.spec.task.name, found.spec.algorithm.name, found.spec.data) == (task, algorithm, "digits")
    assert (found.metric, found.summary["stopped"]) == ("test_accuracy", "")
    accuracy = found.history["test_accuracy"]
    assert accuracy[0] < 0.5  # the start knows nothing, so that what is there at the end was learnt
    assert found.summary["final"] == accuracy[-1] > 0.9
