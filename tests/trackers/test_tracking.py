"""Does a tracker get the rows, parameters, files and endings of runs, and does a tracker that fails disturb no run?"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from recorders import TASK, InMemory, Service, solved

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.engines.history import History
from fedbilevel.engines.tracking import TrackedRun, Tracking, tracked_group
from fedbilevel.errors import ConfigurationError, TrackerWarning
from fedbilevel.experiments.names import RIVALS
from refusals import refuses

SMALL = ["task.clients=3", "task.samples=[2, 2]", "task.dim_y=2", "run.rounds=4", "run.eval_every=2"]


@pytest.fixture
def service() -> Service:
    return Service()


def only(service: Service):
    (kept,) = service.runs.values()
    return kept


def test_rows_parameters_and_the_ending_are_those_of_the_run(service) -> None:
    result = solved(4, InMemory(service), key=3)
    kept = only(service)
    assert kept.rows == result.history.rows
    assert kept.steps == [0, 2, 4]
    assert {"exchanges", "bytes_up", "bytes_down", "relative_error"} <= set(kept.rows[-1])
    flat = kept.run.flat_parameters()
    expected = {"algorithm.name": "SimFBO", "algorithm.server_lr.x": 0.05, "algorithm.local_steps": 5}
    expected |= {"run.rounds": 4, "run.seed": 3, "run.clients": 2, "run.cohort": "none"}
    assert {name: flat.get(name) for name in expected} == expected
    assert (kept.ending, kept.outcome) == ("finished", {})


def test_a_run_without_a_folder_has_its_ledger_and_result_at_the_end(service, tmp_path) -> None:
    result = solved(4, InMemory(service))
    kept = only(service)
    assert kept.files == ["ledger.json", "result.npz"]
    assert json.loads(kept.content[0])["exchanges"] == result.ledger.exchanges
    (tmp_path / "result.npz").write_bytes(kept.content[1])
    loaded = fb.Result.load(tmp_path / "result.npz")
    np.testing.assert_array_equal(loaded.x, result.x)
    np.testing.assert_array_equal(loaded.y, result.y)
    assert loaded.history.rows == result.history.rows


def test_a_temporary_folder_that_cannot_be_made_ends_no_run(service, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.warns(TrackerWarning, match=r"^InMemory .*No such file"):
        assert solved(4, InMemory(service)).round == 4
    assert only(service).steps == [0, 2, 4]


def test_a_run_with_a_folder_needs_no_temporary_folder(service, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    run = TrackedRun("a run", folder=tmp_path, files=[tmp_path / "spec.toml", tmp_path / "not written"])
    (tmp_path / "spec.toml").touch()
    with Tracking([tracker := InMemory(service)], run) as tracking:
        tracking.ended(solved(4, tracker))
    kept = only(service)
    assert (kept.ending, kept.files) == ("finished", ["spec.toml"])


def test_the_reason_to_stop_is_recorded(service) -> None:
    solved(10, InMemory(service), fb.stop_when("exchanges", above=1))
    assert (only(service).ending, only(service).steps) == ("finished", [0, 2])
    assert only(service).outcome == {"stopped": "exchanges reached 1"}


class TrialPruned(Exception):
    """An error with the name of Optuna's error for pruned trials."""


@pytest.mark.parametrize(
    ("error", "ending", "outcome"),
    [
        (ValueError("it broke\nat once"), "failed", {"stopped": "it broke at once"}),
        (TrialPruned("too slow"), "killed", {"stopped": "too slow"}),
        (KeyboardInterrupt(), "killed", {}),
    ],
)
def test_a_run_that_an_error_ends_is_closed(service, error, ending, outcome) -> None:
    def fails(result, row):
        if row and row["round"]:
            raise error

    with pytest.raises(type(error)):
        solved(4, InMemory(service), fails)
    kept = only(service)
    assert (kept.ending, kept.outcome, kept.steps, kept.files) == (ending, outcome, [0, 2], [])


def test_arguments_that_are_refused_leave_nothing(service) -> None:
    with pytest.raises(ConfigurationError):
        solved(4, InMemory(service), cohort=9)
    assert service.runs == {}


def test_one_tracker_records_each_of_several_runs(service) -> None:
    tracker = InMemory(service)
    solved(2, tracker)
    solved(4, tracker)
    assert [kept.steps for kept in service.runs.values()] == [[0, 2], [0, 2, 4]]


# --------------------------------------------------------------------------------------------------- resumed runs


