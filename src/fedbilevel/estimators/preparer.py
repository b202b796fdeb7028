"""Numbers of a table with categories and gaps, agreed on by sites that show no rows.

`partial_fit` adds what a site tells: of each column of numbers how many there are, their mean and the sum of squares
about it; of each column of categories the names that occur. After all sites a number becomes (a − mean)/deviation and
a gap 0, which is the mean; a category becomes an indicator for each name, all 0 in a gap. `fit` on everyone's rows
gives the same, to rounding. (scikit-learn's `StandardScaler` adds up alike, but no site without any number.)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from fedbilevel.core.errors import ConfigurationError, require, unknown


class Preparer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Make standardised numbers and indicators of a data frame's columns.

    Args:
        categorical: columns whose numbers are codes of categories; texts and pandas' categories are anyway.

    `fit` sets `categories_`, the names by column, and `counts_`, `means_` and `squares_` of the columns of numbers.
    """

    def __init__(self, *, categorical: Sequence[str] = ()) -> None:
        self.categorical = categorical

    def fit(self, X: Any, y: Any = None) -> Any:
        """Forget what was told, and do as `partial_fit`."""
        if hasattr(self, "categories_"):
            del self.categories_
        return self.partial_fit(X)

    def partial_fit(self, X: Any, y: Any = None) -> Any:
        """Add what the rows of a data frame tell, such as those of a site; returns the preparer.

        Raises:
            ConfigurationError: a column is missing or unknown, or holds texts where sites before had numbers.
        """
        _require_frame(X)
        if not hasattr(self, "categories_"):
            for name in self.categorical:
                if name not in X.columns:
                    raise unknown("categorical column", name, map(str, X.columns))
            self.feature_names_in_, self.n_features_in_ = np.asarray(X.columns, object), len(X.columns)
            numbers = [name for name in X.columns if X[name].dtype.kind in "biuf" and name not in self.categorical]
            self.categories_: dict[Any, list[Any]] = {name: [] for name in X.columns if name not in numbers}
            self.counts_, self.means_, self.squares_ = np.zeros((3, len(numbers)))
        values = self._numbers(X)
        for name, before in self.categories_.items():
            self.categories_[name] = sorted({*before, *X[name].dropna()}, key=str)
        counts = np.sum(~np.isnan(values), axis=0)
        means = np.nansum(values, axis=0) / np.maximum(counts, 1)
        apart, total = means - self.means_, np.maximum(self.counts_ + counts, 1)
        self.squares_ += np.nansum((values - means) ** 2, axis=0) + apart**2 * self.counts_ * counts / total
        self.means_ += apart * counts / total
        self.counts_ += counts
        names = [str(name) for name in self.get_feature_names_out()]
        for name in names:
            require(names.count(name) == 1, f"column {name!r}", "made twice", "made once: rename a column or category")
        return self

    def transform(self, X: Any) -> Any:
        """Return a data frame of numbers without gaps, with the rows of X.

        Raises:
            ConfigurationError: a column is missing or unknown, or holds what no site had told.
        """
        check_is_fitted(self)
        deviation = np.sqrt(self.squares_ / np.maximum(self.counts_, 1))
        scaled = (self._numbers(X) - self.means_) / np.where(deviation > 0, deviation, 1)
        numbers, made = iter(np.where(np.isnan(scaled), 0, scaled).T), {}
        for name in self.feature_names_in_:
            if name not in self.categories_:
                made[name] = next(numbers)
                continue
            known = self.categories_[name]
            for value in X[name].dropna().unique():
                if value not in known:
                    raise unknown(f"category of column {name!r}", value, map(str, known))
            made |= {f"{name}_{value}": (X[name] == value).to_numpy(float, na_value=0) for value in known}
        return type(X)(made, index=X.index)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return the names of the columns that `transform` makes: of an indicator COLUMN_CATEGORY."""
        check_is_fitted(self)
        names = [
            [f"{name}_{one}" for one in self.categories_.get(name, [])] or [name] for name in self.feature_names_in_
        ]
        return np.asarray([name for several in names for name in several], object)

    def _numbers(self, X: Any) -> Any:
        """Return the values of the columns of numbers, NaN in gaps; check that all columns are known."""
        _require_frame(X)
        known = list(self.feature_names_in_)
        for name in known:
            if name not in X.columns:
                raise ConfigurationError(f"column {name!r} is missing; the frame has {', '.join(map(str, X.columns))}")
        for name in X.columns:
            if name not in known:
                raise unknown("column", name, map(str, known))
        numbers = [name for name in known if name not in self.categories_]
        for name in numbers:
            fits = X[name].dtype.kind in "biuf"
            require(fits, f"type of column {name!r}", str(X[name].dtype), "of numbers, as at the first site")
        values = X[numbers].to_numpy(float, na_value=np.nan)
        require(not np.isinf(values).any(), "X", "infinite numbers", "finite, or NaN in a gap")
        return values


def _require_frame(X: Any) -> None:
    require(hasattr(X, "iloc"), "X", type(X).__name__, "a pandas.DataFrame")
