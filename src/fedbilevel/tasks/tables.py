"""Fit linear models to the tables of several sites, for targets that are classes, counts, numbers or survival times.

Each site has a CSV file, and is a client. Sites agree on their columns without showing rows, so that all sites encode
entries in the same way: a number a as (a − mean)/deviation, a gap in a column of numbers as 0, and a word by an
indicator for each category. The losses of a row with the target c are:

    binary      log(1 + eᶻ) − c z              count       eᶻ − (c/m) z, of Poisson with the rate m eᶻ
    classes     log Σ_c' e^{z_c'} − z_c        continuous  ½ (z − (c − m)/s)²
    survival    e [log Σ_{k at risk} v_k e^{z_k} − z], of Cox, each site with a baseline hazard of its own

Here z is aᵀy, and m and s are the mean and the standard deviation of all targets. A row a contains the features, then
an indicator for each site, and a 1 as its last entry; rows of Cox's model contain only the features. Penalties and
weights of sites are found by cross-validation (Bennett et al., IJCNN 2006). Site i divides its n_i training rows into K
folds, and row j is in fold k_j. y contains K + 1 models; model k < K is trained without fold k, and model K on all
rows:

    g_i = (1/n_i) Σ_j w_i v_j [ℓ_j(y_K) + Σ_{k ≠ k_j} K/(K − 1) ℓ_j(y_k)] + Σ_k Σ_l exp(x.penalty_{p(l)}) ‖y_kl‖²
    f_i = (1/n_i) Σ_j v_j ℓ_j(y_{k_j})               w = M softmax(x.weight), or 1

x starts at penalty = log(ridge) and weight = 0, and penalties stay in [−12, 0]. v_j is the weight of row j; the mean of
these weights is 1 at each site. In f, each row is predicted by the model that was trained without this row. Model K,
which is used in the end, does not occur in f. Every entry of a model has a penalty, so that g is strongly convex in y.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbilevel.core.errors import ConfigurationError, DataWarning, require, unknown, warn
from fedbilevel.data.columns import Summaries, added, as_number, penalty_labels, read_summaries
from fedbilevel.data.table_files import Texts, read_texts
from fedbilevel.tasks.linear import Model, SiteRows, task_of, weighting_of
from fedbilevel.tasks.outcomes import OUTCOMES
from fedbilevel.tasks.site_tables import (
    ColumnRoles,
    OutcomeName,
    SiteFile,
    classes_of,
    kinds_of,
    ordered,
    require_fit,
    require_known,
    samples_of,
    site_table,
    used,
    with_columns,
)
from fedbilevel.tasks.task import Floats, Task

AGREED, TEST = "columns.json", "test.csv"
PENALTIES = "one", "column", "feature"
DRAWN = {"north": 120, "south": 80, "west": 40}
"""The sites of the generated tables, with their numbers of rows."""


def tables(
    *,
    folder: str = "",
    sites: Sequence[str] = (),
    outcome: OutcomeName = "binary",
    target: str = "outcome",
    event: str = "event",
    positive: str = "",
    patient: str = "",
    sample_weight: str = "",
    categorical: Sequence[str] = (),
    drop: Sequence[str] = (),
    gaps: Sequence[str] = ("?",),
    absent: Literal["refuse", "gap"] = "refuse",
    min_count: int = 1,
    offsets: bool = True,
    penalty: Literal["one", "column", "feature"] = "one",
    groups: Mapping[str, Any] | None = None,
    site_weights: bool = False,
    tuned: bool = True,
    folds: int = 5,
    ridge: float = 0.01,
    weighting: Literal["size", "equal"] = "size",
    sizes: Sequence[float] = (),
    test: float = 0.33,
    holdout: float = 0.0,
    seed: int = 0,
    party: int | str = "all",
) -> Task:
    """Fit a linear model to the CSV files of several sites, FOLDER/SITE.csv.

    Args:
        folder: the folder of the files. If empty, tables of three sites, with words and gaps, are generated.
        sites: the names of the sites; client i is site i. If empty, the sites are all .csv files of the folder except
            test.csv, in alphabetical order. A federation needs the names.
        outcome: what the target is: "binary" (two classes), "classes" (several), "count", "continuous", "survival".
        target: the column that is predicted; for survival, the times. Rows without it are left out, with a warning.
        event: for survival, the column that is 1 if the event was observed at the row's time, and 0 if it had not
            happened by then.
        positive: for two classes, the class with the label 1. If empty, it is the second class in alphabetical order.
        patient: the column that names the patient of each row; all rows of a patient are in the same fold. If empty,
            each row belongs to a different patient.
        sample_weight: the column with the weights of rows, 0 or more. If empty, all rows have the same weight. Metrics
            ignore these weights.
        categorical: the columns of codes that are categories. Columns of words are always categories.
        drop: the columns that are left out.
        gaps: texts that mean a gap, besides an empty text, NA, NaN, null and other texts that pandas takes as gaps.
        absent: what happens if a site lacks a column: an error ("refuse"), or all entries of the column are gaps at
            this site ("gap").
        min_count: the least number of rows of a category, and of numbers of a column. A site neither reports nor uses a
            category or a column with fewer rows or numbers.
        offsets: whether each site has an intercept of its own (an offset), in addition to the common intercept.
        penalty: "one": all features share a penalty; "column": each column has a penalty; "feature": each feature has a
            penalty, and so has each indicator of a category. The intercept has a penalty of its own. The offsets share
            a penalty; with "feature" each offset has its own.
        groups: name -> a list of columns that share a penalty of their own; the names can be chosen freely.
        site_weights: whether x contains a weight for each site.
        tuned: whether penalties and weights are tuned. If not, the problem has a single level, in which only the last
            model is trained and every penalty is `ridge`.
        folds: the number of folds, K.
        ridge: the value of every penalty at the start.
        weighting: how the clients' weights p_i are set in both losses: "equal", or by the numbers of training rows
            ("size"); with `sample_weight`, "size" uses the sums of the rows' weights.
        sizes: a number for each site; p_i are these numbers divided by their sum. A server without the sites' files
            needs them for "size".
        test: the share of each site's rows that is used for metrics and not for training. It must be 0 if FOLDER has a
            test.csv.
        holdout: the share of each site's training rows that is held out. Above 0, the metrics are measured on these
            rows in place of the test rows.
        seed: the seed of the generated tables, of test rows, of the holdout and of folds. A site's random draws depend
            on its name, and not on other sites.
        party: "all" in a simulation; in a federation the number of a client, which reads only its own file, or
            "server", which reads no site's file.

    The file FOLDER/columns.json has the summaries on which sites have agreed: of all features and, except for survival,
    of the target. `estimators.Preparer.save` writes this file. In a simulation it may be missing; the summaries are
    then computed from the training rows. The file FOLDER/test.csv, if there is one, has test rows, with a column "site"
    that names the site of each row.

    The metrics are the mean loss of all test rows, the score of all test rows, and the score of each site's test rows.
    The score is the accuracy, R² ("r2"), the mean deviance in units of the mean count, or the concordance of pairs
    within sites.
    """
    if outcome not in OUTCOMES:
        raise unknown("outcome", outcome, OUTCOMES)
    if penalty not in PENALTIES:
        raise unknown("penalty", penalty, PENALTIES)
    for name, share in (("test", test), ("holdout", holdout)):
        require(0 <= share < 1, name, share, "at least 0 and below 1")
    columns = ColumnRoles(
        outcome=outcome,
        target=target,
        event=event,
        positive=positive,
        patient=patient,
        sample_weight=sample_weight,
        categorical=categorical,
        drop=drop,
        absent=absent,
        min_count=min_count,
    )
    found = _Files(folder, tuple(sites), tuple(gaps), columns, test, seed, party)
    agreed, goal = found.agreed()
    indicators = len(found.names) if offsets and outcome != "survival" else 0
    classes = classes_of(goal, columns) if outcome in ("binary", "classes") else []
    model = Model(
        outcome=OUTCOMES[outcome],
        sites=len(found.names),
        penalty=_penalties(agreed, penalty, groups or {}, indicators, outcome != "survival"),
        classes=len(classes) if outcome == "classes" else 0,
        folds=folds,
        ridge=ridge,
        tuned=tuned,
        weighted=tuned and site_weights,
    )
    rows = _Rows(agreed, goal, columns, found.names, indicators)
    own = [rows.of(*found.parts(name, agreed, holdout), folds, seed) for name in found.here]
    weights = _weights(weighting, sizes, found)
    if not own:  # this is a server without the sites' files
        own = [rows.example(), *(SiteRows(name, {}, rows.measured(table)) for name, table in found.tested.items())]
    return task_of("tables", model, own, weights=weights, part="validation" if holdout else "test", party=party)


class _Files:
    """The tables of sites, as far as this party reads their files.

    `names` are all sites, and `here` the sites whose rows become samples on this machine.
    """

    def __init__(
        self,
        folder: str,
        sites: tuple[str, ...],
        gaps: tuple[str, ...],
        columns: ColumnRoles,
        test: float,
        seed: int,
        party: int | str,
    ) -> None:
        self.folder, self.columns, self.share, self.seed = Path(folder) if folder else None, columns, test, seed
        require(len(set(sites)) == len(sites), "sites", list(sites), "names, each once")
        texts = {} if self.folder else drawn_texts(columns, seed)
        if self.folder and not sites:
            require(party == "all", "sites", "none", "the names of all sites in a federation")
            require(self.folder.is_dir(), "folder", folder, "a folder with a CSV file for each site")
            sites = tuple(sorted(file.stem for file in self.folder.glob("*.csv") if file.name != TEST))
            require(len(sites) > 0, "folder", folder, "a folder with a CSV file for each site")
        for name in sites if not self.folder else ():
            if name not in texts:
                raise unknown("sites", name, texts)
        self.names = list(sites) or list(texts)
        if not isinstance(party, str):
            last = len(self.names) - 1
            require(0 <= party <= last, "party", party, f"one of 0 to {last}, the sites")
        if party == "all" or not self.folder:
            shown = self.names
        else:
            shown = [] if isinstance(party, str) else [self.names[party]]
        if self.folder:
            texts = {name: read_texts(self.folder / f"{name}.csv", gaps) for name in shown}
        self.tables = {name: site_table(name, self._where(name), texts[name], columns) for name in shown}
        self.here = shown if isinstance(party, str) else [self.names[party]]
        self.tested = {} if isinstance(party, int) else self._tested(gaps)
        self.whole = party == "all" or not self.folder
        self.weight: dict[str, float] = {}  # the sum of the weights of each site's training rows

    def _where(self, name: str) -> str:
        return f"{name}.csv" if self.folder else name

    def _tested(self, gaps: tuple[str, ...]) -> dict[str, SiteFile]:
        """Read the rows of test.csv, and return them by site."""
        if not self.folder or not (self.folder / TEST).is_file():
            return {}
        allowed = f"0 if the folder has a {TEST}: the sites do not see this file, and train on all their rows"
        require(self.share == 0, "test", self.share, allowed)
        texts = read_texts(self.folder / TEST, gaps)
        if "site" not in texts:
            error = unknown(f"column of {TEST}", "site", texts)
            columns = ", ".join(map(repr, error.allowed))
            error.message = f"{TEST} has no column 'site', which names the site of each row; its columns are {columns}"
            raise error
        site = texts.pop("site")
        for name in sorted({*site} - {*self.names}, key=str):
            raise unknown(f"site in {TEST}", name, self.names)
        each = {
            name: {one: column[site == name] for one, column in texts.items()} for name in self.names if name in site
        }
        return {name: site_table(name, f"{name} in {TEST}", rows, self.columns) for name, rows in each.items()}

    def split(self, name: str) -> tuple[SiteFile, SiteFile]:
        """Return the training rows and the test rows of a site."""
        training, measured = self.tables[name].split(self.share, self.seed, 0)
        return training, self.tested.get(name, measured)

    def parts(self, name: str, agreed: Summaries, holdout: float) -> tuple[SiteFile, SiteFile]:
        """Return the rows of a site on which the model is trained, and those on which it is measured.

        In the rows for training, an entry becomes a missing value if the site's summaries leave it out because few rows
        have it.
        """
        training, measured = (with_columns(part, agreed, self.columns) for part in self.split(name))
        if holdout:
            training, measured = training.split(holdout, self.seed, 2)
        require_known(training, agreed)
        self.weight[name] = float(training.weight.sum())
        require(self.weight[name] > 0, f"weights of the training rows of {training.where}", 0.0, "above 0 in some row")
        return used(training, self.columns), measured

    def agreed(self) -> tuple[Summaries, Mapping[str, Any]]:
        """Return the summaries of the features and of the target, over all sites together."""
        columns, file = self.columns, self.folder and self.folder / AGREED
        if file and file.is_file():
            summaries = read_summaries(file)
            if columns.outcome != "survival" and columns.target not in summaries:
                raise unknown(f"target in {AGREED}", columns.target, summaries)
            goal: Mapping[str, Any] = summaries.get(columns.target, {})
            require_fit(goal, columns)
            summaries = {name: one for name, one in summaries.items() if name not in (*columns.named, *columns.drop)}
        else:
            allowed = f"a file: each site summarises its columns by estimators.Preparer, and {AGREED} has the sum"
            require(self.whole, f"{file}", "missing", allowed)
            summaries, goal = self._together()
        require(len(summaries) > 0, "features", "none", "at least one column")
        return summaries, goal

    def _together(self) -> tuple[Summaries, Mapping[str, Any]]:
        columns, training = self.columns, [self.split(name)[0] for name in self.names]
        kinds = kinds_of(training)
        summaries = [with_columns(one, kinds, columns).summaries(columns) for one in training]
        if columns.outcome == "survival":
            events = sum(one.target["event"].sum() for one in training)
            if not events:
                message = f"no training row has an event (column {columns.event!r}): at least one is needed"
                path = f"events {columns.event!r}"
                raise ConfigurationError(path=path, got=0, allowed="at least one", message=message)
        both = {name: added([one[name] for one in summaries]) for name in summaries[0]}
        for name, one in both.items():
            _warn_of_codes(name, one.get("categories", ()))
        goal = both.pop(columns.target, {}) if columns.outcome != "survival" else {}
        return both, goal


def _warn_of_codes(column: str, words: Iterable[str]) -> None:
    """Warn of categories that are the same number, such as "01" and "1".

    If all entries of a column at a site are numbers, "01" becomes "1" there (`words_of`); otherwise it stays "01".
    """
    ways: dict[str, list[str]] = {}
    for word in words:
        ways.setdefault(as_number(word), []).append(word)
    if several := [", ".join(map(repr, of)) for of in ways.values() if len(of) > 1]:
        text = (
            f"column {column!r} has categories that are the same number, and count as different: {'; '.join(several)}"
        )
        why = "a site whose codes are all numbers writes 01 as 1"
        warn(DataWarning(f"{text}; {why}. If they mean the same, spell them alike at all sites"))


class _Rows:
    """A converter of tables' rows to samples, with the agreed columns, their roles and the sites."""

    def __init__(
        self, agreed: Summaries, goal: Mapping[str, Any], columns: ColumnRoles, names: list[str], indicators: int
    ) -> None:
        self.agreed, self.goal, self.columns, self.names, self.indicators = agreed, goal, columns, names, indicators

    def samples(self, table: SiteFile, **more: Floats) -> dict[str, Floats]:
        """Return the samples of a table.

        A row has the features, then the indicators of sites and the constant 1. Rows of survival times have only the
        features.
        """
        table = with_columns(table, self.agreed, self.columns)
        made, number = samples_of(table, self.agreed, self.goal, self.columns), self.names.index(table.name)
        if self.columns.outcome != "survival":
            constant = [float(i == number) for i in range(self.indicators)] + [1.0]
            row = np.column_stack([made["row"], np.tile(constant, (len(table), 1))])
            made["row"] = row.astype(np.float32)
        return ordered({**made, "site": np.full(len(table), number, np.int32), **more}, self.columns)

    def of(self, training: SiteFile, measured: SiteFile, folds: int, seed: int) -> SiteRows:
        """Return a site's training and measured rows, as samples with folds."""
        own = self.samples(training, fold=training.folds(folds, seed))
        return SiteRows(training.name, own, self.measured(measured))

    def measured(self, table: SiteFile) -> dict[str, Floats]:
        """Return a table's samples for metrics, in which all weights are 1."""
        return self.samples(replace(table, weight=np.ones(len(table))))

    def example(self) -> SiteRows:
        """Return one made-up row, from which a server gets the shapes and types of the sites' rows."""
        features = {
            name: np.full(1, None, object) if "categories" in one else np.full(1, np.nan)
            for name, one in self.agreed.items()
        }
        if self.columns.outcome == "survival":
            target = {"time": np.ones(1), "event": np.ones(1)}
        else:
            words = self.columns.outcome in ("binary", "classes")
            target = {"label": np.array([*self.goal["categories"]][:1], object) if words else np.ones(1)}
        table = SiteFile(self.names[0], "", features, target, np.ones(1), np.zeros(1, int))
        return SiteRows("", self.samples(table, fold=np.zeros(1, np.int32)))


