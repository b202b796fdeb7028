"""`fedbilevel.sweep`: which runs are made, in which order, what is chosen, and what stays when it is interrupted."""

from __future__ import annotations

import json
import math
import statistics
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.engines.history import History
from fedbilevel.errors import CheckpointError, ConfigurationError
from fedbilevel.sweeps import journal
from fedbilevel.sweeps.journal import Journal, play
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import Job, Plan, TrialOutcome, measured_on_test, product, require_apart
from fedbilevel.sweeps.sweep import plain, with_values
from fedbilevel.tasks import quadratic

TASK = quadratic(clients=2, dim_x=2, dim_y=2, samples=(2, 2))
STEPS = {"server_lr.x": [0.05, 0.1]}


def swept(algorithm=None, **given) -> Sweep:
    """A sweep over two step sizes in six rounds, unless something else is given."""
    given = {"grid": STEPS, "select": "relative_error", "rounds": 6, "metrics": TASK.metrics, **given}
    return fb.sweep(algorithm or fb.SimFBO(), TASK.problem, TASK.clients, TASK.x0, TASK.y0, **given)


def solved(x: float, seed: int, **given) -> dict:
    """The last row of the same run without a sweep, but for the seconds of this machine."""
    algorithm = fb.SimFBO(server_lr=fb.XYV(x=x, y=fb.SimFBO().server_lr.y, v=fb.SimFBO().server_lr.v))
    result = fb.solve(
        algorithm, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=6, key=seed, metrics=TASK.metrics, **given
    )
    return {name: value for name, value in result.history.rows[-1].items() if name != "seconds"}


@pytest.fixture(scope="module")
def two_by_two() -> Sweep:
    return swept(seeds=[0, 3])


def test_its_runs_are_those_of_solve(two_by_two) -> None:
    assert dict(two_by_two.outcomes[Job(1, 3, 0)].row) == solved(0.1, 3)


def test_the_best_point_has_the_best_mean_over_the_seeds(two_by_two) -> None:
    rows = {x: [two_by_two.outcomes[Job(i, seed, 0)].row for seed in (0, 3)] for i, x in enumerate((0.05, 0.1))}
    errors = {x: [row["relative_error"] for row in both] for x, both in rows.items()}
    best = min(errors, key=lambda x: sum(errors[x]))
    assert two_by_two.best == {"server_lr.x": best}
    assert two_by_two.algorithm.server_lr.x == best
    first = two_by_two.rows[0]
    assert first["relative_error"] == pytest.approx(np.mean(errors[best]), rel=1e-15)
    assert first["sd"] == pytest.approx(np.std(errors[best], ddof=1), rel=1e-12)
    assert (two_by_two.trials, two_by_two.failed, two_by_two.spent("rounds")) == (4, 0, 24)


def test_its_last_jobs_come_by_point_and_seed(two_by_two) -> None:
    """They are played seed after seed."""
    assert list(two_by_two.outcomes) == [Job(0, 0, 0), Job(1, 0, 0), Job(0, 3, 0), Job(1, 3, 0)]
    assert two_by_two.last_jobs == [Job(0, 0, 0), Job(0, 3, 0), Job(1, 0, 0), Job(1, 3, 0)]


def test_it_says_of_itself_in_six_lines(two_by_two) -> None:
    lines = repr(two_by_two).splitlines()
    assert len(lines) == 6
    assert lines[0] == "Sweep over server_lr.x"
    assert "4 trials (2 points × 2 seeds); in all 24 rounds, 24 exchanges" in lines[4]
    assert two_by_two._repr_html_().count("<tr>") == 5


BYTES = 2 * 2 * (2 + 2 + 2) * 8  # of an exchange: two clients, down and up, x, y and v of two numbers each


