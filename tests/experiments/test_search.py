"""Does a search with Optuna draw points as described, survive processes that are killed, and refuse wrong input?"""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import survived

import fedbilevel as fb
from fedbilevel import cli, experiments
from fedbilevel.core.errors import ConfigurationError, NumericalError
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import History
from fedbilevel.experiments import configure, search, sweep
from fedbilevel.experiments.search import Range, search_specs
from fedbilevel.tasks.quadratic import quadratic
from refusals import ANY, raises_with, refuses

optuna = pytest.importorskip("optuna")
SPACE = {"server_lr.x": Range(0.001, 1, log=True), "local_steps": Range(1, 8), "batch_size": ["none", 4]}


def spec_of(point):
    settings = [f"{name}={value}" for name, value in point.items()]
    return configure(task="quadratic", settings=["run.rounds=20", "run.eval_every=10", *settings])


@pytest.fixture
def played(monkeypatch) -> list[float]:
    """Replace each run by a formula, and return the list of the step sizes of all runs.

    The error is the distance of the step size from 0.1, plus 0.001 times the seed. Steps above 0.9 diverge.
    """
    steps: list[float] = []

    def run(spec, folder, task, callbacks=(), progress=False) -> History:
        step = spec.algorithm.fields["server_lr"]["x"]
        steps.append(step)
        if step > 0.9:
            raise NumericalError("it diverged")
        error = abs(step - 0.1) + 0.001 * spec.run.seed
        rows = [{"round": round, "exchanges": float(round), "relative_error": error} for round in (10, 20)]
        for row in rows:
            for callback in callbacks:
                callback(None, row)
        return History(rows)

    monkeypatch.setattr(sweep, "run_of", run)
    return steps


def searched(folder, trials, space=SPACE, **given):
    return search_specs(spec_of, space, folder, trials=trials, **given)


def test_values_are_drawn_from_their_ranges_and_always_the_same(played, tmp_path) -> None:
    found = searched(tmp_path / "a", 12)
    assert len(found.rows) == len(played) == 12
    for row in found.rows:
        assert 0.001 <= row["server_lr.x"] <= 1
        assert row["server_lr.x"] == float(f"{row['server_lr.x']:.4g}")
        assert row["local_steps"] in range(1, 9)
        assert row["batch_size"] in ("none", 4)
    assert min(row["server_lr.x"] for row in found.rows) < 0.03  # log 0.03 is in the lower half
    assert {row["batch_size"] for row in found.rows} == {"none", 4}
    assert len(set(played)) > 8
    assert searched(tmp_path / "b", 12).rows == found.rows


@pytest.mark.parametrize(("log", "share"), [(True, 1 / 2), (False, (0.01 - 1e-4) / (1 - 1e-4))])
def test_a_logarithmic_range_has_half_of_its_draws_below_its_geometric_mean(log, share) -> None:
    """The geometric mean of 1e-4 and 1 is 0.01.

    The share p of 400 draws has the standard deviation √(p(1 − p)/400), and may differ by four of these.
    """
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    draws = [Range(1e-4, 1.0, log).drawn(study.ask(), "step") for _ in range(400)]
    found = sum(draw < 0.01 for draw in draws) / 400
    assert abs(found - share) < 4 * (share * (1 - share) / 400) ** 0.5


def test_the_best_point_is_chosen_by_the_mean_over_the_seeds(played, tmp_path) -> None:
    """The best point has the least mean error over the seeds 0 and 5.

    A seed adds 0.001 times its number to the error, and the mean of both seeds is 2.5.
    """
    found = searched(tmp_path, 8, seeds=[0, 5])
    errors = {step: abs(step - 0.1) + 0.0025 for step in played}
    assert found.rows[0]["relative_error"] == pytest.approx(min(errors.values()), rel=1e-12)
    assert found.algorithm.algorithm.fields["server_lr"]["x"] == found.best["server_lr.x"]
    assert (len(found.trials), len(played)) == (16, 16)
    assert "16 runs (8 points × 2 seeds)" in found.effort


