"""What a sweep leaves: its table, CSV, JSON and picture, and the chosen spec, which `fedbilevel run` takes.

Numbers that depend on this machine's speed are left out: a sweep that was interrupted leaves the same files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbilevel import __version__
from fedbilevel.core.metrics import text
from fedbilevel.experiments import plots, toml
from fedbilevel.experiments.export import csv_text
from fedbilevel.experiments.folder import write_json, write_text
from fedbilevel.experiments.layout import fitted
from fedbilevel.experiments.names import label
from fedbilevel.experiments.spec import Spec
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import Job, measured_on_test
from fedbilevel.sweeps.standing import COSTS, Standing
from fedbilevel.sweeps.sweep import place_of

SCHEMA = 1  # of the JSON file; docs/how-to/sweep.md says what is in it
CHOSEN, CSV, JSON, PICTURE = "chosen.toml", "sweep.csv", "sweep.json", "sweep.png"
DROPPED_FIRST = ("MB", "exchanges", "rounds")


def write(sweep: Sweep, folder: Path) -> dict[str, Path]:
    """Write all files, each whole or not at all; their paths. Where every point failed there is no chosen spec."""
    write_text(folder / CSV, csv_text([_run(sweep, job) for job in _last_jobs(sweep)]))
    write_json(folder / JSON, as_json(sweep))
    plots.save(sweep.plot(), folder / PICTURE)
    written = {"table": folder / CSV, "also": folder / JSON, "plot": folder / PICTURE}
    if sweep.winner is None:
        (folder / CHOSEN).unlink(missing_ok=True)
        return written
    write_text(folder / CHOSEN, chosen_toml(sweep, folder / CHOSEN))
    return {**written, "chosen": folder / CHOSEN}


def sweep_table(sweep: Sweep, width: int | None = None) -> Table:
    """One row for each point, best first; costs are means over the seeds."""
    found, select = sweep.standings, sweep.plan.select
    columns = {"rank": [str(rank) if one.mean is not None else "–" for rank, one in enumerate(found, 1)]}
    columns |= {name: [_value(one, name) for one in found] for name in sweep.plan.fields}
    columns[select] = [_mean(select, one) for one in found]
    columns |= {
        "rounds": [f"{one.cost('rounds'):,.0f}" for one in found],
        "exchanges": [f"{one.cost('exchanges'):,.0f}" for one in found],
        "MB": [f"{one.cost('bytes') / 1e6:,.1f}" for one in found],
    }
    texts = [name for name in sweep.plan.fields if any(isinstance(one.values.get(name), str) for one in found)]
    if any(one.error for one in found):
        columns["failed"] = [one.error for one in found]
    title = f"{title_of(sweep)}: {sweep.chosen_on}"
    return fitted(title, columns, width, texts=[*texts, "failed"], droppable=DROPPED_FIRST, notes=[f"{sweep.effort}."])


def title_of(sweep: Sweep) -> str:
    """The task, algorithm and data of the sweep, where its points have them in common."""
    specs = [spec for spec in sweep.made if isinstance(spec, Spec)]
    parts = [{label(spec.task.name) for spec in specs}, {label(spec.algorithm.name) for spec in specs}]
    parts.append({spec.data or "" for spec in specs})
    return " · ".join(name for names in parts for name in names if len(names) == 1 and name)


def _value(one: Standing, name: str) -> str:
    return toml.value(one.values[name]).strip('"') if name in one.values else "–"


def _mean(select: str, one: Standing) -> str:
    if one.mean is None:
        return "–"
    spread = "" if one.sd is None else f" ± {text(select, one.sd)}"
    return (text(select, one.mean).removesuffix(" %") if spread else text(select, one.mean)) + spread


def chosen_toml(sweep: Sweep, path: Path) -> str:
    """The spec of the best point, with the number of trials it was chosen among."""
    winner, seeds = sweep.winner, sweep.plan.seeds
    assert winner is not None
    several = f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else ""
    spec: Spec = sweep.made[winner.number]
    spread = "" if winner.sd is None else f" ± {winner.sd!r} (sample standard deviation over {len(seeds)} seeds)"
    lines = [
        f"The best of a sweep of fedbilevel {__version__}: {winner.in_words}.",
        f"Chosen by {sweep.chosen_on}: {winner.mean!r}{spread}.",
        f"{sweep.effort}.",
        f"Run it with: fedbilevel run --spec {path.name}{several}",
    ]
    return toml.dumps(spec.tables(), "\n".join(lines))


def as_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain objects, whose numbers are finite; null stands for what is not known."""
    winner = sweep.winner
    return {
        "schema": SCHEMA,
        "fields": sweep.plan.fields,
        "select": sweep.plan.select,
        "larger_is_better": sweep.larger_is_better,
        "selected_on_test": measured_on_test(sweep.plan.select),
        "seeds": list(sweep.plan.seeds),
        "halving": sweep.plan.halving,
        "trials": sweep.trials,
        "failed": sweep.failed,
        "effort": sweep.effort,
        "spent": {name: sweep.spent(name) for name in COSTS},
        "chosen": None if winner is None else {"point": winner.number, "values": dict(winner.values), "spec": CHOSEN},
        "points": [_point(sweep, one) for one in sweep.standings],
    }


def _point(sweep: Sweep, one: Standing) -> dict[str, Any]:
    runs = [Job(one.number, seed, one.rung) for seed in sweep.plan.seeds]
    return {
        "point": one.number,
        "values": dict(one.values),
        "mean": one.mean,
        "sd": one.sd,
        "rung": one.rung,
        "error": one.error,
        "runs": [
            {
                "seed": job.seed,
                "error": sweep.outcomes[job].error,
                "folder": str(place_of(job)),
                "last_row": _finite(sweep.outcomes[job].row),
            }
            for job in runs
        ],
    }


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _last_jobs(sweep: Sweep) -> list[Job]:
    """Each trial at the last rung that it reached, points and seeds in their order."""
    last = {(job.point, job.seed): job for job in sorted(sweep.outcomes, key=lambda job: job.rung)}
    return [last[key] for key in sorted(last)]


def _run(sweep: Sweep, job: Job) -> dict[str, Any]:
    """A line of the CSV file."""
    outcome = sweep.outcomes[job]
    values = {name: value if isinstance(value, int | float | str) else toml.value(value)
              for name, value in sweep.plan.points[job.point].items()}  # fmt: skip
    row = {"point": job.point, **values, "seed": job.seed, "rung": job.rung, "error": outcome.error}
    return row | dict(outcome.row) | {"folder": str(place_of(job))}
