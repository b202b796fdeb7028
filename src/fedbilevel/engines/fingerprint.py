"""Describe the arguments with which a run was started, so that two runs can be compared.

Arrays and functions are hashed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from fedbilevel import __version__
from fedbilevel.algorithms.parts.layers import layers_at
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.config import Schedule
from fedbilevel.core.errors import ChangedValues
from fedbilevel.core.hyperparameters import entries, field_values, hyperparameters, is_part, schedules
from fedbilevel.core.metrics import directions
from fedbilevel.core.own import Computed, Values
from fedbilevel.core.problem import Problem
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.local.placement import Shares
from fedbilevel.engines.process_group import ProcessGroup
from fedbilevel.machinery.kept import BLOCKS, ROWS, WHOLE, bytes_of, description, of_array, of_program, short

PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
VERSIONS = f"fedbilevel {__version__}, jax {jax.__version__}, optax {optax.__version__}, {PYTHON}"
LIBRARIES = ("fedbilevel", "optax", "jax", "jaxlib", "chex", "numpy", "builtins")
"""Packages whose functions depend only on their arguments and captured values, and not on variables that change."""
WITH_FIELDS = "steps", "privacy"
"""Places whose layers are not compared by name: they follow from other arguments, such as step sizes of None."""
Hashes = dict[str, str]
"""Name of a function, array, … -> its hash; messages use the name if hashes differ."""


@dataclass(frozen=True)
class Fingerprint:
    """Describe the arguments with which a run was started; `asdict` returns the JSON object that checkpoints store."""

    stated: dict[str, Any]  # algorithm, hyperparameters, key, …
    hashed: Hashes  # the start, and the population without its samples
    functions: Hashes  # losses, schedules, …
    by_round: dict[str, list[str]] = field(default_factory=dict)
    """Name -> a hash for each round, of numbers that are given for each round; a resumed run may have more rounds."""
    samples: dict[str, list[str | None]] = field(default_factory=dict)
    """Loss -> a hash for each block of clients' samples; None for a block that no process has as a whole.

    Empty if the samples were not read.
    """
    metrics: Hashes = field(default_factory=dict)
    """Metric -> its hash. A resumed run may have more metrics or fewer, but no other metric under the same name."""
    versions: str = VERSIONS
    """Versions of the libraries. Another version may trace or compile the same function to another program."""
    defaults: list[str] = field(default_factory=list)
    """The names in `stated` of fields of the method and of its parts that have their defaults."""
    parts: dict[str, str] = field(default_factory=dict)
    """The classes of parts within parts, by path. Checkpoints of earlier versions have none, and are not compared."""

    def differences(self, before: Fingerprint) -> ChangedValues:
        """Return what differs from the fingerprint `before`: name -> (value there, value here), or None for hashes.

        Functions and metrics are not compared if other versions of the libraries traced them. A field that an earlier
        version did not have counts with its default.
        """
        old, new = before.stated, self.stated
        parts = {name.rpartition(".")[0] for name in old}  # with fields of their own; "" is the method
        missing = [name for name in self.defaults if name not in old and name.rpartition(".")[0] in parts]
        old = {name: new.get(name) for name in ("layers", *missing)} | old  # earlier versions did not record the layers
        stated = {name: (old.get(name), new.get(name)) for name in _changed(old, new)}
        if before.parts:
            stated |= {
                name: (before.parts.get(name), self.parts.get(name)) for name in _changed(before.parts, self.parts)
            }
        hashes = _changed(before.hashed, self.hashed)
        for name in sorted(before.by_round.keys() | self.by_round.keys()):
            was, now = before.by_round.get(name), self.by_round.get(name)
            rows = [] if was is None or now is None else [a == b for a, b in zip(was, now, strict=False)]
            hashes += [] if rows and all(rows) else [name]
        if before.versions == self.versions:
            hashes += _changed(before.functions, self.functions)
            both = before.metrics.keys() & self.metrics.keys()
            hashes += sorted(name for name in both if before.metrics[name] != self.metrics[name])
        population = new["clients"]
        for loss in sorted(before.samples.keys() & self.samples.keys()) if population == old["clients"] else ():
            pairs = zip(before.samples[loss], self.samples[loss], strict=True)
            blocks = [number for number, (was, now) in enumerate(pairs) if was and now and was != now]
            hashes += [f"{loss} samples of {clients_of(blocks, population)}"] if blocks else []
        return {**stated, **dict.fromkeys(hashes)}


def in_words(differences: ChangedValues) -> str:
    """Describe what `Fingerprint.differences` has found; only the layers if they differ, since fields are renamed."""
    if values := differences.get("layers"):
        return in_words_of_layers(*values)
    said = [f"its {name} is {values[0]}, not {values[1]}" for name, values in differences.items() if values]
    hashes = [name for name, values in differences.items() if values is None]
    return "; ".join(said + ([f"different now: {', '.join(hashes)}"] if hashes else []))


def in_words_of_layers(before: Collection[str], now: Collection[str]) -> str:
    """Describe how the layers of a checkpoint differ from the layers of this run."""
    lost, new = (", ".join(name for name in one if name not in other) for one, other in ((before, now), (now, before)))
    parts = [f"with the layer {lost}, which is missing now"] if lost else []
    parts += [f"without the layer {new}, which this run has"] if new else []
    listed = f"with the layers {', '.join(before)}, which are {', '.join(now)} now"
    return f"it was written {', and '.join(parts) or listed}"


def take(
    stated: dict[str, Any],
    algorithm: Algorithm,
    problem: Problem,
    clients: Clients | RemoteClients,
    x: PyTree,
    y: PyTree,
    programs: Mapping[str, ClosedJaxpr],
) -> Fingerprint:
    """Take the fingerprint of a run without its samples (for the samples, see `of_samples`).

    Args:
        stated: further JSON values that are compared without hashing.
        algorithm, problem, clients: the arguments of the run.
        x, y: the variables at the start.
        programs: the traced programs of the problem's functions, by name. Constants in them are hashed; their custom
            rules for derivatives are not.
    """
    said, functions = of_method(algorithm)
    functions = {name: of_program(program) for name, program in programs.items()} | functions | of_rules(clients.own)
    given: dict[str, Any] = {f"clients' {name.replace('_', ' ')}": values for name, values in clients.own.items()}
    tables = {name: values.values for name, values in given.items() if values.rounds is not None}
    given["clients' capacities"] = clients.capacity
    if clients.capacity is not None and clients.capacity.ndim == 2:
        tables["clients' capacities"] = clients.capacity
    by_round = {name: [of_array(row) for row in table] for name, table in tables.items()}
    hashed = {
        "x0": of_tree(x),
        "y0": of_tree(y),
        "clients' weights": of_tree(clients.weights),
        **{name: of_tree(values) for name, values in given.items() if name not in by_round},
        "samples' shapes and types": short(*_shapes(clients.examples())),
    }
    if isinstance(clients, Clients):
        hashed["clients' numbers of samples"] = of_tree((clients.outer.size, clients.inner.size))
    stated = {**said, "problem": type(problem).__name__, "clients": len(clients), **stated}
    values = hyperparameters(algorithm)
    defaults = [one.path for one in entries(algorithm) if one.path in values and values[one.path] == one.default]
    parts = {
        one.path: type(one.value).__name__ for one in entries(algorithm) if len(one.keys) > 1 and is_part(one.value)
    }
    return Fingerprint(stated, hashed, functions, by_round, defaults=defaults, parts=parts)


def of_rules(own: Mapping[str, Values | None]) -> Hashes:
    """Return, by name, a hash of the newly traced program of each function that returns clients' own numbers."""
    rules = {name: values for name, values in own.items() if isinstance(values, Computed)}
    return {
        f"clients' rule for {name}": of_program(
            jax.make_jaxpr(lambda *given, rule=rule: rule.at(*given))(0, 0, jax.random.key(0), *[0] * rule.by_k)
        )
        for name, rule in rules.items()
    }