@pytest.mark.parametrize("larger", [False, True])
def test_later_points_are_drawn_where_the_metric_is_better(larger, monkeypatch, tmp_path) -> None:
    """After the first ten points, most are drawn where the metric is better.

    The metric grows with the step size, which is drawn from 0.001 to 1. The middle of this range is about 0.03.
    """
    task = replace(quadratic(clients=2), metrics={"fit": fb.Metric(lambda x, y: 0.0, larger_is_better=larger)})
    steps = []

    def run(spec, *given, **named) -> History:
        steps.append(spec.algorithm.fields["server_lr"]["x"])
        return History([{"round": 20, "exchanges": 20.0, "fit": steps[-1]}], {"fit": larger})

    monkeypatch.setattr(sweep, "TaskCache", lambda keep: lambda spec: task)
    monkeypatch.setattr(sweep, "run_of", run)
    found = searched(tmp_path, 20, {"server_lr.x": SPACE["server_lr.x"]})
    assert sum((step > 0.03) == larger for step in steps[10:]) >= 8
    assert found.best["server_lr.x"] == (max(steps) if larger else min(steps))


def test_a_search_goes_on_with_its_study_and_draws_on_as_it_would_have(played, tmp_path) -> None:
    """A search of 4 points that is extended to 6 draws the points of a search of 6. Another search is refused."""
    whole = searched(tmp_path / "whole", 6)
    searched(tmp_path / "part", 4)
    part = searched(tmp_path / "part", 6)
    assert part.rows == whole.rows
    assert len(played) == 12
    journal = str(tmp_path / "part" / "study.journal")
    with refuses("", fact="seeds was [0] and is now [1]", where=journal):
        searched(tmp_path / "part", 6, seeds=[1])
    said = "--search server_lr.x was '0.001:1:log' and is now '0.001:2:log'; choose another --out"
    with refuses("", fact=said, where=journal):
        searched(tmp_path / "part", 6, {**SPACE, "server_lr.x": Range(0.001, 2, log=True)})


def test_trials_whose_metric_is_not_a_number_have_ended_and_are_not_drawn_anew(monkeypatch, tmp_path) -> None:
    """A trial whose metric is not a number counts as one of the trials, and no other point is drawn in its place."""
    steps = []

    def run(spec, *given, **named) -> History:
        assert len(steps) < 3
        steps.append(spec.algorithm.fields["server_lr"]["x"])
        return History([{"round": 20, "exchanges": 20.0, "relative_error": float("nan")}])

    monkeypatch.setattr(sweep, "run_of", run)
    found = searched(tmp_path, 3)
    assert found.best is None
    assert {row["error"] for row in found.rows} == {"relative_error is nan"}
    assert found.spent == {"rounds": 60, "exchanges": 60}


@pytest.mark.slow
def test_another_text_of_ones_own_task_is_another_search(tmp_path, run) -> None:
    """If the file of a user's task has changed since a search began, the search is not continued."""
    own, text = tmp_path / "own.py", "from fedbilevel.tasks import quadratic\ndef mine(): return quadratic(clients=3)\n"
    own.write_text(text)
    arguments = [f"{own}:mine", "--rounds", "1", "--search", "server_lr.x=0.05:0.1", "--trials", "1"]
    assert run("sweep", *arguments, "--out", tmp_path / "a")[0] == 0
    own.write_text(text.replace("clients=3", "clients=4"))
    code, _, error = run("sweep", *arguments, "--out", tmp_path / "a")
    assert (code, "another search: own.py has changed since then; choose another --out" in error) == (2, True)


def test_what_a_run_could_not_read_is_no_fault_of_the_study(monkeypatch, tmp_path) -> None:
    """If a run cannot read a file, the error names this file, and not the study."""

    def run(*given, **named) -> History:
        raise FileNotFoundError(2, "No such file or directory", "mine.csv")

    monkeypatch.setattr(sweep, "run_of", run)
    with raises_with(FileNotFoundError, filename="mine.csv"):
        searched(tmp_path, 1)


def test_the_trial_of_a_process_that_was_killed_is_no_loss(played, tmp_path) -> None:
    """In place of the trial of a process that was killed, another point is drawn."""
    searched(tmp_path, 2)
    storage = search.storage_at(str(tmp_path / search.JOURNAL))
    optuna.load_study(study_name=search.STUDY, storage=storage).ask()
    found = searched(tmp_path, 4)
    assert len(found.rows) == 4
    assert len(set(played)) == 4


def test_a_torn_line_of_the_journal_is_cut_off(played, tmp_path) -> None:
    """A last line of the journal that was not written to its end is removed, and the search continues."""
    searched(tmp_path, 3)
    file = tmp_path / search.JOURNAL
    file.write_bytes(file.read_bytes()[:-30])
    assert len(searched(tmp_path, 4).rows) == 4


