"""From a file's entry in the table to its verified bytes: own folder, cache, or download."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from fedbilevel.data.errors import DataError
from fedbilevel.data.sources import SOURCES, File

Progress = Callable[[int, int], None]
"""Called during a download with (bytes done, bytes in all), from (0, total) to (total, total)."""

TIMEOUT = 30.0  # seconds without a byte from the server
CHUNK = 1 << 18


def folders(name: str) -> list[Path]:
    """The folders that may hold the files of data set `name`, in the order of trial; the last one is the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    places = [cache / "fedbilevel" / "data" / name]
    own = os.environ.get("FEDBILEVEL_DATA")
    if own:
        places.insert(0, Path(own).expanduser() / name)
    return places


def local(name: str, filename: str) -> Path | None:
    """The first existing copy of `filename` of data set `name`, or None."""
    return next((path for folder in folders(name) if (path := folder / filename).is_file()), None)


def read(name: str, file: File, progress: Progress | None = None) -> bytes:
    """The verified bytes of a file of data set `name`, downloaded into the cache if there is no local copy.

    DataError if the copy that was found is truncated or altered, or if the download fails.
    """
    path = local(name, file.name)
    if path is None:
        path = folders(name)[-1] / file.name
        download(SOURCES[name].home + file.name, path, file, progress or bar(f"{name}/{file.name}"))
    content = read_bytes(path)
    if len(content) != file.size:
        raise DataError(f"{path} has {len(content):,} bytes, expected {file.size:,}: delete it and fetch it again.")
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise DataError(f"{path} has sha256 {found}, expected {file.sha256}: delete it and fetch it again.")
    return content


def read_bytes(path: Path) -> bytes:
    """The content of a file; DataError if the operating system refuses."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def download(url: str, path: Path, file: File, progress: Progress, timeout: float = TIMEOUT) -> None:
    """Stream `url` to `path`, which appears complete and verified or not at all. DataError otherwise."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            appearing(path) as part,
            urllib.request.urlopen(url, timeout=timeout) as reply,
            open(part, "xb") as out,
        ):
            found, done = hashlib.sha256(), 0
            progress(0, file.size)
            # One byte above the size is enough to know that this is not the file; no more of it reaches the
            # disk.
            while chunk := reply.read(min(CHUNK, file.size + 1 - done)):
                out.write(chunk)
                found.update(chunk)
                done += len(chunk)
                progress(min(done, file.size), file.size)
            if done != file.size:
                got = f"{done:,}" if done < file.size else f"more than {file.size:,}"
                raise _failed(url, path, f"the server sent {got} bytes, expected {file.size:,}")
            if found.hexdigest() != file.sha256:
                raise _failed(url, path, f"sha256 is {found.hexdigest()}, expected {file.sha256}")
            out.flush()
            os.fsync(out.fileno())
    except (OSError, HTTPException) as error:
        raise _failed(url, path, f"{type(error).__name__}: {error}") from error


def _failed(url: str, path: Path, why: str) -> DataError:
    return DataError(
        f"Download of {url} failed: {why}. Without internet: put the file at "
        f"FOLDER{os.sep}{path.parent.name}{os.sep}{path.name} and set FEDBILEVEL_DATA=FOLDER (or at {path})."
    )


def temporary(path: Path) -> Path:
    """A name in the same folder that nobody uses: renaming it to `path` is atomic."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to write: it takes that name if the block succeeds, else it vanishes."""
    part = temporary(path)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def bar(title: str) -> Progress:
    """A one-line progress bar on standard error; silent where that is not a terminal."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent == shown or not sys.stderr.isatty():
            return
        shown = percent
        end = "\n" if done == total else ""
        line = f"{title} [{'#' * (percent // 5):<20}] {percent:3d}% of {total / 1e6:.1f} MB"
        sys.stderr.write(f"\r{line[: shutil.get_terminal_size().columns - 1]}{end}")  # a full line would wrap
        sys.stderr.flush()

    return show
