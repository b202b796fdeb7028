"""Points that Optuna draws, and workers that share them: what is drawn, and that nobody waits for one that is gone."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from fedbilevel import cli
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments import search
from fedbilevel.experiments.search import Range, search_specs, specs_of
from fedbilevel.experiments.sweep import Definition, Swept
from fedbilevel.sweeps.plan import TrialOutcome

optuna = pytest.importorskip("optuna")
RANGES = {"server_lr.x": "0.001:1:log", "local_steps": "1:8"}
DRAWN = Definition(task="quadratic", search=RANGES, grid={"batch_size": ["none", "4"]})
GRID = Definition(task="quadratic", grid={"server_lr.x": ["0.01", "0.1"], "local_steps": ["1", "2"]}, seeds=[0, 1])


@pytest.fixture
def played(monkeypatch) -> list[int]:
    """The points that were played, instead of runs: the error is the distance of the step from 0.1."""
    jobs: list[int] = []

    def trial(self, job, share, *, last) -> TrialOutcome:
        spec = self.spec(job)
        jobs.append(job.point)
        step = spec.algorithm.fields["server_lr"]["x"]
        if step > 0.9:
            return TrialOutcome(error="it diverged")
        return TrialOutcome({"round": 5, "exchanges": 5, "relative_error": abs(step - 0.1) + 0.001 * job.seed})

    monkeypatch.setattr(Swept, "trial", trial)
    return jobs


def searched(folder, trials=None, definition=DRAWN, **given):
    return search_specs(definition, specs_of(definition), folder, trials=trials, **given)


def test_values_are_drawn_from_their_ranges_and_always_the_same(played, tmp_path) -> None:
    found = searched(tmp_path / "a", trials=12)
    points = found.plan.points
    assert len(points) == found.trials == 12
    assert played == list(range(12))
    for point in points:
        assert 0.001 <= point["server_lr.x"] <= 1
        assert point["server_lr.x"] == float(f"{point['server_lr.x']:.4g}")
        assert point["local_steps"] in range(1, 9)
        assert point["batch_size"] in ("none", 4)
    assert min(point["server_lr.x"] for point in points) < 0.03  # in the lower half of the logarithm
    assert {point["batch_size"] for point in points} == {"none", 4}
    assert len({point["server_lr.x"] for point in points}) > 8
    assert searched(tmp_path / "b", trials=12).rows == found.rows


def test_an_interrupted_search_goes_on_to_the_same_points_and_to_more(played, tmp_path, monkeypatch) -> None:
    whole, calls, good = searched(tmp_path / "whole", trials=6), [], Swept.trial

    def sometimes(self, job, share, *, last):
        calls.append(job.point)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return good(self, job, share, last=last)

    monkeypatch.setattr(Swept, "trial", sometimes)
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "part", trials=4)
    searched(tmp_path / "part", trials=4, resume=True)
    assert calls == [0, 1, 2, 2, 3]
    assert [point["server_lr.x"] for point in whole.plan.points][:3] == [
        point["server_lr.x"] for point in searched(tmp_path / "part", trials=4, resume=True).plan.points
    ][:3]
    assert len(searched(tmp_path / "part", trials=6, resume=True).plan.points) == 6
    assert calls == [0, 1, 2, 2, 3, 4, 5]
    with pytest.raises(ConfigurationError, match="there is a sweep in"):
        searched(tmp_path / "part", trials=4)


@pytest.mark.parametrize("storage", ["sqlite:///{}/shared.db", "{}/shared.journal"])
def test_the_points_of_a_lost_worker_are_played_by_another(storage, played, tmp_path, monkeypatch) -> None:
    """One worker was killed while it played a point of the grid: that is played again, after the others."""
    place = storage.format(tmp_path)
    recorded = GRID.recorded(specs_of(GRID))
    swept = Swept.of(GRID, specs_of(GRID), tmp_path / "lost", None)
    search.require_optuna()
    search.open_study(place, recorded, swept).ask().set_user_attr(search.ALIVE, time.time() - 1000)
    monkeypatch.setattr(search, "GRACE", 0.5)
    found = searched(tmp_path / "alive", definition=GRID, storage=place)
    assert sorted(played) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (found.trials, found.failed) == (8, 0)
    assert found.plan.points == GRID.points()
    assert found.best == {"server_lr.x": 0.1, "local_steps": 1}
    again = searched(tmp_path / "late", definition=GRID, storage=place)  # who comes late has nothing to play
    assert again.rows == found.rows
    assert len(played) == 8
    other = Definition(task="quadratic", grid={"server_lr.x": ["0.5"]})
    with pytest.raises(ConfigurationError, match=r"has another sweep: grid is .* there, and .* here"):
        searched(tmp_path / "other", definition=other, storage=place)


def test_a_point_that_no_worker_survives_fails(played, tmp_path, monkeypatch) -> None:
    place = f"{tmp_path}/shared.journal"
    swept = Swept.of(GRID, specs_of(GRID), tmp_path / "lost", None)
    search.require_optuna()
    study = search.open_study(place, GRID.recorded(specs_of(GRID)), swept)
    monkeypatch.setattr(search, "GRACE", -1.0)  # whoever is playing counts as lost
    worker = search.Worker(study, swept, {}, specs_of(GRID), 4, None)
    for _ in range(search.ATTEMPTS):
        study.ask().set_user_attr(search.ALIVE, 1.0)
        worker.rescue(worker.points())  # ends it
        worker.rescue(worker.points())  # queues it again
    found = searched(tmp_path / "alive", definition=GRID, storage=place)
    assert sorted(set(played)) == [1, 2, 3]
    assert [row["error"] for row in found.rows][-1] == "seeds 0, 1: its worker was lost 3 times"
    assert (found.trials, found.failed) == (8, 2)


def test_a_failed_point_is_a_row_here_too(played, tmp_path) -> None:
    failing = Definition(task="quadratic", grid={"server_lr.x": ["0.1", "0.95"], "cohort": ["1"]})
    found = searched(tmp_path, definition=failing, storage=f"{tmp_path.parent}/shared.journal")
    assert [row["error"] for row in found.rows] == ["", "it diverged"]


@pytest.mark.parametrize(
    ("text", "drawn"),
    [("0.001:1:log", Range(0.001, 1, True)), ("0:0.5", Range(0, 0.5)), ("1:8", Range(1, 8)), ("-1:1", Range(-1, 1))],
)
def test_a_range_has_two_ends(text, drawn) -> None:
    assert Range.parse("a", text) == drawn


@pytest.mark.parametrize("text", ["1", "1:", ":1", "2:1", "1:1", "0:1:log", "1:2:lin", "a:b", "1:2:log:3", "0:inf"])
def test_what_is_no_range_is_refused(text) -> None:
    with pytest.raises(ConfigurationError, match=r"--search a = .* must be of the form LOW:HIGH or LOW:HIGH:log"):
        Range.parse("a", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search", "server_lr.x=0.1:1"], "--trials = None is not allowed: it must be given with --search"),
        (["--grid", "server_lr.x=0.1", "--trials", "3"], "--trials = 3 is not allowed: it must be left out without"),
        (["--search", "sever_lr.x=0.1:1", "--trials", "3"], "unknown field 'sever_lr'; did you mean 'server_lr'"),
        (["--search", "server_lr.x=-1:1", "--trials", "3"], "algorithm.server_lr.x = -1 is not allowed"),
        (["--search", "server_lr.x=0.1:1", "--grid", "server_lr.x=1"], "--search server_lr.x is given twice"),
        (["--search", "cohort=1:2", "--trials", "3", "--halving"], "--halving goes with a grid that one process plays"),
        (["--grid", "cohort=1", "--storage", "nonsense://x"], "--storage nonsense://x cannot be used"),
        (["--search", "cohort=1:2", "--trials", "0"], "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_input_is_a_sentence(arguments, message, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, error = run("sweep", "quadratic", *arguments, "--out", "out")
    assert code == 2
    assert message in error


def test_a_refused_storage_leaves_the_folder_free_and_a_begun_one_as_it_is(played, tmp_path) -> None:
    folder = tmp_path / "out"

    def refused(definition: Definition) -> None:
        with pytest.raises(ConfigurationError, match="foo://x cannot be used"):
            search_specs(definition, specs_of(definition), folder, storage="foo://x")

    refused(Definition(task="quadratic", grid={"server_lr.x": ["0.5"]}))
    search_specs(GRID, specs_of(GRID), folder)
    refused(GRID)
    assert Definition.read(folder).grid == GRID.grid


def test_no_password_is_shown() -> None:
    shown = search.without_password("--storage postgresql+psycopg://me:se:cret@host/db cannot be used: me@host")
    assert shown == "--storage postgresql+psycopg://me:***@host/db cannot be used: me@host"


def test_without_optuna_the_command_that_installs_it_is_named(run, monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = run("sweep", "quadratic", "--search", "cohort=1:2", "--trials", "3", "--out", tmp_path / "out")
    assert code == 2
    assert error.strip().endswith('--search and --storage need optuna, which is not installed: '
                                  'in a clone of the repository, pip install ".[sweep]"')  # fmt: skip
    assert not (tmp_path / "out").exists()


SMALL = ["quadratic", "--set", "clients=2", "--set", "samples=[2, 2]", "--set", "dim_y=2", "--rounds", "3", "--quiet"]


def test_the_chosen_spec_of_a_search_is_that_of_its_run(tmp_path) -> None:
    given = ["--search", "server_lr.x=0.01:0.1:log", "--trials", "1", "--out", str(tmp_path)]
    assert cli.main(["sweep", *SMALL, *given]) == 0
    from fedbilevel.experiments import read_spec

    assert read_spec(tmp_path / "chosen.toml") == read_spec(tmp_path / "point-000" / "seed-0" / "spec.toml")
    assert json.loads((tmp_path / "sweep.json").read_text())["trials"] == 1


IMPATIENT = """
import sys
from fedbilevel import cli
from fedbilevel.experiments import search
search.BEAT, search.GRACE = 0.5, 8.0
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "folders"),
    [("sqlite:///{}/shared.db", "abcd"), ("{}/shared.journal", "aaaa")],
    ids=["a database and folders of their own", "a file and one folder"],
)
def test_four_workers_play_all_trials_though_one_is_killed(storage, folders, tmp_path) -> None:
    place = storage.format(tmp_path)
    given = ["--search", "server_lr.x=0.01:0.1:log", "--trials", "12", "--seeds", "0,1", "--storage", place]

    def worker(name: str) -> subprocess.Popen:
        command = [sys.executable, "-c", IMPATIENT, "sweep", *SMALL, *given, "--out", str(tmp_path / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    workers = [worker(folders[0])]
    try:
        end = time.monotonic() + 300
        while not list((tmp_path / "a").glob("point-*/seed-*")):  # the first is at a trial
            assert workers[0].poll() is None, workers[0].stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)
        workers[0].kill()
        (point,) = (tmp_path / "a").glob("point-*")
        assert not (point / "seed-0" / "summary.json").exists()
        workers += [worker(name) for name in folders[1:]]
        texts = [process.communicate(timeout=500) for process in workers[1:]]
    finally:
        for process in workers:
            process.kill()
            process.communicate()
    assert [process.returncode for process in workers[1:]] == [0, 0, 0], texts
    tables = [json.loads((tmp_path / name / "sweep.json").read_text()) for name in folders[1:]]
    assert tables[0] == tables[1] == tables[2]
    assert (tables[0]["trials"], tables[0]["failed"], len(tables[0]["points"])) == (24, 0, 12)
    runs = [path for name in set(folders[1:]) for path in (tmp_path / name).glob("point-*/seed-*/summary.json")]
    assert len(runs) == 24  # each played once, the one that was broken off included
