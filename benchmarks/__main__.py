"""Run a benchmark: `python -m benchmarks NAME [options]`; without a name, list all of them.

A benchmark is a module of this folder with a function `main`. The parameters of `main` become options with the same
names, defaults and types. If the default is a tuple of words, only these words are allowed; an empty tuple allows any.
QUICK in the module has the values that `--quick` sets.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from importlib import import_module
from pathlib import Path
from time import strftime
from types import ModuleType
from typing import get_args, get_type_hints

from benchmarks import machine

ROOM = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """Return the name of each benchmark, and the first line of its docstring."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(ROOM.glob("[a-z]*.py"))}
    return {name: text.splitlines()[0].strip('"') for name, text in texts.items() if "\ndef main(" in text}


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = get_type_hints(module.main)
    for option, parameter in inspect.signature(module.main).parameters.items():
        flag, default = f"--{option.replace('_', '-')}", parameter.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            kind = get_args(kinds[option])[0]
            choices = (default or None) if kind is str else None
            text = ", ".join(map(str, default))
            parser.add_argument(flag, nargs="+", type=kind, choices=choices, default=default, metavar="…", help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, metavar="…", help=f"({default})")
    parser.add_argument("--quick", action="store_true", help=f"the smallest setting: {getattr(module, 'QUICK', {})}")
    return parser


def run(name: str, arguments: list[str]) -> None:
    """Run a benchmark with its options; print the machine and its load before and after."""
    module = import_module(f"benchmarks.{name}")
    parser = parser_of(name, module)
    if parser.parse_args(arguments).quick:
        parser.set_defaults(**getattr(module, "QUICK", {}))
    options = vars(parser.parse_args(arguments))
    del options["quick"]
    print(f"python -m benchmarks {name} {' '.join(arguments)}".rstrip())
    print(f"{strftime('%d %B %Y')}, {machine.describe()}, load {machine.load()}", flush=True)
    module.main(**options)
    print(f"\non {machine.device()}, load {machine.load()} at the end")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    lines = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [--quick] [options]; NAME --help lists the options.\n")
        print("\n".join(f"{name:16} {line}" for name, line in lines.items()))
        return 0
    name, *rest = arguments
    if name not in lines:
        near = difflib.get_close_matches(name, lines, 1, 0)
        print(f"benchmarks: {name!r} is no benchmark; the nearest name is {near[0]!r}", file=sys.stderr)
        return 2
    run(name, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
