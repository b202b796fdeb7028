"""Convert samples of other libraries to arrays, without importing these libraries.

A client's samples may be a data frame or a dataset. The samples of all clients may be a grouped frame or a partitioner.
Data that do not say which client holds which sample are refused; the error shows a call that divides them.
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
    """Describe a kind of table or dataset: its conversion to arrays, and calls for error messages.

    In a call, {} stands for the name of a column.
    """

    arrays: Callable[[Any], PyTree]
    divide: str  # the call that divides a table among clients
    encode: str = ""  # the call that encodes a column of words as integers
    read: str = ""  # the call that reads a dataset without a length


def as_numpy(leaf: Any) -> np.ndarray:
    """Return a value as a NumPy array; a tensor may be on any device and may require gradients."""
    return np.asanyarray(leaf.detach().cpu() if hasattr(leaf, "detach") else leaf)


def _columns(frame: Any) -> PyTree:
    return {name: frame[name].to_numpy() for name in frame.columns}


def _columns_read(dataset: Any) -> PyTree:
    """Return all rows of a dataset of Hugging Face by column, in the dataset's format and after its transform."""
    return {name: _stacked(name, rows) if isinstance(rows, list) else rows for name, rows in dataset[:].items()}


def _items(dataset: Any) -> PyTree:
    """Return all items of a dataset of PyTorch, each read once, stacked; a TensorDataset gives its tensors."""
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
        raise ValueError(f"{name} has shape {shapes[0]} in one sample and {shapes[1]} in another: pad the samples")
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
    """Return the kind of a table or dataset; None for any other value."""
    if hasattr(data, "columns") and hasattr(data, "to_numpy"):
        return PANDAS if hasattr(data, "groupby") else POLARS
    for module, kind in ("datasets", HUGGING_FACE), ("torch.utils.data", TORCH):
        library = sys.modules.get(module)
        if isinstance(data, (getattr(library, "Dataset", ()), getattr(library, "IterableDataset", ()))):
            return kind
    return None


def tree_of(field: str, data: Any, whose: str = "") -> tuple[PyTree, str]:
    """Return a client's table or dataset as a pytree of arrays, and the call that encodes one of its columns.

    Any other value is returned as it is, together with "". `whose` names the client in messages.

    Raises:
        ConfigurationError: a dataset has no length, samples differ in shape, or a pytree contains tables.
    """
    kind, called = kind_of(data), type(data).__name__
    named = isinstance(data, Mapping)
    if any(map(kind_of, data.values() if named else data if isinstance(data, tuple) else ())):
        call = "list(data.values())" if named else "[entry for _, entry in data]" if whose else "list(data)"
        text = f"it is a {called} of tables or datasets; clients must be in a list: {call}"
        raise ConfigurationError(text, where=f"{field}{whose}")
    if hasattr(data, "collate_fn"):
        text = f"it is a {called}; methods draw batches themselves, so give the dataset: loader.dataset"
        raise ConfigurationError(text, where=f"{field}{whose}")
    if kind is None:
        return data, ""
    if kind.read and not hasattr(type(data), "__len__"):
        text = f"it is a {called} without a length; read it first: {kind.read}"
        raise ConfigurationError(text, where=f"{field}{whose}")
    try:
        return kind.arrays(data), kind.encode
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigurationError(f"a {called} cannot become arrays: {error}", where=f"{field}{whose}") from error


def one_by_one(field: str, data: Any) -> Any:
    """Return the list of clients in a grouped frame, a partitioner or an iterator; other values as they are.

    Raises:
        ConfigurationError: there is one table or dataset for all clients, a partitioner has several splits, or rows are
            in no group.
    """
    called = type(data).__name__
    if kind := kind_of(data):
        names = list(getattr(data, "columns", ("",)))
        words = [name for name in names if data[name].to_numpy().dtype.kind not in "biuf"] if names != [""] else []
        call = kind.divide.format((words or names)[0])
        text = f"it is one {called} for all clients; divide it among the clients: {call}"
        raise ConfigurationError(text, where=field)
    if hasattr(type(data), "partitioners"):  # flwr-datasets
        splits = data.partitioners
        require(len(splits) == 1, field, called, f'the clients of one split: fds.partitioners["{next(iter(splits))}"]')
        (data,) = splits.values()
    if hasattr(type(data), "num_partitions"):  # a partitioner of flwr-datasets
        return [data.load_partition(i) for i in range(data.num_partitions)]
    if hasattr(data, "exclusions"):  # groups of pandas; the column that names the groups is not a feature
        groups = [group.drop(columns=data.exclusions, errors="ignore") for _, group in data]
        lost = len(data.obj) - sum(map(len, groups))
        require(not lost, field, f"groups without {lost} of the rows", "groups of all rows: groupby(…, dropna=False)")
        return groups
    return list(data) if isinstance(data, Iterator | ValuesView) else data
