"""`fedbilevel algorithms` and `fedbilevel tasks`."""

from __future__ import annotations

import argparse

from fedbilevel.cli.shared import OK, Add, console


def add_to(add: Add) -> None:
    """The two commands."""
    add("algorithms", _algorithms, "list the algorithms, their fields and defaults")
    add("tasks", _tasks, "list the tasks, their fields and defaults")


def _algorithms(options: argparse.Namespace) -> int:
    terminal = console()
    from fedbilevel.experiments.listing import algorithm_fields_table, algorithms_table

    terminal.print(algorithms_table(terminal.width))
    terminal.print(algorithm_fields_table(terminal.width))
    return OK


def _tasks(options: argparse.Namespace) -> int:
    terminal = console()
    from fedbilevel.experiments.listing import tasks_table

    terminal.print(tasks_table(terminal.width))
    return OK
