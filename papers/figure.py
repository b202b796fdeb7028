"""A figure, a table or a theorem of a paper, as a file that says what the paper claims and what is run here.

The file is written before its runs, with the claims that decide; what was changed later it says. The spec of a run is
merged from the tables [spec], [quick] or [full], [panels.NAME] and [methods.NAME], a later one before an earlier one.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from fedbilevel.errors import ConfigurationError
from fedbilevel.experiments import COSTS

Scale = Literal["quick", "full"]
SCALES: tuple[Scale, ...] = ("quick", "full")
Tables = Mapping[str, Mapping[str, Any]]
"""As much of a spec as is given, by section."""
PAPERS = Path(__file__).parent
SOURCES = ("text", "table", "read off the figure", "published code")
COUNTED = ("exchanges", "megabytes", "gflop")  # costs of a round that are known without running it
MOST_ROUNDS = 4  # between two rows of a run with a budget, which ends at the first row at which it is spent


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper that the runs decide.

    Args:
        says: the statement, in a sentence.
        better: the method that it is about.
        than: the methods that it is compared with; none for a slope.
        panels: in which it is made; none given: in all.
        by: what is read off each run: the metric at the "end", its "mean" over the cost, its mean over the rows of the
            "late" half of the run, or the cost of the "first" row that has `reach`.
        metric: the column, or a cost; None takes the figure's.
        against: the cost by which it is "first", or over which the "mean" is; None takes the figure's.
        reach: of "first": the value that is to be reached.
        ratio: what `better` has is compared with `ratio` times what the other has.
        log: readings are compared by their decimal logarithms, as errors are that fall by powers of ten.
        level: the claim is that both are level: their difference lies within ±level.
        slope: the claim is that, on logarithmic axes, what is read off grows with the panels' values by this slope.
        within: of a slope: the fitted slope may differ by so much, twice its standard error included.
    """

    says: str
    better: str
    than: Sequence[str] = ()
    panels: Sequence[str] = ()
    by: Literal["end", "mean", "late", "first"] = "end"
    metric: str | None = None
    against: str | None = None
    reach: float | None = None
    ratio: float = 1.0
    log: bool = False
    level: float | None = None
    slope: float | None = None
    within: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A setting: the methods that are run in it (none given: all), and in a series its `value`, a place on the axis."""

    spec: Tables = field(default_factory=dict)
    methods: Sequence[str] = ()
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A curve or a row: `grid` holds the values of the algorithm's fields that the holdout chooses among; `grid_in`
    those of single panels."""

    spec: Tables = field(default_factory=dict)
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    grid_in: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How values are chosen, the same for every method.

    Args:
        select: the metric of the holdout that chooses.
        spec: how the trials' spec differs from the runs'.
        seeds: of the trials; none of them is a run's.
        trials: at most so many points are tried for each method in a panel. While the chosen value of a field is the
            least or the largest that was tried, the next one is tried, by the factor between the last two. None: the
            points of the grid alone are tried.
    """

    select: str
    spec: Tables = field(default_factory=dict)
    seeds: Sequence[int] = (100,)
    trials: int | None = None


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a scale changes: tables of the spec, of the trials, of single panels and methods; the panels that are played
    (`only`; none given: all); and the minutes that it takes."""

    spec: Tables = field(default_factory=dict)
    tuning: Tables = field(default_factory=dict)
    panels: Mapping[str, Tables] = field(default_factory=dict)
    methods: Mapping[str, Tables] = field(default_factory=dict)
    only: Sequence[str] = ()
    minutes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What a file says.

    Args:
        file: the file; its name is the figure's id, its folder the paper.
        part: of the paper, such as "Figure 2(a)".
        title: in a line.
        shows: what the paper says that it shows, in a sentence.
        setting: the paper's, in sentences.
        metric: what is drawn, and by which claims are decided that name no other.
        against: the cost on the other axis, by its name in COSTS.
        spec: what all runs have in common.
        panels, methods: every method is run in every panel that names no others.
        claims: what decides.
        quick, full: the two scales.
        runs: the id of the figure beside this one whose runs these are; its own by default.
        found: what came out, in a sentence, written after the runs.
        reported: what the paper prints: a table of `what`, `value` and `source`, one of SOURCES, for each number.
        printed: by panel and method, the values of the paper's table, which the picture has beside ours at the end of
            the runs; in per cent where ours are drawn so.
        differences: of our setting from the paper's, each in a sentence.
        tuning: None where nothing is chosen; `untuned` then says why.
        series: what the panels' values are, where they have some: then readings are drawn against them.
        revised: what was changed after a first run, in a sentence; "" where nothing was.
        seeds: how many seeds decide, 0, 1, 2, …: fixed before the runs.
        beside: costs whose means the page shows below the claims, and which decide nothing.
        counted: nothing is run: what a round costs is counted by tracing it. Claims are then on COUNTED.
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
    reported: Sequence[Mapping[str, str]] = ()
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
        require(self.seeds >= 2, f"seeds is at least 2, so that there is an interval, not {self.seeds}")
        require_known("panel in printed", self.printed, self.panels)
        for place, values in self.printed.items():
            require_known(f"method in printed, {place}", values, self.methods_of(place))
        for one in self.reported:
            require_known("source", [one.get("source")], SOURCES)
        valued = all(panel.value is not None for panel in self.panels.values())
        require(valued == bool(self.series), "series names the panels' values: give both, or neither")
        for panel in self.panels.values():
            require_known("method of a panel", panel.methods, self.methods)
        for size in (self.quick, self.full):
            require_known("panel of a scale", [*size.panels, *size.only], self.panels)
            require_known("method of a scale", size.methods, self.methods)
        for claim in self.claims:
            self._check(claim)
        self._check_trials()
        self._check_rows()
        self._check_counted()

    def _check(self, claim: Claim) -> None:
        require_known("way to read a run", [claim.by], ("end", "mean", "late", "first"))
        require_known("panel of a claim", claim.panels, self.panels)
        for panel in self.panels_of(claim):
            require_known(f"method of a claim in panel {panel}", [claim.better, *claim.than], self.methods_of(panel))
        require_known("cost of a claim", [claim.against] if claim.against else [], COSTS)
        require((claim.reach is None) == (claim.by != "first"), f'"{claim.says}": reach belongs to by = "first"')
        require((claim.slope is None) == bool(claim.than), f'"{claim.says}": give either than or slope')
        require(claim.slope is None or bool(self.series), f'"{claim.says}": a slope needs panels with values')

    def _check_trials(self) -> None:
        """Every method is tuned by as many trials, on anything but test data."""
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
        """The figure's name, that of its file."""
        return self.file.stem

    def size(self, scale: Scale) -> Size:
        """What a scale changes."""
        return self.quick if scale == "quick" else self.full

    def panels_of(self, claim: Claim) -> Sequence[str]:
        """The panels in which a claim is made."""
        return claim.panels or list(self.panels)

    def methods_of(self, panel: str) -> Mapping[str, Method]:
        """The methods that are run in a panel."""
        return {name: self.methods[name] for name in self.panels[panel].methods or self.methods}

    def pairs(self, scale: Scale) -> list[tuple[str, str]]:
        """The panels that are played at a scale, each with its methods."""
        panels = self.size(scale).only or self.panels
        return [(panel, method) for panel in panels for method in self.methods_of(panel)]

    def points(self, panel: str, method: str) -> list[dict[str, Any]]:
        """The values that are tried of a method's fields in a panel; one point without values where nothing is."""
        of = self.methods[method]
        grid = of.grid_in.get(panel, of.grid)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def tables(self, panel: str, method: str, scale: Scale, *, tuning: bool = False) -> dict[str, Any]:
        """The tables of the spec of a method in a panel; with `tuning` that of its trials."""
        size, tuned = self.size(scale), self.tuning if tuning else None
        layers = [self.spec, size.spec, self.panels[panel].spec, size.panels.get(panel, {})]
        layers += [self.methods[method].spec, size.methods.get(method, {})]
        layers += [tuned.spec, size.tuning] if tuned else []
        found: dict[str, Any] = {}
        for section, table in (item for layer in layers for item in layer.items()):
            found[section] = merged(found.get(section, {}), table)
        return found

    def fingerprint(self, scale: Scale) -> str:
        """A short hash of what is claimed and played at a scale: all but prose, minutes and the other scale."""
        played = [
            [panel, method, self.points(panel, method)]
            + [self.tables(panel, method, scale, tuning=tuning) for tuning in (False, True)]
            for panel, method in self.pairs(scale)
        ]
        claims = [{**asdict(claim), "says": ""} for claim in self.claims]
        for claim in claims:
            if claim["against"] is None:
                del claim["against"]
        values = [panel.value for panel in self.panels.values()]
        tuning: list[Any] = [self.tuning.select, list(self.tuning.seeds)] if self.tuning else []
        tuning += [self.tuning.trials] if self.tuning and self.tuning.trials else []
        content = [claims, played, values, tuning, self.metric, self.against, *(["counted"] if self.counted else [])]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]


def merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables, the later before the earlier; a table in it that has no name of its own changes that of the
    earlier and leaves the rest of it as it is."""
    out = dict(first)
    for name, value in then.items():
        changes = isinstance(value, Mapping) and not {"name", "schedule"} & value.keys()
        out[name] = merged(out[name], value) if changes and isinstance(out.get(name), Mapping) else value
    return out


def require(fits: object, message: str) -> None:
    """Raise ConfigurationError with that message unless something fits."""
    if not fits:
        raise ConfigurationError(message)


def require_known(what: str, names: Iterable[Any], known: Collection[str]) -> None:
    """Raise ConfigurationError for a name that is not known."""
    for name in names:
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        require(name in known, f"unknown {what} {name!r}; {hint}")


def made(cls: type[Any], content: Mapping[str, Any]) -> Any:
    """A dataclass from a table; where it has a `spec`, tables beside its own fields are sections of that."""
    own = {one.name for one in fields(cls)}
    if cls in (Panel, Method):
        own -= {"spec"}
        spec = {name: of for name, of in content.items() if name not in own}
        return cls(spec=spec, **{name: content[name] for name in own & content.keys()})
    require_known("field", content, own)
    return cls(**content)


def read(file: Path, content: Mapping[str, Any]) -> Figure:
    """A figure from the content of its file.

    Raises:
        ConfigurationError: something in it is wrong; the message names the file.
    """
    try:
        panels = {name: made(Panel, one) for name, one in content["panels"].items()}
        methods = {name: made(Method, one) for name, one in content["methods"].items()}
        sizes: dict[str, Any] = {str(scale): made(Size, content[scale]) for scale in SCALES}
        tuning = made(Tuning, content["tuning"]) if content.get("tuning") else None
        claims = [made(Claim, claim) for claim in content["claims"]]
        parts = {"panels": panels, "methods": methods, "claims": claims, "tuning": tuning, "file": file}
        return made(Figure, {"runs": file.stem, **content, **sizes, **parts})
    except KeyError as error:
        raise ConfigurationError(f"{file}: {error} is missing") from error
    except (TypeError, AttributeError, ConfigurationError) as error:
        raise ConfigurationError(f"{file}: {error}") from error


def load(file: Path) -> Figure:
    """A figure from its file, with what it takes over from the figure whose `runs` it has.

    Raises:
        ConfigurationError: the file cannot be read, or something in it is wrong.
    """
    try:
        content = tomllib.loads(file.read_text("utf-8"))
        if runs := content.get("runs"):
            content = {**tomllib.loads(file.with_name(f"{runs}.toml").read_text("utf-8")), **content}
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}") from error
    return read(file, content)


def files() -> list[Path]:
    """The figures of all papers, in order: papers/PAPER/PAPER-….toml."""
    return sorted(file for file in PAPERS.glob("*/*.toml") if file.stem.startswith(f"{file.parent.name}-"))


def find(asked: Sequence[str]) -> list[Figure]:
    """The figures that are asked for, each once: by id, by paper, by the path of a file, or "all"."""
    every = files()
    names = {"all", *(name for file in every for name in (file.stem, file.parent.name))}
    paths = [Path(name) for name in asked if name.endswith(".toml")]
    require_known("figure", [name for name in asked if not name.endswith(".toml")], sorted(names))
    own = [file for file in every if {"all", file.stem, file.parent.name} & set(asked)]
    return [load(file) for file in dict.fromkeys([*own, *paths])]
