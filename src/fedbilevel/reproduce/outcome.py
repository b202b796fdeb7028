"""What is kept of an entry that was played: its verdict, the findings behind it, numbers and curves, as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import text
from fedbilevel.engines.checkpoint import write_json
from fedbilevel.engines.curves import PANELS, Curve, costs_of, curve
from fedbilevel.engines.history import History, is_number
from fedbilevel.experiments.folder import as_damage
from fedbilevel.experiments.runner import describe_environment
from fedbilevel.reproduce.claims import PERCENTAGE_POINTS, State, Verdict, findings, metric_in, verdict
from fedbilevel.reproduce.entry import SCALES, Entry, Scale
from fedbilevel.reproduce.protocol import Chosen, Played, place_of
from fedbilevel.reproduce.ranking import ranks
from fedbilevel.wording import require_object

SCHEMA = 2
FILE = "outcome.json"
STALE = "stale: play it again"
SUMMARY = ("verdict", "date", "scale", "seeds", "minutes", "played_for")  # of the project's own runs, in kept.json
POINTS = 60  # of a curve that is kept
DIGITS = 5  # of a number that is kept
Record = dict[str, Any]
"""The content of an outcome's file."""


def outcome_of(played: Played) -> Record:
    """What is kept of an entry that was played."""
    entry, found = played.entry, findings(played.entry, played.runs)
    return {
        "schema": SCHEMA,
        "id": entry.id,
        "scale": played.scale,
        "played_for": fingerprint(entry, played.scale),
        "verdict": "ranked" if entry.ranked else verdict(found),
        "findings": [_plain(asdict(one)) for one in found],
        "date": time.strftime("%Y-%m-%d"),
        "seeds": list(played.seeds),
        "trials": entry.trials,
        "selected_on": " or ".join(dict.fromkeys(entry.selected_in(panel) for panel in played.runs)),
        "minutes": round(played.seconds / 60, 2),
        "processor_seconds": round(played.processor_seconds, 1),
        "environment": describe_environment(),
        "metric": entry.metric,
        "against": entry.against,
        "errors": played.errors,
        "panels": {panel: _panel(played, panel) for panel in played.runs},
        "ranks": _rounded_in(ranks(entry, played.runs)),
    }


def fingerprint(entry: Entry, scale: Scale) -> str:
    """A short hash of what an entry claims and plays at a scale: all but prose, minutes, and the other scale."""
    played = {
        panel: {
            name: [entry.tables(panel, name, scale, tuning=tuning) for tuning in (False, True)]
            + [of.values_in(panel), of.ladder]
            for name, of in entry.methods_of(panel).items()
        }
        for panel in entry.panels_at(scale)
    }
    claims = [{**asdict(claim), "says": ""} for claim in entry.claims]
    panels = [
        [one.value, one.metric, one.select, one.budgets, one.log, *["apart"] * one.apart]
        for one in entry.panels.values()
    ]
    tuning = [entry.tuning.select, entry.tuning.seeds, entry.tuning.factors] if entry.tuning else []
    content = [claims, played, panels, tuning, entry.metric, entry.against]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def state_of(entry: Entry, found: Record) -> str:
    """The verdict of an outcome; or, where it was played for other claims or another setting, that it is stale."""
    return found["verdict"] if found["played_for"] == fingerprint(entry, found["scale"]) else STALE


def holding_in_words(found: Record) -> str:
    """How many of the comparisons that its claims make hold: "15 of 51"; "" of a leaderboard, which has none."""
    states = [one["state"] for one in found["findings"]]
    return f"{states.count('holds')} of {len(states)}" if states else ""


def _panel(played: Played, panel: str) -> dict[str, Any]:
    """Of each method in a panel: what was chosen for it, and what its runs came to."""
    entry, methods = replace(played.entry, metric=played.entry.measured_in(panel)), played.runs[panel]
    apart = entry.panels[panel].apart
    return {
        method: {
            "chosen": _in_all_runs(apart, played.chosen[panel][method]),
            "failed_trials": sum(one.failed for one in played.chosen[panel][method][: None if apart else 1]),
            **_numbers(entry, method, [one for one in runs if one is not None], len(runs)),
        }
        for method, runs in methods.items()
    }


