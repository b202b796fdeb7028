"""Trackers, which record runs in MLflow, TensorBoard or Weights & Biases. They are callbacks of `fedbilevel.solve`.

    fb.solve(fb.SimFBO(), problem, clients, x0, y0, rounds=300, callbacks=[fb.trackers.MLflow(experiment="steps")])

Each tracker needs a library, which an extra installs. The library is imported when the tracker is made.
"""

from collections.abc import Sequence

from fedbilevel.engines.tracking import Record, TrackedRun, Tracker
from fedbilevel.trackers.mlflow import MLflow
from fedbilevel.trackers.tensorboard import TensorBoard
from fedbilevel.trackers.wandb import WandB

__all__ = ["MLflow", "Record", "TensorBoard", "TrackedRun", "Tracker", "WandB"]

BY_NAME: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
"""The trackers, by their names on the command line."""


def made(names: Sequence[str]) -> list[Tracker]:
    """Make the trackers with these names, with their default arguments.

    Raises:
        ConfigurationError: the library of a tracker is not installed, or is not set up.
    """
    return [BY_NAME[name]() for name in names]
