"""Measure predictions of one site's rows, with standard errors.

Let U_j, the influence of row j, be the derivative of a measure by the weight of row j. Let c run over the m patients,
or over the m rows if no patients are given. Then

    variance = m/(m − 1) Σ_c (Σ_{j of c} U_j)²

This is the infinitesimal jackknife (Efron, "The Jackknife, the Bootstrap and Other Resampling Plans", SIAM 1982). To
first order, it is the variance of a bootstrap of the site's patients with infinitely many replicates. It needs no seed,
and a site sends only one number. From many bootstrap replicates with a known seed, a server could compute the ranks of
rows. For AUROC it is DeLong's variance (Biometrics 1988), up to factors m/(m − 1).

The calibration of all sites together is fitted from sums over rows, so its errors have to follow from sums, too. With
the information matrix I of the calibration model, and the score s_j of row j, its covariance is

    m/(m − 1) I⁻¹ [Σ_c (Σ_{j of c} s_j)(Σ_{j of c} s_j)ᵀ] I⁻¹    if patients are given, m in all
    I⁻¹                                                         otherwise

If each patient has one row and the model is right, the expectation of the sum in brackets is I.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import expit, logit

from fedbilevel.estimators.columns import Numbers

CELLS = 50  # the largest number of cells into which probabilities are divided
NORMAL = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def sums_by_patient(of_row: Numbers, patients: Numbers) -> Numbers:
    """Add up the numbers of each patient's rows.

    Args:
        of_row: an array of shape (n,) or (n, D), with a number or D numbers for each row.
        patients: an array of shape (n,), whose equal entries mean the same patient.

    Returns:
        An array of shape (m,) or (m, D), for the m patients in rising order.
    """
    _, patient = np.unique(patients, return_inverse=True)
    total = np.zeros((int(np.max(patient, initial=-1)) + 1, *of_row.shape[1:]))
    np.add.at(total, patient, of_row)
    return total


def standard_error(influence: Numbers, patients: Numbers | None) -> float:
    """Return the standard error of a measure. `influence` has the influence of each row on the measure."""
    each = influence if patients is None else sums_by_patient(influence, patients)
    return float(np.sqrt(np.sum(each**2) * len(each) / max(len(each) - 1, 1)))


def interval(value: float, error: float, share: bool = False) -> tuple[float, float] | None:
    """Return the 95 % interval of a value with a standard error.

    The interval of a share is computed for its log odds, so that it lies between 0 and 1. A share of 0 or 1 has no
    interval: its standard error is 0 for any number of rows, since no row has an influence.
    """
    if not share:
        return value - NORMAL * error, value + NORMAL * error
    if not 0 < value < 1:
        return None
    low, high = expit(logit(value) + np.array([-1, 1]) * NORMAL * error / (value * (1 - value)))
    return float(low), float(high)


def auroc(score: Numbers, label: Numbers) -> tuple[float, Numbers]:
    """Return the AUROC, and each row's influence on it.

    AUROC is the share of pairs of a positive and a negative row in which the positive row has the higher score. A pair
    with equal scores counts as one half.
    """
    positive, negative = np.sort(score[label == 1]), np.sort(score[label == 0])
    below = (np.searchsorted(negative, score, "left") + np.searchsorted(negative, score, "right")) / 2 / len(negative)
    above = 1 - (np.searchsorted(positive, score, "left") + np.searchsorted(positive, score, "right")) / 2 / len(
        positive
    )
    value = float(below[label == 1].mean())
    return value, np.where(label == 1, (below - value) / len(positive), (above - value) / len(negative))


def auprc(score: Numbers, label: Numbers) -> tuple[float, Numbers]:
    """Return the average precision, and each row's influence on it.

    The precision at a positive row is the share of positive rows among all rows whose score is at least as high.
    Average precision is the mean of this share over all positive rows.
    """
    positive, negative = np.sort(score[label == 1]), np.sort(score[label == 0])
    hits = len(positive) - np.searchsorted(positive, positive, "left")  # T_i
    all_above = hits + len(negative) - np.searchsorted(negative, positive, "left")  # T_i + F_i
    precision = hits / all_above
    value = float(precision.mean())
    upto = np.searchsorted(positive, score, "right")  # the number of positive rows in whose precision a row counts

    def summed(of_row: Numbers) -> Numbers:
        return np.append(0.0, np.cumsum(of_row))[upto]

    own = precision[np.minimum(np.searchsorted(positive, score, "left"), len(positive) - 1)]
    gained = own - value + summed((all_above - hits) / all_above**2)
    return value, np.where(label == 1, gained, -summed(hits / all_above**2)) / len(positive)


def concordance(time: Numbers, event: Numbers, risk: Numbers) -> tuple[int, float, Numbers]:
    """Return the number of comparable pairs, Harrell's concordance, and each row's influence on it.

    A pair is comparable if one row has an event before the other row's time. Concordance is the share of these pairs in
    which the row with this event has the higher risk. A pair with equal risks counts as one half.
    """
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

    Returns (first cell, first cell after the group) for each group. If the last cells have too few rows, they are in no
    group.
    """
    stops, rows = [], 0
    for cell, count in enumerate(counts.tolist(), 1):
        rows += count
        if rows >= least:
            stops.append(cell)
            rows = 0
    return list(zip([0, *stops], stops, strict=False))


