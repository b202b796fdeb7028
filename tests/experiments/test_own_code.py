"""Do a user's own tasks and algorithms run, and does reading the folder of a run execute none of their code?"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbilevel import experiments
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.cli import shared
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines import checkpoint
from fedbilevel.experiments import toml
from fedbilevel.experiments.runner import task_of
from own_files import apart
from refusals import refuses
from run_folders import write_run

SOURCE = """
import jax.numpy as jnp
import numpy as np
import neighbour
from fedbilevel import Bilevel, Clients
from fedbilevel.tasks import Task


def make(*, clients: int = 4, shift: float = neighbour.SHIFT, seed: int = 0, plain=(1, 2), nothing=None) -> Task:
    assert plain == [1, 2] and nothing is None
    data = [np.random.default_rng([seed, i]).normal(size=(6, 3)) + shift for i in range(clients)]
    outer = lambda x, y, batch: jnp.mean((y - batch) ** 2) + jnp.sum(x**2)
    inner = lambda x, y, batch: jnp.mean((y - x * batch) ** 2)
    clients = Clients(outer=data, inner=data)
    return Task("mine", Bilevel(outer, inner), clients, jnp.ones(3), jnp.zeros(3), {"size": lambda x, y: x @ x})


ready = make(plain=[1, 2])
number = 3


def wrong():
    return number


def loss(x, y, batch):  # not a task, and neither is size, which declares another result
    return jnp.mean(batch)


