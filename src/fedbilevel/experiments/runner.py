"""One run in one folder: start, resume, write what it found.

Where several processes play it together, process 0 has the folder and the others write nothing.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError, CheckpointWarning, ConfigurationError, require
from fedbilevel.core.metrics import best
from fedbilevel.engines import checkpoint, lock
from fedbilevel.engines.checkpoint import writing
from fedbilevel.engines.curves import require_matplotlib
from fedbilevel.engines.history import Row
from fedbilevel.engines.multihost import current_group
from fedbilevel.engines.result import Callback, Result
from fedbilevel.engines.solve import Resume, solve
from fedbilevel.experiments import budget, environment, plots
from fedbilevel.experiments.folder import Folder
from fedbilevel.experiments.own_task import label
from fedbilevel.experiments.parts import Parts, build
from fedbilevel.experiments.places import write_json, write_text
from fedbilevel.experiments.spec import Spec, read_spec, resolve
from fedbilevel.tasks import MEASURED_PER_CLIENT

HISTORY_SECONDS = 1.0  # at least, between two writes of the history on the way


def run(
    spec: Spec,
    folder: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    parts: Parts | None = None,
) -> Result:
    """Run a spec and write everything about it to a new folder.

    Args:
        spec: see `resolve` and `read_spec`.
        folder: must not exist, be empty, or hold no more than a run left that ended before its first checkpoint, which
            is cleared with a warning; None chooses runs/<task>-<algorithm>-<data>-<time>.
        callbacks: see `fedbilevel.solve`.
        plot: draw plot.png, which needs matplotlib.
        parts: what the spec describes, where the caller has built it already.

    Raises:
        ConfigurationError, DataError: nothing was written.
        NumericalError, CheckpointError: see `fedbilevel.solve`; the last good checkpoint stays.
    """
    place = Folder.new(spec) if folder is None else Folder(Path(folder))
    current_group().decide(place.require_free)
    parts = parts or build(spec)
    with lock.held(place.lock, place.path):
        current_group().decide(lambda: place.claim(spec))
        return _play(spec, place, parts, callbacks, plot, resume=False)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    parts: Parts | None = None,
    force: bool = False,
) -> Result:
    """Continue the run in a folder from its checkpoint, to its own number of rounds or to a larger one.

    A run that ended before its first checkpoint is started again, with a warning.
    `force` goes on though samples, losses or start are not what they were, with a warning that names them.

    Raises:
        CheckpointError: there is no checkpoint that fits; nothing was changed.
    """
    place = Folder(Path(folder))
    spec = resumable(place, rounds)
    parts = parts or build(spec)
    with lock.held(place.lock, place.path):
        current_group().decide(place.sweep)
        begun = current_group().decide(lambda: place.begun)
        if not begun and current_group().is_first:
            text = f"{place.path} has no checkpoint yet: its run is started again"
            warnings.warn(CheckpointWarning(text), stacklevel=2)
        how: Resume = "auto" if not begun else "force" if force else True
        return _play(spec, place, parts, callbacks, plot, resume=how)


def complete(
    spec: Spec,
    folder: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    parts: Parts | None = None,
) -> None:
    """Bring a run to its end: nothing where it is finished, else go on from its checkpoint, else start it."""
    place = Folder(Path(folder))
    if place.summary.is_file():
        return
    if place.begun:
        resume(folder, callbacks=callbacks, plot=plot, parts=parts)
    else:
        run(spec, folder, callbacks=callbacks, plot=plot, parts=parts)


def resumable(place: Folder, rounds: int | None) -> Spec:
    """The spec with which the run in a folder, process 0's, can go on."""
    return resolve(current_group().decide(lambda: _resumable(place, rounds).tables()))


