"""What there is to run, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.columns import Columns
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedbilevel.experiments import catalogue, toml
from fedbilevel.experiments.catalogue import AlgorithmFacts

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
STACKED_BELOW, ALL_FROM = 110, 150  # columns of the terminal


def algorithms_table(width: int) -> Table:
    """Every algorithm and what its docstring says of it; the narrower the terminal, the less stands side by side."""
    return _stacked_facts() if width < STACKED_BELOW else _facts_in_columns(width >= ALL_FROM)


def _facts_in_columns(everything: bool) -> Table:
    table = _table("algorithms")
    table.add_column("name", no_wrap=True, style="bold")
    shown = [name for name in HEADINGS if everything or name not in ("client_state", "cost", "submodels")]
    for name in shown:
        table.add_column(HEADINGS[name], ratio=SHARES.get(name), width=WIDTHS.get(name), overflow="fold")
    for one in catalogue.algorithms():
        table.add_row(one.name, *(escape(getattr(one, name)) for name in shown))
    table.expand = True
    return table


def _stacked_facts() -> Table:
    table = _table("algorithms")
    table.show_header = False
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for one in catalogue.algorithms():
        table.add_row(one.name, _lines(one))
    return table


def _lines(one: AlgorithmFacts) -> Group:
    facts = Table.grid(padding=(0, 1))
    facts.add_column(style="dim", width=max(map(len, HEADINGS.values())))
    facts.add_column()
    for name, heading in HEADINGS.items():
        facts.add_row(heading, escape(getattr(one, name)))
    return Group(Text(one.title), facts)


def algorithm_fields_table() -> Table:
    """The fields of the algorithms and their defaults, in TOML's notation; algorithms with the same ones together."""
    table = _table("fields of the algorithms and their defaults")
    table.show_header = False
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for names, fields in catalogue.algorithm_fields():
        table.add_row("\n".join(names), _side_by_side(f"{name}={default}" for name, default in fields.items()))
    return table


def tasks_table() -> Table:
    """Every task with its fields and their defaults, in TOML's notation."""
    table = _table("tasks, their fields and defaults")
    table.show_header = False
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for one in catalogue.tasks():
        fields = (f"{name}={toml.value(default).strip(chr(34))}" for name, default in one.fields.items())
        table.add_row(one.name, Group(Text(one.title), _side_by_side(fields)))
    return table


def _side_by_side(items: Iterable[str]) -> Columns:
    """Items in columns, none broken over two lines where it fits one."""
    return Columns([Text(item, style="dim") for item in items], padding=(0, 2))


def _table(title: str) -> Table:
    return Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE, show_lines=True)
