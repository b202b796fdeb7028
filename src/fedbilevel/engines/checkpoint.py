"""Save and load trees of arrays: files are written atomically, checked when they are read, and never pickled."""

import json
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel import __version__
from fedbilevel.core.errors import CheckpointError, FedbilevelError
from fedbilevel.core.on_disk import BLOCK, bytes_of, table
from fedbilevel.core.tree import PyTree, is_table
from fedbilevel.core.writing import write_atomically
from fedbilevel.machinery.kept import is_key
from fedbilevel.reading import newer_format, parse_json, require_regular
from fedbilevel.wording import in_a_line, printable

META = "__meta__"
FORMAT = 3  # the format of files; later formats are refused, and earlier formats if the leaves differ
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def save(path: Path, tree: PyTree, meta: dict[str, Any], *, keep: bool = False, outlined: bool = False) -> None:
    """Write the leaves of `tree` and the JSON object `meta` atomically: `path` is always a whole file, old or new.

    Args:
        path: the file.
        tree: a pytree of arrays.
        meta: a JSON object.
        keep: whether the file that was at `path` is kept at `previous(path)`.
        outlined: whether the file also describes how dicts, lists and tuples contain the leaves, as `own_shapes` needs.
            If `tree` has other nodes, the file has no such description.

    Raises:
        CheckpointError: there is no space or no permission, or a leaf has Python objects. The earlier file at `path` is
            unchanged.
    """
    arrays = {_name(place): _on_host(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            text = f"could not write {path}: {name} has Python objects, but only numbers can be saved"
            raise CheckpointError(text, path=path)
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}  # NumPy's format does not support bfloat16
    header = {"fedbilevel": __version__, "format": FORMAT, "meta": meta, "dtypes": dtypes}
    header["outline"] = _outline(tree) if outlined else None
    arrays[META] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    write_atomically(path, lambda file: _archive(file, arrays), previous(path) if keep else None)


def _archive(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as `np.savez` does, piece by piece, so that tables on disk are never in memory as a whole."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                descr = np.lib.format.dtype_to_descr(array.dtype)
                header = {"descr": descr, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(entry, header)
                for piece in bytes_of(array):
                    entry.write(piece)


def previous(path: Path) -> Path:
    """Return the path of the checkpoint before the one at `path`, such as run.previous.npz for run.npz."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def exist(path: Path) -> bool:
    """Return whether there is a checkpoint at `path`, or one at `previous(path)`."""
    return path.exists() or previous(path).exists()


def newest(path: Path) -> Path:
    """Find the newest checkpoint that can be read: `path`, or else the checkpoint before it.

    Raises:
        CheckpointError: neither can be read.
    """
    if not (wrong := trouble(path)):
        return path
    if not previous(path).exists():
        raise wrong
    if also := trouble(previous(path)):
        wrong.append(str(also))
        raise wrong
    return previous(path)


def trouble(path: Path) -> CheckpointError | None:
    """Read a whole checkpoint, and return an error that says what is wrong with it; None if it is intact."""
    try:
        with as_checkpoint_error(path), _opened(path) as archive:
            _header(archive)
            if damaged := archive.testzip():
                raise ValueError(f"the content of {damaged} has changed since it was written")
    except CheckpointError as error:
        return error
    return None


def load(path: Path, like: PyTree, part: bool = False) -> tuple[PyTree, dict[str, Any]]:
    """Read the tree and the JSON object that `save` wrote.

    `like` has the structure, shapes and dtypes of all leaves in the file, or, with `part`, of some of them. A leaf that
    is a table on disk in `like` (core/on_disk.py) is read into a new table.

    Raises:
        CheckpointError: the file is not a checkpoint; it belongs to another model or algorithm, in which case the
            message names the leaf; or a later version wrote it, in a format that this version does not know.
    """
    expected = {_name(place): _plain(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(like)}
    with as_checkpoint_error(path), _opened(path) as archive:
        meta, dtypes, _, earlier = _header(archive)
        stored = {name.removesuffix(".npy") for name in archive.namelist()} - {META}
        if odd := sorted(set(expected) - stored if part else set(expected) ^ stored):
            what = earlier or "belongs to another model or algorithm"
            text = f"{path} {what}: it differs in {', '.join(odd[:5])}"
            raise CheckpointError(text, path=path, differences=dict.fromkeys(odd))
        arrays = {name: _leaf(archive, path, name, dtypes[name], leaf) for name, leaf in expected.items()}

    def restore(place: Any, leaf: Any) -> Any:
        array = arrays[_name(place)]
        if is_table(array):
            return array
        restored = jnp.asarray(array)
        return jax.random.wrap_key_data(restored, impl=jax.random.key_impl(leaf)) if is_key(leaf) else restored

    return jax.tree_util.tree_map_with_path(restore, like), meta


def own_shapes(path: Path) -> PyTree:
    """Return the shapes and dtypes of the floating arrays in a file, as the tree that `load` expects as `like`.

    Raises:
        CheckpointError: the file is not a checkpoint, has no outline, or has float64 arrays while JAX's 64-bit mode is
            off.
    """

    def shape_of(place: Any, _: str) -> jax.ShapeDtypeStruct:
        name = _name(place)
        with archive.open(f"{name}.npy") as file:
            shape, stored = _head(file)
        dtype, size = jnp.dtype(dtypes[name]), math.prod(shape) * stored.itemsize
        if not jnp.issubdtype(dtype, jnp.floating) or size > archive.getinfo(f"{name}.npy").file_size:
            raise ValueError(f"{name} is not an array of floating numbers, or is shorter than its shape")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            text = f'{path} has {dtype}, which JAX only supports after jax.config.update("jax_enable_x64", True)'
            raise CheckpointError(text, path=path)
        return jax.ShapeDtypeStruct(shape, dtype)

    with as_checkpoint_error(path), _opened(path) as archive:
        _, dtypes, outline, _ = _header(archive)
        if outline is None:
            text = f"{path} does not describe the tree of its arrays: it has a model of another library, or an earlier "
            raise CheckpointError(f"{text}version of fedbilevel wrote it. Also pass x0 and y0 of the run", path=path)
        return jax.tree_util.tree_map_with_path(shape_of, _outlined(outline))


def load_meta(path: Path) -> dict[str, Any]:
    """Read the JSON object that was passed to `save`, without the arrays.

    Raises:
        CheckpointError: the file is not a checkpoint.
    """
    with as_checkpoint_error(path), _opened(path) as archive:
        return _header(archive)[0]


@contextmanager
def as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn every exception inside the block into a CheckpointError.

    The file may come from anywhere, and libraries do not document which exceptions they raise for damaged files.
    """
    try:
        yield
    except FedbilevelError:
        raise
    except FileNotFoundError as error:
        text = f"the file {path}, from which a run is to be loaded or resumed, does not exist"
        raise CheckpointError(text, path=path, errno=error.errno) from None
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        text = f"{path} is not a readable checkpoint: {in_a_line(error)}"
        raise CheckpointError(text, path=path, errno=number) from error


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive, and reject compressed entries, so that reading never takes more memory than the file's size."""
    require_regular(path)
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("its arrays are compressed, which this library never does")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its arrays together are longer than the file")
        yield archive


def _header(archive: zipfile.ZipFile) -> tuple[dict[str, Any], dict[str, str], Any, str]:
    """Read the header of a file.

    Returns:
        Four values: `meta` as it was passed to `save`; the dtypes of the arrays; the outline of the tree; and a phrase
        with the version that wrote the file, which is "" unless the file has an earlier format.
    """
    if f"{META}.npy" not in archive.namelist():
        raise ValueError("it was not written by this library")
    with archive.open(f"{META}.npy") as file:
        _head(file)
        header = parse_json(file.read())
    version, format = header.get("fedbilevel"), int(header.get("format", 1))
    if why := newer_format(version, format, FORMAT, __version__):
        raise CheckpointError(f"{archive.filename} {why}", path=archive.filename)
    by = f"was written by fedbilevel {printable(str(version), 20)} in format {format}, but runs need format {FORMAT}"
    return dict(header["meta"]), dict(header["dtypes"]), header.get("outline"), by if format < FORMAT else ""


def _outline(tree: PyTree) -> Any:
    """Describe a tree of dicts, lists and tuples as a JSON value; None if the tree has other nodes."""
    if isinstance(tree, Array | np.ndarray):
        return "array"
    if tree is None:
        return "none"
    kind = type(tree)
    keys = list(tree) if kind is dict else []
    if kind not in (dict, list, tuple) or not all(isinstance(key, str) for key in keys):
        return None
    parts = [_outline(part) for part in (tree.values() if keys else tree)]
    return None if None in parts else [kind.__name__, keys, parts]


def _outlined(outline: Any) -> PyTree:
    """Rebuild the tree that `_outline` described, with "array" in place of each array."""
    if outline in ("array", "none"):
        return outline if outline == "array" else None
    kind, keys, parts = outline
    made = [_outlined(part) for part in parts]
    return dict(zip(keys, made, strict=True)) if kind == "dict" else {"list": list, "tuple": tuple}[kind](made)


def _leaf(archive: zipfile.ZipFile, path: Path, name: str, dtype: str, expected: Any) -> np.ndarray:
    """Read an array; its header is checked first, so that no more memory is allocated than the leaf should take."""
    with archive.open(f"{name}.npy") as file:
        shape, stored = _head(file)
        if shape != expected.shape or dtype != str(expected.dtype):
            there, here = f"{dtype}{list(shape)}", f"{expected.dtype}{list(expected.shape)}"
            text = f"{path} belongs to another model: {name} is {there} there, {here} here"
            raise CheckpointError(text, path=path, differences={name: (there, here)})
        opaque = stored.kind == "V" and stored.itemsize == expected.dtype.itemsize  # as NumPy writes bfloat16
        if stored != expected.dtype and not opaque:
            raise ValueError(f"{name} is stored as {stored}, not as {dtype}")
    with archive.open(f"{name}.npy") as file:
        if is_table(expected):
            _head(file)
            array: np.ndarray = table(shape, stored, _pieces(file, path))
        else:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):  # reading to the end also compares the checksum
            raise ValueError(f"{name} has more bytes than its shape allows")
    if array.dtype == bool and any(np.any(np.frombuffer(piece, np.uint8) > 1) for piece in bytes_of(array)):
        raise ValueError(f"{name} has flags that are neither true nor false")
    return array.view(expected.dtype)


def _pieces(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Read the rest of a file in a checkpoint; errors name the checkpoint, not the folder of the table."""
    with as_checkpoint_error(path):
        yield from iter(partial(file.read, BLOCK), b"")


def _head(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Read shape and dtype from the header of a .npy file, up to its first entry."""
    shape, _, dtype = HEADERS[np.lib.format.read_magic(file)](file)
    return shape, dtype


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "."


def _plain(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _on_host(leaf: Any) -> np.ndarray:
    """Return a leaf as an array of NumPy; a table on disk stays a table, so that `bytes_of` can release its pages."""
    return leaf if is_table(leaf) else np.asarray(_plain(leaf))