def size(x=None) -> float:
    return 0.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(SOURCE)
    (tmp_path / "sub" / "neighbour.py").write_text("SHIFT = 1.5\n")
    (tmp_path / "my.own.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "json.py").write_text("from fedbilevel.tasks import quadratic as make\n")
    return tmp_path


@pytest.mark.checked
def test_it_runs_and_is_resumed_from_elsewhere(run, here) -> None:
    """A task in a user's file runs with its fields and defaults, and its run is resumed from another folder."""
    code, _, error = run("run", "sub/mine.py:make", "--rounds", 3, "--set", "task.shift=2", "--seed", 5, "--quiet")
    assert (code, error) == (0, "")
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("mine-make-simfbo-2")
    loaded = experiments.load_run(folder)
    assert loaded.spec.task.name == f"{here}/sub/mine.py:make"
    assert loaded.summary["task"] == "mine.py:make"
    assert loaded.spec.task.fields == {"clients": 4, "shift": 2, "seed": 5, "plain": [1, 2], "nothing": None}
    os.chdir("/")
    assert run("run", "--resume", folder, "--rounds", 5, "--quiet")[0] == 0
    assert experiments.load_run(folder).summary["rounds"] == 5


@pytest.mark.slow
def test_a_task_that_was_changed_is_not_resumed_unasked(run, here) -> None:
    """A run whose task has changed is resumed only with --force, and then with a warning."""
    folder = here / "run"
    with apart():
        assert run("run", "sub/mine.py:make", "--rounds", 3, "--quiet", "--out", folder)[0] == 0
    (here / "sub" / "mine.py").write_text(SOURCE.replace("jnp.sum(x**2)", "2 * jnp.sum(x**2)"))
    code, _, error = run("run", "--resume", folder, "--rounds", 5, "--quiet")
    assert code == 4
    assert "belongs to another run: different now: outer loss; " in error
    assert experiments.load_run(folder).summary["rounds"] == 3
    code, _, error = run("run", "--resume", folder, "--rounds", 5, "--quiet", "--force")
    assert code == 0
    assert "warning: " in error
    assert "is continued with other arguments: different now: outer loss" in error
    assert experiments.load_run(folder).summary["rounds"] == 5


def test_a_task_may_be_ready_and_a_module_is_found_from_here(here, monkeypatch) -> None:
    """A task may be an object instead of a function, and a module is found in the current folder."""
    spec = experiments.configure(task="sub/mine.py:ready")
    assert (spec.task.fields, len(task_of(spec).clients)) == ({}, 4)
    monkeypatch.chdir(here / "sub")
    spec = experiments.configure(task="mine:make", settings=["task.clients=2"])
    assert (spec.task.name, len(task_of(spec).clients)) == ("mine:make", 2)


WRONG = {
    "sub/mine.py:mkae": "unknown task 'mkae' in sub/mine.py; did you mean 'make'? (allowed: loss, make, ready, ",
    "sub/neighbour.py:make": "unknown task 'make' in sub/neighbour.py",
    "sub/mine.py": "task 'sub/mine.py' needs the name of an object in this file: sub/mine.py:NAME",
    "sub/mine.py:number": "mine.py:number is of type int; it must be a Task, or a function that returns one",
    "sub/mine.py:wrong": "mine.py:wrong returned int; it must return a Task",
    "sub/nine.py:make": "there is no file ",
    "my.own.py:make": "my.own.py cannot be imported: give the file a name without dots",
    "broken.py:make": "broken.py cannot be imported: invalid syntax",
    "nomodule:make": "module 'nomodule' cannot be imported: No module named 'nomodule'",
    ":make": "module '' cannot be imported",
    "json.py:make": "json.py: Python finds another module named json: rename the file",
    "sub/mine.py:ready --set task.data=mnist": "task.data cannot be set: this task has no fields",
    "sub/mine.py:make --set task.shfit=2": "unknown field 'shfit' of task; did you mean 'shift'",
    "sub/mine.py:make --set shift=far": "task.shift = 'far' is not allowed: it must be float",
    "quadratic --algorithm sub/method.py:Dampd": "'Dampd' in sub/method.py; did you mean 'Damped'? (allowed: Damped)",
    "quadratic --algorithm sub/mine.py:Damped": "unknown algorithm 'Damped' in sub/mine.py (allowed: none)",
    "quadratic --algorithm sub/method.py:number": "method.py:number is not a subclass of fedbilevel.authoring.Algo",
    "quadratic --algorithm sub/method.py:State": "method.py:State is not a subclass of fedbilevel.authoring.Algo",
    "quadratic --algorithm sub/method.py:Half": "method.py:Half must define round, as every algorithm",
}


@pytest.mark.parametrize("task", WRONG)
def test_what_is_no_task_or_algorithm_is_explained(task: str, run, here, method) -> None:
    code, shown, error = run("run", *task.split(), "--quiet")
    assert (code, shown) == (2, "")
    assert WRONG[task] in error.replace(f"{here}/", "")
    assert len(error.splitlines()) == 1
    assert not (here / "runs").exists()


SPY = """
from pathlib import Path

Path(__file__).with_name("executed").touch()
from mine import make
"""


def test_a_second_folder_is_refused(here) -> None:
    """Code from a second folder is refused and not imported, since modules of both folders may have the same name."""
    (here / "other").mkdir()
    (here / "other" / "theirs.py").write_text(SOURCE)
    (here / "sub" / "second.py").write_text("from mine import make\n")
    assert experiments.configure(task="sub/mine.py:make").task.fields["shift"] == 1.5
    assert experiments.configure(task="sub/second.py:make").task.fields["shift"] == 1.5
    for name in ("other/theirs.py:make", "unheard:make"):
        with pytest.raises(ConfigurationError) as error:
            experiments.configure(task=name)
        assert f"but this process has loaded code from {here}/sub: put both into one folder, or use another" in str(
            error.value
        )
    assert not {"theirs", "unheard"} & set(sys.modules)


@pytest.fixture
def foreign(here) -> Path:
    """Return the folder of a finished run whose task is in a file that leaves a trace when it is executed."""
    (here / "sub" / "spy.py").write_text(SPY)
    spec = experiments.configure(task="quadratic", settings=["rounds=20"])
    folder = write_run(here / "foreign", spec)
    tables = spec.tables() | {"task": {"name": "sub/spy.py:make", "clients": 2, "extra": "none"}}
    (folder / "spec.toml").write_text(toml.dumps(tables))
    return folder


def test_reading_a_run_executes_nothing(foreign, here, run) -> None:
    fields = experiments.load_run(foreign).spec.task.fields
    assert fields == {"clients": 2, "extra": None}  # as in the file; the task's own fields are not looked up
    assert run("compare", foreign)[0] == 0
    named = foreign / "spec.toml"
    named.write_text(named.read_text().replace("sub/spy.py:make", "sub.spy:make"))
    assert run("compare", foreign)[0] == 0
    (here / "series").mkdir()
    foreign.rename(here / "series" / "simfbo")
    code, _, error = run("compare", "quadratic", "--algorithms", "simfbo", "--out", here / "series")
    assert (code, "differs in task.name: 'sub.spy:make' there" in error) == (2, True)
    assert not (here / "sub" / "executed").exists()


METHOD = """
from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import ClassVar

import jax
import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.authoring import positive, static

Path(__file__).with_name("method_executed").touch()


State = namedtuple("State", "x y")


class Damped(authoring.Algorithm):
    name: ClassVar[str] = "damped"
    presets: ClassVar[dict] = {"quadratic": {"lr": 0.03, "batch_size": None}, "saddle": {"rate": 1}}

    lr: float = positive(default=0.1)
    batch_size: int | None = static(default=16)

    def init(self, x, y):
        return State(x, y)

    @authoring.phase
    def gradient(self, client, message, key):
        batch = client.inner_batch(key, self.batch_size)
        return authoring.Reply(jax.grad(client.problem.inner, argnums=1)(*message, batch), gradients=1)

    def round(self, fed, state, key):
        gradient = fed.mean(self.gradient, state, key)
        return State(state.x, jax.tree.map(lambda y, g: y - self.lr * g, state.y, gradient))


class Half(authoring.Algorithm):
    def init(self, x, y):
        return None


number = 3
"""


@pytest.fixture
def method(here) -> Iterator[Path]:
    (here / "sub" / "method.py").write_text(METHOD)
    yield here / "sub" / "method.py"
    ALGORITHMS.pop("damped", None)


DAMPED = "sub/method.py:Damped"


@pytest.mark.slow
@pytest.mark.checked
def test_an_algorithm_runs_with_its_own_presets(run, here, method) -> None:
    code, _, error = run("run", "quadratic", "--algorithm", DAMPED, "--rounds", 2, "--quiet", "--out", here / "one")
    assert (code, error) == (0, "")
    loaded = experiments.load_run(here / "one")
    assert loaded.spec.algorithm.name == f"{here}/sub/method.py:Damped"
    assert loaded.spec.algorithm.fields == {"lr": 0.03, "batch_size": None}
    assert loaded.summary["algorithm"] == "method.py:Damped"
    assert loaded.spec.title == "quadratic · method.py:Damped"
    with refuses("field of method.py:Damped in its presets for saddle", "rate"):
        experiments.configure(task="saddle", algorithm=DAMPED)


@pytest.mark.slow
@pytest.mark.checked
def test_a_comparison_has_a_row_for_an_algorithm_of_ones_own(run, here, method) -> None:
    settings = ["--set", "Damped.lr=0.2", "--set", "fedbio.local_steps=1", "--set", "batch_size=4"]
    arguments = ["quadratic", "--algorithms", f"{DAMPED},fedbio", "--rounds", 2, "--out", here / "both", "--quiet"]
    code, shown, error = run("compare", *arguments, *settings)
    assert (code, error) == (0, "")
    assert "method-Damped" in shown
    own = experiments.load_run(here / "both" / "method-Damped").spec.algorithm.fields
    assert own == {"lr": 0.2, "batch_size": 4}
    code, _, error = run("compare", "quadratic", "--algorithms", f"{DAMPED},{DAMPED}")
    assert (code, "names that are all different" in error) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "kind", "file", "trace"),
    [
        ("run --spec foreign/spec.toml", "a task", "spy", "executed"),
        ("run --resume foreign", "a task", "spy", "executed"),
        ("run --spec foreign/spec.toml", "an algorithm", "method", "method_executed"),
    ],
)
def test_playing_a_spec_says_whose_code_it_runs_and_reading_it_runs_none(
    arguments, kind, file, trace, foreign, here, method, run
) -> None:
    """Running a spec names the file of a user's code and executes it. Reading the spec executes nothing."""
    if file == "method":
        tables = toml.read(foreign / "spec.toml") | {"task": {"name": "quadratic"}}
        tables["algorithm"] = {"name": DAMPED, "extra": "none"}
        (foreign / "spec.toml").write_text(toml.dumps(tables))
        assert experiments.load_run(foreign).spec.algorithm.fields == {"extra": None}
        assert run("compare", foreign)[0] == 0
        assert not (here / "sub" / trace).exists()
    checkpoint.save(foreign / "checkpoint.npz", {}, {"history": []})
    code, _, error = run(*arguments.split())
    said, wrong = error.splitlines()
    assert said == f"fedbilevel: foreign/spec.toml names {kind} of your own: this runs the code of sub/{file}.py"
    assert (code, f"unknown field 'extra' of {kind.split()[1]}" in wrong) == (2, True)
    assert (here / "sub" / trace).exists()


