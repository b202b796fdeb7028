"""One run in one folder: start, resume, write what it found.

Where several processes play it together, process 0 has the folder and the others write nothing.

Methods make different numbers of exchanges a round, some of them at random, and wait for their clients more or less
long. A run with a budget stops at the first row of its history at which the ledger has reached it; rows fall on fixed
rounds, so where that is depends on the numbers alone, not on speed or interruptions.
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
from fedbilevel.experiments.experiment import Experiment, cohort_of, experiment_with
from fedbilevel.experiments.folder import Folder, load_run, own_code
from fedbilevel.experiments.loader import label, task_maker
from fedbilevel.experiments.spec import Spec, read_spec, resolve
from fedbilevel.tasks import MEASURED_PER_CLIENT, Task


def build(spec: Spec, task: Task | None = None) -> Experiment:
    """Load the data and make task, algorithm and engine.

    Args:
        spec: see `resolve`.
        task: the spec's, where the caller has made it already.

    Raises:
        ConfigurationError, DataError: some value is not allowed, or the algorithm is not made for the task's problem.
    """
    algorithm = algorithm_of(spec)
    engine = Local(**asdict(spec.engine), clock=spec.clock)
    use_cores(spec)
    task = task_of(spec) if task is None else task
    check_solves(algorithm, task.problem)
    made = experiment_with(algorithm)(task, algorithm, engine, spec.privacy.terms)
    made.check(spec)
    _check_participants(spec, algorithm, len(task.clients))
    return made


def use_cores(spec: Spec) -> None:
    """Have every core used by the runs of a spec, before its task starts JAX."""
    if spec.engine.devices is None and not spec.run.pooled and current_group().processes == 1:
        use_every_core()


def first_metric(task: Task) -> str:
    """The metric that pictures, tables and the display of a run show: the task's first, or, where the server measures
    nothing, the weighted mean of the clients' own; of f on their batches, where they have none or tell none."""
    own = [f"{name}.mean" for name in task.metrics_per_client if isinstance(task.clients, RemoteClients)]
    return next(iter([*task.metrics, *own]), "outer_loss")


def of_clients(spec: Spec, task: Task, algorithm: Algorithm) -> Mapping[str, Any]:
    """The per-client metrics that a run asks for: where the spec says so, and on a server that measures nothing itself,
    of an algorithm and clients that bear it (see `ClientMetrics`)."""
    alone = isinstance(task.clients, RemoteClients) and not task.metrics and task.clients.capacity is None
    asks = alone and task.problem.local is None and not algorithm.asks.asynchronous
    return task.metrics_per_client if spec.run.metrics_per_client or asks else {}


def _check_participants(spec: Spec, algorithm: Algorithm, population: int) -> None:
    """Refuse a cohort, a clock or a number of awaited replies that does not fit the number of clients."""
    cohort = check_cohort(cohort_of(spec.run), population)
    spec.clock.pace(population)  # refuses tables of another number of clients
    available = population - spec.clock.never_available(population).size
    check_everyone(algorithm, population, cohort, "run.cohort")
    count = algorithm.asks.first
    few = f"at most {available}, the number of clients that are ever available"
    require(count is None or count <= available, "wait_for", count, few)


def algorithm_of(spec: Spec) -> Algorithm:
    """The algorithm alone, which needs no data."""
    algorithm = spec.algorithm.value
    if not isinstance(algorithm, Algorithm):
        raise ConfigurationError("the spec of a finished run holds tables alone: experiments.resolve(spec.tables())")
    if spec.submodels != UnitPolicy():
        algorithm = Submodels(algorithm, **asdict(spec.submodels))
    waits = spec.asynchronous.wait_for is None
    return algorithm if waits else layered(algorithm, Asynchronous(**asdict(spec.asynchronous)))


