"""`fedbilevel sweep`: what it runs, what it leaves, what it refuses, and that an interruption changes nothing."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
from command_line import outcome, wait_for
from test_printed_tables import WIDTHS, holds, shown

from fedbilevel import cli, experiments
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.history import History
from fedbilevel.experiments.sweep import Definition, chosen_metric, parse_values, sweep_table
from fedbilevel.sweeps.journal import Journal, play
from fedbilevel.sweeps.plan import Plan, TrialOutcome, product
from fedbilevel.tasks import networks

SMALL = ["quadratic", "--set", "clients=3", "--set", "samples=[2, 2]", "--set", "dim_y=2", "--rounds", "4"]
GRID = ["--grid", "server_lr.x=0.05,0.1", "--grid", "cohort=2,9"]
"""Of three clients nine cannot be drawn, which only the run itself can know: two points of four fail."""
HELD_OUT = ["--set", "task.holdout=0.2", "--select", "validation_accuracy"]
FILES = ("sweep.csv", "sweep.json", "chosen.toml")


def swept(*arguments: object) -> int:
    return cli.main(["sweep", *map(str, arguments)])


def contents(folder) -> dict[str, str]:
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sweep of four points with two seeds."""
    place = tmp_path_factory.mktemp("sweep") / "whole"
    assert swept(*SMALL, *GRID, "--seeds", "0,1", "--out", place, "--quiet") == 0
    return place


def test_the_best_point_and_why_others_failed(folder) -> None:
    found = json.loads((folder / "sweep.json").read_text())
    assert (found["trials"], found["failed"], found["seeds"]) == (8, 4, [0, 1])
    assert [point["values"]["cohort"] for point in found["points"]] == [2, 2, 9, 9]
    errors = {point["point"]: point["error"] for point in found["points"]}
    assert errors[0] == errors[2] == ""
    assert "seeds 0, 1: cohort = 9 is not allowed" in errors[1]
    means = {}
    for point in (0, 2):
        finals = [
            experiments.load_run(folder / f"point-00{point}" / f"seed-{seed}").summary["final"] for seed in (0, 1)
        ]
        means[point] = sum(finals) / 2
    assert found["chosen"]["point"] == min(means, key=means.get)
    assert found["points"][0]["mean"] == pytest.approx(min(means.values()), rel=1e-15)
    assert found["spent"]["rounds"] == 4 * 4


def test_the_chosen_spec_is_run_to_the_same_numbers(folder, tmp_path) -> None:
    text = (folder / "chosen.toml").read_text(encoding="utf-8")
    assert "# 8 trials (4 points × 2 seeds), 4 failed; in all 16 rounds" in text
    assert "fedbilevel run --spec chosen.toml --seeds 0,1" in text
    best = json.loads((folder / "sweep.json").read_text())["chosen"]["point"]
    cli.main(["run", "--spec", str(folder / "chosen.toml"), "--seed", "1", "--out", str(tmp_path / "run"), "--quiet"])
    assert outcome(tmp_path / "run") == outcome(folder / f"point-00{best}" / "seed-1")


