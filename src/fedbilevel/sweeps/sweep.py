"""`fedbilevel.sweep`: solve with other values of an algorithm's fields, and choose among them."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.config import Schedule, field_values, hyperparameters
from fedbilevel.core.errors import (
    ConfigurationError,
    FedbilevelError,
    NumericalError,
    is_number,
    require,
    require_count,
    unknown,
)
from fedbilevel.core.hashes import of_program
from fedbilevel.core.inputs import explained
from fedbilevel.core.metrics import MetricFunction, directions
from fedbilevel.core.problem import Problem, SimpleBilevel
from fedbilevel.core.tree import XYV, PyTree, join, split
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.evaluation import Measure, PerClient, as_per_client
from fedbilevel.engines.fingerprint import of_method, of_samples, of_tree
from fedbilevel.engines.multihost import current_group
from fedbilevel.engines.progress import Display, showing
from fedbilevel.engines.result import Budget, rounds_at_most, rounds_done, stop_after
from fedbilevel.engines.solve import solve
from fedbilevel.sweeps.journal import Journal, opened, play
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import (
    Job,
    LastRow,
    Plan,
    PointValues,
    TrialOutcome,
    made,
    product,
    require_apart,
    require_holdout,
    require_known,
)

ADVICE = "Measure held-out data and select on that metric, or say select_on_test=True"
LOSSES = ("outer_loss", "inner_loss")


def sweep(
    algorithm: Algorithm | Callable[..., Algorithm],
    problem: Problem,
    clients: Clients,
    x0: PyTree,
    y0: PyTree = None,
    *,
    grid: Mapping[str, Sequence[Any]],
    select: str,
    rounds: int | None = None,
    exchanges: float | None = None,
    bytes: float | None = None,
    time: float | None = None,
    seeds: Sequence[int] = (0,),
    metrics: Mapping[str, MetricFunction] | None = None,
    metrics_per_client: Mapping[str, Measure | PerClient] | None = None,
    cohort: int | None = None,
    engine: Engine | None = None,
    eval_every: int | None = None,
    halving: int | None = None,
    select_on_test: bool = False,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool | Display | None = None,
) -> Sweep:
    """Run an algorithm with every combination of some values of its fields, and find the best one.

    Args:
        algorithm: an algorithm, whose fields are replaced by their dotted paths, parts' fields too; or a function that
            makes one from the values of a point, given as keyword arguments.
        problem, clients, x0, y0, metrics, metrics_per_client, cohort, engine: see `fedbilevel.solve`.
        grid: the values of each field, e.g. {"server_lr.x": [0.01, 0.1], "local_steps": [1, 5]}; every combination is a
            point.
        select: the metric whose last value decides, as a mean over the seeds; a loss, too ("outer_loss").
        rounds, exchanges, bytes, time: how long every run is, by one of them: in rounds; or to its first row by which
            so many messages, or bytes, went down and up, or so many seconds of the engine's clock have passed.
        seeds: every point is run with each, as `key` of `solve`.
        eval_every: rounds between rows; None: the last round alone, with `halving` the first rung's rounds, and where
            the length is not in rounds each of them.
        halving: k plays all points for a part of the rounds, the best k-th of them for k times as many, and so on.
        select_on_test: allow a metric with "test" in its name to decide.
        folder: where checkpoints and outcomes are kept, so that an interrupted sweep can be resumed; None keeps none.
        resume: go on with the sweep in `folder`, which must be the same; finished runs are not run again.
        progress: show which trial is run, and how far it is; see `fedbilevel.solve`.

    Returns:
        The sweep: `rows`, `best`, `algorithm` (the best one), `trials`, `to_pandas()`, `plot()`. A run that diverged or
        was refused is a row that says why.

    Raises:
        ConfigurationError: no such field, metric or value, or the folder holds something else; nothing was run.
    """
    name, amount = _length(rounds=rounds, exchanges=exchanges, bytes=bytes, time=time)
    require_count("eval_every", eval_every, optional=True)
    require(not resume or folder is not None, "resume", resume, "used together with folder")
    require(isinstance(grid, Mapping), "grid", grid, "lists of values by the dotted paths of fields")
    require(metrics is None or isinstance(metrics, Mapping), "metrics", metrics, "functions (x, y) -> number by name")
    points = product(grid)
    require_apart({name: name for name in grid})
    seeds = [int(seed) if type(seed) is not bool and hasattr(seed, "__index__") else seed for seed in seeds]
    shown = [{name: plain(value) for name, value in point.items()} for point in points]
    plan = Plan(points=shown, seeds=seeds, select=select, halving=halving)
    require_holdout(select, select_on_test, ADVICE)
    per_client = [f"{name}.{end}" for name in metrics_per_client or () for end in ("mean", "worst", "best", "p10")]
    require_known(select, [*(metrics or ()), *per_client, *LOSSES])
    most = int(amount) if name == "rounds" else rounds_at_most((name, amount))
    first = max(1, round(most * plan.rungs[0]))
    between = eval_every or (1 if name != "rounds" else first if halving else most)
    fits = not halving or name != "rounds" or between <= first
    require(fits, "eval_every", eval_every, f"at most {first}, the rounds of the first rung")
    make = _maker(algorithm, list(grid))
    algorithms = made(points, make)
    given: dict[str, Any] = {
        "grid": {name: [plain(value) for value in values] for name, values in grid.items()},
        **{"select": select, "seeds": list(seeds), name: amount, "eval_every": between, "halving": halving},
        "cohort": cohort,
    }

    def run(jobs: Sequence[Job]) -> Iterable[tuple[Job, TrialOutcome]]:
        for number, job in enumerate(jobs, 1):
            rung = f"rung {job.rung + 1} of {len(plan.rungs)}, " if halving else ""
            display.begin(f"{rung}trial {number} of {len(jobs)}")
            yield job, one(job, algorithms[job.point])

    def one(job: Job, algorithm: Algorithm | FedbilevelError) -> TrialOutcome:
        if isinstance(algorithm, FedbilevelError):
            return TrialOutcome(error=str(algorithm))
        rung = name, amount * plan.rungs[job.rung]
        place = store and store / place_of(job) / "checkpoint.npz"
        last = LastRow(place)
        done = rounds_done(place, rung) if place and last.row else None
        try:
            result = solve(
                algorithm,
                problem,
                clients,
                x0,
                y0,
                rounds=done or most,
                cohort=cohort,
                key=job.seed,
                engine=engine,
                eval_every=between,
                metrics=metrics,
                metrics_per_client=metrics_per_client,
                callbacks=[last, stop_after(rung)],
                checkpoint=place,
                resume="auto" if place else False,
                progress=display,
            )
        except (ConfigurationError, NumericalError) as error:
            return TrialOutcome.failed(error, last.row)
        return TrialOutcome.of(result.history, select)

    if folder is not None:
        own = as_per_client(metrics_per_client)
        given["algorithms"] = [str(one) if isinstance(one, FedbilevelError) else of_method(one) for one in algorithms]
        given |= _of_problem(problem, clients, x0, y0) | _of_metrics(problem, clients, x0, y0, metrics or {}, own)
        given["engine"] = repr(engine) if is_dataclass(engine) else type(engine).__name__
        where: Any = opened(Path(folder), given, resume=resume)
    else:
        where = nullcontext(Journal())
    made_here = tempfile.TemporaryDirectory() if halving and folder is None else nullcontext()
    with showing(progress) as display, where as journal, made_here as scratch:
        store = Path(folder) if folder is not None else Path(scratch) if scratch else None
        return replace(play(plan, run, journal), made=algorithms)


def _length(**lengths: float | None) -> Budget:
    """The one length that is given."""
    given = {name: value for name, value in lengths.items() if value is not None}
    require(len(given) == 1, "length", given or None, f"given by one of {', '.join(lengths)}")
    ((name, amount),) = given.items()
    if name == "rounds":
        require_count(name, amount)
    require(is_number(amount) and amount > 0, name, amount, "positive and finite")
    return name, amount


def _of_problem(problem: Problem, clients: Clients, x0: PyTree, y0: PyTree) -> dict[str, Any]:
    """Hashes of all that a problem is, samples, weights and start, which a sweep has in common with one it resumes."""
    (x, x_fixed), (y, y_fixed) = split(x0), split(y0)
    programs = problem.with_fixed(x_fixed, y_fixed).traced(x, y, clients.examples())
    population = clients.weights, clients.local_steps, clients.capacity, clients.outer.size, clients.inner.size
    return {
        "problem": type(problem).__name__,
        **{name: of_program(program) for name, program in programs.items()},
        "start": of_tree((x, y)),
        "population": of_tree(population),
        "samples": of_samples(clients, current_group()),
    }


def _of_metrics(
    problem: Problem,
    clients: Clients,
    x0: PyTree,
    y0: PyTree,
    metrics: Mapping[str, MetricFunction],
    per_client: Mapping[str, PerClient],
) -> dict[str, Any]:
    """Of each metric whether a larger value is better, whose samples it is measured on, and a hash of its program."""
    (x, x_fixed), (y, y_fixed) = split(x0), split(x0 if isinstance(problem, SimpleBilevel) else y0)
    batches = dict(zip(("outer", "inner"), clients.examples(), strict=True))
    kinds: dict[str, Mapping[str, Any]] = {"metrics": metrics, "metrics_per_client": per_client}
    found = {}
    for kind, named in kinds.items():
        for name, metric in named.items():
            function, given, samples = metric, {"x": x, "y": y}, []
            if isinstance(metric, PerClient):
                function, given["batch"], samples = metric.function, batches[metric.samples], [metric.samples]
            with explained(f"{kind}[{name!r}]", **given):
                whole = partial(_of_whole, function, x_fixed, y_fixed)
                program = jax.make_jaxpr(whole)(*given.values())
            found[f"{kind}[{name!r}]"] = [directions(named)[name], *samples, of_program(program)]
    return found


def _of_whole(function: Callable[..., Any], x_fixed: PyTree, y_fixed: PyTree, x: PyTree, y: PyTree, *batch: Any) -> Any:
    return function(join(x, x_fixed), join(y, y_fixed), *batch)


def place_of(job: Job) -> Path:
    """Where a point's run with a seed is kept, in the folder of its sweep."""
    return Path(f"point-{job.point:03d}") / f"seed-{job.seed}"


