"""What is made of a study's model for those who use it: predictions of a whole table, and its coefficients in units of
the original columns.

A prepared number is (a − mean)/deviation, so that a coefficient w of it is w/deviation for each unit of a, and the
intercept of a row whose numbers are all 0 is b − Σ w mean/deviation.
"""

from typing import Any

import numpy as np

from fedbilevel.data.columns import deviation
from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import require

COLUMNS = {"logistic": ("probability", "class"), "ridge": ("number",), "cox": ("log_hazard",)}
"""The columns of predictions, by estimator."""
RATIOS = {"logistic": "odds ratio", "cox": "hazard ratio"}
INTERCEPT = "(intercept)"


def predictions(model: Any, frame: Any, site: str = "") -> Any:
    """Predict each row of a table.

    Args:
        model: a `StudyModel`.
        frame: a data frame with the columns of the study; others are ignored.
        site: as of `StudyModel.prepared`.

    Returns:
        A data frame with a row for each row of `frame`: its number in "row", from 1 on, and its prediction. Of logistic
        regression these are the "probability" of the positive class and the likelier "class", of ridge regression a
        "number", and of Cox's model the "log_hazard" above the site's baseline.

    Raises:
        ConfigurationError: the site is unknown, or a column is missing or holds values that are not allowed.
    """
    kind = model.agreement.study.estimator
    values = [model.predict_proba(frame, site)] if kind == "logistic" else []
    values.append(model.predict(frame, site))
    made = {"row": np.arange(1, len(frame) + 1), **dict(zip(COLUMNS[kind], values, strict=True))}
    return type(frame)(made)


def coefficient_table(model: Any) -> Any:
    """Make the data frame that `StudyModel.table` describes."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigurationError("the table of coefficients needs pandas: pip install pandas") from error
    features, estimator = model.agreement.features, model.estimator
    told = [(name, word, one) for name, one in features.items() for word in one.get("categories", [""])]
    units = np.array([1.0 if "categories" in one else deviation(one) for _, _, one in told])
    means = np.array([one.get("mean", 0.0) for _, _, one in told])
    errors = estimator.standard_errors_
    made: dict[str, Any] = {"column": [name for name, _, _ in told], "category": [word for _, word, _ in told]}
    made["coefficient"] = estimator.coef_ / units
    made["standard error"] = np.full(len(told), np.nan) if errors is None else errors / units
    made["penalty"] = np.asarray(estimator.penalties_, float)
    frame = pd.DataFrame(made)
    kind = model.agreement.study.estimator
    if kind in RATIOS:
        frame.insert(3, RATIOS[kind], np.exp(frame["coefficient"]))
    if estimator.has_intercept:
        at_zero = estimator.intercept_ - float(frame["coefficient"] @ means)
        first = pd.DataFrame({"column": [INTERCEPT], "category": [""], "coefficient": [at_zero]})
        frame = pd.concat([first.reindex(columns=frame.columns), frame], ignore_index=True)
    return frame


def fitted_pipeline(model: Any) -> Any:
    """Make the pipeline that `StudyModel.pipeline` describes."""
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
