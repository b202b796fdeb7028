"""A study: one model of several sites' tables, on one machine or with sites that keep their rows.

It has three steps, the same in both cases:

1. Each site returns `SiteTable.statistics`: its number of rows, and counts, means and squares by column.
2. All statistics are added up to an `Agreement`: columns, categories, classes and scales, from which each site prepares
   its own rows. Sums are exact and rounded once: the order of sites changes no bit of them.
3. The estimator's exchanges find penalties and coefficients.

A column of prepared rows needs no second sum: a number becomes (a − mean)/deviation and a gap 0, so that its mean over
all rows is 0, and its variance the share of rows without a gap; the mean of an indicator is the share of its category.

What `min_count` hides in the statistics is not used: it would be plain in the first gradient. It counts as a gap at
that site. The classes of the target are returned whatever their counts, since the first gradient tells these anyway.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.data import generator_of_site
from fedbilevel.data.columns import deviation
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators.columns import labels, numbers
from fedbilevel.estimators.evaluation import Report, answered, evaluated, held_out
from fedbilevel.estimators.linear import WIDE, LogisticRegression, Penalised, Ridge
from fedbilevel.estimators.measures import CELLS
from fedbilevel.estimators.model_card import card
from fedbilevel.estimators.model_in_use import coefficient_table, fitted_pipeline
from fedbilevel.estimators.preparer import Preparer, Told, read_saved, words_of
from fedbilevel.estimators.survival import CoxRegression
from fedbilevel.estimators.survival_curves import CurveSteps, check_steps, steps, survival
from fedbilevel.extending import (
    explain_misspelt,
    is_count,
    parse_json,
    require,
    require_count,
    unknown,
    warn,
    write_text,
)

KINDS: dict[str, type[Penalised]] = {"logistic": LogisticRegression, "ridge": Ridge, "cox": CoxRegression}
SITE = "site"  # the column of the sites' offsets
PENALTIES = "one", "column", "feature"


@explain_misspelt
@dataclass(frozen=True, kw_only=True)
class Study:
    """What all sites know before a study begins.

    Args:
        estimator: "logistic", "ridge" or "cox".
        sites: the names of the sites; site i is client i of a federation.
        target: the column that is predicted; of Cox's model the times.
        event: of Cox's model, the column that is 1 where the event came, 0 where it had not come by then.
        positive: of logistic regression, the class whose probability is predicted; empty: the second by name.
        patient: a column that says whose each row is, where several rows are one patient's; empty: none.
        categorical: columns of codes and words.
        columns: the features; empty: all columns but target, event, patient and `drop`.
        drop: columns that are left out; a table that does not have one of them is warned of.
        gaps: texts that mean a gap, besides those of pandas.
        offsets: whether each site has an offset, which shares a penalty with those of the other sites. Cox's model has
            a baseline for each site instead.
        penalty: "one" for all features, or one for each "column", or for each "feature", that is, indicator.
        groups: columns that share a penalty of their own, by any name of it.
        cv, rounds, random_state: as of the estimator.
        min_count: of a site's categories of fewer rows, and columns of fewer numbers, nothing is told or used.
        holdout: the share of rows of each site and class that nothing is fitted to, and no statistics are made of; the
            model's report is about them.
        times: of Cox's model, the grid of baseline hazards and Kaplan-Meier curves, 50 times at most; empty: neither.
    """

    estimator: str
    sites: tuple[str, ...]
    target: str
    event: str = ""
    positive: str = ""
    patient: str = ""
    categorical: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ("?",)
    offsets: bool = True
    penalty: str = "one"
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cv: int = 5
    rounds: int = 300
    random_state: int = 0
    min_count: int = 8
    holdout: float = 0.0
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.estimator not in KINDS:
            raise unknown("estimator", self.estimator, KINDS)
        for name in ("sites", "categorical", "columns", "drop", "gaps"):
            texts = getattr(self, name)
            fits = isinstance(texts, list | tuple) and all(isinstance(one, str) and one for one in texts)
            require(fits and len(set(texts)) == len(texts), name, texts, "a list of texts, each once")
            object.__setattr__(self, name, tuple(texts))
        fits = isinstance(self.groups, Mapping) and all(isinstance(one, list | tuple) for one in self.groups.values())
        require(fits, "groups", self.groups, "a table with a list of columns for each name")
        object.__setattr__(self, "groups", {name: tuple(columns) for name, columns in self.groups.items()})
        require(type(self.offsets) is bool, "offsets", self.offsets, "true or false")
        object.__setattr__(self, "offsets", self.offsets and self.estimator != "cox")
        require(len(self.sites) > 0, "sites", self.sites, "the names of one site or more")
        require(bool(self.target), "target", self.target, "the name of a column")
        allowed = "the name of the column that is 1 where the event came, and 0 where not: Cox's model needs it"
        require(self.estimator != "cox" or bool(self.event), "event", self.event, allowed)
        require(self.estimator == "cox" or not self.event, "event", self.event, "left out: it is of Cox's model alone")
        require(not self.positive or self.estimator == "logistic", "positive", self.positive, "empty but for logistic")
        fits = type(self.random_state) is int and self.random_state >= 0
        require(fits, "random_state", self.random_state, "a whole number from 0 on")
        require(self.penalty in PENALTIES, "penalty", self.penalty, " or ".join(PENALTIES))
        require_count("min_count", self.min_count)
        fits = type(self.holdout) in (int, float) and 0 <= self.holdout < 1
        require(fits, "holdout", self.holdout, "a share from 0 to below 1")
        object.__setattr__(self, "holdout", float(self.holdout))
        fits = isinstance(self.times, list | tuple) and all(type(one) in (int, float) for one in self.times)
        fits = fits and all(a < b < np.inf for a, b in pairwise((0, *self.times))) and len(self.times) <= CELLS
        require(fits, "times", self.times, f"rising numbers above 0, {CELLS} at most")
        require(not self.times or self.estimator == "cox", "times", self.times, "empty but for cox")
        object.__setattr__(self, "times", tuple(map(float, self.times)))

    @classmethod
    def read(cls, text: str | Mapping[str, Any]) -> Self:
        """Read a study from the table of a TOML file, or from `text`.

        Raises:
            ConfigurationError: a field is missing, unknown or wrong.
        """
        given = parse_json(text.encode()) if isinstance(text, str) else dict(text)
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown("field of [study]", name, known)
        missing = [name for name in ("estimator", "sites", "target") if name not in given]
        require(not missing, "[study]", f"without {', '.join(missing)}", "a study with these")
        return cls(**given)

    @property
    def text(self) -> str:
        """The study as JSON, the same for the same study."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @property
    def not_features(self) -> list[str]:
        """The columns that a feature cannot be."""
        return [name for name in (self.target, self.event, self.patient) if name]

    def fit(self, tables: Mapping[str, Any], engine: Any = None) -> "StudyModel":
        """Play the study on this machine.

        Args:
            tables: a data frame for each site, by the site's name.
            engine: Local() by default.

        Raises:
            ConfigurationError: a site has no table, or its rows do not fit the study.
        """
        for name in tables:
            if name not in self.sites:
                raise unknown("site of the tables", name, self.sites)
        for name in self.sites:
            require(name in tables, f"table of site {name!r}", "missing", "a data frame for each of the study's sites")
        own = [SiteTable(self, site, tables[site]) for site in self.sites]
        agreement = Agreement.of(self, [table.statistics() for table in own])
        clients = fb.Clients([table.samples(agreement) for table in own], weights="size")
        model = agreement.train(clients, engine or fb.Local(devices=1))
        return evaluated(model, lambda question: [table.answer(agreement, question) for table in own])


