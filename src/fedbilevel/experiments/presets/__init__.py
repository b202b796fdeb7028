"""Values that work, for each task and data set: what a spec does not say is taken from here.

A field that an algorithm does not have is left out; what is in neither is the algorithm's or the task's own default.
One module per kind of problem; in it, for each task and data set, one table of algorithms.
"""

from fedbilevel.experiments.presets import linear, networks, small
from fedbilevel.experiments.presets.table import Preset

PRESETS = {
    (task, data): found
    for module in (small, linear, networks)
    for task, table in module.PRESETS.items()
    for data, found in table.items()
}
"""Every preset by (task, data set); None stands for every data set without one of its own."""

METHODS = {"classification": "fedavg", "location": "fism", "selection": "fism"}
"""The method where none is named, for tasks that the default one is not for."""


def preset(task: str, data: str | None) -> Preset:
    """The values for a task and a data set; those without an entry have none."""
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))


__all__ = ["METHODS", "PRESETS", "Preset", "preset"]
