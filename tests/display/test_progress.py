"""Does a display show stages and rounds in the right order, and can it neither delay a run much nor end it?"""

from __future__ import annotations

import io
import sys
import types

import jax
import numpy as np
import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel.display import Bar, Lines, Notebook, Silent, Speed, Watch, chosen
from fedbilevel.engines import progress
from fedbilevel.engines.progress import Guarded, showing
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses


class Told:
    """A display that records its calls."""

    def __init__(self) -> None:
        self.events: list[tuple] = []

    def stage(self, name: str) -> None:
        self.events.append(("stage", name))

    def advance(self, round: int, rounds: int) -> None:
        self.events.append(("advance", round, rounds))

    def close(self) -> None:
        self.events.append(("close",))

    def of(self, kind: str) -> list:
        return [event[1] for event in self.events if event[0] == kind]


class Clock:
    """A clock whose time a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """A text stream that counts as a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=3, dim_x=2, dim_y=2)


@pytest.fixture(autouse=True)
def programs_of_its_own():
    fb.Local.forget()


def solve(task, rounds=3, **options):
    options = {"rounds": rounds, "eval_every": 1, **options}
    return fb.solve(fb.SimFBO(local_steps=1), task.problem, task.clients, task.x0, task.y0, **options)


def test_a_run_tells_what_it_does_and_every_round_and_its_end(task, monkeypatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "SHARE", float("inf"))
    told = Told()
    solve(task, progress=told)
    assert told.of("advance") == [0, 1, 2, 3]
    assert told.of("stage") == ["tracing", "tracing", "compiling"]
    assert told.events.index(("stage", "compiling")) == told.events.index(("advance", 1, 3)) - 1
    assert told.events[-1] == ("close",)
    assert told.events.count(("close",)) == 1


def test_a_resumed_run_begins_with_the_rounds_that_are_done(task, tmp_path) -> None:
    solve(task, rounds=2, checkpoint=tmp_path / "a.npz")
    told = Told()
    solve(task, rounds=4, checkpoint=tmp_path / "a.npz", resume=True, progress=told)
    assert (told.of("advance")[0], told.of("advance")[-1]) == (2, 4)


def test_a_run_that_fails_closes_its_display(task) -> None:
    told = Told()
    with pytest.raises(fb.errors.ConfigurationError):
        solve(task, engine=fb.Local(devices=1000), progress=told)
    assert told.events == [("stage", "tracing"), ("close",)]


@pytest.mark.slow
def test_a_display_that_fails_costs_nothing_but_itself(task) -> None:
    class Broken(Told):
        def advance(self, round: int, rounds: int) -> None:
            raise OSError("no terminal")

    broken = Broken()
    with pytest.warns(UserWarning, match="progress is not shown any more: OSError: no terminal"):
        shown = solve(task, progress=broken)
    assert broken.events == [("stage", "tracing"), ("close",)]
    silent = solve(task, progress=False)
    jax.tree.map(np.testing.assert_array_equal, shown.state, silent.state)


def test_rounds_are_shown_ten_times_a_second_and_the_last_one_always() -> None:
    clock, told = Clock(), Told()
    display = Guarded(told, clock)
    for round in range(1, 41):  # a round takes 1/32 s, so that 0.1 s have passed after four rounds
        clock.now = round / 32
        display.advance(round, 40)
    assert told.of("advance") == [1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40]


def test_a_slow_display_takes_a_tenth_of_the_time_at_most() -> None:
    clock = Clock()

    class Slow(Told):
        def advance(self, round: int, rounds: int) -> None:
            super().advance(round, rounds)
            clock.now += 2.0

    display = Guarded(slow := Slow(), clock)
    for round in range(100):
        clock.now += 1.0
        display.advance(round, 1000)
    # a call takes 2 s, and the next one comes 20 s after its end: 20 rounds later, since a round takes 1 s
    assert slow.of("advance") == [0, 20, 40, 60, 80]


def test_a_run_inside_another_is_not_shown_unless_it_is_handed_the_display() -> None:
    told = Told()
    with showing(told) as outer:
        with showing(None) as inner:
            inner.advance(1, 2)
            progress.report_stage("compiling")
        with showing(outer) as same:
            same.advance(3, 4)
        outer.advance(4, 4)
    assert told.events == [("advance", 3, 4), ("advance", 4, 4), ("close",)]
    progress.report_stage("nobody is told")


def test_what_is_no_display_is_refused(task) -> None:
    for given in (3, "yes", object(), []):
        with refuses("progress", given, "stage, advance and close"):
            solve(task, progress=given)


