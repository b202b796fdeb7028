"""Do the losses of tasks accept models that are cut to clients' capacities, and does a run count the holders?"""

from __future__ import annotations

import pytest

import fedbilevel as fb
from fedbilevel import tasks
from fedbilevel.engines import submodels
from fedbilevel.experiments import tables
from refusals import refuses

TASKS = {
    "hyper_representation": fb.RABO(),
    "loss_tuning": fb.SimFBO(),
    "hyper_cleaning": fb.SimFBO(),
    "classification": fb.FedAvg(),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_losses_of_a_task_take_submodels(name) -> None:
    """The losses accept models that are cut: of 8 hidden units, capacities 1, 0.5 and 0.25 keep 8, 4 and 2."""
    task = tasks.TASKS[name](network="mlp", hidden=(8,), clients=5).with_own(capacity=[1, 0.5, 0.25, 1, 0.5])
    cut = submodels.classes(TASKS[name], task.problem, task.clients, task.x0, task.y0)
    assert [list(kept.values()) for _, kept in cut] == [[8], [4], [2]]


def test_a_network_without_units_is_not_cut() -> None:
    task = tasks.hyper_cleaning().with_own(capacity=0.5)
    with refuses("Clients.capacity", "0.5", "structure"):
        fb.solve(fb.SimFBO(server_lr=0.1), task.problem, task.clients, task.x0, task.y0, rounds=1)


@pytest.mark.slow
@pytest.mark.checked
def test_a_run_says_who_held_what(run, tmp_path) -> None:
    """The closing table of a run shows the least number of clients that hold an entry of x."""
    small = ["--rounds", 1, "--cohort", 3]
    for setting in ("clients=3", "hidden=[4]", "capacity=[1, 0.5, 0.5]"):
        small += ["--set", setting]
    fedavg = ["classification", "--algorithm", "fedavg", "--set", "algorithm.local_steps=1"]
    code, shown, error = run("run", *fedavg, *small, "--out", tmp_path / "a")
    assert (code, error) == (0, "")
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in shown.splitlines() if "│" in line}
    assert lines["clients per entry"] == "at least 1 (x)"  # two of the four units are held by the first client only
    assert float(lines["GFLOP"]) > 0


@pytest.mark.slow
@pytest.mark.checked
def test_a_method_without_submodels_warns_once(run, tmp_path) -> None:
    """A method that does not support submodels trains whole models, and warns once, with the reason."""
    small = ["--rounds", 1, "--cohort", 3]
    for setting in ("clients=3", "hidden=[4]", "capacity=[1, 0.5, 0.5]"):
        small += ["--set", setting]
    fedmbo = ["--algorithm", "fedmbo", "--set", "inner.local_steps=1", "--set", "hypergradient.solver=cg"]
    code, _, error = run("run", *fedmbo, *small, "--quiet", "--out", tmp_path / "b")
    assert code == 0
    why = "means of products over different holders are not symmetric, as CG requires; use a Neumann series"
    said = f"fedbilevel: warning: FedMBO trains whole models, also on 2 clients with a capacity below 1: {why}"
    assert " ".join(error.split()).startswith(said)


def test_entries_that_nobody_held_are_counted() -> None:
    row = {"coverage_x": 2.5, "coverage_y": 3.0, "uncovered_x": 1234.5, "uncovered_y": 0.0}
    assert tables.holders(row) == {
        "clients per entry": "at least 2.5 (x), 3 (y)",
        "held by no client": "1,234.5 entries of x",
    }
    assert tables.holders({"outer_loss": 1.0}) == {}