def test_the_csv_has_a_line_for_each_trial(folder) -> None:
    with open(folder / "sweep.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["point"], row["seed"]) for row in rows] == [(str(p), str(s)) for p in range(4) for s in (0, 1)]
    assert rows[0]["server_lr.x"] == "0.05"
    assert "seconds" not in rows[0]
    assert [bool(row["error"]) for row in rows] == [False, False, True, True] * 2


def test_seeds_trace_the_losses_of_the_librarys_networks_once(tmp_path, monkeypatch) -> None:
    calls = []
    real = networks.cross_entropy
    monkeypatch.setattr(networks, "cross_entropy", lambda *given: calls.append(given) or real(*given))
    small = ["--set", "hidden=[3]", "--set", "task.clients=2", "--set", "cohort=2", "--rounds", "2", "--quiet"]
    often = []
    for seeds in ("0", "0,1,2"):
        calls.clear()
        assert swept(*small, "--grid", "server_lr.x=0.05", "--seeds", seeds, "--out", tmp_path / seeds, *HELD_OUT) == 0
        often.append(len(calls))
    assert often[0] == often[1] > 0


def test_an_interrupted_sweep_is_resumed_to_the_same_files(folder, tmp_path, monkeypatch, run) -> None:
    """Interrupted between a run's end and the line about it, with four of eight trials ended."""
    calls = []

    def sometimes(self, job, found, append=Journal.append) -> None:
        calls.append(job)
        if len(calls) == 4:
            raise KeyboardInterrupt
        append(self, job, found)

    monkeypatch.setattr(Journal, "append", sometimes)
    place = tmp_path / "part"
    code, _, error = run("sweep", *SMALL, *GRID, "--seeds", "0,1", "--out", place, "--quiet")
    assert (code, error.strip()) == (130, f"fedbilevel: interrupted; continue with: fedbilevel sweep --resume {place}")
    code, printed, _ = run("sweep", "--resume", place)
    assert code == 0
    assert contents(place) == contents(folder)
    assert printed.count("point-") == 5
    assert "8 trials (4 points × 2 seeds), 4 failed" in printed
    code, _, error = run("sweep", *SMALL, *GRID, "--out", place)
    assert (code, "there is a sweep in" in error) == (2, True)
    code, _, error = run("sweep", "--resume", place, "--select", "outer_loss")
    assert (code, "select cannot be given with it" in error) == (2, True)


def test_what_a_failed_trial_has_cost_does_not_depend_on_the_clock(tmp_path, monkeypatch) -> None:
    """With a checkpoint at each row, and with none after round 0 and Ctrl-C between the trial's end and its line.

    Each round takes y some 1e60 times as far, from 0: at the start of round 3 it is about 1e180, whose square in the
    losses is beyond 1.8e308. Of the rows at 0, 2, 4, … the last one is that of round 2.
    """
    from fedbilevel.engines import loop

    given = [*SMALL[:-1], 9, "--set", "eval_every=2", "--grid", "server_lr.y=0.05,1e60", "--quiet"]
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "SAVE_SHARE", float("inf"))
    assert swept(*given, "--out", tmp_path / "saved") == 0
    monkeypatch.setattr(loop, "SAVE_SECONDS", 1e9)

    def never(self, job, found, append=Journal.append) -> None:
        if found.error:
            raise KeyboardInterrupt
        append(self, job, found)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", never)
        assert swept(*given, "--out", tmp_path / "unsaved") == 130
    assert swept("--resume", tmp_path / "unsaved", "--quiet") == 0
    assert contents(tmp_path / "saved") == contents(tmp_path / "unsaved")
    found = json.loads((tmp_path / "saved" / "sweep.json").read_text())
    assert "round 3, " in found["points"][1]["error"]
    assert found["points"][1]["runs"][0]["last_row"]["exchanges"] == 2
    assert found["spent"]["rounds"] == 9 + 2


@pytest.mark.slow
def test_a_killed_sweep_is_resumed_to_the_same_files(folder, tmp_path, start) -> None:
    process = start("sweep", *SMALL, *GRID, "--seeds", "0,1", "--out", tmp_path / "part")
    wait_for(tmp_path / "part" / "trials.jsonl", process)
    process.kill()
    process.communicate()
    assert swept("--resume", tmp_path / "part", "--quiet") == 0
    assert contents(tmp_path / "part") == contents(folder)


