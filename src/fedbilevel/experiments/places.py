"""Files of a run: where they may lie, and writing them whole or not at all."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError


def default_path(*names: str | None, root: str | Path = "runs") -> Path:
    """runs/<names>-<time>, with a counter if that one exists."""
    base = Path(root) / "-".join(name for name in (*names, time.strftime("%Y%m%d-%H%M%S")) if name)
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


def require_seeds(folder: Path, specs: Mapping[Path, str]) -> None:
    """Refuse a folder with anything but some of these runs, given by their places and specs; clear what a process
    left that was killed before its run's first checkpoint."""
    for path in folder.iterdir() if folder.is_dir() else [folder] if folder.exists() else []:
        if path not in specs or not path.is_dir():
            require_free(folder)
        spec = path / "spec.toml"
        if spec.is_file() and spec.read_text(encoding="utf-8") != specs[path]:
            raise ConfigurationError(f"cannot continue the runs in {folder}: {spec} is not what was asked for now")
        if not spec.is_file():
            require_free(path)
        elif not (path / "checkpoint.npz").is_file():
            for file in (spec, path / "environment.json", *path.glob(".*.tmp")):
                file.unlink(missing_ok=True)
            require_free(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file, atomically."""
    from fedbilevel.engines.checkpoint import write_atomically

    write_atomically(path, lambda file: file.write(text.encode()))


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file that people can read, atomically."""
    write_text(path, json.dumps(content, indent=2) + "\n")