@pytest.mark.slow
def test_nothing_is_written_into_pipes_unless_asked_for(task, capsys) -> None:
    solve(task)
    assert capsys.readouterr() == ("", "")
    fb.Local.forget()
    solve(task, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[:2] == ["fedbilevel: tracing", "fedbilevel: round 0/3"]
    assert "fedbilevel: compiling" in lines
    assert lines[-1].startswith("fedbilevel: round 3/3")
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("out", "err", "rich", "kind"),
    [
        (Terminal, Terminal, True, Bar),
        (Terminal, Terminal, False, Silent),
        (Terminal, io.StringIO, True, Silent),
        (io.StringIO, Terminal, True, Silent),
    ],
)
def test_a_bar_where_both_streams_are_a_terminal_and_rich_is_there(out, err, rich, kind, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", out())
    monkeypatch.setattr(sys, "stderr", err())
    if not rich:
        monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(chosen(None), kind)
    assert isinstance(chosen(True), Lines if kind is Silent else kind)
    assert isinstance(chosen(False), Silent)


def test_a_terminal_shows_stage_rounds_speed_and_what_is_left(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    bar = chosen(None)
    bar.speed.clock = clock = Clock()
    bar.stage("compiling")
    clock.now = 14.0
    bar.live.refresh()
    told = screen.getvalue()
    bar.advance(10, 100)
    clock.now = 16.0
    bar.advance(30, 100)  # 20 rounds in 2 s; 70 are left
    screen.truncate(0)
    bar.live.refresh()
    bar.close()
    assert "compiling, 14 s" in told
    shown = ("30/100 rounds", "10 rounds/s  ETA 0:07")
    assert [words for words in shown if words not in screen.getvalue()] == []
    assert "compiling" not in screen.getvalue()


@pytest.mark.parametrize(
    ("budget", "spent"),
    [
        (("rounds", 10), "round 2/10"),
        (("exchanges", 8), "round 2  exchange 4/8"),
        (("bytes", 6e6), "round 2  sent 3.0/6 MB"),
        (("evaluations", 1000), "round 2  evaluation 42/1,000"),
        (("time", 20.0), "round 2  clock 5.0/20 s"),
    ],
)
def test_a_log_says_how_much_of_the_budget_is_spent(budget, spent) -> None:
    """A log has the spent part of the budget: bytes in both directions, and gradients with products."""
    costs = {"exchanges": 4, "bytes_down": 2 * 10**6, "bytes_up": 10**6, "gradients": 30, "hvps": 12, "time": 5.0}
    history = types.SimpleNamespace(rows=[{"loss": 0.25}])
    result = types.SimpleNamespace(round=2, ledger=types.SimpleNamespace(**costs), history=history)
    console = Console(file=io.StringIO(), width=80)
    Watch(console, "loss", budget, timed=False)(result, history.rows[-1])
    assert console.file.getvalue() == f"{spent}  loss 0.25\n"


class Cell:
    """A substitute for IPython's `display` and for the handle that it returns, which records what is shown."""

    def __init__(self) -> None:
        self.cells, self.log = 0, []

    def __call__(self, data: dict[str, str], raw: bool, display_id: bool) -> Cell:
        self.cells += 1
        self.update(data, raw)
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.log.append(data["text/plain"])
        self.html = data["text/html"]


def test_a_notebook_has_a_bar_in_one_place(task, monkeypatch) -> None:
    cell, shell = Cell(), types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=cell))
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    monkeypatch.setattr(progress, "SHARE", float("inf"))
    assert isinstance(chosen(False), Silent)
    solve(task)
    assert cell.cells == 1
    first = ["tracing", "round 0/3", "tracing", "compiling", "round 1/3"]
    assert [line.partition("  ")[0] for line in cell.log] == [*first, "round 2/3", "round 3/3", "round 3/3"]
    assert cell.html.startswith('<progress value="3" max="3"></progress> <span style="white-space: pre">round 3/3')


def test_one_of_several_runs_is_named_before_its_stages_and_while_it_runs() -> None:
    screen, cell, told = Terminal(), Cell(), Told()
    for display in (bar := Bar(Console(file=screen, force_terminal=True)), Notebook(cell), told):
        with showing(display) as shown:
            shown.begin("trial <2> of 5")
            shown.stage("tracing")
            shown.advance(4, 4)
            if display is bar:
                bar.live.refresh()
    assert "trial <2> of 5: tracing" in screen.getvalue()
    assert "trial <2> of 5: running" in screen.getvalue()
    assert cell.log == ["trial <2> of 5: tracing", *["trial <2> of 5: round 4/4"] * 2]
    assert "trial &lt;2&gt; of 5: round 4/4" in cell.html
    assert told.events == [("stage", "trial <2> of 5"), ("stage", "tracing"), ("advance", 4, 4), ("close",)]


def test_the_speed_leaves_out_what_was_no_round() -> None:
    """The speed is measured over the last five seconds, or since the last mark if that is older, without compiling."""
    clock = Clock()
    speed = Speed(clock=clock)
    assert speed.text(100) == ""
    speed.mark(0)
    speed.pause()  # compiling, and the first round
    clock.now = 60.0
    speed.mark(1)
    assert speed.text(100) == ""
    clock.now = 62.0
    speed.mark(5)  # 4 rounds in 2 s; 95 are left
    assert speed.text(100) == "2 rounds/s  ETA 0:48"  # 47.5 s
    clock.now = 100.0
    speed.mark(24)  # 19 rounds in 38 s, since no mark is younger than 5 s
    assert speed.text(3700) == "0.5 rounds/s  ETA 2:02:32"  # 7352 s
    clock.now = 101.0
    speed.mark(2024)
    assert speed.text(2024) == "2,000 rounds/s"  # 2,000 rounds in 1 s