def _maker(
    algorithm: Algorithm | Callable[..., Algorithm], fields: Sequence[str]
) -> Callable[[PointValues], Algorithm]:
    if isinstance(algorithm, Algorithm):
        return partial(with_values, algorithm)
    build: Callable[..., Algorithm] = algorithm
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        return partial(with_values, build())
    require(callable(build), "algorithm", build, "an algorithm, or a function that makes one from a point")
    parameters = inspect.signature(build).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in fields:
            if name not in parameters:
                raise unknown("argument of the function that makes the algorithm", name, parameters)

    def make(point: PointValues) -> Algorithm:
        found = build(**point)
        require(isinstance(found, Algorithm), "algorithm", found, "an algorithm, as its function has made it")
        return found

    return make


def with_values(algorithm: Algorithm, values: Mapping[str, Any]) -> Algorithm:
    """The algorithm with some fields replaced: {"server_lr.x": 0.1, "hypergradient.solver.max_steps": 5}.

    Fields are replaced in the order in which they are given: a part comes before fields of it.

    Raises:
        ConfigurationError: there is no such field, or the algorithm refuses the value.
    """
    for path, value in values.items():
        algorithm = _with_value(algorithm, path, path.split("."), value)
    return algorithm


def _with_value(holder: Any, path: str, names: list[str], value: Any) -> Any:
    fields, kind = _fields(holder), type(holder).__name__
    if not fields:
        within = path.removesuffix(".".join(names)).rstrip(".")
        raise ConfigurationError(f"{path} is no field: {within} is {holder!r}, which has none")
    name, *rest = names
    if name not in fields:
        raise unknown(f"field of {kind}", name, fields)
    new = _with_value(fields[name], path, rest, value) if rest else value
    return holder._replace(**{name: new}) if isinstance(holder, XYV) else dataclasses.replace(holder, **{name: new})


def _fields(holder: Any) -> dict[str, Any]:
    """The members of an algorithm, a part or a triple of step sizes, by name; nothing of anything else."""
    if isinstance(holder, XYV):
        return holder._asdict()
    whole = dataclasses.is_dataclass(holder) and not isinstance(holder, type | Schedule)
    return field_values(holder) if whole else {}


def plain(value: Any) -> Any:
    """A value of a field as JSON can hold it: numbers, text and lists as they are, a part by its name and numbers.

    What has no such form, such as a schedule, is its text in Python.
    """
    if value is None or isinstance(value, str | bool | np.bool_):
        return bool(value) if isinstance(value, np.bool_) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, XYV):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        numbers = ", ".join(f"{name}={one}" for name, one in hyperparameters(value).items())
        return f"{type(value).__name__}({numbers})"
    return repr(value)
