"""Record runs in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fedbilevel.core.errors import ConfigurationError, explain_misspelt, require
from fedbilevel.engines.history import Row
from fedbilevel.engines.tracking import Ending, Record, TrackedRun, Tracker
from fedbilevel.wording import in_a_line

PROJECT = "fedbilevel"
LIMITS: dict[str, Any] = {
    "console": "off",
    "disable_git": True,
    "quiet": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}
"""Settings by which wandb does not record output, command line, user, host, packages, code and repository."""


@explain_misspelt
class WandB(Tracker):
    """A tracker that records runs in Weights & Biases.

    It records parameters, the columns of the history over the rounds, and files.

    The runs of a sweep become a group. A resumed run continues its run in Weights & Biases. wandb records neither the
    command line nor the environment, the code, the output or the host.

    Args:
        project: the name of the project; None: the name in the environment variable WANDB_PROJECT, else "fedbilevel".
        entity: the user or team; None: wandb's default.
        mode: "online", or "offline", which needs neither network nor account (`wandb sync` uploads such runs later);
            None: the mode in WANDB_MODE, else wandb's default, which is "online".
        folder: the folder in which wandb makes a folder "wandb" for its files; None: the folder in WANDB_DIR, else ".".

    Raises:
        ConfigurationError: wandb is not installed, or the mode is online and wandb has no key of an account.
    """

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        require(mode in (None, "online", "offline"), "mode", mode, "'online', 'offline' or None")
        self.wandb = self.library("wandb", "wandb")
        self.project = project or os.environ.get("WANDB_PROJECT", PROJECT)
        self.entity, self.mode, self.folder = entity, mode, folder
        try:
            if (mode or self.wandb.setup().settings.mode) == "online":
                self.wandb.login()
        except (self.wandb.UsageError, ValueError) as error:  # no key of an account, or wrong settings
            how = "run `wandb login`, or record without a network: mode='offline', or WANDB_MODE=offline"
            why = f"trackers.WandB needs an account of Weights & Biases ({in_a_line(error)}): {how}"
            raise ConfigurationError(why) from error
        except self.wandb.Error:  # no network, or a wrong key: `open` tries again, and its error is a warning
            pass

    def open(self, run: TrackedRun, group: Record | None, identifier: str, last: int) -> Record:
        if run.is_group:
            return Record(run.name)
        opened = self.wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.folder,
            name=run.name,
            group=group.identifier if group else None,
            id=identifier or None,
            resume="allow" if identifier else None,
            config=run.flat_parameters(),
            allow_val_change=True,
            reinit="create_new",
            settings=self.wandb.Settings(**LIMITS),
        )
        return WandBRun(self.wandb, opened, last)


class WandBRun(Record):
    """The record of a run in Weights & Biases.

    Args:
        wandb: the library.
        run: the run in the library.
        last: the round of the last row that was recorded before a resumption.
    """

    def __init__(self, wandb: Any, run: Any, last: int) -> None:
        super().__init__(run.id, max(last, int(run.summary.get("round", -1))))
        self.wandb, self.run = wandb, run
        run.define_metric("*", step_metric="round")

    def add(self, row: Row) -> None:
        self.run.log(dict(row))
        self.last = int(row["round"])

    def close(self, ending: Ending, outcome: Mapping[str, Any], files: Sequence[Path]) -> None:
        self.run.summary.update({"ending": ending, **outcome})
        artifact = self.wandb.Artifact(f"run-{self.run.id}", type="run")
        for file in files:
            if file.suffix == ".png":
                self.run.log({file.stem: self.wandb.Image(str(file)), "round": max(self.last, 0)})
            artifact.add_file(str(file))
        if files:
            self.run.log_artifact(artifact)
        self.run.finish(exit_code=0 if ending == "finished" else 1)
