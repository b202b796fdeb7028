"""Configure the machine for a process: XLA's settings for CPUs, compiled programs on disk, and freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import tempfile
import time
import warnings
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax._src.xla_bridge import backends_are_initialized  # no public function tells this without starting backends
from jax.experimental.compilation_cache import compilation_cache

from fedbilevel.core.errors import ConfigurationError, require, require_count
from fedbilevel.wording import missing

TESTED = "0.10."  # versions of jaxlib whose flags are set: an unknown flag would end the process
MEGABYTES = 500  # the default size of the folder of compiled programs
WRITTEN = 60.0  # the most seconds that writing both files of a program may take
TRIAL = 8  # the number of CPU devices that is allowed even on fewer cores; hundreds of devices would deadlock
COUNT = "--xla_force_host_platform_device_count"
_asked: list[int | None] = []  # the argument of each call of `tune_cpu`


def tune_cpu(devices: int | None = None) -> None:
    """Set XLA_FLAGS for this process, before JAX's first computation. Flags that are already set take precedence.

    `solve` calls this function if JAX has not started yet and the cohort has several clients.

    Args:
        devices: the number of devices that JAX then makes of the CPU, for `Local(devices=…)`; None: one for each core.
            If there are several, they compute different clients in parallel, each on one thread.

    The flags are chosen by measurement. Matrix products of clients (about 64×784×200) ran 1.2 times faster in XLA's
    Eigen kernels than in its newer YNN kernels, the default of jaxlib 0.10. The small loops of FISM ran 1.6 times
    faster when each was compiled as one kernel, which XLA by default does only for loops over less than 1,024 bytes.

    Raises:
        ConfigurationError: JAX has started with fewer devices.
    """
    require_count("devices", devices, optional=True)
    if backends_are_initialized():
        there = jax.local_device_count()
        late = f"at most {there}, the devices with which JAX has started: call tune_cpu before its first computation"
        require((devices or 1) <= there, "devices", devices, f"{late}, and before the first array of jax.numpy")
        if devices is None:
            advise_of_cores()
    most = max(cores(), TRIAL)
    require((devices or 1) <= most, "devices", devices, f"at most {most} on this machine, which has {cores()} cores")
    _asked.append(devices)
    if backends_are_initialized():
        return  # JAX reads the flags no more, but they are in the key of each program on disk, which it would not find
    present = os.environ.get("XLA_FLAGS", "")
    count = _count_given() or devices or cores()
    wanted = {}
    if version("jaxlib").startswith(TESTED):
        wanted["--xla_cpu_experimental_ynn_fusion_type"] = ""
        wanted["--xla_backend_extra_options"] = "xla_cpu_small_while_loop_byte_threshold=32768"
    if count > 1:
        wanted[COUNT] = str(count)
        wanted["--xla_cpu_multi_thread_eigen"] = "false"
    added = [f"{flag}={value}" for flag, value in wanted.items() if flag not in present]
    os.environ["XLA_FLAGS"] = " ".join([*present.split(), *added])


def use_every_core() -> None:
    """Call `tune_cpu` if it was not called yet, JAX has not started, and JAX will find no accelerator."""
    plugins = any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))
    platforms = jax.config.values["jax_platforms"]
    if (platforms == "cpu" or not (platforms or plugins)) and not _asked and not backends_are_initialized():
        tune_cpu()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_given() -> int:
    """Return the number of CPU devices that the user asked JAX for; 0 if the user did not set it."""
    flag = re.search(rf"{COUNT}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(jax.config.values["jax_num_cpu_devices"], 0) or int(flag[1] if flag else 0)


@cache
def advise_of_cores() -> None:
    """Warn once, with advice on using every core, if JAX has started with one device that the user did not ask for."""
    alone = jax.default_backend() == "cpu" and jax.local_device_count() == 1
    if alone and cores() > 1 and not _count_given() and not _asked:
        how = "call fb.tune_cpu() before the first array of jax.numpy, or make x0 and y0 as arrays of NumPy"
        text = f"JAX has started with one device, on which clients take turns. To use all {cores()} cores: {how}"
        warnings.warn(text, stacklevel=2)


def keep_on_disk(folder: str | Path | None = None, megabytes: int = MEGABYTES) -> Path:
    """Keep compiled programs on disk for later processes, in JAX's persistent cache, as the command line does.

    Args:
        folder: where programs are kept; None: the environment variable JAX_COMPILATION_CACHE_DIR, if it is set (JAX's
            other settings of the cache are then unchanged), else fedbilevel/programs in the user's cache.
        megabytes: the size of the folder beyond which the least recently used programs are removed.

    Returns:
        The folder; a later call may choose another folder.

    Raises:
        ConfigurationError: the folder cannot be written, or the package filelock is missing. No setting is changed.
    """
    require_count("megabytes", megabytes)
    if importlib.util.find_spec("filelock") is None:
        raise ConfigurationError(f"programs on disk need {missing('filelock', 'cli')}")
    own = os.environ.get("JAX_COMPILATION_CACHE_DIR") if folder is None else None  # the user may limit its size
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    chosen = user / "fedbilevel" / "programs" if folder is None else Path(folder)
    if "://" not in (own or ""):
        _require_writable(Path(own or chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", own or str(chosen))
    if not own:
        jax.config.update("jax_compilation_cache_max_size", megabytes * 10**6)
        _remove_halves(chosen)
    compilation_cache.reset_cache()  # without this, JAX keeps the folder and the size limit of its first compilation
    return Path(own or chosen)


def keep_on_disk_if_possible() -> None:
    """Call `keep_on_disk`; if programs cannot be kept, issue a warning in place of the error."""
    try:
        keep_on_disk()
    except ConfigurationError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        warnings.warn(f"every process compiles its programs anew: {error}", stacklevel=2)


def once_for_all_processes() -> str:
    """Return advice on how to avoid compiling a program again in later processes; "" if programs are kept on disk.

    `solve` does not keep programs unless it is asked to, since JAX's setting applies to every program of the process,
    including the user's own programs.
    """
    return "" if jax.config.values["jax_compilation_cache_dir"] else " (fb.Local.keep_on_disk() keeps it)"


def _require_writable(folder: Path) -> None:
    """Make the folder, and test that a file of a program's size can be written; JAX would warn for each program."""
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(10**6))
    except OSError as error:
        text = f"programs cannot be kept in this folder: {error.strerror}"
        raise ConfigurationError(text, where=str(folder)) from error


def _remove_halves(folder: Path) -> None:
    """Remove cached programs without a file for their time of use; with them, JAX could write no programs.

    Such programs are left by processes that were killed while they wrote them.
    """
    for file in folder.glob("*-cache"):
        time_of_use = file.with_name(file.name.removesuffix("-cache") + "-atime")
        with contextlib.suppress(OSError):  # another process may have removed it
            if not time_of_use.exists() and time.time() - file.stat().st_mtime > WRITTEN:
                file.unlink()


@cache
def _trim() -> Any:
    """Return the C library's function malloc_trim; None if it has none (only glibc on Linux has it)."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None


def trim_heap() -> None:
    """Return freed memory to the operating system; this takes 20 to 110 ms.

    XLA compiles in many threads, and glibc keeps the memory that a thread frees in a pool of that thread. After a few
    runs with different programs, these pools hold several hundred megabytes.
    """
    if trim := _trim():
        trim(0)