class SiteTable:
    """A site's own rows, as it keeps them.

    Args:
        frame: a data frame of the site's rows; those without a target are left out.

    Raises:
        ConfigurationError: a column is missing, a value is not allowed, or there are too few rows.
    """

    def __init__(self, study: Study, site: str, frame: Any) -> None:
        self.study, self.site = study, site
        for name in [*study.not_features, *study.columns]:
            if name not in frame.columns:
                raise unknown("column", name, frame.columns)
        targets = [study.target, *([study.event] if study.event else [])]
        kept = frame[frame[targets].notna().all(axis=1)].reset_index(drop=True)
        self.left_out = len(frame) - len(kept)
        if study.event:
            events = sorted({*words_of(kept[study.event])})
            require({*events} <= {"0", "1"}, f"events {study.event!r}", events[:5], "1 where it came, 0 where not")
        patients = labels("patient", kept[study.patient], len(kept), "whose each row is")[1] if study.patient else None
        held = self._drawn(kept[targets[-1]], patients)
        allowed = f"{study.min_count} or more, as min_count says" + ", besides those held out" * bool(held.any())
        require(int(np.sum(~held)) >= study.min_count, "rows with a target", int(np.sum(~held)), allowed)
        if absent := [name for name in study.drop if name not in kept]:
            names = ", ".join(map(repr, absent))
            warn(DataWarning(f"the table of {site} has no column {names}, which the study leaves out (drop)"))
        others = kept.drop(columns=[*study.not_features, *study.drop], errors="ignore")
        features = kept[list(study.columns)] if study.columns else others
        if study.offsets:
            require(SITE not in features, f"column {SITE!r}", "a feature", "left out (drop), or offsets = false")
            features = features.assign(**{SITE: site})
        categorical = [*study.categorical, *([SITE] if study.offsets else [])]
        self.told = Preparer(categorical=categorical).fit(features[~held]).told(study.min_count)
        features = _used(features, self.told)
        self.features, self.target = features[~held], kept.loc[~held, targets]
        self.patients = None if patients is None else patients[~held]
        self.held_out = features[held], kept.loc[held, targets], None if patients is None else patients[held]

    def _drawn(self, target: Any, patients: Any) -> Any:
        """Draw which rows are held out, (n,) bool, by a hash of the site's name."""
        if not self.study.holdout:
            return np.zeros(len(target), bool)
        by_class = self.study.estimator != "ridge"
        stratum = np.unique(words_of(target), return_inverse=True)[1] if by_class else np.zeros(len(target), int)
        return held_out(self.study.holdout, stratum, patients, generator_of_site(self.study.random_state, self.site, 1))

    def digest(self) -> Any:
        """Compute a hash of each row, (n, 2) int32."""
        import pandas as pd

        parts = (self.features, self.target), self.held_out[:2]
        rows = pd.concat([pd.util.hash_pandas_object(one.assign(**target), index=False) for one, target in parts])
        return rows.to_numpy().view(np.int32).reshape(-1, 2)

    def described(self) -> dict[str, str]:
        """Say of each column, for the site's owner, what is told of it, and the share of gaps."""
        said = {}
        for name, one in {**self.statistics()["target"], **self.told}.items():
            column = self.target[name] if name in self.target else self.features[name]
            gaps = f"{column.isna().mean():.0%} gaps, or hidden"
            if "categories" in one:
                rows = ", ".join(f"{category} {rows}" for category, rows in one["categories"].items())
                said[name] = f"rows of {rows or 'no category'}{' and rarer ones' * one['rarer']}; {gaps}"
            elif one["count"]:
                same = " (always the same number)" if not one["squares"] else ""
                said[name] = f"mean {one['mean']:.5g} of {one['count']} numbers{same}; {gaps}"
            else:
                said[name] = "nothing"
        return said

    def statistics(self) -> dict[str, Any]:
        """Return what the site tells of its rows before the exchanges."""
        column = self.target.iloc[:, -1:]
        codes = [] if self.study.estimator == "ridge" else [*column.columns]
        target = Preparer(categorical=codes).fit(column).told(1)
        classes = target[column.columns[0]].get("categories", {})
        require(len(classes) <= 2, f"classes of {column.columns[0]!r}", len(classes), "two at most")
        return {"rows": len(self.target), "features": self.told, "target": target}

    def samples(self, agreement: "Agreement") -> dict[str, Any]:
        """Return the site's samples of the run that finds penalties and coefficients."""
        estimator, (centre, spread) = agreement.estimator(), agreement.scales
        self._prepared(agreement, *self.held_out[:2])  # what is wrong with them is said before the exchanges
        rows, encoded = self._prepared(agreement, self.features, self.target)
        stratum = encoded["stratum"]
        if self.study.estimator == "logistic" and estimator.classes_[0] > estimator.classes_[1]:
            stratum = 1 - stratum  # the same folds whichever class is positive
        fold = estimator._folds(self.site, stratum, self.patients)
        return dict(estimator._samples({"row": (rows - centre) / spread, **encoded, "fold": fold}))

    def answer(self, agreement: "Agreement", question: Mapping[str, Any]) -> Any:
        """Return what the site tells of its rows and a model: see `evaluation` and `survival_curves`."""
        curves = bool(self.study.times and question.get("curves"))
        features, target, patients = (self.features, self.target, self.patients) if curves else self.held_out
        rows, encoded = self._prepared(agreement, features, target)
        coef = numbers("coefficients of the question", question["coef"])
        require(coef.shape == rows.shape[1:], "coefficients of the question", coef.shape, f"{rows.shape[1]}")
        if self.study.estimator == "ridge":
            encoded = {"target": target.to_numpy(float)[:, 0], "mean": agreement.estimator()._mean}
        score = rows @ coef + float(question["intercept"])
        if curves:
            return steps(encoded["time"], encoded["event"], score, self.study.times, self.study.min_count)
        return answered(question, {"score": score, **encoded, "patients": patients}, self.study.min_count)

    def _prepared(self, agreement: "Agreement", features: Any, target: Any) -> tuple[Any, dict[str, Any]]:
        """Prepare rows, and encode their target."""
        estimator, encoded = agreement.estimator(), target.to_numpy()
        if self.study.estimator == "logistic":
            words = words_of(target.iloc[:, 0])
            for word in words:
                if word not in estimator.classes_:
                    raise unknown(f"class of {self.study.target!r}", word, estimator.classes_)
            encoded = (words == estimator.classes_[1]).to_numpy(int)
        rows = agreement.preparer.transform(features).to_numpy(np.float64)
        return rows, estimator._encoded(encoded[:, 0] if self.study.estimator == "ridge" else encoded)


