"""A small archive in the layout of CIFAR-10, for tests of loading and of downloading."""

import io
import tarfile

import numpy as np
import pytest

from fedbilevel.data import loaders


@pytest.fixture
def cifar_archive(monkeypatch):
    """Return a function that makes small tar archives in the layout of CIFAR-10.

    Each batch has one record per label. Pixel (row, column, channel) of every image is 64 channel + 2 row + column % 2.
    """
    monkeypatch.setattr(loaders, "BATCH", 10)

    def make(skip: str = "", labels: bytes = bytes(range(10)), extra: bytes = b"", packed: str = "xz") -> bytes:
        channel, row, column = np.ogrid[:3, :32, :32]
        pixels = (64 * channel + 2 * row + column % 2).astype(np.uint8).tobytes()
        records = b"".join(bytes([label]) + pixels for label in labels) + extra
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=f"w:{packed}") as archive:
            for name in (*loaders.CIFAR_TRAIN, "batches.meta.txt", *loaders.CIFAR_TEST):
                if name != skip:
                    member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
                    member.size = len(records)
                    archive.addfile(member, io.BytesIO(records))
        return out.getvalue()

    return make
