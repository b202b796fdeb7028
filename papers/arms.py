"""Find what differs between the arms of a figure besides the method, from the specs of its runs.

An arm is one of the compared sides: a method in a panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbilevel import experiments
from papers.figure import Figure, Scale

WORDS = {
    "algorithm.batch_size": "batch",
    "algorithm.local_steps": "local steps",
    "algorithm.inner.local_steps": "local steps",
    "algorithm.inner.rounds": "inner rounds",
    "algorithm.inner.server_lr": "server step on y",
    "algorithm.outer_steps": "steps on x",
    "algorithm.hypergradient.solver.terms": "terms",
    "algorithm.hypergradient.solver.step": "Neumann step",
    "algorithm.hypergradient.paired": "paired samples",
    "clock.compute": "virtual seconds for a gradient",
}
"""Fields in words. Those of a method say how much work or data it gets; all others belong to the method itself."""
COUNTED = {"exchanges": "exchanges", "evaluations": "gradients and products"}


def besides(figure: Figure, found: Mapping[str, Any] | None, scale: Scale = "quick") -> list[str]:
    """Return the fields that differ between arms, with their values.

    The most frequent value comes first; the other values are named with their arms.

    For a claim about a slope, the arms are the panels of one method. All fields of this method are compared. They are
    named in one text, without values. What the arms have spent is taken from the outcome.
    """
    compared = dict.fromkeys(name for claim in figure.claims if claim.than for name in (claim.better, *claim.than))
    fitted = dict.fromkeys(claim.better for claim in figure.claims if claim.slope is not None)
    said: dict[str, None] = {}
    varied: dict[str, None] = {}
    for panel in dict.fromkeys(panel for panel, _ in figure.pairs(scale)):
        names = [name for name in compared if name in figure.methods_of(panel)]
        groups = differing({name: fields(figure, panel, name, scale) for name in names})
        said |= dict.fromkeys(with_values(path, values) for path, values in groups.items())
    for name in fitted:
        panels = [panel for panel, of in figure.pairs(scale) if of == name]
        groups = differing({panel: whole(figure, panel, name, scale) for panel in panels})
        varied |= dict.fromkeys(in_words(path) for path in groups)
    said |= {f"between the runs of a slope: {', '.join(varied)}": None} if varied else {}
    return [*said, *spent(found, list(compared))]


def whole(figure: Figure, panel: str, method: str, scale: Scale) -> dict[str, Any]:
    """Return all fields of an arm, by their paths."""
    own = {"clients.capacity": 1.0} | dict(flat(experiments.resolve(figure.tables(panel, method, scale)).tables()))
    own |= {path: "by rule" for path, value in own.items() if path.startswith("engine.") and value is None}
    if (epochs := own.get("algorithm.inner.local_epochs")) is not None:  # it takes precedence over local_steps
        own["algorithm.inner.local_steps"] = f"of {epochs} epochs"
    if own["asynchronous.wait_for"] is None:  # no other field of this section has an effect
        own = {path: value for path, value in own.items() if not path.startswith("asynchronous.")}
    return {path: in_turn(value) if path.startswith("clients.") else value for path, value in own.items()}


def fields(figure: Figure, panel: str, method: str, scale: Scale) -> dict[str, Any]:
    """Return the fields of an arm that do not belong to the method itself, and the values that were tried."""
    own = whole(figure, panel, method, scale)
    if "algorithm.hypergradient.name" in own:
        own = {"algorithm.hypergradient.paired": False} | own
    if own.get("algorithm.batch_size", "") is None:  # None: all samples, which does not depend on the method
        own.pop("algorithm.hypergradient.paired", None)
    if own["clients.capacity"] == 1.0:
        own = {path: value for path, value in own.items() if not path.startswith("submodels.")}
    kept = {path: value for path, value in own.items() if not path.startswith("algorithm.") or path in WORDS}
    points = figure.points(panel, method)
    tried = {f"tried values of {name}": [point[name] for point in points] for name in points[0]}
    return {WORDS.get(path, path): value for path, value in {**kept, **tried}.items()}


def spent(found: Mapping[str, Any] | None, names: Sequence[str]) -> Iterator[str]:
    """Yield by which factor the arms of a panel differ in what they have spent, at most."""
    panels = found["panels"].values() if found else []
    for cost, word in COUNTED.items():
        ratios = [1.0]
        for methods in panels:
            amounts = [of["costs"][cost] for name, of in methods.items() if name in names and cost in of["costs"]]
            ratios += [max(amounts) / min(amounts)] if amounts and min(amounts) else []
        if max(ratios) > 1.05:
            yield f"up to {max(ratios):.3g} times as many {word}"


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables, with their paths."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differing(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the fields whose values differ between arms that have them: field -> value -> the arms with this value."""
    found: dict[str, dict[str, list[str]]] = {}
    for arm, own in arms.items():
        for path, value in own.items():
            found.setdefault(path, {}).setdefault(shown(value), []).append(arm)
    return {path: values for path, values in found.items() if len(values) > 1}


def with_values(path: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return a text with a field and its values. For values that were tried, the text is only `path`."""
    if path.startswith("tried values"):
        return path
    first, *others = sorted(values, key=lambda value: -len(values[value]))
    return f"{in_words(path)} {first}" + "".join(f", {value} ({' / '.join(values[value])})" for value in others)


def in_words(path: str) -> str:
    """Return the path of a field without its section."""
    return path.partition(".")[2].replace("_", " ") or path


def in_turn(numbers: Any) -> Any:
    """Return the numbers that repeat in a list of numbers that are dealt out to clients in turn."""
    if not isinstance(numbers, list):
        return numbers
    count = len(numbers)
    return next(numbers[:n] for n in range(1, count + 1) if (count * numbers[:n])[:count] == numbers)


def shown(value: Any) -> str:
    """Return a value as a text for readers."""
    if isinstance(value, list | tuple):
        return " and ".join(map(shown, value)) or "1"
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
