"""Measure predictions of one site's rows, with standard errors.

U_j is the derivative of a measure in the weight of row j, c runs over the patients (over the rows, if no patients are
named), and m is their number. Then

    variance = m/(m − 1) Σ_c (Σ_{j of c} U_j)²

which is the infinitesimal jackknife (Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", SIAM 1982): to
first order, the variance of a bootstrap of the site's patients with infinitely many replicates. It needs no seed, and a
site sends one number. From many replicates with a known seed, a server could compute the ranks of rows. For AUROC it is
DeLong's variance (Biometrics 1988) but for factors m/(m − 1).
"""

from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit

from fedbilevel.estimators.columns import Numbers

CELLS = 50  # of probability, at most
NORMAL = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def standard_error(influence: Numbers, patients: Numbers | None) -> float:
    """Return the standard error of a measure by the influence of each row, (n,)."""
    each = influence if patients is None else np.bincount(patients, influence)[np.unique(patients)]
    return float(np.sqrt(np.sum(each**2) * len(each) / max(len(each) - 1, 1)))


def interval(value: float, error: float, share: bool = False) -> tuple[float, float]:
    """Return the 95 % interval; of a share, that of its log odds."""
    if not share:
        return value - NORMAL * error, value + NORMAL * error
    if not 0 < value < 1:
        return value, value
    low, high = expit(logit(value) + np.array([-1, 1]) * NORMAL * error / (value * (1 - value)))
    return float(low), float(high)


def auroc(score: Numbers, label: Numbers) -> tuple[float, Numbers]:
    """Return the share of pairs of a positive and a negative row in which the positive one has the higher score, equal
    ones counting half, and each row's influence."""
    positive, negative = np.sort(score[label == 1]), np.sort(score[label == 0])
    below = (np.searchsorted(negative, score, "left") + np.searchsorted(negative, score, "right")) / 2 / len(negative)
    above = 1 - (np.searchsorted(positive, score, "left") + np.searchsorted(positive, score, "right")) / 2 / len(
        positive
    )
    value = float(below[label == 1].mean())
    return value, np.where(label == 1, (below - value) / len(positive), (above - value) / len(negative))


def auprc(score: Numbers, label: Numbers) -> tuple[float, Numbers]:
    """Return the average precision, the mean over positive rows of the share of positives among the rows with their
    score or a higher one, and each row's influence."""
    positive, negative = np.sort(score[label == 1]), np.sort(score[label == 0])
    hits = len(positive) - np.searchsorted(positive, positive, "left")  # T_i
    all_above = hits + len(negative) - np.searchsorted(negative, positive, "left")  # T_i + F_i
    precision = hits / all_above
    value = float(precision.mean())
    upto = np.searchsorted(positive, score, "right")  # the positive rows whose precision a row counts in

    def summed(of_row: Numbers) -> Numbers:
        return np.append(0.0, np.cumsum(of_row))[upto]

    own = precision[np.minimum(np.searchsorted(positive, score, "left"), len(positive) - 1)]
    gained = own - value + summed((all_above - hits) / all_above**2)
    return value, np.where(label == 1, gained, -summed(hits / all_above**2)) / len(positive)


