"""Do tables on disk have the numbers that were written, and do copies stay as they were?"""

import copy
import errno
import pickle
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core import on_disk
from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import is_table, split
from fedbilevel.engines import checkpoint
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import History, Result
from refusals import raises_with

KINDS = [np.float64, jnp.bfloat16, np.int32, bool]


def array(kind):
    return (np.arange(15).reshape(5, 3) % 4 - 1).astype(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [1, 2**22])
def test_a_table_has_the_numbers_of_an_array(monkeypatch, tmp_path, kind, block):
    """A table has the numbers of an array, written in pieces of a row or as a whole.

    The same holds for a table that is read back from a checkpoint.
    """
    monkeypatch.setattr(on_disk, "BLOCK", block)
    monkeypatch.setattr(checkpoint, "BLOCK", block)
    tables = on_disk.on_disk({"a": array(kind)})
    assert on_disk.on_disk(tables)["a"] is tables["a"]
    checkpoint.save(tmp_path / "file.npz", tables, {})
    read, _ = checkpoint.load(tmp_path / "file.npz", on_disk.repeated({"a": array(kind)[0]}, 5))
    copies = on_disk.copied(tables["a"]), on_disk.lasting(tables)["a"]
    for found in (tables["a"], read["a"], *copies, split(tables)[0]["a"]):
        if found is not None:  # only floating leaves are variables
            assert is_table(found)
            assert found.dtype == kind
            np.testing.assert_array_equal(found, array(kind))


def test_rows_are_read_and_written_in_place_and_copies_do_not_change():
    tables = on_disk.repeated({"a": jnp.arange(2.0), "b": jnp.asarray(3)}, 4)
    before = on_disk.copied(tables["a"]), on_disk.lasting(tables)["b"], on_disk.read(tables, np.array([3, 1]))
    on_disk.write(tables, np.array([3, 0]), {"a": jnp.array([[5.0, 6.0], [7.0, 8.0]]), "b": np.array([9, 10])})
    np.testing.assert_array_equal(tables["a"], [[7, 8], [0, 1], [0, 1], [5, 6]])
    np.testing.assert_array_equal(tables["b"], [10, 3, 3, 9])
    np.testing.assert_array_equal(before[0], [[0, 1]] * 4)
    np.testing.assert_array_equal(before[1], [3] * 4)
    np.testing.assert_array_equal(before[2]["a"], [[0, 1]] * 2)


def test_empty_rows_and_a_number_for_each_client():
    tables = on_disk.repeated((np.zeros((0, 2)), np.float32(1.5)), 3)
    assert [leaf.shape for leaf in tables] == [(3, 0, 2), (3,)]
    on_disk.write(tables, np.array([1]), (np.zeros((1, 0, 2)), np.ones(1)))
    np.testing.assert_array_equal(tables[1], [1.5, 1, 1.5])


@pytest.mark.parametrize(("pieces", "words"), [([b"1234567"], "1 bytes too few"), ([b"1234", b"56789"], "too many")])
def test_a_table_of_another_length_is_refused(pieces, words):
    with pytest.raises(ValueError, match=words):
        on_disk.table((2,), np.float32, pieces)


def test_a_full_disk_is_an_error_that_names_the_folder(monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")
        yield

    monkeypatch.setattr(on_disk, "bytes_of", full)
    with raises_with(CheckpointError, "48 bytes; TMPDIR", path=Path(tempfile.gettempdir()), errno=errno.ENOSPC):
        on_disk.repeated(np.zeros(2), 3)


def test_too_many_open_files_are_an_error_that_names_their_limit(monkeypatch):
    def refused(dir):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(on_disk.tempfile, "TemporaryFile", refused)
    with raises_with(CheckpointError, "13 open files", errno=errno.EMFILE):
        on_disk.repeated(np.zeros(2), 3)


COPIES = {
    "copy": lambda mapped: mapped.copy(),
    "astype": lambda mapped: mapped.astype(np.float64),
    "deepcopy": copy.deepcopy,
    "pickle": lambda mapped: pickle.loads(pickle.dumps(mapped)),  # noqa: S301
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_memory_maps_are_arrays_in_memory(tmp_path, name):
    """Copies of memory maps are arrays in memory.

    As the start of y they are variables of JAX, in JAX's precision, as other NumPy arrays are.
    """
    np.save(tmp_path / "y.npy", np.arange(6.0).reshape(3, 2))
    copied = COPIES[name](np.load(tmp_path / "y.npy", mmap_mode="r"))
    assert not is_table(copied)
    assert not is_table(COPIES[name](on_disk.on_disk(copied)))
    with jax.enable_x64(False):
        start = split({"own": copied})[0]["own"]
    assert isinstance(start, jax.Array)
    assert start.dtype == jnp.float32
    np.testing.assert_array_equal(start, copied)


@pytest.mark.parametrize("rows", [np.arange(6.0).reshape(3, 2), np.arange(3.0)])
def test_a_clients_own_y_stays_as_it_was_when_rounds_go_on(rows):
    y = {"own": on_disk.on_disk(rows), "shared": jnp.ones(2)}
    mine = Result(jnp.zeros(1), y, 1, 2, History(), Ledger(), own_leaves=("own",)).own(1)
    on_disk.write(y["own"], np.array([1]), -np.ones_like(rows[:1]))
    np.testing.assert_array_equal(mine["own"], rows[1])
    np.testing.assert_array_equal(mine["shared"], [1, 1])


def test_a_damaged_checkpoint_is_no_error_of_writing(tmp_path):
    """If the bytes of a table in a checkpoint are damaged, the error names the checkpoint, and not the table's disk."""
    tables = on_disk.on_disk({"a": np.arange(30_000.0).reshape(10_000, 3)})
    checkpoint.save(tmp_path / "file.npz", tables, {})
    content = bytearray((tmp_path / "file.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "file.npz").write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path / "file.npz", on_disk.repeated({"a": np.zeros(3)}, 10_000))
    assert "file.npz is not a readable checkpoint" in str(error.value)
    assert "could not write" not in str(error.value)
