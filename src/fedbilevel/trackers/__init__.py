"""Provide trackers, which record runs in services for experiments, as callbacks of `fedbilevel.solve`.

    fb.solve(fb.SimFBO(), problem, clients, x0, y0, rounds=300, callbacks=[fb.trackers.MLflow(experiment="steps")])

Each tracker has a library, which an extra installs; the library is imported when the tracker is made.
"""

from collections.abc import Sequence

from fedbilevel.engines.tracking import Record, TrackedRun, Tracker
from fedbilevel.trackers.mlflow import MLflow
from fedbilevel.trackers.tensorboard import TensorBoard
from fedbilevel.trackers.wandb import WandB

__all__ = ["MLflow", "Record", "TensorBoard", "TrackedRun", "Tracker", "WandB"]

BY_NAME: dict[str, type[Tracker]] = {"mlflow": MLflow, "tensorboard": TensorBoard, "wandb": WandB}
"""The trackers by the names that the command line has for them."""


def made(names: Sequence[str]) -> list[Tracker]:
    """Make the trackers of some names, with their default arguments.

    Raises:
        ConfigurationError: the library of one is not installed, or is not set up.
    """
    return [BY_NAME[name]() for name in names]
