"""Values that work, for each task and data set: what a spec does not say is taken from here.

A field that an algorithm does not have is left out; what is in neither is the algorithm's or the task's own default.
One module per task, or per kind of problem where tasks are small; in it, one table of algorithms per data set.
"""

from fedbilevel.experiments.presets import (
    closed_forms,
    few_shot,
    hospitals,
    hyper_cleaning,
    hyper_representation,
    images,
    regularization,
    simple_bilevel,
)
from fedbilevel.experiments.presets.table import Preset

TASKS: dict[str, dict[str | None, Preset]] = {
    "few_shot": few_shot.PRESETS,
    "hospitals": hospitals.PRESETS,
    "hyper_cleaning": hyper_cleaning.PRESETS,
    "hyper_representation": hyper_representation.PRESETS,
    "regularization": regularization.PRESETS,
    **closed_forms.PRESETS,
    **images.PRESETS,
    **simple_bilevel.PRESETS,
}
PRESETS = {(task, data): found for task, table in TASKS.items() for data, found in table.items()}
"""Every preset by (task, data set); None stands for every data set without one of its own."""

METHODS = {"classification": "fedavg", "location": "fism", "selection": "fism"}
"""The method where none is named, for tasks that the default one is not for."""


def preset(task: str, data: str | None) -> Preset:
    """The values for a task and a data set; those without an entry have none."""
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))


__all__ = ["METHODS", "PRESETS", "Preset", "preset"]
