"""Hold the history of a run, row by row, and its result; and end runs early, by conditions on metrics or by budgets.

A budget is a number of rounds, exchanges, bytes, evaluations, or seconds of the run's simulated clock. The costs of a
run are compared with the budget at every row of the history. Rows are added after fixed rounds. So the round at which a
run ends depends only on the numbers of the run, and not on the speed of the machine or on interruptions.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core.card import Card, Shown, counted, described, listed, span
from fedbilevel.core.errors import LARGEST, CheckpointError, ConfigurationError, require, require_count, unknown
from fedbilevel.core.inputs import require_function
from fedbilevel.core.metrics import best, larger_is_better, metric_of, require_direction, text
from fedbilevel.core.own_y import parted_y
from fedbilevel.core.tree import PyTree, is_none, is_table, join, split
from fedbilevel.core.writing import write_text
from fedbilevel.display.curves import draw_history
from fedbilevel.engines import checkpoint
from fedbilevel.engines.costs import Ledger
from fedbilevel.reading import parse_json, read_bytes
from fedbilevel.wording import missing, require_object

Row = dict[str, float | int]
"""The values of one row of the history, by column."""
LOSSES = ("outer_loss", "inner_loss")
DIVERGED = "diverged"  # the column with the number of trials of a search that diverged
UNMEASURED = "round", "seconds", "halvings", DIVERGED, *Ledger.COLUMNS  # columns that no metric may have as its name
LONGEST = 2**28  # the largest number of bytes of a history in a file


@dataclass(repr=False)
class RowTable(Shown):
    """Hold a table: a dict of numbers for each row, whose keys are the columns; rows may lack some of them."""

    rows: list[Row] = field(default_factory=list)

    def __getitem__(self, column: str) -> np.ndarray:
        """Return a column as an array of shape (rows,), with NaN for rows that lack it; row 0 has no losses."""
        if column not in self.columns:
            raise unknown("column of the history", column, self.columns)
        return np.array([row.get(column, np.nan) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, column: object) -> bool:
        return column in self.columns

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns, in the order in which they first appear in rows."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each evaluation, and NaN where a row lacks a column.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"to_pandas needs {missing('pandas', 'tables')}") from error
        return pandas.DataFrame(self.rows, columns=self.columns)

    def to_jsonl(self, path: str | Path | None = None) -> str:
        """Return the history as text with one JSON object per line; given a path, also write it there, atomically."""
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        if path is not None:
            write_text(Path(path), text)
        return text


@dataclass(repr=False)
class History(RowTable):
    """Hold the measurements of a run: a row of numbers for each evaluation, whose keys are the columns.

    `history[NAME]` is a column; iteration and `in` are over the names of columns, and `len` counts rows.

    Rows have these columns:

    - round, exchanges, bytes_down, bytes_up, gradients, hvps, time: totals so far, as in a `Ledger`.
    - seconds: the time that this machine spent in rounds, without compilation and evaluation.
    - flops, if operations were counted.
    - diverged: in a search, how many of its trials have diverged, if some have.
    - coverage_x, uncovered_x, mask_noise_x, and the same for y, if clients hold submodels.
    - metrics of the algorithm's phases, such as outer_loss and inner_loss: means over the rounds since the row before.
    - the user's metrics, by their names.

    Args:
        rows: a dict for each evaluation, with numbers by the names of columns.
        directions: for each metric, whether a larger value is better.
    """

    directions: dict[str, bool] = field(default_factory=dict)

    @property
    def measured(self) -> list[str]:
        """Return the columns that are not costs: first those of `judged`, then the others, such as coverage."""
        found = [name for name in self.columns if name not in UNMEASURED]
        return list(dict.fromkeys([*self.judged, *found]))

    @property
    def judged(self) -> list[str]:
        """Return the columns whose better direction (larger or smaller) is known: first metrics, then losses."""
        metrics = [name for name in self.columns if metric_of(name) in self.directions]
        return metrics + [name for name in LOSSES if name in self.columns]

    @property
    def per_client(self) -> list[str]:
        """Return the names of the metrics per client; each of them has columns NAME.mean, NAME.worst, …"""
        return [name.removesuffix(".worst") for name in self.columns if name.endswith(".worst")]

    def larger_is_better(self, column: str) -> bool:
        """Return whether a larger value of a column or metric is better (see `fedbilevel.Metric`)."""
        metric = metric_of(column)
        return larger_is_better(metric, self.directions.get(metric))

    def card(self) -> Card:
        rounds = f", of rounds {span(self['round'])}" if self.rows else ""
        costs = [name for name in self.columns if name not in self.measured]
        lines = {"costs": listed(costs), "measured": listed(self.measured), "last": self.last_in_words()}
        return Card(
            f"History: {counted(len(self), 'row')}{rounds}", {name: text for name, text in lines.items() if text}
        )

    def last_in_words(self) -> str:
        """Return the metrics and losses of the last row as a text; metrics per client by their mean and worst value."""
        last = self.rows[-1] if self.rows else {}
        names = [name for name in self.measured if name in last and not re.search(r"\.(best|p\d0)$", name)]
        return listed([f"{name} {text(name, last[name])}" for name in names])

    def in_words(self) -> dict[str, str]:
        """Return a text for each measured column: its first and last value, and the best value of a loss or metric."""
        lines = {}
        for name in self.measured:
            rows = [row for row in self.rows if name in row]
            values = [row[name] for row in rows]
            lines[name] = f"{text(name, values[0])} → {text(name, values[-1])}"
            if len(rows) == 1:
                lines[name] = f"{text(name, values[0])}, measured once, at round {rows[0]['round']:,}"
            elif name in self.judged:
                top = best(values, self.larger_is_better(name))
                lines[name] += f", best {text(name, top)} at round {rows[values.index(top)]['round']:,}"
        return lines

    def plot(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        panel: str = "exchanges",
        size: tuple[float, float] | None = None,
        axes: Any = None,
    ) -> Any:
        """Draw columns against a cost, and return the Matplotlib axes.

        Args:
            metrics: a column or several, or names of metrics per client; None: the first metric, or the outer loss.
            panel: the cost: "rounds", "exchanges", "megabytes", "evaluations", "gflop", "seconds" or "time".
            size: the size of a new figure, in inches: (3.3, 2.5) suits a column of a paper, and has small type;
                None: (6, 4).
            axes: the Matplotlib axes to draw on; None: those of a new figure.

        Raises:
            ConfigurationError: there is no such column or cost, or Matplotlib is not installed.
        """
        if metrics is None:
            require(bool(self.measured), "metrics", metrics, "a column of the history, which has measured nothing yet")
            metrics = self.measured[0].removesuffix(".mean")
        return draw_history(self, metrics, panel=panel, size=size, axes=axes)

    @classmethod
    def from_jsonl(cls, source: str | Path) -> History:
        """Read a history that `to_jsonl` wrote, from its text (a str) or from a file (a `Path`).

        Raises:
            ValueError: the text or file is not a history.
        """
        text = read_bytes(source, LONGEST).decode() if isinstance(source, Path) else source
        return cls.of([parse_json(line) for line in text.splitlines() if line.strip()])

    @classmethod
    def of(cls, rows: Any, directions: Any = None) -> History:
        """Make a history from rows and directions that were read from JSON.

        Raises:
            ValueError: a row is not an object of numbers, its round is not a whole number, or the directions are not an
                object of truth values.
        """
        for number, row in enumerate(rows, 1):
            require_object(row, f"numbers by name, row {number} of the history,")
            if not all(map(is_number, row.values())):
                raise ValueError(f"row {number} of the history is not an object of numbers")
            if type(row.get("round")) is not int or row["round"] < 0:
                raise ValueError(f"row {number} of the history has no round, or a round that is not a whole number ≥ 0")
        directions = {} if directions is None else directions
        if not isinstance(directions, dict) or not all(type(larger) is bool for larger in directions.values()):
            raise ValueError("larger_is_better must be an object with true or false by the names of metrics")
        return cls(rows, directions)


def is_number(value: Any) -> bool:
    """Return whether a value that was read from JSON is a number; an integer must be within the range of a float."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


