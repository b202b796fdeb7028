"""A run folder: the names of its files, writing them whole or not at all, reading them back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.engines.history import History
from fedbilevel.experiments.own_task import label
from fedbilevel.experiments.places import default_path
from fedbilevel.experiments.spec import Spec, read_spec


@dataclass(frozen=True)
class Folder:
    """Where a run keeps its files."""

    path: Path

    @classmethod
    def new(cls, spec: Spec) -> Folder:
        """A place of its own for a run, in ./runs."""
        return cls(default_path(label(spec.task.name), spec.algorithm.name, spec.data))

    @property
    def spec(self) -> Path:
        return self.path / "spec.toml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def history(self) -> Path:
        return self.path / "history.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.npz"

    @property
    def result(self) -> Path:
        return self.path / "result.npz"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    def sweep(self) -> None:
        """Remove the temporary files of a process that was killed while it wrote."""
        for file in self.path.glob(".*.tmp"):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class LoadedRun:
    """What a run folder holds, without its arrays."""

    folder: Folder
    spec: Spec
    history: History
    ledger: dict[str, Any]
    summary: dict[str, Any]

    @property
    def metric(self) -> str:
        """The task's first metric."""
        return str(self.summary["metric"])


def load_run(path: str | Path) -> LoadedRun:
    """Read a finished run's folder. Nothing of it is executed: the code of a user's own task is not needed.

    Raises:
        ConfigurationError: it is not a run folder, or its run has not finished.
    """
    folder = Folder(Path(path))
    require(folder.path.is_dir(), "run folder", str(folder.path), "an existing folder")
    require(folder.spec.is_file(), "run folder", str(folder.path), "the folder of a run (it has no spec.toml)")
    if not folder.summary.is_file():
        raise ConfigurationError(f"the run in {folder.path} has not finished: fedbilevel run --resume {folder.path}")
    try:
        history = History.from_jsonl(folder.history.read_text(encoding="utf-8"))
        ledger = json.loads(folder.ledger.read_text(encoding="utf-8"))
        summary = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder.path} is damaged: {error}") from error
    return LoadedRun(folder, read_spec(folder.spec, run_code=False), history, ledger, summary)
