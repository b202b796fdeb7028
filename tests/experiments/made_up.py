"""Groups of finished runs with invented numbers, for tests of tables, files and pictures of runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fedbilevel.engines.history import History
from fedbilevel.experiments.compare import RunGroup
from fedbilevel.experiments.spec import configure

SPEC = configure(task="quadratic")


def made_up_run(
    name: str, seed: int, values: list[float], *, metric: str = "relative_error", algorithm: str = "simfbo"
):
    """Return an object like that of `load_run`, whose costs have six digits and more.

    Each row adds 123,450 exchanges and 61.7 GB to the costs.
    """
    rows = [
        {"round": 1000 * i, "exchanges": 123_450 * i, "bytes_down": i * 10**9, "bytes_up": 60_700_000_000 * i}
        | {"gradients": 9_876_500 * i, "hvps": 1_234_500 * i, "flops": 5 * 10**14 * i, "seconds": 1234.5 * i}
        | {"time": 123_450.0 * i, metric: value}
        for i, value in enumerate(values)
    ]
    summary = {"metric": metric, "final": values[-1], "best": min(values), "best_round": 1000, "stopped": ""}
    summary |= {"task": "quadratic", "algorithm": algorithm, "data": None, "seed": seed, "last_row": rows[-1]}
    summary |= {"rounds": rows[-1]["round"], "seconds_in_rounds": rows[-1]["seconds"]}
    summary |= {"seconds_compiling_this_time": 1.5, "seconds_this_time": 12345.6}
    spec = SPEC.replace(run={"seed": seed})
    named = SimpleNamespace(
        algorithm=SimpleNamespace(name=algorithm), run=spec.run, task=spec.task, data=spec.data, tables=spec.tables
    )
    folder = SimpleNamespace(path=Path("runs") / name / f"seed-{seed}")
    return SimpleNamespace(folder=folder, spec=named, history=History(rows), summary=summary, metric=metric)


def made_up_groups(names: list[str], seeds: int, **fields) -> list[RunGroup]:
    """Return a group for each name. Each group has a smaller error than the one before, and long numbers."""
    groups = []
    for i, name in enumerate(names):
        values = [[1.0, 0.0678912 / 10**i + 0.0001234 * seed] for seed in range(seeds)]
        groups.append(RunGroup(name, [made_up_run(name, seed, one, **fields) for seed, one in enumerate(values)]))
    return groups
