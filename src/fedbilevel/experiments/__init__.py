"""Use the command line's functions from Python: typed specs, folders of runs, comparisons.

    from fedbilevel import experiments

    spec = experiments.configure(task="hyper_representation", algorithm="simfbo", settings=["run.rounds=100"])
    result = experiments.run(spec, "runs/first")
    run = experiments.load_run("runs/first")      # run.spec, run.history, run.ledger, run.summary
    groups = experiments.compare_algorithms("quadratic", ["simfbo", "shrofbo"], seeds=[0, 1], out="runs/both")

Each name is loaded when it is first used. So the command line can check its arguments before it loads JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.core.metrics import in_percent
    from fedbilevel.display.curves import COLOURS, COSTS, Curve, costs_of, curve, draw_panel
    from fedbilevel.experiments.compare import comparison_table, load_groups
    from fedbilevel.experiments.folder import Folder, LoadedRun, load_run
    from fedbilevel.experiments.runner import build, complete, resume, run, run_of
    from fedbilevel.experiments.series import TaskCache, compare_algorithms, seeded
    from fedbilevel.experiments.spec import Spec, configure, read_spec, resolve
    from fedbilevel.experiments.study import read_study

__all__ = [
    "COLOURS",
    "COSTS",
    "Curve",
    "Folder",
    "LoadedRun",
    "Spec",
    "TaskCache",
    "build",
    "compare_algorithms",
    "comparison_table",
    "complete",
    "configure",
    "costs_of",
    "curve",
    "draw_panel",
    "in_percent",
    "load_groups",
    "load_run",
    "read_spec",
    "read_study",
    "resolve",
    "resume",
    "run",
    "run_of",
    "seeded",
]

_MODULES = (
    "display.curves",
    *(f"experiments.{one}" for one in ("spec", "folder", "runner", "compare", "series", "study")),
)
"""The modules that define the names above, in the order in which they are searched."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if hasattr(found := import_module(f"fedbilevel.{module}"), name):
                return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
