"""An entry: a figure or table of a paper, as a file that says what the paper did and found, and what is run here.

An entry is written before its runs, with the claims that decide; what was changed later it says. Specs are merged from
the tables [spec], [quick] or [full], [panels.NAME] and [methods.NAME], a later one before an earlier one.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, Literal

from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.engines.curves import PANELS
from fedbilevel.experiments.presets.table import merged
from fedbilevel.experiments.spec import SECTIONS, configure
from fedbilevel.sweeps import measured_on_test, product

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Tables = Mapping[str, Mapping[str, Any]]
"""As much of a spec as is given, by section."""
SUFFIX = ".toml"
SOURCES = ("text", "table", "read off the figure", "published code")
MOST_ROUNDS = 4  # between two rows of a run with a budget


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A number or a finding that the paper reports: what it is about, its value as printed, and one of SOURCES.

    "published code": where the paper prints no number and its code has it, or was run.
    """

    what: str
    value: str
    source: str

    def __post_init__(self) -> None:
        _require_known("reported.source", [self.source], SOURCES)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper that the runs decide.

    Args:
        says: the statement, in a sentence.
        better: the method that it is about.
        than: the methods that it is compared with, one after the other; none for a slope.
        panels: in which it is made; none given: in all.
        by: what is read off each run: the metric at the "end", its "best" value, its "mean" over the cost, its mean
            over the rows of the "late" half of the run, or the cost of the "first" row that has `reach`.
        metric: the column; None takes the entry's.
        reach: of "first": the value that is to be reached.
        of: of "first" and "mean": the cost; None takes the entry's `against`.
        ratio: what `better` has is compared with `ratio` times what the other has.
        log: readings are compared by their decimal logarithms, as errors are that fall by powers of ten.
        level: the claim is that both are level: their difference lies within ±level.
        slope: the claim is that, on logarithmic axes, what is read off grows with the panels' values by this slope.
        within: of a slope: the fitted one may differ by so much, twice its standard error included.
    """

    says: str
    better: str
    than: Sequence[str] = ()
    panels: Sequence[str] = ()
    by: Literal["end", "best", "mean", "late", "first"] = "end"
    metric: str | None = None
    reach: float | None = None
    of: str | None = None
    ratio: float = 1.0
    log: bool = False
    level: float | None = None
    slope: float | None = None
    within: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A setting in which methods are run.

    Args:
        spec: tables of a spec.
        methods: those that are run in it; none given: all.
        value: of a series of settings, its place on the axis.
        metric, select: where they are not the entry's and the tuning's.
        tuning: tables of the trials' spec in this panel.
        budgets: of a leaderboard: amounts of costs, at which methods are ranked. A run ends when it has spent all.
        log: methods are ranked by the logarithm of the metric.
        apart: each run's values are chosen by trials with the seed of that run, for a task whose seed decides which
            samples are the test's. Trials with another seed would train on some of them.
    """

    spec: Tables = field(default_factory=dict)
    methods: Sequence[str] = ()
    value: float | None = None
    metric: str | None = None
    select: str | None = None
    tuning: Tables = field(default_factory=dict)
    budgets: Mapping[str, float] = field(default_factory=dict)
    log: bool = False
    apart: bool = False