def _penalties(
    agreed: Summaries, penalty: str, groups: Mapping[str, Any], indicators: int, intercept: bool
) -> list[int]:
    """Return the index of the penalty of each entry of a model."""
    own = {column: f"group {name}" for name, columns in groups.items() for column in columns}
    for column in own:
        if column not in agreed:
            raise unknown("column in groups", column, agreed)
    labels = [f"feature {label}" for label in penalty_labels(agreed, penalty, own)]
    labels += [f"site {i}" if penalty == "feature" else "sites" for i in range(indicators)] + ["intercept"] * intercept
    first = list(dict.fromkeys(labels))
    return [first.index(label) for label in labels]


def _weights(weighting: str, sizes: Sequence[float], found: _Files) -> Any:
    """Return the weights p_i of the sites whose files this party reads, or of all sites if it reads none."""
    known = weighting_of(weighting)
    if len(sizes):
        require(len(sizes) == len(found.names), "sizes", list(sizes), f"{len(found.names)} numbers, one for each site")
        return [sizes[found.names.index(name)] for name in found.here or found.names]
    allowed = "'equal' on a server without the sites' files, unless `sizes` is given"
    require(known is None or bool(found.here), "weighting", weighting, allowed)
    return [found.weight[name] for name in found.here] if known else None


