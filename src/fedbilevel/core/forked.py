"""Refuse to compute in a forked process: a fork does not copy the threads of JAX, so that JAX would wait for ever."""

import os
import sys

from fedbilevel.core.errors import ConfigurationError

_started_in: list[int] = []
"""The id of the first process that was forked after JAX had started in it; empty if there is none."""


def _note_process() -> None:
    backends = sys.modules.get("jax._src.xla_bridge")  # JAX has no public function for this
    if backends and not _started_in and backends.backends_are_initialized():
        _started_in.append(os.getpid())


if hasattr(os, "register_at_fork"):  # False on Windows, which has no forks
    os.register_at_fork(before=_note_process)


def refuse_forked_child() -> None:
    """Raise ConfigurationError in a process that was forked from one in which JAX had started."""
    if _started_in and os.getpid() not in _started_in:
        raise ConfigurationError(
            f"JAX cannot compute in process {os.getpid()}, which was forked from process {_started_in[0]} "
            "after JAX had started there: start processes without a fork "
            '(by multiprocessing.get_context("spawn"), or by the default backend of joblib), '
            "or fork before the first computation"
        )
