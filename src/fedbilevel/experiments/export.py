"""A comparison for other programs and for papers: CSV, JSON and LaTeX (booktabs), beside its picture."""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core.metrics import in_percent
from fedbilevel.display.curves import words
from fedbilevel.engines.checkpoint import write_json, write_text
from fedbilevel.engines.history import Row
from fedbilevel.experiments.compare import (
    RunGroup,
    common_seeds,
    common_targets,
    cost_columns,
    cost_to,
    costs_to,
    legend,
    tasks_of,
)
from fedbilevel.experiments.folder import LoadedRun
from fedbilevel.experiments.loader import label

SCHEMA = 1  # of the JSON file; docs/how-to/comparing.md says what is in it
CURRENCIES = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "flops", "seconds", "time")
FORMATS = ("csv", "json", "latex")


def names(picture: Path) -> dict[str, list[Path]]:
    """The files of each format, beside the picture and named like it."""
    return {
        "csv": [picture.with_suffix(".csv"), picture.with_name(f"{picture.stem}-curves.csv")],
        "json": [picture.with_suffix(".json")],
        "latex": [picture.with_suffix(".tex")],
    }


def write(groups: Sequence[RunGroup], picture: Path, formats: Sequence[str]) -> list[Path]:
    """Write the comparison in some of the FORMATS, each file whole or not at all; the files."""
    files = names(picture)
    if "csv" in formats:
        runs, curves = files["csv"]
        write_text(runs, runs_csv(groups))
        write_text(curves, curves_csv(groups))
    if "json" in formats:
        write_json(files["json"][0], as_json(groups))
    if "latex" in formats:
        write_text(files["latex"][0], latex_table(groups))
    return [file for name in FORMATS if name in formats for file in files[name]]


def runs_csv(groups: Sequence[RunGroup]) -> str:
    """A line for each run: what it is, its outcome, what it cost in all and up to each common target."""
    targets = common_targets(groups, groups[0].metric)
    rows = []
    for group, run in _runs(groups):
        summary = run.summary
        row = {**_identity(group, run), "metric": run.metric}
        row |= {name: summary[name] for name in ("final", "best", "best_round", "rounds")}
        row |= {name: summary["last_row"].get(name) for name in CURRENCIES}
        for target in targets:
            row[f"exchanges_to_{target:g}"] = cost_to(run.history, run.metric, target)
        rows.append(row | {"folder": str(run.folder.path)})
    return csv_text(rows)


def curves_csv(groups: Sequence[RunGroup]) -> str:
    """A line for each run and row of its history ("long" or "tidy"), with all its columns."""
    return csv_text([{**_identity(group, run), **row} for group, run in _runs(groups) for row in run.history.rows])


def as_json(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """The comparison as plain objects, whose numbers are finite; null stands for what is not known."""
    metric = groups[0].metric
    return {
        "schema": SCHEMA,
        "task": tasks_of(groups),
        "metric": metric,
        "larger_is_better": groups[0].larger_is_better,
        "methods": [_method(group, common_targets(groups, metric)) for group in groups],
    }


def _method(group: RunGroup, targets: Sequence[float]) -> dict[str, Any]:
    return {
        "name": group.name,
        "algorithm": group.algorithm,
        "task": label(group.runs[0].spec.task.name),
        "data": group.runs[0].spec.data,
        "pooled": group.pooled,
        "final": _statistics(group.values("final")),
        "best": _statistics(group.values("best")),
        "rounds": _statistics(group.values("rounds")),
        "costs": {name: _statistics([run.summary["last_row"].get(name) for run in group.runs]) for name in CURRENCIES},
        "targets": [_reached(group, target) for target in targets],
        "runs": [_run(run) for run in group.runs],
    }


def _run(run: LoadedRun) -> dict[str, Any]:
    return {
        "seed": run.spec.run.seed,
        "folder": str(run.folder.path),
        "stopped": run.summary["stopped"],
        "final": finite(run.summary["final"]),
        "best": finite(run.summary["best"]),
        "best_round": run.summary["best_round"],
        "history": [{name: finite(value) for name, value in row.items()} for row in run.history.rows],
    }


def _reached(group: RunGroup, target: float) -> dict[str, Any]:
    """The costs up to the first row of a run that is as good as the target, as means over the seeds."""
    reached, _ = costs_to(group, group.metric, target)
    mean = statistics.fmean(reached) if reached else None
    return {"target": target, "reached": len(reached), "of": len(group.runs), "exchanges": mean}


def _statistics(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation, null where a value is not known or there is but one."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if whole else None,
        "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
    }


def finite(value: float | None) -> float | None:
    """null in place of what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _runs(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, LoadedRun]]:
    return [(group, run) for group in groups for run in group.runs]


def _identity(group: RunGroup, run: LoadedRun) -> dict[str, Any]:
    return {
        "method": group.name,
        "algorithm": group.algorithm,
        "task": label(run.spec.task.name),
        "data": run.spec.data,
        "seed": run.spec.run.seed,
    }


def csv_text(rows: Sequence[Row | dict[str, Any]]) -> str:
    """Lines with a header of all columns; an empty cell where a row lacks one."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


ESCAPES = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "–": "--",
    "·": r"\textperiodcentered{}",
}
DIGITS = 4  # of a mean
LATIN = 0x17F  # the last letter that pdfLaTeX sets as it is