def test_a_resumed_run_continues_without_a_row_twice_or_missing(service, tmp_path) -> None:
    """A resumed run is recorded with each row once, even if it was killed after a row that no checkpoint has."""
    file = tmp_path / "run.npz"

    def fails(result, row):
        if row is not None and row["round"] == 4:
            file.rename(tmp_path / "kept.npz")  # the checkpoint of round 2

    with pytest.raises(OSError, match="killed"):
        solved(8, InMemory(service), fails, Killed(6), checkpoint=file, checkpoint_every=2)
    os.replace(tmp_path / "kept.npz", file)
    (tmp_path / "run.previous.npz").unlink()
    assert only(service).steps == [0, 2, 4, 6]
    resumed = solved(8, InMemory(service), checkpoint=file, checkpoint_every=2, resume=True)
    assert only(service).steps == [0, 2, 4, 6, 8]
    assert [without_seconds(row) for row in only(service).rows] == [*map(without_seconds, resumed.history.rows)]


class Killed:
    """A callback that ends the run at a round with an error, in place of a kill."""

    def __init__(self, round: int) -> None:
        self.round = round

    def __call__(self, result, row):
        if result.round == self.round:
            raise OSError("killed")


def without_seconds(row: dict) -> dict:
    return {name: value for name, value in row.items() if name != "seconds"}


def test_a_tracker_that_comes_later_gets_the_rows_before(service, tmp_path) -> None:
    solved(4, checkpoint=tmp_path / "run.npz")
    solved(8, InMemory(service), checkpoint=tmp_path / "run.npz", resume=True)
    assert only(service).steps == [0, 2, 4, 6, 8]


def test_a_finished_run_that_is_resumed_is_recorded_too(service, tmp_path) -> None:
    solved(4, checkpoint=tmp_path / "run.npz")
    solved(4, InMemory(service), checkpoint=tmp_path / "run.npz", resume=True)
    assert (only(service).steps, only(service).ending) == ([0, 2, 4], "finished")


def test_a_new_run_is_not_taken_for_one_before(service, tmp_path) -> None:
    """A new run is recorded as another one, even if its checkpoint has the name of an earlier run's checkpoint."""
    for _ in range(2):
        solved(2, InMemory(service), checkpoint=tmp_path / "run.npz")
        for file in tmp_path.glob("*.npz"):  # but not the file with the identifiers
            file.unlink()
    assert [kept.steps for kept in service.runs.values()] == [[0, 2], [0, 2]]


def test_a_run_that_returns_to_an_earlier_round_records_it_again(service) -> None:
    tracker = InMemory(service)
    tracker.begin(TrackedRun("run"))
    rows = [{"round": 0}, {"round": 2}, {"round": 4}, {"round": 2, "halvings": 1}]
    for row in rows:
        tracker(SimpleNamespace(history=History(rows[:1])), row)
    assert only(service).steps == [0, 2, 4, 2]


@pytest.mark.parametrize("content", ["{", "[]", '{"InMemory": 3}'])
def test_a_damaged_file_of_identifiers_is_named_before_the_run_goes_on(service, tmp_path, content) -> None:
    solved(4, InMemory(service), checkpoint=tmp_path / "run.npz")
    memory = tmp_path / "run.npz.trackers.json"
    memory.write_text(content)
    tracker = InMemory(service)
    with pytest.raises(ConfigurationError) as caught:
        solved(8, tracker, checkpoint=tmp_path / "run.npz", resume=True)
    assert str(caught.value).startswith(f"{memory} is damaged (")
    assert "delete it, and trackers record the run as a new one, with the rows so far" in str(caught.value)
    memory.unlink()
    solved(8, tracker, checkpoint=tmp_path / "run.npz", resume=True)
    assert [kept.steps for kept in service.runs.values()] == [[0, 2, 4], [0, 2, 4, 6, 8]]


@pytest.mark.slow
def test_a_damaged_file_of_identifiers_in_a_folder_is_named(service, tmp_path) -> None:
    spec = experiments.configure(task="quadratic", settings=SMALL)
    tracker = InMemory(service)
    experiments.run(spec, tmp_path / "first", callbacks=[tracker], progress=False)
    memory = tmp_path / "first" / "trackers.json"
    memory.write_text("{")
    with refuses("", fact=f"{memory} is damaged ("):
        experiments.resume(memory.parent, rounds=6, callbacks=[tracker], progress=False)
    group = Tracking([tracker], tracked_group("seeds", {}, memory.parent))
    with refuses("", fact=f"{memory} is damaged ("):
        group.__enter__()
    assert tracker.recordings == []


# ------------------------------------------------------------------------------------------------- what goes wrong


