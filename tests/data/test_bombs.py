"""Are files of some kilobytes that expand to 50 MB refused before much of them is in memory?"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  (before memory is counted)

from fedbilevel import data
from fedbilevel.data import characters, loaders
from refusals import raises_with

BIG, LIMIT = 50_000_000, 300_000  # bytes
ZEROS = bytes(BIG)
AT_MOST = f"at most {LIMIT:,} bytes"


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for owner, name in ((loaders, "COVERTYPE_LIMIT"), (loaders, "CIFAR_LIMIT"), (loaders, "IDX_LIMIT")):
        monkeypatch.setattr(owner, name, LIMIT)


def refused(read: Callable[[], Any], path: str, allowed: str) -> None:
    """Check that reading is refused with these fields, and that a tenth of the 50 MB was never in memory."""
    tracemalloc.start()
    try:
        with raises_with(data.DataError, path=path, allowed=allowed):
            read()
        assert tracemalloc.get_traced_memory()[1] < BIG / 10
    finally:
        tracemalloc.stop()


def put(*names: str, content: bytes) -> Path:
    path = Path(data.files.folders(names[0])[0], *names[1:])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_tables() -> None:
    """Tables of numbers are refused as soon as they expand beyond a limit.

    The limit of a table of libsvm follows from its expected numbers of rows and features.
    """
    path = put("covtype", "covtype.data.gz", content=gzip.compress(ZEROS, 1))
    refused(lambda: data.load_table("covtype"), str(path), AT_MOST)
    path = put("libsvm", "a9a.bz2", content=bz2.compress(ZEROS, 1))
    # 4 lines of 3 pairs and a label, of 32 characters each
    refused(lambda: loaders.parse_libsvm(path, 3, 4, 2), str(path), "at most 512 bytes")


def test_lines_of_a_byte_are_counted_before_they_are_parted() -> None:
    """Too many lines are refused before the text is split, because lines of a byte would take many times its memory."""
    rows = 20_000
    limit = rows * 4 * loaders.LIBSVM_PAIR
    path = put("libsvm", "a9a.bz2", content=bz2.compress(b"\n" * limit, 1))
    tracemalloc.start()
    try:
        with raises_with(data.DataError, path=str(path), got=f"{limit:,} lines", allowed="20,000"):
            loaders.parse_libsvm(path, 3, rows, 2)
        assert tracemalloc.get_traced_memory()[1] < 3 * limit  # the parts as they were read, and the joined text
    finally:
        tracemalloc.stop()


def test_idx() -> None:
    """A file of the form IDX is refused as soon as it expands beyond a limit, whatever size its header claims."""
    content = gzip.compress(bytes((0, 0, 8, 1)) + struct.pack(">i", BIG) + ZEROS, 1)
    refused(lambda: loaders.parse_idx(content, 1, "file"), "file", AT_MOST)


@pytest.mark.parametrize("packed", [gzip.compress, partial(lzma.compress, preset=0)])
def test_a_cifar_archive(packed: Callable[[bytes], bytes]) -> None:
    """An archive of CIFAR-10 is refused as soon as it expands beyond a limit, even within the header of a member."""
    member = tarfile.TarInfo("cifar-10-batches-bin/batches.meta.txt")
    member.size, member.type = BIG, tarfile.XHDTYPE
    content = packed(member.tobuf() + ZEROS)
    refused(lambda: loaders.parse_cifar(content, "file"), "file", AT_MOST)


@pytest.mark.parametrize(
    ("packing", "said", "allowed"),
    [
        (zipfile.ZIP_DEFLATED, BIG, "at most 100,000"),
        (zipfile.ZIP_DEFLATED, 90_000, ""),  # the checksum is wrong
        (zipfile.ZIP_LZMA, 90_000, "a stored or deflated file"),
    ],
)
def test_an_omniglot_archive(monkeypatch: pytest.MonkeyPatch, packing: int, said: int, allowed: str) -> None:
    """An image that is too large is refused, whether or not the table of the archive states its true length."""
    monkeypatch.setattr(characters, "PUBLISHED", dict.fromkeys(characters.PUBLISHED, (1, 1)))
    monkeypatch.setattr(characters, "DRAWINGS", 1)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing) as archive:
        archive.writestr("images_background/Aleph/character01/0709_01.png", ZEROS, compresslevel=1)
    content = out.getvalue().replace(struct.pack("<I", BIG), struct.pack("<I", said))
    path = put("omniglot", "images_background.zip", content=content)
    image = f"images_background/Aleph/character01/0709_01.png in {path}"
    refused(lambda: data.load_characters("omniglot"), image, allowed)


def test_a_header_that_claims_more_than_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A .npy file is refused if its header claims more rows than there are.

    The claim costs no memory, because the array is mapped and not allocated.
    """
    folder = data.write_clients(tmp_path / "population", [1], [{"x": np.zeros((1, 2))}])
    whole = (folder / "x.npy").read_bytes()
    (folder / "x.npy").write_bytes(whole.replace(b"(1, 2), }       ", b"(1, 9999999), } "))
    assert len((folder / "x.npy").read_bytes()) == len(whole)
    refused(lambda: data.open_clients(folder), str(folder / "x.npy"), "")