@dataclass(frozen=True, kw_only=True)
class Method:
    """A curve or a row.

    Args:
        spec: tables of a spec.
        grid: the values of its fields that the holdout chooses among.
        grid_in: the values in single panels, in the place of these.
        ladder: in place of a grid: a step, whose value in a panel is multiplied by the factors of the tuning.
    """

    spec: Tables
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    grid_in: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)
    ladder: str = ""

    def values_in(self, panel: str) -> Mapping[str, Sequence[Any]]:
        """The values that the holdout chooses among in a panel, of a method without a ladder."""
        return self.grid_in.get(panel, self.grid)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How step sizes are chosen, the same for every method.

    Args:
        select: the metric that decides; it is not measured on test data.
        spec: what differs from the runs: the holdout, a shorter budget.
        seeds: of every point; none of those of the runs, but in a panel that is `apart`.
        factors: of the steps of methods with a ladder.
    """

    select: str
    spec: Tables = field(default_factory=dict)
    seeds: Sequence[int] = (100,)
    factors: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a scale changes: tables of the spec, of the tuning, of single panels and of single methods.

    Args:
        tuning_of: tables of the tuning in single panels, after those of all.
        minutes: that it takes: quick, on two cores, half of its processor time; full, on a GPU, derived from
            operations, launches and starting (docs/how-to/reproduce.md), or of a processor where that is faster. None
            where it is less than one.
        only: the panels that are played; none given: all. Claims of others stay open.
    """

    spec: Tables = field(default_factory=dict)
    tuning: Tables = field(default_factory=dict)
    tuning_of: Mapping[str, Tables] = field(default_factory=dict)
    panels: Mapping[str, Tables] = field(default_factory=dict)
    methods: Mapping[str, Tables] = field(default_factory=dict)
    only: Sequence[str] = ()
    minutes: float | None = None

    @property
    def takes(self) -> str:
        """The minutes for people."""
        if self.minutes is None:
            return "< 1 min"
        return f"{self.minutes:g} min" if self.minutes < 120 else f"{self.minutes / 60:,.0f} h"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure, a table or a theorem of a paper.

    Args:
        id: by which it is asked for.
        paper: "simfbo", "rabo", "fednest", "afbo", "fism"; or "theory", for what theorems of several claim.
        part: of the paper, such as "Figure 2(a)".
        title: in a line.
        shows: what the paper says that it shows, in a sentence.
        setting: the paper's, in sentences.
        reported: what the paper prints.
        differences: of our setting from the paper's, each in a sentence.
        metric: what is drawn, and by which claims are decided that name no other.
        against: the cost on the other axis: "rounds", "exchanges", "megabytes", "gflop", "seconds", "time".
        series: what the panels' values are, where they have some: then readings are drawn against them.
        spec: what all runs have in common.
        panels, methods: every method is run in every panel that names no others.
        tuning: None where nothing is chosen; `untuned` then says why.
        claims: what decides.
        runs: the id of the entry whose runs these are; its own by default.
        revised: what was changed after a first run, in a sentence; "" where nothing was.
    """

    id: str
    paper: str
    part: str
    title: str
    shows: str
    setting: str
    metric: str
    against: str
    spec: Tables
    panels: Mapping[str, Panel]
    methods: Mapping[str, Method]
    claims: Sequence[Claim]
    quick: Size
    full: Size
    reported: Sequence[Reported] = ()
    differences: Sequence[str] = ()
    tuning: Tuning | None = None
    untuned: str = ""
    series: str = ""
    runs: str = ""
    revised: str = ""

    def __post_init__(self) -> None:
        require(bool(self.panels), "panels", dict(self.panels), "one or more")
        require(bool(self.methods), "methods", dict(self.methods), "one or more")
        ranked = [bool(panel.budgets) for panel in self.panels.values()]
        require(all(ranked) or not any(ranked), "budgets", ranked, "given for all panels, or for none")
        one = self.claims if not any(ranked) else not self.claims
        require(bool(one), "claims", list(self.claims), "one or more, written before the runs; none of a leaderboard")
        budgets = [cost for panel in self.panels.values() for cost in panel.budgets]
        for cost in (self.against, *budgets, *(claim.of for claim in self.claims if claim.of is not None)):
            if cost not in PANELS:
                raise unknown("cost", cost, PANELS)
        valued = all(panel.value is not None for panel in self.panels.values())
        require(valued == bool(self.series), "series", self.series, "what the panels' values are, where all have one")
        self._check_tuning()
        self._check_rows()
        for claim in self.claims:
            self._check_claim(claim)
        for panel in self.panels.values():
            _require_known("methods of a panel", panel.methods, self.methods)
        for size in (self.quick, self.full):
            _require_known("panels of a scale", [*size.panels, *size.tuning_of, *size.only], self.panels)
            _require_known("methods of a scale", size.methods, self.methods)

    def _check_tuning(self) -> None:
        """Every method is tuned by as many trials, on anything but test data."""
        trials = {name: self._points(method) for name, method in self.methods.items()}
        if self.tuning is None:
            require(bool(self.untuned), "untuned", self.untuned, "the reason, where there is no [tuning]")
            require(set().union(*trials.values()) == {1}, "grid", trials, "left out, where there is no [tuning]")
            return
        require(len(set().union(*trials.values())) == 1, "grid", trials, "as many points for every method")
        for select in (self.tuning.select, *(panel.select or "" for panel in self.panels.values())):
            require(not measured_on_test(select), "tuning.select", select, "a metric that is not measured on test data")

    def _points(self, method: Method) -> set[int]:
        """Over how many points a method is tuned, in each panel."""
        _require_known("grid_in of a method", list(method.grid_in), self.panels)
        if method.ladder:
            return {len(self.tuning.factors) if self.tuning else 0}
        return {len(product(grid)) if grid else 1 for grid in (method.grid, *method.grid_in.values())}

    def _check_rows(self) -> None:
        """A run ends at the first row at which its budget is spent: with few rows it would go far beyond."""
        for scale, panel, tuning in itertools.product(SCALES, self.panels, (False, True)):
            for method in self.methods_of(panel):
                run = self.tables(panel, method, scale, tuning=tuning).get("run", {})
                dense = not {"exchanges", "bytes", "time"} & set(run) or run.get("eval_every", 1) <= MOST_ROUNDS
                allowed = f"at most {MOST_ROUNDS} beside a budget, or left out for about fifty rows"
                require(dense, "run.eval_every", run.get("eval_every"), allowed)

    def _check_claim(self, claim: Claim) -> None:
        _require_known("claims.better", [claim.better], self.methods)
        _require_known("claims.than", claim.than, self.methods)
        _require_known("claims.panels", claim.panels, self.panels)
        require((claim.reach is None) == (claim.by != "first"), "claims.reach", claim.reach, 'given with by = "first"')
        for panel in self.panels_of(claim):
            _require_known(f"claims in panel {panel}", [claim.better, *claim.than], self.methods_of(panel))
        if claim.slope is None:
            require(bool(claim.than), "claims.than", claim.than, "one method or more, or a slope in its place")
        else:
            require(bool(self.series), "claims.slope", claim.slope, "left out where panels have no values")

    def panels_of(self, claim: Claim) -> Sequence[str]:
        """The panels in which a claim is made."""
        return claim.panels or list(self.panels)

    def panels_at(self, scale: Scale) -> Sequence[str]:
        """The panels that are played at a scale."""
        return self.size(scale).only or list(self.panels)

    def methods_of(self, panel: str) -> Mapping[str, Method]:
        """The methods that are run in a panel."""
        names = self.panels[panel].methods or self.methods
        return {name: self.methods[name] for name in names}

    @property
    def trials(self) -> int:
        """How many points each method was tuned over, in each panel; 0 where nothing is chosen."""
        return max(self._points(next(iter(self.methods.values())))) if self.tuning else 0

    @property
    def ranked(self) -> bool:
        """Whether this is a leaderboard."""
        return any(panel.budgets for panel in self.panels.values())

    def measured_in(self, panel: str) -> str:
        """The metric of a panel."""
        return self.panels[panel].metric or self.metric

    def selected_in(self, panel: str) -> str:
        """The metric that chooses steps in a panel; "" where nothing is chosen."""
        return (self.panels[panel].select or self.tuning.select) if self.tuning else ""

    def grid(self, panel: str, method: str, scale: Scale) -> Mapping[str, Sequence[Any]]:
        """The values that are tried of a method's fields in a panel."""
        of = self.methods[method]
        if not of.ladder or self.tuning is None:
            return of.values_in(panel)
        step: Any = configure(self.tables(panel, method, scale)).algorithm.fields
        for part in of.ladder.split("."):
            step = step[part]
        return {of.ladder: [float(f"{factor * step:.4g}") for factor in self.tuning.factors]}

    def size(self, scale: Scale) -> Size:
        return self.quick if scale == "quick" else self.full

    def tables(self, panel: str, method: str, scale: Scale, *, tuning: bool = False) -> dict[str, Any]:
        """The tables of the spec of a method in a panel; with `tuning` that of its trials."""
        size = self.size(scale)
        layers = [size.spec, self.panels[panel].spec, size.panels.get(panel, {})]
        layers += [self.methods[method].spec, size.methods.get(method, {})]
        if tuning and self.tuning is not None:
            layers += [self.tuning.spec, self.panels[panel].tuning, size.tuning, size.tuning_of.get(panel, {})]
        found: dict[str, Any] = {}
        for layer in (self.spec, *layers):
            for section, table in layer.items():
                found[section] = merged(found.get(section, {}), table)
        return found


