"""Report how good a study's model is, by rows that each site has held out. The rows do not leave their sites.

The server asks each site a question that contains the model's coefficients. The site answers with measures of its own
held-out rows, and with sums over them. This is the same on one machine and over Flower. From the answers the server
computes

    within sites    Σ_i w_i θ_i / Σ_i w_i, where w_i is the site's number of pairs (for AUROC and concordance) or of
                    positives (for AUPRC)
    overall         for logistic regression: over all pairs of rows. If the two rows are of different sites, only
                    their groups of similar predicted probability are known. If these groups overlap, the order of
                    the rows is estimated from pairs within sites, and the smallest and the largest possible value
                    are also reported
    calibration     for logistic regression: slope and intercept over all rows, by Newton's method, with one exchange
                    of sums per step; for Cox's model: the slope at each site
    errors          for ridge regression, from sums over all rows

Sites are independent, so the variance of Σ w_i θ_i is Σ w_i² Var θ_i, as for a bootstrap within each site: see
`measures`. A site sends no answer if it has fewer than `min_count` held-out rows of one of the classes, or fewer
events. A group of predictions has at least `min_count` rows of the site, but the number of positive rows in a group is
sent even if it is small.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit

from fedbilevel.data import strata_of
from fedbilevel.estimators import measures
from fedbilevel.estimators.columns import Numbers, numbers
from fedbilevel.estimators.survival_curves import check_steps, kaplan_meier
from fedbilevel.extending import is_count, printable, require, write_text

AskSites = Callable[[dict[str, Any]], list[Any]]
"""A function (question) -> the answers of all sites, in the order of `Study.sites`.

