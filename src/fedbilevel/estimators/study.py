"""Fit one model to the tables of several sites (a study), on one machine or with sites that keep their rows.

A study has three steps, which are the same in both cases:

1. Each site sends `SiteTable.statistics`: its number of rows, and counts, means and sums of squares by column.
2. All statistics are added up to an `Agreement` on columns, categories, classes and scales. With it, each site prepares
   its own rows. Sums are exact and rounded once, so that they do not depend on the order of sites.
3. The exchanges of the estimator find penalties and coefficients.

The means and variances of prepared columns need no second sum over sites. A number a becomes (a − mean)/deviation and a
gap becomes 0, so the prepared column has the mean 0, and its variance is the share of rows without a gap. The mean of
an indicator is the share of its category.

Values whose statistics are left out because of `min_count` are not used for training, because the first gradient would
reveal them. They are treated as gaps at their site. The classes of the target are always sent, because the first
gradient reveals them anyway.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import compress, pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

import fedbilevel as fb
from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators.agreement import KINDS, SITE, Agreement
from fedbilevel.estimators.columns import require_in_frame
from fedbilevel.estimators.evaluation import AskSites, Report, evaluated
from fedbilevel.estimators.measures import CELLS
from fedbilevel.estimators.model_card import StudyCosts, card
from fedbilevel.estimators.model_in_use import (
    coefficient_table,
    fitted_pipeline,
    intercept_error,
    warn_of_far_numbers,
)
from fedbilevel.estimators.preparer import read_saved
from fedbilevel.estimators.scoring_sheet import sheet
from fedbilevel.estimators.site_table import SiteTable
from fedbilevel.estimators.survival_curves import CurveSteps, check_steps, survival
from fedbilevel.extending import (
    errors_in,
    explain_misspelt,
    is_count,
    parse_json,
    require,
    require_count,
    unknown,
    warnings_in,
    write_text,
)

PENALTIES = "one", "column", "feature"
VALUES = "coef", "penalties"  # the values that a saved model has for each feature


@explain_misspelt
@dataclass(frozen=True, kw_only=True)
class Study:
    """The settings of a study, which all sites need before it begins.

    Args:
        estimator: the model: "logistic", "ridge" or "cox".
        sites: the names of the sites; site i is client i of a federation.
        target: the column that is predicted; for Cox's model the column of times.
        event: for Cox's model, the column that is 1 if the event came at the row's time, and 0 if it had not come by
            then.
        positive: for logistic regression, the class whose probability is predicted; empty: the second of both classes
            in alphabetical order.
        patient: the column that identifies the patient of each row, if patients have several rows; empty: each row is a
            different patient. All rows of a patient at a site are in one fold, are held out together, and count
            together in standard errors and intervals.
        categorical: the columns of categories: codes or words.
        columns: the features; empty: all columns except target, event, patient and `drop`.
        drop: the columns that are left out. If a table lacks such a column, a warning is issued; if all tables
            lack it, an error is raised.
        gaps: texts that mean a missing value, in addition to those that pandas reads as missing.
        offsets: whether the model has an offset for each site; all offsets share a penalty. Cox's model has a baseline
            hazard for each site instead.
        penalty: "one": one penalty for all features; "column": a penalty for each column; "feature": a penalty for each
            feature, where each category of a column is a feature.
        groups: lists of columns by name; the columns of a list share a penalty of their own.
        cv: the number of folds of the cross-validation that finds the penalties.
        rounds: the largest number of exchanges; the search for penalties usually ends after a few dozen. With more than
            300 features, it bounds the exchanges of the search, and also the number of steps of Newton's method after
            the search. Each of these steps has several exchanges.
        random_state: the seed of the folds and of the rows that are held out.
        min_count: the least number of rows of a category, or of numbers in a column, at a site. Categories and columns
            with fewer are neither sent nor used at this site.
        holdout: the share of rows of each site and class that are held out. These rows are not used for statistics or
            fitting; the model's report is about them. Or the name of a site: all its rows are held out, and the model
            is evaluated on them as on a site that was not in the study (with the offset 0 if the model has offsets).
        times: for Cox's model, the times of baseline hazards and Kaplan-Meier curves, at most 50, in rising order;
            empty: neither is computed.
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
    holdout: float | str = 0.0
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.estimator not in KINDS:
            raise unknown("estimator", self.estimator, KINDS)
        for name in ("sites", "categorical", "columns", "drop", "gaps"):
            texts = getattr(self, name)
            fits = isinstance(texts, list | tuple) and all(isinstance(one, str) and one for one in texts)
            require(fits and len(set(texts)) == len(texts), name, texts, "a list of texts, each once")
            object.__setattr__(self, name, tuple(texts))
        for name in ("target", "event", "positive", "patient"):
            require(isinstance(getattr(self, name), str), name, getattr(self, name), "a text")
        fits = isinstance(self.groups, Mapping) and all(isinstance(one, list | tuple) for one in self.groups.values())
        grouped = [name for columns in self.groups.values() for name in columns] if fits else []
        fits = fits and all(isinstance(name, str) for name in grouped) and len(set(grouped)) == len(grouped)
        require(fits, "groups", self.groups, "a table with a list of columns for each name, each column once")
        object.__setattr__(self, "groups", {name: tuple(columns) for name, columns in self.groups.items()})
        require(type(self.offsets) is bool, "offsets", self.offsets, "true or false")
        object.__setattr__(self, "offsets", self.offsets and self.estimator != "cox")
        require(len(self.sites) > 0, "sites", self.sites, "the names of one site or more")
        require(bool(self.target), "target", self.target, "the name of a column")
        allowed = "the name of the column that is 1 if the event came, and 0 if not; Cox's model needs such a column"
        require(self.estimator != "cox" or bool(self.event), "event", self.event, allowed)
        require(
            self.estimator == "cox" or not self.event, "event", self.event, "left out, since only Cox's model has it"
        )
        allowed = "empty, unless the estimator is logistic"
        require(not self.positive or self.estimator == "logistic", "positive", self.positive, allowed)
        require(is_count(self.cv) and self.cv > 1, "cv", self.cv, "a whole number of folds, 2 or more")
        require_count("rounds", self.rounds)
        fits = type(self.random_state) is int and self.random_state >= 0
        require(fits, "random_state", self.random_state, "a whole number from 0 on")
        require(self.penalty in PENALTIES, "penalty", self.penalty, " or ".join(PENALTIES))
        require_count("min_count", self.min_count)
        self._check_holdout()
        fits = isinstance(self.times, list | tuple) and all(type(one) in (int, float) for one in self.times)
        fits = fits and all(a < b < np.inf for a, b in pairwise((0, *self.times))) and len(self.times) <= CELLS
        require(fits, "times", self.times, f"rising numbers above 0, and at most {CELLS} of them")
        require(not self.times or self.estimator == "cox", "times", self.times, "empty, unless the estimator is cox")
        object.__setattr__(self, "times", tuple(map(float, self.times)))

    def _check_holdout(self) -> None:
        if isinstance(self.holdout, str):
            if self.holdout not in self.sites:
                raise unknown("site of holdout", self.holdout, self.sites)
            require(
                len(self.sites) > 1, "holdout", self.holdout, "one of several sites: the model is fitted to the others"
            )
            return
        fits = type(self.holdout) in (int, float) and 0 <= self.holdout < 1
        require(fits, "holdout", self.holdout, "a share from 0 to below 1, or the name of a site")
        object.__setattr__(self, "holdout", float(self.holdout))

    @classmethod
    def read(cls, text: str | Mapping[str, Any]) -> Self:
        """Read a study from a table of settings, such as that of a TOML file, or from the JSON that `text` returned.

        Raises:
            ConfigurationError: a field is missing, unknown or wrong.
        """
        given = parse_json(text.encode()) if isinstance(text, str) else dict(text)
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise unknown("field of [study]", name, known)
        missing = [name for name in ("estimator", "sites", "target") if name not in given]
        if missing:
            message = f"[study] has no {' and no '.join(missing)}: a study needs estimator, sites and target"
            got, allowed = f"without {', '.join(missing)}", "a study with estimator, sites and target"
            raise ConfigurationError(path="[study]", got=got, allowed=allowed, message=message)
        return cls(**given)

    @property
    def text(self) -> str:
        """Return the study as JSON. Equal studies have equal texts."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @property
    def fitted_sites(self) -> list[str]:
        """Return the sites to whose rows the model is fitted: all sites, without a site that is held out."""
        return [site for site in self.sites if site != self.holdout]

    @property
    def not_features(self) -> list[str]:
        """Return the columns that cannot be features."""
        return [name for name in (self.target, self.event, self.patient) if name]

    def fit(self, tables: Mapping[str, Any], engine: Any = None) -> "StudyModel":
        """Run the study on this machine.

        Args:
            tables: a data frame for each site, by the site's name.
            engine: the engine that runs the exchanges; None: `Local()`.

        Raises:
            ConfigurationError: a site has no table, or its rows do not fit the study.
        """
        for name in tables:
            if name not in self.sites:
                raise unknown("site of the tables", name, self.sites)
        for name in self.sites:
            require(name in tables, f"table of site {name!r}", "missing", "a data frame for each of the study's sites")
        own, statistics = {}, []
        for site in self.sites:
            with errors_in(f"table of {site}"), warnings_in(f"table of {site}"):
                own[site] = SiteTable(self, site, tables[site])
                statistics.append(own[site].statistics())
        agreement = Agreement.of(self, statistics)
        samples = {}
        for site, table in own.items():
            with errors_in(f"table of {site}"):
                samples[site] = table.samples(agreement)
        clients = fb.Clients([samples[site] for site in self.fitted_sites], weights="size")
        estimator = agreement.train(clients, engine or fb.Local(devices=1))

        def ask(question: dict[str, Any]) -> list[Any]:
            return [table.answer(agreement, question) for table in own.values()]

        model = StudyModel.of(agreement, estimator, ask)
        return evaluated(replace(model, costs=StudyCosts.of(estimator.ledgers_)), ask)


@dataclass(frozen=True)
class StudyModel:
    """A study's model, with all that is needed to use it on a site's own table.

    Args:
        agreement: the `Agreement` of the sites, which says how rows are prepared.
        estimator: the estimator of prepared rows, with `coef_`, `intercept_`, `penalties_` and `classes_`.
        intercept_error: the standard error of the intercept of `table`; None with more than 300 features, and for Cox's
            model.
        report: the `Report` on predictions for held-out rows and on coefficients; None for a loaded model.
        baselines: for Cox's model, the steps of the baseline hazard of each site that has one.
        costs: exchanges, requests, bytes and ε of the study; None for a loaded model.
    """

    agreement: Agreement
    estimator: Any
    intercept_error: float | None = None
    report: Report | None = None
    baselines: Mapping[str, CurveSteps] = field(default_factory=dict)
    costs: StudyCosts | None = None

    @classmethod
    def of(cls, agreement: Agreement, estimator: Any, ask: AskSites) -> Self:
        """Make the model from a fitted estimator, without a report.

        If the study has a column of patients, the sites are asked for the scores of their patients. The standard errors
        of the coefficients are computed from these scores.
        """
        study = agreement.study
        if study.patient:
            fitted = [site != study.holdout for site in study.sites]
            estimator._count_patients(lambda question: [*compress(ask(question), fitted)])
        return cls(agreement, estimator, intercept_error(agreement, estimator))

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
        if self.intercept_error is not None:
            content["intercept_error"] = self.intercept_error
        content["intercept"] = getattr(estimator, "intercept_", 0.0)
        content |= {"baselines": dict(self.baselines)} if self.baselines else {}
        write_text(Path(file), json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, file: str | Path) -> Self:
        """Read a model from a file that `save` wrote.

        Raises:
            DataError: the file cannot be read, or was not written by `save`.
            ConfigurationError: a value in the file is not allowed; the message begins with the file.
        """
        return read_saved(Path(file), cls._of)

    @classmethod
    def _of(cls, content: Any) -> Self:
        agreement = Agreement.read(Study.read(content["study"]), json.dumps(content["agreement"]))
        estimator = agreement.estimator()
        for name in VALUES:
            setattr(estimator, f"{name}_", np.array([float(content[name][one]) for one in agreement.names]))
        errors, of_intercept = content.get("standard_errors"), content.get("intercept_error")
        estimator.standard_errors_ = errors and np.array([float(errors[one]) for one in agreement.names])
        known = [*(() if errors is None else errors.values()), *(() if of_intercept is None else (of_intercept,))]
        require(all(0 <= one < np.inf for one in known), "standard errors", known, "finite, and 0 or more")
        if estimator.has_intercept:
            estimator.intercept_ = float(content["intercept"])
        baselines = content.get("baselines", {})
        for site, baseline in baselines.items():
            check_steps(site, baseline, agreement.study.times)
        return cls(agreement, estimator, of_intercept, baselines=baselines)

    def prepared(self, frame: Any, site: str = "") -> Any:
        """Prepare the rows of a table with the columns of the study. Other columns are ignored.

        Args:
            site: the site of the rows. If it is empty, or is the site that was held out, the rows are treated as rows
                of a site that was not in the study. Such a site has the offset 0. (This is a weighted mean of all
                offsets, with the variances of the sites' indicators as weights.)
        """
        study, columns = self.agreement.study, [*self.agreement.features]
        if site and site not in study.sites:
            raise unknown("site", site, study.sites)
        require_in_frame([name for name in columns if not (study.offsets and name == SITE)], frame)
        if study.offsets:
            frame = frame.assign(**{SITE: site if site in study.fitted_sites else None})
        warn_of_far_numbers(self.agreement.features, frame)
        return self.agreement.preparer.transform(frame[columns])

    def predict(self, frame: Any, site: str = "") -> Any:
        """Return the prediction for each row: the class, the number, or the log hazard above the baseline."""
        return self.estimator.predict(self.prepared(frame, site))

    def predict_proba(self, frame: Any, site: str = "") -> Any:
        """Return the probability of the positive class for each row."""
        fits = self.agreement.study.estimator == "logistic"
        require(fits, "predict_proba", self.agreement.study.estimator, "called only for a logistic regression")
        return self.estimator.predict_proba(self.prepared(frame, site))[:, 1]

    def table(self) -> Any:
        """Return a data frame with a row for each coefficient, in original units, as tables in papers have them.

        Its columns are:
            "column" and "category": what the coefficient belongs to; the category is empty for a number.
            "coefficient": per unit of the original column.
            "odds ratio" (logistic regression) or "hazard ratio" (Cox's model): exp(coefficient). The ratio of a
                category compares rows of this category with rows in which the column is missing; to compare two
                categories, divide their ratios.
            "standard error": of the coefficient, in the same unit; NaN with more than 300 features.
            "penalty": the penalty of the standardised column, as in `penalties_`.

        The first row is the intercept: the log odds, or the number, for a row whose numbers are 0 and whose categories
        are gaps. Cox's model has no intercept.
        """
        return coefficient_table(self)

    def pipeline(self) -> Any:
        """Return the model as a fitted scikit-learn Pipeline of a `Preparer` and a plain LogisticRegression or Ridge.

        For a data frame with exactly the columns of the study, the pipeline makes the same predictions as the model. If
        the study has offsets, one of these columns is "site", which is None for a site that was not in the study. Do
        not store the pipeline by pickle, since a pickled file can run any code when it is loaded. Store the model by
        `save`, and make the pipeline from the model that `load` returns.

        Raises:
            ConfigurationError: the model is Cox's: scikit-learn has no such estimator.
        """
        return fitted_pipeline(self)

    def card(self) -> str:
        """Return a model card in Markdown, for readers who do not know the study.

        The card lists columns, sites, rows, the positive class, penalties, costs, the report, versions, the date of the
        card, and uses for which the model is not meant. The costs are exchanges, requests to sites, bytes, and the ε of
        differential privacy (or that no noise was added). A loaded model has no costs and no report.
        """
        return card(self)

    def sheet(self) -> str:
        """Return a scoring sheet in plain text, for computing a prediction with pen, paper and a pocket calculator.

        The sheet has the start of a sum; for each column of numbers, its factor and the term of a missing number; the
        points of each word and of each site; the formula that turns the sum into the prediction; and an example. The
        prediction is a probability (logistic regression), a number (ridge regression), or a relative hazard and, with
        baselines, the survival at each site (Cox's model).
        """
        return sheet(self)

    def predict_survival(self, frame: Any, times: Any, site: str) -> Any:
        """Return the probability that the event has not happened by each time, for each row of a site.

        The result has a row for each row of `frame`, and a column for each time. The probability follows from Cox's
        model and the site's baseline hazard. The cumulative baseline is a step function that rises at the ends of its
        steps.

        Raises:
            ConfigurationError: the site has no baseline, or a time is after the end of the baseline.
        """
        if site not in self.baselines:
            known, those = self.agreement.study.sites, ", ".join(self.baselines) or "no site has one"
            allowed = f"a site with a baseline ({those}); one that is held out, or has too few rows, has none"
            require(site not in known, "site", site, allowed)
            raise unknown("site with a baseline", site, self.baselines)
        return survival(self.baselines[site], self.predict(frame, site), times)
