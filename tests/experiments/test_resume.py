"""Do runs that were killed, interrupted, repeated or extended end with the same bits as undisturbed runs?"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import jax
import pytest
from command_line import QUADRATIC, leftovers, outcome, wait_for

from fedbilevel import cli, display, experiments
from fedbilevel.engines import checkpoint

LONG = [*QUADRATIC, "--rounds", 600, "--eval-every", 60, "--set", "run.checkpoint_every=40", "--cohort", 4]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple:
    """Return the results of the command LONG without an interruption."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert cli.main([*map(str, LONG), "--out", str(folder)]) == 0
    return outcome(folder)


def kill_and_resume(folder: Path, delay: float, run, start) -> bool:
    """Kill a run after its first checkpoint and a delay, and resume it. Return whether it was killed before its end."""
    process = start(*LONG, "--out", folder)
    wait_for(folder / "checkpoint.npz", process)
    time.sleep(delay)
    process.kill()
    process.wait()
    unfinished = not (folder / "summary.json").exists()
    code, _, error = run("run", "--resume", folder, "--quiet")
    assert code == 0, error
    return unfinished


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_runs_resume_to_the_same_bits(times, unbroken, tmp_path, run, start) -> None:
    on_the_way = 0
    for attempt in range(times):
        delay = 0.1 if times == 1 else 0.6 * random.random()
        on_the_way += kill_and_resume(tmp_path / str(attempt), delay, run, start)
        assert outcome(tmp_path / str(attempt)) == unbroken
    assert on_the_way >= times / 2


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(unbroken, tmp_path, run, start) -> None:
    """Ctrl-C in another process leaves a checkpoint, and the message names the command that continues the run.

    `test_a_run_is_extended_…` shows the same within this process.
    """
    folder = tmp_path / "run"
    process = start(*LONG, "--out", folder)
    wait_for(folder / "checkpoint.npz", process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == f"fedbilevel: interrupted; continue with: fedbilevel run --resume {folder}\n"
    assert run("run", "--resume", folder, "--quiet")[0] == 0
    assert outcome(folder) == unbroken


def test_a_run_is_repeated_from_its_spec(tmp_path, run) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    more = ["--set", "clients.local_steps={low = 1, high = 4}", "--set", "server_optimizer=adam"]
    assert run(*QUADRATIC, "--rounds", 30, "--seed", 5, *more, "--out", first)[0] == 0
    assert run("run", "--spec", first / "spec.toml", "--quiet", "--out", second)[0] == 0
    assert outcome(first) == outcome(second)
    assert (first / "spec.toml").read_text() == (second / "spec.toml").read_text()


def test_a_run_is_extended_and_meanwhile_nothing_marks_it_as_finished(tmp_path, run, monkeypatch) -> None:
    """A run that is extended counts as unfinished until its new end, and ends with the bits of a longer run."""
    short, long = tmp_path / "short", tmp_path / "long"
    finished = [short / name for name in ("summary.json", "result.npz", "ledger.json", "plot.png")]
    assert run(*QUADRATIC, "--rounds", 30, "--out", short)[0] == 0
    assert all(file.exists() for file in finished)
    (short / ".checkpoint.npz.123.tmp").write_bytes(b"half")  # of a killed run
    environment = json.loads((short / "environment.json").read_text())
    (short / "environment.json").write_text("[]")
    said = run("run", "--resume", short, "--rounds", 50)[2]
    assert "environment.json: it is damaged: a list was found" in said
    assert said.count("is damaged") == 1
    (short / "environment.json").write_text(json.dumps({**environment, "jax": "another"}))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(display.Watch, "__call__", interrupted)
        code, _, error = run("run", "--resume", short, "--rounds", 50, "--quiet")
    assert (code, error) == (130, f"fedbilevel: interrupted; continue with: fedbilevel run --resume {short}\n")
    assert not any(file.exists() for file in finished)
    assert f"has not finished: fedbilevel run --resume {short}" in run("compare", short)[2]
    (short / "federation").write_text("01234567")  # as in the folder of a server, whose clients are elsewhere
    for words in (("compare", short), ("run", "--resume", short)):
        code, _, error = run(*words)
        assert code == 2
        assert f"it is the run of a federation; submit it again with out='{short.resolve()}'" in error
    (short / "federation").unlink()
    assert run("run", "--resume", short, "--quiet")[0] == 0
    assert leftovers(short) == []
    environments = [environment := json.loads((short / "environment.json").read_text()), *environment["resumed"]]
    assert [one["jax"] for one in environments] == ["another", jax.__version__, jax.__version__]
    assert run(*QUADRATIC, "--rounds", 50, "--out", long)[0] == 0
    assert "resumed" not in json.loads((long / "environment.json").read_text())
    assert outcome(short) == outcome(long)
    assert (short / "spec.toml").read_text() == (long / "spec.toml").read_text()
    summary = json.loads((short / "summary.json").read_text())
    assert summary["rounds"] == 50
    of_whole, of_now = {"seconds_in_rounds"}, {"seconds_compiling_this_time", "seconds_this_time"}
    assert {name for name in summary if name.startswith("seconds")} == of_whole | of_now


def test_no_checkpoint_is_ever_without_its_spec(tmp_path, monkeypatch) -> None:
    seen, save = [], checkpoint.save

    def watched(path: Path, *arguments: object, **options: object) -> None:
        seen.append((path.with_name("spec.toml").is_file(), path.with_name("environment.json").is_file()))
        save(path, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save", watched)
    experiments.run(experiments.configure(task="quadratic", settings=["rounds=5"]), tmp_path / "run", plot=False)
    assert set(seen) == {(True, True)}