def _used(features: Any, told: Told) -> Any:
    """Make gaps of what a site does not tell."""
    made = {}
    for name, one in told.items():
        if "categories" in one:
            made[name] = features[name].where(words_of(features[name]).isin([*one["categories"]]))
        elif not one["count"]:
            made[name] = np.full(len(features), np.nan)
    return features.assign(**made)


def _require_same_columns(parts: Mapping[str, Any]) -> None:
    """Refuse a column that some sites do not have; name these sites."""
    tables = {site: told for site, told in parts.items() if isinstance(told, dict)}
    for name in dict.fromkeys(name for told in tables.values() for name in told):
        without = [site for site, told in tables.items() if name not in told]
        allowed = f"in the table of every site, or left out of the study (drop = [{name!r}])"
        require(not without, f"column {name!r} of {', '.join(without)}", "missing", allowed)


def _sum(parts: Mapping[str, Told]) -> Told:
    """Add up what sites told, whatever it is."""
    try:
        return Preparer.sum_of(parts).columns_
    except ConfigurationError:
        raise
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"statistics: {error}") from error


@dataclass(frozen=True)
class Agreement:
    """What the statistics of all sites add up to.

    Args:
        rows: the number of rows of all sites together.
        features: the sum of what sites told of the features, by column.
        target: the same of the target; of Cox's model, of the events.
    """

    study: Study
    rows: int
    features: Told
    target: Told

    @classmethod
    def of(cls, study: Study, statistics: list[dict[str, Any]]) -> Self:
        """Add up the statistics of all sites, in the order of `Study.sites`.

        Raises:
            ConfigurationError: they are not as `SiteTable.statistics` returns them, have different columns, or do not
                suffice for the model.
        """
        parts: dict[str, dict[str, Told]] = {"features": {}, "target": {}}
        for site, one in zip(study.sites, statistics, strict=True):
            fits = isinstance(one, dict) and one.keys() == {"rows", *parts} and is_count(one["rows"])
            require(fits, f"statistics of {site}", type(one).__name__, "rows, features and target")
            for name, found in parts.items():
                found[site] = one[name]
        _require_same_columns(parts["features"])
        features, target = map(_sum, parts.values())
        made = cls(study, sum(one["rows"] for one in statistics), features, target)
        made.estimator()._check_folds(made.rows)
        require(len(made.names) > 0, "features", "none", "one column at least of which something is told")
        return made

    @classmethod
    def read(cls, study: Study, text: str) -> Self:
        """Read what `text` has written.

        Raises:
            ConfigurationError: it is something else.
        """
        content = parse_json(text.encode())
        fits = (
            isinstance(content, dict) and content.keys() == {"rows", "features", "target"} and is_count(content["rows"])
        )
        require(fits, "agreement", type(content).__name__, "rows, features and target")
        features, target = (_sum({"": content[name]}) for name in ("features", "target"))
        return cls(study, content["rows"], features, target)

    @property
    def text(self) -> str:
        """The agreement as JSON, whose numbers come back to the bit."""
        return json.dumps({"rows": self.rows, "features": self.features, "target": self.target}, ensure_ascii=False)

    @property
    def preparer(self) -> Preparer:
        """What prepares the rows of every site."""
        return Preparer.sum_of({"": self.features})

    @property
    def names(self) -> list[str]:
        """The names of the features that models have."""
        return list(self.preparer.get_feature_names_out())

    @property
    def scales(self) -> tuple[Any, Any]:
        """The means and standard deviations of the prepared columns over all rows, (features,) each; 1 where 0."""
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
        """Make the estimator, with what is known of all rows."""
        study, (target,) = self.study, self.target.values()
        estimator: Any = KINDS[study.estimator](
            penalty_groups=self.penalty_groups(), cv=study.cv, rounds=study.rounds, random_state=study.random_state
        )
        if study.estimator == "ridge":
            estimator._mean, estimator._unit = target["mean"], deviation(target)
        elif study.estimator == "logistic":
            classes = list(target["categories"])
            require(len(classes) == 2, f"classes of {study.target!r}", classes, "two")
            if study.positive and study.positive not in classes:
                raise unknown("positive", study.positive, classes)
            estimator.classes_ = np.array(classes[::-1] if study.positive == classes[0] else classes, object)
        else:
            require("1" in target["categories"], f"events {study.event!r}", "none", "one at least")
        estimator.feature_names_in_, estimator.n_features_in_ = np.array(self.names, object), len(self.names)
        estimator.sites_ = np.array(study.sites, object)
        return estimator

    def penalty_groups(self) -> list[str]:
        """Name the penalty of each feature."""
        study, groups = self.study, []
        own = {column: name for name, columns in study.groups.items() for column in columns}
        for column in own:
            if column not in self.features:
                raise unknown("column in groups", column, self.features)
        for column, statistics in self.features.items():
            for category in statistics.get("categories", [""]):
                name = {"one": "all", "column": column, "feature": f"{column} {category}"}[study.penalty]
                groups.append(SITE if study.offsets and column == SITE else own.get(column, name))
        return groups

    def remote(self, weights: list[int]) -> fb.RemoteClients:
        """Return what a server knows of sites with these numbers of rows."""
        estimator, width = self.estimator(), len(self.names)
        require(width <= WIDE, "features, indicators included", width, f"{WIDE} at most where sites keep their tables")
        encoded = estimator._encoded(np.zeros((1, 2)) if self.study.estimator == "cox" else np.zeros(1))
        rows = {"row": np.zeros((1, width)), **encoded, "fold": np.zeros(1, np.int32)}
        return fb.RemoteClients(len(weights), estimator._samples(rows), weights=weights)

    def posed(self) -> tuple[Any, Any, Any, Any]:
        """Return algorithm, problem, x0 and y0 of the exchanges."""
        with jax.enable_x64(True):
            return self.estimator()._search(len(self.names))

    def train(self, clients: Any, engine: Any) -> "StudyModel":
        """Find penalties and coefficients with clients here or elsewhere."""
        estimator = self.estimator()
        with jax.enable_x64(True):
            estimator._train(clients, *self.scales, self.rows, engine)
        return StudyModel(self, estimator)