def of_method(algorithm: Algorithm) -> tuple[dict[str, Any], Hashes]:
    """Return (the method's name, its parts' names and its numbers; hashes of its schedules and optimizers, by name)."""
    parts = field_values(algorithm)
    functions = {f"schedule {path}": _of_schedule(schedule) for path, schedule in schedules(algorithm)}
    for entry in entries(algorithm):
        if isinstance(entry.value, optax.GradientTransformation):
            functions[entry.path] = short(*_made_of(entry.value))
    kinds = {name: type(part).__name__ for name, part in parts.items() if is_dataclass(part)}
    layers = [type(layer).__name__ for layer in layers_at(algorithm) if layer.place not in WITH_FIELDS]
    return {"algorithm": algorithm.label, "layers": layers, **kinds, **hyperparameters(algorithm)}, functions


def of_metrics(programs: Mapping[str, ClosedJaxpr], metrics: Mapping[str, Any]) -> Hashes:
    """Hash each metric: its program, the direction that is better, and the samples on which it is measured."""
    larger = directions(metrics)
    samples = {name: getattr(metric, "samples", "") for name, metric in metrics.items()}
    return {
        f"metric {name}": short(str(larger.get(name)), samples[name], of_program(program))
        for name, program in programs.items()
    }


def method_key(algorithm: Algorithm) -> Hashable | None:
    """Return a key of everything in a method on which the program of a round depends, except the method's numbers.

    The key is None for a method that is not this library's, or has an optimizer that contains a user's function: the
    code of a user may read values that have changed.
    """
    values = list(entries(algorithm))
    parts = [algorithm, *(entry.value for entry in values if is_part(entry.value))]
    if not all(type(part).__module__.startswith("fedbilevel.") for part in parts):
        return None
    said: list[str] = []
    for entry in values:
        said.append(entry.path)
        if isinstance(entry.value, Schedule):
            said.append(_of_schedule(entry.value))
        elif entry.field.metadata.get("static"):
            if _of_a_user(entry.value):
                return None
            said += _made_of(entry.value)
        elif entry.value is None:
            said.append("None")
    return short(*said), *map(type, parts)


