"""List the library's algorithms and tasks by reading the text of its files, which does not import JAX."""

from __future__ import annotations

import ast
import functools
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbilevel.core.errors import unknown

ROOT = Path(__file__).parents[1]
SEARCHES = "fedbilevel.experiments.outer_search"
RIVALS = {"random": f"{SEARCHES}:Random", "tpe": f"{SEARCHES}:TPE", "halving": f"{SEARCHES}:Halving", "fedex": "fedex"}
"""A name in --against -> the search algorithm that a comparison also runs."""

OF_FILES = "`fedbilevel run` takes a spec as --spec FILE.toml, and a task of your own as FILE.py:NAME"
"""The ways in which a command takes a task from a file."""


def is_file(place: str) -> bool:
    """Return whether a place is the path of a file rather than the name of a module."""
    return place.endswith(".py") or "/" in place


def is_own(name: str) -> bool:
    """Return whether a name means a user's own task or algorithm: module:NAME or FILE.py:NAME."""
    return (
        is_file(name) or re.search(r":(?![ \d])", name) is not None
    )  # the title of a paper and arXiv:1234.56789 are not such names


def is_task(name: str) -> bool:
    """Return whether a name is the name of a task of the library, or has the form of a user's own name."""
    return ":" in name or spelled("task", name) in library("task")


def spelled(kind: str, name: str) -> str:
    """Return the library's spelling of a name, such as simfbo for SimFBO; other names do not change."""
    return name if is_own(name) else _spellings(kind).get(_bare(name), name)


def known(kind: str, name: str) -> str:
    """Return the library's spelling of a name, or a user's own name. Other names raise a ConfigurationError."""
    found = spelled(kind, name)
    if not is_own(found) and found not in library(kind):
        error = unknown(kind, name, library(kind))
        if kind == "task" and "." in name:
            error.message = f"unknown task {name!r}: {OF_FILES}"
        raise error
    return found


def known_rivals(names: Sequence[str]) -> list[str]:
    """Return names of RIVALS in lower case. Other names raise a ConfigurationError."""
    for name in names:
        if name.lower() not in RIVALS:
            raise unknown("search of --against", name, RIVALS)
    return [name.lower() for name in names]


@functools.cache
def _spellings(kind: str) -> dict[str, str]:
    """Return a dictionary: spelling -> name.

    Spellings are names in lower case without hyphens, and the titles of files that have one method.
    """
    titles = {entry.file.partition(":")[0]: name for name, entry in library(kind).items()}
    words = {title: name for title, name in titles.items() if " " not in title}
    return {_bare(word): name for word, name in [*words.items(), *((name, name) for name in library(kind))]}


def _bare(name: str) -> str:
    return re.sub("[-_]", "", name.lower())


class Entry(NamedTuple):
    """The texts in the library's files that describe an algorithm or task. A search looks for words in them."""

    title: str  # the first line of the docstring
    paper: str  # the paper, such as "Yang et al. 2023, arXiv:2305.19442"
    own: str  # the text of the docstring, and the texts of the facts, in one string
    file: str  # all texts of the file, in one string


@functools.cache
def library(kind: str) -> dict[str, Entry]:
    """Return all algorithms, or all tasks, by their names."""
    files = sorted((ROOT / f"{kind}s").glob("[!_]*.py"))
    read = _algorithms if kind == "algorithm" else _task
    return dict(sorted(item for file in files for item in read(file.stem, ast.parse(file.read_text("utf-8")))))


def _algorithms(file: str, module: ast.Module) -> Iterator[tuple[str, Entry]]:
    """Yield the algorithms of a file: its classes that have a name."""
    for cls in module.body:
        for node in cls.body if isinstance(cls, ast.ClassDef) else []:
            match node:
                case ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name))):
                    yield name, _entry(cls, cls, module)


