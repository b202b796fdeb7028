"""Do runs end after a given number of exchanges or bytes, also if they were interrupted?"""

from __future__ import annotations

import json

import numpy as np
import pytest
from command_line import outcome

from fedbilevel import experiments
from refusals import ANY, refuses

BUDGET = 60
SMALL = ["clients=4", "samples=[3, 3]", f"run.exchanges={BUDGET}"]

RANDOM = ["hypergradient.solver={name = 'neumann', sampling = 'random', step = 0.1}", "inner.lr=0.1", "outer_lr=0.1"]


@pytest.fixture(scope="module")
def random_length(tmp_path_factory):
    """Run FedNest, whose rounds make a random number of exchanges, and return the spec and the folder of the run."""
    spec = experiments.configure(task="quadratic", algorithm="fednest", settings=[*SMALL, *RANDOM])
    folder = tmp_path_factory.mktemp("budget") / "run"
    experiments.run(spec, folder, plot=False)
    return spec, folder


def test_it_ends_at_the_first_row_that_reaches_it(random_length) -> None:
    """A run ends at the first row whose number of exchanges is the budget or more."""
    _, folder = random_length
    loaded = experiments.load_run(folder)
    exchanges = loaded.history["exchanges"]
    assert exchanges[-2] < BUDGET <= exchanges[-1]
    assert len(set(np.diff(exchanges))) > 1  # rounds do differ in their numbers of exchanges
    assert loaded.summary["stopped"] == f"{BUDGET} exchanges done"


@pytest.mark.slow
def test_rows_are_spread_over_it(tmp_path) -> None:
    """The 50 rows of a run are spread over its budget.

    SimFBO makes one exchange per round, so that with 200 exchanges there is a row after every 4 rounds.
    """
    spec = experiments.configure(task="quadratic", settings=[*SMALL, "run.exchanges=200"])
    assert (spec.run.rounds, spec.run.eval_every) == (None, None)
    result = experiments.run(spec, tmp_path / "run", plot=False)
    np.testing.assert_array_equal(result.history["exchanges"], np.arange(0, 201, 4))


@pytest.mark.slow
def test_an_interrupted_run_ends_at_the_same_bits(random_length, tmp_path) -> None:
    spec, folder = random_length
    rows = []

    def interrupt(result: object, row: object) -> None:
        rows.append(row)
        if len(rows) > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiments.run(spec, tmp_path / "run", plot=False, callbacks=[interrupt])
    with refuses("rounds", 99, " 60 exchanges"):
        experiments.resume(tmp_path / "run", rounds=99, plot=False)
    with refuses("callbacks", interrupt, "list"):
        experiments.resume(tmp_path / "run", plot=False, callbacks=interrupt)
    experiments.resume(tmp_path / "run", plot=False)
    assert outcome(tmp_path / "run") == outcome(folder)


def test_resuming_a_run_that_was_killed_after_its_last_round_adds_none(random_length) -> None:
    """A run that was killed after its last round, and before its summary was written, makes no further round."""
    _, folder = random_length
    before = outcome(folder)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    experiments.resume(folder, plot=False)
    again = json.loads((folder / "summary.json").read_text())
    assert outcome(folder) == before
    assert (again["rounds"], again["stopped"]) == (summary["rounds"], summary["stopped"])


def test_rounds_and_a_budget_take_each_others_place() -> None:
    """In a spec, a budget of exchanges replaces the number of rounds, and a number of rounds replaces the budget."""
    spec = experiments.configure(settings=["exchanges=50"])
    assert (spec.run.rounds, spec.run.exchanges, spec.run.eval_every) == (None, 50, None)
    assert experiments.resolve(spec.tables()) == spec
    back = experiments.configure(spec.tables(), settings=["rounds=7", "eval_every=1"])
    assert (back.run.rounds, back.run.exchanges) == (7, None)
    assert experiments.configure(settings=["exchanges=50", "eval_every=2"]).run.eval_every == 2
    assert experiments.configure({"run": {"exchanges": 50}}).run == spec.run
    assert spec.replace(run={"rounds": 9, "eval_every": 1}).run.exchanges is None


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["exchanges=50", "rounds=7"], ("", ANY, "rounds = 7 and exchanges = 50")),
        (["rounds=none"], ("", ANY, "none of them")),
        (["exchanges=0"], ("run.exchanges", 0)),
        (["bytes=inf"], ("run.bytes", float("inf"))),
        (["run.time=0"], ("run.time", 0)),
        (["run.time=9", "rounds=3"], ("", ANY, "rounds = 3 and time = 9")),
        (["run.time=9", "clock.network=0"], ("run.time", 9, "clock.network")),
        (["eval_every=none"], ("run.eval_every", None)),
        (["pooled=true", "cohort=3"], ("run.cohort", 3, "run.pooled")),
    ],
)
def test_what_cannot_be_is_refused(settings: list[str], refusal: tuple) -> None:
    """Budgets that are impossible, and settings of a run that contradict each other, are refused."""
    with refuses(*refusal):
        experiments.configure(settings=settings)


def test_bytes_are_a_budget_too(tmp_path) -> None:
    """A run with a budget of bytes ends at the first row where bytes down and bytes up together reach it."""
    spec = experiments.configure(task="quadratic", settings=[*SMALL[:2], "run.bytes=20000", "run.eval_every=1"])
    assert (spec.run.rounds, spec.run.budget) == (None, ("bytes", 20000))
    result = experiments.run(spec, tmp_path / "run", plot=False)
    sent = result.history["bytes_down"] + result.history["bytes_up"]
    assert sent[-2] < 20000 <= sent[-1]
    assert experiments.load_run(tmp_path / "run").summary["stopped"] == "0.02 MB sent"
