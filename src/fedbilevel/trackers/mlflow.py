"""Record runs in MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import explain_misspelt
from fedbilevel.engines.history import Row
from fedbilevel.engines.tracking import Ending, Record, TrackedRun, Tracker

EXPERIMENT = "fedbilevel"
STATUS: dict[Ending, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
BATCH = 100  # the number of parameters that MLflow takes at a time
SILENCE = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"  # MLflow's environment variable that stops its printing of addresses
TO_FIND = "exchanges"  # a column of every row: its steps in MLflow show which rows MLflow already has


@explain_misspelt
class MLflow(Tracker):
    """A tracker that records runs in MLflow.

    It records parameters, the columns of the history as metrics with the round as the step, and files.

    A sweep becomes a run in MLflow, with a nested run for each run of the sweep. A resumed run continues its run in
    MLflow, and no row is recorded twice. MLflow cannot change a parameter, so a parameter that differs after a
    resumption becomes a tag. An active run of the user is not touched.

    Args:
        experiment: the name of the experiment, which is made if it does not exist; None: the name in the environment
            variable MLFLOW_EXPERIMENT_NAME, else "fedbilevel".
        tracking_uri: the address of the store, such as "http://localhost:5000", or "sqlite:///mlflow.db", which needs
            no server; None: the address in MLFLOW_TRACKING_URI, else MLflow's default.

    Raises:
        ConfigurationError: MLflow is not installed.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self.mlflow = self.library("mlflow", "mlflow")
        self.experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        self.tracking_uri = tracking_uri

    def open(self, run: TrackedRun, group: Record | None, identifier: str, last: int) -> Record:
        client = self.mlflow.MlflowClient(self.tracking_uri)
        if not (identifier and self._is_there(client, identifier)):
            tags = {"mlflow.parentRunId": group.identifier} if group else {}
            made = client.create_run(self._experiment_id(client), tags=tags, run_name=run.name)
            return MLflowRun(self.mlflow, client, made.info.run_id, run)
        client.update_run(identifier, status="RUNNING")
        return MLflowRun(self.mlflow, client, identifier, run)

    def _is_there(self, client: Any, identifier: str) -> bool:
        """Return whether the store has a run, which may have been recorded in another store, or deleted."""
        try:
            return bool(client.get_run(identifier).info.lifecycle_stage == "active")
        except self.mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _experiment_id(self, client: Any) -> str:
        """Return the identifier of the experiment, and make the experiment if it does not exist.

        Another process may make it at the same time.
        """
        if (found := client.get_experiment_by_name(self.experiment)) is not None:
            return str(found.experiment_id)
        try:
            return str(client.create_experiment(self.experiment))
        except self.mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(client.get_experiment_by_name(self.experiment).experiment_id)


class MLflowRun(Record):
    """The record of a run in MLflow, where the run is new or existed before.

    Args:
        mlflow: the library.
        client: MLflow's client of the store.
        identifier: the identifier of the run in MLflow.
        run: the run to record.
    """

    def __init__(self, mlflow: Any, client: Any, identifier: str, run: TrackedRun) -> None:
        steps = [metric.step for metric in client.get_metric_history(identifier, TO_FIND)]
        super().__init__(identifier, max(steps, default=-1))
        self.entities, self.client = mlflow.entities, client
        there = client.get_run(identifier).data
        given = {allowed(name): str(value) for name, value in run.flat_parameters().items()}
        new = [self.entities.Param(name, value) for name, value in given.items() if name not in there.params]
        for start in range(0, len(new), BATCH):
            client.log_batch(identifier, params=new[start : start + BATCH])
        for name, value in given.items():
            if there.params.get(name, value) != value:
                client.set_tag(identifier, name, value)

    def add(self, row: Row) -> None:
        self._metrics({name: value for name, value in row.items() if name != "round"}, int(row["round"]))
        self.last = int(row["round"])

    def close(self, ending: Ending, outcome: Mapping[str, Any], files: Sequence[Path]) -> None:
        numbers = {name: value for name, value in outcome.items() if isinstance(value, int | float)}
        self._metrics(numbers, max(self.last, 0))
        for name, value in outcome.items():
            if name not in numbers:
                self.client.set_tag(self.identifier, allowed(name), str(value))
        for file in files:
            self.client.log_artifact(self.identifier, str(file))
        with unprinted_links():
            self.client.set_terminated(self.identifier, STATUS[ending])

    def _metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        metrics = [self.entities.Metric(allowed(name), float(value), now, step) for name, value in values.items()]
        self.client.log_batch(self.identifier, metrics=metrics)


@contextmanager
def unprinted_links() -> Iterator[None]:
    """Within the block, stop MLflow from printing the addresses of runs, which may contain a password."""
    before = os.environ.get(SILENCE)
    os.environ[SILENCE] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SILENCE]
        else:
            os.environ[SILENCE] = before


def allowed(name: str) -> str:
    """Return a name with "_" in place of all characters that MLflow does not allow in names."""
    return re.sub(r"[^\w\-. /]", "_", name)
