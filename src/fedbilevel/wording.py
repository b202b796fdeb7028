"""Helpers for error messages: missing packages, and untrusted text shortened to one printable line."""

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


def printable(text: str, longest: int = 200) -> str:
    """The beginning of an untrusted text, without characters that a terminal would obey."""
    return "".join(character if character.isprintable() else "�" for character in text[:longest])


def require_object(value: Any, holds: str) -> None:
    """Raise ValueError unless a value that JSON held is an object, with what it was to hold and what was found."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object with {holds} is expected, {JSON.get(type(value), 'null')} was found")
