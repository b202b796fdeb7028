"""Facts about algorithms and tasks, from their classes and signatures; the library's own are kept in a file.

`make catalogue` writes that file, from which `catalogue` reads.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.allows import No
from fedbilevel.core.facts import HEADINGS
from fedbilevel.experiments import toml
from fedbilevel.experiments.catalogue import MISSING, AlgorithmFacts, Kinds, TaskFacts
from fedbilevel.experiments.fields import of_class, of_function
from fedbilevel.experiments.loader import algorithm_class, label
from fedbilevel.tasks import TASKS

EMPTY = inspect.Parameter.empty  # the default of a field that has to be given


def library() -> str:
    """Every algorithm and task of the library, in the form in which the file keeps them."""
    own = [name for name, cls in sorted(ALGORITHMS.items()) if cls.__module__.startswith("fedbilevel.")]
    found = {
        "algorithms": [asdict(algorithm(name)) for name in own],
        "tasks": [asdict(task(name)) for name in sorted(TASKS)],
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def algorithm(name: str) -> AlgorithmFacts:
    """One algorithm, the library's or a user's own: `facts` of its class, with the kinds of problem that it solves."""
    cls = algorithm_class(name)
    said = vars(cls).get("facts")
    facts = dict.fromkeys(HEADINGS, MISSING) if said is None else asdict(said)
    kinds = ", ".join(kind.__name__ for kind in cls.solves)
    facts["needs"] = f"{kinds}; {said.needs}" if said and said.needs else kinds
    return AlgorithmFacts(
        name=label(name),
        title=_sentence(inspect.getdoc(cls) or ""),
        **facts,
        submodels=_trains_submodels(cls),
        fields=_defaults(cls, "algorithm"),
        parts=_parts(cls, ""),
    )


def task(name: str) -> TaskFacts:
    """One task of the library."""
    function = TASKS[name]
    module = inspect.getmodule(function)
    whole = module is not None and module.__name__.rpartition(".")[2] == name
    title = (inspect.getdoc(module if whole else function) or "").partition("\n")[0].rstrip(".")
    known = of_function(function).values()
    return TaskFacts(name, title, {field.name: toml.value(field.default).strip('"') for field in known})


def _trains_submodels(cls: Any) -> str:
    if any(field.default is EMPTY for field in of_class(cls).values()):
        return MISSING
    return "no" if isinstance(cls().allows.submodels, No) else "yes"


def _defaults(cls: Any, where: str) -> dict[str, str]:
    """The fields of an algorithm or of a part that have a default, with it."""
    known = of_class(cls).items()
    return _flat({key: one.accept(where, one.default) for key, one in known if one.default is not EMPTY})


def _parts(cls: Any, within: str) -> dict[str, Kinds]:
    """The fields that are parts, by their dotted paths, and what they may be."""
    found: dict[str, Kinds] = {}
    for name, field in of_class(cls).items():
        for kind, part in field.parts.items():
            found.setdefault(f"{within}{name}", {})[kind] = _defaults(part, kind)
            for path, kinds in _parts(part, f"{within}{name}.").items():
                found.setdefault(path, {}).update(kinds)
    return found


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


def _sentence(text: str) -> str:
    return " ".join(re.split(r"\.\s|\.$", text, maxsplit=1)[0].split())
