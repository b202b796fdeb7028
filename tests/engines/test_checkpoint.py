"""Does a checkpoint return what was saved, is it complete or absent, and is every other file refused with a reason?"""

import errno
import json
import os
import pickle
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedbilevel.core import on_disk
from fedbilevel.core.errors import CheckpointError
from fedbilevel.engines import checkpoint
from refusals import raises_with


class State(NamedTuple):
    weights: dict
    count: object


def tree(seed=0):
    rng = np.random.default_rng(seed)
    weights = {"a/b": jnp.asarray(rng.normal(size=(2, 3))), "half": jnp.asarray(rng.normal(size=4), jnp.bfloat16)}
    return {
        "state": State(weights, jnp.asarray(seed)),
        "optimizer": optax.adam(optax.linear_schedule(0.1, 0.2, 5)).init(weights),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed), 3),
        "rbg": jax.random.key(seed, impl="rbg"),
        "small": jnp.asarray([1, -2], jnp.int8),
        "flag": jnp.asarray(True),
        "eighth": jnp.asarray([0.5, seed], jnp.float8_e4m3fn),
        "nothing": None,
        "empty": jnp.zeros((0, 3)),
    }


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        assert one.shape == other.shape


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.npz"
    checkpoint.save(path, tree(), {"round": 3})
    return path


def test_python_objects_are_refused_and_the_earlier_file_stays(saved):
    """Arrays of Python objects are refused, since their bytes are addresses in memory; the earlier file stays."""
    before = saved.read_bytes()
    with raises_with(CheckpointError, "['a']", path=saved, errno=None):
        checkpoint.save(saved, {"a": np.array([{}, None], object)}, {})
    assert saved.read_bytes() == before


def test_a_table_is_saved_without_having_it_in_memory(tmp_path, monkeypatch):
    """A table is written as a table, whose pages `bytes_of` releases, so that it is never in memory as a whole."""
    released = []
    monkeypatch.setattr(on_disk, "let_go", released.append)
    given = on_disk.repeated(np.zeros(2), 3)
    checkpoint.save(tmp_path / "run.npz", {"a": given}, {})
    assert any(array is given for array in released)


def test_an_error_in_reading_a_table_names_the_checkpoint(tmp_path, monkeypatch):
    """An error in reading a table names the checkpoint, and not the folder for temporary files."""
    path, like = tmp_path / "run.npz", on_disk.repeated(np.zeros(2), 3)
    checkpoint.save(path, like, {})
    read = zipfile.ZipExtFile.read

    def fails(file, n=-1):
        if n == checkpoint.BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, n)

    monkeypatch.setattr(zipfile.ZipExtFile, "read", fails)
    with raises_with(CheckpointError, path=path, errno=errno.EIO):
        checkpoint.load(path, like)


def test_what_was_saved_comes_back_bit_for_bit(saved):
    got, meta = checkpoint.load(saved, tree(seed=1))
    same(got, tree())
    assert meta == {"round": 3}
    assert jax.random.uniform(got["rbg"]) == jax.random.uniform(tree()["rbg"])


@pytest.mark.parametrize("bare", [None, {}, [], {"a": None}, np.arange(3)])
def test_a_bare_or_empty_tree_comes_back(tmp_path, bare):
    meta = {"note": "µ", "rows": [1.5, {"x": None}]}
    checkpoint.save(tmp_path / "bare.npz", bare, meta)
    got, said = checkpoint.load(tmp_path / "bare.npz", bare)
    np.testing.assert_equal(got, bare)
    assert said == meta


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "run.npz"
    checkpoint.save(path, {"x": jnp.ones(2)}, {})
    assert [file.name for file in path.parent.iterdir()] == ["run.npz"]


def changed(**entries):
    return {**tree(), **entries}