def drawn_texts(columns: ColumnRoles, seed: int) -> dict[str, dict[str, Texts]]:
    """Generate tables of the sites of DRAWN.

    The columns are age, dose, pulse (with gaps) and ward. `west` has only two wards.
    """
    rng, made = np.random.default_rng([seed, 11]), {}
    for number, (name, count) in enumerate(DRAWN.items()):
        age, dose, pulse = rng.normal([55, 2, 75], [12, 1, 10], (count, 3)).T
        ward = rng.choice(["a", "b", "c"][: 2 if name == "west" else 3], count)
        z = (age - 55) / 12 - 0.8 * (dose - 2) + 0.7 * (ward == "b") + 0.5 * (number - 1)
        numbers = {"age": age.round(), "dose": dose.round(2), "pulse": pulse.round()}
        table = {one: np.array([*map(str, column), None], object)[:-1] for one, column in numbers.items()}
        table["pulse"][::9] = None
        made[name] = table | {"ward": np.array([*map(str, ward), None], object)[:-1]} | _drawn_target(columns, z, rng)
    return made


def _drawn_target(columns: ColumnRoles, z: Floats, rng: np.random.Generator) -> dict[str, Texts]:
    noisy, event = z + rng.logistic(size=len(z)), {}
    if columns.outcome == "binary":
        target = np.where(noisy > 0, "yes", "no")
    elif columns.outcome == "classes":
        target = np.array(["low", "middle", "high"])[np.digitize(noisy, [-1, 1])]
    elif columns.outcome == "count":
        target = rng.poisson(np.exp(1 + z / 3))
    elif columns.outcome == "continuous":
        target = (10 + 3 * noisy).round(2)
    else:
        time, censored = rng.exponential(100 * np.exp(-z)), rng.exponential(150, len(z))
        target = np.minimum(time, censored).round(1)
        event = {columns.event: np.array([*map(str, (time <= censored).astype(int)), None], object)[:-1]}
    return {columns.target: np.array([*map(str, target), None], object)[:-1]} | event
