"""Files that anyone may have written: regular ones, of a bounded length, and JSON in which no key is there twice."""

from __future__ import annotations

import errno
import json
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedbilevel.wording import of_others, printable, require_object

Kinds = Mapping[str, Callable[[Any], bool]]

CHUNK = 2**18  # bytes that are read at once
LONGEST = 2**24
"""Bytes of a file at most, where no other bound is given."""


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it is a pipe or a device, which may have no end, or longer than `longest` bytes; or it cannot be read.
    """
    require_regular(path)
    content = bytearray()
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            content += part
            if len(content) > longest:
                raise OSError(errno.EFBIG, f"it has more than {longest:,} bytes", str(path))
    return bytes(content)


def require_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, and where there is nothing; a folder is refused where it is opened."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, and not a regular file", str(path))


def read_json(path: Path, kinds: Kinds | None = None) -> Any:
    """Return the value in a file of JSON; raises OSError as `read_bytes`, ValueError as `parse_printable`."""
    return parse_printable(read_bytes(path), kinds)


def parse_printable(text: str | bytes, kinds: Kinds | None = None) -> Any:
    """Return the value in a text of JSON, every text in it made printable.

    Args:
        text: the JSON.
        kinds: of an object, name -> whether a value there is of the right type; it may lack the name. None: any JSON.

    Raises:
        ValueError: as `parse_json`, or a value is of another type.
    """
    found = of_others(parse_json(text))
    if kinds is not None:
        require_object(found, ", ".join(kinds))
        if wrong := [name for name, fits in kinds.items() if name in found and not fits(found[name])]:
            raise ValueError(f"{wrong[0]} is {printable(repr(found[wrong[0]]))}")
    return found


def parse_json(text: str | bytes) -> Any:
    """Return the value in a text of JSON.

    Raises:
        ValueError: it is no JSON, or nested too deeply, or an object has a key twice, of which readers would take the
            one or the other.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("lists and objects are in each other to a depth that no file of ours has") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {printable(name)!r} is there {'twice' if times == 2 else f'{times} times'}")
    return found


def newer_format(version: Any, format: int, known: int, here: str) -> str:
    """Say that a file has a later format than is known `here`, and which version wrote it; "" where it has not."""
    of = f"fedbilevel {printable(str(version), 20)}"
    return f"was written by {of}, in a format that fedbilevel {here} does not read: update it" if format > known else ""