def _in_all_runs(apart: bool, chosen: Sequence[Chosen]) -> dict[str, Any] | None:
    """The value of each field; of a panel that is `apart`, a list with one for each run. None: trials failed."""
    if not apart:
        return chosen[0].values
    values = [one.values for one in chosen if one.values is not None]
    return {name: [one[name] for one in values] for name in values[0]} if len(values) == len(chosen) else None


def of_each_run(value: Any) -> list[Any]:
    """What an outcome keeps as chosen for a field, as a list: one value for all runs, or one for each."""
    return value if isinstance(value, list) else [value]


def _numbers(entry: Entry, method: str, histories: Sequence[History], runs: int) -> dict[str, Any]:
    """The last values of the metric, their mean and sample standard deviation, costs as means, and a curve."""
    if not histories:
        return {"failed_runs": runs, "values": [], "mean": None, "sd": None, "costs": {}, "curve": None}
    values = [_last(history, entry.metric) for history in histories]
    spent = [costs_of(history.rows[-1]) for history in histories]
    return {
        "failed_runs": runs - len(histories),
        "values": [_rounded(value) for value in values],
        "mean": _rounded(float(np.mean(values))),
        "sd": _rounded(float(np.std(values, ddof=1))) if len(values) > 1 else None,
        "costs": {name: _rounded(float(np.mean([one[name] for one in spent]))) for name in spent[0]},
        "curve": None if entry.metric in PANELS else _thinned(curve(method, histories, entry.metric), entry.against),
    }


def _last(history: History, metric: str) -> float:
    return float(next(found for row in reversed(history.rows) if (found := metric_in(row, metric)) is not None))


def _thinned(line: Curve, against: str) -> dict[str, list[float]] | None:
    """At most POINTS points of a curve: its cost, the mean and the standard deviation over seeds."""
    if against not in line.costs:
        return None
    count = len(line.value)
    at = np.unique(np.linspace(0, count - 1, min(count, POINTS)).round().astype(int))
    spread = np.zeros(count) if line.spread is None else line.spread
    columns = {"cost": line.costs[against], "mean": line.value, "sd": spread}
    return {name: [_rounded(float(value)) for value in column[at]] for name, column in columns.items()}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _rounded_in(found: Any) -> Any:
    """A record of dicts, lists and values with every fraction in it rounded to DIGITS digits."""
    if isinstance(found, dict):
        return {name: _rounded_in(one) for name, one in found.items()}
    if isinstance(found, list):
        return [_rounded_in(one) for one in found]
    return _rounded(found) if isinstance(found, float) else found


