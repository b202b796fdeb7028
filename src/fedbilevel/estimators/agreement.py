"""Add up the statistics of all sites of a study. With the sum, each site prepares its own rows."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.data.columns import deviation, penalty_labels
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators.linear import LogisticRegression, Penalised, Ridge
from fedbilevel.estimators.preparer import Preparer, Summaries
from fedbilevel.estimators.survival import CoxRegression, no_event
from fedbilevel.extending import is_count, parse_json, printable, require, unknown, warn

KINDS: dict[str, type[Penalised]] = {"logistic": LogisticRegression, "ridge": Ridge, "cox": CoxRegression}
SITE = "site"  # the column of the sites' offsets
MOST_WORDS = 5  # the largest number of categories of a site that a warning names
APART = 5  # how far apart the means of a column may be at two sites, in standard deviations, without a warning
UNCOUNTED = 1e-250
"""The weight of a site that is held out, in rows.

Weights must be above 0, and this weight is too small to change any bit of a sum.
"""


class DifferentColumnsError(ConfigurationError):
    """Some sites do not have a column of the study.

    Args:
        site: the sites that lack the column, in words.
        column: the column.
        columns: the columns of all sites together.
    """

    def __init__(self, site: str, column: str, columns: Sequence[str] = ()) -> None:
        allowed = f"in the table of every site, or left out of the study (drop = [{column!r}])"
        message = f"column {column!r} is missing in the table of {site}: a column must be {allowed}"
        super().__init__(path=f"column {column!r} of {site}", got="missing", allowed=allowed, message=message)
        self.site, self.column, self.columns = site, column, list(columns)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.site, self.column, self.columns)


def require_columns(columns: Sequence[str], tables: Mapping[str, Collection[str]]) -> None:
    """Refuse a column that some sites do not have.

    Args:
        columns: the columns of all sites together.
        tables: the columns of the table of each site.
    """
    for name in columns:
        if without := [site for site, known in tables.items() if name not in known]:
            raise DifferentColumnsError(", ".join(without), printable(name), columns)


def _warn_of_sites(study: Any, features: Mapping[str, Summaries], target: Mapping[str, Summaries]) -> None:
    """Warn of sites whose rows all have the same class, and of columns with another unit or other words at some sites.

    Args:
        features: the statistics of the features of each site, by the site's name.
        target: the statistics of the target of each site.
    """
    alike = [
        site for site in study.fitted_sites for one in target[site].values() if len(one.get("categories", ())) == 1
    ]
    if study.estimator == "logistic" and study.offsets and alike and len(study.fitted_sites) > 1:
        text = f"{', '.join(alike)}: all rows to which the model is fitted have the same class"
        then = "the offset of such a site is determined by its penalty alone, so that its interval means nothing"
        how = (
            f"and predictions with site = {alike[0]!r} are close to 0 or 1. Leave the site out, or set offsets to false"
        )
        warn(DataWarning(f"{text}. Then {then}, {how}"))
    for name in next(iter(features.values())):
        if means := _other_units({site: features[site][name] for site in study.fitted_sites}):
            said = " and ".join(f"{mean:.4g} ({site})" for site, mean in means.items())
            ask = "Do all sites use the same unit, and do they leave gaps empty?"
            warn(DataWarning(f"the means of column {name!r} differ strongly between sites: {said}. {ask}"))
        if name != SITE and (words := _other_words({site: features[site][name] for site in study.fitted_sites})):
            said = "; ".join(f"{site} has {', '.join(known)}" for site, known in words.items())
            ask = "Do all sites use the same words or codes?"
            warn(DataWarning(f"column {name!r} has categories that occur at a single site only: {said}. {ask}"))


def _other_words(summaries: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the categories of a column at sites that may use other words: none of them occurs at another site.

    At most MOST_WORDS categories of a site are returned. Sites that send no category are not compared.
    """
    known = {site: set(one["categories"]) for site, one in summaries.items() if one.get("categories")}
    if len(known) < 2:
        return {}
    sites_of = Counter(word for words in known.values() for word in words)
    alone = {site: words for site, words in known.items() if all(sites_of[word] == 1 for word in words)}
    return {site: [printable(word) for word in sorted(words)[:MOST_WORDS]] for site, words in alone.items()}


