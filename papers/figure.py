"""Define the file of a figure, a table or a theorem of a paper: what the paper claims, and what is run here.

The file, with the claims to decide, is written before the runs; later changes are stated in it. The spec of a run is
merged from the tables [spec], [quick] or [full], [panels.NAME] and [methods.NAME]. Later tables take precedence over
earlier ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import ConfigurationError
from fedbilevel.experiments import COSTS
from fedbilevel.extending import errors_in, unknown

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Tables = Mapping[str, Mapping[str, Any]]
"""The given fields of a spec, by section."""
PAPERS = Path(__file__).parent
SOURCES = ("text", "table", "read off the figure", "published code")
COUNTED = ("exchanges", "megabytes", "gflop")  # the costs of a round that can be counted without running it
MOST_ROUNDS = 4  # the largest eval_every with a budget, since a run ends at a row of its history


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper, or of ours on its methods, to be decided by the runs.

    Args:
        says: the statement, in a sentence.
        ours: whether the statement is ours. It is not counted among the statements of the papers.
        better: the method that the statement is about.
        than: the methods with which it is compared; none for a slope.
        panels: the panels for which the statement is made; empty: all panels, except `than_in`.
        than_in: the panel of the runs of the other methods, which may be `better` itself; None: the same panel.
        by: the reading of each run: the metric at the "end"; its "mean" over the cost; its mean over the rows of the
            "late" half of the run; or the cost of the "first" row that has reached `reach`.
        metric: the column or the cost to read; None: the figure's metric.
        against: the cost for "first" and "mean"; None: the figure's cost.
        reach: for "first": the value of the metric to be reached.
        ratio: the reading of `better` is compared with `ratio` times the reading of the other method.
        log: whether readings are compared by their decimal logarithms, for errors that fall by powers of ten.
        level: if given, the claim is that both methods are level: their difference is within ±level.
        slope: if given, the claim is that readings grow with the panels' values by this slope on logarithmic axes.
        within: for a slope: by how much the fitted slope, with twice its standard error, may differ from `slope`.
    """

    says: str
    better: str
    ours: bool = False
    than: Sequence[str] = ()
    panels: Sequence[str] = ()
    than_in: str | None = None
    by: Literal["end", "mean", "late", "first"] = "end"
    metric: str | None = None
    against: str | None = None
    reach: float | None = None
    ratio: float = 1.0
    log: bool = False
    level: float | None = None
    slope: float | None = None
    within: float = 0.1

    def sides(self, panel: str, *than: str) -> list[tuple[str, str]]:
        """Return (panel, method) of the runs that are compared in a panel: first `better`, then the methods `than`."""
        return [(panel, self.better), *((self.than_in or panel, name) for name in than)]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A setting, with the methods that are run in it (none given: all).

    In a series, `value` is the setting's place on the axis. `seeds` is the setting's number of seeds; None: the
    figure's number.
    """

    spec: Tables = field(default_factory=dict)
    methods: Sequence[str] = ()
    value: float | None = None
    seeds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of a figure.

    `grid` has the values of the algorithm's fields that are tried on the holdout. For a panel in `grid_in`, the values
    there are tried instead.
    """

    spec: Tables = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    grid_in: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reported:
    """Numbers that the paper reports.

    Args:
        what: what the numbers are, as on the page of the paper.
        source: where they are from; one of SOURCES.
        value: the numbers as a text; "": they are in `values`.
        values: the numbers by method, which the picture shows beside ours. Shares are in percent.
        panel: the panel of `values`; "": all panels.
        at: the cost at which the curves have these values; None: a level, drawn as a dashed line.
        metric: the metric of `values`; None: the figure's metric.
        over: methods of ours that `values` are relative to. For a cost, `values` are percentages of the mean of these
            methods; for another metric, they are differences to this mean.
    """

    what: str
    source: str
    value: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    panel: str = ""
    at: float | None = None
    metric: str | None = None
    over: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How values are chosen. The rules are the same for every method.

    Args:
        select: the metric, measured on the holdout, by which values are chosen.
        spec: the fields in which the specs of trials differ from the specs of runs.
        seeds: the seeds of the trials, which differ from the seeds of the runs.
        trials: the largest number of points that are tried for each method in a panel. As long as the chosen value of a
            field is the least or the largest that was tried, the next value beyond it is tried, and its ratio to the
            chosen value equals the ratio of the chosen value to its neighbour. None: only the points of the grid are
            tried.
    """

    select: str
    spec: Tables = field(default_factory=dict)
    seeds: Sequence[int] = (100,)
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a scale, quick or full, changes.

    A scale has its own tables for the spec, for the trials, and for single panels and methods. `only` has the panels
    that are run; if it is empty, all are run. `minutes` is the time that the figure takes.
    """

    spec: Tables = field(default_factory=dict)
    tuning: Tables = field(default_factory=dict)
    panels: Mapping[str, Tables] = field(default_factory=dict)
    methods: Mapping[str, Tables] = field(default_factory=dict)
    only: Sequence[str] = ()
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """The content of a figure's file.

    Args:
        file: the path of the file. Its name is the id of the figure, and its folder is the paper.
        part: the part of the paper, such as "Figure 2(a)".
        title: the title, in one line.
        shows: what the figure shows according to the paper, in a sentence.
        setting: the setting of the paper, in sentences.
        metric: the metric that is drawn, and by which claims are decided that name no other metric.
        against: the cost on the horizontal axis, by its name in COSTS.
        spec: the fields that all runs have in common.
        panels, methods: the panels and the methods. Every method is run in every panel, unless the panel names its
            methods.
        claims: the claims to decide.
        quick, full: the two scales at which the figure can be run.
        runs: the id of another figure of the paper whose runs this figure uses; by default its own id.
        found: the outcome, in a sentence that was written after the runs.
        reported: the numbers that the paper reports.
        printed: by panel and method, the values of the paper's table. The picture shows them beside the values at the
            end of the runs. The printed values are in percent if the values at the end are drawn in percent.
        differences: the differences between the setting here and the paper's, each in a sentence.
        tuning: how values are chosen; None: no value is chosen, and `untuned` says why.
        series: what the values of the panels are. If it is given, readings are drawn against these values.
        revised: what was changed after a first run, in a sentence; "": nothing was changed.
        seeds: the number of seeds that decide, in each panel without a number of its own. The seeds are 0, 1, 2, …
            without the seeds of the trials. Their number is fixed before the runs.
        beside: costs that decide nothing; the page shows their means below the claims.
        counted: whether nothing is run, and the costs of a round are counted by tracing it. All claims are then about
            COUNTED.
    """

    file: Path
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
    runs: str = ""
    found: str = ""
    reported: Sequence[Reported] = ()
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    differences: Sequence[str] = ()
    tuning: Tuning | None = None
    untuned: str = ""
    series: str = ""
    revised: str = ""
    seeds: int = 3
    beside: Sequence[str] = ()
    counted: bool = False

    def __post_init__(self) -> None:
        require(self.panels and self.methods and self.claims, "panels, methods and claims must be there")
        require_known("cost", [self.against, *self.beside], COSTS)
        numbers = [self.seeds, *(panel.seeds for panel in self.panels.values() if panel.seeds is not None)]
        require(min(numbers) >= 2, f"seeds is at least 2, so that there is an interval, not {min(numbers)}")
        require(len(numbers) == 1 or not self.series, "all panels of a series have the same seeds")
        require_known("panel in printed", self.printed, self.panels)
        for place, values in self.printed.items():
            require_known(f"method in printed, {place}", values, self.methods_of(place))
        for one in self.reported:
            self._check_reported(one)
        valued = all(panel.value is not None for panel in self.panels.values())
        require(valued == bool(self.series), "series names the panels' values: give both, or neither")
        for panel in self.panels.values():
            require_known("method of a panel", panel.methods, self.methods)
        for size in (self.quick, self.full):
            require_known("panel of a scale", [*size.panels, *size.only, *size.left_out], self.panels)
            for place, names in size.left_out.items():
                require_known(f"method in left_out, {place}", names, self.methods_of(place))
            require_known("method of a scale", size.methods, self.methods)
        for claim in self.claims:
            self._check(claim)
        self._check_trials()
        self._check_rows()
        self._check_counted()

    def _check_reported(self, one: Reported) -> None:
        require_known("source", [one.source], SOURCES)
        require(bool(one.value) != bool(one.values), f'"{one.what}": give either value or values')
        require_known("panel in reported", [one.panel] if one.panel else [], self.panels)
        for panel in [one.panel] if one.panel else self.panels:
            require_known(f"method in reported, {panel}", [*one.values, *one.over], self.methods_of(panel))

    def _check(self, claim: Claim) -> None:
        require_known("way to read a run", [claim.by], ("end", "mean", "late", "first"))
        require_known("panel of a claim", claim.panels, self.panels)
        require_known("panel of a claim", [claim.than_in] if claim.than_in else [], self.panels)
        for panel in self.panels_of(claim):
            require_known(f"method of a claim in panel {panel}", [claim.better], self.methods_of(panel))
            require_known(f"method of a claim in panel {panel}", claim.than, self.methods_of(claim.than_in or panel))
            same = len(self.seeds_of(panel)) == len(self.seeds_of(claim.than_in or panel))
            require(same and panel != claim.than_in, f'"{claim.says}": than_in is another panel with as many seeds')
        require_known("cost of a claim", [claim.against] if claim.against else [], COSTS)
        require((claim.reach is None) == (claim.by != "first"), f'"{claim.says}": reach belongs to by = "first"')
        require((claim.slope is None) == bool(claim.than), f'"{claim.says}": give either than or slope')
        require(claim.slope is None or bool(self.series), f'"{claim.says}": a slope needs panels with values')
        require(claim.slope is None or claim.than_in is None, f'"{claim.says}": a slope has no than_in')

    def _check_trials(self) -> None:
        """Check that all methods are tuned by the same number of trials, and not on test data."""
        counts = {(name, panel): len(self.points(panel, name)) for panel in self.panels for name in self.methods}
        for name, method in self.methods.items():
            require_known(f"panel in grid_in of {name}", method.grid_in, self.panels)
        if self.tuning is None:
            require(self.untuned, "untuned must say why, where there is no [tuning]")
            require(set(counts.values()) == {1}, "a grid needs [tuning]")
            return
        require(len(set(counts.values())) == 1, f"every method needs as many points in every panel: {counts}")
        most = self.tuning.trials
        fits = most is None or most > max(counts.values())
        require(fits, f"tuning.trials is more than the {max(counts.values())} points of the grids, not {most}")
        words = re.split(r"[_.\W]|(?<=[a-z])(?=[A-Z])", self.tuning.select)
        on_test = any(re.fullmatch(r"tests?\d*", word.lower()) for word in words)
        require(not on_test, f"{self.tuning.select} is measured on test data: choose by a metric that is not")

    def _check_rows(self) -> None:
        for scale, panel, tuning in itertools.product(SCALES, self.panels, (False, True)):
            for method in self.methods_of(panel):
                run = self.tables(panel, method, scale, tuning=tuning).get("run", {})
                dense = not {"exchanges", "bytes", "time"} & run.keys() or run.get("eval_every", 1) <= MOST_ROUNDS
                require(dense, f"run.eval_every is at most {MOST_ROUNDS} beside a budget, or left out")

    def _check_counted(self) -> None:
        if not self.counted:
            return
        require(self.tuning is None, "a figure whose costs are counted has no [tuning]")
        require_known(
            "cost that is counted", [self.metric, *(claim.metric or self.metric for claim in self.claims)], COUNTED
        )
        for scale, panel in itertools.product(SCALES, self.panels):
            for method in self.methods_of(panel):
                run = self.tables(panel, method, scale).get("run", {})
                one = run.get("rounds") == 1 and run.get("cohort") in ("none", None)
                require(
                    one, f"{panel} · {method}: costs are counted of one round of all clients: rounds = 1, no cohort"
                )

    @property
    def id(self) -> str:
        """Return the id of the figure, which is the name of its file."""
        return self.file.stem

    def size(self, scale: Scale) -> Size:
        """Return what a scale changes."""
        return self.quick if scale == "quick" else self.full

    def panels_of(self, claim: Claim) -> Sequence[str]:
        """Return the panels for which a claim is made."""
        return claim.panels or [panel for panel in self.panels if panel != claim.than_in]

    def methods_of(self, panel: str) -> Mapping[str, Method]:
        """Return the methods that are run in a panel."""
        return {name: self.methods[name] for name in self.panels[panel].methods or self.methods}

    def seeds_of(self, panel: str | None = None) -> list[int]:
        """Return the seeds of a panel; None: of a panel without a number of its own."""
        own = None if panel is None else self.panels[panel].seeds
        others = (seed for seed in itertools.count() if self.tuning is None or seed not in self.tuning.seeds)
        return list(itertools.islice(others, self.seeds if own is None else own))

    def pairs(self, scale: Scale) -> list[tuple[str, str]]:
        """Return (panel, method) for all panels that are run at a scale, with the methods that are run in them."""
        size = self.size(scale)
        every = ((panel, method) for panel in size.only or self.panels for method in self.methods_of(panel))
        return [(panel, method) for panel, method in every if method not in size.left_out.get(panel, ())]

    def points(self, panel: str, method: str) -> list[dict[str, Any]]:
        """Return the points that are tried for a method in a panel: values of its fields.

        If nothing is tried, there is one point without values.
        """
        of = self.methods[method]
        grid = of.grid_in.get(panel, of.grid)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def tables(self, panel: str, method: str, scale: Scale, *, tuning: bool = False) -> dict[str, Any]:
        """Return the tables of the spec of a method in a panel or, with `tuning`, of its trials."""
        size, tuned = self.size(scale), self.tuning if tuning else None
        layers = [self.spec, size.spec, self.panels[panel].spec, size.panels.get(panel, {})]
        layers += [self.methods[method].spec, size.methods.get(method, {})]
        layers += [tuned.spec, size.tuning] if tuned else []
        found: dict[str, Any] = {}
        for section, table in (item for layer in layers for item in layer.items()):
            found[section] = merged(found.get(section, {}), table)
        return found

    def fingerprint(self, scale: Scale, of: Mapping[str, Container[str]] | None = None) -> str:
        """Return a short hash of the claims and of what is run at a scale.

        It covers all of the figure except prose, minutes and the other scale.

        Args:
            of: the methods that it covers, by panel; None: all methods that are run at this scale.
        """
        played = [
            [panel, method, self.points(panel, method)]
            + [self.tables(panel, method, scale, tuning=tuning) for tuning in (False, True)]
            for panel, method in self.pairs(scale)
            if of is None or method in of.get(panel, ())
        ]
        claims = [{**asdict(claim), "says": ""} for claim in self.claims]
        for claim in claims:
            del claim["ours"]
            for name in ("against", "than_in"):
                if claim[name] is None:
                    del claim[name]
        values = [panel.value for panel in self.panels.values()]
        tuning: list[Any] = [self.tuning.select, list(self.tuning.seeds)] if self.tuning else []
        tuning += [self.tuning.trials] if self.tuning and self.tuning.trials else []
        content = [claims, played, values, tuning, self.metric, self.against, *(["counted"] if self.counted else [])]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables; entries of the second take precedence.

    If both have a table at an entry, and the second has neither "name" nor "schedule", these are merged in the same
    way.
    """
    out = dict(first)
    for name, value in then.items():
        changes = isinstance(value, Mapping) and not {"name", "schedule"} & value.keys()
        out[name] = merged(out[name], value) if changes and isinstance(out.get(name), Mapping) else value
    return out


def require(fits: object, message: str) -> None:
    """Raise a ConfigurationError with this message unless `fits` is true."""
    if not fits:
        raise ConfigurationError(message)


def require_known(what: str, names: Iterable[Any], known: Iterable[str]) -> None:
    """Raise a ConfigurationError if one of `names` is not known."""
    for name in names:
        if name not in known:
            raise unknown(what, name, known)


def made(cls: type[Any], content: Mapping[str, Any]) -> Any:
    """Make an object of a dataclass from a table.

    If the class has a field `spec`, tables that are not fields of the class are sections of this spec.
    """
    own = {one.name for one in fields(cls)}
    if cls in (Panel, Method):
        own -= {"spec"}
        spec = {name: of for name, of in content.items() if name not in own}
        return cls(spec=spec, **{name: content[name] for name in own & content.keys()})
    require_known("field", content, own)
    return cls(**content)


def read(file: Path, content: Mapping[str, Any]) -> Figure:
    """Make a figure from the content of its file.

    Raises:
        ConfigurationError: something in the content is wrong; the message names the file.
    """
    with errors_in(str(file)):
        try:
            panels = {name: made(Panel, one) for name, one in content["panels"].items()}
            methods = {name: made(Method, one) for name, one in content["methods"].items()}
            sizes: dict[str, Any] = {str(scale): made(Size, content[scale]) for scale in SCALES}
            tuning = made(Tuning, content["tuning"]) if content.get("tuning") else None
            claims = [made(Claim, claim) for claim in content["claims"]]
            reported = [made(Reported, one) for one in content.get("reported", ())]
            parts: dict[str, Any] = {"panels": panels, "methods": methods, "claims": claims, "reported": reported}
            parts |= {"tuning": tuning, "file": file}
            return made(Figure, {"runs": file.stem, **content, **sizes, **parts})
        except KeyError as error:
            raise ConfigurationError(f"{error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ConfigurationError(str(error)) from error


def load(file: Path) -> Figure:
    """Read a figure from its file.

    If it uses the `runs` of another figure, it also takes over fields of that figure.

    Raises:
        ConfigurationError: the file cannot be read, or something in its content is wrong.
    """
    try:
        content = tomllib.loads(file.read_text("utf-8"))
        if runs := content.get("runs"):
            content = {**tomllib.loads(file.with_name(f"{runs}.toml").read_text("utf-8")), **content}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
    return read(file, content)


def files() -> list[Path]:
    """Return the files of all papers' figures, in order: papers/PAPER/PAPER-….toml."""
    return sorted(file for file in PAPERS.glob("*/*.toml") if file.stem.startswith(f"{file.parent.name}-"))


def find(asked: Sequence[str]) -> list[Figure]:
    """Return the figures that are asked for, each once: by id, by paper, by the path of a file, or "all"."""
    every = files()
    names = {"all", *(name for file in every for name in (file.stem, file.parent.name))}
    paths = [Path(name) for name in asked if name.endswith(".toml")]
    require_known("figure", [name for name in asked if not name.endswith(".toml")], sorted(names))
    own = [file for file in every if {"all", file.stem, file.parent.name} & set(asked)]
    return [load(file) for file in dict.fromkeys([*own, *paths])]