Both are values that JSON can store.
"""

POINTS = 10  # the number of points of a calibration curve
WIDEST = 100.0  # the largest half width of an interval of a logarithm, so that its exponential is finite


def held_out(share: float, stratum: Numbers, patients: Numbers | None, rng: np.random.Generator) -> Numbers:
    """Draw which rows of a site are held out, the given share of each stratum, and return a bool for each row.

    All rows of a patient are held out together, and are treated as rows of the largest of their strata.
    """
    strata, of = strata_of(np.arange(len(stratum)) if patients is None else patients, stratum)
    mixed = rng.permutation(len(strata))
    chosen = np.zeros(len(strata), bool)
    for one in np.unique(strata):
        members = mixed[strata[mixed] == one]
        chosen[members[: round(share * len(members))]] = True
    return chosen[of]


def answered(question: Mapping[str, Any], rows: Mapping[str, Any], least: int) -> Any:
    """Answer a question of the server of a study about a site's held-out rows.

    Args:
        rows: arrays by name, with an entry for each row: "score", the predictions; the target as the estimator encodes
            it; and "patients", or None.
        least: the smallest number of rows about which the site answers (`Study.min_count`).

    Returns:
        Measures, in a form that JSON can store; None if there are too few rows.
    """
    score, patients = rows["score"], rows["patients"]

    def measured(value: float, influence: Numbers) -> list[float]:
        return [value, measures.standard_error(influence, patients)]

    if len(score) < least:
        return None
    if "label" in rows:
        label = rows["label"]
        if min(np.sum(label == 0), np.sum(label == 1)) < least:
            return None

        def sums(at: Numbers) -> Numbers:
            return measures.calibration_sums(score, label, at, patients)

        if "at" in question:
            at = numbers("at of the question", question["at"])
            require(at.size % 2 == 0, "at of the question", at.shape, "pairs of numbers")
            return sums(at.reshape(-1, 2)).tolist()
        return {
            "auroc": measured(*measures.auroc(score, label)),
            "auprc": measured(*measures.auprc(score, label)),
            "calibration": measures.calibration(sums),
            "groups": measures.grouped(expit(score), label, least),
        }
    if "event" in rows:
        events = int(rows["event"].sum())
        pairs, value, influence = measures.concordance(rows["time"], rows["event"], score)
        if events < least or not pairs:
            return None
        slope = measures.hazard_slope(rows["time"], rows["event"], score, patients)
        found = {"concordance": measured(value, influence), "slope": slope}
        return {"rows": len(score), "events": events, "pairs": pairs, **found}
    error, away = rows["target"] - score, rows["target"] - rows["mean"]
    means = {
        name: measured(float(one.mean()), (one - one.mean()) / len(one))
        for name, one in (("squares", error**2), ("bias", error))
    }
    return {"rows": len(score), **means, "away": [float(away.sum()), float(np.sum(away**2))]}


@dataclass(frozen=True)
class Report:
    """A study's report about its model; it prints as a table.

    Args:
        content: the content of `report.json`.
    """

    content: dict[str, Any]

    def save(self, folder: str | Path) -> None:
        """Write the report to `folder`: as data, report.json, and as text, report.txt."""
        write_text(Path(folder) / "report.json", json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        write_text(Path(folder) / "report.txt", f"{self}\n")

    def __str__(self) -> str:
        return "\n".join(_lines(self.content))


def evaluated(model: Any, ask: AskSites) -> Any:
    """Return a copy of a `StudyModel` with a report about held-out rows.

    Raises:
        ConfigurationError: a site's answer has the wrong form; the message names the site.
    """
    study, estimator = model.agreement.study, model.estimator
    question = {"coef": estimator.coef_.tolist(), "intercept": getattr(estimator, "intercept_", 0.0)}
    content: dict[str, Any] = {"estimator": study.estimator, "target": study.target}
    if estimator.standard_errors_ is not None:
        errors = zip(model.agreement.names, estimator.coef_.tolist(), estimator.standard_errors_.tolist(), strict=True)
        content["coefficients"] = {name: {**_estimate(value, error), "error": error} for name, value, error in errors}
    if study.holdout:
        content["holdout"] = study.holdout
        answers = dict(zip(study.sites, ask(question), strict=True))
        measured = {site: answer for site, answer in answers.items() if answer is not None}
        for site, answer in measured.items():
            _check(site, answer, ANSWERS[study.estimator])
        asked = (study.holdout,) if isinstance(study.holdout, str) else study.sites
        few = f"fewer than {study.min_count} held-out rows{OF[study.estimator]}"
        content["undefined"] = {site: few for site in asked if site not in measured}
        if measured and study.estimator == "logistic":
            content |= _logistic(measured, lambda at: _sum_of(ask({**question, "at": at.tolist()}), study))
        elif measured:
            content |= (_cox if study.estimator == "cox" else _ridge)(measured)
        if isinstance(study.holdout, str):  # with a single site, the overall measures are the site's
            content = {name: one for name, one in content.items() if name not in ("within sites", "overall")}
    baselines = {}
    if study.times:
        steps = dict(zip(study.sites, ask({**question, "curves": True}), strict=True))
        baselines = {site: baseline for site, baseline in steps.items() if baseline is not None}
        for site, baseline in baselines.items():
            check_steps(site, baseline, study.times)
        content["kaplan meier"] = {"all sites": kaplan_meier(baselines)} if baselines else {}
        content["kaplan meier"] |= {site: kaplan_meier({site: baseline}) for site, baseline in baselines.items()}
    return replace(model, report=Report(content), baselines=baselines)


ANSWERS = {
    "logistic": ("auroc", "auprc", "calibration", "groups"),
    "ridge": ("rows", "squares", "bias", "away"),
    "cox": ("rows", "events", "pairs", "concordance", "slope"),
}
OF = {"logistic": " of a class", "ridge": "", "cox": " or events, or no pair of them"}


def _check(site: str, answer: Any, names: tuple[str, ...]) -> None:
    """Refuse a site's answer that does not have the form that `answered` returns."""

    def finite(part: Any, count: int) -> bool:
        fits = isinstance(part, list) and len(part) == count
        return fits and all(type(one) in (int, float) and math.isfinite(one) for one in part)

    def correct(name: str, part: Any) -> bool:
        if name in ("rows", "events", "pairs"):
            return is_count(part)
        if name == "groups":
            return isinstance(part, list) and all(finite(one, 5) and min(one[2:4]) >= 0 for one in part)
        if name == "squares":
            return finite(part, 2) and min(part) >= 0
        return (name in ("calibration", "slope") and part is None) or finite(part, 4 if name == "calibration" else 2)

    fits = isinstance(answer, dict) and answer.keys() == set(names)
    fits = fits and all(correct(name, part) for name, part in answer.items())
    require(fits, f"evaluation of {site}", type(answer).__name__, f"finite numbers: {', '.join(names)}")