def _require_known(what: str, names: Any, known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def ids() -> list[str]:
    """Of all entries, in their order: by paper, then by number."""
    return sorted(file.name.removesuffix(SUFFIX) for file in _folder().iterdir() if file.name.endswith(SUFFIX))


def load_all() -> list[Entry]:
    """All entries, in their order."""
    return [load(id) for id in ids()]


def load(id: str) -> Entry:
    """An entry by its id.

    Raises:
        ConfigurationError: there is none, or its file is wrong.
    """
    if id not in ids():
        raise unknown("entry", id, ids())
    content = tomllib.loads((_folder() / f"{id}{SUFFIX}").read_text(encoding="utf-8"))
    if runs := content.get("runs"):
        content = {**tomllib.loads((_folder() / f"{runs}{SUFFIX}").read_text(encoding="utf-8")), **content}
    return read(id, content)


def read(id: str, content: Mapping[str, Any]) -> Entry:
    """An entry from the content of its file."""
    try:
        tuning = content.get("tuning")
        made = {
            **content,
            "id": id,
            "runs": content.get("runs", id),
            "panels": {
                name: Panel(spec=_spec(of, PANEL), **{field: of[field] for field in PANEL if field in of})
                for name, of in content["panels"].items()
            },
            "methods": {
                name: Method(spec=_spec(of, METHOD), **{field: of[field] for field in METHOD if field in of})
                for name, of in content["methods"].items()
            },
            "claims": [Claim(**claim) for claim in content.get("claims", ())],
            "reported": [Reported(**one) for one in content.get("reported", ())],
            "tuning": Tuning(**tuning) if tuning else None,
            **{str(scale): Size(**content[scale]) for scale in SCALES},
        }
        return Entry(**made)
    except KeyError as error:
        raise ConfigurationError(f"entry {id} lacks {error}") from error
    except (TypeError, ConfigurationError) as error:
        raise ConfigurationError(f"entry {id}: {error}") from error


PANEL, METHOD = ({one.name for one in fields(of)} - {"spec"} for of in (Panel, Method))


def _spec(content: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The tables of a spec in that of a panel or a method, beside its own fields; anything else is unknown."""
    found = {name: table for name, table in content.items() if name not in own}
    for name in found:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    return found


def _folder() -> Any:
    return resources.files("fedbilevel.reproduce") / "entries"
