"""Are the remains of a run that died early removed for the next run, and are files that a user may need kept?"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from command_line import QUADRATIC, outcome, without_remarks

from fedbilevel import experiments
from fedbilevel.core.errors import CheckpointError, CheckpointWarning
from fedbilevel.engines import lock
from fedbilevel.experiments import experiment, runner
from fedbilevel.experiments.folder import Folder
from refusals import raises_with, refuses, warns_with

SPEC = experiments.configure(task="quadratic", settings=["rounds=3"])


@pytest.fixture
def dead(tmp_path) -> Folder:
    """Return the folder of a run that was killed before its first checkpoint, while it wrote a file."""
    place = Folder(tmp_path / "dead")
    runner.Scribe(SPEC, place).open()
    for name in (".lock", ".checkpoint.npz.lock", ".checkpoint.npz.123.tmp"):
        (place.path / name).write_text("process 123 on ghost, since then\n")
    place.exchanges.touch()
    place.ledger.write_text("{}")  # the costs of a run that fails are written before the reason
    return place


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.name != ".lock"]
    return {path.name: b"" if path.is_dir() else path.read_bytes() for path in files}


def test_a_run_starts_where_another_died(dead, run) -> None:
    """A run starts in the folder of one that died before its first checkpoint, and names the files that it removes."""
    dead.require_free()  # only looks, and removes nothing
    assert dead.spec.is_file()
    code, _, error = run(*QUADRATIC, "--rounds", 3, "--out", dead.path)
    assert code == 0
    cleared = "cleared the files of a run that ended before its first checkpoint"
    files = "environment.json, exchanges.jsonl, ledger.json, spec.toml"
    assert without_remarks(error) == f"fedbilevel: warning: {dead.path}: {cleared} ({files})\n"
    assert [path.name for path in dead.path.iterdir() if path.name.startswith(".")] == []
    assert outcome(dead.path)[1][-1]["round"] == 3


def test_resuming_what_died_before_its_first_checkpoint_starts_it_again(dead, run) -> None:
    code, _, error = run("run", "--resume", dead.path, "--rounds", 4, "--quiet")
    assert code == 0
    said = f"fedbilevel: warning: {dead.path} has no checkpoint yet: its run is started again\n"
    assert without_remarks(error) == said
    assert outcome(dead.path)[1][-1]["round"] == 4


KEPT = {
    "a file that is not ours": lambda place: (place.path / "notes.txt").touch(),
    "a checkpoint": lambda place: place.checkpoint.touch(),
    "a checkpoint of a federation": lambda place: [
        place.checkpoint.touch(),
        place.name_in_federation.write_text("0123"),
    ],
    "the checkpoint before": lambda place: (place.path / "checkpoint.previous.npz").touch(),
    "a row of history": lambda place: place.history.touch(),
    "a result": lambda place: place.result.touch(),
    "exchanges that were made": lambda place: place.exchanges.write_text('{"round": 0}\n'),
    "a folder": lambda place: (place.path / "plots").mkdir(),
    "a spec that was changed since": lambda place: [
        place.spec.write_text(place.spec.read_text().replace("rounds = 3", "rounds = 4")),
        os.utime(place.spec, (2**31, 2**31)),
    ],
    "a spec written by hand": lambda place: [place.environment.unlink(), place.spec.write_text("# mine\n")],
}


@pytest.mark.parametrize("case", KEPT)
def test_what_anybody_could_want_is_refused_and_not_touched(dead, case) -> None:
    """A folder is refused, and stays as it is, if it has any file that a user may need."""
    KEPT[case](dead)
    before = content(dead.path)
    for begin in (lambda: experiments.run(SPEC, dead.path, plot=False), lambda: dead.claim(SPEC)):
        with refuses("", fact="is not empty", where=str(dead.path)) as error:
            begin()
        assert ("fedbilevel run --resume" in str(error.value)) == (case == "a checkpoint")
        assert ("submit it again" in str(error.value)) == (case == "a checkpoint of a federation")
    assert content(dead.path) == before


def test_an_empty_folder_is_taken_without_a_word_and_so_is_the_spec_that_is_asked_for(dead, tmp_path, recwarn) -> None:
    """A run takes an empty folder without a warning, and also a folder that contains its own spec."""
    place = Folder(tmp_path / "empty")
    place.path.mkdir()
    place.lock.touch()
    place.claim(SPEC)
    assert not recwarn.list
    dead.environment.unlink()  # as if the run had been killed between writing the spec and the environment
    with warns_with(CheckpointWarning, "exchanges.jsonl, ledger.json, spec.toml", path=dead.path):
        dead.claim(SPEC)


def test_a_run_that_cannot_start_leaves_nothing(dead, monkeypatch) -> None:
    """A run that cannot start leaves an empty folder, even if its log of exchanges exists already.

    This is so in a federation that too few clients join.
    """

    def too_few(*_: object, **__: object) -> None:
        assert dead.spec.is_file()
        dead.exchanges.touch()
        raise CheckpointError("2 clients are online, but 3 are needed")

    monkeypatch.setattr(experiment, "solve", too_few)
    with warns_with(CheckpointWarning, path=dead.path), raises_with(CheckpointError, "2 clients are online"):
        experiments.run(SPEC, dead.path, plot=False)
    assert list(dead.path.iterdir()) == []


def test_a_folder_in_use_is_refused_by_the_name_of_its_holder(dead, run) -> None:
    with lock.exclusive(dead.lock, dead.path):
        for arguments in (["run", "--resume", dead.path, "--quiet"], [*QUADRATIC, "--out", dead.path]):
            code, _, error = run(*arguments)
            assert code == 4
            assert f"{dead.path} is in use by process {os.getpid()} on " in error
            assert len(error.splitlines()) == 1
        assert dead.spec.is_file()


def test_an_environment_names_the_commit_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a run names the commit of the code, and says "-dirty" if the code has changed since.

    The variable GIT_DIR has no influence. The commit is unknown for code outside a repository, in a repository without
    commits, and on a machine without git.
    """
    code = tmp_path / "src" / "fedbilevel" / "experiments" / "runner.py"
    code.parent.mkdir(parents=True)
    code.write_text("first\n")
    monkeypatch.setattr(runner, "__file__", str(code))
    monkeypatch.setattr(runner, "_commit", runner._commit.__wrapped__)

    def git(*words: str) -> str:
        by = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *by, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit() -> str | None:
        return runner.environment_of(SPEC)["commit"]

    assert commit() is None  # like an installed package, or an unpacked archive
    git("init")
    git("add", ".")
    assert commit() is None  # nothing is committed yet
    git("commit", "-m", "one")
    git("tag", "v1")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    of_code = commit()
    monkeypatch.delenv("GIT_DIR")
    assert of_code == git("rev-parse", "HEAD")[:12]
    code.write_text("second\n")
    assert commit() == f"{of_code}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() is None  # a machine without git


