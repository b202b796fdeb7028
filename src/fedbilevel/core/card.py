"""Show objects in a Python session as a few lines of text, and in a notebook as a table."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedbilevel.core.tree import PyTree

WIDTH = 110  # the largest number of characters of a line


@dataclass(frozen=True, repr=False)
class Card(Mapping[str, str]):
    """Hold a title and a few named lines, as a mapping; `str` gives text, and a notebook shows a table."""

    title: str
    lines: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.lines[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        indent = max(map(len, self.lines), default=0)
        texts = (f"  {name:<{indent}}  {text}" for name, text in self.lines.items())
        return "\n".join(map(shortened, (self.title, *texts)))

    def _repr_html_(self) -> str:
        style = 'style="text-align: left"'
        rows = "".join(
            f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
            for name, text in self.lines.items()
        )
        return f"<table><caption {style}><b>{html.escape(self.title)}</b></caption><tbody>{rows}</tbody></table>"


class Shown(ABC):
    """Show an object as its card, of at most six lines and a line for each own number of clients."""

    @abstractmethod
    def card(self) -> Card:
        """Return the title and the named lines that describe this object, for `repr` and notebooks."""

    def __repr__(self) -> str:
        return repr(self.card())

    def _repr_html_(self) -> str:
        return self.card()._repr_html_()


def shortened(text: str, width: int = WIDTH) -> str:
    """Return a text as one line of at most `width` characters; a longer text ends in "…"."""
    line = " ".join(text.splitlines())
    return line if len(line) <= width else line[: width - 2] + " …"


def listed(parts: Sequence[str], width: int = WIDTH - 30) -> str:
    """Return the first parts, separated by commas, up to `width` characters, and the number of the others."""
    text = ""
    for i, part in enumerate(parts):
        more = f"{text}, {part}" if text else part
        if text and len(more) > width:
            return f"{text}, … ({len(parts) - i} more)"
        text = more
    return text


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns. All lines of `table` must have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join(line.rstrip() for line in lines)


def described(tree: PyTree) -> str:
    """Describe a tree of arrays: its total number of entries, and the shapes and dtypes of its leaves."""
    leaves = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if hasattr(leaf, "dtype")]
    if not leaves:
        return "none"
    total = sum(int(np.prod(leaf.shape)) for _, leaf in leaves)
    return f"{counted(total, 'number')}: {listed([named_shape(path, leaf) for path, leaf in leaves])}"


def named_shape(path: Any, leaf: Any, axes_left_out: int = 0) -> str:
    """Describe a leaf by its path in the tree, its shape and its dtype: "dense.kernel (784, 16) float32".

    The first `axes_left_out` axes of the shape are left out.
    """
    place = jax.tree_util.keystr(path, simple=True, separator=".")
    return f"{place} {tuple(leaf.shape[axes_left_out:])} {leaf.dtype}".strip()


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural if needed: "1 row", "1,200 rows"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def span(values: Any, form: str = ",") -> str:
    """Return the smallest and the largest of some numbers as text: "3", or "3 to 12"."""
    low, high = (format(end(values).item(), form) for end in (np.min, np.max))
    return low if low == high else f"{low} to {high}"