def _of_schedule(schedule: Schedule) -> str:
    """Hash the program of a schedule, traced anew: JAX's cache would miss a change of a value in the closure."""
    return of_program(jax.make_jaxpr(lambda *indices: schedule.function(*indices))(*[0] * (1 + schedule.by_k)))


def of_samples(clients: Clients | RemoteClients, group: ProcessGroup) -> dict[str, list[str | None]]:
    """Hash each block of clients' samples, by loss; {} for remote clients.

    Several processes call this together, and each reads the samples of its own clients.
    """
    if isinstance(clients, RemoteClients):
        return {}
    sets = {"outer": clients.outer}
    if clients.inner is not clients.outer:
        sets["inner"] = clients.inner
    bounds = _bounds(len(clients))
    first, last = Shares(len(clients), group.processes, group.process, 1).bounds[group.process :][:2]
    mine = (first <= bounds[:-1]) & (bounds[1:] <= last)
    blocks = [slice(low, high) for low, high in pairwise(bounds)]
    own = {
        loss: [_of_block(rows, block) if here else None for block, here in zip(blocks, mine, strict=True)]
        for loss, rows in sets.items()
    }
    every = group.gather(own)
    known = {
        loss: [next(filter(None, words), None) for words in zip(*(of[loss] for of in every), strict=True)]
        for loss in own
    }
    return known if "inner" in known else {**known, "inner": known["outer"]}  # both losses read the same samples


def _shapes(tree: PyTree) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}" for path, leaf in leaves]