class Told:
    """A display that keeps which trials begin, and which come to their last round."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def stage(self, name: str) -> None:
        self.events += [name] if "trial" in name else []

    def advance(self, round: int, rounds: int) -> None:
        self.events += [(round, rounds)] if round == rounds else []

    def close(self) -> None:
        self.events.append("closed")


def test_it_shows_which_trial_is_run_and_its_rounds(capsys) -> None:
    told = Told()
    swept(progress=told)
    assert told.events == ["trial 1 of 2", (6, 6), "trial 2 of 2", (6, 6), "closed"]
    swept(progress=True, halving=2)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines if "trial" in line] == [
        "rung 1 of 2, trial 1 of 2",
        "rung 1 of 2, trial 2 of 2",
        "rung 2 of 2, trial 1 of 1",
    ]
    assert any("round 6/6" in line for line in lines)
    swept()
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigurationError, match="progress = 'loud' is not allowed"):
        swept(progress="loud")


@pytest.mark.parametrize("length", [{"exchanges": 5.5}, {"bytes": 5.5 * BYTES}, {"time": 5.5}], ids=str)
def test_a_run_may_end_by_another_cost_than_rounds(length, tmp_path) -> None:
    """Of SimFBO a round is one exchange, which takes a second."""
    found = swept(rounds=None, folder=tmp_path / "sweep", halving=2, **length)
    best = found.best["server_lr.x"]
    assert dict(found.standings[0].outcomes[0].row) == solved(best, 0, eval_every=1)
    assert [one.cost("rounds") for one in found.standings] == [6, 3]
    again = swept(rounds=None, folder=tmp_path / "sweep", halving=2, resume=True, **length)
    assert again.rows == found.rows


@pytest.fixture(scope="module")
def halved() -> Sweep:
    return swept(halving=2)


def test_a_point_that_goes_on_ends_at_the_numbers_of_an_unbroken_run(halved) -> None:
    assert halved.plan.rungs == [0.5, 1.0]
    assert [one.cost("rounds") for one in halved.standings] == [6, 3]
    assert dict(halved.standings[0].outcomes[0].row) == solved(halved.best["server_lr.x"], 0, eval_every=3)


def test_an_interrupted_sweep_is_resumed_to_the_same_table(halved, tmp_path, monkeypatch) -> None:
    """Here between two runs and within one, whose first rounds are in its checkpoint."""
    calls = []

    def sometimes(self, job, outcome, append=Journal.append) -> None:
        calls.append(job)
        if len(calls) == 2:
            raise KeyboardInterrupt
        append(self, job, outcome)

    monkeypatch.setattr(Journal, "append", sometimes)
    with pytest.raises(KeyboardInterrupt):
        swept(halving=2, folder=tmp_path)
    resumed = swept(halving=2, folder=tmp_path, resume=True)
    assert resumed.rows == halved.rows
    assert [job.rung for job in calls] == [0, 0, 0, 1]  # the second again, since its outcome was not kept
    with pytest.raises(ConfigurationError, match=r"there is a sweep in .* already: resume it"):
        swept(halving=2, folder=tmp_path)
    with pytest.raises(ConfigurationError, match=r"cannot resume .*: seeds was \[0\] .*, and is \[1\] now"):
        swept(halving=2, folder=tmp_path, resume=True, seeds=[1])
    other = quadratic(clients=2, dim_x=2, dim_y=2, samples=(2, 2), seed=1)
    with pytest.raises(ConfigurationError, match=r"cannot resume .*: population was"):
        fb.sweep(
            fb.SimFBO(),
            TASK.problem,
            other.clients,
            TASK.x0,
            TASK.y0,
            grid=STEPS,
            select="relative_error",
            rounds=6,
            metrics=TASK.metrics,
            halving=2,
            folder=tmp_path,
            resume=True,
        )


FIT, RISK = fb.Metric(lambda x, y: (x**2).sum(), larger_is_better=False), lambda x, y, batch: (y**2).sum()
OTHERS = [
    ({"metrics": {"fit": fb.Metric(lambda x, y: (x**4).sum(), larger_is_better=False)}}, r"metrics\['fit'\] was"),
    ({"metrics": {"fit": fb.Metric(FIT.function, larger_is_better=True)}}, r"metrics\['fit'\] was"),
    ({"metrics": {"fit": FIT, "more": FIT}}, r"metrics\['more'\] was None"),
    ({"metrics_per_client": {"risk": lambda x, y, batch: (y**4).sum()}}, r"metrics_per_client\['risk'\] was"),
    ({"metrics_per_client": {"risk": fb.PerClient(RISK, "inner")}}, r"metrics_per_client\['risk'\] was"),
    ({"metrics_per_client": {"risk": fb.PerClient(RISK, larger_is_better=True)}}, r"metrics_per_client\['risk'\] was"),
    ({"metrics_per_client": None}, r"metrics_per_client\['risk'\] was .* and is None now"),
]


@pytest.mark.parametrize(("other", "message"), OTHERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_sweep_is_not_resumed_with_another_metric_of_the_same_name(other, message, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.play", lambda plan, run, journal: made_up(plan, lambda *_: 0.5))
    given = {"select": "fit", "metrics": {"fit": FIT}, "metrics_per_client": {"risk": RISK}, "folder": tmp_path}
    swept(**given)
    same = {"fit": fb.Metric(lambda a, b: (a**2).sum(), larger_is_better=False)}
    swept(**{**given, "metrics": same}, resume=True)
    with pytest.raises(ConfigurationError, match=f"cannot resume .*: {message}"):
        swept(**{**given, **other}, resume=True)


def scheduled(lr):
    return {"server_lr": fb.XYV(optax.constant_schedule(lr), 0.1, 0.1)}


@pytest.mark.parametrize(
    ("begun", "other"),
    [
        (scheduled(0.1), scheduled(0.2)),
        ({"server_optimizer": optax.sgd(1.0)}, {"server_optimizer": optax.adam(1.0)}),
        ({"local_optimizer": fb.parts.Momentum()}, {"local_optimizer": fb.parts.Plain()}),
    ],
    ids=["schedule", "optimizer", "part"],
)
def test_a_sweep_is_not_resumed_with_what_a_method_is_given_as_functions(begun, other, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.play", lambda plan, run, journal: made_up(plan, lambda *_: 0.5))
    given = {"grid": {"local_steps": [1, 2]}, "folder": tmp_path}
    swept(algorithm=fb.SimFBO(**begun), **given)
    swept(algorithm=fb.SimFBO(**begun), **given, resume=True)
    with pytest.raises(ConfigurationError, match=r"cannot resume .*: algorithms was"):
        swept(algorithm=fb.SimFBO(**other), **given, resume=True)


def test_a_sweep_is_not_resumed_with_another_projection(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.play", lambda plan, run, journal: made_up(plan, lambda *_: 0.5))
    rows = [{"t": np.ones((2, 2))}, {"t": np.zeros((2, 2))}]

    def within(radius, **more):
        inner = lambda x, batch: ((x - batch["t"]) ** 2).sum()  # noqa: E731
        problem = fb.SimpleBilevel(
            lambda x: (x**2).sum(), inner, project=lambda x: jnp.clip(x, -radius, radius), strong_convexity=1.0
        )
        fb.sweep(fb.FISM(), problem, fb.Clients(rows), np.zeros(2), grid={"lr": [0.1, 0.2]}, select="outer_loss",
                 rounds=2, folder=tmp_path, **more)  # fmt: skip

    within(0.1)
    within(0.1, resume=True)
    with pytest.raises(ConfigurationError, match=r"cannot resume .*: projection was"):
        within(0.3, resume=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grid": {}}, r"grid = {} is not allowed: it must be one field or more"),
        ({"grid": {"server_lr.x": []}}, r"grid of server_lr\.x = \[\] is not allowed"),
        ({"grid": {"server_lr.x": 0.1}}, r"grid of server_lr\.x = 0\.1 is not allowed"),
        ({"grid": {"server_lr.x": "0.1"}}, r"grid of server_lr\.x = '0\.1' is not allowed"),
        ({"grid": {"server_lr.x": [0.1, 0.10]}}, r"grid of server_lr\.x: 0\.1 is there twice"),
        (
            {"grid": {"server_lr.x": [0.1, 0.2], "server_lr": [fb.XYV(0.5, 0.5, 0.5)]}},
            r"server_lr\.x is a part of server_lr, whose values would replace its own",
        ),
        ({"grid": {"server_lr.x": np.array([0.1, 0.1])}}, r"grid of server_lr\.x: 0\.1 is there twice"),
        ({"grid": {"server_lr.x": jnp.array([0.5, 0.5])}}, r"grid of server_lr\.x: 0\.5 is there twice"),
        ({"grid": {"local_steps": [5, np.int64(5)]}}, r"grid of local_steps: 5 is there twice"),
        ({"grid": {"sever_lr.x": [0.1]}}, r"unknown field of SimFBO 'sever_lr'; did you mean 'server_lr'"),
        ({"grid": {"server_lr.z": [0.1]}}, r"unknown field of XYV 'z'"),
        ({"grid": {"local_steps.x": [1]}}, r"local_steps\.x is no field: local_steps is 5, which has none"),
        ({"grid": {"server_lr.x": [0.1, "abc"]}}, r"SimFBO\.server_lr\.x = 'abc' is not allowed"),
        ({"metrics": ["relative_error"]}, r"metrics = \['relative_error'\] is not allowed"),
        ({"select": "relativ_error"}, r"unknown metric .* 'relativ_error'; did you mean 'relative_error'"),
        ({"select": "test_accuracy"}, r"test_accuracy is measured on test data.*select_on_test=True"),
        ({"rounds": -5}, r"rounds = -5 is not allowed"),
        ({"rounds": None}, r"length = None is not allowed: it must be given by one of rounds, exchanges, bytes, time"),
        ({"exchanges": 5}, r"length = \{'rounds': 6, 'exchanges': 5\} is not allowed"),
        ({"rounds": None, "bytes": -1.0}, r"bytes = -1.0 is not allowed"),
        ({"seeds": []}, r"seeds = \[\] is not allowed"),
        ({"seeds": [1, 1]}, r"seeds = \[1, 1\] is not allowed"),
        ({"halving": 1}, r"halving = 1 is not allowed"),
        ({"halving": 3}, r"halving = 3 is not allowed: it must be at most 2, the number of points"),
        ({"halving": 2, "eval_every": 4}, r"eval_every = 4 is not allowed: it must be at most 3"),
        ({"resume": True}, r"resume = True is not allowed: it must be used together with folder"),
        ({"algorithm": 7}, r"algorithm = 7 is not allowed"),
        ({"algorithm": lambda lr: fb.SimFBO()}, r"unknown argument of the function .* 'server_lr\.x'"),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(given, message, monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.solve", None)
    with pytest.raises(ConfigurationError, match=message):
        swept(**given)


def test_a_test_metric_decides_only_where_that_is_said(monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.play", lambda plan, run, journal: made_up(plan, lambda *_: 0.5))
    metrics = {"test_accuracy": TASK.metrics["relative_error"]}
    found = swept(select="test_accuracy", metrics=metrics, select_on_test=True)
    assert "SELECTED ON TEST DATA" in repr(found)


OF_TEST = (
    "test test_accuracy testAccuracy TestAccuracy testacc acctest test2 acc_test1 acc2test acc_on_tests on-tests "
    "TESTLoss lossTEST balanced_test_accuracy.worst testing_loss test/fit TEST_ACC"
)
NOT_OF_TEST = "validation_accuracy latest contest greatest_fit fastestRound attest attests protests2 latest_loss.worst"


@pytest.mark.parametrize(("names", "are"), [(OF_TEST, True), (NOT_OF_TEST, False)])
def test_a_name_says_whether_a_metric_is_of_test_data(names, are) -> None:
    assert [name for name in names.split() if measured_on_test(name) != are] == []


def test_a_function_may_make_the_algorithm(monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.sweep.play", lambda plan, run, journal: made_up(plan, lambda *_: 0.5))
    found = swept(lambda steps: fb.SimFBO(local_steps=steps), grid={"steps": [3, 4]})
    assert found.algorithm == fb.SimFBO(local_steps=3)


def made_up(plan: Plan, value, larger: bool = False) -> Sweep:
    """A sweep whose runs nobody ran: `value` of a point's number and seed, or an error."""

    def run(jobs):
        for job in jobs:
            found = value(job.point, job.seed)
            row = {"round": round(100 * plan.rungs[job.rung]), "exchanges": 2.0, "bytes_down": 1.0, "bytes_up": 1.0}
            history = History([{**row, plan.select: found}], {plan.select: larger})
            yield job, TrialOutcome(error=found) if isinstance(found, str) else TrialOutcome.of(history, plan.select)

    return play(plan, run, Journal())


