"""Tables of several sites: linear models of a class, several classes, a count, a number or a survival time.

Each site has a CSV file, and is a client. Sites agree on columns without showing rows, so that all of them make the
same numbers: (a − mean)/deviation of a number, 0 of a gap, an indicator for each category. The losses ℓ:

    binary      log(1 + eᶻ) − c z              count       eᶻ − (c/m) z, of Poisson with the rate m eᶻ
    classes     log Σ_c' e^{z_c'} − z_c        continuous  ½ (z − (c − m)/s)²
    survival    e [log Σ_{k at risk} v_k e^{z_k} − z], of Cox, each site with a baseline hazard of its own

with z = aᵀy, m and s the mean and the standard deviation of all targets. The last entry of a row a is 1, and before it
is an indicator for each site; Cox's model has neither. Penalties, and weights of sites, are found by cross-validation
(Bennett et al., IJCNN 2006): site i deals its n_i training rows into K folds, k_j being the fold of row j, and y holds
K + 1 models, of which model k < K is trained without fold k, and model K on all rows:

    g_i = (1/n_i) Σ_j w_i v_j [ℓ_j(y_K) + Σ_{k ≠ k_j} K/(K − 1) ℓ_j(y_k)] + Σ_k Σ_l exp(x.penalty_{p(l)}) ‖y_kl‖²
    f_i = (1/n_i) Σ_j v_j ℓ_j(y_{k_j})               w = M softmax(x.weight), or 1

x starts at penalty = log(ridge) and weight = 0, and penalties stay in [−12, 0]. v_j is the row's weight, of mean 1 at
each site. f sees each row with the model that has not seen it, and never model K, the model that is used. Every entry
of a model has a penalty, so that g is strongly convex in y.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbilevel.core.errors import require, unknown
from fedbilevel.data.columns import Told, added, penalty_labels, read_told
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
"""The sites of the tables that are drawn, and their rows."""


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
        folder: where the files are; empty: tables of three sites that are drawn, with words and gaps.
        sites: names of the sites, client i being the site i; empty: all .csv files of the folder but test.csv, in
            alphabetical order. A federation needs the names.
        outcome: what the target is: "binary" (two classes), "classes" (several), "count", "continuous", "survival".
        target: the column that is predicted; of survival the times. Rows without it are left out, with a warning.
        event: of survival, the column that is 1 where the event came, 0 where it had not come by then.
        positive: of two classes the one that has label 1; empty: the second in alphabetical order.
        patient: a column that says whose each row is: rows of a patient are in one fold; empty: each is another's.
        sample_weight: a column of weights of rows, 0 or more; empty: all rows count alike. Measures ignore it.
        categorical: columns of codes; columns of words are categories anyway.
        drop: columns that are left out.
        gaps: texts that mean a gap, besides an empty text, NA, NaN, null and other texts that pandas takes as gaps.
        absent: whether a site without one of the columns is an error ("refuse"), or the column is a gap there ("gap").
        min_count: of a site's categories of fewer rows, and columns of fewer numbers, nothing is told or used.
        offsets: give each site an intercept of its own beside the common one.
        penalty: "one" for all features, or one for each "column" or "feature", that is, indicator. Offsets have one
            together, and so has the intercept; with "feature" each offset has one.
        groups: lists of columns that share a penalty of their own, by any name of it.
        site_weights: whether x has a weight for each site.
        tuned: False: the single-level problem of the last model alone, with `ridge` for every penalty.
        folds: K.
        ridge: every penalty at the start.
        weighting: p_i, in both losses: by training rows or, with `sample_weight`, their weights ("size"), or "equal".
        sizes: numbers that are p_i after division by their sum; a server that does not have the sites' files needs them
            for "size".
        test: the share of each site's rows that is measured and not trained on; 0 where FOLDER has a test.csv.
        holdout: the share of each site's training rows that is measured in place of test rows.
        seed: of the drawn tables, of test rows, holdout and folds. A site's draws depend on its name and no other site.
        party: in a federation, the number of a client, which reads its own file alone, or "server", which reads none.

    FOLDER/columns.json is what sites have agreed on, as `estimators.Preparer.save` writes it, of all features and, but
    for survival, the target. In a simulation it may be missing: it is then made of the training rows. FOLDER/test.csv
    has test rows, and a column "site" that says whose each is.

    Measured on test rows: the mean loss; accuracy, R² ("r2"), the mean deviance in units of the mean count, or the
    concordance of pairs within sites, of all rows and at each site that has such rows.
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
    if not own:  # a server, whose sites keep their files
        own = [rows.example(), *(SiteRows(name, {}, rows.measured(table)) for name, table in found.tested.items())]
    return task_of("tables", model, own, weights=weights, part="validation" if holdout else "test", party=party)


class _Files:
    """The tables of the sites that this party sees.

    `names` are all sites, `here` those whose files it reads.
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
            require(party == "all", "sites", "none", "the names of all sites, in a federation")
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
        self.weight: dict[str, float] = {}  # of each site's training rows, once they are taken

    def _where(self, name: str) -> str:
        return f"{name}.csv" if self.folder else name

    def _tested(self, gaps: tuple[str, ...]) -> dict[str, SiteFile]:
        """Read the rows of test.csv by site."""
        if not self.folder or not (self.folder / TEST).is_file():
            return {}
        allowed = f"0 where there is a {TEST}: the sites, which do not see it, train on all their rows"
        require(self.share == 0, "test", self.share, allowed)
        texts = read_texts(self.folder / TEST, gaps)
        if "site" not in texts:
            raise unknown(f"column of {TEST}", "site", texts)
        site = texts.pop("site")
        for name in sorted({*site} - {*self.names}, key=str):
            raise unknown(f"site in {TEST}", name, self.names)
        each = {
            name: {one: column[site == name] for one, column in texts.items()} for name in self.names if name in site
        }
        return {name: site_table(name, f"{name} in {TEST}", rows, self.columns) for name, rows in each.items()}

    def split(self, name: str) -> tuple[SiteFile, SiteFile]:
        """Return training and test rows of a site."""
        training, measured = self.tables[name].split(self.share, self.seed, 0)
        return training, self.tested.get(name, measured)

    def parts(self, name: str, agreed: Told, holdout: float) -> tuple[SiteFile, SiteFile]:
        """Return a site's training rows, which have no more than the site tells, and its measured rows."""
        training, measured = (with_columns(part, agreed, self.columns) for part in self.split(name))
        if holdout:
            training, measured = training.split(holdout, self.seed, 2)
        require_known(training, agreed)
        self.weight[name] = float(training.weight.sum())
        require(self.weight[name] > 0, f"weights of the training rows of {training.where}", 0.0, "above 0 somewhere")
        return used(training, self.columns), measured

    def agreed(self) -> tuple[Told, Mapping[str, Any]]:
        """Return what all sites together have told of the features, and of the target."""
        columns, file = self.columns, self.folder and self.folder / AGREED
        if file and file.is_file():
            told = read_told(file)
            if columns.outcome != "survival" and columns.target not in told:
                raise unknown(f"target in {AGREED}", columns.target, told)
            goal: Mapping[str, Any] = told.get(columns.target, {})
            require_fit(goal, columns)
            told = {name: one for name, one in told.items() if name not in (*columns.named, *columns.drop)}
        else:
            allowed = f"there; each site tells of its columns by estimators.Preparer, and {AGREED} is the sum"
            require(self.whole, f"{file}", "missing", allowed)
            told, goal = self._together()
        require(len(told) > 0, "features", "none", "one column at least")
        return told, goal

    def _together(self) -> tuple[Told, Mapping[str, Any]]:
        columns, training = self.columns, [self.split(name)[0] for name in self.names]
        kinds = kinds_of(training)
        told = [with_columns(one, kinds, columns).told(columns) for one in training]
        if columns.outcome == "survival":
            events = sum(one.target["event"].sum() for one in training)
            require(events > 0, f"events {columns.event!r}", "none", "one at least")
        both = {name: added([one[name] for one in told]) for name in told[0]}
        goal = both.pop(columns.target, {}) if columns.outcome != "survival" else {}
        return both, goal


