"""Use a site's own table in a study: make the statistics that the site sends, its samples, and its answers."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fedbilevel.data import generator_of_site
from fedbilevel.data.columns import MOST, hidden_entries
from fedbilevel.errors import DataWarning
from fedbilevel.estimators import coefficient_errors
from fedbilevel.estimators.agreement import SITE, Agreement, require_columns
from fedbilevel.estimators.coefficient_errors import SCORES
from fedbilevel.estimators.columns import (
    labels,
    numbers_asked,
    refusal,
    require_frame,
    require_in_frame,
    require_values,
)
from fedbilevel.estimators.evaluation import answered, held_out
from fedbilevel.estimators.fold_models import WIDE
from fedbilevel.estimators.preparer import NUMBERS, Preparer, Summaries, words_of
from fedbilevel.estimators.survival_curves import steps
from fedbilevel.extending import require, unknown, warn


class SiteTable:
    """A site's own rows, in the form in which the site uses them in a study.

    Args:
        study: the `Study`.
        site: the site's name.
        frame: a data frame of the site's rows; rows without a target are left out.

    Raises:
        ConfigurationError: a column is missing, a value is not allowed, or there are too few rows.
    """

    def __init__(self, study: Any, site: str, frame: Any) -> None:
        self.study, self.site = study, site
        require_in_frame([*study.not_features, *study.columns], frame)
        targets = [study.target, *([study.event] if study.event else [])]
        kept = frame[frame[targets].notna().all(axis=1)].reset_index(drop=True)
        self.left_out = len(frame) - len(kept)
        self._require_values(kept)
        if study.patient:
            gaps = int(kept[study.patient].isna().sum())
            each = "the patient of each row; a row of an unknown patient needs an identifier of its own"
            if gaps:
                has = f"a gap in {gaps} row{'s' * (gaps > 1)}"
                raise refusal(f"column {study.patient!r}", has, "a gap", each)
        patients = (
            labels("patient", kept[study.patient], len(kept), "the patient of each row")[1] if study.patient else None
        )
        self.whole = study.holdout == site
        held = self._held_out(kept[targets[-1]], patients)
        count, beside = int(np.sum(held == self.whole)), bool(held.any()) and not self.whole
        allowed = f"{study.min_count} or more, as min_count says" + ", in addition to the held-out rows" * beside
        require(count >= study.min_count, "the number of rows with a target", count, allowed)
        self.absent = [name for name in study.drop if name not in kept]
        if self.absent:
            names = ", ".join(map(repr, self.absent))
            warn(DataWarning(f"the table has no column {names}, which the study leaves out (drop)"))
        others = kept.drop(columns=[*study.not_features, *study.drop], errors="ignore")
        features = kept[list(study.columns)] if study.columns else others
        if study.offsets:
            require(SITE not in features, f"column {SITE!r}", "a feature", "left out (drop), or offsets = false")
            features = features.copy().assign(**{SITE: None if self.whole else site})  # a copy has joined columns
        preparer = Preparer(categorical=[*study.categorical, *([SITE] if study.offsets else [])])
        used = preparer.fit(features[held == self.whole]).summaries(study.min_count)
        self.summaries = preparer.fit(features[~held]).summaries(study.min_count) if self.whole else used
        features = _used(features, used)
        self.features, self.target = features[~held], kept.loc[~held, targets]
        self.patients = None if patients is None else patients[~held]
        self.held_out = features[held], kept.loc[held, targets], None if patients is None else patients[held]

    def _require_values(self, kept: Any) -> None:
        """Refuse times, events and numbers that no model can use, in all rows that have a target."""
        import pandas as pd

        study = self.study
        columns = study.columns or [name for name in kept if name not in (*study.not_features, *study.drop)]
        require_frame(kept[[*study.not_features, *columns]])
        if study.event:
            events = words_of(kept[study.event])
            allowed = "1 if the event came, and 0 if not"
            require_values(study.event, events.to_numpy(), events.isin(["0", "1"]).to_numpy(bool), allowed)
        targets = [study.target] if study.estimator != "logistic" else []
        measured = [name for name in columns if name not in study.categorical and kept[name].dtype.kind in NUMBERS]
        for name in [*targets, *measured]:
            values = pd.to_numeric(kept[name], errors="coerce").to_numpy(float, na_value=np.nan)
            least = 0.0 if study.event and name == study.target else -MOST
            fits = (least <= values) & (values <= MOST) | kept[name].isna().to_numpy()
            what = "a time" if least == 0 else "a number"
            require_values(name, kept[name].to_numpy(), fits, f"{what} from {least:g} to {MOST:g}, or an empty entry")

    def _held_out(self, target: Any, patients: Any) -> Any:
        """Return which rows are held out, as a bool for each row.

        If `holdout` is a share of the rows, these are drawn with the site's name as seed.
        """
        if not self.study.holdout or isinstance(self.study.holdout, str):
            return np.full(len(target), self.whole)
        by_class = self.study.estimator != "ridge"
        stratum = np.unique(words_of(target), return_inverse=True)[1] if by_class else np.zeros(len(target), int)
        return held_out(self.study.holdout, stratum, patients, generator_of_site(self.study.random_state, self.site, 1))

    def digest(self) -> Any:
        """Return a hash of each row, as an int32 array of shape (n, 2)."""
        import pandas as pd

        parts = (self.features, self.target), self.held_out[:2]
        rows = pd.concat([pd.util.hash_pandas_object(one.assign(**target), index=False) for one, target in parts])
        return rows.to_numpy().view(np.int32).reshape(-1, 2)

    def fingerprint(self) -> str:
        """Return a hash of all that the study uses of the table: columns, rows in their order, and patients."""
        patients = [[] if one is None else np.asarray(one).tolist() for one in (self.patients, self.held_out[2])]
        content = json.dumps([[*self.features.columns], len(self.target), *patients])
        return hashlib.sha256(content.encode() + self.digest().tobytes()).hexdigest()

    def described(self) -> dict[str, str]:
        """Describe the columns for the site's owner: the statistics that are sent, and the share of missing values."""
        if self.whole:
            return dict.fromkeys(self.summaries, "nothing")
        said = {}
        for name, one in {**self.statistics()["target"], **self.summaries}.items():
            column = self.target[name] if name in self.target else self.features[name]
            gaps = f"{column.isna().mean():.0%} of rows have a gap or a hidden value"
            if "categories" in one:
                rows = ", ".join(f"{category} {rows}" for category, rows in one["categories"].items())
                if rows:
                    sent = f"rows of {rows}{', and that there are rarer categories' * one['rarer']}"
                else:
                    sent = "only that each category has too few rows to be named" if one["rarer"] else "nothing"
                said[name] = f"{sent}; {gaps}"
            elif one["count"]:
                same = " (always the same number)" if not one["squares"] else ""
                said[name] = f"mean {one['mean']:.5g} of {one['count']} numbers{same}; {gaps}"
            else:
                said[name] = "nothing"
        return said

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of the site's rows, which the site sends before the exchanges."""
        column = self.target.iloc[:, -1:]
        codes = [] if self.study.estimator == "ridge" else [*column.columns]
        target = Preparer(categorical=codes).fit(column).summaries(1)
        classes = target[column.columns[0]].get("categories", {})
        require(len(classes) <= 2, f"classes of {column.columns[0]!r}", [*classes][:5], "at most two")
        return {"rows": len(self.target), "features": self.summaries, "target": target, "absent": self.absent}

    def require_columns(self, columns: object) -> None:
        """Refuse the server's list of all sites' columns if this table lacks one of them."""
        fits = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
        require(fits, "columns of the question", type(columns).__name__, "a list of names")
        require_columns(cast("list[str]", columns), {self.site: self.summaries})

    def samples(self, agreement: Agreement) -> dict[str, Any]:
        """Return the site's samples for the run that finds penalties and coefficients.

        If the site is held out, they are random numbers.
        """
        estimator = agreement.estimator()
        self._prepared(agreement, *self.held_out[:2])  # to find errors in held-out rows before the exchanges
        if self.whole:
            return agreement.blank(len(self.held_out[1]))
        rows = self._standardised(agreement)
        stratum = rows["stratum"]
        if self.study.estimator == "logistic" and estimator.classes_[0] > estimator.classes_[1]:
            stratum = 1 - stratum  # then folds do not depend on which class is positive
        fold = estimator._folds(self.site, stratum, self.patients)
        return dict(estimator._samples({**rows, "fold": fold}))

    def _standardised(self, agreement: Agreement) -> dict[str, Any]:
        """Return the rows to which the model is fitted, standardised, with their encoded target."""
        centre, spread = agreement.scales
        rows, encoded = self._prepared(agreement, self.features, self.target)
        return {"row": (rows - centre) / spread, **encoded}

    def answer(self, agreement: Agreement, question: Mapping[str, Any]) -> Any:
        """Return the site's answer about a model and its rows.

        See `evaluation`, `survival_curves` and, for the scores of patients, `coefficient_errors`.
        """
        require(isinstance(question, Mapping), "question", type(question).__name__, "an object")
        if SCORES in question:
            return self._scores(agreement, question)
        curves = bool(self.study.times and question.get("curves"))
        features, target, patients = (self.features, self.target, self.patients) if curves else self.held_out
        if not len(target):
            return None
        rows, encoded = self._prepared(agreement, features, target)
        coef, intercept = numbers_asked(question, "coef", rows.shape[1:]), numbers_asked(question, "intercept", ())
        if self.study.estimator == "ridge":
            encoded = {"target": target.to_numpy(float)[:, 0], "mean": agreement.estimator()._mean}
        score = rows @ coef + float(intercept)
        if curves:
            return steps(encoded["time"], encoded["event"], score, self.study.times, self.study.min_count)
        return answered(question, {"score": score, **encoded, "patients": patients}, self.study.min_count)

    def _scores(self, agreement: Agreement, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the products of the scores of the site's patients.

        None: the site is held out, or it has fewer than `min_count` patients.
        """
        require(bool(self.study.patient), "question", SCORES, "asked only if the study has a column of patients")
        width = len(agreement.names)
        require(width <= WIDE, "question", SCORES, f"asked with at most {WIDE} features, and here are {width}")
        if self.whole or self.patients is None or len(np.unique(self.patients)) < self.study.min_count:
            return None
        return coefficient_errors.answer(agreement.estimator(), self._standardised(agreement), self.patients, question)

    def _prepared(self, agreement: Agreement, features: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        """Return prepared rows, as an array of shape (n, features), and their encoded target."""
        estimator, encoded = agreement.estimator(), target.to_numpy()
        if self.study.estimator == "logistic":
            words = words_of(target.iloc[:, 0])
            for word in words:
                if word not in estimator.classes_:
                    raise unknown(f"class in the column {self.study.target!r}", word, estimator.classes_)
            encoded = (words == estimator.classes_[1]).to_numpy(int)
        rows = agreement.preparer.transform(features).to_numpy(np.float64)
        return rows, estimator._encoded(encoded[:, 0] if self.study.estimator == "ridge" else encoded)


def _used(features: Any, summaries: Summaries) -> Any:
    """Put gaps in place of all entries whose statistics the site does not send."""
    words = {
        name: words_of(features[name]) if "categories" in one else features[name] for name, one in summaries.items()
    }
    hidden = hidden_entries(summaries, {name: column.to_numpy() for name, column in words.items()})
    made = {
        name: features[name].mask(gaps) if "categories" in summaries[name] else np.nan for name, gaps in hidden.items()
    }
    return features.assign(**{name: column for name, column in made.items() if hidden[name].any()}).copy()
