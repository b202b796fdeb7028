"""Where the fields of a method come from that nobody set: the task's presets, or the method's class; said to users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedbilevel.experiments import toml
from fedbilevel.experiments.fields import complete, of_class, shared_by
from fedbilevel.experiments.loader import algorithm_class
from fedbilevel.experiments.names import code_of, label
from fedbilevel.experiments.presets import preset
from fedbilevel.experiments.spec import Spec


def has_preset(spec: Spec) -> bool:
    """Whether the task has presets for this very method, or its class has some for the task."""
    name, task = spec.algorithm.name, spec.task.name
    return name in preset(task, spec.data).algorithms or label(task) in algorithm_class(name).presets


def replaced(spec: Spec) -> dict[str, Any]:
    """The fields of a method of one's own that hold what the task has for all methods, and not their default."""
    name, task = spec.algorithm.name, spec.task.name
    if not code_of(name):
        return {}
    cls = algorithm_class(name)
    fields, own = of_class(cls), cls.presets.get(label(task), {})
    shared = {
        field: value for field, value in shared_by(fields, preset(task, spec.data).of(name)).items() if field not in own
    }
    given = {field: fields[field] for field in shared}
    of_task, of_class_ = complete("algorithm", given, {}, shared), complete("algorithm", given, {}, {})
    now = spec.algorithm.fields
    return {field: value for field, value in of_task.items() if now[field] == value != of_class_[field]}


def said_of_one(spec: Spec) -> str:
    """A sentence on the defaults of a method of one's own that the task replaces; empty where it replaces none."""
    changed = ", ".join(f"{field} = {toml.value(value)}" for field, value in sorted(replaced(spec).items()))
    method, task = label(spec.algorithm.name), label(spec.task.name)
    return f"{task} sets for every method, in place of the defaults of {method}: {changed}" if changed else ""


def said_of_several(specs: Sequence[Spec]) -> list[str]:
    """Sentences on the rows of a comparison: which have presets for their task, and which run at their defaults."""
    task = label(specs[0].task.name)
    tuned = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if has_preset(spec)))
    plain = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if not has_preset(spec)))
    found = [
        *([f"presets for {task}: {', '.join(tuned)}"] if tuned else []),
        *([f"at the defaults of their classes: {', '.join(plain)}"] if plain else []),
    ]
    return ["; ".join(found), *dict.fromkeys(filter(None, map(said_of_one, specs)))]
