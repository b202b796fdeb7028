"""Does one command run several algorithms on one task, and does it continue after an interruption?"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from command_line import outcome

from fedbilevel import experiments, solve
from fedbilevel.core.errors import DataWarning, NonFiniteError
from fedbilevel.experiments.runner import build, task_of
from fedbilevel.experiments.series import TaskCache, comparison_specs
from refusals import refuses

TWO = ["simfbo", "shrofbo"]
SETTINGS = ["clients=4", "samples=[3, 3]", "run.rounds=20", "run.eval_every=5"]
SET = [part for setting in SETTINGS for part in ("--set", setting)]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """Return the folder of a comparison with two algorithms, two seeds, and the pooled run without a federation."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    experiments.compare_algorithms("quadratic", TWO, settings=SETTINGS, seeds=[0, 1], centralised=True, out=folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_every_run_has_its_folder(compared) -> None:
    found = sorted(str(path.parent.relative_to(compared)) for path in compared.rglob("summary.json"))
    assert found == [f"{name}/seed-{seed}" for name in ("centralised", "shrofbo", "simfbo") for seed in (0, 1)]
    assert (compared / "comparison.png").is_file()
    specs = [experiments.load_run(compared / name / "seed-1").spec for name in (*TWO, "centralised")]
    assert [spec.algorithm.name for spec in specs] == [*TWO, "simfbo"]
    assert [spec.run.pooled for spec in specs] == [False, False, True]
    assert {(spec.run.seed, spec.task.fields["seed"], spec.run.rounds) for spec in specs} == {(1, 1, 20)}


def test_a_method_keeps_its_place_and_so_its_colour(compared, tmp_path) -> None:
    """Methods stay in the order of the first command, so that each keeps its colour.

    In alphabetical order, they would be centralised, shrofbo, simfbo.
    """
    names = ["simfbo", "shrofbo", "centralised"]
    assert [group.name for group in experiments.load_groups([compared])] == names
    folder = tmp_path / "runs"
    shutil.copytree(compared, folder)
    shutil.rmtree(folder / "centralised")  # its algorithm is the first one, which changes now
    groups = experiments.compare_algorithms("quadratic", TWO[::-1], settings=SETTINGS, seeds=[0, 1], out=folder)
    assert [group.name for group in groups] == TWO
    (folder / "methods.json").write_text("{}")
    with refuses("", fact="a JSON list", where=str(folder / "methods.json")):
        experiments.load_groups([folder])


def test_what_is_finished_is_read(compared, run) -> None:
    """The same command again reads the finished runs, shows them, and changes no file."""
    before = contents(compared)
    code, shown, error = run(*again(compared))
    assert (code, error) == (0, "")
    assert [name in shown for name in ("SimFBO (2 seeds)", "ShroFBO (2 seeds)", "centralised (2 seeds)")] == [True] * 3
    assert contents(compared) == before


def test_the_folder_of_another_comparison_is_refused(compared, run) -> None:
    before = contents(compared)
    command = ["compare", "quadratic", "--algorithms", ",".join(TWO), *SET, "--centralised", "--out", compared]
    for more, words in (
        (
            ["--seeds", "0"],
            f"{compared} contains {compared / 'centralised' / 'seed-1'}, which is not one of these runs",
        ),
        (["--seeds", "0,1", "--set", "local_steps=2"], "differs in algorithm.local_steps: 5 there, 2 now"),
        ([], "runs/simfbo: the folder is not empty"),
    ):
        code, _, error = run(*command, *more)
        assert (code, words in error) == (2, True)
    assert contents(compared) == before


@pytest.fixture
def incomplete(compared, tmp_path) -> Path:
    """Return a copy of the comparison in which one run is missing."""
    shutil.copytree(compared, tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "simfbo" / "seed-1")
    return tmp_path / "c"


def again(folder: Path) -> list[object]:
    names = ["--algorithms", ",".join(TWO), "--seeds", "0,1", "--centralised"]
    return ["compare", "quadratic", *names, *SET, "--out", folder]


def test_an_interrupted_comparison_goes_on(compared, incomplete, run, monkeypatch) -> None:
    from fedbilevel import display

    seen = []

    def interrupted(watch: object, result: object, row: object) -> None:
        seen.append(row)
        if len(seen) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(display.Watch, "__call__", interrupted)
        code, _, error = run(*again(incomplete))
    assert code == 130
    assert error == f"fedbilevel: interrupted; continue with the same command and --out {incomplete}\n"
    assert (incomplete / "simfbo" / "seed-1" / "checkpoint.npz").is_file()
    assert run(*again(incomplete))[0] == 0
    assert outcome(incomplete / "simfbo" / "seed-1") == outcome(compared / "simfbo" / "seed-1")


def test_a_run_that_diverges_does_not_stop_the_others(incomplete, run, monkeypatch) -> None:
    from fedbilevel.experiments import runner

    def diverging(*_: object, **more: object) -> None:
        raise NonFiniteError("round 3, x is nan")

    monkeypatch.setattr(runner, "complete", diverging)
    (incomplete / "comparison.png").unlink()
    code, shown, error = run(*again(incomplete))
    assert (code, error) == (3, "fedbilevel: simfbo/seed-1: round 3, x is nan; no checkpoint had been written\n")
    assert "SimFBO " in shown
    assert "SimFBO (2 seeds)" not in shown
    assert "ShroFBO (2 seeds)" in shown
    assert (incomplete / "comparison.png").is_file()


