"""Playing runs with their progress shown, and saying how to go on with those that do not reach their end."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fedbilevel.cli.shared import INTERRUPTED, console, fail, say, say_paths
from fedbilevel.core.errors import CheckpointError, NumericalError
from fedbilevel.engines.multihost import current_group
from fedbilevel.engines.progress import showing
from fedbilevel.experiments import Folder, Spec, build, complete, load_run, plots, tables
from fedbilevel.experiments.tables import Watch
from fedbilevel.tasks import Task

Summary = dict[str, Any]


def played(
    spec: Spec,
    folder: Path,
    quiet: bool,
    play: Callable[..., object] | None = None,
    *,
    task: Task | None = None,
    series: Path | None = None,
) -> Summary:
    """Play a run with its progress shown, then its outcome; say how to go on if it does not reach its end.

    Where several processes play it together, process 0 does that; the others' summary is empty.

    Args:
        play: how, as `experiments.run` or `resume`; None: as `complete`, and a run that is finished is only read.
        series: the folder of the runs that a command makes, of which one picture shows all.
    """
    if play is None and Folder(folder).finished:
        return load_run(folder).summary
    experiment = build(spec, task)  # shows downloads by itself
    play = play or partial(complete, spec, folder)
    quiet = quiet or not current_group().is_first
    terminal = console(quiet)
    brief = series is not None and not terminal.is_terminal
    current_group().advice = _CONTINUE.format(folder)
    drawn = series is None and current_group().decide(plots.possible)
    watch = Watch(console(quiet or brief), next(iter(experiment.task.metrics)), spec)
    try:
        with showing(watch) as display:
            play(experiment=experiment, callbacks=[watch], progress=display, plot=drawn)
    except KeyboardInterrupt:
        raise SystemExit(fail(INTERRUPTED, _how_to_resume(folder, series))) from None
    except NumericalError as error:
        raise type(error)(f"{error}; {_what_stays(folder)}") from error
    except CheckpointError as error:
        full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or not Folder(folder).begun:
            raise
        advice = f"free some space, then {_CONTINUE.format(folder)}"
        raise CheckpointError(f"{error}; {advice}") from error
    if not current_group().is_first:
        return {}
    summary = load_run(folder).summary
    if series is None:
        terminal.print(tables.summary_table(summary))
        say_paths(terminal, {"run": folder, "plot": [Folder(folder).plot] * drawn})
    else:
        say(terminal, tables.summary_line(folder.relative_to(series), summary))
    if quiet:
        print(folder)
    return summary


_ELSEWHERE = "what there is to resume from is with process 0"
_CONTINUE = "continue with: fedbilevel run --resume {}"


def _how_to_resume(folder: Path, series: Path | None) -> str:
    if not current_group().is_first:
        return f"interrupted; {_ELSEWHERE}"
    if series is not None:
        return f"interrupted; continue with the same command and --out {series}"
    if Folder(folder).begun:
        return f"interrupted; {_CONTINUE.format(folder)}"
    return "interrupted before the first checkpoint; there is nothing to resume"


def _what_stays(folder: Path) -> str:
    if not current_group().is_first:
        return _ELSEWHERE
    if Folder(folder).begun:
        return f"the last good checkpoint stays in {folder}"
    return "no checkpoint had been written"