def of_tree(tree: PyTree) -> str:
    """Hash the arrays and numbers of a tree, and their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return short(*(part for path, leaf in leaves for part in (jax.tree_util.keystr(path), of_array(leaf))))


def _of_block(rows: Ragged, clients: slice) -> str:
    """Hash the samples of some clients in order; only some of the samples in large memory-mapped arrays."""
    start, size = rows.start[clients], rows.size[clients]
    ends = np.cumsum(size)
    total, stored = int(ends[-1]), int(rows.size.sum())
    parts: list[str | bytes] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows.values):
        width = int(np.prod(leaf.shape[1:])) * leaf.dtype.itemsize
        large = stored * width > WHOLE
        some = large and isinstance(leaf, np.memmap)
        read = min(total, ROWS) if some else total
        chosen = np.linspace(0, total - 1, read).astype(np.int64)
        client = np.searchsorted(ends, chosen, side="right")
        chosen += start[client] - (ends - size)[client]
        array, together = np.asarray(leaf), bool(np.all(np.diff(chosen) == 1))
        samples = array[chosen[0] : chosen[-1] + 1] if together else array[chosen]
        parts += [jax.tree_util.keystr(path), bytes_of(samples, quickly=large and not some)]
    return short(*parts)


def _bounds(population: int) -> np.ndarray:
    """Divide clients into blocks; return their bounds: block b has the clients bounds[b] … bounds[b + 1] − 1."""
    count = min(BLOCKS, population)
    return np.arange(count + 1, dtype=np.int64) * population // count


def clients_of(blocks: list[int], population: int) -> str:
    """Name the clients of the blocks with these numbers in words: «client 3», «clients 0 to 7, 12»."""
    bounds = _bounds(population)
    ranges: list[list[int]] = []
    for block in blocks:
        low, high = int(bounds[block]), int(bounds[block + 1])
        if ranges and ranges[-1][1] == low:
            ranges[-1][1] = high
        else:
            ranges.append([low, high])
    words = [str(low) if high == low + 1 else f"{low} to {high - 1}" for low, high in ranges]
    return f"client{'s' if ranges[0][1] - ranges[0][0] > 1 or len(ranges) > 1 else ''} {', '.join(words)}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in {**old, **new} if old.get(name) != new.get(name)]


def _made_of(value: Any) -> Iterator[str]:
    """Describe a function that a library has made, such as one of Optax, by names, code and captured values."""
    for piece in _pieces(value):
        if not callable(piece):
            yield from description(piece)
            continue
        yield getattr(piece, "__qualname__", type(piece).__qualname__)
        if isinstance(piece, FunctionType):
            yield from _code(piece.__code__)


def _of_a_user(value: Any) -> bool:
    """Return whether a value contains a function, method or callable object that is not from LIBRARIES."""
    made = (piece for piece in _pieces(value) if callable(piece) and not isinstance(piece, type))
    return any((getattr(piece, "__module__", None) or "").partition(".")[0] not in LIBRARIES for piece in made)


def _pieces(value: Any, within: tuple[Any, ...] = ()) -> Iterator[Any]:
    """List the functions and other values that a value consists of: its items, and what its functions close over."""
    if any(value is outer for outer in within):
        return
    if isinstance(value, FunctionType):
        yield value
        for item in (*_closed_over(value), value.__defaults__, value.__kwdefaults__):
            yield from _pieces(item, (*within, value))
    elif isinstance(value, partial):
        yield from _pieces((value.func, value.args, value.keywords), within)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _pieces(item, within)
    elif isinstance(value, Mapping):
        yield from _pieces(list(value.items()), within)
    else:
        yield value


def _code(code: CodeType) -> Iterator[str]:
    """Describe a function's instructions, and those of the functions inside it."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        yield from _code(constant) if isinstance(constant, CodeType) else description(constant)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    """List the values that a function closes over; variables that were never set are left out."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable was never set
            continue