def grouped(probability: Numbers, label: Numbers, least: int) -> list[list[float]]:
    """Count rows in groups of neighbouring cells of predicted probability; each group has at least `least` rows.

    Returns for each group: its first cell, the first cell after it, the numbers of negative and of positive rows, and
    the sum of the probabilities.
    """
    cell = np.minimum((probability * CELLS).astype(int), CELLS - 1)
    cells, groups = merged(np.bincount(cell, minlength=CELLS), least), []
    cells[-1:] = [(cells[-1][0], CELLS)]  # this group also gets the rows after the last full group
    for start, stop in cells:
        inside = (start <= cell) & (cell < stop)
        positive = int(label[inside].sum())
        groups.append([start, stop, int(inside.sum()) - positive, positive, float(probability[inside].sum())])
    return groups


def calibration_sums(score: Numbers, label: Numbers, at: Numbers, patients: Numbers | None = None) -> Numbers:
    """Return derivatives of a calibration model's log likelihood at points (a, b), summed over rows.

    In the model, label = 1 has the log odds a + b·score. The result has a row of five numbers for each point: the
    gradient in a and b, and the entries (a, a), (a, b) and (b, b) of the information matrix. If the patient of each row
    is given, a row has four more numbers. The gradient of a patient's rows has the products (a, a), (a, b) and (b, b)
    of its entries; three numbers are the sums of these products over all patients, and the last is the number of
    patients.
    """
    chance = expit(at[:, :1] + at[:, 1:] * score)
    left, weight = label - chance, chance * (1 - chance)
    parts = [left, left * score, weight, weight * score, weight * score**2]
    if patients is None:
        return np.stack([part.sum(1) for part in parts], 1)
    a, b = (sums_by_patient(part.T, patients) for part in parts[:2])
    products = [(a * a).sum(0), (a * b).sum(0), (b * b).sum(0), np.full(len(at), len(a))]
    return np.stack([*(part.sum(1) for part in parts), *products], 1)


def calibration(sums: Callable[[Numbers], Numbers]) -> list[float] | None:
    """Compute the calibration intercept, its standard error, the calibration slope, and its standard error.

    The intercept is fitted with the slope fixed at 1; the slope is fitted together with another intercept. Both fits
    use Newton's method. If it does not converge, for example because the scores separate the classes, the result is
    None. It is also None if all rows are of one patient, so that no standard error can be computed.

    Args:
        sums: a function that returns `calibration_sums` of all rows at two points, which it gets as an array of shape
            (2, 2).
    """
    at = np.array([[0.0, 1.0], [0.0, 0.0]])
    for _ in range(15):
        found = sums(at)
        (g, _, i, *_), (g_a, g_b, aa, ab, bb) = found[:, :5]
        size = aa * bb - ab**2
        if not (i > 0 and size > 1e-12 * aa * bb):
            return None
        step = np.array([[g / i, 0.0], [(bb * g_a - ab * g_b) / size, (aa * g_b - ab * g_a) / size]])
        at = at + step
        if np.abs(step).max() <= 1e-9 * (1 + np.abs(at).max()):
            variances = 1 / i, aa / size
            if found.shape[1] > 5:
                (of_intercept, *_), (p_aa, p_ab, p_bb, count) = found[:, 5:]
                of_slope = ab**2 * p_aa - 2 * aa * ab * p_ab + aa**2 * p_bb
                variances = of_intercept / i**2, of_slope / size**2
                if not (count > 1 and min(variances) >= 0):
                    return None
                variances = variances[0] * count / (count - 1), variances[1] * count / (count - 1)
            return [float(at[0, 0]), float(variances[0] ** 0.5), float(at[1, 1]), float(variances[1] ** 0.5)]
    return None


def hazard_scores(risk: Numbers, columns: Numbers, event: Numbers, last: Numbers) -> Numbers:
    """Return the score of each row of a Cox regression, by Lin and Wei (JASA 1989).

    The score is the derivative of the gradient of the log partial likelihood (with Breslow's ties) in the row's weight.
    The scores of all rows add up to the gradient.

    Args:
        risk: the log hazard of each row, of shape (n,), for rows that are sorted by time, latest first.
        columns: the features of each row, of shape (n, D).
        event: 1 for an event and 0 for none, of shape (n,).
        last: the index of the last row with the same time, of shape (n,). All rows up to it are at risk.

    Returns:
        An array of shape (n, D).
    """
    weight = np.exp(risk - np.max(risk))[:, None]
    total = np.cumsum(weight, 0)[last]
    mean = np.cumsum(weight * columns, 0)[last] / total
    # Each event adds weight/total (columns - mean) to the expected score of every row at risk at its time.
    hazard = event[:, None] / total
    start = np.searchsorted(last, last, "left")  # the first row of the same time
    ended, ended_mean = (np.cumsum(one[::-1], 0)[::-1][start] for one in (hazard, hazard * mean))
    return np.asarray(event[:, None] * (columns - mean) - weight * (columns * ended - ended_mean))


def hazard_slope(time: Numbers, event: Numbers, risk: Numbers, patients: Numbers | None = None) -> list[float] | None:
    """Compute the slope of a Cox regression on the rows' predicted log hazards, and its standard error.

    The slope is 1 if hazards differ as much as predicted, and smaller if they differ less. It is found by Newton's
    method. If the likelihood has no maximum, the result is None.

    Args:
        patients: the patient of each row, for the robust standard error of Lin and Wei (JASA 1989), in which the rows
            of a patient count together. None: the standard error follows from the information matrix.
    """
    if not (scale := float(np.std(risk))) > 0:
        return None
    order = np.argsort(-time, kind="stable")
    time, event, risk = time[order], event[order], ((risk - risk.mean()) / scale)[order]
    last = np.searchsorted(-time, -time, "right") - 1  # all rows up to the last with the same time are at risk
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
            scores = hazard_scores(slope * risk, risk[:, None], event, last)[:, 0]
            return [slope / scale, standard_error(scores / information, patients[order]) / scale]
    return None