ENDLESS = LARGEST  # the number of rounds of a run that ends by another budget
Budget = tuple[str, float]
"""A kind of cost and its limit: ("rounds", 300), ("exchanges", 500), ("bytes", 1e9), ("evaluations", 1e6) or
("time", 200.0)."""


class Best(NamedTuple):
    """Hold x and y of the row of the history with the best value in a column."""

    x: PyTree
    y: PyTree
    round: int
    column: str
    value: float


@dataclass(repr=False)
class Result(Shown):
    """Hold the state of a run at its end, or, in a callback, at that point of the run.

    A run may end with a larger outer loss than at the start although its rows do not show this, because the losses in
    rows come from few clients or samples. In this case, the outer loss of all clients is computed at the start and at
    the end. If it is larger at the end, it is also computed at x0 with a trained y, since an untrained y may have a
    lower outer loss. These losses are not computed over Flower, under privacy, in several processes, for minimax and
    simple bilevel problems, or if this would take more than about a third of the time of the run's gradients.

    Args:
        x: the outer variable, in the structure of x0.
        y: the inner variable, in the structure of y0; for a simple bilevel problem, the average of x over the rounds.
        round: the number of rounds done.
        rounds: the number of rounds that were asked for.
        history: losses and metrics, a row for each evaluation.
        ledger: what the run has cost so far: exchanges, bytes, gradients, time.
        compile_seconds: seconds spent on compilation, which no row of the history includes.
        stopped: why the run ended early; "" if it did not.
        best: x and y of the best row of the history, by the column that `best_by` of `solve` names; None if no row has
            that column.
        remarks: sentences about the end: that the run ended worse than it began, or which entries of x still move.
        state: the server's state of the method; None in a result that was read from a file.
        own_leaves: paths of the leaves of y that are each client's own (`Bilevel.own`). In y, these leaves have a
            leading axis of M clients. They are None for remote clients, which never send them. If samples are streamed
            (`Local.stream`), they are memory-mapped arrays, which later rounds of the run change: a callback that needs
            their present values later must copy them.
    """

    x: PyTree
    y: PyTree
    round: int
    rounds: int
    history: History
    ledger: Ledger
    compile_seconds: float = 0.0
    stopped: str = ""
    best: Best | None = None
    remarks: tuple[str, ...] = ()
    state: Any = None
    own_leaves: tuple[str, ...] = ()

    def card(self) -> Card:
        lines = {"x": described(self.x), "y": described(self.y), "last row": self.history.last_in_words()}
        if self.best is not None:
            value = text(self.best.column, self.best.value)
            lines["best"] = f"{self.best.column} {value} at round {self.best.round:,}"
        if self.remarks:
            lines["remarks"] = "; ".join(self.remarks)
        return Card(
            self._title(), lines | {"costs": self.ledger.in_short(), "more": "summary(), plot(), history, ledger"}
        )

    def own(self, client: int) -> PyTree:
        """Return a client's y, in the structure of y0: the shared leaves, and the client's own leaves.

        Args:
            client: the client's number, 0 ≤ client < M.

        Raises:
            ConfigurationError: no leaf is a client's own, the leaves are at their sites, or there is no such client.
        """
        named = ", ".join(self.own_leaves)
        require(bool(named), "Result.own", client, "called only if leaves of y are each client's own (Bilevel.own)")
        own = parted_y(lambda path: path in self.own_leaves, self.y)[1]
        if not (leaves := jax.tree.leaves(own)):
            text = f"the result does not have the clients' own leaves of y ({named}), which never leave their sites"
            raise ConfigurationError(f"{text}: each site keeps its own leaves in the folder of its state (Site.folder)")
        count = len(leaves[0])
        known = isinstance(client, int | np.integer) and 0 <= client < count
        require(known, "Result.own: client", client, f"a client's number, 0 to {count - 1}")
        # Leaves that are tables on disk are copied, since later rounds change them in place.
        mine = jax.tree.map(lambda leaf: np.array(leaf[client]) if is_table(leaf) else leaf[client], own)
        return jax.tree.map(lambda one, leaf: leaf if one is None else one, mine, self.y, is_leaf=is_none)

    def summary(self) -> Card:
        """Summarise each loss and metric by its first and last value, and list every cost.

        The summary is printed as a table, and shown as a table in a notebook. It is also a mapping from names to lines:
        `summary()["outer_loss"]` is a text.
        """
        seconds = self.history.rows[-1].get("seconds", 0.0) if self.history.rows else 0.0
        spent = {"seconds": f"{seconds:,.1f} in rounds, {self.compile_seconds:,.1f} compiling"}
        return Card(self._title(), self.history.in_words() | dict(self.ledger.card().lines) | spent)

    def plot(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        panel: str = "exchanges",
        size: tuple[float, float] | None = None,
        axes: Any = None,
    ) -> Any:
        """Draw columns of the history against a cost, and return the Matplotlib axes: see `History.plot`."""
        return self.history.plot(metrics, panel=panel, size=size, axes=axes)

    def _title(self) -> str:
        why = f", stopped: {self.stopped}" if self.stopped else ""
        return f"Result: {self.round:,} of {self.rounds:,} rounds{why}"

    @classmethod
    def load(cls, path: str | Path, x0: PyTree = None, y0: PyTree = None) -> Result:
        """Read a result that `save` wrote.

        Args:
            path: the file.
            x0, y0: the start of the run, from which the structures of x and y are taken; the values do not matter. The
                start is needed if x or y is a model of another library, or has leaves other than floating arrays.

        Raises:
            CheckpointError: there is no such file, it is not a result, or it does not fit x0 and y0.
        """
        path, best = Path(path), None
        noted = checkpoint.load_meta(path)
        if "rounds" not in noted:
            how = f"a checkpoint of a run is continued by fb.solve(…, checkpoint={str(path)!r}, resume=True)"
            raise CheckpointError(f"{path} was not written by Result.save", path=path, remedy=how)
        given = _variables(x0, y0)
        like = given | ({"best": given} if noted.get("best") else {})
        tree, meta = checkpoint.load(path, checkpoint.own_shapes(path) if x0 is None else like)

        def whole(part: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
            if x0 is None:
                return part["x"], part["y"]
            return join(part["x"], split(x0)[1]), join(part["y"], split(y0)[1])

        with checkpoint.as_checkpoint_error(path):
            x, y = whole(tree)
            if meta.get("best"):
                round, column, value = meta["best"]
                best = Best(*whole(tree["best"]), int(round), str(column), float(value))
            return cls(
                x,
                y,
                round=int(meta["round"]),
                rounds=int(meta["rounds"]),
                history=History.of(meta["history"], meta.get("larger_is_better")),
                ledger=Ledger.of(meta["ledger"]),
                compile_seconds=float(meta["compile_seconds"]),
                stopped=str(meta["stopped"]),
                remarks=tuple(map(str, meta.get("remarks", ()))),
                own_leaves=tuple(map(str, meta.get("own_leaves", ()))),
                best=best,
            )

    def save(self, path: str | Path) -> None:
        """Write x, y, history and ledger to a .npz file, atomically; `Result.load` reads the file."""
        fixed = jax.tree.leaves((split(self.x)[1], split(self.y)[1]))
        meta = {
            "history": self.history.rows,
            "larger_is_better": self.history.directions,
            "ledger": asdict(self.ledger),
            "round": self.round,
            "rounds": self.rounds,
            "compile_seconds": self.compile_seconds,
            "stopped": self.stopped,
            "remarks": self.remarks,
            "own_leaves": self.own_leaves,
            "best": self.best and self.best[2:],
        }
        best = {} if self.best is None else {"best": _variables(self.best.x, self.best.y)}
        checkpoint.save(Path(path), _variables(self.x, self.y) | best, meta, outlined=not fixed)


Callback = Callable[[Result, Row | None], str | None]
"""(result so far, the new row, or None between rows) -> a reason to stop, or None to continue."""


def check_callbacks(callbacks: object) -> None:
    """Reject callbacks that are not a list or tuple of functions (result, row).

    An iterator is also rejected, since the check would exhaust it.
    """
    allowed = "a list of functions, such as [callback]"
    require(isinstance(callbacks, list | tuple), "callbacks", callbacks, allowed)
    assert isinstance(callbacks, list | tuple)
    for i, callback in enumerate(callbacks):
        require_function(f"callbacks[{i}]", callback, "result, row", " -> a reason to stop, or None")


def stop_when(metric: str, *, above: float | None = None, below: float | None = None) -> Callback:
    """Make a callback that ends the run once a row's `metric` is at least `above`, or at most `below`."""

    if above is None and below is None:
        raise ConfigurationError("stop_when needs `above` or `below`, the value to reach")

    def check(result: Result, row: Row | None) -> str | None:
        if row is None or not has(row, metric):
            return None
        if above is not None and row[metric] >= above:
            return f"{metric} reached {above}"
        if below is not None and row[metric] <= below:
            return f"{metric} fell to {below}"
        return None

    return check


def stop_without_progress(metric: str, *, patience: int, larger_is_better: bool | None = None) -> Callback:
    """Make a callback that ends the run when `metric` has not improved for `patience` rows.

    Args:
        metric: a column of the history.
        patience: the number of consecutive rows without a better value; `eval_every` of `solve` sets the rounds between
            rows.
        larger_is_better: whether a larger value is better. None: as the metric declares (`fedbilevel.Metric`); if it
            declares nothing, larger values are better for accuracies, and smaller values for other metrics.
    """
    require_count("patience", patience)
    require_direction("larger_is_better", larger_is_better, optional=True)

    def check(result: Result, row: Row | None) -> str | None:
        if row is None or not has(row, metric):
            return None
        if len(result.history.rows) == 2 and result.rounds == row["round"] > 1:
            text = "stop_without_progress saw only the start and the end of the run: eval_every=… makes more rows"
            warnings.warn(text, stacklevel=2)
        larger = result.history.larger_is_better(metric) if larger_is_better is None else larger_is_better
        values = [r[metric] for r in result.history.rows if metric in r]
        since = len(values) - 1 - values.index(best(values, larger))
        return f"{metric} has not improved for {patience} evaluations" if since >= patience else None

    return check


def require_new(metric: str, row: Container[str]) -> None:
    """Refuse a metric with the name of a column that the history has, or may have, for something else."""
    new = metric not in row and metric not in UNMEASURED
    require(new, "metrics", metric, "another name, since the history has a column of this name")


def has(row: Row, metric: str, kind: str = "metric") -> bool:
    """Return whether a row has a metric; only the first row may lack one, since there are no rounds before it.

    Args:
        row: the row.
        metric: the name of the metric's column.
        kind: what the user's argument with this name is called, for the error.
    """
    if metric not in row and row["round"] > 0:
        raise unknown(kind, metric, row)
    return metric in row


def _variables(x: PyTree, y: PyTree) -> dict[str, PyTree]:
    return {"x": split(x)[0], "y": split(y)[0]}


def cost(row: Row, name: str) -> float:
    """Return the cost of this name that a run has spent up to a row: the sum of its columns in the row."""
    return sum(row[column] for column in columns_of(name))


def columns_of(name: str) -> tuple[str, ...]:
    """Return the columns whose sum is a cost: "rounds", "bytes", "evaluations", or a cost with a column of its name."""
    sums = {"rounds": ("round",), "bytes": ("bytes_down", "bytes_up"), "evaluations": ("gradients", "hvps")}
    return sums.get(name, (name,))


def stop_after(budget: Budget) -> Callback:
    """Make a callback that ends a run at the first row that has spent the budget."""

    def check(result: Result, row: Row | None) -> str | None:
        return reason(budget) if row is not None and spent(row, budget) else None

    return check


def spent(row: Row, budget: Budget) -> bool:
    """Return whether a row has reached the budget."""
    name, amount = budget
    return cost(row, name) >= amount


def in_words(budget: Budget) -> str:
    """Return a budget as text: "500 exchanges", "12.5 MB", "200 seconds of the clock"."""
    name, amount = budget
    if name == "bytes":
        return f"{amount / 1e6:,.6g} MB"
    return f"{amount:g} seconds of the clock" if name == "time" else f"{amount:.10g} {name}"


def reason(budget: Budget) -> str:
    """Return the text that says why a run with this budget ended, such as "500 exchanges done"."""
    ended = {"bytes": "sent", "time": "passed"}.get(budget[0], "done")
    return f"{in_words(budget)} {ended}"


def rounds_at_most(budget: Budget) -> int:
    """Return a number of rounds after which the budget is certainly spent.

    A round makes at least one exchange, so a budget of n exchanges lasts for at most n rounds. A round may take no time
    and no bytes, so for other budgets the number is ENDLESS.
    """
    name, amount = budget
    return math.ceil(amount) if name == "exchanges" else ENDLESS


def rounds_done(path: Path, budget: Budget) -> int | None:
    """Return the rounds done in the checkpoint at `path`, if that run has already spent the budget; else None.

    Raises:
        CheckpointError: the checkpoint cannot be read.
    """
    with checkpoint.as_checkpoint_error(path):
        rows = History.of(checkpoint.load_meta(checkpoint.newest(path))["history"]).rows
        return int(rows[-1]["round"]) if rows and spent(rows[-1], budget) else None
