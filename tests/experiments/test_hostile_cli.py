"""Does the command line report files that others have damaged, and disks that it cannot write to, in one sentence?"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedbilevel import experiments
from fedbilevel.wording import printable
from mutations import DEEP, DIGITS, RAW
from run_folders import write_run

Run = Callable[..., tuple[int, str, str]]


def one_sentence(outcome: tuple[int, str, str], code: int, *words: str) -> None:
    """Check the exit code, and that standard error is one line that contains the words."""
    got, _, error = outcome
    assert (got, error.count("\n"), error[:12]) == (code, 1, "fedbilevel: ")
    assert all(word in error for word in words), error
    assert len(error) < 1000


SPECS = {
    'task.name = ["quadratic"]': "task.name = ['quadratic'] is not allowed: it must be text",
    "task = 3": "task = 3 is not allowed: it must be a table: [task]",
    "task.data = [1]": "task.data = [1] is not allowed",
    'task.network = ["mlp"]': "task.network = ['mlp'] is not allowed",
    f"run.rounds = {RAW[DIGITS]}": "is not TOML",
    f"run.rounds = {10**400}": "'run' has an integer of more than 64 bits",
    f"run.rounds = {'[' * 50 + ']' * 50}": "has lists and tables nested to a depth of more than 10",
    'format = 2\nfedbilevel = "9.1"\n[weather]': "was written by fedbilevel 9.1, in a format that fedbilevel ",
    'format = "new"': "format = 'new' is not allowed: it must be a whole number",
    f"run{100_000 * '.a'} = 1": "is not TOML: a key has 50 parts or more",
    "run.seed = 1979-05-27": "'1979-05-27', a date or a time",
    'task.name = "a\\u0000/b.py:make"': "is not the name of a file",
    'task.name = "~nobody-of-that-name/b.py:make"': "is not the name of a file",
}


@pytest.mark.parametrize("content", SPECS, ids=lambda content: content[:30])
def test_specs(content: str, run: Run, tmp_path: Path) -> None:
    """A damaged spec is reported in one sentence by `run`, and, if it cannot be read at all, also by `compare`."""
    spec = tmp_path / "spec.toml"
    spec.write_text(content)
    code, _, error = run("run", "--spec", spec)
    last = error.splitlines()[-1]  # a line before it may name files whose code would be run
    one_sentence((code, "", f"{last}\n"), 2, SPECS[content])
    folder = write_run(tmp_path / "run", experiments.configure(task="quadratic", settings=["rounds=20"]))
    (folder / "spec.toml").write_text(content)
    if "data" not in content and "network" not in content and "run." not in content:
        one_sentence(run("compare", folder), 2, SPECS[content], "spec.toml")


NO_FILE = "spec.toml: it is a pipe or a device, and not a regular file"
READERS = {
    "a spec": (["run", "quadratic", "--rounds", 1, "--spec"], 2, f"cannot read {NO_FILE}"),
    "a sweep's base": (["sweep", "--grid", "cohort=1,2", "--rounds", 1], 2, f"cannot read {NO_FILE}"),
}


@pytest.mark.parametrize(("command", "code", "words"), READERS.values(), ids=READERS)
def test_files_without_an_end(command: list, code: int, words: str, run: Run, tmp_path: Path, monkeypatch) -> None:
    """A spec is refused if it is a device, a pipe, or a file of more than 4 MiB, since reading it might never end.

    Reading /dev/null does end, but it would give an empty spec.
    """
    monkeypatch.chdir(tmp_path)
    Path("spec.toml").symlink_to(os.devnull)
    one_sentence(run(*command, "spec.toml"), code, words)
    Path("spec.toml").unlink()
    os.mkfifo("spec.toml")
    one_sentence(run(*command, "spec.toml"), code, words)
    Path("spec.toml").unlink()
    Path("spec.toml").write_bytes(b"#" * (2**22 + 1))
    one_sentence(run(*command, "spec.toml"), code, "cannot read spec.toml: it has more than 4,194,304 bytes")


TWICE = '{"round": 0, "round": 10}'


@pytest.mark.parametrize("content", ["[]", "null", "{}", RAW[DEEP], "\0", TWICE])
def test_runs(content: str, run: Run, tmp_path: Path) -> None:
    """`compare` names a damaged file of a run in one sentence.

    More kinds of damage are in tests/test_hostile_files.py.
    """
    folder = write_run(tmp_path / "run", experiments.configure(task="quadratic", settings=["rounds=20"]))
    found = {"[]": "a list was found", "null": "null was found", TWICE: "the key 'round' is there twice"}.get(
        content, ""
    )
    for name in ("history.jsonl", "summary.json"):
        whole = (folder / name).read_text()
        (folder / name).write_text(content)
        one_sentence(run("compare", folder), 2, f"{folder / name}: it is damaged", found)
        (folder / name).write_text(whole)


HOSTILE = "\x1b]0;title\x07\x1b[2Jé"


@pytest.mark.drawn
def test_texts_of_others_command_no_terminal_and_no_page(run: Run, tmp_path: Path) -> None:
    """Control characters in texts of others reach neither the terminal nor a page.

    The texts are names of a task, of metrics, of packages, of folders, and of files whose code would be run.
    """
    folders = [
        write_run(tmp_path / name, experiments.configure(task="quadratic", settings=[f"run.seed={seed}"]))
        for seed, name in enumerate((f"a{HOSTILE}", "b"))
    ]
    for folder in folders:
        for file, plain in {
            "spec.toml": "quadratic",
            "summary.json": "relative_error",
            "history.jsonl": "relative_error",
        }.items():
            whole = (folder / file).read_text()
            (folder / file).write_text(whole.replace(f'"{plain}"', json.dumps(plain + HOSTILE)))
        (folder / "environment.json").write_text(json.dumps({"versions": HOSTILE}))
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "spec.toml").write_text((folders[0] / "spec.toml").read_text())
    page = tmp_path / "page.html"
    outcomes = [
        run("compare", tmp_path, "--out", tmp_path / "c.png"),
        run("report", tmp_path, "--out", page),
        run("compare", *folders, "--out", tmp_path / "c.png", "--columns", HOSTILE),
        run("run", "--spec", folders[0] / "spec.toml"),
        run("run", "--resume", folders[0]),
    ]
    assert [code for code, *_ in outcomes] == [0, 0, 2, 2, 4]
    texts = [*(text for _, *both in outcomes for text in both), page.read_text()]
    assert "quadratic�]0;title��[2Jé" in texts[0]
    assert "begun" in texts[1]
    for text in texts:
        assert printable(text, None, kept="\n") == text


WHOLE = '{"round": 1, "exchange": 0, "answered": [0, 3], "epsilon": 2}'
DAMAGED = [
    WHOLE.replace("[0, 3]", "7"), WHOLE.replace("2}", '"2"}'), WHOLE.replace("1,", '"\\u001b[2J",', 1), "[" * 200_000,
    WHOLE.replace("2}", '2, "refused": {"x": {}}}'), WHOLE.replace("2}", '2, "refused": {"1": []}}'),
    '{"exchange": 0}', '{"ended": "why"}', '{"ended": 3, "kind": "ExchangeError"}', '{"ended": "", "kind": []}', "3",
]  # fmt: skip


def test_damaged_lines_are_counted_and_command_no_terminal(run: Run, tmp_path: Path) -> None:
    """`flower status` counts damaged lines, and prints no control characters of the file.

    They could change a window's title or clear the screen. The exit code is that of the error that ended the server.
    """
    pytest.importorskip("flwr")
    ended = {"ended": "too \x1b]0;few\x07 clients\ud800", "kind": "ExchangeError"}
    (tmp_path / "exchanges.jsonl").write_text("\n".join([WHOLE, *DAMAGED, json.dumps(ended)]))
    code, out, error = run("flower", "status", tmp_path)
    said = "not finished; last: round 1, exchange 0, 2 replied\nε = 2 spent, the largest of the clients that add noise"
    said += f"\n{len(DAMAGED)} lines of "
    assert (code, out) == (5, f"{said}{tmp_path / 'exchanges.jsonl'} cannot be read\n")
    assert error == "fedbilevel: too �]0;few� clients�\n"


@pytest.mark.parametrize("damage", ["meta", "compressed"])
def test_checkpoints(damage: str, run: Run, tmp_path: Path) -> None:
    """A damaged or compressed checkpoint is refused in one sentence, and stays as it is."""
    place = tmp_path / "run" / "checkpoint.npz"
    experiments.run(experiments.configure(task="quadratic", settings=["rounds=10"]), place.parent, plot=False)
    place.with_name("checkpoint.previous.npz").unlink(missing_ok=True)  # else the run would be resumed from it
    with np.load(place) as stored:
        arrays = dict(stored)
    if damage == "meta":
        header = json.loads(arrays["__meta__"].tobytes())
        header["meta"]["fingerprint"] = 3
        np.savez(place, **{**arrays, "__meta__": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    else:
        np.savez_compressed(place, **{**arrays, "more": np.zeros(10_000_000)})
    spoilt = place.read_bytes()
    words = "checkpoint.npz is not a readable checkpoint" if damage == "meta" else "its arrays are compressed"
    one_sentence(run("run", "--resume", place.parent, "--rounds", 20, "--quiet"), 4, words)
    assert place.read_bytes() == spoilt


def test_a_host_that_no_certificate_can_name(run: Run, tmp_path: Path) -> None:
    """`flower keys` refuses a host name that does not fit into a certificate."""
    pytest.importorskip("cryptography")
    outcome = run("flower", "keys", tmp_path / "keys", "--clients", 1, "--host", "ä" * 64)
    one_sentence(outcome, 2, "a server cannot have one of the names ää")


@pytest.mark.parametrize(
    "command", [["run", "quadratic", "--rounds", "1", "--out"], ["flower", "keys", "--clients", "1"]]
)
def test_a_read_only_disk(command: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that cannot write to a disk says so in one sentence, with exit code 4."""
    place = tmp_path / "there"

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    outcome = run(*command, place)
    one_sentence(outcome, 4, f"{place}: Read-only file system")
    assert "Errno" not in outcome[2]