def test_a_run_that_goes_on_to_the_next_rung_is_an_unbroken_run(tmp_path) -> None:
    place = tmp_path / "halved"
    given = [*SMALL, "--set", "eval_every=2", "--grid", "server_lr.x=0.05,0.1", "--halving", 2, "--quiet"]
    assert swept(*given, "--out", place) == 0
    found = json.loads((place / "sweep.json").read_text())
    assert [point["rung"] for point in found["points"]] == [1, 0]
    assert found["spent"]["rounds"] == 4 + 2
    spec = experiments.read_spec(place / "chosen.toml")
    experiments.run(spec, tmp_path / "unbroken", plot=False)
    assert outcome(place / f"point-00{found['chosen']['point']}" / "seed-0") == outcome(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "sever_lr.x=0.1"], "unknown field 'sever_lr'; did you mean 'server_lr'"),
        (["--grid", "algorithm.sever_lr.x=0.1"], "unknown field of algorithm 'sever_lr'; did you mean 'server_lr'"),
        (
            ["--grid", "server_lr.x=0.1,abc"],
            "algorithm.server_lr.x = 'abc' is not allowed: it must be a positive number",
        ),
        (["--grid", "server_lr.x=0.1,-1"], "algorithm.server_lr.x = -1 is not allowed"),
        (
            ["--grid", "server_lr.x="],
            "--grid = 'server_lr.x=' is not allowed: it must be of the form FIELD=VALUE,VALUE",
        ),
        (["--grid", "server_lr.x"], "--grid = 'server_lr.x' is not allowed"),
        (["--grid", "server_lr.x=0.1,,0.2"], "'' is not a TOML value"),
        (["--grid", "server_lr.x=0.1,0.10"], "grid of server_lr.x: 0.1 is there twice"),
        (["--grid", "cohort=1", "--grid", "cohort=2"], "--grid cohort is given twice"),
        (
            ["--grid", "server_lr.x=0.1,1e9", "--grid", "algorithm.server_lr.x=0.2"],
            "server_lr.x and algorithm.server_lr.x are one field: name it once",
        ),
        (
            ["--grid", "server_lr.x=0.1", "--grid", "algorithm.server_lr=0.2"],
            "server_lr.x is a part of algorithm.server_lr",
        ),
        (
            ["--algorithm", "fednest", "--grid", "hypergradient.solver=cg", "--grid", "hypergradient.name=implicit"],
            "hypergradient.solver is a part of hypergradient.name",
        ),
        (
            ["--search", "server_lr.x=0.1:1", "--grid", "algorithm.server_lr=0.2", "--trials", "2"],
            "server_lr.x is a part of algorithm.server_lr",
        ),
        (
            ["--set", "algorithm.server_lr.x=0.1", "--grid", "server_lr=0.01,0.1"],
            "algorithm.server_lr.x=0.1 is set for all points, and --grid server_lr would replace it, which sets all of "
            "algorithm.server_lr: leave one of them out, or give --grid algorithm.server_lr.x=0.1 after --grid",
        ),
        (
            ["--set", "local_steps=5", "--search", "algorithm.local_steps=1:8", "--trials", "2"],
            "local_steps=5 is set for all points, and --search algorithm.local_steps would replace it: leave one",
        ),
        (
            ["--rounds", "4", "--grid", "rounds=4,8"],
            "run.rounds=4 is set for all points, and --grid rounds would replace it: leave one of them out",
        ),
        (
            ["--algorithm", "fednest", "--grid", "algorithm.name=simfbo,fednest"],
            "algorithm=fednest is set for all points, and --grid algorithm.name would replace it",
        ),
        (["--grid", "task.name=quadratic"], "task=quadratic is set for all points, and --grid task.name would"),
        (["--grid", "run.seed=0,1"], "run.seed cannot be swept: no seed is better than another"),
        ([], "a sweep needs a field and its values: --grid FIELD=VALUE"),
        (["--grid", "cohort=1,2", "--select", "relativ_error"], "'relativ_error'; did you mean 'relative_error'"),
        (["--grid", "cohort=1,2", "--select", "test_accuracy"], "unknown metric to select on 'test_accuracy'"),
        (["--grid", "cohort=1,2", "--rounds", "-4"], "'-4' is not a whole number of at least 1"),
        (["--grid", "cohort=1,2", "--bytes", "-4"], "'-4' is not a positive number of bytes"),
        (["--grid", "cohort=1,2", "--halving", "1"], "halving = 1 is not allowed"),
        (["--grid", "cohort=1,2", "--halving", "3"], "halving = 3 is not allowed: it must be at most 2"),
        (["--grid", "cohort=1,2", "--halving", "2", "--rounds", "4"], "--set run.eval_every=2 does"),
        (
            ["--grid", "run.rounds=40,80", "--halving", "2"],
            "needs one budget for all points, not 40 rounds and 80 rounds",
        ),
        (["--resume", "not-there"], "--resume = 'not-there' is not allowed"),
    ],
)
def test_wrong_input_is_a_sentence_and_nothing_is_written(arguments, message, run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    task = [] if "--resume" in arguments else ["quadratic"]
    code, _, error = run("sweep", *task, *arguments)
    assert code == 2
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "grid", "values"),
    [
        (["server_lr=0.2"], {"server_lr.x": ["0.01"]}, {"x": 0.01, "y": 0.2, "v": 0.2}),
        (["server_lr.x=0.1"], {"server_lr.y": ["0.01"]}, {"x": 0.1, "y": 0.01}),
        ([], {"server_lr": ["0.01"], "server_lr.x": ["0.1"]}, {"x": 0.1, "y": 0.01, "v": 0.01}),
        (["task.local_steps=[1, 2, 3, 4]"], {"local_steps": ["5"]}, {}),
    ],
)
def test_what_is_set_beside_a_swept_field_holds_at_every_point(settings, grid, values) -> None:
    """The third is what an error advises where a setting would be replaced."""
    (spec,) = Definition(task="quadratic", settings=["task.clients=4", *settings], grid=grid).specs()
    assert spec.algorithm.fields["server_lr"] | values == spec.algorithm.fields["server_lr"]


