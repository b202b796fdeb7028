"""Helpers for error messages: missing packages, and texts of others, which are made printable."""

from typing import Any

JSON = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def missing(package: str, extra: str) -> str:
    """Name a package that is not installed, with the extra that brings it and the command that works.

    The library is on no package index: anything there under its name would be somebody else's.
    """
    return f'{package}, which is not installed: in a clone of the repository, pip install ".[{extra}]"'


def in_a_line(error: Exception, longest: int = 200) -> str:
    """Return the message of another library's error in one line, without a full stop; its type if that is empty."""
    said = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return printable(said, longest).rstrip(".") or type(error).__name__


def printable(text: str, longest: int | None = 200, kept: str = "") -> str:
    """Return the beginning of an untrusted text, or all of it, without characters that a terminal would obey.

    White space is a space, but for the characters in `kept`.
    """
    plain = (" " if one.isspace() and one not in kept else one for one in text[:longest])
    return "".join(one if one.isprintable() or one in kept else "�" for one in plain)


def of_others(value: Any) -> Any:
    """What a file of somebody else's holds, with every text in it, names too, printable."""
    if isinstance(value, str):
        return printable(value, None)
    if isinstance(value, dict):
        return {of_others(name): of_others(content) for name, content in value.items()}
    return [of_others(content) for content in value] if isinstance(value, list) else value


def require_object(value: Any, holds: str) -> None:
    """Raise ValueError unless a value that JSON held is an object, with what it was to hold and what was found."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object with {holds} is expected, {JSON.get(type(value), 'null')} was found")
