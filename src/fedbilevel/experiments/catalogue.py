"""What there is to run: facts about algorithms and tasks, from their docstrings and signatures, and their tables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import unknown
from fedbilevel.experiments import toml
from fedbilevel.experiments.fields import of_class, of_function
from fedbilevel.experiments.loader import algorithm_class, label
from fedbilevel.experiments.tables import folding, titled
from fedbilevel.tasks import TASKS

MISSING = "–"
EMPTY = inspect.Parameter.empty  # the default of a field that has to be given
T = TypeVar("T")


@dataclass(frozen=True)
class AlgorithmFacts:
    """One line of `fedbilevel algorithms`."""

    name: str
    title: str
    paper: str
    exchanges: str
    needs: str
    good_for: str
    client_state: str
    cost: str
    submodels: str


@dataclass(frozen=True)
class TaskFacts:
    """One entry of `fedbilevel tasks`."""

    name: str
    title: str
    fields: dict[str, Any]  # defaults


def algorithms(name: str | None = None) -> list[AlgorithmFacts]:
    """Every algorithm by name, or the one of that name. The facts stand under fixed headings ("Needs: …") in the
    docstring of its class or, for what classes of a file have in common, in that of its module."""
    return [_algorithm(name, cls) for name, cls in _classes(name)]


def _classes(name: str | None) -> list[tuple[str, Any]]:
    """All algorithms of the library by name, or the one of that name, which may be a user's own."""
    return sorted(ALGORITHMS.items()) if name is None else [(label(name), algorithm_class(name))]


def _chosen(kind: str, known: Mapping[str, T], name: str | None) -> list[tuple[str, T]]:
    """All entries of `known` by name, or the one entry that has the name."""
    if name is None:
        return sorted(known.items(), key=lambda item: item[0])
    if name not in known:
        raise unknown(kind, name, known)
    return [(name, known[name])]


def _algorithm(name: str, cls: Any) -> AlgorithmFacts:
    texts = [inspect.getdoc(cls) or "", inspect.getdoc(inspect.getmodule(cls)) or ""]

    def fact(find: Callable[[str], str]) -> str:
        return next(filter(None, map(find, texts)), MISSING)

    return AlgorithmFacts(
        name=name,
        title=_sentence(texts[0]),
        paper=fact(_paper),
        exchanges=fact(lambda text: _entry(text, "Exchanges per round")),
        needs=fact(lambda text: _entry(text, "Needs")),
        good_for=fact(lambda text: _entry(text, "Good for")),
        client_state=fact(lambda text: _entry(text, "Client state")),
        cost=fact(lambda text: _entry(text, "Cost per local step")),
        submodels=_trains_submodels(cls),
    )


def _trains_submodels(cls: Any) -> str:
    if any(field.default is EMPTY for field in of_class(cls).values()):
        return MISSING
    return "no" if cls().submodels is None else "yes"


def algorithm_fields(name: str | None = None) -> list[tuple[list[str], dict[str, str]]]:
    """(algorithms, their fields with defaults in TOML's notation); algorithms that agree in all of them together."""
    found: list[tuple[list[str], dict[str, str]]] = []
    for algorithm, cls in _classes(name):
        known = of_class(cls).items()
        given = {key: one.accept("algorithm", one.default) for key, one in known if one.default is not EMPTY}
        fields = _flat(given)
        alike = next((names for names, others in found if others == fields), None)
        if alike is None:
            found.append(([algorithm], fields))
        else:
            alike.append(algorithm)
    return found


def parts(name: str | None = None) -> dict[str, dict[str, dict[str, str]]]:
    """{field: {kind: that kind's fields with defaults}} for every field of the algorithms, or of one, that is a part.

    A field of a part is named by its dotted path, and defaults are in TOML's notation.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for _, cls in _classes(name):
        _collect_parts(cls, "", found)
    return found


def _collect_parts(cls: Any, within: str, found: dict[str, dict[str, dict[str, str]]]) -> None:
    for name, field in of_class(cls).items():
        for kind, part in field.parts.items():
            known = of_class(part).items()
            given = {key: one.accept(kind, one.default) for key, one in known if one.default is not EMPTY}
            found.setdefault(f"{within}{name}", {})[kind] = _flat(given)
            _collect_parts(part, f"{within}{name}.", found)


def _flat(fields: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """Fields by their dotted paths, in TOML's notation; of a table with a name that name, then its own fields."""
    out: dict[str, str] = {}
    for key, value in fields.items():
        if isinstance(value, Mapping) and "name" in value:
            out[f"{within}{key}"] = str(value["name"])
            out |= _flat({name: item for name, item in value.items() if name != "name"}, f"{within}{key}.")
        else:
            out[f"{within}{key}"] = toml.value(value)
    return out


def tasks(name: str | None = None) -> list[TaskFacts]:
    """Every task by name, or the one of that name."""
    found = []
    for task, function in _chosen("task", TASKS, name):
        module = inspect.getmodule(function)
        whole = module is not None and module.__name__.rpartition(".")[2] == task
        title = _line(inspect.getdoc(module if whole else function) or "")
        found.append(TaskFacts(task, title, {f.name: f.default for f in of_function(function).values()}))
    return found


def _entry(text: str, heading: str) -> str:
    """The text after "heading:" up to the end of the sentence, on one line; "" where the heading is missing."""
    words = r"\s+".join(map(re.escape, heading.split()))
    match = re.search(rf"\b{words}:\s*(.+?)(?:\.\s|\.$|\n\n|$)", text, re.DOTALL)
    return _joined(match.group(1)) if match else ""