@pytest.mark.parametrize(
    ("arguments", "named", "trace"),
    [
        ("tasks sub/spy.py:make", "", "executed"),
        ("algorithms sub/method.py:Damped", "", "method_executed"),
        ("diagnose sub/spy.py:make --set task.extra=1", "", "executed"),
        ("check sub/spy.py:make --set task.extra=1", "", "executed"),
        ("check quadratic --algorithm sub/method.py:Damped", "", "method_executed"),
        ("flower new app --task sub/spy.py:make --set task.extra=1", "", "executed"),
        ("flower check foreign/spec.toml --node-config partition-id=0", "foreign/spec.toml names a task", "executed"),
    ],
)
def test_looking_at_code_of_ones_own_says_whose_before_it_runs(
    arguments, named, trace, foreign, method, here, run, monkeypatch
) -> None:
    """Commands name the file whose code they run, before they run it.

    When the sentence is printed, the code has not left its trace yet.
    """
    said: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        shared, "printable", lambda text, *_, **__: said.append((text, (here / "sub" / trace).exists()))
    )
    run(*arguments.split())
    first, before = said[0]
    named = f"{named} of your own: " if named else ""
    assert first == f"{named}this runs the code of sub/{'method' if 'method' in trace else 'spy'}.py"
    assert not before
    assert (here / "sub" / trace).exists()


