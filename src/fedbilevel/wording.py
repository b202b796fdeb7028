"""Helpers for error messages: missing packages, and text of others: printable, and read from JSON with its types."""

import json
from collections.abc import Callable, Mapping
from typing import Any

JSON = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def missing(package: str, extra: str) -> str:
    """Words for a package that is not installed: the extra that brings it, and the command that works.

    The library is on no package index: anything there under its name would be somebody else's.
    """
    return f'{package}, which is not installed: in a clone of the repository, pip install ".[{extra}]"'


def in_a_line(error: Exception, longest: int = 200) -> str:
    """The message of another library's error, in one line without a full stop; its type if the message is empty."""
    said = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return printable(said, longest).rstrip(".") or type(error).__name__


def printable(text: str, longest: int | None = 200, kept: str = "") -> str:
    """The beginning of an untrusted text, or all of it, without characters that a terminal would obey; white space is
    a space, but for the characters in `kept`."""
    plain = (" " if one.isspace() and one not in kept else one for one in text[:longest])
    return "".join(one if one.isprintable() or one in kept else "�" for one in plain)


def of_others(value: Any) -> Any:
    """What a file of somebody else's holds, with every text in it, names too, printable."""
    if isinstance(value, str):
        return printable(value, None)
    if isinstance(value, dict):
        return {of_others(name): of_others(content) for name, content in value.items()}
    return [of_others(content) for content in value] if isinstance(value, list) else value


def read_json(text: str, kinds: Mapping[str, Callable[[Any], bool]] | None = None) -> Any:
    """Read JSON that anybody may have written, as `of_others`.

    Args:
        kinds: of an object, name -> whether a value there is of the right type; it may lack the name. None: any JSON.

    Raises:
        ValueError: it is no JSON, or a value is of another type.
    """
    try:
        found = of_others(json.loads(text))
    except RecursionError:
        raise ValueError("lists and objects are in each other to a depth that no file of ours has") from None
    if kinds is not None:
        require_object(found, ", ".join(kinds))
        if wrong := [name for name, fits in kinds.items() if name in found and not fits(found[name])]:
            raise ValueError(f"{wrong[0]} is {printable(repr(found[wrong[0]]))}")
    return found


def require_object(value: Any, holds: str) -> None:
    """Raise ValueError unless a value that JSON held is an object, with what it was to hold and what was found."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object with {holds} is expected, {JSON.get(type(value), 'null')} was found")
