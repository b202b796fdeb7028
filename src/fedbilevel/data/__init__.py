"""Data for federated experiments: loaders, partitions over clients, packing. NumPy only, no JAX."""

from fedbilevel.data.characters import CHARACTERS, Characters, load_characters
from fedbilevel.data.dataset import Dataset, standardise
from fedbilevel.data.disk import open_clients, write_clients
from fedbilevel.data.drawings import Drawings
from fedbilevel.data.errors import DataError
from fedbilevel.data.files import Progress
from fedbilevel.data.loaders import LOADERS, load
from fedbilevel.data.packing import Packed, pack, pack_arrays
from fedbilevel.data.partitions import (
    PARTITIONS,
    dirichlet,
    iid,
    one_label,
    partition,
    quantity,
    shards,
    split,
)
from fedbilevel.data.tables import TABLES, load_table

__all__ = [
    "CHARACTERS",
    "LOADERS",
    "PARTITIONS",
    "TABLES",
    "Characters",
    "DataError",
    "Dataset",
    "Drawings",
    "Packed",
    "Progress",
    "dirichlet",
    "iid",
    "load",
    "load_characters",
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
