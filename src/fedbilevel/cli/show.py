"""`fedbilevel algorithms` and `fedbilevel tasks`."""

from __future__ import annotations

import argparse

from fedbilevel.cli.shared import OK, Add, console


def add_to(add: Add) -> None:
    """The two commands."""
    for kind, function in (("algorithm", _algorithms), ("task", _tasks)):
        command = add(f"{kind}s", function, f"list the {kind}s, their fields and defaults")
        command.add_argument("name", nargs="?", metavar="NAME", help=f"of the one {kind} to show; default: all")


def _algorithms(options: argparse.Namespace) -> int:
    terminal = console()
    from fedbilevel.experiments.listing import algorithm_fields_table, algorithms_table, parts_table

    terminal.print(algorithms_table(terminal.width, options.name))
    terminal.print(algorithm_fields_table(terminal.width, options.name))
    if (parts := parts_table(terminal.width, options.name)) is not None:
        terminal.print(parts)
    return OK


def _tasks(options: argparse.Namespace) -> int:
    terminal = console()
    from fedbilevel.experiments.listing import tasks_table

    terminal.print(tasks_table(terminal.width, options.name))
    return OK