def test_the_spec_of_an_earlier_version_is_of_the_same_run(dead) -> None:
    """The spec of an earlier version counts as equal if its differences have no effect.

    A field that it lacks has its default, also within a part of the algorithm. A field that no longer exists is a
    difference. Without `wait_for`, the other fields of [asynchronous] have no effect.
    """
    text = dead.spec.read_text("utf-8")
    for old, now in (('evaluations = "none"\n', ""), ("delay_penalty = 2.0", "delay_penalty = 0.0")):
        assert old in text
        dead.spec.write_text(text.replace(old, now), "utf-8")
        assert dead.difference(SPEC) == ""
    dead.spec.write_text(text.replace("rounds = 3\n", ""), "utf-8")
    assert dead.difference(SPEC) == "run.rounds: 300 there, 3 now"
    dead.spec.write_text(text.replace("rounds = 3\n", "rounds = 3\nepochs = 2\n"), "utf-8")
    assert dead.difference(SPEC) == "run.epochs: 2 there, None now"
    nested = experiments.resolve({"task": "quadratic", "algorithm": "fednest", "run": {"rounds": 3}})
    assert "all_samples = false\n" in nested.to_toml()
    dead.spec.write_text(nested.to_toml().replace("all_samples = false\n", ""), "utf-8")
    assert dead.difference(nested) == ""
    other = nested.replace(algorithm={"hypergradient": {"all_samples": True}})
    assert dead.difference(other).startswith("algorithm.hypergradient: ")
    late = SPEC.replace(asynchronous={"wait_for": 2})
    dead.spec.write_text(late.to_toml().replace("delay_penalty = 2.0", "delay_penalty = 0.0"), "utf-8")
    assert dead.difference(late) == "asynchronous.delay_penalty: 0.0 there, 2.0 now"
    assert dead.difference(SPEC) == "asynchronous.wait_for: 2 there, 'none' now"
