"""Use a study's model: predict for rows of a table, and convert coefficients to units of the original columns.

A prepared number is (a − mean)/deviation, where a is the original number. If w is its coefficient, the coefficient for
one unit of a is w/deviation. If b is the intercept, the intercept for a row whose original numbers are all 0 is b − Σ w
mean/deviation.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedbilevel.data.columns import deviation
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.extending import missing, require, warn

COLUMNS = {"logistic": ("probability", "class"), "ridge": ("number",), "cox": ("log_hazard",)}
"""The names of the columns that `predictions` returns, by estimator."""
FAR = 10  # a number is far away if its distance from the mean of the study is this many standard deviations
RATIOS = {"logistic": "odds ratio", "cox": "hazard ratio"}
INTERCEPT = "(intercept)"


def predictions(model: Any, frame: Any, site: str = "") -> Any:
    """Return a model's prediction for each row of a table.

    Args:
        model: a `StudyModel`.
        frame: a data frame with the columns of the study; others are ignored.
        site: the site of the rows, as in `StudyModel.prepared`.

    Returns:
        A data frame with a row for each row of `frame`. The column "row" has the number of the row, from 1 on. The
        other columns have the prediction: for logistic regression the "probability" of the positive class, and "class",
        the more probable class; for ridge regression a "number"; for Cox's model the "log_hazard" above the site's
        baseline.

    Raises:
        ConfigurationError: the site is unknown, or a column is missing or holds values that are not allowed.
    """
    kind = model.agreement.study.estimator
    rows = model.prepared(frame, site)  # once, so that its warnings appear once
    values = [model.estimator.predict_proba(rows)[:, 1]] if kind == "logistic" else []
    values.append(model.estimator.predict(rows))
    made = {"row": np.arange(1, len(frame) + 1), **dict(zip(COLUMNS[kind], values, strict=True))}
    return type(frame)(made)


def warn_of_far_numbers(features: Mapping[str, dict[str, Any]], frame: Any) -> None:
    """Warn of numbers of a table that are far from the numbers of a study, by which the model was fitted.

    If the mean of the study is from 0 to 1, numbers from 0 to 1 are never far: the column may have only 0 and 1.

    Args:
        features: the statistics of the features of all sites together, by column.
        frame: a data frame with these columns.
    """
    for name, one in features.items():
        if one.get("squares") and frame[name].dtype.kind in "iuf":
            numbers = frame[name].to_numpy(float, na_value=np.nan)
            far = numbers[np.abs(numbers - one["mean"]) > FAR * deviation(one)]
            if 0 <= one["mean"] <= 1:  # a rare 1 in a column of 0 and 1 is no other unit and no code
                far = far[(far < 0) | (far > 1)]
            if far.size:
                such = ", ".join(f"{number:g}" for number in np.unique(far)[:3])
                rows = f"{far.size} row{'s' * (far.size > 1)}"
                text = f"column {name!r} has numbers that are far from those of the study ({such}) in {rows}"
                mean = f"the mean of the study is {one['mean']:g}, and the standard deviation {deviation(one):g}"
                what = "Correct a wrong unit; leave an entry empty if its number is a code for a gap"
                warn(DataWarning(f"{text}; {mean}. {what}"))


def data_frame(columns: Mapping[str, Any]) -> Any:
    """Make a pandas.DataFrame from columns, given by name.

    Raises:
        ConfigurationError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigurationError(f"a data frame needs {missing('pandas', 'tables')}") from error
    return pd.DataFrame(columns)


def in_units(model: Any) -> tuple[float, list[tuple[tuple[str, str, dict[str, Any]], float]]]:
    """Convert the model's coefficients to units of the original columns.

    Returns:
        The intercept: the log odds, the number or the log hazard of a row whose numbers are 0 and whose words are gaps.
        And, for each coefficient: ((column, category, statistics of the column), value). The category is empty for
        numbers.
    """
    features, estimator = model.agreement.features, model.estimator
    rows = [(name, word, one) for name, one in features.items() for word in one.get("categories", [""])]
    units = np.array([1.0 if "categories" in one else deviation(one) for _, _, one in rows])
    values = estimator.coef_ / units
    means = np.array([one.get("mean", 0.0) for _, _, one in rows])
    return float(getattr(estimator, "intercept_", 0.0) - values @ means), list(zip(rows, values.tolist(), strict=True))


def intercept_error(agreement: Any, estimator: Any) -> float | None:
    """Compute the standard error of the intercept for a row whose original numbers are all 0.

    This intercept is b − Σ w mean/deviation, which is linear in the intercept b and the coefficients w.

    The result is None if there is no intercept, or if the covariance of the coefficients is not known.
    """
    if estimator.covariance_ is None or not estimator.has_intercept:
        return None
    features = agreement.features.values()
    moved = [
        -one["mean"] / deviation(one) if "mean" in one else 0.0 for one in features for _ in one.get("categories", [""])
    ]
    slope = np.array([*moved, 1.0])
    return float(np.sqrt(slope @ estimator.covariance_ @ slope))


def coefficient_table(model: Any) -> Any:
    """Make the table of a model's coefficients: see `StudyModel.table`."""
    estimator, (at_zero, coefficients) = model.estimator, in_units(model)
    rows = [one for one, _ in coefficients]
    units = np.array([1.0 if "categories" in one else deviation(one) for _, _, one in rows])
    errors = estimator.standard_errors_
    made: dict[str, Any] = {"column": [name for name, _, _ in rows], "category": [word for _, word, _ in rows]}
    made["coefficient"] = np.array([value for _, value in coefficients])
    made["standard error"] = np.full(len(rows), np.nan) if errors is None else errors / units
    made["penalty"] = np.asarray(estimator.penalties_, float)
    frame = data_frame(made)
    kind = model.agreement.study.estimator
    if kind in RATIOS:
        frame.insert(3, RATIOS[kind], np.exp(frame["coefficient"]))
    if estimator.has_intercept:
        first = {"column": INTERCEPT, "category": "", "coefficient": at_zero, "standard error": model.intercept_error}
        frame = data_frame({name: [first.get(name, np.nan), *frame[name]] for name in frame})
    return frame


def fitted_pipeline(model: Any) -> Any:
    """Make a scikit-learn Pipeline of a model: see `StudyModel.pipeline`."""
    from sklearn import linear_model
    from sklearn.pipeline import Pipeline

    agreed, fitted = model.agreement, model.estimator
    kind = agreed.study.estimator
    require(kind != "cox", "pipeline", kind, "of logistic or ridge regression: scikit-learn has no Cox model")
    plain = linear_model.LogisticRegression() if kind == "logistic" else linear_model.Ridge()
    plain.n_features_in_ = len(agreed.names)
    plain.feature_names_in_ = np.array(agreed.names, object)
    if kind == "logistic":
        plain.classes_, plain.n_iter_ = fitted.classes_, np.zeros(1, np.int32)
        plain.coef_, plain.intercept_ = fitted.coef_[None], np.array([fitted.intercept_])
    else:
        plain.coef_, plain.intercept_ = fitted.coef_, fitted.intercept_
    return Pipeline([("preparer", agreed.preparer), ("model", plain)])