def _other_units(summaries: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """Return the means of a column at sites that may use another unit, with the median of the means of all sites.

    With two sites, each is compared with the other. With more sites, each is compared with the medians of all means and
    of all standard deviations. A mean is suspect if it is away by more than APART of the larger standard deviation, or
    of the smaller one if the deviations differ by this factor, too. Neither shares from 0 to 1 nor numbers without any
    deviation, such as the year of a study, are compared.
    """
    known = {site: one for site, one in summaries.items() if one.get("count")}
    if len(known) < 2:
        return {}
    means = np.array([one["mean"] for one in known.values()])
    spreads = np.array([(one["squares"] / one["count"]) ** 0.5 for one in known.values()])
    two = len(known) == 2
    centre, spread = (one[::-1] if two else np.full(len(one), np.median(one)) for one in (means, spreads))
    away, large, small = np.abs(means - centre), np.maximum(spreads, spread), np.minimum(spreads, spread)
    suspect = ((large > 0) & (away > APART * large)) | ((small > 0) & (away > APART * small) & (large > APART * small))
    shares = (means >= 0) & (means <= 1) & (centre >= 0) & (centre <= 1)
    found = {site: float(mean) for site, mean, bad in zip(known, means, suspect & ~shares, strict=True) if bad}
    return found if two or not found else {**found, "median of all sites": float(centre[0])}


def _sum(parts: Mapping[str, Summaries]) -> Summaries:
    """Add up the sites' statistics. Statistics of a wrong form raise a ConfigurationError."""
    try:
        return Preparer.sum_of(parts).columns_
    except ConfigurationError:
        raise
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"statistics: {error}") from error


