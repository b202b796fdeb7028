"""Start or resume one run in one folder, and write its results there.

If several processes run it together, only process 0 reads and writes the folder.

A run with a budget stops at the first row of its history at which its costs have reached the budget. Rows are made at
fixed rounds, so the end depends neither on the machine's speed nor on interruptions. With the same budget, different
methods make different numbers of rounds, since the costs of a round depend on the method.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import jax

from fedbilevel import __version__
from fedbilevel.algorithms.parts.layers import layered
from fedbilevel.algorithms.parts.memory import Asynchronous
from fedbilevel.algorithms.parts.wrappers import Submodels
from fedbilevel.core.algorithm import Algorithm, check_solves
from fedbilevel.core.client import RemoteClients
from fedbilevel.core.errors import (
    CheckpointError,
    CheckpointWarning,
    ConfigurationError,
    FedbilevelError,
    NumericalError,
    require,
    unknown,
)
from fedbilevel.core.metrics import best
from fedbilevel.core.problem import Project
from fedbilevel.core.projections import box
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import PyTree
from fedbilevel.core.writing import write_bytes, write_json, write_text, writing
from fedbilevel.data import DataError
from fedbilevel.display import Display
from fedbilevel.display.curves import encoded, require_matplotlib, run_figure
from fedbilevel.engines import checkpoint, lock
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.engine import check_cohort, check_everyone
from fedbilevel.engines.history import (
    Callback,
    History,
    Result,
    Row,
    check_callbacks,
    in_words,
    reason,
    rounds_at_most,
    rounds_done,
    stop_after,
)
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.machine import use_every_core
from fedbilevel.engines.options import Resume
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.progress import WRITING, report_stage, showing
from fedbilevel.engines.tracking import TrackedRun, Tracking
from fedbilevel.experiments.argument_errors import clients_by_spec, paths_in
from fedbilevel.experiments.experiment import Experiment, cohort_of, experiment_with
from fedbilevel.experiments.folder import Folder, as_damage, how_to_continue, load_run, own_code
from fedbilevel.experiments.loader import label, task_maker
from fedbilevel.experiments.spec import Spec, read_spec, resolve
from fedbilevel.reading import read_json
from fedbilevel.tasks import MEASURED_PER_CLIENT, Task


def build(spec: Spec, task: Task | None = None) -> Experiment:
    """Load the data, and make the task, the algorithm and the engine of a spec.

    Args:
        spec: see `resolve`.
        task: the spec's task, if the caller has made it already; None: it is made here.

    Raises:
        ConfigurationError, DataError: a value is not allowed, or the algorithm does not solve the task's problem.
    """
    algorithm = algorithm_of(spec)
    engine = Local(**asdict(spec.engine), clock=spec.clock)
    use_cores(spec)
    task = task_of(spec) if task is None else task
    check_solves(algorithm, task.problem)
    made = experiment_with(spec.algorithm.value)(task, algorithm, engine, spec.privacy.terms)
    made.check(spec)
    _check_participants(spec, algorithm, len(task.clients))
    return made


def use_cores(spec: Spec) -> None:
    """Let the runs of a spec use every core. Call this before the task starts JAX."""
    if spec.engine.devices is None and not spec.run.pooled and current_group().processes == 1:
        use_every_core()


def first_metric(task: Task) -> str:
    """Return the name of the metric that pictures, tables and the display of a run show.

    This is the task's first metric. On a server that measures nothing itself, it is the weighted mean of the first
    metric per client or, if there is none, the outer loss on the clients' batches.
    """
    own = [f"{name}.mean" for name in task.metrics_per_client if isinstance(task.clients, RemoteClients)]
    return next(iter([*task.metrics, *own]), "outer_loss")


def of_clients(spec: Spec, task: Task, algorithm: Algorithm) -> Mapping[str, Any]:
    """Return the metrics that a run measures per client.

    They are measured if the spec says so. A server that measures nothing itself always asks for them, unless the
    algorithm or the clients do not support this (see `ClientMetrics`).
    """
    alone = isinstance(task.clients, RemoteClients) and not task.metrics and task.clients.capacity is None
    asks = alone and task.problem.local is None and not algorithm.asks.asynchronous
    return task.metrics_per_client if spec.run.metrics_per_client or asks else {}


def _check_participants(spec: Spec, algorithm: Algorithm, population: int) -> None:
    """Check that the cohort, the clock and the number of awaited replies fit the number of clients."""
    cohort = check_cohort(cohort_of(spec.run), population)
    spec.clock.pace(population)  # raises an error if its tables are for another number of clients
    available = population - spec.clock.never_available(population).size
    check_everyone(algorithm, population, cohort, "run.cohort")
    count = algorithm.asks.first
    few = f"at most {available}, the number of clients that are ever available"
    require(count is None or count <= available, "wait_for", count, few)


def algorithm_of(spec: Spec) -> Algorithm:
    """Return the algorithm of a spec. No data are loaded."""
    algorithm = spec.algorithm.value
    if not isinstance(algorithm, Algorithm):
        remedy = "experiments.resolve(spec.tables())"
        message = f"the spec of a finished run has only tables; {remedy} makes a complete one"
        raise ConfigurationError(path="spec", got="of a finished run", allowed=remedy, message=message)
    if spec.submodels != UnitPolicy():
        algorithm = Submodels(algorithm, **asdict(spec.submodels))
    late = None if spec.asynchronous.wait_for is None else Asynchronous(**asdict(spec.asynchronous))
    return layered(algorithm, late, spec.layers.compression, spec.layers.rule)


def task_of(spec: Spec, **party: str | int) -> Task:
    """Make the task of a spec.

    If the run is pooled, one client has all samples. `party` is passed on to the task's function.
    """
    name = spec.task.name
    try:
        with paths_in("task", spec.task.value):
            task = task_maker(name)(**spec.task.value, **party)
    except (FedbilevelError, DataError):
        raise
    except (ValueError, TypeError, LookupError, OverflowError) as error:  # for example sizes or columns are wrong
        seen = f" for party = {party['party']!r}" if party else ""
        why = f"{type(error).__name__}: " * isinstance(error, KeyError) + str(error)
        message = f"task {label(name)} cannot be made with these values{seen}: {why}"
        allowed = f"a task with values from which it can be made{seen}: {why}"
        raise ConfigurationError(path="task", got=name, allowed=allowed, message=message) from error
    numbers, site = dict(spec.clients), party.get("party")
    capacity = numbers.pop("capacity", None)
    if isinstance(site, int):  # the server sends a site's own numbers, except its capacity
        numbers, capacity = {}, capacity[site : site + 1] if isinstance(capacity, list) else capacity
    with clients_by_spec():
        task = task.with_own(own=numbers, capacity=capacity)
    if spec.run.x_bounds is not None:
        task = replace(task, problem=task.problem.with_x_in(_box(task.x0, spec.run.x_bounds)))
    return task.pooled() if spec.run.pooled else task


def _box(x0: PyTree, bounds: Sequence[float] | Mapping[str, Any]) -> Project:
    """Make the projection onto the box of `run.x_bounds`."""
    if not isinstance(bounds, Mapping):
        return box(*bounds)
    named = x0 if isinstance(x0, Mapping) else {}
    for name in bounds:
        if name not in named:
            raise unknown("part of x in run.x_bounds", name, named)

    pairs = dict.fromkeys(named, (-math.inf, math.inf)) | dict(bounds)

    def side(end: int) -> PyTree:
        return {name: jax.tree.map(lambda _, bound=pairs[name][end]: bound, part) for name, part in named.items()}

    return box(side(0), side(1))


HISTORY_SECONDS = 1.0  # the least time between two writes of the history, in seconds


def run(
    spec: Spec,
    folder: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    experiment: Experiment | None = None,
    progress: bool | Display | None = None,
) -> Result:
    """Run a spec, and write its spec, history, result, costs and picture to a new folder.

    Args:
        spec: see `resolve` and `read_spec`.
        folder: a new or empty folder. Files of a run that ended before its first checkpoint are cleared with a warning.
            None chooses runs/<task>-<algorithm>-<data>-<time>.
        callbacks: see `fedbilevel.solve`.
        plot: whether to draw plot.png, which needs matplotlib.
        experiment: the objects of the spec, if the caller has built them already; None: they are built here.
        progress: see `fedbilevel.solve`.

    Raises:
        ConfigurationError, DataError: the spec or the data are wrong; nothing was written.
        NumericalError, CheckpointError: see `fedbilevel.solve`; the last good checkpoint remains in the folder.
    """
    place = Folder.new(spec) if folder is None else Folder(Path(folder))
    current_group().decide(place.require_free)
    experiment = experiment or build(spec)
    with lock.exclusive(place.lock, place.path):
        current_group().decide(lambda: place.claim(spec))
        return _play(spec, place, experiment, callbacks, plot, progress, resume=False)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    experiment: Experiment | None = None,
    force: bool = False,
    progress: bool | Display | None = None,
) -> Result:
    """Continue the run in a folder from its checkpoint.

    A run that ended before its first checkpoint is started again, with a warning.

    Args:
        folder: the folder of the run.
        rounds: the new total number of rounds, at least the number in the spec; None: the number in the spec.
        callbacks, plot, experiment, progress: see `run`.
        force: whether to continue even if samples, losses or the start have changed. A warning then names what has
            changed.

    Raises:
        ConfigurationError: `folder` is not the folder of a run, or `rounds` does not fit the run.
        CheckpointError: there is no checkpoint with which the run can continue; nothing was changed.
    """
    place = Folder(Path(folder))
    spec = resumable(place, rounds)
    experiment = experiment or build(spec)
    with lock.exclusive(place.lock, place.path):
        current_group().decide(place.sweep)
        begun = current_group().decide(lambda: place.begun)
        if not begun and current_group().is_first:
            text = f"{place.path} has no checkpoint yet: its run is started again"
            warnings.warn(CheckpointWarning(text, path=place.path), stacklevel=2)
        how: Resume = "auto" if not begun else "force" if force else True
        return _play(spec, place, experiment, callbacks, plot, progress, resume=how)


def complete(
    spec: Spec,
    folder: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    experiment: Experiment | None = None,
    progress: bool | Display | None = None,
) -> None:
    """Bring a run to its end.

    A finished run is left as it is, a run with a checkpoint is continued, and any other run is started.

    Raises:
        InUse: another process is running it.
        Other errors: see `run`.
    """
    place = Folder(Path(folder))
    if place.finished:
        return
    experiment = experiment or build(spec)
    with lock.exclusive(place.lock, place.path):
        if place.finished:  # another process has finished it in the meantime
            return
        place.sweep()
        if not place.begun:
            place.claim(spec)
        _play(spec, place, experiment, callbacks, plot, progress, resume=place.begun)


def run_of(
    spec: Spec,
    folder: str | Path,
    task: Callable[[Spec], Task],
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool | Display | None = False,
) -> History:
    """Return the history of a run. If the run has not finished, it is first brought to its end in its folder.

    A run that has failed is not run again; its folder contains the reason.

    Args:
        spec: see `resolve`.
        folder: the folder of this run, or a new one.
        task: a function that makes the spec's task. It is called only if the run has not finished.
        callbacks, progress: see `fedbilevel.solve`.

    Raises:
        NumericalError: the run failed, now or at an earlier call.
        ConfigurationError, DataError: the spec is rejected; nothing was written.
        InUse: another process is running it.
        CheckpointError: the folder contains a run of another spec (the message names the difference), or files with
            which no run can begin or continue, or it cannot be written.
    """
    place = Folder(Path(folder))
    if changed := place.difference(spec):
        text = f"{place.path} holds another run ({changed}): choose another folder"
        raise CheckpointError(text, path=place.path, differences=place.differences(spec))
    if place.failed.is_file():
        raise failure_in(place)
    if not place.finished:
        lock.require_unheld(place.lock, place.path)  # checked before samples are loaded
        if place.remains() is None and not place.begun and not place.finished:
            text = f"no run can begin in {place.path}, which has files, but neither a checkpoint nor a summary"
            raise CheckpointError(text, path=place.path, remedy="remove the folder, or choose another one")
        try:
            given: dict[str, Any] = {"callbacks": callbacks, "progress": progress, "plot": False}
            complete(spec, place.path, experiment=build(spec, task(spec)), **given)
        except NumericalError as error:
            write_text(place.spec, spec.to_toml())
            write_json(place.environment, environment_of(spec))
            if error.ledger is not None:
                write_json(place.ledger, asdict(error.ledger))
            write_text(place.failed, str(error))
            raise
    return load_run(place.path).history


def failure_in(place: Folder) -> NumericalError:
    """Return the error with which the run in a folder ended, with the costs of the run."""
    error = NumericalError(place.failed.read_text(encoding="utf-8"))
    if place.ledger.is_file():
        with as_damage(place.ledger):
            error.ledger = Ledger.of(read_json(place.ledger))
    return error


def resumable(place: Folder, rounds: int | None) -> Spec:
    """Return the spec with which the run in a folder can continue. Process 0 reads it for all processes."""
    return resolve(current_group().decide(lambda: _resumable(place, rounds).tables()))


def _resumable(place: Folder, rounds: int | None) -> Spec:
    if not place.spec.is_file():
        if not place.path.exists():
            raise ConfigurationError(f"there is no folder {place.path} to resume a run from")
        why = "its spec.toml is not a regular file" if place.spec.exists() else "it has no spec.toml"
        raise ConfigurationError(f"{place.path} is not the folder of a run: {why}")
    if place.name_in_federation.is_file():
        raise ConfigurationError(f"{place.path} cannot be resumed in a simulation: {how_to_continue(place)}")
    if not place.begun and place.remains() is None:
        raise CheckpointError(f"{place.path} has no checkpoint.npz to resume from", path=place.path)
    try:
        if place.begun:
            checkpoint.newest(place.checkpoint)
    except CheckpointError as error:
        error.append(f"start the run again: fedbilevel run --spec {place.spec}")
        raise
    spec = read_spec(place.spec)
    place.environments()  # raises an error now, not at the end, if the file cannot be read and extended
    if rounds is not None and spec.run.rounds is None:
        allowed = f"left out: the run in {place.path} ends after {in_words(spec.run.budget)}"
        raise ConfigurationError(path="rounds", got=rounds, allowed=allowed)
    if rounds is not None and spec.run.rounds is not None and rounds < spec.run.rounds:
        allowed = f"at least {spec.run.rounds}, as in the run in {place.path}"
        raise ConfigurationError(path="rounds", got=rounds, allowed=allowed)
    return spec if rounds is None else spec.replace(run={"rounds": rounds})


def _play(
    spec: Spec,
    place: Folder,
    experiment: Experiment,
    callbacks: Sequence[Callback],
    plot: bool,
    progress: bool | Display | None,
    *,
    resume: Resume,
) -> Result:
    """Run a spec in its folder. The caller has checked and locked the folder."""
    check_callbacks(callbacks)
    if plot:
        current_group().decide(require_matplotlib)
    began = time.perf_counter()
    task = experiment.task
    own = of_clients(spec, task, experiment.algorithm)
    have = f"of the library's tasks, {', '.join(MEASURED_PER_CLIENT)} have some"
    named = f"false: task {label(spec.task.name)} has no metrics_per_client; {have}"
    require(bool(own) or not spec.run.metrics_per_client, "run.metrics_per_client", True, named)
    scribe = Scribe(spec, place, resumed=resume in (True, "force"))
    run = TrackedRun(
        "/".join(place.path.resolve().parts[-2:]),
        spec.tables(),
        place.path,
        place.trackers,
        files=place.outcome,
        with_seed=(place.spec, place.summary),
        is_private=spec.privacy.terms is not None,
    )
    with showing(progress) as display, Tracking(callbacks, run) as tracking, clients_by_spec():
        rounds, ends = _length(spec, place, resume)
        with _opened(scribe) if not resume else contextlib.nullcontext():
            result = experiment.solve(
                spec.run,
                rounds=rounds,
                eval_every=spec.run.eval_every,
                metrics=task.metrics,
                metrics_per_client=own,
                callbacks=[*ends, scribe, *callbacks],
                checkpoint=place.checkpoint,
                checkpoint_every=spec.run.checkpoint_every,
                resume=resume,
                count_flops=True,
                progress=display,
            )
        report_stage(WRITING)
        seconds = time.perf_counter() - began
        current_group().decide(lambda: finish(spec, place, result, first_metric(task), seconds, plot))
        return tracking.ended(result)


def _length(spec: Spec, place: Folder, resume: Resume) -> tuple[int, list[Callback]]:
    """Return the largest number of rounds, and the callbacks that end the run earlier."""
    if spec.run.rounds is not None:
        return spec.run.rounds, []
    whole = spec.run.budget
    done = current_group().decide(lambda: rounds_done(place.checkpoint, whole) if resume and place.begun else None)
    return rounds_at_most(whole) if done is None else done, [stop_after(whole)]


@contextmanager
def _opened(scribe: Scribe) -> Iterator[None]:
    """Write a new run's spec and environment to files, and remove both if the run ends before its first checkpoint."""
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
    """A callback that writes the spec of a run and, once there is a checkpoint, the history to the run's folder.

    A resumed run writes to its folder from the first call on, so that the folder is unchanged if the run cannot be
    resumed.
    """

    def __init__(self, spec: Spec, place: Folder, resumed: bool = False) -> None:
        self.spec, self.place, self.resumed = spec, place, resumed
        self.opened, self.written = False, 0.0

    def open(self) -> None:
        """Remove the files that mark a finished run, and write the spec and the environment of the present run."""
        with writing(self.place.path):
            self.place.path.mkdir(parents=True, exist_ok=True)
            for file in (self.place.summary, self.place.result, self.place.ledger, self.place.plot):
                file.unlink(missing_ok=True)
        write_text(self.place.spec, self.spec.to_toml())
        begun, *resumed = [*(self.place.environments() if self.resumed else []), environment_of(self.spec)]
        write_json(self.place.environment, begun | ({"resumed": resumed} if resumed else {}))
        self.opened = True

    def __call__(self, result: Result, row: Row | None) -> None:
        if not self.opened:
            self.open()
        if row is not None and time.monotonic() - self.written >= HISTORY_SECONDS and self.place.begun:
            result.history.to_jsonl(self.place.history)
            self.written = time.monotonic()


