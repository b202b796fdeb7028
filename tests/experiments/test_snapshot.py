"""Does `fedbilevel watch` read the state of a run, a federation or a sweep from its folder, and show it?"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest

from fedbilevel import experiments
from fedbilevel.core.errors import ExchangeError, NumericalError
from fedbilevel.engines import lock
from fedbilevel.experiments import Folder, folder_reader
from fedbilevel.experiments.folder_reader import FolderReader, best_runs, mean_of
from fedbilevel.experiments.snapshot import MetricTrace, Snapshot, snapshots
from fedbilevel.experiments.window import on_page, sparkline
from refusals import refuses
from run_folders import write_run
from terminals import on_a_terminal

LATE = {"code": "late", "why": "no reply", "who": "", "how": ""}
EXCHANGES = [
    {"round": 0, "exchange": 0, "answered": [0, 1], "bytes_down": 2_000_000, "bytes_up": 1_000_000, "seconds": 0.5},
    {"round": 4, "exchange": 1, "answered": [0], "refused": {"1": LATE}, "bytes_down": 1_000_000,
     "bytes_up": 500_000, "seconds": 2.0, "epsilon": 1.25},
]  # fmt: skip
COSTS = {"exchanges": 3, "bytes_down": 3_000_000, "bytes_up": 1_000_000, "seconds": 0.5}


def quadratic(**run: int) -> experiments.Spec:
    return experiments.configure(task="quadratic", settings=[f"run.{name}={value}" for name, value in run.items()])


def begun(path: Path, *rows: dict, **run: int) -> Path:
    """Write the folder of a run, with a spec and the rows of a history, and return it."""
    path.mkdir(parents=True, exist_ok=True)
    Folder(path).spec.write_text(quadratic(**{"rounds": 20, **run}).to_toml())
    Folder(path).history.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def seen(path: Path) -> Snapshot:
    return FolderReader(path).snapshot()


def test_a_run_in_progress(tmp_path) -> None:
    """The snapshot of a run shows how far the run is, its costs, and whether a process still has its folder locked."""
    rows = [{"round": round, **COSTS, "epsilon": 0.5, "outer_loss": 10.0 - round} for round in (0, 5, 10)]
    place = begun(tmp_path / "run", *rows)
    with lock.exclusive(Folder(place).lock, place):
        snapshot = seen(place)
    assert (snapshot.title, snapshot.state, snapshot.over) == ("quadratic · simfbo", "running", False)
    assert (snapshot.done, snapshot.whole, snapshot.amount) == (10, 20, "10 of 20 rounds")
    (trace,) = snapshot.traces
    assert (trace.name, trace.values, trace.last, trace.span) == ("outer_loss", [10, 5, 0], "0", "0 to 10")
    assert snapshot.facts["sent"] == "3.00 MB down, 1.00 MB up"
    assert snapshot.facts["privacy"].startswith("ε = 0.5 ")
    assert seen(place).state == "idle"  # its folder is no longer locked
    assert f"fedbilevel run --resume {place}" in seen(place).why


@pytest.mark.parametrize(
    ("budget", "done", "amount"),
    [("exchanges=12", 3, "3 of 12 exchanges"), ("bytes=8e6", 4e6, "4 of 8 MB")],
)
def test_progress_is_counted_in_the_cost_that_ends_the_run(tmp_path, budget, done, amount) -> None:
    place = begun(tmp_path / "run", {"round": 7, **COSTS})
    spec = experiments.configure(task="quadratic", settings=[f"run.{budget}"])
    Folder(place).spec.write_text(spec.to_toml())
    assert (seen(place).done, seen(place).amount) == (done, amount)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path) -> None:
    assert seen(tmp_path).state == "waiting"
    begun(tmp_path)
    assert (seen(tmp_path).state, seen(tmp_path).amount) == ("waiting", "0 of 20 rounds")


def test_a_finished_run(tmp_path) -> None:
    """The snapshot of a finished run says so, and has its last values."""
    snapshot = seen(write_run(tmp_path / "run", quadratic(rounds=20), larger=False))
    assert (snapshot.state, snapshot.over, snapshot.error) == ("finished", True, None)
    assert snapshot.value("relative_error") == 1 / 21
    assert snapshot.directions == {"relative_error": False}


def test_a_half_written_line_is_left_out_and_counted(tmp_path) -> None:
    place = begun(tmp_path / "run", {"round": 0, "outer_loss": 2.0}, {"round": 5, "outer_loss": 1.0})
    with Folder(place).history.open("a") as file:
        file.write('{"round": 10, "outer_lo')
    (trace,) = seen(place).traces
    assert trace.values == [2, 1]
    assert seen(place).notes == ["1 line of history.jsonl cannot be read"]


def test_numbers_that_are_not_finite_are_shown(tmp_path) -> None:
    place = begun(tmp_path / "run", *({"round": n, "loss": value} for n, value in enumerate([1, math.nan, math.inf])))
    (trace,) = seen(place).traces
    assert (trace.last, trace.span) == ("inf", "1 to 1, 2 not finite")
    assert MetricTrace("test_accuracy", [math.nan]).last == "NaN"
    assert sparkline(MetricTrace("loss", [0, math.nan, 6.5, 8])) == "▁×▇█"
    long = [1.0] * 1000
    long[501] = math.nan  # one of several values that are drawn as one character
    assert sparkline(MetricTrace("loss", long)).count("×") == 1


def test_heights_are_between_the_ends_and_logarithmic_where_values_are_far_apart() -> None:
    assert MetricTrace("loss", [1.0, 2.0, 5.0]).heights(10) == pytest.approx([0, 0.25, 1])
    apart = MetricTrace("loss", [1.0, 10.0, 100.0])
    assert apart.heights(10) == pytest.approx([0, 0.5, 1])
    assert apart.span == "1 to 100, logarithmic"
    assert MetricTrace("loss", [-1.7e308, 0.0, 1.7e308]).heights(10) == pytest.approx([0, 0.5, 1])
    assert MetricTrace("loss", list(map(float, range(100)))).heights(10) == pytest.approx([n / 9 for n in range(10)])


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 5000])
@pytest.mark.parametrize("gap", [-1, 0, 17])
def test_a_thinned_trace_is_drawn_as_the_whole_one(count, gap) -> None:
    values = [1.0 + (7919 * n) % 1000 for n in range(count)]
    values[gap % count] = math.inf
    whole = MetricTrace("loss", values)
    thinned = whole.thinned(32)
    assert len(thinned.values) <= 32
    assert thinned.heights(32) == whole.heights(32)
    assert (thinned.last, thinned.span, thinned.extent) == (whole.last, whole.span, whole.extent)
    assert Snapshot("", "running", traces=[thinned]).value("loss") == values[-1]


def test_the_pause_grows_with_the_time_of_a_reading_up_to_a_bound(monkeypatch) -> None:
    """The pause before a reading is ten times as long as the reading before, and at least 1 s and at most 10 s.

    Readings take 0.2 s and 10 s.
    """
    clock = iter([0.0, 0.2, 10.0, 20.0, 30.0, 30.01])  # beginning and end of each reading after the first
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    pauses: list[float] = []
    found = snapshots(lambda: Snapshot("", "running"), pauses.append)
    for _ in range(4):
        next(found)
    assert pauses == pytest.approx([1.0, 2.0, 10.0])


def test_a_federation(tmp_path) -> None:
    """The snapshot of a federation shows its last exchange, its costs and delays, and the clients that are absent.

    The median of the delays, 0.5 s and 2 s, is 1.25 s.
    """
    place = begun(tmp_path / "run", {"round": 0, **COSTS})
    Folder(place).exchanges.write_text("".join(json.dumps(line) + "\n" for line in EXCHANGES) + '{"round": 5, "exch')
    snapshot = seen(place)
    assert snapshot.amount == "4 of 20 rounds"  # the last exchange is newer than the last row
    assert snapshot.facts["replied"] == "1 of 2 in round 4, exchange 1: 0"
    assert snapshot.facts["delay"] == "2 s; the median is 1.25 s"
    assert snapshot.facts["sent"] == "3.00 MB down, 1.50 MB up"
    assert snapshot.facts["privacy"].startswith("ε = 1.25 ")
    assert {trace.name: trace.values for trace in snapshot.traces} == {
        "seconds of an exchange": [0.5, 2.0],
        "clients that replied": [2, 1],
    }
    (table,) = snapshot.tables
    client, round, why, how = (str(column.cells[0]) for column in table.columns)
    assert (client, round, why) == ("1", "4", "no reply")
    assert how.startswith("the site or the operator: start its SuperNode if it has stopped")  # from the code
    assert snapshot.notes == ["1 line of exchanges.jsonl cannot be read"]


def test_a_federation_that_ended_with_an_error(tmp_path, run) -> None:
    """The snapshot of a federation that failed has the error, and `watch` ends with the exit code of this error."""
    place = begun(tmp_path / "run")
    ended = {"ended": "too few replied", "kind": "ExchangeError"}
    Folder(place).exchanges.write_text("".join(json.dumps(line) + "\n" for line in (EXCHANGES[0], ended)))
    snapshot = seen(place)
    assert (snapshot.state, snapshot.why, type(snapshot.error)) == ("failed", "too few replied", ExchangeError)
    code, shown, _ = run("watch", place)
    assert code == 5
    assert "too few replied" in shown


def test_a_study_whose_server_was_killed_is_not_running(tmp_path) -> None:
    """The folder of a study, which has no spec, shows whether its server is running, was killed, or has finished."""
    place = Folder(tmp_path)
    place.exchanges.write_text(json.dumps(EXCHANGES[0]))
    with lock.exclusive(place.lock, place.path):
        assert (seen(tmp_path).state, seen(tmp_path).whole) == ("running", 0)
    again = f"no process runs it; to continue, submit the run again with out='{tmp_path}'"
    assert (seen(tmp_path).state, seen(tmp_path).why) == ("idle", again)
    place.model.write_text("{}")
    assert seen(tmp_path).state == "finished"


def a_sweep(path: Path) -> Path:
    """Write a sweep with two seeds of two points, a point that failed, and a run that has not begun. Return its folder.

    The best single run does not belong to the point with the best mean.
    """
    for point, rounds in {"lr-1/seed-0": 10, "lr-1/seed-1": 30, "lr-2/seed-0": 20, "lr-2/seed-1": 20}.items():
        write_run(path / point, quadratic(rounds=rounds), rounds, larger=False)
    Folder(begun(path / "lr-3" / "seed-0")).failed.write_text("outer_loss is not finite")
    (path / "sweep.json").write_text(json.dumps({"select": "relative_error", "runs": 6}))
    return path


def test_a_sweep_lists_its_runs_and_the_best_point_so_far(tmp_path) -> None:
    snapshot = seen(a_sweep(tmp_path / "steps"))
    assert (snapshot.state, snapshot.done, snapshot.whole) == ("idle", 5, 6)
    assert snapshot.facts["runs"] == "1 failed, 4 finished"
    # the mean of 1/11 and 1/31 is larger than 1/21
    assert snapshot.facts["best so far"] == "lr-2, relative_error 0.04762 (mean of 2 runs)"
    (table,) = snapshot.tables
    columns = {column.heading: [str(cell) for cell in column.cells] for column in table.columns}
    assert columns["run"][:3] == ["lr-3/seed-0", "lr-2/seed-0", "lr-2/seed-1"]
    assert columns["state"][0] == "failed"
    assert columns["why"][0] == "outer_loss is not finite"
    assert columns["relative_error"][1] == "0.04762 ★"
    (tmp_path / "steps" / "sweep.csv").write_text("")
    assert seen(tmp_path / "steps").state == "finished"


def test_a_series_of_runs_has_no_best(tmp_path) -> None:
    for seed in range(2):
        write_run(tmp_path / f"seed-{seed}", quadratic(rounds=20))
    snapshot = seen(tmp_path)
    assert "best so far" not in snapshot.facts
    assert (snapshot.amount, snapshot.over) == ("2 of 2 runs have ended", False)


def test_the_app_of_a_demo_is_no_run(tmp_path) -> None:
    """The app in the folder of a demo has a spec, and does not count as a run."""
    begun(tmp_path / "demo" / "demo")
    (tmp_path / "demo" / "demo" / "__init__.py").touch()
    begun(tmp_path / "run", {"round": 5})
    assert seen(tmp_path).amount == "5 of 20 rounds"


def test_a_folder_that_is_no_runs_is_refused(tmp_path) -> None:
    (tmp_path / "notes.txt").touch()
    with refuses("FOLDER", str(tmp_path), " notes.txt"):
        seen(tmp_path)
    with refuses("FOLDER", str(tmp_path / "none"), "fedbilevel watch --serve"):
        seen(tmp_path / "none")


def test_a_run_that_failed_says_why(tmp_path) -> None:
    place = begun(tmp_path / "run")
    Folder(place).failed.write_text("x is not finite\x1b[31m")
    snapshot = seen(place)
    assert (snapshot.state, snapshot.why) == ("failed", "x is not finite�[31m")
    assert isinstance(snapshot.error, NumericalError)


def test_later_damage_is_noted_and_what_was_seen_stays(tmp_path) -> None:
    place = begun(tmp_path / "run", {"round": 5, "outer_loss": 1.0})
    found = snapshots(FolderReader(place).snapshot, sleep=lambda seconds: None)
    before = next(found)
    Folder(place).spec.write_text("[run")
    after = next(found)
    assert after.traces == before.traces
    assert "not up to date: " in after.notes[0]
    begun(place, {"round": 6, "outer_loss": 0.5})
    assert (next(found).amount, next(found).notes) == ("6 of 20 rounds", [])


def test_a_pipe_and_a_dumb_terminal_are_shown_it_once(tmp_path, run, monkeypatch) -> None:
    """In a pipe and on a dumb terminal, `watch` shows a run once and ends."""
    place = begun(tmp_path / "run", {"round": 5, **COSTS, "outer_loss": 2.0}, {"round": 6, **COSTS, "outer_loss": 1.0})
    code, shown, said = run("watch", place)
    assert (code, said) == (0, "")
    for part in ("quadratic · simfbo", "idle", "6 of 20 rounds", "outer_loss", "█▁"):
        assert part in shown
    code, shown = on_a_terminal(monkeypatch, "watch", str(place), kind="dumb")
    assert code == 0
    assert "6 of 20 rounds" in shown


def test_on_a_terminal_it_ends_if_the_run_has_ended(tmp_path, monkeypatch) -> None:
    """On a terminal, `watch` ends when the run has ended."""
    place = write_run(tmp_path / "run", quadratic(rounds=20))
    code, shown = on_a_terminal(monkeypatch, "watch", str(place))
    assert code == 0
    assert "20 of 20 rounds" in shown


@pytest.mark.parametrize("given", [["--host", "0.0.0.0"], ["--serve", "70000"], ["--serve", "--once"]])
def test_wrong_options_are_refused(tmp_path, run, given) -> None:
    code, _, said = run("watch", begun(tmp_path / "run"), *given)
    assert code == 2
    assert given[0] in said


def test_an_empty_name_is_refused_since_it_would_mean_the_current_folder(run) -> None:
    code, _, said = run("watch", "")
    assert code == 2
    assert "a folder, or the URL that `fedbilevel watch --serve` has printed" in said


def test_a_search_shows_the_values_that_were_drawn(tmp_path) -> None:
    place = a_sweep(tmp_path)
    plan = {"select": "relative_error", "runs": 6, "fields": ["server_lr.x", "run.rounds", "nothing"]}
    (place / "sweep.json").write_text(json.dumps(plan))
    (table,) = seen(place).tables
    first = {column.heading: str(column.cells[1]) for column in table.columns}
    assert first["run"] == "lr-2/seed-0"
    assert first["server_lr.x"] == str(quadratic().tables()["algorithm"]["server_lr"]["x"])
    assert (first["run.rounds"], first["nothing"]) == ("20", "–")


def test_a_damaged_run_hides_none_of_the_others(tmp_path) -> None:
    place = a_sweep(tmp_path)
    (place / "lr-1" / "seed-0" / "spec.toml").write_text("[run")
    snapshot = seen(place)
    assert snapshot.facts["runs"] == "1 failed, 1 idle, 3 finished"
    assert "spec.toml is not TOML" in snapshot.notes[0]


def test_a_file_that_cannot_be_read_hides_none_of_the_other_runs(tmp_path) -> None:
    place = a_sweep(tmp_path)
    history = place / "lr-1" / "seed-0" / "history.jsonl"
    history.unlink()
    os.mkfifo(history)
    snapshot = seen(place)
    assert "1 idle" in snapshot.facts["runs"]
    assert snapshot.notes == [f"lr-1/seed-0: {history}: it is a pipe or a device, and not a regular file"]


def test_absurd_numbers_are_damage_and_no_overflow(tmp_path) -> None:
    """Numbers that are too large for any run count as damage of the file, and cause no overflow."""
    place = begun(tmp_path / "run", {"round": 0, "outer_loss": 1e308}, {"round": 10**400, "outer_loss": -1e308})
    line = EXCHANGES[0] | {"bytes_down": 10**400}
    Folder(place).exchanges.write_text("".join(json.dumps(one) + "\n" for one in (EXCHANGES[0], line)))
    snapshot = seen(place)
    assert [note.partition(" cannot")[0] for note in snapshot.notes] == [
        "1 line of history.jsonl",
        "1 line of exchanges.jsonl",
    ]
    assert "2.00 MB down" in on_page(snapshot)
    plan = tmp_path / "sweep.json"
    plan.write_text(json.dumps({"select": "outer_loss", "runs": 10**400}))
    with refuses("", fact="runs is 1000", where=str(plan)):
        seen(tmp_path)


def test_sums_of_huge_numbers_do_not_overflow(tmp_path) -> None:
    huge = 17 * 10**307
    row = {"round": 2, "bytes_down": huge, "bytes_up": huge, "outer_loss": 1.0}
    run = begun(tmp_path / "run", row)
    spec = experiments.configure(task="quadratic", settings=["run.bytes=8e6"])
    Folder(run).spec.write_text(spec.to_toml())
    assert seen(run).amount.startswith("inf of")
    assert "inf of" in on_page(seen(run))
    finished = {
        name: Snapshot("", "finished", traces=[MetricTrace("outer_loss", [1.7e308])]) for name in ("a/0", "a/1")
    }
    assert best_runs(finished, "outer_loss") == {"a/0": 1.7e308, "a/1": 1.7e308}
    assert mean_of([1.7e308, 1.7e308]) == 1.7e308


def test_what_has_not_changed_is_not_read_again(tmp_path, monkeypatch) -> None:
    place = begun(tmp_path / "run", {"round": 5, "outer_loss": 1.0})
    reader = FolderReader(place)
    before = reader.snapshot()
    with monkeypatch.context() as patched:
        patched.setattr(folder_reader, "read_bytes", None)
        patched.setattr(folder_reader, "read_finished", None)
        assert reader.snapshot() == before
    begun(place, {"round": 5, "outer_loss": 1.0}, {"round": 10, "outer_loss": 0.5})
    assert reader.snapshot().amount == "10 of 20 rounds"


@pytest.mark.parametrize("private", [True, False])
def test_a_page_does_not_show_the_seed_of_a_run_under_privacy(tmp_path, private) -> None:
    """A page hides the seed of a run under privacy, with which the noise could be subtracted.

    A terminal shows the path of the folder with the seed, since its user has the folder.
    """
    for seed in (918273, 564738):
        place = begun(tmp_path / "lr-0.1" / f"seed-{seed}", {"round": 0, **COSTS, "outer_loss": 1.0}, seed=seed)
        if private:
            spec = experiments.read_spec(Folder(place).spec).tables()
            spec["privacy"] |= {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
            Folder(place).spec.write_text(experiments.resolve(spec).to_toml())
    for folder in (tmp_path, place):
        snapshot = seen(folder)
        page = on_page(snapshot)
        assert snapshot.is_private is private
        assert ("564738" in page) is not private
        assert ("seed-***" in page) is private
    assert "seed-564738" in snapshot.why
