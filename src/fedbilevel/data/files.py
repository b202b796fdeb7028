"""Find published files of data sets in a user's folder or in the cache, or download them, and verify their bytes.

The sizes of files are bounded when they are read. An error message is one sentence that names the file.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import secrets
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.reading import read_bytes as read_regular
from fedbilevel.reading import require_regular
from fedbilevel.wording import in_a_line, nearest, shown

CHUNK = 1 << 18  # the number of bytes that are read at once
LONGEST = 1 << 28  # the largest allowed number of bytes of a file; the largest file below has 170 MB


class DataError(ValueError):
    """Report data that cannot be found, read, downloaded, partitioned or stored; the message says what to do.

    Attributes:
        path: the argument, the file or the part of a file that is wrong, or the kind of an unknown name; "" if the
            error is about none of them, such as a missing library.
        got: the value, the unknown name, or what the file has; None if it cannot be read.
        allowed: the allowed values or the expected content in words, or the valid names; "" if the error does not name
            them.
        near: the valid name that is most similar to `got`; "" if none is similar.
    """

    def __init__(
        self,
        text: str = "",
        *,
        path: str | Path = "",
        got: object = None,
        allowed: str | Sequence[str] = "",
        near: str = "",
    ) -> None:
        super().__init__(text)
        self.path, self.got, self.allowed, self.near = str(path), got, allowed, near

    def __str__(self) -> str:
        """Return the message, with the most similar valid name at its end."""
        return f"{super().__str__()} Did you mean {self.near!r}?" if self.near else super().__str__()


def require(holds: bool, path: str, got: object, allowed: str) -> None:
    """Raise DataError unless `holds`: "PATH is GOT; allowed: ALLOWED."."""
    if not holds:
        raise DataError(f"{path} is {shown(got)}; allowed: {allowed}.", path=path, got=got, allowed=allowed)


def require_content(holds: bool, file: str | Path, got: str, expected: str, remedy: str = "") -> None:
    """Raise DataError unless `holds`: "FILE has GOT; expected EXPECTED: REMEDY."."""
    if not holds:
        raise unexpected(file, got, expected, remedy)


def unexpected(file: str | Path, got: str, expected: str, remedy: str = "") -> DataError:
    """Return the error for a file, or a part of a file, that has other content than expected."""
    end = f": {remedy}" if remedy else ""
    return DataError(f"{file} has {got}; expected {expected}{end}.", path=file, got=got, allowed=expected)


def unreadable(file: str | Path, why: str) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(f"{file} cannot be read: {why}.", path=file, allowed=f"a file that can be read ({why})")


def unknown_name(field: str, got: object, allowed: Iterable[str]) -> DataError:
    """Return the error for a field that got an unknown name. It suggests the nearest of the allowed names."""
    names = sorted(allowed)
    text = f"{field} {shown(got)} is unknown. Allowed: {', '.join(names) or 'none'}."
    return DataError(text, path=field, got=got, allowed=names, near=nearest(shown(got, str), names))


EXPANDERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "bz2": bz2.BZ2File,
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "xz": lzma.LZMAFile,
}


@contextmanager
def as_data_error(where: str | Path, problem: str) -> Iterator[None]:
    """Turn every exception within the block into a DataError whose message has `where`, `problem` and the exception.

    This is for libraries that do not document which exceptions a damaged file causes: ValueError, zlib.error,
    NotImplementedError and others.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} {problem}: {in_a_line(error)}.", path=where) from error