@dataclass(frozen=True)
class StudyModel:
    """The model of a study, with all that is needed to use it on a site's own table.

    Args:
        agreement: how rows are prepared.
        estimator: of prepared rows: `coef_`, `intercept_`, `penalties_`, `classes_`.
        report: what is known of it and its predictions; None where it was loaded.
        baselines: of Cox's model, the steps of the baseline hazard of each site that has one.
    """

    agreement: Agreement
    estimator: Any
    report: Report | None = None
    baselines: Mapping[str, CurveSteps] = field(default_factory=dict)

    def save(self, file: str | Path) -> None:
        """Write the model as one JSON file."""
        estimator, agreed = self.estimator, self.agreement
        content = {"study": asdict(agreed.study), "agreement": parse_json(agreed.text.encode())}
        if hasattr(estimator, "classes_"):
            content["predicts"] = f"the probability of {agreed.study.target} = {estimator.classes_[1]}"
        content |= {
            name: dict(zip(agreed.names, getattr(estimator, f"{name}_").tolist(), strict=True)) for name in VALUES
        }
        if estimator.standard_errors_ is not None:
            content["standard_errors"] = dict(zip(agreed.names, estimator.standard_errors_.tolist(), strict=True))
        content["intercept"] = getattr(estimator, "intercept_", 0.0)
        content |= {"baselines": dict(self.baselines)} if self.baselines else {}
        write_text(Path(file), json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the file cannot be read, or holds something else.
        """
        return read_saved(Path(file), cls._of)

    @classmethod
    def _of(cls, content: Any) -> Self:
        agreement = Agreement.read(Study.read(content["study"]), json.dumps(content["agreement"]))
        estimator = agreement.estimator()
        for name in VALUES:
            setattr(estimator, f"{name}_", np.array([float(content[name][one]) for one in agreement.names]))
        errors = content.get("standard_errors")
        estimator.standard_errors_ = errors and np.array([float(errors[one]) for one in agreement.names])
        if estimator.has_intercept:
            estimator.intercept_ = float(content["intercept"])
        baselines = content.get("baselines", {})
        for site, told in baselines.items():
            check_steps(site, told, agreement.study.times)
        return cls(agreement, estimator, baselines=baselines)

    def prepared(self, frame: Any, site: str = "") -> Any:
        """Prepare rows of a table with the columns of the study; other columns are ignored.

        Args:
            site: whose rows they are; empty: of a site that was not in the study, whose offset is 0.
        """
        study, columns = self.agreement.study, [*self.agreement.features]
        if site and site not in study.sites:
            raise unknown("site", site, study.sites)
        if study.offsets:
            frame = frame.assign(**{SITE: site or None})
        for name in columns:
            if name not in frame.columns:
                raise unknown("column", name, frame.columns)
        return self.agreement.preparer.transform(frame[columns])

    def predict(self, frame: Any, site: str = "") -> Any:
        """Predict the class, the number, or the log hazard above the site's baseline of each row, (n,)."""
        return self.estimator.predict(self.prepared(frame, site))

    def predict_proba(self, frame: Any, site: str = "") -> Any:
        """Compute the probability of the positive class for each row, (n,)."""
        fits = self.agreement.study.estimator == "logistic"
        require(fits, "predict_proba", self.agreement.study.estimator, "of logistic regression alone")
        return self.estimator.predict_proba(self.prepared(frame, site))[:, 1]

    def table(self) -> Any:
        """Return the coefficients as a paper prints them, a data frame with a row for each.

        Its columns are "column" and "category" (empty of numbers); "coefficient", for each unit of the original
        column; "odds ratio" or "hazard ratio", which is exp(coefficient), of logistic regression and Cox's model;
        "standard error" of the coefficient, in its unit, NaN with more than 300 features; and "penalty", of the
        standardised column, as `penalties_`. A category is compared with a gap: the ratio of two categories is the
        quotient of theirs. The first row is the intercept, which Cox's model does not have: of a row whose numbers are
        0 and whose categories are gaps. It has no standard error (NaN).
        """
        return coefficient_table(self)

    def pipeline(self) -> Any:
        """Return the model as a fitted scikit-learn Pipeline of a `Preparer` and a plain LogisticRegression or Ridge.

        It predicts what the model predicts, of a data frame with exactly the columns of the study; with offsets one of
        them is "site", None for a site that was not in the study. Store the model with `save`, and make the pipeline
        from what `load` returns: a pickled pipeline runs code when it is read.

        Raises:
            ConfigurationError: it is Cox's model, which scikit-learn does not have.
        """
        return fitted_pipeline(self)

    def card(self) -> str:
        """Write a model card in Markdown, for those who meet the model without the study.

        It has columns, sites, rows, the positive class, penalties, the report if there is one (a loaded model has
        none), versions and the date of the card, and what the model is not for.
        """
        return card(self)

    def predict_survival(self, frame: Any, times: Any, site: str) -> Any:
        """Compute the probability of each row of a site to be without the event at these times, (n, times), by Cox's
        model and the site's baseline, which rises at the ends of its steps alone.

        Raises:
            ConfigurationError: the site has no baseline, or times are beyond its end.
        """
        if site not in self.baselines:
            raise unknown("site with a baseline", site, self.baselines)
        return survival(self.baselines[site], self.predict(frame, site), times)


VALUES = "coef", "penalties"  # of each feature