def test_a_service_that_fails_is_warned_of_once_and_its_rows_wait(service) -> None:
    tracker = InMemory(service)

    def back_after_four(result, row):
        service.works = result.round >= 4

    service.works = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = solved(8, back_after_four, tracker)
    said = [str(one.message) for one in caught if one.category is TrackerWarning]
    assert said == [
        "InMemory could not record the run (ConnectionError: http://***@tracker.example does not answer): the run "
        "continues without it, and tries again with later rows"
    ]
    assert result.round == 8
    assert (only(service).steps, only(service).ending) == ([0, 2, 4, 6, 8], "finished")


def test_a_password_is_hidden_although_the_message_is_cut_within_it(service) -> None:
    def fails(result, row):
        raise OSError("x" * 170 + " http://me:secret-that-is-long-enough-to-be-cut@tracker.example")

    with pytest.raises(OSError, match="secret"):
        solved(8, InMemory(service), fails)
    assert "http://***@" in only(service).outcome["stopped"]
    assert "secret" not in only(service).outcome["stopped"]


def test_secrets_of_urls_are_no_parameters() -> None:
    run = TrackedRun("run", {"task": {"data": "https://me:secret@host/data.csv?token=secret"}})
    assert run.flat_parameters() == {"task.data": "https://***@host/data.csv?token=***"}
    run = TrackedRun("a", {"task": {"password": "hunter2", "tokens": "all", "passes": 3}})
    assert run.flat_parameters() == {"task.password": "***", "task.tokens": "all", "task.passes": 3}


def test_files_with_a_secret_among_their_parameters_stay_here(tmp_path) -> None:
    """If a parameter contains a secret, files that contain the parameters are not recorded."""
    spec, picture = tmp_path / "spec.toml", tmp_path / "run.png"
    for file in (spec, picture):
        file.write_text("any")
    files = {"files": [spec, picture, tmp_path / "none"], "with_seed": (spec,)}
    assert TrackedRun("run", {"task": {"data": "https://me:secret@host/"}}, **files).attached() == [picture]
    assert TrackedRun("run", {"task": {"data": "https://host/"}}, **files).attached() == [spec, picture]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("password", "correct horse battery"), ("password", 'ab,c="d e"'), ("password", 123456), ("token", "123456"),
        ("db.pass", "12345"), ("db.pass", 12345), ("passwords", ["a", "b"]), ("keys.api_key", 1.5),
        ("api_keys", [1, 2]), ("credentials.user", "me"), ("secret", ("a", "b")),
    ],
)  # fmt: skip
def test_a_parameter_with_the_name_of_a_secret_is_hidden_as_a_whole(tmp_path, name, value) -> None:
    (spec := tmp_path / "spec.toml").write_text("any")
    for part in reversed(name.split(".")):
        value = {part: value}
    run = TrackedRun("run", value, files=[spec], with_seed=(spec,))
    assert (run.flat_parameters(), run.attached()) == ({name: "***"}, [])


def test_a_secret_that_is_not_given_hides_nothing(tmp_path) -> None:
    (spec := tmp_path / "spec.toml").write_text("any")
    parameters = {"password": None, "db": {"pass": ""}, "tokens": 12, "passes": [3], "auth": "none"}
    run = TrackedRun("run", parameters, files=[spec], with_seed=(spec,))
    assert run.flat_parameters() == {
        "password": "none", "db.pass": "", "tokens": 12, "passes": "[3]", "auth": "none",
    }  # fmt: skip
    assert run.attached() == [spec]


def test_a_long_parameter_is_no_secret(tmp_path) -> None:
    """A parameter that is too long to be searched for secrets does not count as a secret."""
    spec = tmp_path / "spec.toml"
    spec.write_text("any")
    capacities = {"clients": {"capacity": [0.25] * 5000}}
    assert TrackedRun("run", capacities, files=[spec], with_seed=(spec,)).attached() == [spec]


def test_a_service_that_never_answers_leaves_the_result_as_it_is(service) -> None:
    service.works = False
    with pytest.warns(TrackerWarning) as caught:
        failing = solved(4, InMemory(service))
    assert [len([one for one in caught if one.category is TrackerWarning]), service.runs] == [1, {}]
    assert [*map(without_seconds, failing.history.rows)] == [*map(without_seconds, solved(4).history.rows)]


def test_a_service_that_fails_slowly_takes_a_tenth_of_the_time_at_most(service, monkeypatch) -> None:
    """Attempts at a service that fails take at most about a tenth of the time.

    Each takes 3 s here, so that the next one comes 30 s after its end.
    """
    now = [0.0]
    monkeypatch.setattr("fedbilevel.engines.tracking.time.monotonic", lambda: now[0])
    attempts = []

    def slow() -> None:
        attempts.append(now[0])
        now[0] += 3
        raise ConnectionError("no answer")

    tracker = InMemory(service)
    tracker.begin(TrackedRun("run"))

    def for_100_seconds() -> None:
        while now[0] < 100:
            tracker._attempt(slow)
            now[0] += 1

    with pytest.warns(TrackerWarning, match="no answer"):
        for_100_seconds()
    assert attempts == [0, 33, 66, 99]