def _sum_of(answers: list[Any], study: Any) -> Numbers:
    """Add up the `calibration_sums` in the answers of sites. Sites with too few rows answer None."""
    total = np.zeros((2, 9 if study.patient else 5))
    for site, answer in zip(study.sites, answers, strict=True):
        if answer is not None:
            sums = numbers(f"sums of {site}", answer)
            fits = sums.shape == total.shape and bool(np.isfinite(sums).all())
            require(fits, f"sums of {site}", answer, f"{total.shape}, finite")
            total += sums
    return total


def _logistic(answers: Mapping[str, Any], sums: Callable[[Numbers], Numbers]) -> dict[str, Any]:
    """Compute the report on a logistic regression from the answers of sites."""
    by_site, groups = {}, {site: np.array(answer["groups"], float).reshape(-1, 5) for site, answer in answers.items()}
    for site, answer in answers.items():
        negative, positive = groups[site][:, 2:4].sum(0).astype(int).tolist()
        require(min(negative, positive) > 0, f"groups of {site}", [negative, positive], "rows of both classes")
        by_site[site] = {"rows": negative + positive, "positive": positive}
        by_site[site] |= {name: _share(*answer[name]) for name in ("auroc", "auprc")}
        by_site[site]["calibration"] = _calibrated(answer["calibration"])
    positives = np.array([one["positive"] for one in by_site.values()])
    pairs = positives * np.array([one["rows"] - one["positive"] for one in by_site.values()])
    within = {
        name: _weighted([answer[name] for answer in answers.values()], weights)
        for name, weights in (("auroc", pairs), ("auprc", positives))
    }
    own = dict(zip(answers, [answer["auroc"][0] for answer in answers.values()], strict=True))
    bounded = within if len(answers) == 1 else _bounded(groups, own)  # with a single site, all pairs are known
    overall = {**bounded, "calibration": _calibrated(measures.calibration(sums))}
    return {"within sites": within, "overall": overall, "sites": by_site, "curve": _curve(groups)}


def _lines(content: Mapping[str, Any]) -> list[str]:
    """Write a report's content as lines of text."""
    lines = [f"{content['estimator']} regression of {printable(content['target'])}"]
    lines += _evaluation(content) if "holdout" in content else ["no rows were held out (holdout = 0): no evaluation"]
    for place, curve in content.get("kaplan meier", {}).items():
        lines.append(
            f"survival by Kaplan and Meier, {printable(place)}: time, rows at risk, events, share (95 % interval)"
        )
        for one in curve:
            share = _said({"": {"value": one["survival"], **one}}, "")
            lines.append(f"{one['time']:8g}  {one['at risk']:6d}  {one['events']:6d}  {share}")
    if "coefficients" in content:
        lines.append(
            "coefficients of prepared columns; the intervals ignore that the penalties were chosen by the data"
        )
        names = [*map(printable, content["coefficients"])]
        values = [_said(content["coefficients"], name) for name in content["coefficients"]]
        lines += [f"{name:{max(map(len, names))}}  {said}" for name, said in zip(names, values, strict=True)]
    return lines