def task_of(spec: Spec, **party: str | int) -> Task:
    """The task alone, all its samples with one client if they are to be pooled; `party` is for its function."""
    name = spec.task.name
    try:
        task = task_maker(name)(**spec.task.value, **party)
    except (FedbilevelError, DataError):
        raise
    except (ValueError, TypeError, LookupError, OverflowError) as error:  # sizes or columns that make no sense
        seen = f", as party = {party['party']!r}" if party else ""
        why = f"{type(error).__name__}: " * isinstance(error, KeyError) + str(error)
        raise ConfigurationError(f"task {label(name)} cannot be made with these values{seen}: {why}") from error
    numbers, site = dict(spec.clients), party.get("party")
    capacity = numbers.pop("capacity", None)
    if isinstance(site, int):  # the server sends it its numbers, but for what it can hold
        numbers, capacity = {}, capacity[site : site + 1] if isinstance(capacity, list) else capacity
    task = task.with_own(own=numbers, capacity=capacity)
    if spec.run.x_bounds is not None:
        task = replace(task, problem=task.problem.with_x_in(_box(task.x0, spec.run.x_bounds)))
    return replace(task, clients=task.population.pooled()) if spec.run.pooled else task


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


HISTORY_SECONDS = 1.0  # at least, between two writes of the history on the way


def run(
    spec: Spec,
    folder: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    plot: bool = True,
    experiment: Experiment | None = None,
    progress: bool | Display | None = None,
) -> Result:
    """Run a spec and write everything about it to a new folder.

    Args:
        spec: see `resolve` and `read_spec`.
        folder: must not exist, be empty, or hold no more than a run left that ended before its first checkpoint, which
            is cleared with a warning; None chooses runs/<task>-<algorithm>-<data>-<time>.
        callbacks: see `fedbilevel.solve`.
        plot: draw plot.png, which needs matplotlib.
        experiment: what the spec describes, where the caller has built it already.
        progress: see `fedbilevel.solve`.

    Raises:
        ConfigurationError, DataError: nothing was written.
        NumericalError, CheckpointError: see `fedbilevel.solve`; the last good checkpoint stays.
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
    """Continue the run in a folder from its checkpoint, to its own number of rounds or to a larger number.

    A run that ended before its first checkpoint is started again, with a warning.
    `force` goes on though samples, losses or start are not what they were, with a warning that names them.

    Raises:
        CheckpointError: there is no checkpoint that fits; nothing was changed.
    """
    place = Folder(Path(folder))
    spec = resumable(place, rounds)
    experiment = experiment or build(spec)
    with lock.exclusive(place.lock, place.path):
        current_group().decide(place.sweep)
        begun = current_group().decide(lambda: place.begun)
        if not begun and current_group().is_first:
            text = f"{place.path} has no checkpoint yet: its run is started again"
            warnings.warn(CheckpointWarning(text), stacklevel=2)
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
    """Bring a run to its end: nothing where it is finished, else go on from its checkpoint, else start it.

    Raises:
        InUse: another process plays it.
        Others: see `run`.
    """
    place = Folder(Path(folder))
    if place.finished:
        return
    experiment = experiment or build(spec)
    with lock.exclusive(place.lock, place.path):
        if place.finished:  # by another process, since
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
    """What a run has measured: read from its folder where it is finished, else brought to its end there.

    A run whose numbers did not go on is not played again: its folder says why.

    Args:
        spec: see `resolve`.
        folder: of this run, or none yet.
        task: makes the spec's task; called where there is something to play.
        callbacks, progress: see `fedbilevel.solve`.

    Raises:
        NumericalError: the run failed, now or before.
        ConfigurationError, DataError: the spec is refused; nothing was written.
        InUse: another process plays it.
        CheckpointError: the folder holds a run of another spec, which the message names; or it cannot be written.
    """
    place = Folder(Path(folder))
    if changed := place.difference(spec):
        raise CheckpointError(f"{place.path} holds another run ({changed}): choose another folder")
    if place.failed.is_file():
        raise NumericalError(place.failed.read_text(encoding="utf-8"))
    if not place.finished:
        lock.require_unheld(place.lock, place.path)  # before samples are loaded
        try:
            given: dict[str, Any] = {"callbacks": callbacks, "progress": progress, "plot": False}
            complete(spec, place.path, experiment=build(spec, task(spec)), **given)
        except NumericalError as error:
            write_text(place.spec, spec.to_toml())
            write_json(place.environment, environment_of(spec))
            write_text(place.failed, str(error))
            raise
    return load_run(place.path).history


def resumable(place: Folder, rounds: int | None) -> Spec:
    """The spec with which the run in a folder, process 0's, can go on."""
    return resolve(current_group().decide(lambda: _resumable(place, rounds).tables()))