OTHERS = {
    "another shape": (changed(small=jnp.zeros(3, jnp.int8)), {"['small']": ("int8[2]", "int8[3]")}),
    "another dtype": (changed(small=jnp.zeros(2, jnp.int16)), {"['small']": ("int8[2]", "int16[2]")}),
    "bytes of another kind": (changed(flag=jnp.asarray(0, jnp.int8)), {"['flag']": ("bool[]", "int8[]")}),
    "another eighth": (
        changed(eighth=jnp.zeros(2, jnp.float8_e5m2)),
        {"['eighth']": ("float8_e4m3fn[2]", "float8_e5m2[2]")},
    ),
    "another kind of key": (changed(key=jax.random.key(0, impl="rbg")), {"['key']": ("uint32[2]", "uint32[4]")}),
    "more keys": (changed(keys=jax.random.split(jax.random.key(0), 4)), {"['keys']": ("uint32[3, 2]", "uint32[4, 2]")}),
    "a leaf more": (changed(more=jnp.ones(1)), {"['more']": None}),
    "a leaf fewer": ({k: v for k, v in tree().items() if k != "flag"}, {"['flag']": None}),
    "another optimiser": (
        changed(optimizer=optax.sgd(0.1).init({})),
        dict.fromkeys(
            ["['optimizer'][0].count", "['optimizer'][1].count"]
            + [f"['optimizer'][0].{moment}['{name}']" for moment in ("mu", "nu") for name in ("a/b", "half")]
        ),
    ),
}
"""For each case, another model, and the leaves that differ: their shapes and dtypes in the file and in the model."""


@pytest.mark.parametrize("case", OTHERS)
def test_another_model_is_refused_and_the_leaf_named(saved, case):
    like, differences = OTHERS[case]
    with raises_with(CheckpointError, path=saved, errno=None, differences=differences):
        checkpoint.load(saved, like)


def test_a_missing_file_is_said_to_be_missing(saved):
    saved.unlink()
    with raises_with(CheckpointError, path=saved, errno=errno.ENOENT):
        checkpoint.load(saved, tree())


