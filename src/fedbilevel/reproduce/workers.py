"""An entry's trials and runs, side by side in processes of this machine.

A process takes the sweep of one method in one panel; when all sweeps have ended, single runs. What they did lies in
the entry's folder, from which `play` reads it: the numbers are the same with any number of processes, if each has as
many cores.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import product
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError, require_count
from fedbilevel.experiments.series import TaskCache
from fedbilevel.experiments.sweep import PrintLine as Said
from fedbilevel.reproduce import protocol
from fedbilevel.reproduce.entry import Entry, Scale

Begin = Callable[[], None]
"""What a process does before its first unit, such as JAX's settings."""

TASKS = TaskCache()  # of this process
ENDED: Event | None = None  # set once the command has ended; None in a process that is no worker


def play_ahead(
    entry: Entry, scale: Scale, out: Path, *, seeds: Sequence[int], workers: int, begin: Begin, said: Said
) -> None:
    """Bring all trials and runs of an entry to their end, for `play` to read.

    Args:
        workers: processes. Where the system allows it, each has cores of its own.
        begin: called first in each process; it must be importable by its name.
        said: called with a line about what has ended.

    Raises:
        ConfigurationError, DataError: the entry cannot be run here, e.g. for want of data.
    """
    require_count("workers", workers)
    place = protocol.place_of(entry, scale, out)
    protocol.require_playable(entry, scale, place, seeds, TaskCache())
    context = multiprocessing.get_context("spawn")
    cores = context.SimpleQueue()
    for mine in _cores(workers):
        cores.put(mine)
    pairs, ended = protocol.pairs_of(entry, scale), context.Event()
    with _explained(workers), ProcessPoolExecutor(workers, context, _begin, (cores, ended, begin)) as pool:
        sweeps = {pair: pool.submit(_sweep, entry, *pair, scale, place, seeds) for pair in pairs}
        _tell(sweeps.values(), said, ended)
        chosen = {pair: future.result()[0] for pair, future in sweeps.items()}
        runs = [  # all methods of a seed in a row: they share its task
            pool.submit(_run, entry, *pair, scale, place, chosen[pair][k], seed)
            for panel in entry.panels_at(scale)
            for (k, seed), pair in product(enumerate(seeds), [pair for pair in pairs if pair[0] == panel])
        ]
        _tell(runs, said, ended)


def _tell(futures: Iterable[Future[tuple[Any, list[str]]]], said: Said, ended: Event) -> None:
    """Hand on the lines of each unit as it ends; after an error nothing more is begun."""
    try:
        for future in as_completed(futures):
            for line in future.result()[1]:
                said(line)
    except BaseException:
        ended.set()  # the pool itself would play what waits in its queue
        raise


@contextmanager
def _explained(workers: int) -> Iterator[None]:
    """Explain the end of a process from outside."""
    try:
        yield
    except BrokenProcessPool as error:
        text = f"one of {workers} processes was ended from outside, perhaps for want of memory: try fewer --workers"
        raise ConfigurationError(f"{text}; the same command goes on where it was") from error


def _cores(workers: int) -> list[list[int]]:
    """Cores for each process: as many for all, those that are left over for none."""
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(workers)]
    every = sorted(os.sched_getaffinity(0))
    each = len(every) // workers
    return [every[k * each : (k + 1) * each] or every for k in range(workers)]


def _begin(cores: Any, ended: Event, begin: Begin) -> None:
    """Prepare this process."""
    global ENDED
    ENDED = ended
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if mine := cores.get():
        os.sched_setaffinity(0, mine)
    begin()


def _end_with_parent() -> None:
    """Nobody waits for what this process does, once the one that began it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _require_going() -> None:
    """Raise if the command has ended."""
    if ENDED is not None and ENDED.is_set():
        raise CancelledError


def _sweep(
    entry: Entry, panel: str, method: str, scale: Scale, place: Path, seeds: Sequence[int]
) -> tuple[list[protocol.Chosen], list[str]]:
    """What the holdout chose for the run of each seed, and a line for each trial."""
    _require_going()
    lines: list[str] = []
    return protocol.choose(entry, panel, method, scale, place, seeds, TASKS, lines.append), lines


def _run(
    entry: Entry, panel: str, method: str, scale: Scale, place: Path, chosen: protocol.Chosen, seed: int
) -> tuple[None, list[str]]:
    """A run, and a line about it."""
    _require_going()
    history, error = protocol.run_of(entry, panel, method, scale, place, chosen, seed, TASKS)
    return None, [protocol.line_of(entry, panel, method, seed, history, error)]