def _resumable(place: Folder, rounds: int | None) -> Spec:
    if not place.spec.is_file():
        raise ConfigurationError(f"{place.path} is not the folder of a run: it has no spec.toml")
    if not place.begun and place.remains() is None:
        raise CheckpointError(f"{place.path} has no checkpoint.npz to resume from")
    try:
        if place.begun:
            checkpoint.newest(place.checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start the run again: fedbilevel run --spec {place.spec}") from error
    spec = read_spec(place.spec)
    if rounds is not None and spec.run.rounds is None:
        column, amount = spec.run.budget or ("", 0)
        much = f"{amount:g} seconds of the clock" if column == "time" else f"{amount} {column}"
        raise ConfigurationError(f"the run in {place.path} ends after {much}, not after rounds")
    if rounds is not None and spec.run.rounds is not None and rounds < spec.run.rounds:
        raise ConfigurationError(f"rounds = {rounds} is not allowed: the run in {place.path} has {spec.run.rounds}")
    return spec if rounds is None else spec.replace(run={"rounds": rounds})


def _play(
    spec: Spec, place: Folder, parts: Parts, callbacks: Sequence[Callback], plot: bool, *, resume: Resume
) -> Result:
    if plot:
        current_group().decide(require_matplotlib)
    began = time.perf_counter()
    task = parts.task
    own = task.metrics_per_client if spec.run.metrics_per_client else {}
    have = f"of the library's {', '.join(MEASURED_PER_CLIENT)} do"
    named = f"false: task {label(spec.task.name)} has no metrics_per_client; {have}"
    require(bool(own) or not spec.run.metrics_per_client, "run.metrics_per_client", True, named)
    rounds, eval_every, ends = _length(spec, place, parts, resume)
    scribe = Scribe(spec, place)
    with _opened(scribe) if not resume else contextlib.nullcontext():
        result = solve(
            parts.algorithm,
            task.problem,
            task.clients,
            task.x0,
            task.y0,
            rounds=rounds,
            cohort=spec.run.cohort,
            key=spec.run.seed,
            engine=parts.engine,
            eval_every=eval_every,
            metrics=task.metrics,
            metrics_per_client=own,
            callbacks=[*ends, scribe, *callbacks],
            checkpoint=place.checkpoint,
            checkpoint_every=spec.run.checkpoint_every,
            resume=resume,
            count_flops=True,
        )
    current_group().decide(
        lambda: finish(spec, place, result, next(iter(task.metrics)), time.perf_counter() - began, plot)
    )
    return result


def _length(spec: Spec, place: Folder, parts: Parts, resume: Resume) -> tuple[int, int | None, list[Callback]]:
    """Rounds at most, rounds between rows, and what ends the run before."""
    if spec.run.rounds is not None:
        return spec.run.rounds, spec.run.eval_every, []
    assert spec.run.budget is not None
    whole = spec.run.budget
    done = current_group().decide(
        lambda: budget.rounds_done(place.checkpoint, whole) if resume and place.begun else None
    )
    rounds = budget.rounds_at_most(whole) if done is None else done
    return rounds, budget.rounds_between_rows(spec.run, parts), [budget.stop_after(whole)]


@contextmanager
def _opened(scribe: Scribe) -> Iterator[None]:
    """Open a new run's folder, so that no checkpoint is ever without its spec; if the run ends before it has a
    checkpoint, leave nothing of the folder."""
    try:
        current_group().decide(scribe.open)
        yield
    except BaseException:
        if current_group().is_first and not scribe.place.begun:
            with contextlib.suppress(OSError):
                for file in (scribe.place.spec, scribe.place.environment):
                    file.unlink(missing_ok=True)
                scribe.place.clear()
        raise


class Scribe:
    """A callback that keeps the folder's spec and history up to date.

    A resumed run opens its folder at the first call: if nothing comes of the resumption, the folder stays as it was.
    """

    def __init__(self, spec: Spec, place: Folder) -> None:
        self.spec, self.place = spec, place
        self.opened, self.written = False, 0.0

    def open(self) -> None:
        """Take away what marks a finished run, write what describes this one."""
        with writing(self.place.path):
            self.place.path.mkdir(parents=True, exist_ok=True)
            for file in (self.place.summary, self.place.result, self.place.ledger, self.place.plot):
                file.unlink(missing_ok=True)
        write_text(self.place.spec, self.spec.to_toml())
        write_json(self.place.environment, environment.describe())
        self.opened = True

    def __call__(self, result: Result, row: Row | None) -> None:
        if not self.opened:
            self.open()
        if row is not None and time.monotonic() - self.written >= HISTORY_SECONDS:
            result.history.to_jsonl(self.place.history)
            self.written = time.monotonic()


def finish(spec: Spec, place: Folder, result: Result, metric: str, seconds: float, plot: bool) -> None:
    """Write what is known at the end; the summary last, so that it marks a finished run."""
    write_text(place.spec, spec.to_toml())
    result.history.to_jsonl(place.history)
    write_json(place.ledger, asdict(result.ledger))
    result.save(place.result)
    if plot:
        plots.save(plots.run_figure(result.history, metric, spec.title, spec.timed), place.plot)
    write_json(place.summary, summary(spec, result, metric, seconds))


def summary(spec: Spec, result: Result, metric: str, seconds: float) -> dict[str, Any]:
    """The few numbers that people compare. Seconds in rounds are those of the whole run, also before a resumption; what
    else took time, compiling above all, is known of this time alone."""
    rows = [row for row in result.history.rows if metric in row]
    values = [row[metric] for row in rows]
    top = best(values, result.history.larger_is_better(metric))
    last = result.history.rows[-1]
    return {
        "task": label(spec.task.name),
        "algorithm": spec.algorithm.name,
        "data": spec.data,
        "seed": spec.run.seed,
        "rounds": result.round,
        "stopped": result.stopped or ("" if spec.run.budget is None else budget.reason(spec.run.budget)),
        "metric": metric,
        "larger_is_better": result.history.directions,
        "final": values[-1],
        "best": top,
        "best_round": rows[values.index(top)]["round"],
        "last_row": last,
        "seconds_in_rounds": last["seconds"],
        "seconds_compiling_this_time": result.compile_seconds,
        "seconds_this_time": seconds,
    }