def _resumable(place: Folder, rounds: int | None) -> Spec:
    if not place.spec.is_file():
        why = "its spec.toml is no regular file" if place.spec.exists() else "it has no spec.toml"
        raise ConfigurationError(f"{place.path} is not the folder of a run: {why}")
    if not place.begun and place.remains() is None:
        raise CheckpointError(f"{place.path} has no checkpoint.npz to resume from")
    try:
        if place.begun:
            checkpoint.newest(place.checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; start the run again: fedbilevel run --spec {place.spec}") from error
    spec = read_spec(place.spec)
    place.environments()  # can be read, and so be added to
    if rounds is not None and spec.run.rounds is None:
        raise ConfigurationError(f"the run in {place.path} ends after {in_words(spec.run.budget)}, not after rounds")
    if rounds is not None and spec.run.rounds is not None and rounds < spec.run.rounds:
        raise ConfigurationError(f"rounds = {rounds} is not allowed: the run in {place.path} has {spec.run.rounds}")
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
    """Play a run in its folder, which is locked and has been looked at."""
    check_callbacks(callbacks)
    if plot:
        current_group().decide(require_matplotlib)
    began = time.perf_counter()
    task = experiment.task
    own = of_clients(spec, task, experiment.algorithm)
    have = f"of the library's {', '.join(MEASURED_PER_CLIENT)} do"
    named = f"false: task {label(spec.task.name)} has no metrics_per_client; {have}"
    require(bool(own) or not spec.run.metrics_per_client, "run.metrics_per_client", True, named)
    scribe = Scribe(spec, place, resumed=resume in (True, "force"))
    run = TrackedRun(
        "/".join(place.path.resolve().parts[-2:]), spec.tables(), place.path, place.trackers, files=place.outcome
    )
    with showing(progress) as display, Tracking(callbacks, run) as tracking:
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
    """Return rounds at most, and what ends the run before."""
    if spec.run.rounds is not None:
        return spec.run.rounds, []
    whole = spec.run.budget
    done = current_group().decide(lambda: rounds_done(place.checkpoint, whole) if resume and place.begun else None)
    return rounds_at_most(whole) if done is None else done, [stop_after(whole)]


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
    """A callback that keeps the folder's spec and, beside a checkpoint to go on from, its history up to date.

    A resumed run opens its folder at the first call: if nothing comes of the resumption, the folder stays as it was.
    """

    def __init__(self, spec: Spec, place: Folder, resumed: bool = False) -> None:
        self.spec, self.place, self.resumed = spec, place, resumed
        self.opened, self.written = False, 0.0

    def open(self) -> None:
        """Take away what marks a finished run, write what describes this run."""
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
    """Write what is known at the end; the summary last, so that it marks a finished run. Where nobody has told the
    metric, as clients under privacy, the first that was judged stands for it."""
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
    """The few numbers that people compare. Seconds in rounds are those of the whole run, also before a resumption; what
    else took time, compiling above all, is known of this time alone."""
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
    """What a run's folder says of where it is played: versions of Python and of the packages that decide numbers, the
    commit of this code, devices and CPU count, and the hashes of the user's own files."""
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
    """The commit of this code, with "-dirty" where a file differs; None where the code lies in no checkout of its own.

    An installed package may lie in a checkout of another project, in its virtual environment: that is not asked.
    """
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    here = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's name another
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, env=here)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() if said.returncode == 0 else None