def plan_of(count: int, seeds=(0,), halving=None) -> Plan:
    return Plan(points=[{"a": i} for i in range(count)], seeds=seeds, select="fit", halving=halving)


@pytest.mark.parametrize(
    ("points", "factor", "sizes"),
    [(9, 3, [9, 3, 1]), (27, 3, [27, 9, 3, 1]), (8, 2, [8, 4, 2, 1]), (5, 3, [5, 1]), (10, 3, [10, 3, 1])],
)
def test_one_point_in_so_many_goes_on(points, factor, sizes) -> None:
    """The budgets of the rungs are the powers of the factor, the last the whole."""
    plan = plan_of(points, halving=factor)
    found = made_up(plan, lambda point, seed: float(point))
    assert [sum(job.rung == rung for job in found.outcomes) for rung in range(len(sizes))] == sizes
    assert plan.rungs == pytest.approx([factor ** -(len(sizes) - 1 - rung) for rung in range(len(sizes))])
    assert (found.best, found.trials) == ({"a": 0}, points)
    assert [one.number for one in found.standings] == list(range(points))


@pytest.mark.parametrize(("larger", "best"), [(False, 0), (True, 8)])
def test_the_better_ones_go_on_as_the_metric_says(larger, best) -> None:
    assert made_up(plan_of(9, halving=3), lambda point, seed: float(point), larger).best == {"a": best}