def _evaluation(content: Mapping[str, Any]) -> list[str]:
    held = content["holdout"]
    if isinstance(held, str):
        offset = "" if content["estimator"] == "cox" else ", with the offset 0"
        which = f"all rows of {printable(held)}, predicted as rows of a site that was not in the study{offset}"
    else:
        which = f"the {held:.0%} of rows that each site has held out"
    lines = [f"measures of predictions for {which}, with 95 % intervals"]
    rows = [("within sites", content.get("within sites")), ("overall", content.get("overall"))]
    rows += content.get("sites", {}).items()
    names = [name for name in MEASURES if any(one and name in flat(one) for _, one in rows)]
    table = [["", *names]] + [
        [printable(name), *(_said(flat(one), measure) for measure in names)] for name, one in rows if one
    ]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines += [f"{printable(site)}: undefined, {why}" for site, why in content["undefined"].items()]
    sites = content.get("sites", {}).values()
    ranked = [one[name]["value"] for one in sites for name in ("auroc", "concordance") if name in one]
    if ranked and min(ranked) == 1:
        lines.append(PERFECT)
    for name, one in content.get("overall", {}).items():
        least, most = (
            f"{one[bound]:.3f}" if isinstance(one, dict) and bound in one else "" for bound in ("least", "most")
        )
        if least != most:
            lines.append(
                f"the exact overall {name} is between {least} and {most}; sites sent groups of predictions only"
            )
    if curve := content.get("curve"):
        lines += ["calibration: rows, mean predicted probability, share of positive rows"]
        lines += [f"{one['rows']:6d}  {one['predicted']:.3f}  {one['observed']:.3f}" for one in curve]
    return lines


PERFECT = (
    "at each site, all pairs of held-out rows are predicted in the right order: "
    "check that no column contains the outcome, or was recorded after it"
)
MEASURES = "rows", "positive", "events", "auroc", "auprc", "concordance", "rmse", "bias", "r2", "intercept", "slope"