@dataclass(frozen=True)
class Agreement:
    """The sum of the statistics of all sites, with which every site prepares its rows in the same way.

    Args:
        study: the `Study`.
        rows: the number of rows of all sites together.
        features: the sums of the sites' statistics of the features, by column.
        target: the sums of the sites' statistics of the target or, for Cox's model, of the events.
        searched: whether the penalties are known and only the final model is left to train (for more than 300
            features).
    """

    study: Any
    rows: int
    features: Summaries
    target: Summaries
    searched: bool = False

    @classmethod
    def of(cls, study: Any, statistics: list[dict[str, Any]]) -> Self:
        """Add up the statistics of all sites, in the order of `Study.sites`.

        Raises:
            ConfigurationError: statistics have another form than `SiteTable.statistics` returns, have different
                columns, or do not suffice for the model.
        """
        parts: dict[str, dict[str, Summaries]] = {"features": {}, "target": {}}
        for site, one in zip(study.sites, statistics, strict=True):
            fits = (
                isinstance(one, dict) and one.keys() == {"rows", "absent", *parts} and isinstance(one["absent"], list)
            )
            fits = fits and (one["rows"] == 0 if site == study.holdout else is_count(one["rows"]))
            require(fits, f"statistics of {site}", type(one).__name__, "rows, features, target and absent columns")
            for name, found in parts.items():
                found[site] = one[name]
        tables = {site: names for site, names in parts["features"].items() if isinstance(names, dict)}
        require_columns(list(dict.fromkeys(name for names in tables.values() for name in names)), tables)
        features, target = map(_sum, parts.values())
        for name in study.drop:
            if all(name in one["absent"] for one in statistics):
                error = unknown("column of all tables in drop", name, features)
                error.message = f"no site has the column {name!r}, which the study drops: remove it from drop"
                raise error
        made = cls(study, sum(one["rows"] for one in statistics), features, target)
        made.estimator()._check_folds(made.rows)
        _warn_of_sites(study, parts["features"], parts["target"])
        require(len(made.names) > 0, "features", "none", "at least one column for which some site sends statistics")
        unused = [name for name, one in features.items() if not one.get("categories") and not one.get("count")]
        if unused:
            few = f"at each site, fewer than min_count = {study.min_count} rows have a number, or the same category"
            warn(DataWarning(f"the model does not use {', '.join(map(repr, unused))}, because {few}"))
        return made

    @classmethod
    def read(cls, study: Any, text: str) -> Self:
        """Read an agreement from the text that `text` returned.

        Raises:
            ConfigurationError: the text is not an agreement of this study.
        """
        content = parse_json(text.encode())
        searched = isinstance(content, dict) and content.pop("searched", False)
        fits = isinstance(content, dict) and content.keys() == {"rows", "features", "target"}
        fits = fits and is_count(content["rows"]) and isinstance(searched, bool)
        require(fits, "agreement", type(content).__name__, "rows, features and target")
        features, target = (_sum({"": content[name]}) for name in ("features", "target"))
        return cls(study, content["rows"], features, target, searched)

    @property
    def text(self) -> str:
        """Return the agreement as JSON. Numbers that are read from it again are exactly the same."""
        content = {"rows": self.rows, "features": self.features, "target": self.target}
        return json.dumps(content | ({"searched": True} if self.searched else {}), ensure_ascii=False)

    @property
    def preparer(self) -> Preparer:
        """Return the `Preparer` of the rows of every site."""
        return Preparer.sum_of({"": self.features})

    @property
    def names(self) -> list[str]:
        """Return the names of the features, which are the prepared columns."""
        return list(self.preparer.get_feature_names_out())

    @property
    def scales(self) -> tuple[Any, Any]:
        """Return the means, and the standard deviations, of the prepared columns over all rows.

        A standard deviation of 0 is replaced by 1.
        """
        means, variances = [], []
        for column in self.features.values():
            if "categories" in column:
                shares = np.array([*column["categories"].values()], float) / self.rows
                means += [*shares]
                variances += [*(shares * (1 - shares))]
            else:
                means.append(0.0)
                variances.append(column["count"] / self.rows if column["squares"] else 0.0)
        return np.array(means), np.sqrt(np.where(np.array(variances) > 0, variances, 1))

    def estimator(self) -> Any:
        """Make the estimator of the study, and set the attributes that depend on all rows."""
        study, (target,) = self.study, self.target.values()
        estimator: Any = KINDS[study.estimator](
            penalty_groups=self.penalty_groups(), cv=study.cv, rounds=study.rounds, random_state=study.random_state
        )
        if study.estimator == "ridge":
            estimator._mean, estimator._unit = target["mean"], deviation(target)
            estimator._varies = target["squares"] > 0
        elif study.estimator == "logistic":
            classes = list(target["categories"])
            require(len(classes) == 2, f"classes of {study.target!r}", classes, "two")
            if study.positive and study.positive not in classes:
                raise unknown("positive", study.positive, classes)
            estimator.classes_ = np.array(classes[::-1] if study.positive == classes[0] else classes, object)
        elif "1" not in target["categories"]:
            raise no_event(f"events {study.event!r}")
        estimator.feature_names_in_, estimator.n_features_in_ = np.array(self.names, object), len(self.names)
        estimator.sites_ = np.array(study.fitted_sites, object)
        return estimator

    def penalty_groups(self) -> list[str]:
        """Return a label for each feature: features with the same label share a penalty."""
        study = self.study
        own = {column: f"group {name}" for name, columns in study.groups.items() for column in columns}
        for column in own:
            if column not in self.features:
                raise unknown("column in groups", column, self.features)
        return penalty_labels(self.features, study.penalty, own | ({SITE: SITE} if study.offsets else {}))

    def remote(self, weights: list[int]) -> fb.RemoteClients:
        """Describe the sites to a server by their numbers of rows; 0 stands for a site that is held out."""
        return fb.RemoteClients(len(weights), self.blank(1), weights=[rows or UNCOUNTED for rows in weights])

    def blank(self, count: int) -> dict[str, Any]:
        """Draw random samples, in place of the samples of a site that is elsewhere or held out.

        With samples of zeros, `solve` would warn that the penalties do not change.
        """
        estimator, drawn = self.estimator(), np.random.default_rng(0).normal(size=(count, len(self.names)))
        encoded = estimator._encoded(np.ones((count, 2)) if self.study.estimator == "cox" else np.ones(count))
        rows = {"row": drawn, **encoded, "fold": np.arange(count, dtype=np.int32) % self.study.cv}
        return dict(estimator._samples(rows))

    def posed(self) -> tuple[Any, Any, Any, Any]:
        """Return algorithm, problem, x0 and y0, the arguments of `solve` for this agreement."""
        with jax.enable_x64(True):
            return self.estimator()._models(len(self.names)).posed(self.searched)

    def train(
        self,
        clients: Any,
        engine: Any,
        checkpoint: Path | None = None,
        on_searched: Callable[["Agreement"], None] = lambda agreement: None,
    ) -> Any:
        """Find penalties and coefficients, and return the fitted estimator.

        Args:
            clients: the sites, simulated (`Clients`) or on other machines (`RemoteClients`).
            engine: runs the exchanges with these clients.
            checkpoint: the file to which the training is saved, and from which it resumes (`Penalised._train`); None:
                nothing is saved.
            on_searched: a function that is called once the penalties are known, with the agreement for the final model.
                It is called only if this model needs a run of its own (for more than 300 features).
        """
        estimator = self.estimator()
        with jax.enable_x64(True):
            of_last = partial(on_searched, replace(self, searched=True))
            estimator._train(clients, *self.scales, self.rows, engine, checkpoint, of_last)
        return estimator
