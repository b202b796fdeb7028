"""Write TOML documents, which the standard library cannot do, and read documents and single values.

TOML has no null. Therefore None is written as "none", and for a field that may be None, "none" is read as None.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedbilevel import __version__
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.reading import newer_format, read_bytes
from fedbilevel.wording import in_a_line, printable

DEPTH = 10  # the largest depth of nested lists and tables; no field needs more than 3
FORMAT = 1  # the format of specs; later formats may have other sections, and are rejected
STAMP = {"fedbilevel": __version__, "format": FORMAT}
"""The entries that come before the sections of a spec."""
LONGEST = 2**22  # the largest number of bytes of a file
NAMES = 1_000  # the largest number of names in a table
SHOWN = 200  # the number of characters of a wrong text that an error shows
DOTTED = re.compile(r"""(?<![\w"'-])(?:["'\w-]++[ \t]*+\.[ \t]*+){50}""")
WORD = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")


def dumps(tables: Mapping[str, Any], comment: str = "") -> str:
    """Return a TOML document with a [section] for each table. Values that are not tables come first.

    A table inside a section is written inline. If it has a "name" and other entries, it becomes a section
    [section.field] after the fields of the section that contains it.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{_key(name)} = {value(one)}" for name, one in tables.items() if not isinstance(one, Mapping)]
    for section, fields in tables.items():
        lines += _section(_key(section), fields) if isinstance(fields, Mapping) else []
    return "\n".join(lines).lstrip("\n") + "\n"


def _section(path: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table and of the named tables inside it, with an empty line before each."""
    nested = {name: content for name, content in fields.items() if _is_named(content)}
    lines = ["", f"[{path}]", *(f"{_key(name)} = {value(fields[name])}" for name in fields if name not in nested)]
    for name, content in nested.items():
        lines += _section(f"{path}.{_key(name)}", content)
    return lines


def _is_named(content: Any) -> bool:
    return isinstance(content, Mapping) and "name" in content and len(content) > 1


def value(content: Any) -> str:
    """Return a value in TOML's notation."""
    if content is None:
        return '"none"'
    if isinstance(content, bool):
        return "true" if content else "false"
    if isinstance(content, int | float):
        return repr(content)  # Python and TOML have the same spelling of inf and nan
    if isinstance(content, str):
        return json.dumps(content, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(content, Mapping):
        inside = ", ".join(f"{_key(name)} = {value(item)}" for name, item in content.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(content, list | tuple):
        return f"[{', '.join(value(item) for item in content)}]"
    raise ConfigurationError(f"a spec cannot contain {content!r}, but only numbers, text, lists and tables")


def parse_value(text: str) -> Any:
    """Read a TOML value, such as 3, true, [64, 32] or {name = "adam"}. A bare word such as mnist is read as text."""
    try:
        document = _loads(f"value = {text}")
    except (ValueError, RecursionError):
        if text and set(text) <= WORD and not text.isdecimal():
            return text
        message = f"{text[:SHOWN]!r} is not a TOML value (a list is [1, 2]; quote text that is not a single word)"
        raise ConfigurationError(path="value", got=text[:SHOWN], allowed="a TOML value", message=message) from None
    if list(document) != ["value"]:
        message = f"{text[:SHOWN]!r} is not a single TOML value"
        raise ConfigurationError(path="value", got=text[:SHOWN], allowed="a TOML value", message=message)
    _check(text[:SHOWN], document["value"])
    return document["value"]


def _loads(text: str) -> dict[str, Any]:
    """Read a TOML document. A key of 50 parts or more is rejected, since tomllib is too slow for very long keys."""
    if DOTTED.search(text):
        raise ValueError("a key has 50 parts or more")
    return tomllib.loads(text)


def read(path: Path) -> dict[str, Any]:
    """Read a spec in TOML. Errors name the file and, if the notation is wrong, the line.

    Raises:
        ConfigurationError: the file is not TOML, or has a later format; the message names the version that wrote it.
    """
    try:
        document = _loads(read_bytes(path, LONGEST).decode())
    except FileNotFoundError:
        raise ConfigurationError(f"there is no file {path}") from None
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {in_a_line(error)}") from error
    format = document.get("format", FORMAT)
    version = document.get("fedbilevel", "")
    require(type(format) is int and format > 0, f"{path}: format", format, "a whole number from 1 on")
    require(isinstance(version, str), f"{path}: fedbilevel", version, "the text of a version, such as '0.2.0'")
    if why := newer_format(document.get("fedbilevel"), format, FORMAT, __version__):
        raise ConfigurationError(f"{path} {why}")
    for name, content in document.items():
        _check(f"{path}: {name[:SHOWN]!r}", content)
    return document


def other_version(document: Mapping[str, Any]) -> str:
    """Return a text that says which version wrote a spec; "" if it was this version, or is not known."""
    version = document.get("fedbilevel", __version__)
    there = f"it was written by fedbilevel {printable(str(version), 20)}"
    return "" if version == __version__ else f"{there}, and this is {__version__}"


def _check(where: str, content: Any, depth: int = 0) -> None:
    """Reject content that no field can have: dates, integers of more than 64 bits, very deep or large tables."""
    if isinstance(content, Mapping | list):
        if depth == DEPTH:
            raise ConfigurationError(f"{where} has lists and tables nested to a depth of more than {DEPTH}")
        if isinstance(content, Mapping) and len(content) > NAMES:
            raise ConfigurationError(f"{where} has a table of {len(content):,} names, more than {NAMES:,}")
        for item in content.values() if isinstance(content, Mapping) else content:
            _check(where, item, depth + 1)
    elif isinstance(content, int):
        if not -(2**63) <= content < 2**63:
            raise ConfigurationError(f"{where} has an integer of more than 64 bits")
    elif not isinstance(content, str | float):
        raise ConfigurationError(
            f"{where} has {str(content)!r}, a date or a time, but only numbers, text, lists and tables are allowed"
        )


def _key(name: str) -> str:
    return name if name and set(name) <= WORD - {".", "/"} else json.dumps(name)
