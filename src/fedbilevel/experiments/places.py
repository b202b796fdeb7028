"""Files of a run: where they may lie, and writing them whole or not at all."""

import json
import re
import time
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError


def default_path(*names: str | None, root: str | Path = "runs") -> Path:
    """runs/<names>-<time>, with a counter if that one exists."""
    words = [re.sub(r"(\.py)?[^\w.-]+", "-", name) for name in names if name]  # mine.py:task, of a user's own
    base = Path(root) / "-".join([*words, time.strftime("%Y%m%d-%H%M%S")])
    path, count = base, 1
    while path.exists():
        count += 1
        path = base.with_name(f"{base.name}-{count}")
    return path


def require_free(path: Path) -> None:
    """Refuse a place where there is something already."""
    if path.exists() and not path.is_dir():
        raise ConfigurationError(f"cannot write a run to {path}: it is a file")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigurationError(f"cannot write a run to {path}: that folder is not empty")


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    from fedbilevel.engines.checkpoint import write_atomically

    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that people can read, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")