def test_a_failed_point_is_a_row_that_says_why_and_stands_last() -> None:
    def value(point: int, seed: int):
        return {0: "it diverged" if seed == 1 else 0.0, 1: 5.0 + seed, 2: math.nan}[point]

    found = made_up(plan_of(3, seeds=(0, 1)), value)
    assert [row["a"] for row in found.rows] == [1, 0, 2]
    assert [row["error"] for row in found.rows] == ["", "seed 1: it diverged", "seeds 0, 1: fit is nan"]
    assert [row["fit"] for row in found.rows] == [5.5, None, None]
    assert (found.trials, found.failed) == (6, 3)
    assert "6 trials (3 points × 2 seeds), 3 failed" in repr(found)


def test_where_all_fail_there_is_no_best() -> None:
    found = made_up(plan_of(2), lambda point, seed: "no")
    assert found.winner is None
    with pytest.raises(ConfigurationError, match="none of 2 points is best, since all failed"):
        _ = found.best
    assert "every point failed" in repr(found)


def test_an_unlucky_combination_is_a_row_and_a_value_that_never_fits_is_refused() -> None:
    from fedbilevel.sweeps.plan import made

    def make(point):
        if point["a"] * point["b"] > limit:
            raise ConfigurationError(f"{point['a']} and {point['b']} are too much")
        return point

    points, limit = product({"a": [1, 2], "b": [1, 2]}), 3
    assert [isinstance(one, ConfigurationError) for one in made(points, make)] == [False, False, False, True]
    limit = 1
    with pytest.raises(ConfigurationError, match="1 and 2 are too much"):  # of the value 2 of b, the first such
        made(points, make)