def _paper(text: str) -> str:
    """First author, year and arXiv number or venue, from the paragraph that quotes the paper's title."""
    for paragraph in text.split("\n\n"):
        match = re.search(r'"(?P<title>.+?)[.,]?"', paragraph, re.DOTALL)
        year = re.search(r"\b(19|20)\d\d\b", paragraph)
        if match and year:
            authors = _joined(paragraph[: match.start()]).rstrip(". ,")
            surname = authors.split(",")[0].split(" and ")[0].split()[-1] if authors else ""
            arxiv = re.search(r"arXiv:\s*(\S+?)[.,;)]?(?:\s|$)", paragraph)
            where = f"arXiv:{arxiv.group(1)}" if arxiv else ""
            several = " et al." if "," in authors or " and " in authors else ""
            return ", ".join(part for part in (f"{surname}{several} {year.group()}", where) if part)
    return ""


def _sentence(text: str) -> str:
    return _joined(re.split(r"\.\s|\.$", text, maxsplit=1)[0])


def _line(text: str) -> str:
    return text.partition("\n")[0].rstrip(".")


def _joined(text: str) -> str:
    return " ".join(text.split())


HEADINGS = {
    "paper": "paper",
    "exchanges": "exchanges per round",
    "needs": "needs",
    "good_for": "good for",
    "client_state": "client state",
    "cost": "cost per local step",
    "submodels": "submodels",
}
SHARES = {"exchanges": 3, "needs": 4, "good_for": 4, "client_state": 2, "cost": 4}  # of the width that is left
WIDTHS = {"paper": 20, "submodels": 9}  # "Author et al. 2023," and the number of the paper below it; the heading
NARROW_BELOW, STACKED_BELOW, ALL_FROM = 72, 110, 150  # columns of the terminal


def algorithms_table(width: int, name: str | None = None) -> Table:
    """Every algorithm, or the one of that name, and what its docstring says of it; the narrower the terminal, the less
    stands side by side."""
    found = algorithms(name)
    if width < STACKED_BELOW or len(found) == 1:
        return _stacked("algorithms", [(one.name, _lines(one, width)) for one in found], width)
    return _facts_in_columns(found, width >= ALL_FROM)


def _facts_in_columns(algorithms: Sequence[AlgorithmFacts], everything: bool) -> Table:
    table = titled("algorithms", frame=box.SIMPLE)
    table.show_lines = True
    table.add_column("name", no_wrap=True, style="bold")
    shown = [name for name in HEADINGS if everything or name not in ("client_state", "cost", "submodels")]
    for name in shown:
        table.add_column(HEADINGS[name], ratio=SHARES.get(name), width=WIDTHS.get(name), overflow="fold")
    for one in algorithms:
        table.add_row(one.name, *(folding(getattr(one, name)) for name in shown))
    table.expand = True
    return table


def _lines(one: AlgorithmFacts, width: int) -> Group:
    if width < NARROW_BELOW:
        facts = (Text.assemble((f"{heading}: ", "dim"), getattr(one, name)) for name, heading in HEADINGS.items())
        return Group(folding(one.title), *facts)
    beside = Table.grid(padding=(0, 1))
    beside.add_column(style="dim", width=max(map(len, HEADINGS.values())))
    beside.add_column()
    for name, heading in HEADINGS.items():
        beside.add_row(heading, folding(getattr(one, name)))
    return Group(folding(one.title), beside)


def algorithm_fields_table(width: int, name: str | None = None) -> Table:
    """The fields of the algorithms, or of one, and their defaults, in TOML's notation; those with the same together."""
    rows = []
    for names, fields in algorithm_fields(name):
        items = (f"{field}={default}" for field, default in fields.items())
        rows.append(("\n".join(names), _side_by_side(items)))
    return _stacked("fields of the algorithms and their defaults", rows, width)


def parts_table(width: int, name: str | None = None) -> Table | None:
    """The kinds that each field of an algorithm allows, with the fields of each kind and their defaults.

    The table is about all algorithms, or the one of that name; None where no field is a part.
    """
    rows = []
    for path, kinds in parts(name).items():
        lines = [
            " ".join([kind, *(f"{field}={text}" for field, text in fields.items())]) for kind, fields in kinds.items()
        ]
        rows.append((path, Group(*(folding(line, "dim") for line in lines))))
    return _stacked("parts: what these fields may be", rows, width) if rows else None


def tasks_table(width: int, name: str | None = None) -> Table:
    """Every task, or the one of that name, with its fields and their defaults, in TOML's notation."""
    rows = []
    for one in tasks(name):
        fields = (f"{field}={toml.value(default).strip(chr(34))}" for field, default in one.fields.items())
        rows.append((one.name, Group(folding(one.title), _side_by_side(fields))))
    return _stacked("tasks, their fields and defaults", rows, width)


def _stacked(title: str, rows: Iterable[tuple[str, RenderableType]], width: int) -> Table:
    """A table of names with their descriptions beside them, or below them where the terminal is narrow."""
    table = titled(title, frame=box.SIMPLE, header=False)
    table.show_lines = True
    if width < NARROW_BELOW:
        table.add_column()
        for name, description in rows:
            table.add_row(Group(folding(name, "bold"), description))
        return table
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, description in rows:
        table.add_row(name, description)
    return table


def _side_by_side(items: Iterable[str]) -> Columns:
    """Items in columns, none broken over two lines where it fits one."""
    return Columns([folding(item, "dim") for item in items], padding=(0, 2))
