"""What is made of a study's model for those who use it: predictions of a whole table."""

from typing import Any

import numpy as np

COLUMNS = {"logistic": ("probability", "class"), "ridge": ("number",), "cox": ("log_hazard",)}
"""The columns of predictions, by estimator."""


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
