"""Samples as other libraries hold them, known without an import of these libraries.

A client's samples may be a data frame or a dataset, those of all clients a grouped frame or a partitioner. What does
not say who holds what is refused with the call that says it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, ValuesView
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.tree import PyTree


class Kind(NamedTuple):
    """A sort of table or dataset: how it becomes a pytree of arrays, and calls that mend it, {} being a column."""

    arrays: Callable[[Any], PyTree]
    divide: str  # one among clients
    encode: str = ""  # a column of words as integers
    read: str = ""  # what has no length


def as_numpy(leaf: Any) -> np.ndarray:
    """What NumPy makes of it; a tensor may lie anywhere and have a gradient."""
    return np.asanyarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)


def _columns(frame: Any) -> PyTree:
    return {name: frame[name].to_numpy() for name in frame.columns}


def _columns_read(dataset: Any) -> PyTree:
    """All rows at once, in the format that the dataset was given, and through its transform."""
    return {name: _stacked(name, rows) if isinstance(rows, list) else rows for name, rows in dataset[:].items()}


def _items(dataset: Any) -> PyTree:
    """All items, each read once, stacked; by tensor, where no class of the user's may say what an item is."""
    torch = sys.modules["torch.utils.data"]
    if type(dataset) is torch.TensorDataset:
        return dataset[:]
    if type(dataset) is torch.Subset and type(dataset.dataset) is torch.TensorDataset:
        return dataset.dataset[as_numpy(dataset.indices)]
    items, name = [dataset[i] for i in range(len(dataset))], jax.tree_util.keystr
    if not items:
        raise ValueError("it is empty; every client needs a sample")
    return jax.tree_util.tree_map_with_path(lambda path, *values: _stacked(f"item{name(path)}", values), *items)


def _stacked(name: str, values: Any) -> np.ndarray:
    arrays = [as_numpy(value) for value in values]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"{name} is of shape {shapes[0]} in one sample, {shapes[1]} in another: pad them")
    return np.stack(arrays)


PANDAS = Kind(_columns, 'frame.groupby("{}")', 'frame["{0}"] = frame["{0}"].astype("category").cat.codes')
POLARS = Kind(
    _columns, 'frame.partition_by("{}", include_key=False)', 'frame = frame.with_columns(frame["{}"].rank("dense"))'
)
HUGGING_FACE = Kind(
    _columns_read,
    "[dataset.shard(10, i) for i in range(10)]",
    'dataset = dataset.class_encode_column("{}")',
    "datasets.Dataset.from_list(list(dataset))",
)
TORCH = Kind(
    _items,
    "torch.utils.data.random_split(dataset, [0.1] * 10)",
    read="torch.utils.data.default_collate(list(dataset))",
)


def kind_of(data: object) -> Kind | None:
    """The kind of a table or dataset; None for anything else."""
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return PANDAS if hasattr(data, "groupby") else POLARS
    for module, kind in ("datasets", HUGGING_FACE), ("torch.utils.data", TORCH):
        found = sys.modules.get(module)
        if isinstance(data, (getattr(found, "Dataset", ()), getattr(found, "IterableDataset", ()))):
            return kind
    return None


def tree_of(field: str, data: Any, whose: str = "") -> tuple[PyTree, str]:
    """The pytree of arrays that a client's table or dataset stands for, and the call that encodes a column of it.

    Anything else is returned as it is, with "".

    Raises:
        ConfigurationError: a dataset without a length, samples of several shapes, tables inside a pytree.
    """
    kind, called = kind_of(data), type(data).__name__
    named = isinstance(data, Mapping)
    if any(map(kind_of, data.values() if named else data if isinstance(data, tuple) else ())):
        call = "list(data.values())" if named else "[entry for _, entry in data]" if whose else "list(data)"
        raise ConfigurationError(f"{field}{whose} is a {called} of tables or datasets; clients come in a list: {call}")
    if hasattr(data, "collate_fn"):
        raise ConfigurationError(f"{field}{whose} is a {called}; methods draw their own batches, from loader.dataset")
    if kind is None:
        return data, ""
    if kind.read and not hasattr(type(data), "__len__"):
        raise ConfigurationError(f"{field}{whose} is a {called}, which has no length; read it: {kind.read}")
    try:
        return kind.arrays(data), kind.encode
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigurationError(f"{field}{whose}, a {called}, makes no arrays: {error}") from error


def one_by_one(field: str, data: Any) -> Any:
    """The list of clients that a grouped frame, a partitioner or an iterator gives; anything else as it is.

    Raises:
        ConfigurationError: one table or dataset for all clients, several splits, rows that are in no group.
    """
    called = type(data).__name__
    if kind := kind_of(data):
        names = list(getattr(data, "columns", ("",)))
        words = [name for name in names if data[name].to_numpy().dtype.kind not in "biuf"] if names != [""] else []
        call = kind.divide.format((words or names)[0])
        raise ConfigurationError(f"{field} is one {called}; clients come one by one: {call}")
    if hasattr(type(data), "partitioners"):  # flwr-datasets
        splits = data.partitioners
        require(len(splits) == 1, field, called, f'clients of one split: fds.partitioners["{next(iter(splits))}"]')
        (data,) = splits.values()
    if hasattr(type(data), "num_partitions"):  # a partitioner of it
        return [data.load_partition(i) for i in range(data.num_partitions)]
    if hasattr(data, "exclusions"):  # pandas, of groups; the column that names them is no feature
        groups = [group.drop(columns=data.exclusions, errors="ignore") for _, group in data]
        lost = len(data.obj) - sum(map(len, groups))
        require(not lost, field, f"groups without {lost} of the rows", "of all rows: groupby(…, dropna=False)")
        return groups
    return list(data) if isinstance(data, Iterator | ValuesView) else data
