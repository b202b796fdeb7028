"""Data for federated experiments: loaders, partitions over clients, packing. NumPy only, no JAX."""

from fedbilevel.data.characters import CHARACTERS, Characters, Drawings, load_characters
from fedbilevel.data.files import Progress
from fedbilevel.data.heart import load_heart
from fedbilevel.data.loaders import LOADERS, TABLES, Dataset, load, load_table, standardise
from fedbilevel.data.packing import Packed, open_clients, pack, pack_arrays, write_clients
from fedbilevel.data.partitions import PARTITIONS, dirichlet, iid, one_label, partition, quantity, shards, split
from fedbilevel.data.reading import DataError

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