HOLDER = """
import sys, time
from pathlib import Path
from fedbilevel.experiments.search import JournalLock
lock = JournalLock(Path(sys.argv[1]))
lock.acquire()
open(sys.argv[1], "ab").write(b'{"torn": ')
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_search_goes_on_where_a_process_was_killed_that_held_its_storage(tmp_path, start, monkeypatch) -> None:
    """A search continues after a process was killed that had locked its journal, and had written only a part of a line.

    A lock of Optuna's own, which an earlier version may have left, is ignored. Optuna would wait for it forever if its
    path is relative.
    """
    monkeypatch.chdir(tmp_path)
    given = ["sweep", *SMALL, *STEPS, "--out", "search", "--quiet", "--trials"]
    assert cli.main([*given, "1"]) == 0
    journal = Path("search", search.JOURNAL)
    journal.with_name(f"{journal.name}.lock").symlink_to(journal)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, journal], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.communicate()
    searching = start(*given, "2")
    _, said = searching.communicate(timeout=300)
    assert searching.returncode == 0, said
    with open(Path("search", "sweep.csv"), encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 2


def test_the_point_of_a_worker_that_a_database_misses_is_played_by_another(played, tmp_path, monkeypatch) -> None:
    """If a worker with a shared database disappears, another worker runs its point."""
    monkeypatch.setattr(search, "BEAT", 1)
    monkeypatch.setattr(search, "GRACE", 1)
    place = f"sqlite:///{tmp_path}/shared.db"
    searched(tmp_path / "a", 1, storage=place)
    study = optuna.load_study(study_name=search.STUDY, storage=search.storage_at(place))
    lost = study.ask()
    lost.suggest_float("server_lr.x", 0.001, 1, log=True)
    monkeypatch.setattr(
        type(study._storage), "_get_stale_trial_ids", lambda self, study: {lost._trial_id} - ended(self)
    )

    def ended(storage) -> set[int]:
        return {lost._trial_id} if storage.get_trial(lost._trial_id).state.is_finished() else set()

    searched(tmp_path / "b", 4, storage=place)
    assert float(f"{lost.params['server_lr.x']:.4g}") in played
    assert len(searched(tmp_path / "c", 4, storage=place).rows) == 4  # a late worker finds no point to run
    assert len(played) == 4


def test_a_failed_point_is_a_row_that_says_why(played, tmp_path) -> None:
    found = searched(tmp_path, 2, {"server_lr.x": [0.95], "cohort": Range(1, 3)})
    assert [row["error"] for row in found.rows] == ["it diverged", "it diverged"]
    assert (found.best, found.algorithm) == (None, None)


def test_a_pruner_ends_trials_by_the_rows_of_the_first_seed(played, tmp_path) -> None:
    """A pruner ends trials early by the rows of the first seed, and then the other seeds are not run."""
    found = searched(tmp_path, 20, pruner="median", seeds=[0, 1])
    early = [row for row in found.rows if row["error"] == "seeds 0, 1: pruned after 10 rounds"]
    whole = [row for row in found.rows if not row["error"]]
    assert len(early) > 0
    assert len(played) == len(found.rows) + len(whole)  # pruned points have only the run of the first seed
    rounds = 10 * len(early) + 2 * 20 * len(whole)
    assert found.spent == {"rounds": rounds, "exchanges": rounds}
    assert f"(20 points × 2 seeds), {2 * len(early)} pruned" in found.effort
    assert found.best["server_lr.x"] == min(played, key=lambda step: abs(step - 0.1))


def test_a_range_has_two_ends() -> None:
    for text, drawn in {"0.001:1:log": Range(0.001, 1, True), "0:0.5": Range(0, 0.5), "-1:1": Range(-1, 1)}.items():
        assert Range.parse("--search a", text) == drawn


@pytest.mark.parametrize("text", ["1", "1:", ":1", "2:1", "1:1", "0:1:log", "1:2:lin", "a:b", "1:2:log:3", "0:inf"])
def test_what_is_no_range_is_refused(text) -> None:
    with refuses("--search a", ANY, "LOW:HIGH:log"):
        Range.parse("--search a", text)
    with refuses("--search-box", ANY, "LOW:HIGH, with LOW below HIGH"):
        Range.parse("--search-box", text.replace("0:1:log", "1:2:log"), linear=True)


def test_a_damaged_journal_is_refused(run, tmp_path) -> None:
    given = ["sweep", "quadratic", "--search", "cohort=1:2", "--trials", "3", "--out", tmp_path]
    for text in ("{", "{}\n", "[]\n", "\xff\n"):
        (tmp_path / search.JOURNAL).write_text(text + "\n")
        code, _, error = run(*given)
        assert (code, "study.journal cannot be used" in error) == (2, True)
    code, _, error = run(*given, "--storage", tmp_path)
    assert (code, f"the study in {tmp_path} cannot be used" in error) == (2, True)


def test_no_password_is_shown() -> None:
    place = "x://me:secret@host"
    with pytest.raises(ConfigurationError) as caught, search.storing(place, ConfigurationError, OSError):
        raise OSError(f"{place} does not answer")
    assert str(caught.value) == "the study in x://***@host cannot be used: x://***@host does not answer"


OPTUNA = '--search needs optuna, which is not installed: in a clone of the repository, pip install ".['
DRIVER = "its driver, the Python package psycopg"


@pytest.mark.parametrize(
    ("lacking", "more", "words"),
    [(["optuna"], [], OPTUNA), (["psycopg", "psycopg2"], ["--storage", "postgresql://me@host/db"], DRIVER)],
)
def test_what_is_not_installed_is_named_and_nothing_is_left(lacking, more, words, run, monkeypatch, tmp_path) -> None:
    """If a package is missing, the error names it, and no folder is made."""
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    given = ["--search", "cohort=1:2", "--trials", "3", *more]
    code, _, error = run("sweep", "quadratic", *given, "--out", tmp_path / "out")
    assert (code, words in error) == (2, True)
    assert not (tmp_path / "out").exists()


SMALL = ["quadratic", "--set", "clients=2", "--set", "samples=[2, 2]", "--set", "dim_y=2", "--rounds", "3"]
STEPS = ["--search", "server_lr.x=0.01:0.1:log"]


def test_a_trial_is_a_run_and_the_chosen_spec_is_its(tmp_path, run) -> None:
    """The folder of a trial is that of a run, and the chosen spec is the spec of the best trial."""
    assert run("sweep", *SMALL, "--grid", "server_lr.x=0.05", "--out", tmp_path)[0] == 0
    assert run("sweep", *SMALL, *STEPS, "--trials", "1", "--out", tmp_path)[0] == 0
    assert "; 1 other run in this folder." in (tmp_path / "chosen.toml").read_text(encoding="utf-8")
    ran = experiments.load_run(tmp_path / "trial-000" / "seed-0")
    assert experiments.read_spec(tmp_path / "chosen.toml").tables() == ran.spec.tables()
    with open(tmp_path / "sweep.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert float(row["relative_error"]) == ran.summary["final"]
    assert float(row["server_lr.x"]) == ran.spec.algorithm.fields["server_lr"]["x"]


@pytest.mark.slow
def test_two_processes_end_a_search_though_one_is_killed(tmp_path, start) -> None:
    """Two processes share a search, and after one is killed, the other completes it."""
    given = ["sweep", *SMALL, *STEPS, "--seeds", "0,1", "--trials", "8", "--out", tmp_path]
    survived(start(*given), start(*given), tmp_path / "trial-002" / "seed-0")
    with open(tmp_path / "sweep.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({row["server_lr.x"] for row in rows}) == len(rows) / 2 >= 8
    assert not any(row["error"] for row in rows)


def test_a_trial_whose_second_seed_diverges_has_the_costs_of_both_runs(monkeypatch, tmp_path) -> None:
    """A trial whose second seed diverges has the costs of both runs, and the third seed is not run.

    The run of the first seed has 20 exchanges, and that of the second seed has 7 until it diverges.
    """

    def run(spec, folder, task, callbacks=(), progress=False) -> History:
        if spec.run.seed == 1:
            error = NumericalError("it diverged")
            error.ledger = Ledger(rounds=7, exchanges=7)
            raise error
        return History([{"round": 20, "exchanges": 20.0, "relative_error": 0.1}])

    monkeypatch.setattr(sweep, "run_of", run)
    found = searched(tmp_path, 2, seeds=[0, 1, 2])
    assert found.spent == {"rounds": 54, "exchanges": 54}
    assert [row.get("exchanges") for row in found.trials] == 2 * [20.0, 7, None]
    assert {row["error"] for row in found.trials} == {"it diverged"}
