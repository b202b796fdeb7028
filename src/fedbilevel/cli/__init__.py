"""Run the command line.

Each group of commands has a module, which imports slow packages only after arguments have been checked.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from fedbilevel import __version__
from fedbilevel.cli import comparison, diagnostics, prediction, run, watch
from fedbilevel.cli.shared import (
    BAD_INPUT,
    OK,
    Add,
    Parser,
    check_fields,
    check_names,
    exit_code,
    fail,
    say_code,
    sentence,
)
from fedbilevel.core import interrupts
from fedbilevel.core.errors import warnings_in_a_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    if arguments is None:  # this process runs nothing else; imports and tracing make many objects, but little garbage
        gc.set_threshold(50_000, 20, 100)
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["reproduce"]:
        return fail(
            BAD_INPUT, "figures of the papers are reproduced by `python -m papers`, in a clone of the repository"
        )
    options = parser().parse_args(given)
    with interrupts.raised():
        try:
            with interrupts.unmixed(), warnings_in_a_line():
                check_fields(options)
                check_names(options)
                return int(options.command(options))
        except (Exception, KeyboardInterrupt) as error:
            code = exit_code(error)
            if code is None or options.debug:
                raise
            return fail(code, sentence(error))


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    whole = Parser(prog="fedbilevel", description="Federated bilevel optimization.")
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add = Add(whole.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    run.add_to(add)
    watch.add_to(add)
    comparison.add_to(add)
    diagnostics.add_to(add)
    prediction.add_to(add)
    for kind, function in (("algorithm", _algorithms), ("task", _tasks)):
        what = f"the {kind} to show, or words to search for in names, docstrings and papers"
        add(f"{kind}s", function).add_argument("words", nargs="*", metavar="NAME|WORD", help=what)
    return whole


def _algorithms(options: argparse.Namespace) -> int:
    """List all algorithms, search them for words, or show the fields and defaults of some."""
    return _list("algorithm", " ".join(options.words))


def _tasks(options: argparse.Namespace) -> int:
    """List all tasks, search them for words, or show the fields and defaults of some."""
    return _list("task", " ".join(options.words))


def _list(kind: str, words: str) -> int:
    from fedbilevel.experiments import names

    for asked in (
        [words],
        ["-".join(words.split())],
        words.split(),
    ):  # one name, one name with spaces in place of hyphens, or several names
        chosen = [names.spelled(kind, name) for name in asked]
        if chosen and (set(chosen) <= set(names.library(kind)) or (asked == [words] and names.is_own(words))):
            from fedbilevel.experiments.loader import shown

            say_code(*chosen)
            print("\n\n".join(shown(kind, name) for name in chosen))
            return OK
    print(names.found(kind, words) if words else names.listed(kind))
    return OK
