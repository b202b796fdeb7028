"""Words for messages: about a package that is not installed, and of others, libraries and strangers, who are quoted in
one line that is not long and commands no terminal.
"""

from typing import Any

JSON = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false"}


def missing(package: str, extra: str) -> str:
    """Words for a package that is not installed: the extra that brings it, and the command that works.

    The library is on no package index: anything there under its name would be somebody else's.
    """
    return f'{package}, which is not installed: in a clone of the repository, pip install ".[{extra}]"'


def in_a_line(error: Exception, longest: int = 200) -> str:
    """What another library's error says, in one line without a full stop; its type where it says nothing."""
    said = " ".join((getattr(error, "strerror", None) or str(error)).split())
    return printable(said, longest).rstrip(".") or type(error).__name__


def printable(text: str, longest: int = 200) -> str:
    """The beginning of a stranger's text, such that it commands no terminal."""
    return "".join(character if character.isprintable() else "�" for character in text[:longest])


def require_object(value: Any, holds: str) -> None:
    """Raise ValueError unless a value that JSON held is an object, with what it was to hold and what was found."""
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object with {holds} is expected, {JSON.get(type(value), 'null')} was found")
