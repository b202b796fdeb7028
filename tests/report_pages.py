"""Pages to look at, of a run and of several; nothing is played."""

from __future__ import annotations

from pathlib import Path

from fedbilevel import experiments
from fedbilevel.engines.checkpoint import write_json
from fedbilevel.report import write
from run_folders import write_run


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
    runs = keep_runs(out / "runs", "simfbo", "fedbio")
    return {"comparison": write([runs]), "run": write([runs / "simfbo" / "seed-0"])}
