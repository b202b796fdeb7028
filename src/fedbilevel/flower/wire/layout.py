"""Trees of arrays as plain bytes, with the layout that both sides have to agree on. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.core.tree import PyTree, nbytes

LONGEST_REFUSAL = 1000  # characters


class Refusal(FedbilevelError):
    """A message that must not count; the text says why, without any value of the data.

    Parts of it may be the other side's words: it is one line, not a long one, and commands no terminal.
    """

    def __init__(self, text: str) -> None:
        line = " ".join(text[:LONGEST_REFUSAL].split())
        super().__init__("".join(character if character.isprintable() else "�" for character in line))


def layout(tree: PyTree) -> list[str]:
    """The path, dtype and shape of each leaf, one line each; the receiver of bytes must have the same."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path) or 'value'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]


def shapes(tree: PyTree) -> PyTree:
    """The tree with every array replaced by its shape and dtype (and whether that is weak, as a Python number's)."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(one, tree)


def to_bytes(tree: PyTree) -> bytes:
    """All leaves one after the other, little-endian, in the order of `layout`."""
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Undo `to_bytes`; `like` has the shapes and dtypes. The arrays are read-only views of `data`.

    Raises:
        Refusal: another number of bytes, or flags that are neither 0 nor 1.
    """
    if len(data) != nbytes(like):
        raise Refusal(f"{len(data)} bytes came where {nbytes(like)} were expected")
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        part = memoryview(data)[start : start + nbytes(leaf)]
        if leaf.dtype == bool and np.any(np.frombuffer(part, np.uint8) > 1):
            raise Refusal("a flag came that is neither true nor false")
        leaves.append(np.frombuffer(part, leaf.dtype).reshape(leaf.shape))
        start += len(part)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def require_layout(what: str, got: list[str], expected: list[str]) -> None:
    """Refuse a layout that is not the expected one; the refusal names the first leaf that differs."""
    if got == expected:
        return
    for mine, theirs in zip(expected, got, strict=False):
        if mine != theirs:
            raise Refusal(f"{what}: {theirs} came where {mine} was expected")
    raise Refusal(f"{what}: {len(got)} leaves came where {len(expected)} were expected")


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
