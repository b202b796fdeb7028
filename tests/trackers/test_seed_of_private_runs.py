"""A run under privacy gives no tracker its seed, with which the noise could be subtracted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from recorders import METHOD, TASK, InMemory, Service, solved

import fedbilevel as fb
from fedbilevel import cli, experiments
from fedbilevel.cli import shared
from representatives import slow_but

PRIVACY = fb.Privacy(clip=1.0, noise_multiplier=0.1, delta=1e-5)
SEEDS = [918273, 564738]
PRIVATE = ["--set", "privacy.clip=1", "--set", "privacy.noise_multiplier=0.1", "--set", "privacy.delta=1e-5"]
SMALL = ["quadratic", "--set", "task.clients=3", "--set", "samples=[2, 2]", "--set", "dim_y=2"]
SMALL += ["--rounds", "4", "--set", "eval_every=2", "--set", "client_lr=0.05"]


@pytest.fixture
def service() -> Service:
    return Service()


def texts_of(service: Service) -> str:
    """Return all texts that the service has of its runs, and no rows of histories."""
    found = []
    for kept in service.runs.values():
        run = kept.run
        found += [run.name, kept.group, str(run.parameters), str(run.flat_parameters()), str(kept.outcome)]
        found += [*kept.files, *(content.decode(errors="replace") for content in kept.content)]
    return "\n".join(found)


def has_a_seed(service: Service) -> bool:
    """Return whether a seed occurs as a number. Among the digits of seconds and losses it may occur by chance."""
    return any(re.search(rf"(?<![\d.]){seed}(?!\d)", texts_of(service)) for seed in SEEDS)


def test_a_run_of_solve(service) -> None:
    """A tracker of `solve` gets the seed of a run without privacy only."""
    solved(4, InMemory(service), key=SEEDS[0], privacy=PRIVACY)
    (kept,) = service.runs.values()
    assert "run.seed" not in kept.run.flat_parameters()
    assert kept.run.flat_parameters()["privacy.clip"] == 1.0
    assert not has_a_seed(service)
    solved(4, InMemory(service), key=SEEDS[0])
    assert has_a_seed(service)  # this run has no noise


def test_runs_of_a_sweep_and_its_group(service) -> None:
    """Trackers get no seed from the runs of a private sweep, nor from their group, and their names have *** instead."""
    fb.sweep(
        METHOD, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=4, grid={"server_lr.x": [0.05, 0.1]}, seeds=SEEDS,
        select="relative_error", metrics=TASK.metrics, privacy=PRIVACY, callbacks=[InMemory(service)], progress=False,
    )  # fmt: skip
    assert len(service.runs) == 5
    assert not has_a_seed(service)
    assert sorted(kept.run.name for kept in service.runs.values() if kept.group) == [
        *["server_lr.x=0.05, seed ***"] * 2, *["server_lr.x=0.1, seed ***"] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize("private", slow_but(True, of=[True, False]))
def test_a_run_in_a_folder_and_its_files(service, tmp_path, private) -> None:
    """A tracker gets the spec and the summary, which have the seed, only of a run without privacy."""
    names = ["task.clients=3", "task.samples=[2, 2]", "task.dim_y=2", "run.rounds=4", "run.eval_every=2"]
    names += [f"{section}.seed={SEEDS[0]}" for section in ("run", "task", "clock")]
    names += ["client_lr=0.05", "server_lr=0.05", *PRIVATE[1::2]][: None if private else -3]
    spec = experiments.configure(task="quadratic", settings=names)
    experiments.run(spec, tmp_path / f"seed-{SEEDS[0]}", callbacks=[InMemory(service)], progress=False)
    (kept,) = service.runs.values()
    assert has_a_seed(service) is not private
    without = ["history.jsonl", "ledger.json", "result.npz", "plot.png"]
    assert [name for name in kept.files if name not in ("spec.toml", "summary.json")] == without
    assert len(kept.files) == (4 if private else 6)
    assert Path(tmp_path / f"seed-{SEEDS[0]}" / "spec.toml").is_file()  # the folder has it, to resume the run


@pytest.mark.parametrize(
    "command",
    [["run", "--set", "server_lr=0.05"], ["sweep", "--grid", "server_lr=0.05,0.1"]],
    ids=lambda words: words[0],
)
def test_commands_for_several_seeds(service, tmp_path, monkeypatch, command) -> None:
    """Trackers get no seed from commands that make private runs with several seeds."""
    monkeypatch.setattr(shared, "trackers", lambda options: [InMemory(service)])
    seeds = ["--seeds", ",".join(map(str, SEEDS)), "--out", str(tmp_path / "out"), "--quiet"]
    assert cli.main([command[0], *SMALL, *command[1:], *PRIVATE, *seeds]) == 0
    assert [kept.ending for kept in service.runs.values()] == ["finished"] * len(service.runs)
    assert sum(bool(kept.group) for kept in service.runs.values()) == (2 if command[0] == "run" else 4)
    assert not has_a_seed(service)


@pytest.mark.parametrize("holder", slow_but("simfbo.", of=["", "simfbo."]), ids=["all", "one"])
def test_a_comparison_also_of_methods_without_privacy(service, tmp_path, monkeypatch, holder) -> None:
    """Methods of a comparison have the same seeds, so that a public run would give away that of a private one."""
    monkeypatch.setattr(shared, "trackers", lambda options: [InMemory(service)])
    private = [word.replace("privacy", f"{holder}privacy") for word in PRIVATE]
    common = [*SMALL[:7], "--rounds", "4", "--set", "eval_every=2", "--set", f"run.seed={SEEDS[0]}", *private]
    assert cli.main(["compare", *common, "--algorithms", "shrofbo,simfbo", "--out", str(tmp_path), "--quiet"]) == 0
    assert len(service.runs) == 3
    assert not has_a_seed(service)


def test_the_reason_of_an_error(service, tmp_path) -> None:
    """The reason why a private run failed is recorded with *** in place of the seed."""

    def fails(result, row):
        if row and row["round"]:
            raise OSError(f"runs/seed-{SEEDS[0]}/checkpoint.npz cannot be written")

    with pytest.raises(OSError, match="seed-918273"):
        solved(4, InMemory(service), fails, privacy=PRIVACY)
    (kept,) = service.runs.values()
    assert kept.outcome == {"stopped": "runs/seed-***/checkpoint.npz cannot be written"}
