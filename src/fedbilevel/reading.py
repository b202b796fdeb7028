"""Read untrusted files: only regular files of a bounded length, and only JSON without duplicate keys."""

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

CHUNK = 2**18  # the number of bytes that are read at once
LONGEST = 2**24
"""The default bound on the length of a file, in bytes."""
TOO_DEEP = "lists and objects are nested too deeply"


def read_bytes(path: Path, longest: int = LONGEST) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file is a pipe or a device, which may have no end; or it has more than `longest` bytes; or it
            cannot be read.
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
    """Raise OSError if a path is a pipe or a device, or does not exist.

    Folders need no check, since opening a folder always raises OSError.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, and not a regular file", str(path))


def read_json(path: Path, kinds: Kinds | None = None) -> Any:
    """Return the value in a JSON file, with all texts made printable.

    Raises:
        OSError: the file is not regular, is too long, or cannot be read.
        ValueError: the content is not JSON, or not of the expected kinds; see `parse_printable`.
    """
    return parse_printable(read_bytes(path), kinds)


def parse_printable(text: str | bytes, kinds: Kinds | None = None) -> Any:
    """Return the value of a JSON text, with all texts in it made printable.

    Args:
        text: the JSON text.
        kinds: functions that check the values of a JSON object, by name. The object need not have all names. None: the
            value may be any JSON.

    Raises:
        ValueError: the text is not JSON without duplicate keys, is nested too deeply, or a value has a wrong type.
    """
    try:
        value = of_others(parse_json(text))
    except RecursionError:  # `of_others` allows fewer levels than the parser
        raise ValueError(TOO_DEEP) from None
    if kinds is not None:
        require_object(value, ", ".join(kinds))
        if wrong := [name for name, fits in kinds.items() if name in value and not fits(value[name])]:
            raise ValueError(f"{wrong[0]} is {printable(repr(value[wrong[0]]))}")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or has an object with a duplicate key, which parsers
            treat differently.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {printable(name)!r} is there {'twice' if times == 2 else f'{times} times'}")
    return content


def newer_format(version: Any, format: int, known: int, here: str) -> str:
    """Return the message for a file whose format is too new for this version.

    The message says which version wrote the file. It is "" if this version can read the format.

    Args:
        version: the version that wrote the file.
        format: the number of the file's format.
        known: the number of the newest format that this version reads.
        here: this version.
    """
    of = f"fedbilevel {printable(str(version), 20)}"
    return f"was written by {of}, in a format that fedbilevel {here} does not read: update it" if format > known else ""
