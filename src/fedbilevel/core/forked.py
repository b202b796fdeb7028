"""Forked processes: JAX computes in threads, which a fork does not copy, so that a forked child would wait for ever."""

import os
import sys

from fedbilevel.core.errors import ConfigurationError

_started_in: list[int] = []
"""The process in which JAX had started when it was first forked."""


def _note_process() -> None:
    backends = sys.modules.get("jax._src.xla_bridge")  # nothing public says whether JAX has started
    if backends and not _started_in and backends.backends_are_initialized():
        _started_in.append(os.getpid())


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing is forked
    os.register_at_fork(before=_note_process)


def refuse_forked_child() -> None:
    """Raise ConfigurationError in a process that was forked from one in which JAX had started."""
    if _started_in and os.getpid() not in _started_in:
        raise ConfigurationError(
            f"process {os.getpid()} was forked from process {_started_in[0]} after JAX had started there, and JAX "
            'cannot compute in it: start processes by multiprocessing.get_context("spawn") or by the default backend '
            "of joblib, neither of which forks, or fork before the first computation"
        )