def test_costs_are_counted_once_for_each_trial() -> None:
    """9 trials of 11, 33 and 100 rounds; the last of each counts: 6·11 + 2·33 + 100."""
    found = made_up(plan_of(9, halving=3), lambda point, seed: float(point))
    assert found.spent("rounds") == 6 * 11 + 2 * 33 + 100
    assert found.spent("bytes") == 9 * 2


def test_a_torn_line_is_cut_off_and_a_damaged_one_is_refused(tmp_path) -> None:
    file = tmp_path / "trials.jsonl"
    kept = Journal(file)
    kept.append(Job(0, 1, 0), TrialOutcome({"round": 3, "fit": 0.1}))
    kept.append(Job(1, 1, 0), TrialOutcome(error="no"))
    whole = file.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        file.write_bytes(whole[:end])
        assert journal.read(file) == {Job(0, 1, 0): kept.outcomes[Job(0, 1, 0)]}
        assert file.read_bytes() == whole[: whole.index(b"\n") + 1]
    assert journal.read(tmp_path / "none") == {}
    ends = (b'"row": 3}\n', b'"error": 3}\n', b'"error": ""}\n', b'"row": {"round": "a"}}\n')
    damaged = [b"[]\n", b"{}\n", b"\xff\n", b"\n", *(b'{"point": 0, "seed": 0, "rung": 0, ' + end for end in ends)]
    for damage in damaged:
        file.write_bytes(damage + whole)
        with pytest.raises(ConfigurationError, match=r"trials\.jsonl is damaged in line 1"):
            journal.read(file)


def test_a_folder_in_use_or_with_other_things_is_refused(tmp_path) -> None:
    with (
        journal.opened(tmp_path / "a", {"n": 1}, resume=False),
        pytest.raises(CheckpointError, match="is in use by process"),
        journal.opened(tmp_path / "a", {}, resume=True),
    ):
        pass
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    (tmp_path / "c").write_text("a file")
    for name, message in {"b": "that folder is not empty", "c": "it is a file"}.items():
        with pytest.raises(ConfigurationError, match=message), journal.opened(tmp_path / name, {}, resume=True):
            pass
    (tmp_path / "a" / "definition.json").write_text("{")
    with (
        pytest.raises(ConfigurationError, match=r"definition\.json is damaged"),
        journal.opened(tmp_path / "a", {}, resume=True),
    ):
        pass


