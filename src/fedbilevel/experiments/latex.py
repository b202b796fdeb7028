"""A comparison as a table for a paper: LaTeX with booktabs."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence

from fedbilevel.core.metrics import in_percent
from fedbilevel.engines.curves import words
from fedbilevel.experiments import measure
from fedbilevel.experiments.compare import Group, common_seeds, common_targets, legend

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


def latex_table(groups: Sequence[Group]) -> str:
    """A `tabular` with a row for each group: mean ± sd over its seeds, costs as means, the best of a column in bold.

    A run with a single client is a level to compare with, and not in bold. The document needs \\usepackage{booktabs}.
    """
    metric = groups[0].metric
    name, unit = escape(words(metric)), r" (\%)" if in_percent(metric) else ""
    columns: dict[str, list[str]] = {"method": [escape(one) for one in legend(groups)]}
    columns["exchanges"] = [f"{group.costs('exchanges'):,.0f}" for group in groups]
    columns["MB"] = [f"{group.costs('bytes_down', 'bytes_up') / 1e6:,.1f}" for group in groups]
    if all(group.counted for group in groups):
        columns["GFLOP"] = [measure.gflop(group.costs("flops")) for group in groups]
    else:
        columns["gradients"] = [f"{group.costs('gradients'):,.0f}" for group in groups]
        columns["hvps"] = [f"{group.costs('hvps'):,.0f}" for group in groups]
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


def _outcomes(groups: Sequence[Group], metric: str, kind: str) -> list[str]:
    scale = 100 if in_percent(metric) else 1
    means = [scale * statistics.fmean(group.values(kind)) for group in groups]
    spreads = [scale * statistics.stdev(group.values(kind)) if len(group.runs) > 1 else None for group in groups]
    best = _best(groups, [number(mean) for mean in means], means, max if groups[0].larger_is_better else min)
    return [number(mean, spread, bold) for mean, spread, bold in zip(means, spreads, best, strict=True)]


def _costs_to(groups: Sequence[Group], metric: str, target: float) -> list[str]:
    means, texts = [], []
    for group in groups:
        costs = [measure.cost_to(run.history, metric, target) for run in group.runs]
        reached = [cost for cost in costs if cost is not None]
        share = "" if len(reached) == len(costs) else f" ({len(reached)} of {len(costs)})"
        texts.append(f"{statistics.fmean(reached):,.0f}{share}" if reached else "--")
        means.append(math.inf if share else statistics.fmean(reached))
    best = _best(groups, texts, means, min)
    return [rf"\textbf{{{text}}}" if bold else text for text, bold in zip(texts, best, strict=True)]


def _best(
    groups: Sequence[Group], texts: Sequence[str], values: Sequence[float], choose: Callable[[list[float]], float]
) -> list[bool]:
    """Which of them are the best, those that look the same as the best one included."""
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