def _plain(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as JSON can hold it: no interval where it is infinite."""
    kept = {name: _rounded(value) if isinstance(value, float) else value for name, value in finding.items()}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in kept.items()
    }


def difference_in_words(finding: Mapping[str, Any]) -> str:
    """By how much a method is better, from a finding's record, with half the width of the interval where it has one."""
    if finding["difference"] is None:
        return "–"
    half = f" ± {in_unit(finding, finding['half_width'])}" if finding["half_width"] is not None else ""
    return f"{in_unit(finding, finding['difference'])}{half} {finding['unit']}"


def methods_in_words(finding: Mapping[str, Any]) -> str:
    """The two methods that a finding compares, the one that it is about first; of a slope the only one."""
    return f"{finding['better']} / {finding['than']}" if finding["than"] else str(finding["better"])


def readings_in_words(entry: Entry, finding: Mapping[str, Any]) -> str:
    """What was read off the runs of both methods, as means; of a slope the fitted and the predicted one."""
    claim = next((claim for claim in entry.claims if claim.says == finding["says"]), None)

    def said(value: float | None) -> str:
        if value is None:
            return "–"
        if claim is None or claim.slope is not None:
            return f"{value:.3g}"
        return in_unit(finding, value) if claim.by == "first" else text(claim.metric or entry.metric, value)

    return f"{said(finding['better_mean'])} / {said(finding['than_mean'])}"


def in_unit(finding: Mapping[str, Any], value: float) -> str:
    """A number in the unit of a finding's difference."""
    value = 100 * value if finding["unit"] == PERCENTAGE_POINTS else value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def kept_curve(name: str, of: Mapping[str, Sequence[float]], against: str) -> Curve:
    """The curve of a method as it is drawn, from its record."""
    cost, mean, spread = (np.array(of[column], float) for column in ("cost", "mean", "sd"))
    return Curve(name, {"rounds": np.arange(len(cost)), against: cost}, mean, spread)


def keep(outcome: Record, folder: Path) -> Path:
    """Write an outcome into the folder of its entry; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, outcome)
    return folder / FILE


def file_of(entry: Entry, scale: Scale, out: Path) -> Path:
    """Where the outcome of an entry is kept."""
    return place_of(entry, scale, out).parent.parent / entry.id / scale / FILE


def read(path: Path) -> Record:
    """An outcome that was kept.

    Raises:
        ConfigurationError: it is none, or another version wrote it.
    """
    with as_damage(path):
        found = json.loads(path.read_text(encoding="utf-8"))
        require_object(found, "what came of an entry")
        if found.get("schema") != SCHEMA:
            raise ConfigurationError(f"{path} was written by another version: play the entry again")
        for name, fits in CONTENT.items():
            if name not in found or not fits(found[name]):
                raise ValueError(f"{name} is missing or is not as it was written")
        return dict(found)


def kept() -> dict[str, Record]:
    """What came of the project's own runs at the quick scale, by entry: SUMMARY of each; docs/papers has the whole."""
    return dict(json.loads((resources.files("fedbilevel.reproduce") / "kept.json").read_text(encoding="utf-8")))


Fits = Callable[[Any], bool]
LARGEST = 1e300  # of a number: sums of some are floats yet


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _finite(value: Any) -> bool:
    return is_number(value) and abs(value) <= LARGEST


def _plain_value(value: Any) -> bool:
    return value is None or isinstance(value, str | bool) or _finite(value)


def _one_of(*names: str) -> Fits:
    return lambda value: isinstance(value, str) and value in names


def _or_none(of: Fits) -> Fits:
    return lambda value: value is None or of(value)


def _list(of: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _by_name(of: Fits) -> Fits:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _record(**fields: Fits) -> Fits:
    return lambda value: (
        isinstance(value, dict) and all(name in value and of(value[name]) for name, of in fields.items())
    )


def _columns(value: Any) -> bool:
    """Whether a curve has a cost, a mean and a spread at each of its points."""
    alike = _record(cost=_list(_finite), mean=_list(_finite), sd=_list(_finite))(value)
    return alike and 0 < len(value["cost"]) == len(value["mean"]) == len(value["sd"])


_seeds = _list(_count)
CONTENT: dict[str, Fits] = {  # of the file
    **dict.fromkeys(("id", "date", "played_for", "selected_on", "metric"), _text),
    "scale": _one_of(*SCALES),
    "verdict": _one_of(*get_args(Verdict)),
    "against": _one_of(*PANELS),
    "seeds": lambda value: _seeds(value) and len(value) > 0,
    "trials": _count,
    **dict.fromkeys(("minutes", "processor_seconds"), _finite),
    "environment": _by_name(_plain_value),
    "errors": _by_name(_text),
    "findings": _list(
        _record(
            **dict.fromkeys(("says", "panel", "better", "than", "note", "unit"), _text),
            **dict.fromkeys(("better_mean", "than_mean", "difference", "half_width"), _or_none(_finite)),
            state=_one_of(*get_args(State)),
        )
    ),
    "ranks": _by_name(
        _by_name(
            _by_name(
                _record(
                    **dict.fromkeys(("rank", "place"), _or_none(_count)),
                    values=_list(_finite),
                    **dict.fromkeys(("mean", "sd"), _or_none(_finite)),
                )
            )
        )
    ),
    "panels": _by_name(
        _by_name(
            _record(
                chosen=_or_none(lambda value: isinstance(value, dict)),
                **dict.fromkeys(("failed_trials", "failed_runs"), _count),
                values=_list(_finite),
                **dict.fromkeys(("mean", "sd"), _or_none(_finite)),
                costs=_by_name(_finite),
                curve=_or_none(_columns),
            )
        )
    ),
}
