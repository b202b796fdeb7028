"""Does the command line write the right files and texts, and explain each mistake or failure in one clear sentence?"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from command_line import QUADRATIC, leftovers, without_remarks

from fedbilevel import display, experiments
from fedbilevel.cli.run import _code
from fedbilevel.cli.shared import console
from fedbilevel.experiments import experiment, runner
from representatives import slow_but

pytestmark = pytest.mark.checked  # these are whole runs of a user, and checks of the losses must give no warning
FILES = ["checkpoint.npz", "checkpoint.previous.npz", "environment.json", "history.jsonl", "ledger.json", "plot.png"]
FILES += ["result.npz", "spec.toml", "summary.json"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.drawn
def test_a_run_writes_its_folder_and_says_where(run, here, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, shown, error = run("run", "quadratic", "--rounds", 20)
    assert (code, without_remarks(error), "\x1b" in shown) == (0, "", False)
    assert "compiling" not in shown.partition("quadratic · simfbo")[0]
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("quadratic-simfbo-")
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    lines = shown.splitlines()
    assert lines[0].startswith("round 0/20  relative_error 1")
    assert lines[2].startswith("round 20/20  outer_loss ")
    assert lines[-1] == f"plot   {Path('runs') / folder.name / 'plot.png'}"
    environment = json.loads((folder / "environment.json").read_text())
    assert {"python", "jax", "jaxlib", "optax", "numpy", "fedbilevel", "device_kind", "cpus"} <= set(environment)
    assert os.uname().nodename not in (folder / "environment.json").read_text()
    assert leftovers(here) == []


def test_the_default_run_learns_the_digits(run, here) -> None:
    assert run("run", "--rounds", 100, "--quiet", "--out", "digits")[0] == 0
    found = experiments.load_run("digits")
    names = found.spec.task.name, found.spec.algorithm.name, found.spec.data
    assert names == ("hyper_representation", "simfbo", "digits")
    assert found.summary["final"] > 0.95  # the full 300 rounds reach 97 %


def test_a_network_brings_its_widths() -> None:
    """The setting `network` also sets the default of `hidden`, and does not change widths that are given."""
    assert experiments.configure(settings=["network=cnn"]).task.fields["hidden"] == [8, 16, 32]
    assert experiments.configure(settings=["hidden=[4, 4, 4]", "network=cnn"]).task.fields["hidden"] == [4, 4, 4]


@pytest.mark.slow
def test_seeds_make_one_run_each_and_are_finished_where_they_were_left(run, here) -> None:
    """Each seed has its own run, and the same command again finishes the runs that have not finished."""
    command = ["run", "quadratic", "--rounds", 20, "--out", "all"]
    code, shown, _ = run(*command, "--seeds", "0,1,2")
    assert (code, "mean ± sd" in shown) == (0, True)
    assert shown.splitlines()[-2:] == ["runs   all", f"plot   {Path('all') / 'plot.png'}"]
    assert sorted(path.relative_to(here).as_posix() for path in here.rglob("*.png")) == ["all/plot.png"]  # of all seeds
    kept = (here / "all" / "seed-0" / "summary.json").read_bytes()
    (here / "all" / "seed-1" / "summary.json").unlink()
    for file in (here / "all" / "seed-2").iterdir():  # as if the run had been killed before its first checkpoint
        if file.name != "spec.toml":
            file.unlink()
    code, shown, error = run(*command, "--seeds", "0,1,2,3", "--quiet")
    assert (code, shown) == (0, "all/seed-1\nall/seed-2\nall/seed-3\n")
    cleared = "cleared the files of a run that ended before its first checkpoint (spec.toml)"
    assert without_remarks(error) == f"fedbilevel: warning: all/seed-2: {cleared}\n"
    assert (here / "all" / "seed-0" / "summary.json").read_bytes() == kept
    specs = [experiments.load_run(here / "all" / f"seed-{seed}").spec for seed in range(4)]
    assert [(spec.run.seed, spec.task.fields["seed"]) for spec in specs] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for more, words in (
        (["0,1,2,3", "--cohort", 3], "seed-0/spec.toml differs in run.cohort: 'none' there, 3 now"),
        (["0,1"], "all contains all/seed-2, which is not one of these runs"),
    ):
        assert words in run(*command, "--seeds", *more)[2]


def test_one_algorithm_or_task_is_shown_by_its_name(run) -> None:
    for kind, name, words in (("algorithm", "simfbo", "\nlocal_steps = 5\n"), ("task", "quadratic", "\ndim_x = 5\n")):
        code, shown, _ = run(f"{kind}s", name)
        assert (code, words in shown, "hidden" in shown or "fednest" in shown) == (0, True, False)
        asked = f"fedbilevel: unknown {kind} '{name}k'; did you mean '{name}'?"
        assert run(f"{kind}s", f"{name}k")[2].startswith(asked)


def test_a_pipe_gets_no_colours_and_its_own_width(monkeypatch) -> None:
    """Output into a pipe has no colours, whatever the environment says, and 160 columns unless COLUMNS is set."""
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (console().is_terminal, console().width) == (False, 160)
    monkeypatch.setenv("COLUMNS", "60")
    assert console().width == 60


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        ("truncated", 4, "checkpoint.npz is not a readable checkpoint: "),
        ("another model", 4, "belongs to another model"),
        ("missing", 4, "no checkpoint.npz to resume from"),
        ("fewer rounds", 2, "rounds = 5 is not allowed: it must be at least 10, as in the run in old"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_left_as_it_is(damage, code, words, run, here) -> None:
    assert run(*QUADRATIC, "--rounds", 10, "--out", "old")[0] == 0
    checkpoint, spec = here / "old" / "checkpoint.npz", here / "old" / "spec.toml"
    checkpoint.with_name("checkpoint.previous.npz").unlink()
    match damage:
        case "truncated":
            checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
        case "another model":
            spec.write_text(spec.read_text().replace("dim_x = 5", "dim_x = 6"))
        case "missing":
            checkpoint.unlink()
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    more = ["--rounds", 5] if damage == "fewer rounds" else []
    got, _, error = run("run", "--resume", "old", "--quiet", *more)
    assert (got, len(error.splitlines())) == (code, 1)
    assert words in error
    assert ("; start the run again: fedbilevel run --spec" in error) == (damage == "truncated")
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_number_that_is_not_finite_ends_the_run_with_its_checkpoint_kept(run, here) -> None:
    code, _, error = run(*QUADRATIC, "--set", "server_lr=50", "--rounds", 2000, "--out", "wild")
    assert code == 3
    warning, said = error.splitlines()
    assert warning.startswith("fedbilevel: warning: round 10: relative_error has grown from 1 to ")
    assert re.match(r"fedbilevel: round \d+, .+ (is inf|is nan|is not finite); ", said)
    assert "the last good checkpoint is kept in wild" in error


@pytest.mark.parametrize("more", slow_but(["--out", "far"], of=[["--out", "far"], ["--seeds", "1", "--out", "far"]]))
def test_a_run_that_diverged_at_its_end_is_no_success(run, here, more) -> None:
    """A run whose metric has grown until its end has exit code 3 and warnings, even though its numbers are finite."""
    code, _, error = run(*QUADRATIC, "--set", "server_lr=0.9", "--rounds", 20, *more)
    assert code == 3
    assert re.fullmatch(
        r"(fedbilevel: warning: round \d\d: relative_error has grown from 1 to .*: the run diverges; "
        r"lower client_lr or server_lr \(fb\.diagnose suggests steps\)\n){2}",
        without_remarks(error),
    )


@pytest.mark.parametrize(
    ("ends", "code"),
    [([], 0), ([None], 0), (["grown", ""], 3), (["", "grown"], 3), (["", "out_of_budget"], 6), (["", ""], 0)],
)
def test_one_of_several_runs_decides_the_exit_code(ends, code) -> None:
    """Several runs exit with 0 only if no run diverged and no run was ended by its privacy budget."""
    none = {"grown": False, "out_of_budget": False}
    assert _code(*(end if end is None else SimpleNamespace(**{**none, end: True}) for end in ends)) == code


def test_the_command_line_wins_against_the_spec_file(run, here, monkeypatch) -> None:
    """Options replace the values of the spec file, also a seed of 0; without options, the values of the file remain."""
    specs = []
    monkeypatch.setattr("fedbilevel.cli.run.played", lambda spec, *given, **named: specs.append(spec))
    spec = experiments.configure(task="quadratic", settings=["run.seed=5", "run.rounds=9", "local_steps=3"])
    Path("mine.toml").write_text(spec.to_toml())
    for more in ([], ["--seed", 0, "--rounds", 2, "--set", "local_steps=4"]):
        assert run("run", "--spec", "mine.toml", *more, "--out", "new")[0] == 0
    seen = [(one.run.seed, one.clock.seed, one.run.rounds, one.algorithm.fields["local_steps"]) for one in specs]
    assert seen == [(5, spec.clock.seed, 9, 3), (0, 0, 2, 4)]


def test_algorithms_that_are_compared_and_diverge_are_no_success(run, here) -> None:
    """A comparison with a run that has diverged has exit code 3, also if the run is only read."""
    chosen = ["compare", "quadratic", "--algorithms", "simfbo", "--set", "server_lr=0.9", "--rounds", 20]
    for warnings in (2, 0):  # the second command only reads the finished run
        code, _, error = run(*chosen, "--out", "far", "--quiet")
        assert (code, error.count("the run diverges")) == (3, warnings)


def full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_the_run_with_one_sentence(run, here, monkeypatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    code, _, error = run(*QUADRATIC, "--rounds", 10, "--out", "disk")
    assert (code, len(error.splitlines())) == (4, 1)
    assert error.startswith("fedbilevel: could not write disk")
    assert "No space left on device" in error
    assert list(here.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way(run, here, monkeypatch) -> None:
    """If the disk becomes full during a run, the error names the command that continues the run, and it works."""
    monkeypatch.setattr(display.Watch, "__call__", lambda *_: monkeypatch.setattr(os, "fsync", full))
    code, _, error = run(*QUADRATIC, "--rounds", 10, "--out", "disk")
    assert code == 4
    assert error.endswith("; free some space, then continue with: fedbilevel run --resume disk\n")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert run("run", "--resume", "disk", "--quiet")[0] == 0


def mixed_up(number: int) -> None:
    """Send a signal, and raise an ImportError in place of its KeyboardInterrupt, as some libraries do."""
    try:
        os.kill(os.getpid(), number)
        time.sleep(30)
    except KeyboardInterrupt:
        raise ImportError("compiling failed: " + 500 * "\n") from None


def caught(number: int) -> None:
    """Send a signal, and go on, like a library that catches the KeyboardInterrupt."""
    with suppress(ImportError):
        mixed_up(number)


def held_back(number: int) -> None:
    """Send a signal where fedbilevel defers it."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError("Unable to allocate 7 EiB"), "Unable to allocate 7 EiB"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            "Out of memory allo",
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: something else"), None),
    ],
)
def test_a_run_that_needs_more_memory_than_there_is(error, says, run, here, monkeypatch) -> None:
    """If memory is short, the command ends with a sentence. Other errors of JAX are not taken for a lack of memory."""

    def short(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(experiment, "solve", short)
    if says is None:
        with pytest.raises(type(error)):
            run(*QUADRATIC, "--out", "it")
        return
    code, _, words = run(*QUADRATIC, "--out", "it")
    assert (code, words.count("\n")) == (2, 1)
    assert words.startswith(f"fedbilevel: there is not enough memory ({says}")


NOTHING = "interrupted before the first checkpoint; there is nothing to resume"
CONTINUE = "interrupted; continue with: fedbilevel run --resume it"


@pytest.mark.parametrize(
    ("number", "place", "comes", "says"),
    [
        (signal.SIGINT, (experiment, "solve"), mixed_up, NOTHING),
        (signal.SIGTERM, (experiment, "solve"), mixed_up, NOTHING),
        (signal.SIGTERM, (experiments, "configure"), mixed_up, "interrupted"),
        (signal.SIGTERM, (runner.Scribe, "open"), caught, CONTINUE),
        (signal.SIGTERM, (display.Watch, "__call__"), held_back, CONTINUE),
    ],
)
def test_a_signal_ends_a_run_in_a_sentence_wherever_it_comes(
    number, place, comes, says, run, here, monkeypatch
) -> None:
    """A signal ends a run with one sentence and exit code 128 + number, even if a library converts or catches it.

    After the first checkpoint, the sentence names the command that continues the run.
    """
    real = getattr(*place)

    def interrupted(*given: object, **named: object) -> object:
        comes(number)
        return real(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(*place, interrupted)
        code, _, error = run(*QUADRATIC, "--rounds", 60, "--out", "it")
    assert (code, error) == (128 + number, f"fedbilevel: {says}\n")
    assert (here / "it").exists() == (says == CONTINUE)
    if says == CONTINUE:
        assert run("run", "--resume", "it", "--quiet")[0] == 0
