"""Reading files that anyone may have written: within bounds, and with one sentence for whatever is wrong with them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.errors import DataError
from fedbilevel.quoting import in_a_line

CHUNK = 1 << 20  # bytes

EXPANDERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "bz2": bz2.BZ2File,
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "xz": lzma.LZMAFile,
}


@contextmanager
def as_data_error(where: str | Path, problem: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into the DataError «where problem: why».

    What libraries raise for damaged files is not documented: it ranges from ValueError to zlib.error and
    NotImplementedError.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} {problem}: {in_a_line(error)}.") from error


class Expanded:
    """The expanded bytes of compressed ones, as a stream.

    Args:
        form: a key of EXPANDERS.
        limit: DataError once there are more bytes: a small file can expand to thousands of times its size.
        where: the name for errors.
    """

    def __init__(self, content: bytes, form: str, limit: int, where: str | Path) -> None:
        self.stream = EXPANDERS[form](io.BytesIO(content))
        self.limit = self.left = limit
        self.where = where

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, fewer at the end; without `size` all that is left."""
        wanted = self.left + 1 if size < 0 else min(size, self.left + 1)
        parts = []
        while wanted and (part := self.stream.read(min(wanted, CHUNK))):
            parts.append(part)
            wanted -= len(part)
            self.left -= len(part)
        if self.left < 0:
            raise DataError(f"{self.where} expands to more than {self.limit:,} bytes: it is not the file it should be.")
        return b"".join(parts)


def read_json(content: bytes, where: str | Path, problem: str) -> Any:
    """A value in JSON."""
    with as_data_error(where, problem):
        return json.loads(content)


def mapped(path: Path, problem: str) -> NDArray[Any]:
    """The array of numbers in a .npy file, as a read-only memory map: it takes no memory, whatever its header says."""
    with as_data_error(path, problem):
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        if array.dtype.kind not in "biufc":
            raise ValueError(f"it holds {array.dtype}, not numbers")
        return array
