"""Saving and loading trees of arrays: atomic, checked, and never a pickle."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import PyTree

META = "__meta__"
UNREADABLE = (OSError, ValueError, LookupError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile)
"""What reading a damaged or foreign archive may raise; ValueError includes JSON's and Unicode's."""


def save(path: Path, tree: PyTree, meta: dict[str, Any]) -> None:
    """Write the leaves of `tree` and the JSON object `meta`, so that `path` is at any moment whole, old or new.

    Raises:
        CheckpointError: no space, no permission; what stood at `path` before still does.
    """
    arrays = {_name(p): np.asarray(_plain(leaf)) for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}  # NumPy's format knows no bfloat16
    arrays[META] = np.frombuffer(json.dumps({"meta": meta, "dtypes": dtypes}).encode(), np.uint8)
    write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **arrays))


def load(path: Path, like: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """Read what `save` wrote; `like` gives the structure, shapes and dtypes that are expected.

    Raises:
        CheckpointError: not a checkpoint, or one of another model or algorithm; the message names the leaf.
    """
    try:
        arrays = _read(path)
        header = json.loads(arrays.pop(META).tobytes())
        meta, dtypes = header["meta"], header["dtypes"]
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {error}") from error
    expected = {_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(like)}
    if odd := sorted(expected ^ set(arrays)):
        raise CheckpointError(f"{path} belongs to another model or algorithm: it differs in {', '.join(odd[:5])}")

    def restore(place: Any, leaf: Any) -> Any:
        name = _name(place)
        return _restore(path, name, arrays[name], dtypes[name], leaf)

    return jax.tree_util.tree_map_with_path(restore, like), meta


def _read(path: Path) -> dict[str, np.ndarray]:
    stored = np.load(path, allow_pickle=False)
    if isinstance(stored, np.ndarray):
        raise ValueError("it holds a single array")
    with stored:
        if META not in stored.files:
            raise ValueError("it was not written by this library")
        return {name: stored[name] for name in stored.files}


def write_atomically(path: Path, write: Any) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, then rename it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error.strerror or error}; nothing was changed") from error


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "."


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _restore(path: Path, name: str, array: np.ndarray, dtype: str, like: Any) -> Any:
    expected = _plain(like)
    if array.shape != expected.shape or dtype != str(expected.dtype):
        raise CheckpointError(
            f"{path} belongs to another model: {name} is {dtype}{list(array.shape)} there, "
            f"{expected.dtype}{list(expected.shape)} here"
        )
    restored = jnp.asarray(array if array.dtype == expected.dtype else array.view(expected.dtype))
    return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(like)) if _is_key(like) else restored
