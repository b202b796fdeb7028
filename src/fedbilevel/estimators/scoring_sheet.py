"""Write a scoring sheet: a study's model in plain text, for people with pen, paper and a pocket calculator.

The sheet says how to compute a sum S for a row: the start, plus the term of each number, plus the points of each word.
A number's term is the number times its factor, which is the coefficient for one unit of the original column. Terms have
so many decimals that rounding one term changes S by less than 10⁻⁵ of the unit of S, even if a number is ten standard
deviations away from its mean. The sheet says by how much S can differ from the model's S because of rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log10
from typing import Any

import numpy as np

from fedbilevel.data.columns import deviation
from fedbilevel.estimators.agreement import SITE
from fedbilevel.estimators.model_card import MODELS
from fedbilevel.estimators.model_in_use import FAR, data_frame, in_units
from fedbilevel.extending import printable

DECIMALS, SHOWN = 5, 3  # the numbers of decimals of terms and of results, if the unit of S is 1
Cells = Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class NumberLine:
    """The line of the sheet for a column of numbers, with texts as they are printed.

    Args:
        each: the factor of the column: its coefficient for one unit.
        missing: the term of a gap, in place of which the mean over all sites is used.
    """

    column: str
    each: str
    missing: str
    mean: float


def sheet(model: Any) -> str:
    """Return the scoring sheet of a `StudyModel`: see `StudyModel.sheet`."""
    agreed, study = model.agreement, model.agreement.study
    decimals = _decimals(agreed)
    start, numbers, words = _lines(model, decimals)
    parts = [f"Scoring sheet: {_predicted(model)}"]
    parts += [f"{MODELS[study.estimator]}; {agreed.rows} rows of {', '.join(map(printable, study.fitted_sites))}", ""]
    parts += ["Begin with the start. For each number, add the number times its factor."]
    parts += ['For a missing number, add the entry of its row under "if missing, add".'] * bool(numbers)
    parts += ["For each column of words, add the number beside the word that applies. The sum is S."]
    parts += [*_precision(decimals, numbers, words), ""]
    parts += _aligned([("start", start)])
    if numbers:
        header = "number", "factor", "if missing, add", "mean of the column"
        rows = [(printable(one.column), one.each, one.missing, f"{one.mean:.5g}") for one in numbers]
        parts += ["", *_aligned([header, *rows])]
    for column, points in words.items():
        rest = "a site that was not in the study" if column == SITE and study.offsets else "missing"
        rest += ", or a word that is not in this list" * agreed.features[column]["rarer"]
        every = [*points.items(), (rest, f"{0:.{decimals}f}")]
        parts += ["", *_aligned([(printable(column), "add"), *((f"  {printable(word)}", add) for word, add in every)])]
    used = {*words, *(one.column for one in numbers)}
    if unused := [printable(name) for name in agreed.features if name not in used]:
        parts += ["", f"Not used, because no site sent statistics of them: {', '.join(unused)}"]
    return "\n".join([*parts, "", *_results(model), "", *_example(model, start, numbers, words)]) + "\n"


def _decimals(agreed: Any) -> int:
    """Return the number of decimals of terms, which is DECIMALS if the unit of S is 1."""
    (target,) = agreed.target.values()
    unit = deviation(target) if agreed.study.estimator == "ridge" else 1.0
    return max(0, DECIMALS - floor(log10(unit)))


def _precision(decimals: int, numbers: list[NumberLine], words: dict[str, dict[str, str]]) -> list[str]:
    """Say how to round terms, and by how much S can be wrong.

    The error is at most half a unit of the last decimal for each printed number, and another half for each term that a
    person rounds.
    """
    bound = (1 + 2 * len(numbers) + len(words)) / 2 * 10.0**-decimals
    differs = f"differs from the model's S by {bound:.{decimals + 1}f} at most"
    if not numbers:
        return [f"S {differs}."]
    far = f"as long as no number is more than {FAR} standard deviations away from its mean."
    return [f"Round each term to {decimals} decimals. S then {differs},", far]


def _lines(model: Any, decimals: int) -> tuple[str, list[NumberLine], dict[str, dict[str, str]]]:
    """Return the start, the lines of numbers, and the points of each word by column, all as printed."""
    numbers: list[NumberLine] = []
    words: dict[str, dict[str, str]] = {}
    start, coefficients = in_units(model)
    for (column, word, summary), coefficient in coefficients:
        if "categories" in summary:
            words.setdefault(column, {})[word] = f"{coefficient:.{decimals}f}"
        elif summary["count"]:
            mean = summary["mean"]
            more = ceil(log10(abs(mean) + FAR * deviation(summary)))
            each, missing = f"{coefficient:.{max(0, decimals + more)}f}", f"{coefficient * mean:.{decimals}f}"
            numbers.append(NumberLine(column, each, missing, mean))
    return f"{start:.{decimals}f}", numbers, words


def _predicted(model: Any) -> str:
    study = model.agreement.study
    if study.estimator == "logistic":
        return f"the probability that {printable(study.target)} is {printable(str(model.estimator.classes_[1]))}"
    return printable(study.target) if study.estimator == "ridge" else f"the hazard of {printable(study.event)}"


def _results(model: Any) -> list[str]:
    """Return lines that say how to compute the prediction from the sum S of the sheet."""
    study = model.agreement.study
    if study.estimator == "logistic":
        other, positive = (printable(str(one)) for one in model.estimator.classes_)
        said = f"The more probable class is {positive} if S is above 0, and otherwise {other}."
        return [f"probability of {positive} = 1 / (1 + exp(-S))", said]
    if study.estimator == "ridge":
        return [f"{printable(study.target)} = S"]
    lines = ["relative hazard = exp(S)"]
    lines += ["It is 1 for a row of the same site whose numbers are the means, and whose words are missing."]
    if model.baselines:
        lines += ["", "probability to be without the event up to a time = exp(-H exp(S))"]
        lines += [f"The lists have H for each site and time, in the unit of {printable(study.target)}."]
        lines += ["For a time between two times of a list, take H of the earlier one; before the first time, take 0."]
        lines += ["The probability is then too high. After the last time H is not known."]
    for site, steps in model.baselines.items():
        rows = [(f"  {end:g}", f"{hazard:.6g}") for end, _, _, hazard in steps]
        lines += ["", *_aligned([(f"{printable(site)}: time", "H"), *rows])]
    return lines


def _example(model: Any, start: str, numbers: list[NumberLine], words: dict[str, dict[str, str]]) -> list[str]:
    """Compute an example by the printed numbers.

    Its row has rounded means, a gap in place of the last number, and the most frequent words.
    """
    study, features = model.agreement.study, model.agreement.features
    decimals = _decimals(model.agreement)
    row: dict[str, Any] = {name: None if "categories" in summary else np.nan for name, summary in features.items()}
    terms = [("start", start)]
    for place, one in enumerate(numbers, 1):
        value = float(f"{one.mean:.3g}")
        if 1 < place == len(numbers):
            terms.append((f"{printable(one.column)} is missing", one.missing))
        else:
            row[one.column] = value
            term = f"{value * float(one.each):.{decimals}f}"
            terms.append((f"{printable(one.column)} {value:g} × {one.each}", term))
    site = next(iter(model.baselines), study.fitted_sites[0])
    for column, points in words.items():
        rows = features[column]["categories"]
        row[column] = site if column == SITE and study.offsets else max(rows, key=rows.get)
        terms.append((f"{printable(column)} {printable(row[column])}", points[row[column]]))
    total = sum(float(term) for _, term in terms)
    terms.append(("S", f"{total:.{decimals}f}"))
    frame = data_frame({name: [value] for name, value in row.items()})
    return ["Example with a row that is made up:", "", *_aligned(terms), "", *_computed(model, frame, site, total)]


def _computed(model: Any, frame: Any, site: str, total: float) -> list[str]:
    """Compute the prediction of the example, with as many decimals as are equal by the sheet and by the model."""
    study = model.agreement.study
    if study.estimator == "logistic":
        chance = _common(1 / (1 + exp(-total)), float(model.predict_proba(frame, site)[0]), SHOWN)
        return [f"probability of {printable(str(model.estimator.classes_[1]))} = {chance}"]
    value = float(model.predict(frame, site)[0])
    if study.estimator == "ridge":
        shown = max(0, _decimals(model.agreement) - DECIMALS + SHOWN)
        return [f"{printable(study.target)} = {_common(total, value, shown)}"]
    lines = [f"relative hazard = {_common(exp(total), exp(value), SHOWN)}"]
    if site in model.baselines:
        end, _, _, hazard = model.baselines[site][-1]
        known = float(model.predict_survival(frame, [end], site)[0, 0])
        share = _common(exp(-float(f"{hazard:.6g}") * exp(total)), known, SHOWN)
        lines.append(f"probability to be without the event up to {end:g} at {printable(site)} = {share}")
    return lines


def _common(by_hand: float, by_model: float, decimals: int) -> str:
    """Return a number with only those decimals that are equal by hand and by the model.

    Rounding can change the others.
    """
    texts = ((f"{by_hand:.{places}f}", f"{by_model:.{places}f}") for places in range(decimals, -1, -1))
    return next((one for one, other in texts if one == other), f"{by_model:.{decimals}f}")


def _aligned(rows: Cells) -> list[str]:
    """Write rows of cells in aligned columns, a line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