def test_fields_of_parts_are_replaced_by_their_paths() -> None:
    whole = with_values(
        fb.FedNest(), {"hypergradient.solver": fb.parts.CG(), "hypergradient.solver.max_steps": 7, "inner.lr": 0.2}
    )
    assert (whole.hypergradient.solver, whole.inner.lr) == (fb.parts.CG(max_steps=7), 0.2)
    wrapped = with_values(fb.Asynchronous(fb.SimFBO(), wait_for=1), {"algorithm.server_lr.y": 0.3, "wait_for": 2})
    assert (wrapped.algorithm.server_lr.y, wrapped.wait_for) == (0.3, 2)


def test_values_have_a_form_that_json_holds() -> None:
    values = [jnp.float32(0.5), np.int64(3), np.bool_(True), None, (1, 2), fb.XYV(1.0, 2, 3), fb.parts.CG(max_steps=7)]
    shown = json.loads(json.dumps([plain(value) for value in values]))
    assert shown[:6] == [0.5, 3, True, None, [1, 2], {"x": 1.0, "y": 2, "v": 3}]
    assert shown[6].startswith("CG(")
    assert "max_steps=7" in shown[6]
    assert plain(print) == repr(print)


def figure_of(points, value=lambda point, seed: float(point + 1), **given):
    plan = Plan(points=points, seeds=given.pop("seeds", (0,)), select="fit", **given)
    return made_up(plan, value).plot()


def test_a_picture_of_one_field_has_a_line_and_the_spread_of_the_seeds() -> None:
    points = [{"lr": lr} for lr in (0.01, 0.1, 1.0)]
    axes = figure_of(points, lambda point, seed: 10.0**point + seed / 10, seeds=(0, 1)).axes[0]
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) == ("log", "log", "lr")
    means = [statistics.fmean((10.0**i, 10.0**i + 0.1)) for i in range(3)]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), means)
    assert len(axes.collections) == 1
    narrow = figure_of([{"lr": 1}, {"lr": 2}]).axes[0]
    assert (narrow.get_xscale(), narrow.get_yscale(), len(narrow.collections)) == ("linear", "linear", 0)


def test_a_picture_of_two_fields_is_a_map_with_every_number() -> None:
    points = product({"a": [0.1, 0.2, 0.4], "b": ["cg", "neumann"]})
    figure = figure_of(points, lambda point, seed: "no" if point == 5 else float(point + 1))
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert sorted(shown) == ["1", "2", "3", "4", "5", "failed"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0.1", "0.2", "0.4"]


def test_a_picture_of_more_fields_has_a_panel_for_each() -> None:
    figure = figure_of(product({"a": [1, 2], "b": ["x", "y"], "c": [0.1, 10.0], "d": [1, 2]}), halving=4)
    assert [axes.get_xlabel() for axes in figure.axes][:4] == ["a", "b", "c", "d"]
    assert figure.legends


@pytest.mark.parametrize("values", [range(3, 50), np.geomspace(2e-5, 1.9e-3, 20), np.geomspace(1e-3, 1.0, 20)], ids=len)
def test_numbers_below_a_logarithmic_axis_stand_apart(values) -> None:
    figure = figure_of([{"a": float(value), "b": i} for i, value in enumerate(values)])
    figure.canvas.draw()
    axes = figure.axes[0]
    labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
    boxes = sorted((label.get_window_extent() for label in labels if label.get_text()), key=lambda box: box.x0)
    inside = [box for box in boxes if axes.bbox.x0 <= (box.x0 + box.x1) / 2 <= axes.bbox.x1]
    assert axes.get_xscale() == "log"
    assert len(inside) >= 2
    assert all(left.x1 < right.x0 for left, right in pairwise(inside))


def test_a_part_is_swept_before_its_fields_and_not_after_them():
    """As they are set: a part first, then what differs in it."""
    require_apart({"inner": "algorithm.inner", "inner.lr": "algorithm.inner.lr"})
    with pytest.raises(ConfigurationError, match=r"inner\.lr is a part of inner, .* name inner first"):
        require_apart({"inner.lr": "algorithm.inner.lr", "inner": "algorithm.inner"})
