"""Pages to look at: of a made-up entry with an outcome written by hand, of runs, and an index; nothing is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedbilevel import experiments
from fedbilevel.engines.checkpoint import write_json
from fedbilevel.report import write
from fedbilevel.report.entries import write_index
from fedbilevel.reproduce import outcome
from fedbilevel.reproduce.entry import Entry, read
from run_folders import write_run

CONTENT: dict[str, Any] = {
    **dict.fromkeys(("part", "shows", "setting"), "-"),
    "paper": "simfbo",
    "title": "SimFBO beside FedBiO",
    "reported": [{"what": "SimFBO at the end", "value": "91.2 ± 0.3 %", "source": "table"}],
    "differences": ["Five clients in place of ten."],
    "metric": "test_accuracy",
    "against": "exchanges",
    "spec": {"task": {"name": "hyper_representation", "data": "digits"}},
    "panels": {"iid": {}, "two shards": {"task": {"partition_by": "shards"}}},
    "methods": {
        "FedBiO": {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": [0.01, 0.1]}},
        "SimFBO": {"algorithm": {"name": "simfbo"}, "grid": {"server_lr.x": [0.01, 0.1]}},
    },
    "tuning": {"select": "validation_accuracy", "spec": {"task": {"holdout": 0.1}}},
    "claims": [
        {"says": "SimFBO ends higher", "better": "SimFBO", "than": ["FedBiO"]},
        {"says": "SimFBO is there first", "better": "SimFBO", "than": ["FedBiO"], "by": "first", "reach": 0.8},
    ],
    "quick": {"minutes": 1},
    "full": {"minutes": 60},
}
FINDING = {"says": "SimFBO ends higher", "panel": "iid", "better": "SimFBO", "than": "FedBiO", "note": ""}
HOLDS = {
    "better_mean": 0.9,
    "than_mean": 0.8,
    "difference": 0.1,
    "half_width": 0.02,
    "state": "holds",
    "unit": "percentage points",
}
LATER = {
    "better_mean": 1200,
    "than_mean": 1000,
    "difference": -200,
    "half_width": 50,
    "state": "contradicted",
    "unit": "exchanges",
}


def made_up(**changed: Any) -> Entry:
    return read("made-up", {**CONTENT, **changed})


def outcome_for(entry: Entry, **changed: Any) -> dict[str, Any]:
    """An outcome of an entry: every method's curve rises to 0.9 less a tenth of its number."""
    panels: dict[str, Any] = {}
    for panel in entry.panels_at("quick"):
        for name, method in entry.methods_of(panel).items():
            number = list(entry.methods).index(name)
            end = 0.9 - 0.1 * number
            curve = {"cost": [0.0, 500.0, 1000.0], "mean": [0.1, end - 0.1, end], "sd": [0.0, 0.02, 0.01]}
            panels.setdefault(panel, {})[name] = {
                "chosen": {field: values[0] for field, values in method.grid.items()},
                **{
                    "failed_trials": 0,
                    "failed_runs": 0,
                    "values": [end - 0.01, end + 0.01],
                    "mean": end,
                    "sd": 0.01414,
                },
                **{"costs": {"rounds": 500.0, "exchanges": 1000.0, "megabytes": 12.5}, "curve": curve},
            }
    return {
        **{"schema": outcome.SCHEMA, "id": entry.id, "scale": "quick", "verdict": "partly reproduced"},
        "played_for": outcome.fingerprint(entry, "quick"),
        "findings": [{**FINDING, **HOLDS}, {**FINDING, **LATER, "says": "SimFBO is there first"}],
        **{"date": "2026-01-31", "seeds": [0, 1], "trials": 2, "selected_on": "validation_accuracy", "minutes": 3.2},
        **{"processor_seconds": 210.0, "environment": {"jax": "0.10.2"}, "metric": entry.metric},
        **{"against": entry.against, "errors": {}, "panels": panels, "ranks": {}},
        **changed,
    }


def keep(entry: Entry, out: Path, **changed: Any) -> Path:
    """The folder of an entry with an outcome in it."""
    return outcome.keep(outcome_for(entry, **changed), outcome.file_of(entry, "quick", out).parent).parent


def keep_runs(out: Path, *algorithms: str) -> Path:
    """A folder with two runs of each algorithm."""
    for algorithm in algorithms:
        for seed in (0, 1):
            settings = ["rounds=20", f"run.seed={seed}"]
            run = write_run(
                out / algorithm / f"seed-{seed}",
                experiments.configure(task="quadratic", algorithm=algorithm, settings=settings),
            )
            write_json(run / "environment.json", {"jax": "0.10.2"})
    return out


def every_page(out: Path) -> dict[str, Path]:
    """A page of each kind."""
    entry = made_up()
    keep(entry, out)
    index, page = write_index([entry], out)
    runs = keep_runs(out / "runs", "simfbo", "fedbio")
    (several,), (single,) = write([runs]), write([runs / "simfbo" / "seed-0"])
    return {"entry": page, "index": index, "comparison": several, "run": single}