def finish(spec: Spec, place: Folder, result: Result, metric: str, seconds: float, plot: bool) -> None:
    """Write the results of a run. The summary is written last: it marks a run as finished.

    If no row has the metric, for example because clients under privacy do not report it, another metric takes its
    place: the first one for which it is known whether larger values are better.
    """
    if not any(metric in row for row in result.history.rows):
        metric = next(iter(result.history.judged), "exchanges")
    write_text(place.spec, spec.to_toml())
    result.history.to_jsonl(place.history)
    write_json(place.ledger, asdict(result.ledger))
    result.save(place.result)
    if plot:
        figure = run_figure(result.history, metric, spec.title, spec.timed)
        write_bytes(place.plot, encoded(figure, place.plot))
    write_json(place.summary, summary(spec, result, metric, seconds))


def summary(spec: Spec, result: Result, metric: str, seconds: float) -> dict[str, Any]:
    """Return the summary of a run, whose numbers comparisons use.

    The seconds in rounds are of the whole run, including the time before a resumption. Other times, such as the time of
    compiling, are counted from the start of this process.
    """
    rows = [row for row in result.history.rows if metric in row]
    values = [row[metric] for row in rows]
    top = best(values, result.history.larger_is_better(metric))
    last = result.history.rows[-1]
    return {
        "task": label(spec.task.name),
        "algorithm": label(spec.algorithm.name),
        "data": spec.data,
        "seed": spec.run.seed,
        "rounds": result.round,
        "stopped": result.stopped or ("" if spec.run.rounds is not None else reason(spec.run.budget)),
        "metric": metric,
        "larger_is_better": result.history.directions,
        "final": values[-1],
        "best": top,
        "best_round": rows[values.index(top)]["round"],
        "last_row": last,
        "delta": result.ledger.delta,
        "seconds_in_rounds": last["seconds"],
        "seconds_compiling_this_time": result.compile_seconds,
        "seconds_this_time": seconds,
    }


PACKAGES = ("jax", "jaxlib", "optax", "numpy", "scikit-learn")


def environment_of(spec: Spec) -> dict[str, Any]:
    """Return a description of a run's environment, which is written to the run's folder.

    The description has the versions of Python and of packages that affect the numbers, the commit of this code, the
    devices, the number of CPUs, and the hashes of the user's own files.
    """
    devices = jax.devices()
    return {
        "fedbilevel": __version__,
        "commit": _commit(Path(__file__).parents[3]),
        "python": platform.python_version(),
        **{name: next((one.version for one in distributions(name=name)), None) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "x64": bool(jax.config.read("jax_enable_x64")),
        "code": own_code(spec),
    }


@cache
def _commit(checkout: Path) -> str | None:
    """Return the commit of this code, with "-dirty" if a file differs; None if the code is not in its own checkout.

    If the package is installed in the virtual environment of another project, the commit of that project is not used.
    """
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    here = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    }  # within a Git hook, these variables name another repository
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, env=here)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None