def concordance(time: Numbers, event: Numbers, risk: Numbers) -> tuple[int, float, Numbers]:
    """Return the number of pairs of rows of which one has an event before the other's time, Harrell's concordance (the
    share in which it has the higher risk, equal ones counting half), and each row's influence."""
    pairs, concordant = np.zeros(len(time)), np.zeros(len(time))
    for first in np.array_split(np.flatnonzero(event), max(1, int(np.sum(event)) // 256)):
        later = time[first, None] < time
        right = np.where(later, np.where(risk[first, None] == risk, 0.5, risk[first, None] > risk), 0.0)
        for total, each in ((pairs, later), (concordant, right)):
            total += each.sum(0)
            total[first] += each.sum(1)
    count = int(pairs.sum()) // 2
    value = float(concordant.sum() / 2 / count) if count else np.nan
    return count, value, (concordant - value * pairs) / max(count, 1)


def merged(counts: Numbers, least: int) -> list[tuple[int, int]]:
    """Merge neighbouring cells into groups of at least `least` rows.

    Returns (the first cell, the first cell after the group) of each group. If the last cells have fewer rows, they are
    in no group.
    """
    stops, rows = [], 0
    for cell, count in enumerate(counts.tolist(), 1):
        rows += count
        if rows >= least:
            stops.append(cell)
            rows = 0
    return list(zip([0, *stops], stops, strict=False))


def grouped(probability: Numbers, label: Numbers, least: int) -> list[list[float]]:
    """Count rows in groups of neighbouring cells of probability, of `least` rows each: for each group the first cell,
    the first cell behind it, negative rows, positive rows, and the sum of probabilities."""
    cell = np.minimum((probability * CELLS).astype(int), CELLS - 1)
    cells, groups = merged(np.bincount(cell, minlength=CELLS), least), []
    cells[-1:] = [(cells[-1][0], CELLS)]  # of `least` rows and the few above
    for start, stop in cells:
        inside = (start <= cell) & (cell < stop)
        positive = int(label[inside].sum())
        groups.append([start, stop, int(inside.sum()) - positive, positive, float(probability[inside].sum())])
    return groups


def calibration_sums(score: Numbers, label: Numbers, at: Numbers) -> Numbers:
    """Sum, for each point (a, b), over rows: the gradient of the log likelihood of label = 1 with log odds
    a + b score, (2,), and the information: a a, a b, b b; (points, 5)."""
    chance = expit(at[:, :1] + at[:, 1:] * score)
    left, weight = label - chance, chance * (1 - chance)
    parts = [left, left * score, weight, weight * score, weight * score**2]
    return np.stack([part.sum(1) for part in parts], 1)


def calibration(sums: Callable[[Numbers], Numbers]) -> list[float] | None:
    """Find the calibration intercept (at slope 1) and its standard error, the slope (with an intercept of its own) and
    its standard error, by Newton's method; None where it does not converge, as where scores separate the classes.

    Args:
        sums: `calibration_sums` of all rows, at points (2, 2).
    """
    at = np.array([[0.0, 1.0], [0.0, 0.0]])
    for _ in range(15):
        found = sums(at)
        (g, _, i, *_), (g_a, g_b, aa, ab, bb) = found
        size = aa * bb - ab**2
        if not (i > 0 and size > 1e-12 * aa * bb):
            return None
        step = np.array([[g / i, 0.0], [(bb * g_a - ab * g_b) / size, (aa * g_b - ab * g_a) / size]])
        at = at + step
        if np.abs(step).max() <= 1e-9 * (1 + np.abs(at).max()):
            return [float(at[0, 0]), float(i**-0.5), float(at[1, 1]), float((aa / size) ** 0.5)]
    return None


def hazard_slope(time: Numbers, event: Numbers, risk: Numbers, patients: Numbers | None = None) -> list[float] | None:
    """Find the slope of a Cox regression of the rows on their log hazards, and its standard error, by Newton's method:
    1 where differences of hazards are as large as predicted, less where they are smaller; None without a maximum.

    Args:
        patients: the error is then the sandwich of Lin and Wei (JASA 1989), with the rows of a patient together; None:
            that of the information.
    """
    if not (scale := float(np.std(risk))) > 0:
        return None
    order = np.argsort(-time, kind="stable")
    time, event, risk = time[order], event[order], ((risk - risk.mean()) / scale)[order]
    last = np.searchsorted(-time, -time, "right") - 1  # at risk are all rows up to the last of the same time
    slope = 0.0
    for _ in range(25):
        weight = np.exp(slope * risk - np.max(slope * risk))
        total, first, second = (np.cumsum(weight * risk**power)[last] for power in range(3))
        mean = first / total
        gradient, information = np.sum(event * (risk - mean)), np.sum(event * (second / total - mean**2))
        if not information > 1e-9:
            return None
        step = float(np.clip(gradient / information, -2, 2))
        slope += step
        if abs(step) <= 1e-9 * (1 + abs(slope)):
            if patients is None:
                return [slope / scale, float(information**-0.5) / scale]
            # an event adds weight/total (risk - mean) to the expected score of each row that is at risk at its time
            ended = np.cumsum((event / total)[::-1])[::-1], np.cumsum((event * mean / total)[::-1])[::-1]
            start = np.searchsorted(-time, -time, "left")  # the first row of the same time
            scores = event * (risk - mean) - weight * (risk * ended[0][start] - ended[1][start])
            return [slope / scale, standard_error(scores / information, patients[order]) / scale]
    return None
