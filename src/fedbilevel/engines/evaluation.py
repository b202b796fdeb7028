"""Measure the metrics of a run: compiled functions of (x, y), and metrics of each client on its own samples.

Metrics per client are summarised over the population. No value of a single client reaches an algorithm: during an
evaluation, only this module keeps one number per client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NonFiniteError, require
from fedbilevel.core.inputs import explained, require_function
from fedbilevel.core.metrics import Metric, MetricFunction, larger_is_better, require_direction
from fedbilevel.core.on_disk import let_go
from fedbilevel.core.own_y import IsOwn, parted_y
from fedbilevel.core.problem import LocalVariable, Padded, WholeLoss
from fedbilevel.core.ragged import Ragged, check_finite
from fedbilevel.core.tree import PyTree, join
from fedbilevel.engines.history import Row
from fedbilevel.engines.process_group import ProcessGroup, current_group
from fedbilevel.machinery.kept import compiled

BLOCK = 256  # the number of samples that are evaluated together, by vmap
DECILES = tuple(range(10, 100, 10))

ARGUMENTS = "x, y, batch"
ONE_NUMBER = "one real number"

SampleKind = Literal["outer", "inner"]
Measure = Callable[[PyTree, PyTree, PyTree], Any]
"""(x, y, batch) -> scalar: a mean over the samples of the batch, whose leaves have the shape (samples, ...)."""


def check_metrics(metrics: Mapping[str, MetricFunction] | None) -> None:
    """Check the argument `metrics` of `solve`.

    Raises:
        ConfigurationError: the argument is not a mapping of functions (x, y) by name.
    """
    fits = metrics is None or isinstance(metrics, Mapping)
    require(fits, "metrics", metrics, "functions (x, y) -> number by name")
    for name, metric in (metrics or {}).items():
        function = metric.function if isinstance(metric, Metric) else metric
        require_function(f"metrics[{name!r}]", function, "x, y", " -> one number")


def not_finite(round: int, name: str, value: float, client: int | None = None) -> NonFiniteError:
    """Return the error for a metric that is NaN or infinite."""
    whose = "" if client is None else f" of client {client}"
    text = f"round {round}, evaluation: {name}{whose} is {value}"
    return NonFiniteError(text, round=round, during="evaluation", client=client, names=[name])


class Evaluation:
    """Evaluate metrics of (x, y). Arrays in a metric's closure become arguments of its program, and not constants."""

    def __init__(self, metrics: Mapping[str, MetricFunction], x_fixed: PyTree, y_fixed: PyTree) -> None:
        self.metrics, self.fixed = metrics, (x_fixed, y_fixed)
        self.traced: dict[str, ClosedJaxpr] = {}
        self.compiled: dict[str, Callable[[PyTree, PyTree], Any]] = {}

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Return the metrics at (x, y) as columns of a row.

        Raises:
            NonFiniteError: a metric is NaN or infinite.
        """
        row: Row = {}
        for name in self.metrics:
            if name not in self.compiled:
                self.compiled[name] = _kept(self.trace(name, x, y), x, y)
            row[name] = float(self.compiled[name](x, y))
            if not math.isfinite(row[name]):
                raise not_finite(round, name, row[name])
        return row

    def trace(self, name: str, x: PyTree, y: PyTree) -> ClosedJaxpr:
        """Trace a metric, once for arguments of these shapes, and check that its value is one number."""
        if name not in self.traced:
            metric, (x_fixed, y_fixed) = self.metrics[name], self.fixed
            with explained(f"metrics[{name!r}]", x=x, y=y):
                closed = jax.make_jaxpr(lambda x, y: metric(join(x, x_fixed), join(y, y_fixed)))(x, y)
            _require_one_number(f"metrics[{name!r}]", closed)
            self.traced[name] = closed
        return self.traced[name]


def _require_one_number(name: str, traced: ClosedJaxpr) -> None:
    given = traced.out_avals
    fits = len(given) == 1 and is_one_number(given[0])
    require(fits, f"the value of {name}", [str(value) for value in given], ONE_NUMBER)


def _kept(closed: ClosedJaxpr, *like: PyTree) -> Callable[..., Any]:
    """Compile a traced function for arguments of these shapes, or reuse the same program of an earlier run."""

    def run(constants: list[Any], *given: PyTree) -> Any:
        return jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves(given))[0]

    constants = jax.device_put(closed.consts)
    return partial(compiled(run, constants, *like), constants)


PerClientRow = Callable[[int, PyTree, PyTree], Row]
"""(round, x, y) -> the columns of all metrics per client."""


@dataclass(frozen=True)
class PerClient:
    """Describe a metric that is measured on each client separately, on all its outer or all its inner samples.

    Args:
        function: (x, y, batch) -> number, a mean over the samples of the batch, like a loss; or a `WholeLoss`, which
            gets all samples of the client at once.
        samples: "outer" or "inner": the loss whose samples are used.
        larger_is_better: whether the client with the largest value is the best client; False: the client with the
            smallest value is the best. None: True for accuracies, False for other metrics.
    """

    function: Measure
    samples: SampleKind = "outer"
    larger_is_better: bool | None = None

    def __post_init__(self) -> None:
        require_function("PerClient.function", self.function, ARGUMENTS, " -> one number")
        require(self.samples in get_args(SampleKind), "PerClient.samples", self.samples, "'outer' or 'inner'")
        require_direction("PerClient.larger_is_better", self.larger_is_better, optional=True)


def as_per_client(metrics: Mapping[str, Measure | PerClient] | None) -> dict[str, PerClient]:
    """Check the argument `metrics_per_client` of `solve`, and return every metric as a `PerClient`.

    A plain function, or a `Metric`, is measured on the outer samples.

    Raises:
        ConfigurationError: a value is not a metric; or a `Metric` declares that neither direction is better, so that
            there would be no worst and no best client.
    """
    fits = metrics is None or isinstance(metrics, Mapping)
    require(fits, "metrics_per_client", metrics, "functions (x, y, batch) -> number by name")
    made = {}
    for name, metric in (metrics or {}).items():
        if not isinstance(metric, PerClient):
            function, larger = (
                (metric.function, metric.larger_is_better) if isinstance(metric, Metric) else (metric, None)
            )
            require_function(f"metrics_per_client[{name!r}]", function, ARGUMENTS, " -> one number, or a PerClient")
            fits = larger is not None or not isinstance(metric, Metric)
            allowed = "True or False: the history has the worst and the best client"
            require(fits, f"metrics_per_client[{name!r}].larger_is_better", larger, allowed)
            metric = PerClient(function, larger_is_better=larger)
        made[name] = metric
    return made


def check_per_client(
    metrics: Mapping[str, PerClient], x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]
) -> dict[str, ClosedJaxpr]:
    """Trace each metric on a sample, without computing it, and check that its value is one number."""
    found = {}
    for name, metric in metrics.items():
        batch = examples[get_args(SampleKind).index(metric.samples)]
        with explained(f"metrics_per_client[{name!r}]", x=x, y=y, batch=batch):
            found[name] = jax.make_jaxpr(metric.function)(x, y, batch)
        _require_one_number(f"metrics_per_client[{name!r}]", found[name])
    return found


def is_one_number(value: Any) -> bool:
    """Return whether a traced value is a single real number; a boolean is allowed, as 1 or 0."""
    kind = getattr(value, "dtype", None)
    real = kind is not None and any(jnp.issubdtype(kind, of) for of in (jnp.floating, jnp.integer, jnp.bool_))
    return real and value.shape == ()


def spread(name: str, values: np.ndarray, weights: np.ndarray, larger: bool | None = None) -> Row:
    """Summarise the M clients' values of a metric in columns.

    `values` and `weights` are arrays of shape (M,). NAME.mean is weighted by the clients' weights. In NAME.worst,
    NAME.best and the deciles NAME.p10 … NAME.p90, which are interpolated linearly, all clients have the same weight.
    `larger` says whether a larger value is better.
    """
    low, high = float(values.min()), float(values.max())
    worst, best = (low, high) if larger_is_better(name, larger) else (high, low)
    mean = float(np.average(values, weights=weights))
    row: Row = {f"{name}.mean": mean, f"{name}.worst": worst, f"{name}.best": best}
    levels = np.quantile(values, np.array(DECILES) / 100)
    return row | {f"{name}.p{decile}": float(level) for decile, level in zip(DECILES, levels, strict=True)}


@dataclass(eq=False)
class PerClientEvaluation:
    """Measure metrics on each client, if samples are on this machine; each of several processes measures its clients.

    Samples are evaluated in blocks of BLOCK, and read from memory maps when they are needed. Each sample enters its
    client's mean once, and the mean is summed in float64, so that neither blocks nor unequal sizes influence the
    result. A `WholeLoss` gets one client's samples after the other's, each padded to the same length.
    """

    metrics: Mapping[str, PerClient]
    clients: Clients
    fixed: tuple[PyTree, PyTree]
    group: ProcessGroup = field(default_factory=current_group)
    own: IsOwn | None = None  # which leaves of y are each client's own; they have a leading axis of M clients
    local: LocalVariable | None = None  # "x": x has a block for each client, and a metric gets the client's own block
    programs: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Return the columns of all metrics.

        Raises:
            NonFiniteError: a metric of some client is NaN or infinite.
        """
        row: Row = {}
        for name, values in self.each(x, y).items():
            if bad := np.flatnonzero(~np.isfinite(values)).tolist():
                raise not_finite(round, name, values[bad[0]], bad[0])
            row |= spread(name, values, self.clients.weights, self.metrics[name].larger_is_better)
        return row

    def each(self, x: PyTree, y: PyTree) -> dict[str, np.ndarray]:
        """Measure each metric on each client; return an array of shape (M,) for each metric."""
        rows = {name: getattr(self.clients, metric.samples) for name, metric in self.metrics.items()}
        return {name: self.values(name, own, x, y) for name, own in rows.items()}

    def values(self, name: str, rows: Ragged, x: PyTree, y: PyTree) -> np.ndarray:
        """Compute each client's mean over its samples, as float64 of shape (M,); several processes share the work."""
        bounds = np.arange(self.group.processes + 1) * len(self.clients) // self.group.processes
        own = slice(*bounds[self.group.process : self.group.process + 2])
        measure = self.at_once if isinstance(self.metrics[name].function, WholeLoss) else self.means
        mine = measure(name, Ragged(rows.values, rows.start[own], rows.size[own]), int(own.start), x, y)
        return np.concatenate([np.asarray(part, np.float64) for part in self.group.gather(mine.tolist())])

    def parted(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return the shared parts of x and y, and the clients' own parts (x, y), with a leading axis of M clients."""
        y, own_y = parted_y(self.own, y)
        if self.local is None:
            return x, y, (jax.tree.map(lambda _: None, x), own_y)
        return jax.tree.map(lambda _: None, x), y, (jax.tree.map(lambda leaf: leaf[:, None], x), own_y)

    def means(self, name: str, rows: Ragged, first: int, x: PyTree, y: PyTree) -> np.ndarray:
        """Compute the mean over each row's samples, as float64 of shape (rows,); `first` is the first row's client."""
        ends = np.cumsum(rows.size)
        sums = np.zeros(len(rows.size))
        x, y, every = self.parted(x, y)
        for place in range(0, int(ends[-1]), BLOCK):
            places = np.arange(place, min(place + BLOCK, ends[-1]))
            owner = np.searchsorted(ends, places, side="right")
            index = rows.start[owner] + places - (ends - rows.size)[owner]
            sample = places - (ends - rows.size)[owner]
            whose = lambda i, of=sample, at=owner: f"in sample {of[i]} of client {first + at[i]}"  # noqa: E731
            what = f"Clients.{self.metrics[name].samples}"
            block = _block(rows.values, index, what, whose)
            owners = np.concatenate([owner, np.repeat(owner[:1], BLOCK - len(owner))])
            own = jax.tree.map(lambda leaf, of=owners: leaf[first + of], every)
            let_go((rows.values, every))
            if name not in self.programs:
                self.programs[name] = _over_samples(self.metrics[name].function, *self.fixed, x, y, own, block)
            values = self.programs[name](x, y, own, block)
            np.add.at(sums, owner, np.asarray(values, np.float64)[: len(places)])
        return sums / rows.size

    def at_once(self, name: str, rows: Ragged, first: int, x: PyTree, y: PyTree) -> np.ndarray:
        """Compute a `WholeLoss` of each row, as float64 of shape (rows,); `first` is the first row's client."""
        what, found = f"Clients.{self.metrics[name].samples}", []
        offset = np.arange(getattr(self.clients, self.metrics[name].samples).size.max())  # as long in all processes
        x, y, every = self.parted(x, y)
        for client, (start, size) in enumerate(zip(rows.start, rows.size, strict=True), first):
            index = start + np.minimum(offset, size - 1)
            whose = lambda i, of=client: f"in sample {i} of client {of}"  # noqa: E731
            table = _taken(rows.values, index, what, whose)
            own = jax.tree.map(lambda leaf, of=client: leaf[of], every)
            let_go((rows.values, every))
            given = x, y, own, Padded(table, offset < size)
            if name not in self.programs:
                self.programs[name] = _of_all(self.metrics[name].function, *self.fixed, *given)
            found.append(float(self.programs[name](*given)))
        return np.array(found)


def _block(values: PyTree, index: np.ndarray, what: str, whose: Callable[[int], str]) -> PyTree:
    """Take the samples at `index`, and add copies of the first sample, so that every block has BLOCK samples."""
    return _taken(values, np.concatenate([index, np.repeat(index[:1], BLOCK - len(index))]), what, whose)


def _taken(values: PyTree, index: np.ndarray, what: str, whose: Callable[[int], str]) -> PyTree:
    """Take the samples at `index`.

    `what` names the samples in messages, and `whose` returns in words the place of the i-th sample.
    """

    def take(path: Any, leaf: Any) -> np.ndarray:
        taken = np.asarray(leaf[index])
        if isinstance(leaf, np.memmap):  # arrays in memory were checked when the population was made
            check_finite(f"{what}{jax.tree_util.keystr(path)}", taken, whose)
        return taken

    return jax.tree_util.tree_map_with_path(take, values)


def _over_samples(
    function: Measure, x_fixed: PyTree, y_fixed: PyTree, x: PyTree, y: PyTree, own: PyTree, block: PyTree
) -> Callable[..., Any]:
    """Compile the function (x, y, own, block) -> the metric on each sample of the block, an array of shape (BLOCK,).

    `own` has, for each sample, the parts of x and y that are its client's own. Of x, y, own and block only the shapes
    and dtypes matter here.
    """

    def each(x: PyTree, y: PyTree, own: PyTree, block: PyTree) -> Any:
        x, y = join(x, x_fixed), join(y, y_fixed)

        def one(own: PyTree, sample: PyTree) -> Any:
            return function(join(x, own[0]), join(y, own[1]), jax.tree.map(lambda a: a[None], sample))

        return jax.vmap(one)(own, block)

    return _kept(jax.make_jaxpr(each)(x, y, own, block), x, y, own, block)


def _of_all(
    function: Measure, x_fixed: PyTree, y_fixed: PyTree, x: PyTree, y: PyTree, own: PyTree, table: PyTree
) -> Callable[..., Any]:
    """Compile the function (x, y, own, table) -> a `WholeLoss` of one client, whose padded samples are the table."""

    def whole(x: PyTree, y: PyTree, own: PyTree, table: PyTree) -> Any:
        return function(join(join(x, own[0]), x_fixed), join(join(y, own[1]), y_fixed), table)

    return _kept(jax.make_jaxpr(whole)(x, y, own, table), x, y, own, table)