def _task(file: str, module: ast.Module) -> Iterator[tuple[str, Entry]]:
    """Yield the task of a file: the function that has the file's name. The docstring of the file is the title."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == file:
            yield file, _entry(module, node, module)


def _entry(titled: Any, node: Any, module: ast.Module) -> Entry:
    own, file = _said(node), _said(module)
    papers = [ast.literal_eval(one.value) for one in own + file if isinstance(one, ast.keyword) and one.arg == "paper"]
    papers += re.findall(r"\(([^()]* et al[^()]*)\)", _text(file))  # for tasks, which have no facts
    title = (ast.get_docstring(titled) or "").partition("\n")[0].rstrip(".")
    return Entry(title, " ".join(papers[0].split()) if papers else "", _text(own), _text(file))


def _said(node: Any) -> list[ast.AST]:
    """Return the syntax nodes of a class, function or file in which it describes itself.

    These are its docstring and its assignments, for example of `facts`, with all parts of both.
    """
    return [part for one in node.body if isinstance(one, ast.Expr | ast.Assign) for part in ast.walk(one)]


def _text(nodes: list[ast.AST]) -> str:
    return " ".join(one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str))


def listed(kind: str) -> str:
    """Return a line for each algorithm or task."""
    lines = [_line(name, entry.title) for name, entry in library(kind).items()]
    return "\n".join([*lines, "", f"more about each: fedbilevel {kind}s NAME"])


def found(kind: str, words: str) -> str:
    """Return a line for each algorithm (or task) whose texts contain all of the words. The best matches come first.

    If no algorithm has all words, tasks are listed instead. If no task has all words, algorithms are listed instead.

    Raises:
        ConfigurationError: no algorithm or task has all of the words. The error suggests the nearest word.
    """
    wanted = [re.compile(rf"(?<![^\W_]){word}", re.IGNORECASE) for word in re.findall(r"[^\W_]+", words)]
    policies, about = _policies()
    for one in (kind, "task" if kind == "algorithm" else "algorithm"):
        entries = library(one) if one == "task" else {**library(one), **policies}
        ranks = {name: _rank(wanted, name, entry) for name, entry in entries.items()}
        best = sorted((name for name in ranks if ranks[name] < math.inf), key=lambda name: (ranks[name], name))
        lines = [_line(name, f"{entries[name].title} ({entries[name].paper})".removesuffix(" ()")) for name in best]
        more = {about if name in policies else f"more about each: fedbilevel {one}s NAME" for name in best}
        if lines:
            return "\n".join([*lines, "", *sorted(more, reverse=True)])
    raise unknown(kind, words, library(kind))


def _line(name: str, text: str) -> str:
    """Return a name with its text in a line. On a terminal, a long text continues on indented lines."""
    said = f"{name:<20} {text}"
    if not sys.stdout.isatty():
        return said
    return textwrap.fill(said, shutil.get_terminal_size().columns, subsequent_indent=" " * 21, break_on_hyphens=False)


def _rank(wanted: list[re.Pattern[str]], name: str, entry: Entry) -> float:
    """Return the rank of an entry in a search; a good match has a small rank.

    A word that occurs in the name adds 0, in title or paper 1, in the docstring 2, and elsewhere in the file 3. If a
    word is missing, the rank is infinite.
    """
    texts = name, f"{entry.title} {entry.paper}", entry.own, entry.file
    places = [next((place for place, text in enumerate(texts) if word.search(text)), math.inf) for word in wanted]
    return sum(places) if places else math.inf


def _policies() -> tuple[dict[str, Entry], str]:
    """Return an entry for each policy of submodels, such as submodels.policy=rolling.

    The second result is a sentence about the methods that support policies.
    """
    said = ast.get_docstring(ast.parse((ROOT / "core" / "submodel.py").read_text("utf-8"))) or ""
    pairs = re.findall(r"^(\w+) {2,}(.*(?:\n {2,}.*)*)", said, re.MULTILINE)
    entries = {f"submodels.policy={name}": Entry(" ".join(text.split()), "", "", "") for name, text in pairs}
    return entries, " ".join(said.rpartition("\n\n")[2].split())
