"""Do MLflow, Weights & Biases and TensorBoard themselves, without a network, have the rows and files of runs?"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorders import TASK, solved

import fedbilevel as fb
from fedbilevel import cli, experiments
from fedbilevel.errors import ConfigurationError, TrackerWarning

pytestmark = pytest.mark.trackers
SECRET = "hunter-two-and-a-half"
SMALL = ["quadratic", "--set", "task.clients=3", "--set", "samples=[2, 2]", "--set", "dim_y=2"]
SMALL += ["--rounds", "4", "--set", "eval_every=2", "--quiet"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("DATABASE_PASSWORD", SECRET)
    yield
    if "wandb" in sys.modules:  # wandb reads settings only once in a process
        sys.modules["wandb"].teardown()


def fails(result, row):
    if row and row["round"] == 6:
        raise KeyboardInterrupt


def resumed_run(tracker: type[fb.trackers.Tracker]) -> fb.Result:
    """Interrupt a run after round 6, with a checkpoint of round 0 only, and resume it."""
    given = {"checkpoint": Path("run.npz"), "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):
        solved(8, tracker(), fails, **given)
    return solved(8, tracker(), resume=True, **given)


def rows_of(result: fb.Result, column: str) -> list[tuple[int, Any]]:
    return [(row["round"], pytest.approx(row[column], rel=1e-6)) for row in result.history.rows]


# ------------------------------------------------------------------------------------------------------------ MLflow


def mlflow_runs() -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("fedbilevel")
    return sorted(client.search_runs([experiment.experiment_id]), key=lambda run: run.info.start_time)


def mlflow_history(run: Any, column: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [(one.step, one.value) for one in MlflowClient().get_metric_history(run.info.run_id, column)]


def test_mlflow_has_parameters_rows_and_files_of_a_run(tmp_path) -> None:
    from mlflow import MlflowClient

    assert cli.main(["run", *SMALL, "--out", "runs/first", "--log", "mlflow"]) == 0
    (run,) = mlflow_runs()
    found = experiments.load_run("runs/first")
    assert (run.info.run_name, run.info.status) == ("runs/first", "FINISHED")
    assert {name: run.data.params[name] for name in ("task.clients", "algorithm.name", "run.rounds", "run.cohort")} == {
        "task.clients": "3", "algorithm.name": "simfbo", "run.rounds": "4", "run.cohort": "none",
    }  # fmt: skip
    for column in ("exchanges", "bytes_down", "relative_error"):
        assert mlflow_history(run, column) == rows_of(found, column)
    files = {file.path for file in MlflowClient().list_artifacts(run.info.run_id)}
    assert files == {"spec.toml", "history.jsonl", "ledger.json", "result.npz", "summary.json", "plot.png"}
    again = ["run", "--resume", "runs/first", "--rounds", "6", "--log", "mlflow", "--quiet"]
    assert cli.main(again) == 0
    (run,) = mlflow_runs()
    assert [step for step, _ in mlflow_history(run, "exchanges")] == [0, 2, 4, 6]
    assert (run.data.params["run.rounds"], run.data.tags["run.rounds"]) == ("4", "6")


def test_a_resumed_run_has_each_row_once_in_mlflow() -> None:
    result = resumed_run(fb.trackers.MLflow)
    (run,) = mlflow_runs()
    assert run.info.status == "FINISHED"
    assert mlflow_history(run, "relative_error") == rows_of(result, "relative_error")


def test_mlflow_has_the_ledger_and_the_result_of_a_run_without_a_folder(tmp_path) -> None:
    from mlflow import MlflowClient

    result = solved(4, fb.trackers.MLflow())
    (run,) = mlflow_runs()
    place = Path(MlflowClient().download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert json.loads((place / "ledger.json").read_text())["exchanges"] == result.ledger.exchanges
    assert fb.Result.load(place / "result.npz").history.rows == result.history.rows


def test_runs_of_a_sweep_are_nested_in_mlflow() -> None:
    sweep = ["sweep", *SMALL, "--grid", "local_steps=1,2", "--out", "runs/steps", "--log", "mlflow"]
    assert cli.main(sweep) == 0
    parent, *children = mlflow_runs()
    assert parent.info.run_name == "steps"
    assert [run.info.run_name for run in children] == ["local_steps-1/seed-0", "local_steps-2/seed-0"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert parent.data.metrics["best.local_steps"] in (1, 2)
    assert "relative_error" in parent.data.metrics


def test_a_server_that_does_not_answer_ends_no_run(monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = fb.trackers.MLflow(tracking_uri="http://me:secret@127.0.0.1:9")
    with pytest.warns(TrackerWarning) as caught:
        assert solved(4, tracker).round == 4
    (said,) = [str(one.message) for one in caught if one.category is TrackerWarning]
    assert said.startswith("MLflow could not record the run (MlflowException: ")
    assert "secret" not in said


def test_the_address_of_a_run_is_not_printed(monkeypatch, capfd) -> None:
    """The tracker does not print the address of a run, which may contain a password.

    MLflow prints it for a store behind a server, and still does so in the user's own calls.
    """
    module = "mlflow.tracking._tracking_service.client"
    monkeypatch.setattr(f"{module}.RestStore", object)
    monkeypatch.setattr(f"{module}.get_workspace_url", lambda: "http://me:secret@host")
    tracker = fb.trackers.MLflow()
    solved(4, tracker)
    assert "secret" not in "".join(capfd.readouterr())
    (run,) = mlflow_runs()
    tracker.mlflow.MlflowClient().set_terminated(run.info.run_id)  # as a user's own code may do
    assert "secret" in capfd.readouterr().out


# ------------------------------------------------------------------------------------------------- Weights & Biases


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a run's file.

    The file has a head of 7 bytes, and blocks of 32 KiB. Before each piece of a record come its checksum (4 bytes), its
    size (2 bytes) and its kind (1 byte), and no piece begins in the last 6 bytes of a block.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


def wandb_files() -> list[Path]:
    """Return the files of all runs, the last one changed at the end, after wandb's own process has ended."""
    sys.modules["wandb"].teardown()
    return sorted(Path("wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)


def wandb_of(file: Path) -> dict[str, list[Any]]:
    found = defaultdict(list)
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        found[kind].append(getattr(record, kind))
    return found


def wandb_rows(file: Path, column: str) -> list[tuple[int, float]]:
    rows = [
        {(one.key or "/".join(one.nested_key)): one.value_json for one in row.item} for row in wandb_of(file)["history"]
    ]
    return [(int(row["round"]), json.loads(row[column])) for row in rows if column in row]


def test_wandb_has_parameters_rows_and_files_of_a_run_and_no_secrets() -> None:
    assert cli.main(["run", *SMALL, "--out", "runs/first", "--log", "wandb"]) == 0
    (file,) = wandb_files()
    found = experiments.load_run("runs/first")
    for column in ("exchanges", "bytes_down", "relative_error"):
        assert wandb_rows(file, column) == rows_of(found, column)
    kinds = wandb_of(file)
    (run,) = kinds["run"]
    assert (run.display_name, run.project) == ("runs/first", "fedbilevel")
    config = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in run.config.update}
    assert (config["task.clients"], config["algorithm.name"]) == (3, "simfbo")
    (artifact,) = kinds["artifact"]
    names = {entry.path for entry in artifact.manifest.contents}
    assert names == {"spec.toml", "history.jsonl", "ledger.json", "result.npz", "summary.json", "plot.png"}
    written = b"".join(path.read_bytes() for path in Path("wandb").rglob("*") if path.is_file())
    for private in (SECRET, "--quiet", "requirements.txt"):
        assert private.encode() not in written


def test_a_resumed_run_is_one_run_in_wandb() -> None:
    result = resumed_run(fb.trackers.WandB)
    first, second = wandb_files()
    assert wandb_of(first)["run"][0].run_id == wandb_of(second)["run"][0].run_id
    steps = [step for file in (first, second) for step, _ in wandb_rows(file, "exchanges")]
    assert set(steps) == {row["round"] for row in result.history.rows}
    (artifact,) = wandb_of(second)["artifact"]  # the files were temporary, and wandb has copies
    copies = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert json.loads(copies["ledger.json"].read_text())["exchanges"] == result.ledger.exchanges
    assert fb.Result.load(copies["result.npz"]).history.rows == result.history.rows


def test_runs_of_a_sweep_are_a_group_in_wandb() -> None:
    fb.sweep(
        fb.SimFBO(), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=2, grid={"local_steps": [1, 2]},
        select="relative_error", metrics=TASK.metrics, callbacks=[fb.trackers.WandB()], progress=False,
    )  # fmt: skip
    runs = [wandb_of(file)["run"][0] for file in wandb_files()]
    assert [run.display_name for run in runs] == ["local_steps=1, seed 0", "local_steps=2, seed 0"]
    assert {run.run_group for run in runs} == {"sweep of local_steps"}


def test_wandb_without_an_account_says_how_to_go_on(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(
        ConfigurationError,
        match=r"No API key configured.*`wandb login`",
    ):
        fb.trackers.WandB(mode="online")


# ------------------------------------------------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_each_round_of_a_resumed_run_once() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = resumed_run(fb.trackers.TensorBoard)
    (folder,) = Path("tensorboard").iterdir()
    with warnings.catch_warnings(action="ignore"):
        shown = EventAccumulator(str(folder)).Reload()
    assert [(one.step, one.value) for one in shown.Scalars("relative_error")] == rows_of(result, "relative_error")
    assert set(shown.Tags()["tensors"]) >= {"parameters/text_summary", "ending/text_summary"}
