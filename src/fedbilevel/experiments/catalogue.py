"""What there is to run: facts about algorithms and tasks, read from their docstrings and signatures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import unknown
from fedbilevel.experiments import schema, toml
from fedbilevel.tasks import TASKS

MISSING = "–"
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
    return [_algorithm(name, cls) for name, cls in _chosen("algorithm", ALGORITHMS, name)]


def _chosen(kind: str, known: Mapping[str, T], name: str | None) -> list[tuple[str, T]]:
    """All that is known, in order, or what has that name."""
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
        submodels="no" if cls().submodels is None else "yes",
    )


def algorithm_fields(name: str | None = None) -> list[tuple[list[str], dict[str, str]]]:
    """(algorithms, their fields with defaults in TOML's notation); algorithms that agree in all of them together."""
    found: list[tuple[list[str], dict[str, str]]] = []
    for algorithm, cls in _chosen("algorithm", ALGORITHMS, name):
        known = schema.of_algorithm(cls).items()
        fields = {key: toml.value(field.accept("algorithm", field.default, field.default)) for key, field in known}
        alike = next((names for names, others in found if others == fields), None)
        if alike is None:
            found.append(([algorithm], fields))
        else:
            alike.append(algorithm)
    return found


def tasks(name: str | None = None) -> list[TaskFacts]:
    """Every task by name, or the one of that name."""
    found = []
    for task, function in _chosen("task", TASKS, name):
        module = inspect.getmodule(function)
        whole = module is not None and module.__name__.rpartition(".")[2] == task
        title = _line(inspect.getdoc(module if whole else function) or "")
        found.append(TaskFacts(task, title, {f.name: f.default for f in schema.of_function(function).values()}))
    return found


def _entry(text: str, heading: str) -> str:
    """What follows "heading:", if it is there, up to the end of the sentence; docstrings break lines anywhere."""
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