def test_settings_reach_the_algorithms_they_are_for() -> None:
    """A setting applies to all methods that have the field, or only to the method that it names."""
    settings = ["radius=3", "simfbo.local_steps=7", "algorithm.batch_size=4", "lfednest.inner.lr=0.25", "rounds=9"]
    specs = comparison_specs("quadratic", ["simfbo", "lfednest"], settings=settings)
    sim, nest = (specs[name].algorithm.fields for name in ("simfbo", "lfednest"))
    assert (sim["radius"], "radius" in nest) == (3, False)
    assert sim["local_steps"] == 7 != nest["inner"]["local_steps"]
    assert (sim["batch_size"], nest["batch_size"], nest["inner"]["lr"]) == (4, 4, 0.25)
    assert {spec.run.rounds for spec in specs.values()} == {9}


def test_a_field_of_a_section_may_be_set_for_one_method_without_the_section() -> None:
    """`simfbo.rule` is a field of [layers], as `rule` is without a method, and reaches no other method."""
    settings = ["clients=3", "simfbo.rule=median", "lfednest.capacity=0.5"]
    specs = comparison_specs("quadratic", ["simfbo", "lfednest"], settings=settings)
    assert [type(spec.layers.rule).__name__ for spec in specs.values()] == ["Median", "NoneType"]
    assert [dict(spec.clients) for spec in specs.values()] == [{}, {"capacity": 0.5}]


def test_own_numbers_of_one_method_of_a_comparison() -> None:
    """Clients' own numbers may be set for one method of a comparison.

    The methods share a task, but their runs then do not share a population.
    """
    settings = ["clients=3", "lfednest.clients.outer_steps=[1, 2, 5]", "simfbo.clients.local_steps=[4, 1, 1]"]
    specs = comparison_specs("quadratic", ["simfbo", "lfednest"], settings=settings)
    assert [dict(spec.clients) for spec in specs.values()] == [{"local_steps": [4, 1, 1]}, {"outer_steps": [1, 2, 5]}]
    tasks = TaskCache()
    assert [list(tasks(spec).clients.own) for spec in specs.values()] == [["local_steps"], ["outer_steps"]]
    with refuses("name in the clients' own numbers for SimFBO", "outer_steps", near="local_steps", where="simfbo"):
        comparison_specs("quadratic", ["simfbo", "lfednest"], settings=["simfbo.clients.outer_steps=3"])


@pytest.mark.parametrize(
    ("algorithms", "settings", "refusal"),
    [
        ([], [], ("algorithms", [])),
        (["simfbo", "simfbo"], [], ("algorithms", "simfbo,simfbo", "different")),
        (TWO, ["algorithm.rdius=3"], ("field of the algorithms", "rdius", "", "radius")),
        (TWO, ["momentum=0.5"], ("field", "momentum", "simfbo: batch_size, client_lr,")),
        (TWO, ["rdius=3"], ("field", "rdius", "", "radius")),
        (TWO, ["shrofbo.rdius=3"], ("field", "rdius", "shrofbo: batch_size, client_lr,", "radius")),
        (TWO, ["simfbo.rul=median"], ("field", "rul", "simfbo.layers: compression, rule", "rule")),
        (TWO, ["lfednest.inner.lr=3"], ("--set", "lfednest.inner.lr=3", "simfbo, shrofbo")),
    ],
)
def test_wrong_input_is_explained(algorithms, settings, refusal) -> None:
    with refuses(*refusal):
        comparison_specs("quadratic", algorithms, settings=settings)


def test_the_method_that_has_a_field_is_named() -> None:
    with refuses("field", "momentum") as error:
        comparison_specs("quadratic", TWO, settings=["momentum=0.5"])
    assert "bi-fista" in str(error.value)


@pytest.mark.slow
def test_one_client_that_holds_everything_is_the_same_problem() -> None:
    """A pooled run computes the same as a run of all clients.

    If clients have equal sizes and weights, make one local step with full batches and all take part, the server's
    average is the mean over all samples, and this is also the mean of the single client.
    """
    settings = ["clients=3", "samples=[4, 4]", "weighted=false", "algorithm.local_steps=1", "run.rounds=5"]
    spec = experiments.configure(task="quadratic", settings=[*settings, "run.cohort=3"])
    pooled = spec.replace(run={"pooled": True})
    assert pooled.run.cohort is None
    task = task_of(pooled)
    assert len(task.clients) == 1
    assert task.clients.inner.size.tolist() == [12]
    found = []
    for parts in (build(spec), build(pooled)):
        task = parts.task
        found.append(solve(parts.algorithm, task.problem, task.clients, task.x0, task.y0, rounds=5).state.iterate)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), *found)


@pytest.mark.parametrize(
    ("task", "settings", "fact"),
    [
        ("quadratic", ["clients=3", "samples=[4, 4]"], "weights"),
        ("quadratic", ["clients=3", "samples=[2, 9]", "weighted=false"], "samples"),
        ("tables", ["outcome=survival"], "at once"),
        ("quadratic", ["clients=3", "samples=[4, 4]", "weighted=false"], ""),
        ("quadratic", ["clients=1"], ""),
    ],
)
def test_a_pooled_run_warns_if_it_solves_another_problem(task: str, settings: list[str], fact: str) -> None:
    spec = experiments.configure(task=task, settings=[*settings, "run.pooled=true"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        task_of(spec)
    found = [str(one.message) for one in seen if isinstance(one.message, DataWarning)]
    assert len(found) == bool(fact)
    assert all(fact in text for text in found)