@pytest.mark.slow
def test_an_app_has_a_copy_of_ones_own_algorithm(here, method) -> None:
    from fedbilevel.experiments.federation import write_app

    spec = experiments.configure(task="quadratic", algorithm=DAMPED)
    original = ALGORITHMS["damped"]
    write_app(spec, here / "app")
    assert (here / "app" / "app" / "method.py").read_text() == METHOD
    assert 'name = "app.method:Damped"' in (here / "app" / "app" / "spec.toml").read_text()
    assert ALGORITHMS["damped"] is original


@pytest.mark.slow
def test_diagnosing_for_ones_own_algorithm_reports_and_suggests_nothing(run, here, method) -> None:
    code, shown, error = run("diagnose", "quadratic", "--algorithm", DAMPED, "--set", "clients=2")
    assert (code, error) == (0, "fedbilevel: this runs the code of sub/method.py\n")
    assert "no step sizes are suggested for method.py:Damped, your own algorithm; the safe steps below" in shown
    assert "safe steps of a round" in shown
    assert not re.search("simfbo|fednest|afbo|SimFBO|FedNest", shown)  # these were not asked for
    code, _, error = run("check", "quadratic", "--algorithm", DAMPED)
    assert (code, "method.py:Damped makes no estimate of the hypergradient" in error) == (2, True)