def latex_table(groups: Sequence[RunGroup]) -> str:
    """A `tabular` with a row for each group: mean ± sd over its seeds, costs as means, the best of a column in bold.

    A run with a single client is a level to compare with, and not in bold. The document needs \\usepackage{booktabs}.
    """
    metric = groups[0].metric
    name, unit = escape(words(metric)), r" (\%)" if in_percent(metric) else ""
    columns: dict[str, list[str]] = {"method": [escape(one) for one in legend(groups)]}
    costs = cost_columns(groups)
    work = ("GFLOP",) if "GFLOP" in costs else ("gradients", "hvps")
    columns |= {name: costs[name] for name in ("exchanges", "MB", *work)}
    for kind in ("final", "best"):
        columns[f"{kind} {name}{unit}"] = _outcomes(groups, metric, kind)
    for target in common_targets(groups, metric):
        columns[f"exchanges to {_level(metric, target)}"] = _costs_to(groups, metric, target)
    seeds = common_seeds(groups)
    over = f"mean and standard deviation over {seeds} seeds; " if seeds > 1 else ""
    beyond = sorted({char for heading in columns["method"] for char in heading if ord(char) > LATIN})
    font = f"; for {' '.join(beyond)} LuaLaTeX or XeLaTeX, and a font that has them" if beyond else ""
    lines = [
        f"% {over}best in bold; needs \\usepackage{{booktabs}}{font}",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"\toprule",
        _row(list(columns)),
        r"\midrule",
        *map(_row, zip(*columns.values(), strict=True)),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """A text that LaTeX sets as it is."""
    plain = "".join(ESCAPES.get(char, char) for char in re.sub(r"\s+", " ", text))
    return re.sub(r"^[\[*]", r"{\g<0>}", plain)  # after \\ of the row before these would be its arguments


def number(mean: float, spread: float | None = None, bold: bool = False) -> str:
    """A mean, with ± its standard deviation where there is one, in as many decimals as give the mean four digits."""
    if not math.isfinite(mean):
        return "--"
    power = math.floor(math.log10(abs(mean))) if mean else 0
    outside = 0 if -3 <= power <= DIGITS else power
    decimals = max(0, DIGITS - 1 - (power - outside))
    parts = [mean] if spread is None else [mean, spread]
    inside = r" \pm ".join(f"{part / 10.0**outside:.{decimals}f}" for part in parts)
    if outside:
        inside = rf"{f'({inside})' if len(parts) > 1 else inside} \times 10^{{{outside}}}"
    return rf"$\mathbf{{{inside}}}$" if bold else f"${inside}$"


def _outcomes(groups: Sequence[RunGroup], metric: str, kind: str) -> list[str]:
    scale = 100 if in_percent(metric) else 1
    means = [scale * statistics.fmean(group.values(kind)) for group in groups]
    spreads = [scale * statistics.stdev(group.values(kind)) if len(group.runs) > 1 else None for group in groups]
    best = _best(groups, [number(mean) for mean in means], means, max if groups[0].larger_is_better else min)
    return [number(mean, spread, bold) for mean, spread, bold in zip(means, spreads, best, strict=True)]


def _costs_to(groups: Sequence[RunGroup], metric: str, target: float) -> list[str]:
    means, texts = [], []
    for group in groups:
        reached, share = costs_to(group, metric, target)
        texts.append(f"{statistics.fmean(reached):,.0f}{share}" if reached else "--")
        means.append(math.inf if share else statistics.fmean(reached))
    best = _best(groups, texts, means, min)
    return [rf"\textbf{{{text}}}" if bold else text for text, bold in zip(texts, best, strict=True)]


def _best(
    groups: Sequence[RunGroup], texts: Sequence[str], values: Sequence[float], choose: Callable[[list[float]], float]
) -> list[bool]:
    """For each group whether it is the best, or printed with the same digits as the best."""
    rivals = [value for group, value in zip(groups, values, strict=True) if not group.pooled and math.isfinite(value)]
    if not rivals:
        return [False] * len(groups)
    winner = texts[values.index(choose(rivals))]
    return [text == winner and not group.pooled for group, text in zip(groups, texts, strict=True)]


def _level(metric: str, target: float) -> str:
    if in_percent(metric):
        return rf"{100 * target:g}\,\%"
    return f"$10^{{{round(math.log10(target))}}}$"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