def test_a_missing_library_says_what_installs_it(monkeypatch) -> None:
    for package, name in {"mlflow": "MLflow", "tensorboardX": "TensorBoard", "wandb": "WandB"}.items():
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigurationError) as caught:
            getattr(fb.trackers, name)()
        command = f'in a clone of the repository, pip install ".[{package.lower().removesuffix("x")}]"'
        assert str(caught.value) == f"trackers.{name} needs {package}, which is not installed: {command}"


def test_a_wrong_argument_is_named_before_anything_runs() -> None:
    with refuses("argument of TensorBoard", "foldr", near="folder"):
        fb.trackers.TensorBoard(foldr="here")


# --------------------------------------------------------------------------------------------- experiments and sweeps


def test_an_experiment_is_recorded_with_its_spec_and_files(service, tmp_path) -> None:
    spec = experiments.configure(task="quadratic", settings=SMALL)
    result = experiments.run(spec, tmp_path / "first", callbacks=[InMemory(service)], progress=False)
    kept = only(service)
    assert kept.run.name == f"{tmp_path.name}/first"
    assert kept.rows == result.history.rows
    flat = kept.run.flat_parameters()
    expected = {"task.name": "quadratic", "task.clients": 3, "task.samples": "[2, 2]", "algorithm.name": "simfbo"}
    assert {name: flat.get(name) for name in expected} == expected
    assert kept.files == ["spec.toml", "history.jsonl", "ledger.json", "result.npz", "summary.json", "plot.png"]
    experiments.resume(tmp_path / "first", rounds=6, callbacks=[InMemory(service)], progress=False)
    assert (only(service).steps, only(service).ending) == ([0, 2, 4, 6], "finished")


def test_an_experiment_without_a_folder_is_recorded(service) -> None:
    spec = experiments.configure(task="quadratic", settings=SMALL)
    experiments.build(spec).solve(spec.run, rounds=4, eval_every=2, callbacks=[InMemory(service)], progress=False)
    assert only(service).steps == [0, 2, 4]


@pytest.mark.slow
def test_a_search_over_x_is_recorded(service, tmp_path) -> None:
    pytest.importorskip("optuna")
    settings = ["run.exchanges=60", "low=-1", "high=1", "trial_exchanges=20", *SMALL[:3]]
    spec = experiments.configure(task="quadratic", algorithm=RIVALS["random"], settings=settings)
    experiments.run(spec, tmp_path / "search", callbacks=[InMemory(service)], progress=False, plot=False)
    assert only(service).ending == "finished"
    assert len(only(service).rows) > 1


def test_runs_of_a_sweep_have_one_parent(service) -> None:
    given = {"grid": {"server_lr.x": [0.05, 0.1]}, "select": "relative_error", "metrics": TASK.metrics}
    found = fb.sweep(
        fb.SimFBO(), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=4, seeds=[0, 1],
        callbacks=[InMemory(service)], progress=False, **given,
    )  # fmt: skip
    parent, *children = service.runs
    assert [service.runs[child].run.name for child in children] == [
        f"server_lr.x={x}, seed {seed}" for seed in (0, 1) for x in (0.05, 0.1)
    ]
    assert {service.runs[child].group for child in children} == {parent}
    assert service.runs[children[1]].run.flat_parameters()["algorithm.server_lr.x"] == 0.1
    best = {"relative_error": found.rows[0]["relative_error"], "best.server_lr.x": found.best["server_lr.x"]}
    assert (service.runs[parent].outcome, service.runs[parent].ending) == (best, "finished")


def test_an_interrupted_sweep_goes_on_in_the_same_group(service, tmp_path) -> None:
    def swept(*callbacks):
        fb.sweep(
            fb.SimFBO(), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=4, grid={"server_lr.x": [0.05, 0.1]},
            select="relative_error", metrics=TASK.metrics, folder=tmp_path, callbacks=[InMemory(service), *callbacks],
            progress=False,
        )  # fmt: skip

    with pytest.raises(OSError, match="killed"):
        swept(Killed(1))
    swept()
    groups = [kept for kept in service.runs.values() if kept.run.is_group]
    assert [kept.ending for kept in groups] == ["finished"]
    assert [kept.group for kept in service.runs.values()] == ["", "run-0", "run-0"]
    assert all(len(set(kept.steps)) == len(kept.steps) for kept in service.runs.values())
