"""Load data sets, partition them over clients and pack the clients' samples, with NumPy alone."""

from fedbilevel.data.characters import Characters, Drawings, load_characters
from fedbilevel.data.clients import (
    PARTITIONS,
    Packed,
    dealt,
    dirichlet,
    iid,
    one_label,
    open_clients,
    pack,
    pack_arrays,
    partition,
    quantity,
    shards,
    split,
    write_clients,
)
from fedbilevel.data.files import DataError
from fedbilevel.data.loaders import LOADERS, TABLES, Dataset, load, load_heart, load_table, standardise

__all__ = [
    "LOADERS",
    "PARTITIONS",
    "TABLES",
    "Characters",
    "DataError",
    "Dataset",
    "Drawings",
    "Packed",
    "dealt",
    "dirichlet",
    "iid",
    "load",
    "load_characters",
    "load_heart",
    "load_table",
    "one_label",
    "open_clients",
    "pack",
    "pack_arrays",
    "partition",
    "quantity",
    "shards",
    "split",
    "standardise",
    "write_clients",
]
