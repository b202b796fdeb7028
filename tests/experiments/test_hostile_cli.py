"""What the command line says of files that others have spoilt, and of disks that it cannot write to: one sentence."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel import experiments
from mutations import DEEP, DIGITS, RAW
from run_folders import write_run

Run = Callable[..., tuple[int, str, str]]


def one_sentence(outcome: tuple[int, str, str], code: int, *words: str) -> None:
    """That exit code, and one line on standard error with these words."""
    got, _, error = outcome
    assert (got, error.count("\n"), error[:12]) == (code, 1, "fedbilevel: ")
    assert all(word in error for word in words), error
    assert len(error) < 1000


SPECS = {
    'task.name = ["quadratic"]': "task.name = ['quadratic'] is not allowed: it must be text",
    "task = 3": "task = 3 is not allowed: it must be a table: [task]",
    "algorithm.name = {a = 1}": "algorithm.name = {'a': 1} is not allowed: it must be text",
    "task.data = [1]": "task.data = [1] is not allowed",
    'task.network = ["mlp"]': "task.network = ['mlp'] is not allowed",
    f"run.rounds = {RAW[DIGITS]}": "is not TOML",
    f"run.rounds = {10**400}": "'run' has an integer of more than 64 bits",
    f"run.rounds = {RAW[DEEP]}": "is not TOML",
    f"run.rounds = {'[' * 50 + ']' * 50}": "has lists and tables in each other to a depth of more than 10",
    "run.seed = 1979-05-27": "'1979-05-27', a date or a time",
    'task.name = "a\\u0000/b.py:make"': "is not the name of a file",
    'task.name = "~nobody-of-that-name/b.py:make"': "is not the name of a file",
}


@pytest.mark.parametrize("content", SPECS, ids=lambda content: content[:30])
def test_specs(content: str, run: Run, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(content)
    code, _, error = run("run", "--spec", spec)
    last = error.splitlines()[-1]  # before it, perhaps, whose code would be run
    one_sentence((code, "", f"{last}\n"), 2, SPECS[content])
    folder = write_run(tmp_path / "run", experiments.configure(task="quadratic", settings=["rounds=20"]))
    (folder / "spec.toml").write_text(content)
    if "data" not in content and "network" not in content and "run." not in content:
        one_sentence(run("compare", folder), 2, SPECS[content], "spec.toml")


FOUND = {"[]": "a list", "3": "a number", "null": "null", '"text"': "a text"}


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}", '"text"', RAW[DEEP], RAW[DIGITS], "\0", '{"round": 1}'])
@pytest.mark.parametrize("name", ["history.jsonl", "summary.json", "ledger.json"])
def test_runs(name: str, content: str, run: Run, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", experiments.configure(task="quadratic", settings=["rounds=20"]))
    (folder / name).write_text(content)
    if (name, content) != ("ledger.json", "{}"):  # which is one of a run without exchanges
        found = ["a JSON object with ", f"is expected, {FOUND[content]} was found"] if content in FOUND else []
        one_sentence(run("compare", folder), 2, f"{folder / name} is damaged", *found)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "played"
    experiments.run(experiments.configure(task="quadratic", settings=["rounds=10"]), place, plot=False)
    (place / "checkpoint.previous.npz").unlink(missing_ok=True)  # a resumption would go on from it
    return place / "checkpoint.npz"


METAS: dict[str, Any] = {
    "fingerprint": 3,
    "history": [{"round": "one"}],
    "ledger": {"rounds": "one"},
    "seconds": None,
    "losses": {"outer_loss": 3},
}


@pytest.mark.parametrize("name", METAS)
def test_checkpoints(name: str, played: Path, run: Run) -> None:
    with np.load(played) as stored:
        arrays = {key: stored[key] for key in stored.files}
    header = json.loads(arrays["__meta__"].tobytes())
    header["meta"][name] = METAS[name]
    arrays["__meta__"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    whole = played.read_bytes()
    try:
        np.savez(played, **arrays)
        spoilt = played.read_bytes()
        outcome = run("run", "--resume", played.parent, "--rounds", 20, "--quiet")
        one_sentence(outcome, 4, "checkpoint.npz is not a readable checkpoint")
        assert played.read_bytes() == spoilt
    finally:
        played.write_bytes(whole)


def test_a_compressed_checkpoint(played: Path, run: Run, tmp_path: Path) -> None:
    with np.load(played) as stored:
        np.savez_compressed(tmp_path / "bomb.npz", **{**stored, "more": np.zeros(10_000_000)})
    whole = played.read_bytes()
    try:
        played.write_bytes((tmp_path / "bomb.npz").read_bytes())
        one_sentence(run("run", "--resume", played.parent, "--rounds", 20), 4, "its arrays are compressed")
    finally:
        played.write_bytes(whole)


def test_a_host_that_no_certificate_can_name(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    outcome = run("flower", "keys", tmp_path / "keys", "--clients", 1, "--host", "ä" * 64)
    one_sentence(outcome, 2, "a server cannot have one of the names ää")


@pytest.mark.parametrize(
    "command", [["run", "quadratic", "--rounds", "1", "--out"], ["flower", "keys", "--clients", "1"]]
)
def test_a_read_only_disk(command: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "there"

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    outcome = run(*command, place)
    one_sentence(outcome, 4, f"{place}: Read-only file system")
    assert "Errno" not in outcome[2]