def test_a_folder_in_use_is_refused(run, tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, _, error = run("sweep", *SMALL, "--grid", "cohort=1", "--out", tmp_path)
    assert (code, error.strip().endswith("that folder is not empty")) == (2, True)


DAMAGED = [
    "{",
    "[]",
    "null",
    '{"grid": 5}',
    '{"grid": {"cohort": 1}}',
    '{"settings": "a"}',
    '{"seeds": 3}',
    '{"seeds": ["a"]}',
    '{"search": {"cohort": 3}}',
    '{"spec": "x"}',
    '{"task": 3}',
    '{"nothing": 3}',
    '{"halving": "2"}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_definition_is_refused(text, run, tmp_path) -> None:
    (tmp_path / "definition.json").write_text(text)
    code, _, error = run("sweep", "--resume", tmp_path)
    assert code == 2
    assert "definition.json is damaged" in error


TEXTS = {
    "0.01,0.1": ["0.01", "0.1"],
    "cg, neumann": ["cg", "neumann"],
    "[1, 0.5],[1]": ["[1, 0.5]", "[1]"],
    '{name = "adam", b1 = 0.5},sgd': ['{name = "adam", b1 = 0.5}', "sgd"],
    "'a,b',none": ["'a,b'", "none"],
}


@pytest.mark.parametrize("text", TEXTS)
def test_commas_within_a_value_do_not_end_it(text) -> None:
    assert parse_values(text) == TEXTS[text]


@pytest.mark.parametrize("text", ["[1, 2", "0.1;0.2", "{a = 1", "0.1,"])
def test_what_is_no_value_is_refused(text) -> None:
    with pytest.raises(ConfigurationError, match="is not a TOML value"):
        parse_values(text)


def metric_of(select, *, metrics=("test_accuracy",), holdout=0.0, on_test=False) -> str:
    fields = {} if holdout is None else {"holdout": holdout}
    spec = SimpleNamespace(
        task=SimpleNamespace(name="made_up", fields=fields), run=SimpleNamespace(metrics_per_client=True)
    )
    task = SimpleNamespace(metrics=dict.fromkeys(metrics), metrics_per_client={"client_accuracy": None})
    return chosen_metric(Definition(select=select, select_on_test=on_test), spec, task)


def test_only_a_holdout_decides_unless_that_is_said() -> None:
    assert metric_of(None, metrics=["validation_accuracy"], holdout=0.2) == "validation_accuracy"
    assert metric_of("outer_loss") == "outer_loss"
    assert metric_of("client_accuracy.worst") == "client_accuracy.worst"
    assert metric_of("test_accuracy", on_test=True) == "test_accuracy"
    for select in (None, "test_accuracy"):
        with pytest.raises(ConfigurationError, match=r"test data.*--set task\.holdout=0\.2 .*validation_accuracy"):
            metric_of(select)
    with pytest.raises(ConfigurationError, match=r"does not measure validation_accuracy: --set task\.holdout=0\.2"):
        metric_of("validation_accuracy")
    with pytest.raises(
        ConfigurationError, match=r"holds no data out; it can be chosen by client_accuracy\.mean or .*outer"
    ):
        metric_of("test_accuracy", holdout=None)


def made_up(seeds=(0, 1)):
    """A sweep with numbers of many digits and a long error, which nobody ran."""
    points = product(
        {"algorithm.server_lr.x": [0.000123, 0.1], "hypergradient.solver": ["cg", "neumann"], "cohort": [3]}
    )
    plan = Plan(points=points, seeds=seeds, select="relative_error")

    def run(jobs):
        for job in jobs:
            row = {"round": 123_456, "exchanges": 1_234_567, "bytes_down": 10**12, "bytes_up": 7 * 10**12}
            row["relative_error"] = 0.0012345 * (1 + job.point) + 1e-5 * job.seed
            error = "round 9, phase local_updates: outer_loss is not finite; smaller steps may help" * (job.point == 3)
            yield job, TrialOutcome(error=error) if error else TrialOutcome.of(History([row]), "relative_error")

    return play(plan, run, Journal())


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_no_number_of_the_table_is_cut(seeds) -> None:
    found = made_up(seeds)
    numbers = ["0.000123", "123,456", "1,234,567", "8,000,000.0"]
    for width in WIDTHS:
        table = sweep_table(found, width)
        lines = shown(table, width)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)
        columns = {str(column.header).replace("\\", ""): list(column.cells) for column in table.columns}
        assert {"rank", "relative_error", *found.plan.fields, "failed"} <= columns.keys()
        gone = str(table.caption).partition("on a wider terminal also: ")[2].partition("\n")[0]
        for name, number in zip(["algorithm.server_lr.x", "rounds", "exchanges", "MB"], numbers, strict=True):
            assert (name in columns) != (name in gone.split(", "))
            if width >= 100 and name in columns:
                assert holds(lines, number)
    assert "smaller is better" in str(table.title)
    assert f"{4 * len(seeds)} trials" in str(table.caption)


def test_a_sweep_is_not_resumed_with_another_text_of_ones_own_task(tmp_path, capsys) -> None:
    """Trials of before and after the change would stand in one table."""
    own, folder = tmp_path / "own.py", tmp_path / "sweep"
    text = "from fedbilevel.tasks import quadratic\ndef mine(seed: int = 0): return quadratic(clients=3, seed=seed)\n"
    own.write_text(text)
    arguments = [f"{own}:mine", "--rounds", "1", "--grid", "server_lr.x=0.05,0.1", "--out", folder, "--quiet"]
    assert swept(*arguments) == 0
    capsys.readouterr()
    assert swept("--resume", folder, "--quiet") == 0
    own.write_text(text.replace("clients=3", "clients=4"))
    assert swept("--resume", folder, "--quiet") == 2
    error = capsys.readouterr().err
    assert "cannot resume the sweep" in error
    assert "code was" in error
    assert "own.py" in error
