"""Find the entry of the API reference for a name in code, such as `fb.solve(…)`, `parts.TopK` or `Clients.split`."""

import re
from typing import NamedTuple

PAGES = "docs/reference/api"
ROW = re.compile(r"^\| \[`([\w.]+)`\]\(\w+\.md\) \| (.*) \|$", re.MULTILINE)
ENTRY = re.compile(r"\[(\w+)\]\((\w+)\.md#(\w+)\)")
CODE = re.compile(r"([\w.]+)(\(.*\))?", re.DOTALL)


class Entry(NamedTuple):
    """A page of the API reference, without its suffix, and the anchor of a heading on it."""

    page: str
    anchor: str


def entries(index: str) -> dict[str, Entry]:
    """Return the entry of every name, such as fedbilevel.parts.TopK, from the text of the reference's first page.

    A class can also be found by its name alone. If several modules have it, the entry is that of the first one.
    """
    found: dict[str, Entry] = {}
    for module, names in ROW.findall(index):
        for name, page, anchor in ENTRY.findall(names):
            entry = found[f"{module}.{name}"] = Entry(f"{PAGES}/{page}", anchor)
            if name[0].isupper():
                found.setdefault(name, entry)
    return found


def entry_of(code: str, names: dict[str, Entry]) -> Entry | None:
    """Return the entry for a piece of code that is a name or a call; None if there is none.

    The entry is that of the longest beginning of the name that is a public name.
    """
    if not (match := CODE.fullmatch(code)):
        return None
    parts = re.sub(r"^(fb|fedbilevel)\.", "", match[1]).split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if entry := names.get(f"fedbilevel.{name}") or names.get(name):
            return entry
    return None
