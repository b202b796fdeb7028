"""Files that are at any moment whole, old or new, whatever ends the process that writes them."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError


def write_atomically(path: Path, write: Any, keep: Path | None = None) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, then rename it into place; what was in that
    place stays as `keep`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if keep is not None and path.exists():
                _keep(path, keep)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, atomically."""
    write_atomically(path, lambda file: file.write(content))


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that people can read, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into a CheckpointError that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}; nothing was changed") from error


def _keep(path: Path, other: Path) -> None:
    """Have the file `path` at `other` too; where no file can have two names, at `other` alone."""
    temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
    try:
        os.link(path, temporary)
    except OSError:
        os.replace(path, other)
        return
    try:
        os.replace(temporary, other)
    finally:
        temporary.unlink(missing_ok=True)  # it is still there if both were the same file already
