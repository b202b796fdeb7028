"""Heart disease in four hospitals: penalties of features and weights of hospitals, found by cross-validation.

The patients, the features and the split into training and test patients are those of FLamby's Fed-Heart-Disease (Ogier
du Terrail et al., NeurIPS 2022). Each hospital is a client, and standardises its features by its own training patients.
The problem is the one of the task `tables`, with logistic models, a penalty for each entry of a model (intercepts
included), and a weight for each hospital.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from fedbilevel.core.errors import require, unknown
from fedbilevel.data import load_heart
from fedbilevel.data.clients import dealt
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.tasks.linear import Model, SiteRows, task_of, weighting_of
from fedbilevel.tasks.outcomes import OUTCOMES
from fedbilevel.tasks.task import Floats, Task

Weighting = Literal["size", "equal"]


def hospitals(
    *,
    only: Sequence[str] = tuple(HOSPITALS),
    tuned: bool = True,
    folds: int = 5,
    offsets: bool = True,
    ridge: float = 0.01,
    weighting: Weighting = "size",
    holdout: float = 0.0,
    seed: int = 0,
    party: int | str = "all",
) -> Task:
    """Fit a logistic model to the patients of four hospitals.

    Each hospital standardises features by its own training patients.

    The metrics are the accuracy and the mean loss on all test patients, and the accuracy on the test patients of each
    hospital.

    Args:
        only: the hospitals to take, out of "cleveland", "hungarian", "switzerland" and "va". If empty, all are taken,
            in this order.
        tuned: whether penalties and weights are tuned. If not, the problem has a single level, in which only the model
            is trained and every penalty is `ridge`; FedAvg and FedLin solve it.
        folds: the number of folds, K.
        offsets: whether each hospital has an intercept of its own, in addition to the common intercept. The hospital's
            intercept is the coefficient of a feature that is 1 for the hospital's patients and 0 for others.
        ridge: the value of every penalty at the start.
        weighting: how the clients' weights p_i are set in both losses: by the numbers of training patients ("size"), or
            "equal".
        holdout: the share of each hospital's training patients that is held out. Above 0, the metrics are measured on
            these patients in place of the test patients.
        seed: the seed of the split into training and test patients, of the holdout and of the folds. The split of seed
            0 is FLamby's own.
        party: "all" in a simulation; in a federation the number of a client, whose task has only the patients of its
            own file.
    """
    names = list(only) or list(HOSPITALS)
    for name in names:
        if name not in HOSPITALS:
            raise unknown("only", name, HOSPITALS)
    require(len(set(names)) == len(names), "only", names, "hospitals, each once")
    require(0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    features = 13 + (len(names) if offsets else 0) + 1
    model = Model(
        outcome=OUTCOMES["binary"],
        sites=len(names),
        penalty=range(features),
        folds=folds,
        ridge=ridge,
        tuned=tuned,
        weighted=tuned,
    )
    weights = weighting_of(weighting)
    numbers = list(range(len(names)))
    if not isinstance(party, str):
        require(party in numbers, "party", party, f"one of 0 to {len(names) - 1}, the hospitals")
        numbers = [party]
    wards = [_ward(names[i], i, len(names) if offsets else 0, folds, holdout, seed) for i in numbers]
    return task_of("hospitals", model, wards, weights=weights, part="validation" if holdout else "test", party=party)


def _ward(name: str, number: int, indicators: int, folds: int, holdout: float, seed: int) -> SiteRows:
    """Load the patients of hospital `number` of the federation.

    A row has the patient's features, then `indicators` entries of which entry `number` is 1 and the others are 0, and
    at the end a 1.
    """
    found = load_heart(name)
    training, measured = stratified(found.labels, TRAINING, FLAMBY + seed)
    if holdout:
        kept, aside = stratified(found.labels[training], 1 - holdout, FLAMBY + seed)
        training, measured = training[kept], training[aside]
    own = found.rows[training].astype(float)
    spread = np.where(np.ptp(own, axis=0) > 0, own.std(0), 1)
    rows = (found.rows - own.mean(0)) / spread
    constant = [float(i == number) for i in range(indicators)] + [1.0]
    rows = np.column_stack([rows, np.tile(constant, (len(rows), 1))]).astype(np.float32)

    def some(chosen: np.ndarray) -> dict[str, Floats]:
        return {"row": rows[chosen], "label": found.labels[chosen]}

    fold = dealt(found.labels[training], folds, np.random.default_rng([seed, number, 7]))
    at = np.full(len(training), number, np.int32)
    return SiteRows(name, {**some(training), "fold": fold, "site": at}, some(measured))