class Expanded:
    """A stream that expands compressed bytes.

    Args:
        content: the compressed bytes.
        form: the compression, a key of EXPANDERS.
        limit: the largest number of expanded bytes. A read beyond it raises DataError. The limit is needed since a
            small file can expand to thousands of times its size.
        where: the name of the file in errors.
    """

    def __init__(self, content: bytes, form: str, limit: int, where: str | Path) -> None:
        self.stream = EXPANDERS[form](io.BytesIO(content))
        self.limit = self.left = limit
        self.where = where

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or fewer at the end; without `size`, all remaining bytes."""
        wanted = self.left + 1 if size < 0 else min(size, self.left + 1)
        parts = []
        while wanted and (part := self.stream.read(min(wanted, CHUNK))):
            parts.append(part)
            wanted -= len(part)
            self.left -= len(part)
        if self.left < 0:
            text = f"{self.where} expands to more than {self.limit:,} bytes: it is not the expected file."
            raise DataError(text, path=self.where, allowed=f"at most {self.limit:,} bytes")
        return b"".join(parts)


def mapped(path: Path, problem: str) -> NDArray[Any]:
    """Open the array of numbers in a .npy file as a read-only memory map, which takes no memory, whatever its shape."""
    with as_data_error(path, problem):
        require_regular(path)
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        if array.dtype.kind not in "biufc":
            raise ValueError(f"it holds {array.dtype} instead of numbers")
        return array


@dataclass(frozen=True)
class File:
    """A published file: its name, its size in bytes, and its SHA-256 in hexadecimal digits."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class DataSource:
    """The files of a data set; `home` is the URL below which they are.

    For sets of images, `mean` and `std` are the mean and the standard deviation, per channel, of the training pixels
    scaled to [0, 1].
    """

    home: str
    files: tuple[File, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


# Sizes and checksums are of the original files: the published MD5 sums (MNIST f68b3c2d..., Fashion-MNIST 8d4fb7e6...,
# CIFAR-10 c32a1d4a...) belong to the same bytes. The checksums of Omniglot are from TensorFlow Datasets. The order of
# files is training images, training labels, test images, test labels. Means and standard deviations have the usual four
# digits; those of Omniglot are of images with 28×28 pixels. Tests compute them again from the pixels.
MNIST = (
    File("train-images-idx3-ubyte.gz", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    File("train-labels-idx1-ubyte.gz", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    File("t10k-images-idx3-ubyte.gz", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    File("t10k-labels-idx1-ubyte.gz", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
FASHION_MNIST = (
    File("train-images-idx3-ubyte.gz", 26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
    File("train-labels-idx1-ubyte.gz", 29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
    File("t10k-images-idx3-ubyte.gz", 4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
    File("t10k-labels-idx1-ubyte.gz", 5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
)
CIFAR_10 = (
    File("cifar-10-binary.tar.gz", 170_052_171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
)
OMNIGLOT = (
    File("images_background.zip", 9_464_212, "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640"),
    File("images_evaluation.zip", 6_462_886, "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee"),
)
HEART = (
    File("processed.cleveland.data", 18_461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    File("processed.hungarian.data", 10_263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    File("processed.switzerland.data", 4_109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    File("processed.va.data", 6_737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
)
SOURCES: dict[str, DataSource] = {
    "mnist": DataSource("https://ossci-datasets.s3.amazonaws.com/mnist/", MNIST, (0.1307,), (0.3081,)),
    "fashion-mnist": DataSource(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", FASHION_MNIST, (0.2860,), (0.3530,)
    ),
    "cifar-10": DataSource(
        "https://www.cs.toronto.edu/~kriz/", CIFAR_10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "omniglot": DataSource(
        "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/", OMNIGLOT, (0.0779,), (0.2303,)
    ),
    "heart": DataSource("https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/", HEART),
}


Progress = Callable[[int, int], None]
"""A function that is called during a download with (bytes done, bytes in all), from (0, total) to (total, total)."""

TIMEOUT = 30.0  # a download fails if the server sends no byte for this many seconds


def folders(name: str) -> list[Path]:
    """Return the folders in which files of a data set are searched, in this order. The last one is the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    places = [cache / "fedbilevel" / "data" / name]
    users = os.environ.get("FEDBILEVEL_DATA")
    if users:
        places.insert(0, Path(users).expanduser() / name)
    return places


def local(name: str, filename: str) -> Path | None:
    """Return the path of the first copy of a data set's file that exists, or None."""
    return next((path for folder in folders(name) if (path := folder / filename).is_file()), None)


def read(name: str, file: File, progress: Progress | None = None) -> bytes:
    """Return the verified bytes of a data set's file. If there is no local copy, download it into the cache.

    Raises:
        DataError: the local copy is truncated or altered, or the download fails.
    """
    path = local(name, file.name)
    if path is None:
        path = folders(name)[-1] / file.name
        download(SOURCES[name].home + file.name, path, file, progress or bar(f"{name}/{file.name}"))
    content = read_bytes(path)
    again, digest = "delete it and download it again", hashlib.sha256(content).hexdigest()
    require_content(len(content) == file.size, path, f"{len(content):,} bytes", f"{file.size:,}", again)
    require_content(digest == file.sha256, path, f"sha256 {digest}", file.sha256, again)
    return content


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: the file is not regular, has more than `longest` bytes, or cannot be read.
    """
    try:
        return read_regular(path, longest)
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def download(url: str, path: Path, file: File, progress: Progress, timeout: float = TIMEOUT) -> None:
    """Download `url` to `path`.

    A file exists at `path` only if it is complete and verified.

    Raises:
        DataError: the download failed, or its size or checksum is wrong.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing(path) as part, urllib.request.urlopen(url, timeout=timeout) as reply, open(part, "xb") as out:
            digest, done = hashlib.sha256(), 0
            progress(0, file.size)
            # At most one byte more than expected is read and written: this byte already shows that the file is wrong.
            while chunk := reply.read(min(CHUNK, file.size + 1 - done)):
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(min(done, file.size), file.size)
            if done != file.size:
                got = f"{done:,}" if done < file.size else f"more than {file.size:,}"
                raise _failed(url, path, f"the server sent {got} bytes, expected {file.size:,}")
            if digest.hexdigest() != file.sha256:
                raise _failed(url, path, f"sha256 is {digest.hexdigest()}, expected {file.sha256}")
            out.flush()
            os.fsync(out.fileno())
    except (OSError, HTTPException) as error:
        raise _failed(url, path, f"{type(error).__name__}: {error}") from error


def _failed(url: str, path: Path, why: str) -> DataError:
    return DataError(
        f"Download of {url} failed: {why}. Without internet: put the file at "
        f"FOLDER{os.sep}{path.parent.name}{os.sep}{path.name} and set FEDBILEVEL_DATA=FOLDER (or at {path}).",
        path=url,
    )


def temporary(path: Path) -> Path:
    """Return an unused path in the same folder, so that renaming it to `path` is atomic."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`.

    The file there is renamed to `path` if the block succeeds, else removed.
    """
    part = temporary(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def bar(title: str) -> Progress:
    """Return a progress bar on one line of standard error. If standard error is not a terminal, nothing is shown."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent == shown or not sys.stderr.isatty():
            return
        shown = percent
        end = "\n" if done == total else ""
        line = f"{title} [{'#' * (percent // 5):<20}] {percent:3d}% of {total / 1e6:.1f} MB"
        sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}{end}")  # a longer line would wrap
        sys.stderr.flush()

    return show
