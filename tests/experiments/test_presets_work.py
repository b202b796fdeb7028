"""Does every method start and learn with its presets and no other settings?

For every bilevel method, `solve` makes all its checks in a few seconds, without a round. Slower tests run each method
on digits, and on the quadratic task, which has a closed form.
"""

from __future__ import annotations

import os
from functools import cache

import pytest
from agreement import listed

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.experiments.presets import GROUPS
from fedbilevel.experiments.runner import build, task_of
from fedbilevel.experiments.spec import Spec, configure
from fedbilevel.tasks import Task

pytestmark = pytest.mark.checked  # a preset has to pass solve's checks of its losses, without a warning

BILEVEL = sorted(name for name, cls in ALGORITHMS.items() if fb.Bilevel in getattr(cls, "solves", (fb.Bilevel,)))
real_images = pytest.mark.skipif("FEDBILEVEL_DATA" not in os.environ, reason="FEDBILEVEL_DATA is not set")


class Started(Exception):
    """All checks of `solve` have passed."""


class Gate:
    """An engine that runs no round."""

    clock = None

    def start(self, *_: object) -> None:
        raise Started


@cache
def task_with_presets(task: str, data: str | None) -> Task:
    return task_of(configure(task=task, data=data))


def solved(spec: Spec, task: Task, **fields: object) -> fb.Result:
    algorithm = build(spec, task).algorithm
    plan = {"rounds": spec.run.rounds, "cohort": spec.run.cohort, "metrics": task.metrics, **fields}
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, **plan)


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("quadratic", None),
        pytest.param("hyper_representation", "digits", marks=pytest.mark.slow),
        *(
            pytest.param("hyper_representation", data, marks=[real_images, pytest.mark.slow])
            for data in ("mnist", "fashion-mnist", "cifar-10")
        ),
    ],
)
def test_no_preset_is_refused(task, data) -> None:
    """No method is refused because of its own presets: `solve` reaches the engine."""
    assert {"adbo", "sdbo", "afbo", "fednest", "simfbo"} < set(BILEVEL)
    for algorithm in BILEVEL:
        with pytest.raises(Started):
            solved(configure(task=task, algorithm=algorithm, data=data), task_with_presets(task, data), engine=Gate())


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_one_command_learns_the_digits(algorithm, run, tmp_path) -> None:
    """Each method learns the digits with its presets, on the kind of problem that it solves.

    A method that does not run, or whose steps are too small or diverge, stays below 85 %: SimFBO with a hundredth of
    its steps ends at 72 %. A trained head on an untrained representation is above it, at 96 %. That methods find the
    outer variable is shown on closed forms, in tests/algorithms.
    """
    task = listed("LEARNS").get(ALGORITHMS[algorithm], "hyper_representation")
    chosen = [] if task == "hyper_representation" else [task]  # which is the default task
    code, _, error = run("run", *chosen, "--algorithm", algorithm, "--quiet", "--out", tmp_path / "run")
    assert (code, error) == (0, "")
    found = experiments.load_run(tmp_path / "run")
    assert (found.spec.task.name, found.spec.algorithm.name, found.spec.data) == (task, algorithm, "digits")
    assert (found.metric, found.summary["stopped"]) == ("test_accuracy", "")
    accuracy = found.history["test_accuracy"]
    assert accuracy[0] < 0.5  # nothing is learnt at the start
    assert found.summary["final"] == accuracy[-1] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", sorted({*BILEVEL} - {"fedex"}))  # its x is one of ten draws
def test_presets_come_near_the_solution_of_the_quadratic(algorithm) -> None:
    """With its presets, each method comes near the solution of the quadratic task.

    Since x0 = 0, the relative error starts at 1. If each client inverts its own Hessian, the mean of the clients'
    hypergradients is 0 at another x than x*, with a relative error of 0.457. This x and its y solve two linear
    equations: the mean h̄ of these hypergradients and ∇y ḡ are 0.
    """
    error = solved(configure(task="quadratic", algorithm=algorithm), task_with_presets("quadratic", None)).history
    assert error["relative_error"][0] == pytest.approx(1)
    if algorithm in GROUPS["own-hypergradients"]:
        assert error["relative_error"][-1] == pytest.approx(0.457, abs=0.05)
    else:
        assert error["relative_error"][-1] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fednest", "fednest-sgd", "fedmbo", "lfednest", "afbo", "rabo", "rafbo"])
def test_a_series_of_the_default_length_knows_the_smaller_eigenvalues(algorithm) -> None:
    """A series of 20 terms, which is the default, is accurate enough for Hessians with eigenvalues λ from 0.1 to 1.

    With step 0.1, twenty terms give the share 1 − (1 − 0.1·λ)^20 of 1/λ, which is 18 % for λ = 0.1 and 88 % for λ = 1.
    Five terms give 5 % to 41 %, and leave a relative error of x of 0.6 or more. Exact inverses of the clients' own
    Hessians leave 0.457.
    """
    task = task_with_presets("quadratic", None)
    start = (task.problem, task.clients, task.x0, task.y0)
    result = fb.solve(ALGORITHMS[algorithm](), *start, rounds=200, metrics=task.metrics)
    assert result.history["relative_error"][-1] < 0.457
