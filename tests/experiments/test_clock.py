"""Is the clock read from specs and settings, does it reach the engine, and are virtual times shown?"""

from __future__ import annotations

import tomllib

import pytest

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.display.curves import COSTS, curve, run_figure
from fedbilevel.engines.history import History
from fedbilevel.experiments import compare, configure, read_spec, resolve
from fedbilevel.experiments.compare import comparison_table, default_panels, load_groups
from fedbilevel.experiments.federation import configured, write_app
from fedbilevel.experiments.runner import build
from fedbilevel.experiments.series import comparison_specs, seeded
from refusals import refuses

SMALL = ["clients=4", "samples=[3, 3]", "algorithm.local_steps=1"]
CLOCK = ["clock.compute=0.1", "clock.network=1.0", "clock.stragglers=1", "slowdown=5.0"]
SET = [part for setting in [*SMALL, *CLOCK] for part in ("--set", setting)]
ROUND = 7.0  # s: the straggler takes (1.0 + 0.1·4)·5, as a local step has two gradients and two products
BUDGET = 150


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Return the folder of a comparison of one algorithm, with a budget of virtual time."""
    folder = tmp_path_factory.mktemp("clock") / "runs"
    settings = [*SMALL, *CLOCK, f"run.time={BUDGET}"]
    experiments.compare_algorithms("quadratic", ["simfbo"], settings=settings, out=folder)
    return folder


def test_a_spec_holds_the_clock(tmp_path) -> None:
    spec = configure(task="quadratic", settings=[*CLOCK, "clock.availability=[1, 0.5]", "clock.seed=7"])
    assert spec.clock == fb.Clock(compute=0.1, stragglers=1, slowdown=5.0, availability=[1, 0.5], seed=7)
    assert resolve(tomllib.loads(spec.to_toml())) == spec
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    assert read_spec(tmp_path / "spec.toml") == spec
    assert spec.timed
    assert not spec.replace(clock=resolve({}).tables()["clock"] | {"seed": 3}).timed  # without draws, no seed matters


def test_a_spec_holds_a_schedule_of_arrivals() -> None:
    settings = [*SMALL, "clock.arrivals=[[true, false, true, false], [false, true, true, false]]", "wait_for=1"]
    spec = configure(task="quadratic", settings=settings)
    assert spec.clock.arrivals == ((True, False, True, False), (False, True, True, False))
    assert resolve(tomllib.loads(spec.to_toml())) == spec
    assert build(spec).engine.clock == spec.clock


def test_the_clock_reaches_the_engine_and_the_seed_the_clock() -> None:
    """The engine gets the clock of the spec, and the seed of a run in a series is also the seed of its clock."""
    spec = seeded(configure(task="quadratic", settings=[*SMALL, *CLOCK]), 5)
    assert (spec.clock.seed, spec.run.seed, spec.task.fields["seed"]) == (5, 5, 5)
    assert build(spec).engine.clock == spec.clock


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (["seed=3"], ("setting", "seed", "task.seed or run.seed or clock.seed")),
        (["clock.seed=-1"], ("clock.seed", -1)),
        (["clock.network=-1"], ("Clock.network", -1)),
        (["clock.compute=[1, 'x']"], ("clock.compute", [1, "x"], "Sequence[float]")),
        (["clock.stragglers=5"], ("Clock.stragglers", 5, "at most 4")),
        (["clock.compute=[1, 2]"], ("Clock.compute", "2 numbers", "4, one per client")),
    ],
)
def test_a_wrong_clock_is_refused_before_anything_runs(settings, refusal) -> None:
    with refuses(*refusal):
        build(configure(task="quadratic", settings=[*SMALL, *settings]))


def test_too_few_for_an_asynchronous_method_are_refused_before_anything_runs() -> None:
    """Asynchronous ShroFBO refuses a cohort of some clients, and to wait for more clients than are ever available."""
    spec = configure(task="quadratic", algorithm="shrofbo", settings=[*SMALL, "cohort=3", "wait_for=2"])
    with refuses("run.cohort", 3, "ShroFBO"):
        build(spec)
    build(spec.replace(run={"cohort": None}))
    spec = spec.replace(run={"cohort": 4}, asynchronous={"wait_for": 4})
    build(spec)
    with refuses("wait_for", 4, "at most 3"):
        build(spec.replace(clock={"availability": [1, 1, 0, 1]}))


def test_a_federation_has_no_clock_of_ours(tmp_path) -> None:
    """A federation refuses [clock] in its spec and in its settings, since its time is real."""
    for make in (
        lambda: write_app(configure(task="quadratic", settings=CLOCK), tmp_path / "app"),
        lambda: configured(configure(task="quadratic"), {"settings": "clock.stragglers=1"}),
    ):
        with refuses("", fact="simulations", where="[clock]"):
            make()
    assert not (tmp_path / "app").exists()


def test_the_level_without_a_federation_has_no_stragglers() -> None:
    """The pooled run of a comparison has one client, with the mean of the computing times and without stragglers."""
    settings = [*SMALL, "clock.compute=[1, 2, 3, 6]", "clock.stragglers=2", "wait_for=3"]
    specs = comparison_specs("quadratic", ["simfbo"], settings=settings, centralised=True)
    clock = specs["centralised"].clock
    assert (clock.compute, clock.stragglers, specs["simfbo"].clock.stragglers) == (3.0, 0, 2)
    assert build(specs["centralised"]).algorithm.late.wait_for == 1


@pytest.mark.slow
def test_a_budget_of_time_ends_at_the_first_row_that_reaches_it(compared) -> None:
    """A run with a budget of virtual time ends at the first row that reaches it, and all rounds take equally long."""
    run = experiments.load_run(compared / "simfbo")
    assert (run.spec.run.rounds, run.spec.run.time, run.spec.run.eval_every) == (None, BUDGET, None)
    time = run.history["time"]
    assert list(time) == [pytest.approx(ROUND * i, rel=1e-12) for i in run.history["round"]]
    assert time[-2] < BUDGET <= time[-1]
    assert run.summary["stopped"] == f"{BUDGET} seconds of the clock passed"


@pytest.mark.slow
def test_asynchronous_runs_have_time_without_a_clock_of_their_own(tmp_path) -> None:
    """Without a clock, four exchanges take 4 if each waits for all clients, and 2 if each waits for two of the four.

    All four replies arrive at the same moment. Two of them count at once, and the other two in the next exchange, which
    takes no time.
    """
    for name, settings in {"waits": [], "goes-on": ["wait_for=2", "cohort=none"]}.items():
        spec = configure(task="quadratic", settings=[*SMALL, "rounds=4", "eval_every=4", *settings])
        experiments.run(spec, tmp_path / name, plot=False)
    waits, goes_on = load_groups([tmp_path / "waits", tmp_path / "goes-on"])
    assert [group.runs[0].history["time"][-1] for group in (waits, goes_on)] == [4, 2]
    assert (waits.timed, goes_on.timed) == (False, True)
    assert "time" in [column.header for column in comparison_table([waits, goes_on]).columns]
    assert "time" not in [column.header for column in comparison_table([waits]).columns]


def test_time_has_a_panel_where_there_is_a_clock(compared) -> None:
    (group, *_) = load_groups([compared / "simfbo"])
    history = group.runs[0].history
    for timed in (False, True):
        labels = [panel.get_xlabel() for panel in run_figure(history, group.metric, "", timed).axes]
        assert labels.count(COSTS["time"]) == (len(labels) - 1 if timed else 0)
    assert default_panels([group]) == ["exchanges", "megabytes", "gflop", "seconds", "time"]
    assert list(curve("simfbo", [history], group.metric).costs["time"]) == list(history["time"])


def test_the_time_to_a_level() -> None:
    """The time to a level is the time of the first row that reaches it."""
    rows = [{"round": i, "exchanges": 2 * i, "time": 3.5 * i, "e": 1.0 / (i + 1)} for i in range(4)]
    assert compare.cost_to(History(rows), "e", 0.5, "time") == 3.5
    assert compare.cost_to(History(rows), "e", 0.1, "time") is None
    for row in rows:  # like rows of runs from before the clock existed, in which each exchange takes 1
        del row["time"]
    assert compare.cost_to(History(rows), "e", 0.5, "time") == 2


def test_the_command_line_shows_time_and_who_is_never_there(run, tmp_path, monkeypatch) -> None:
    """The command line shows virtual time, and names the clients that are never available.

    All four clients are stragglers, so that each round takes 7 s. The run ends after the third round, as 2.5 rounds are
    17.5 s.
    """
    monkeypatch.chdir(tmp_path)
    given = ["clock.stragglers=4" if "stragglers" in part else part for part in SET]
    arguments = ["--set", "clock.availability=[1, 1, 0, 1]", "--time", 2.5 * ROUND]
    code, shown, error = run("run", "quadratic", *given, *arguments, "--out", "away")
    assert code == 0
    absent, *_ = error.splitlines()  # the second warning says that the outer loss ended above its start
    assert absent == "fedbilevel: warning: 1 of 4 clients are never available, and the run continues without them: 2"
    lines = [line for line in shown.splitlines() if line.startswith("round ")]
    assert lines[0].startswith("round 0  clock 0.0/17.5 s  relative_error 1")
    assert lines[-1].startswith("round 3  clock 21.0/17.5 s  outer_loss")
    assert "21.0 s" in shown.split("exchanges")[1]
