"""What `help()` says of a configuration: the docstring of its class, with an entry for every field.

A field is explained once, in the class that declares it. The classes below it have that text in their own docstrings,
unless they explain the field again, where it means something narrower.
"""

import inspect
import re

SECTION = re.compile(r"^Args:\n((?:    .*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+):.*(?:\n        .*)*", re.MULTILINE)


def entries(docstring: str) -> dict[str, str]:
    """The entries of the section "Args:", indented as they stand there, by the name of the field."""
    section = SECTION.search(docstring)
    return {entry[1]: entry[0] for entry in ENTRY.finditer(section[1])} if section else {}


def with_fields(written: str, cls: type, fields: list[str]) -> str:
    """The docstring as `written` for the class, its section "Args:" made to hold all fields that a base explains."""
    known: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        known |= entries(vars(base).get("__doc__") or "")
    written = inspect.cleandoc(written)
    known |= entries(written)
    shown = "\n".join(known[field] for field in fields if field in known)
    if not shown:
        return written
    if SECTION.search(written):
        return SECTION.sub(lambda found: f"Args:\n{shown}" + "\n" * found[0].endswith("\n"), written)
    return f"{written}\n\nArgs:\n{shown}"