class _Rows:
    """What makes samples of a table's rows."""

    def __init__(
        self, agreed: Told, goal: Mapping[str, Any], columns: ColumnRoles, names: list[str], indicators: int
    ) -> None:
        self.agreed, self.goal, self.columns, self.names, self.indicators = agreed, goal, columns, names, indicators

    def samples(self, table: SiteFile, **more: Floats) -> dict[str, Floats]:
        """Return samples, with the indicators and the constant behind the features, and the number of the site."""
        table = with_columns(table, self.agreed, self.columns)
        made, number = samples_of(table, self.agreed, self.goal, self.columns), self.names.index(table.name)
        if self.columns.outcome != "survival":
            constant = [float(i == number) for i in range(self.indicators)] + [1.0]
            row = np.column_stack([made["row"], np.tile(constant, (len(table), 1))])
            made["row"] = row.astype(np.float32)
        return ordered({**made, "site": np.full(len(table), number, np.int32), **more}, self.columns)

    def of(self, training: SiteFile, measured: SiteFile, folds: int, seed: int) -> SiteRows:
        """Return a site's rows."""
        own = self.samples(training, fold=training.folds(folds, seed))
        return SiteRows(training.name, own, self.measured(measured))

    def measured(self, table: SiteFile) -> dict[str, Floats]:
        """Return samples that all count alike."""
        return self.samples(replace(table, weight=np.ones(len(table))))

    def example(self) -> SiteRows:
        """Return one row, whose numbers say nothing, of a site elsewhere."""
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


def _penalties(agreed: Told, penalty: str, groups: Mapping[str, Any], indicators: int, intercept: bool) -> list[int]:
    """Return the number of each entry's penalty."""
    own = {column: f"group {name}" for name, columns in groups.items() for column in columns}
    for column in own:
        if column not in agreed:
            raise unknown("column in groups", column, agreed)
    labels = [f"feature {label}" for label in penalty_labels(agreed, penalty, own)]
    labels += [f"site {i}" if penalty == "feature" else "sites" for i in range(indicators)] + ["intercept"] * intercept
    first = list(dict.fromkeys(labels))
    return [first.index(label) for label in labels]


def _weights(weighting: str, sizes: Sequence[float], found: _Files) -> Any:
    """Return p_i of the sites that this party sees, or of all on a server that sees none."""
    known = weighting_of(weighting)
    if len(sizes):
        require(len(sizes) == len(found.names), "sizes", list(sizes), f"{len(found.names)} numbers, one for each site")
        return [sizes[found.names.index(name)] for name in found.here or found.names]
    allowed = "'equal', or given as `sizes`, on a server without the sites' files"
    require(known is None or bool(found.here), "weighting", weighting, allowed)
    return [found.weight[name] for name in found.here] if known else None


def drawn_texts(columns: ColumnRoles, seed: int) -> dict[str, dict[str, Texts]]:
    """Draw tables of the sites of DRAWN: age, dose, pulse with gaps, and a ward, which `west` has two of."""
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
