"""Write files atomically: at any moment a file has its old or its new content, even if the process is killed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError


def write_atomically(path: Path, write: Any, keep: Path | None = None) -> None:
    """Write a temporary file by write(file), flush it to disk, and rename it to `path`.

    Args:
        path: the file.
        write: a function that writes to an open binary file.
        keep: the path under which the previous file is kept; None: the previous file is replaced.

    Raises:
        CheckpointError: the operating system refused to write; the previous file is unchanged.
    """
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
    """Write a value as an indented JSON file, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that names the path and the reason."""
    try:
        yield
    except OSError as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file or folder that the operating system refused to write."""
    text = f"could not write {path}: {error.strerror or error}; nothing was changed"
    return CheckpointError(text, path=path, errno=error.errno)


def _keep(path: Path, other: Path) -> None:
    """Give the file `path` the second name `other`, by a link; if links are not supported, rename it to `other`."""
    temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
    try:
        os.link(path, temporary)
    except OSError:
        os.replace(path, other)
        return
    try:
        os.replace(temporary, other)
    finally:
        temporary.unlink(missing_ok=True)  # os.replace leaves it if both names were already the same file
