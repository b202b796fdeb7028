"""What differs between the arms of a figure's claims besides the method, read off the specs of its runs."""

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
}
"""Of the fields of a method those that say how much it is given; all others are the method."""
COUNTED = {"exchanges": "exchanges", "evaluations": "gradients and products"}


def besides(figure: Figure, found: Mapping[str, Any] | None, scale: Scale = "quick") -> list[str]:
    """What differs, each with its values: the most frequent one first, the others with their arms.

    Of a slope the arms are the panels; they are of one method, all of whose fields count, and are named without values.
    What arms spent is read off the outcome.
    """
    compared = dict.fromkeys(name for claim in figure.claims if claim.than for name in (claim.better, *claim.than))
    fitted = dict.fromkeys(claim.better for claim in figure.claims if claim.slope is not None)
    said: dict[str, None] = {}
    for panel in dict.fromkeys(panel for panel, _ in figure.pairs(scale)):
        names = [name for name in compared if name in figure.methods_of(panel)]
        groups = differing({name: fields(figure, panel, name, scale) for name in names})
        said |= dict.fromkeys(with_values(path, values) for path, values in groups.items())
    for name in fitted:
        panels = [panel for panel, of in figure.pairs(scale) if of == name]
        groups = differing({panel: whole(figure, panel, name, scale) for panel in panels})
        said |= dict.fromkeys(f"{in_words(path)} from panel to panel" for path in groups)
    return [*said, *spent(found, list(compared))]


def whole(figure: Figure, panel: str, method: str, scale: Scale) -> dict[str, Any]:
    """All fields of an arm, by their paths."""
    own = {"clients.capacity": 1.0} | dict(flat(experiments.resolve(figure.tables(panel, method, scale)).tables()))
    own |= {path: "by rule" for path, value in own.items() if path.startswith("engine.") and value is None}
    if own["asynchronous.wait_for"] is None:  # nothing else of this section has an influence
        own = {path: value for path, value in own.items() if not path.startswith("asynchronous.")}
    return {path: in_turn(value) if path.startswith("clients.") else value for path, value in own.items()}


def fields(figure: Figure, panel: str, method: str, scale: Scale) -> dict[str, Any]:
    """The fields of an arm but for those of the method itself, and the values that were tried."""
    own = whole(figure, panel, method, scale)
    if "algorithm.hypergradient.name" in own:
        own = {"algorithm.hypergradient.paired": False} | own
    if own.get("algorithm.batch_size", "") is None:  # all samples, which are always the same
        own.pop("algorithm.hypergradient.paired", None)
    if own["clients.capacity"] == 1.0:
        own = {path: value for path, value in own.items() if not path.startswith("submodels.")}
    kept = {path: value for path, value in own.items() if not path.startswith("algorithm.") or path in WORDS}
    points = figure.points(panel, method)
    tried = {f"values tried of {name}": [point[name] for point in points] for name in points[0]}
    return {WORDS.get(path, path): value for path, value in {**kept, **tried}.items()}


def spent(found: Mapping[str, Any] | None, names: Sequence[str]) -> Iterator[str]:
    """By how many times the arms of a panel differ at most in what they spent."""
    panels = found["panels"].values() if found else []
    for cost, word in COUNTED.items():
        ratios = [1.0]
        for methods in panels:
            amounts = [of["costs"][cost] for name, of in methods.items() if name in names and cost in of["costs"]]
            ratios += [max(amounts) / min(amounts)] if amounts and min(amounts) else []
        if max(ratios) > 1.05:
            yield f"up to {max(ratios):.3g} times as many {word}"


def flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested tables, by their paths."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differing(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Of each field whose values are not the same in all arms that have it: which arms have which value."""
    found: dict[str, dict[str, list[str]]] = {}
    for arm, own in arms.items():
        for path, value in own.items():
            found.setdefault(path, {}).setdefault(shown(value), []).append(arm)
    return {path: values for path, values in found.items() if len(values) > 1}


def with_values(path: str, values: Mapping[str, Sequence[str]]) -> str:
    """A field with its values; of values that were tried without them."""
    if path.startswith("values tried"):
        return path
    first, *others = sorted(values, key=lambda value: -len(values[value]))
    return f"{in_words(path)} {first}" + "".join(f", {value} ({' / '.join(values[value])})" for value in others)


def in_words(path: str) -> str:
    """A field without the section of a spec that it stands in."""
    return path.partition(".")[2].replace("_", " ") or path


def in_turn(numbers: Any) -> Any:
    """Of numbers that are dealt out to clients in turn, those that repeat."""
    if not isinstance(numbers, list):
        return numbers
    count = len(numbers)
    return next(numbers[:n] for n in range(1, count + 1) if (count * numbers[:n])[:count] == numbers)


def shown(value: Any) -> str:
    """A value for people."""
    if isinstance(value, list | tuple):
        return " and ".join(map(shown, value)) or "1"
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
