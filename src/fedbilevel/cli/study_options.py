"""Define the options of `fedbilevel flower new` for a study: an option for each field of `Study`.

Names, types, defaults and descriptions are read from the source text of `Study`, since importing it takes seconds.
`Study` checks the values.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fedbilevel
from fedbilevel.cli import shared
from fedbilevel.core.errors import ConfigurationError, require

SHARED = ("rounds",)  # the fields for which `flower new` has an option even without a study
GROUP = "NAME=A,B,…"


@dataclass(frozen=True)
class StudyField:
    """A field of `Study`, as it was read from the source.

    Args:
        kind: the field's annotation.
        default: the source text of the default; "" if there is none.
    """

    name: str
    kind: str
    default: str
    description: str

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Return whether the field has no default."""
        return not (self.default or self.kind.startswith("Mapping"))

    @property
    def help(self) -> str:
        """Return the description, with the default unless the default is empty."""
        default = self.default.strip("()\"',")
        return self.description.rstrip(".") + f" (default: {default})" * bool(default)


@cache
def study_fields() -> tuple[StudyField, ...]:
    """Read the fields of `Study` from its source."""
    file = Path(fedbilevel.__file__).parent / "estimators" / "study.py"
    source = ast.parse(file.read_text(encoding="utf-8"))
    study = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Study")
    described = re.findall(r"^    (\w+): ((?:.|\n        )*)", inspect.cleandoc(ast.get_docstring(study) or ""), re.M)
    texts = {name: " ".join(text.split()).replace("`", "") for name, text in described}
    found = []
    for node in study.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, plain = node.target.id, not isinstance(node.value, ast.Call | None)
            default = ast.unparse(node.value) if plain and node.value else ""
            found.append(StudyField(name, ast.unparse(node.annotation), default, texts[name]))
    return tuple(found)


def add_study_options(new: argparse.ArgumentParser) -> None:
    """Add an option for each field of `Study`, except those in `SHARED`."""
    added = new.add_argument_group(
        "a study of several sites' tables", "In place of a task; see docs/how-to/study-settings.md."
    )
    for field in study_fields():
        if field.name in SHARED:
            continue
        given: dict[str, Any] = {"help": field.help.replace("%", "%%"), "default": None}
        if field.kind == "bool":
            added.add_argument(field.option, action=argparse.BooleanOptionalAction, **given)
        elif field.kind.startswith("Mapping"):
            added.add_argument(field.option, action="append", metavar=GROUP, **given)
        else:
            several = field.kind.startswith("tuple")
            added.add_argument(field.option, metavar="A,B,…" if several else "VALUE", **given)


def given_options(options: argparse.Namespace) -> list[str]:
    """Return the options of a study that are given on the command line."""
    fields = (field for field in study_fields() if field.name not in SHARED)
    return [field.option for field in fields if getattr(options, field.name) is not None]


def study_table(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a study that the options give. `Study.read` checks them.

    Raises:
        ConfigurationError: an option of a field without a default is missing, or an option --groups has another form
            than NAME=A,B.
    """
    found = {}
    for field in study_fields():
        if (value := getattr(options, field.name)) is not None:
            found[field.name] = _read(field, value)
        elif field.required:
            message = f"a study needs {field.option}: {field.description}"
            raise ConfigurationError(path=field.option, allowed="given", message=message)
    if options.holdout in found.get("sites", ()):
        found["holdout"] = options.holdout  # as a text, even if the site's name is a number
    return found


def _read(field: StudyField, value: Any) -> Any:
    if field.kind.startswith("Mapping"):
        return _groups(field.option, value)
    if field.kind.startswith("tuple"):
        several = shared.names(value)
        return [*map(_number, several)] if "float" in field.kind else several
    return value if field.kind in ("str", "bool") else _number(value)


def _groups(option: str, given: list[str]) -> Mapping[str, list[str]]:
    """Read groups of columns, each given as a text NAME=A,B,…: name of the group -> its columns."""
    groups: dict[str, list[str]] = {}
    for text in given:
        name, equals, columns = text.partition("=")
        fits = bool(name.strip() and equals and shared.names(columns)) and name.strip() not in groups
        require(fits, option, text, f"{GROUP}, each name once")
        groups[name.strip()] = shared.names(columns)
    return groups


def _number(text: Any) -> Any:
    """Convert a text to a number. A text that is not a number is returned unchanged; `Study` then refuses it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
