"""Filling in templates: every text is escaped, and the page may load nothing and run no script but ours."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources
from typing import Any

from markupsafe import Markup
from rich.table import Table as RichTable
from rich.text import Text

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.report.chart import COLOURS, LEGEND_DASHES
from fedbilevel.wording import missing

FILE = "report.html"
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{}'; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class PageTable:
    """A table of a page; the first cell of each row is its heading.

    Attributes:
        numeric: of each column whether it holds numbers.
    """

    caption: str
    columns: Sequence[str]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def table(caption: str, columns: Mapping[str, Sequence[str]], *, texts: Sequence[str]) -> PageTable:
    """A table from the cells of its columns; `texts`: the columns that hold no numbers."""
    rows = list(zip(*columns.values(), strict=True))
    return PageTable(caption, list(columns), [name not in texts for name in columns], rows)


def pairs(caption: str, content: Mapping[str, object]) -> PageTable:
    """A table of names and values."""
    return PageTable(caption, ["", ""], [False, False], [(name, str(value)) for name, value in content.items()])


def printed(made: RichTable, caption: str = "") -> PageTable:
    """A table that the command line prints."""
    heads = [Text.from_markup(str(column.header)).plain for column in made.columns]
    cells = [[str(cell) for cell in column.cells] for column in made.columns]
    notes = str(made.caption).splitlines() if made.caption else []
    numeric = [column.justify == "right" for column in made.columns]
    return PageTable(caption or str(made.title), heads, numeric, list(zip(*cells, strict=True)), notes)


def render(template: str, **content: Any) -> str:
    """The page that a template makes of some content."""
    style, script = _source("style.css"), _source("script.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template(template)
        .render(
            **content,
            style=Markup(style),
            script=Markup(script),
            policy=Markup(POLICY.format(digest)),
            version=metadata.version("fedbilevel"),
        )
    )


def _source(name: str) -> str:
    return (resources.files("fedbilevel.report") / "templates" / name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigurationError(f"reports need {missing('jinja2', 'cli')}") from None
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("fedbilevel.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    made.globals |= {"dashes": LEGEND_DASHES, "colours": COLOURS}
    return made


def _visible(value: Any) -> Any:
    """A stranger's text without characters that cannot be seen, such as those that turn the direction of writing."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(one if one.isprintable() or one in "\n\t" else "�" for one in value)