def flat(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {**measured, **(measured.get("calibration") or {})}


def _said(measured: Mapping[str, Any], name: str) -> str:
    one = measured.get(name, "")
    if not isinstance(one, dict):
        return str(one)
    return f"{one['value']:.3f}" + (f" ({one['low']:.3f} to {one['high']:.3f})" if "low" in one else "")


def _estimate(value: float, error: float, share: bool = False) -> dict[str, float]:
    found = measures.interval(value, error, share)
    return {"value": value, **dict(zip(("low", "high"), found or (), strict=False))}


def _share(value: float, error: float) -> dict[str, float]:
    return _estimate(value, error, share=True)


def _weighted(estimates: list[list[float]], weights: Numbers, share: bool = True) -> dict[str, float]:
    """Return the weighted mean of independent estimates, with its interval."""
    values, errors = np.array(estimates).T
    weights = weights / weights.sum()
    return _estimate(float(weights @ values), float(np.sqrt(weights**2 @ errors**2)), share)


def _root(squares: Mapping[str, float]) -> dict[str, float]:
    """Return the root of a mean square, with an interval.

    The interval is computed for the logarithm of the root, so that neither of its bounds is below 0.
    """
    root = squares["value"] ** 0.5
    width = min((squares["high"] - squares["value"]) / (2 * squares["value"]), WIDEST) if root else 0.0
    return {"value": root, "low": root * math.exp(-width), "high": root * math.exp(width)}


def _calibrated(found: list[float] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    intercept, intercept_error, slope, slope_error = found
    return {"intercept": _estimate(intercept, intercept_error), "slope": _estimate(slope, slope_error)}


def _bounded(groups: Mapping[str, Numbers], own: Mapping[str, float]) -> dict[str, Any]:
    """Estimate AUROC and AUPRC over the rows of all sites, from groups of rows with similar predicted probabilities.

    The measures within each site are known exactly.

    If rows of two sites are in overlapping groups, it is not known which of them has the higher probability. A positive
    row is assumed to be above a negative row as often as within the sites' own groups.

    For the lower bound of precision, the negative rows of overlapping groups are ranked first; for the upper bound, the
    positive rows. The interval of AUROC assumes, for each site and class, the largest variation of ranks within a
    group, so it is wide.
    """
    start, stop, negative, positive, _ = np.vstack([*groups.values()]).T
    site = np.repeat(np.arange(len(groups)), [len(one) for one in groups.values()])
    above, apart = start[:, None] >= stop, site[:, None] != site
    beside = ~above & ~above.T
    n, m = (np.bincount(site, each) for each in (positive, negative))
    pairs = positive[:, None] * negative
    total, known = float(pairs.sum()), float(np.sum(np.array([*own.values()]) * n * m))
    inside = float(np.sum((pairs * beside)[~apart]))
    right = float(np.clip((known - np.sum((pairs * above)[~apart])) / inside, 0, 1)) if inside else 0.5
    least = float(known + np.sum((pairs * above)[apart])) / total
    most = least + float(np.sum((pairs * beside)[apart])) / total
    value, rank = least + right * (most - least), above + right * beside
    variance, spread = 0.0, right * (1 - right)
    for count, scores, open_ in (
        (positive, rank @ negative / negative.sum(), beside @ negative / negative.sum()),
        (negative, positive @ rank / positive.sum(), positive @ beside / positive.sum()),
    ):
        of_site = np.bincount(site, count)
        centred = scores - (np.bincount(site, count * scores) / of_site)[site]
        variance += (
            float(np.sum(count * (centred**2 + spread * open_**2) * (of_site / np.maximum(of_site - 1, 1))[site]))
            / count.sum() ** 2
        )

    def precision(hits_beside: float, misses_beside: float) -> float:
        """Compute the mean precision if these shares of the rows in overlapping groups are above a positive row."""
        hits = above.T @ positive + hits_beside * (beside @ positive - positive)
        misses, sums = above.T @ negative + misses_beside * (beside @ negative), 0.0
        for others, missed, count in zip(hits, misses, positive.astype(int), strict=True):
            upto = others + (np.arange(1, count + 1) if hits_beside < 1 else np.full(count, count))
            sums += float(np.sum(upto / (upto + missed)))
        return sums / float(positive.sum())

    area = {**_share(value, variance**0.5), "least": least, "most": most}
    return {
        "auroc": area,
        "auprc": {"value": precision(0.5, 1 - right), "least": precision(0, 1), "most": precision(1, 0)},
    }


def _cox(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the report on a Cox regression.

    Sites have different baseline hazards, so only rows of the same site can be compared.
    """
    by_site = {
        site: {
            "rows": one["rows"],
            "events": one["events"],
            "concordance": _share(*one["concordance"]),
            "calibration": None if one["slope"] is None else {"slope": _estimate(*one["slope"])},
        }
        for site, one in answers.items()
    }
    pairs = np.array([one["pairs"] for one in answers.values()])
    within = {"concordance": _weighted([one["concordance"] for one in answers.values()], pairs)}
    return {"within sites": within, "sites": by_site}


def _ridge(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the report on a ridge regression: root mean square and mean of target − prediction, and R²."""
    rows = np.array([one["rows"] for one in answers.values()])
    away, squares_away = np.array([one["away"] for one in answers.values()]).T
    within = squares_away - away**2 / rows  # squares of differences from the mean of the row's site

    def errors(weights: Numbers, variance: float) -> dict[str, Any]:
        squares, bias = (
            _weighted([one[name] for one in answers.values()], weights, share=False) for name in ("squares", "bias")
        )
        share = {"r2": {"value": 1 - squares["value"] * float(weights.sum()) / variance}} if variance > 0 else {}
        return {"rows": int(weights.sum()), "rmse": _root(squares), "bias": bias, **share}

    every = np.eye(len(rows), dtype=int) * rows
    by_site = {site: errors(every[i], float(within[i])) for i, site in enumerate(answers)}
    return {
        "within sites": errors(rows, float(within.sum())),
        "overall": errors(rows, float(squares_away.sum() - away.sum() ** 2 / rows.sum())),
        "sites": by_site,
    }


def _curve(groups: Mapping[str, Numbers]) -> list[dict[str, float]]:
    """Sort the groups of all sites by mean prediction, and join them to at most POINTS points of about equal size."""
    every = np.vstack([*groups.values()])
    rows = every[:, 2] + every[:, 3]
    every, rows = (each[np.argsort(every[:, 4] / rows, kind="stable")] for each in (every, rows))
    point = np.minimum(((np.cumsum(rows) - rows / 2) * POINTS / rows.sum()).astype(int), POINTS - 1)
    found = []
    for one in np.unique(point):
        count, (positive, chances) = rows[point == one].sum(), every[point == one][:, 3:].sum(0)
        found.append({"rows": int(count), "predicted": float(chances / count), "observed": float(positive / count)})
    return found
