"""Compiled programs on disk, for later processes: JAX's own cache, bounded."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from pathlib import Path

import jax

from fedbilevel.core.errors import ConfigurationError, require_count
from fedbilevel.extras import missing

MEGABYTES = 500
WRITTEN = 60.0  # seconds that writing both halves of a program takes at most


def keep_on_disk(folder: str | Path | None = None, megabytes: int = MEGABYTES) -> Path:
    """See `Local.keep_on_disk`."""
    require_count("megabytes", megabytes)
    if importlib.util.find_spec("filelock") is None:
        raise ConfigurationError(f"programs on disk need {missing('filelock', 'cli')}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if own and folder is None:
        return Path(own)  # with its own bound, if any
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    chosen = user / "fedbilevel" / "programs" if folder is None else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_compilation_cache_max_size", megabytes * 10**6)
    _remove_halves(chosen)
    return chosen


def _remove_halves(folder: Path) -> None:
    """Remove programs without a time of use, left by a process that was killed: JAX would write no more beside them."""
    for file in folder.glob("*-cache"):
        time_of_use = file.with_name(file.name.removesuffix("-cache") + "-atime")
        with contextlib.suppress(OSError):  # another process may have removed it
            if not time_of_use.exists() and time.time() - file.stat().st_mtime > WRITTEN:
                file.unlink()