SPOILT = {
    "not an archive": lambda path: path.write_text("rounds = 3\n"),
    "nothing in it": lambda path: path.write_bytes(b""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pickle": lambda path: path.write_bytes(pickle.dumps({"x": 1})),
    "another archive": lambda path: np.savez(path, x=np.ones(3)),
    "no JSON": lambda path: np.savez(path, __meta__=np.frombuffer(b"{round: 3", np.uint8)),
    "other JSON": lambda path: np.savez(path, __meta__=np.frombuffer(b"[3]", np.uint8)),
    "no text": lambda path: np.savez(path, __meta__=np.frombuffer(b"\xff\xfe", np.uint8)),
}


@pytest.mark.parametrize("case", SPOILT)
def test_other_files_are_refused(saved, case):
    SPOILT[case](saved)
    with raises_with(CheckpointError, path=saved, errno=errno.EISDIR if saved.is_dir() else None, differences={}):
        checkpoint.load(saved, tree())


def test_a_truncated_file_is_refused_wherever_it_ends(saved):
    whole = saved.read_bytes()
    for length in np.linspace(1, len(whole) - 1, 15).astype(int):
        saved.write_bytes(whole[:length])
        with raises_with(CheckpointError, path=saved, errno=None, differences={}):
            checkpoint.load(saved, tree())


def test_bytes_after_an_array_are_refused(saved):
    """Bytes after an array are refused, although length and checksum of the archive's entry are right."""
    with zipfile.ZipFile(saved) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries["['small'].npy"] += b"\0"
    with zipfile.ZipFile(saved, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with raises_with(CheckpointError, "['small'] has more bytes", path=saved, errno=None, differences={}):
        checkpoint.load(saved, tree())


def test_a_damaged_file_never_gives_other_numbers(saved):
    """If any byte of a file is changed, the file is refused or, where the format ignores it, has the same numbers."""
    whole = saved.read_bytes()
    refused = 0
    for position in np.random.default_rng(0).integers(0, len(whole), 100):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        saved.write_bytes(damaged)
        try:
            same(checkpoint.load(saved, tree())[0], tree())
        except CheckpointError:
            refused += 1
    assert refused > 30


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


def test_nothing_is_unpickled(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    meta = np.frombuffer(json.dumps({}).encode(), np.uint8)
    np.savez(saved, __meta__=meta, **{"['x']": np.array([Bomb()], object)})
    with raises_with(CheckpointError, path=saved, errno=None, differences={}):
        checkpoint.load(saved, {"x": jnp.ones(1)})
    assert not (tmp_path / "exploded").exists()


def raises(error):
    def fail(*_, **arrays):
        raise error

    return fail


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [(os, "fsync", FULL), (os, "replace", FULL), (checkpoint, "bytes_of", FULL), (os, "fsync", KeyboardInterrupt())],
)
def test_a_full_disk_or_an_interruption_leaves_the_old_file_and_no_other(saved, monkeypatch, owner, name, error):
    before = saved.read_bytes()
    monkeypatch.setattr(owner, name, raises(error))
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        checkpoint.save(saved, tree(seed=1), {})
    if error is FULL:
        assert (caught.value.path, caught.value.errno) == (saved, errno.ENOSPC)
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == ["run.npz"]


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with raises_with(CheckpointError, path=tmp_path / "runs" / "run.npz", errno=errno.EEXIST):
        checkpoint.save(tmp_path / "runs" / "run.npz", {"x": jnp.ones(1)}, {})
    assert (tmp_path / "runs").read_text() == "a file"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission(saved):
    before = saved.read_bytes()
    saved.parent.chmod(0o500)
    try:
        with raises_with(CheckpointError, path=saved, errno=errno.EACCES):
            checkpoint.save(saved, tree(seed=1), {})
    finally:
        saved.parent.chmod(0o700)
    assert saved.read_bytes() == before


def stands(path):
    """Return the round of the checkpoint at a path, and that of the checkpoint before it."""
    before = checkpoint.previous(path)
    return [checkpoint.load(file, tree())[1]["round"] if file.exists() else None for file in (path, before)]


def save_round(path, round, **options):
    checkpoint.save(path, tree(), {"round": round}, **options)


@pytest.mark.parametrize("links", [True, False])
def test_the_checkpoint_before_is_kept(saved, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", raises(OSError(errno.EPERM, os.strerror(errno.EPERM))))
    for round, keep, found in [(4, True, [4, 3]), (5, True, [5, 4]), (6, False, [6, 4])]:
        save_round(saved, round, keep=keep)
        assert stands(saved) == found
    assert sorted(file.name for file in saved.parent.iterdir()) == ["run.npz", "run.previous.npz"]


def test_a_process_that_dies_between_the_two_files_loses_neither(saved, monkeypatch):
    """A process that dies between the two files loses neither.

    The old file is linked to its new name; then the new file takes its place. `os.replace` does both.
    """
    replace, calls = os.replace, []

    def dies(source, target):
        calls.append(target.name)
        if target == saved:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        save_round(saved, 4, keep=True)
    assert calls == ["run.previous.npz", "run.npz"]
    assert stands(saved) == [3, 3]  # one file with two names
    monkeypatch.undo()
    save_round(saved, 4, keep=True)
    assert stands(saved) == [4, 3]
    assert sorted(file.name for file in saved.parent.iterdir()) == ["run.npz", "run.previous.npz"]


def test_the_newest_that_can_be_read_is_found(saved):
    save_round(saved, 4, keep=True)
    assert checkpoint.newest(saved) == saved
    saved.write_bytes(saved.read_bytes()[:-40])
    assert checkpoint.newest(saved) == checkpoint.previous(saved)
    saved.unlink()
    assert checkpoint.exist(saved)
    assert checkpoint.newest(saved) == checkpoint.previous(saved)
    checkpoint.previous(saved).write_bytes(b"")
    with raises_with(CheckpointError, str(checkpoint.previous(saved)), path=saved, errno=errno.ENOENT):
        checkpoint.newest(saved)
