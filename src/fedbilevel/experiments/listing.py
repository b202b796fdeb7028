"""What there is to run, as tables for the terminal: what `fedbilevel algorithms` and `fedbilevel tasks` print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedbilevel.experiments.catalogue import AlgorithmFacts, Kinds, algorithms, is_own, tasks
from fedbilevel.experiments.layout import folding, titled

HEADINGS = {
    "paper": "paper",
    "exchanges": "exchanges per round",
    "needs": "needs",
    "good_for": "good for",
    "client_state": "client state",
    "cost": "cost per local step",
    "up": "vectors up per client",
    "hvps": "hvps per client",
    "bias": "bias",
    "submodels": "submodels",
}
IN_COLUMNS = ("paper", "exchanges", "needs", "good_for")
SHARES = {"exchanges": 3, "needs": 4, "good_for": 4, "client_state": 2, "cost": 4}  # of the width that is left
WIDTHS = {"paper": 20, "submodels": 9}  # "Author et al. 2023," and the number of the paper below it; the heading
NARROW_BELOW, STACKED_BELOW, ALL_FROM = 72, 110, 150  # columns of the terminal


def algorithms_table(width: int, name: str | None = None) -> Table:
    """Every algorithm, or the one of that name, and what its docstring says of it; the narrower the terminal, the less
    stands side by side."""
    found = _algorithms(name)
    if width < STACKED_BELOW or len(found) == 1:
        return _stacked("algorithms", [(one.name, _lines(one, width)) for one in found], width)
    return _facts_in_columns(found, width >= ALL_FROM)


def _algorithms(name: str | None) -> list[AlgorithmFacts]:
    """Every algorithm of the library, or the one of that name; the facts about a user's own are read from its code."""
    if name is None or not is_own(name):
        return algorithms(name)
    from fedbilevel.experiments import facts

    return [facts.algorithm(name)]


def _facts_in_columns(algorithms: Sequence[AlgorithmFacts], everything: bool) -> Table:
    table = titled("algorithms", frame=box.SIMPLE)
    table.show_lines = True
    table.add_column("name", no_wrap=True, style="bold")
    shown = [*IN_COLUMNS, *(("client_state", "cost", "submodels") if everything else ())]
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
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in _algorithms(name):
        items = tuple(f"{field}={default}" for field, default in one.fields.items())
        alike.setdefault(items, []).append(one.name)
    rows = [("\n".join(names), _side_by_side(items)) for items, names in alike.items()]
    return _stacked("fields of the algorithms and their defaults", rows, width)


def parts_table(width: int, name: str | None = None) -> Table | None:
    """The kinds that each field of an algorithm allows, with the fields of each kind and their defaults.

    The table is about all algorithms, or the one of that name; None where no field is a part.
    """
    allowed: dict[str, Kinds] = {}
    for one in _algorithms(name):
        for path, kinds in one.parts.items():
            allowed.setdefault(path, {}).update(kinds)
    rows = []
    for path, kinds in allowed.items():
        lines = [
            " ".join([kind, *(f"{field}={text}" for field, text in fields.items())]) for kind, fields in kinds.items()
        ]
        rows.append((path, Group(*(folding(line, "dim") for line in lines))))
    return _stacked("parts: what these fields may be", rows, width) if rows else None


def tasks_table(width: int, name: str | None = None) -> Table:
    """Every task, or the one of that name, with its fields and their defaults, in TOML's notation."""
    rows = []
    for one in tasks(name):
        fields = (f"{field}={default}" for field, default in one.fields.items())
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
    return Columns([folding(item, "dim") for item in items], padding=(0, 2))
