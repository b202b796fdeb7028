"""Are specs complete, the same after writing and reading, and clear about every mistake in them?"""

from __future__ import annotations

import dataclasses
import math
import tomllib

import numpy as np
import optax
import pytest

import fedbilevel
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.parts.local_steps import Momentum
from fedbilevel.core.config import static
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.tables import merged, optimizer, shared_by
from fedbilevel.core.tree import XYV
from fedbilevel.experiments import configure, read_spec, resolve, toml
from fedbilevel.experiments.presets import GROUPS, METHODS, PRESETS, RUNS
from fedbilevel.experiments.runner import algorithm_of, build, task_of
from fedbilevel.tasks import TASKS
from fedbilevel.tasks.images import WITH_LINEAR
from refusals import refuses

COSINE = '{schedule = "cosine_decay_schedule", init_value = 0.1, decay_steps = 500, alpha = 0.1}'


@pytest.mark.parametrize("task", TASKS)
def test_every_default_spec_is_complete_and_survives_writing(task: str, tmp_path) -> None:
    for algorithm in ALGORITHMS:
        spec = resolve({"task": task, "algorithm": algorithm})
        assert resolve(tomllib.loads(spec.to_toml())) == spec
        algorithm_of(spec)
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    assert read_spec(tmp_path / "spec.toml") == spec


@pytest.mark.parametrize(("task", "data"), PRESETS)
def test_presets_name_fields_that_exist(task: str, data: str | None) -> None:
    preset = PRESETS[task, data]
    for algorithm in {*preset.algorithms, "simfbo"}:
        known = {field.name for field in dataclasses.fields(ALGORITHMS[algorithm])}
        shared = {name: value for name, value in preset.shared.items() if name in known}
        fields = {**shared, **preset.algorithms.get(algorithm, {})}
        chosen = {"name": algorithm, **fields}
        resolve({"task": {"name": task, **preset.task}, "algorithm": chosen, "run": preset.of_run(algorithm)})
    assert merged({}, *(shared_by(cls, preset.shared) for cls in ALGORITHMS.values())) == preset.shared
    for network, fields in preset.networks.items():
        resolve({"task": {"name": task, "network": network, **fields}})
    assert preset.networks.keys() <= WITH_LINEAR.keys()
    for algorithm, fields in preset.asynchronous.items():
        resolve({"task": task, "algorithm": algorithm, "asynchronous": fields})


def test_presets_name_tasks_methods_and_groups_that_exist() -> None:
    assert {*METHODS.values(), *RUNS} | {name for names in GROUPS.values() for name in names} <= ALGORITHMS.keys()
    assert {*METHODS} | {task for task, _ in PRESETS} <= {*TASKS}
    assert not GROUPS.keys() & ALGORITHMS.keys()


def test_in_presets_a_methods_own_fields_count_before_those_of_its_smallest_group() -> None:
    """In presets, fields of a method take precedence over fields of its groups, and small groups over large ones."""
    few_shot = PRESETS["few_shot", None].algorithms
    steps = {name: few_shot[name]["hypergradient"]["solver"]["step"] for name in ("fednest", "rabo")}
    assert steps == {"fednest": 6.0, "rabo": 0.6}
    assert PRESETS["hyper_cleaning", "mnist"].algorithms["fednest"]["outer_lr"] == 30_000
    assert PRESETS["portfolio", None] == PRESETS["compositional", None]


def test_a_task_may_have_its_own_method_and_a_method_a_single_client() -> None:
    """Some tasks have another default method than SimFBO, and some methods run with a single client by default."""
    assert resolve({"task": "selection"}).algorithm.name == configure(task="location").algorithm.name == "fism"
    assert resolve({"task": "quadratic"}).algorithm.name == "simfbo"
    assert configure(task="location", algorithm="irg").algorithm.name == "irg"
    assert resolve({"task": "selection", "algorithm": "irig"}).run.pooled
    assert not resolve({"task": "selection", "algorithm": "fism"}).run.pooled
    assert not configure(task="location", algorithm="irig", settings=["run.pooled=false"]).run.pooled


def test_settings_reach_their_fields() -> None:
    spec = configure(
        settings=[
            "local_steps=10",
            "clients.local_steps={low = 1, high = 4}",
            "clients=50",
            "server_lr.x=0.05",
            f"client_lr={{x = {COSINE}, y = 0.2, v = 0.3}}",
            "local_optimizer={name = 'momentum', decay = 0.5}",
            "server_optimizer=adam",
            "rounds=7",
            "chunk=4",
            "batch_size=none",
            "radius=inf",
        ]
    )
    assert spec.algorithm.fields["local_steps"] == 10
    assert spec.clients["local_steps"] == {"low": 1, "high": 4}
    assert spec.task.fields["clients"] == 50
    assert spec.algorithm.fields["server_lr"] == {"x": 0.05, "y": 0.1, "v": 0.1}
    assert spec.algorithm.fields["server_optimizer"] == {"name": "adam"}
    assert (spec.run.rounds, spec.engine.chunk) == (7, 4)
    assert spec.algorithm.fields["batch_size"] is None
    assert spec.algorithm.fields["radius"] == math.inf
    assert resolve(tomllib.loads(spec.to_toml())) == spec

    made = algorithm_of(spec)
    expected = optax.cosine_decay_schedule(0.1, 500, 0.1)(100)
    np.testing.assert_allclose(at(made, 100).client_lr.x, expected, rtol=1e-6)
    assert made.client_lr[1:] == (0.2, 0.3)
    assert made.local_optimizer == Momentum(decay=0.5)
    assert made.server_optimizer is optimizer("adam")
    assert "server_optimizer=optax.adam(1.0)" in repr(made)
    assert repr(optimizer("sgd", momentum=0.9)) == "optax.sgd(1.0, momentum=0.9)"


def test_names_decide_the_presets_wherever_they_are_given() -> None:
    """The names of task and data choose the presets, in whichever form they are given, and given fields stay."""
    assert configure(data="mnist") == configure(settings=["data=mnist"]) == configure(settings=["task.data=mnist"])
    assert configure(data="mnist").task.fields["clients"] == 100
    assert configure({"task": {"clients": 30}}, data="mnist").task.fields["clients"] == 30


def test_the_rounds_of_a_schedule_may_be_keys_of_a_table() -> None:
    steps = "{schedule = 'piecewise_constant_schedule', init_value = 0.4, boundaries_and_scales = {10 = 0.5, 20 = 0.1}}"
    spec = configure(settings=[f"server_lr.x={steps}"])
    assert resolve(tomllib.loads(spec.to_toml())) == spec
    assert [float(at(algorithm_of(spec), t).server_lr.x) for t in (0, 15, 25)] == pytest.approx([0.4, 0.2, 0.02])


def test_server_optimizers_are_optaxs_with_learning_rate_one() -> None:
    made = algorithm_of(configure(settings=["server_optimizer={name = 'yogi', b1 = 0.5}"])).server_optimizer
    g = np.array([1.0, -2.0])
    got, want = (one.update(g, one.init(g), g)[0] for one in (made, optax.yogi(1.0, b1=0.5)))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (["server_lr=0.2", "server_lr.x=0.1"], {"x": 0.1, "y": 0.2, "v": 0.2}),
        (["server_lr=0.2", "server_lr={x = 0.1}", "server_lr.v=0.3"], {"x": 0.1, "y": 0.2, "v": 0.3}),
        (["server_lr.x=0.1", "server_lr=0.2"], {"x": 0.2, "y": 0.2, "v": 0.2}),
    ],
)
def test_step_sizes_are_set_together_and_then_one_by_one(settings: list[str], wanted: dict) -> None:
    assert configure(resolve({}).tables(), settings=settings).algorithm.fields["server_lr"] == wanted


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["local_stesp=3"], ["'local_stesp'", "'local_steps'"]),
        (["algoritm.local_steps=3"], ["'algoritm'"]),
        (["seed=3"], ["task.seed or run.seed"]),
        (["local_steps"], ["field=value"]),
        (["local_steps=many"], ["algorithm.local_steps", "'many'", "a positive integer"]),
        (["local_steps=true"], ["algorithm.local_steps", "True"]),
        (["local_steps.x=2"], ["algorithm.local_steps = {'x': 2", "a positive integer"]),
        (["client_lr.z=2"], ["'z'", "algorithm.client_lr"]),
        (["client_lr.x=fast"], ["algorithm.client_lr.x", "'fast'", "positive number"]),
        (["server_lr=0"], ["algorithm.server_lr.x", "0", "positive number"]),
        (["client_lr.x={schedule = 'linear_schedul', steps = 5}"], ["client_lr.x: ", "'linear_schedule'"]),
        (["client_lr.x={schedule = 'cosine_decay_schedule', init_value = 0.1}"], ["client_lr.x: ", "'decay_steps'"]),
        (
            ["client_lr.x={schedule = 'linear_schedule', init_valu = 1}"],
            [
                "algorithm.client_lr.x: ",
                "'init_valu' of linear_schedule",
                "'init_value'",
                "transition_steps",
            ],
        ),
        (["client_lr.x={schedule = 'constant_schedule', value = nan}"], ["client_lr.x: value at round 0 = nan"]),
        (
            ["client_lr.x={schedule = 'constant_schedule', value = 'x'}"],
            ["client_lr.x: value of constant_schedule = 'x'"],
        ),
        (["client_lr.x={schedule = 'inject_hyperparams'}"], ["'inject_hyperparams' of Optax", "constant_schedule"]),
        (["client_lr.x={schedule = 3}"], ["algorithm.client_lr.x.schedule = 3", "a name of Optax"]),
        (["local_optimizer=momentun"], ["'momentum'"]),
        (["server_optimizer=adamm"], ["'adam'"]),
        (["server_optimizer=3"], ["algorithm.server_optimizer = 3", "a name of Optax"]),
        (["server_optimizer={name = 'adam', b = 1}"], ["algorithm.server_optimizer: ", "'b' of adam", "'b2'"]),
        (["server_optimizer={name = 'adam', learning_rate = 0.1}"], ["'learning_rate'", "b1, b2"]),
        (
            ["server_optimizer={name = 'adam', b1 = 'x'}"],
            ["algorithm.server_optimizer: b1 of adam = 'x' ", "number"],
        ),
        (["server_optimizer={name = 'adam', b1 = 7}"], ["b1 of adam = 7 ", "a number from 0 to below 1"]),
        (["server_optimizer={name = 'adam', eps = nan}"], ["eps of adam = nan ", "a finite number"]),
        (["server_optimizer={name = 'adam', b1 = nan}"], ["b1 of adam = nan ", "a finite number"]),
        (["server_optimizer={name = 'sgd', momentum = true}"], ["momentum of sgd = True ", "number"]),
        (["server_optimizer={name = 'adam', mu_dtype = 'x'}"], ["mu_dtype of adam = 'x' ", "one of bfloat16, "]),
        (
            ["server_optimizer={name = 'adam', b1 = {schedule = 'constant_schedule', value = 0.5}}"],
            ["algorithm.server_optimizer: b1 of adam = {'schedule'", "takes no schedules"],
        ),
        (
            ["client_lr.x={schedule='piecewise_constant_schedule', init_value=1, boundaries_and_scales={5='x'}}"],
            ["boundaries_and_scales of piecewise_constant_schedule = {5: 'x'} ", "numbers by round"],
        ),
        (["server_optimizer={name = 'adam', nesterov = 'no'}"], ["nesterov of adam = 'no' ", "true or false"]),
        (
            ["server_lr.x={schedule = 'linear_schedule', init_value = 1, end_value = 0, transition_steps = 1.5}"],
            ["algorithm.server_lr.x: transition_steps of linear_schedule = 1.5 ", "whole number"],
        ),
        (["server_optimizer=chain"], ["optimizer 'chain' of Optax"]),
        (["hidden=64"], ["task.hidden = 64", "Sequence[int]"]),
        (["hidden=[a]"], ["not a TOML value"]),
        (["task.data=3"], ["task.data = 3", "str"]),
        (["ridge=nan"], ["task.ridge"]),
        (["run.eval_every=0"], ["run.eval_every = 0", "positive"]),
    ],
)
def test_a_wrong_setting_is_explained(settings: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        configure(resolve({}).tables(), settings=settings)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_spec_says_which_version_wrote_it_and_its_mistakes_are_blamed_on_that(tmp_path) -> None:
    """A spec names the version that wrote it, and an error in the spec mentions this version if it is another one.

    Each of several mistakes in a file has its own fields and names the file.
    """
    spec, file = resolve({"task": "quadratic"}), tmp_path / "spec.toml"
    assert tomllib.loads(spec.to_toml())["fedbilevel"] == fedbilevel.__version__
    assert resolve(tomllib.loads(spec.to_toml())) == spec
    file.write_text(spec.to_toml().replace(f'"{fedbilevel.__version__}"', '"9.1"') + "\n[weather]\nrain = 1\n")
    version = f"it was written by fedbilevel 9.1, and this is {fedbilevel.__version__}"
    with refuses("section of a spec", "weather", where=f"{file} ({version})"):
        read_spec(file)
    file.write_text('task = "quadratic"\n[run]\nrounds = 0\nroundz = 1\n')
    with pytest.raises(ConfigurationError) as error:
        read_spec(file)
    found = [(one.where, one.path, one.got, one.near) for one in error.value.wrong]
    assert found == [(str(file), "run.rounds", 0, ""), (str(file), "field of run", "roundz", "rounds")]
    assert [line.partition(": ")[0] for line in str(error.value).splitlines()] == [str(file)] * 2


def test_values_survive_being_written_as_toml() -> None:
    text = 'a "b" \\ \n é \x7f'
    for value in (3, -0.5, 1e-8, 1e300, math.inf, True, text, [1, [2.0, "x"]], {"a b": {"c": 1}}, [], {}):
        assert tomllib.loads(toml.dumps({"section": {"field": value}}))["section"]["field"] == value


def test_clients_have_numbers_of_their_own() -> None:
    """A spec has clients' own numbers and capacities, and all mistakes in them are reported together."""
    settings = ["task.clients=3", "clients.outer_steps=[1, 2, 3]", "clients.local_steps={low = 1, high = 4}"]
    settings += ["task.units=4", "capacity=[1, 0.5, 0.25]"]
    spec = configure({"task": "quadratic", "algorithm": "fednest"}, settings=settings)
    again = resolve(tomllib.loads(spec.to_toml()))
    said = {"outer_steps": [1, 2, 3], "local_steps": {"low": 1, "high": 4}, "capacity": [1, 0.5, 0.25]}
    assert again.clients == spec.clients == said
    clients = task_of(again).clients
    assert clients.capacity.tolist() == [1, 0.5, 0.25]
    own = clients.own
    assert [str(own[name]) for name in ("outer_steps", "local_steps")] == [
        "1 to 3, one for each client",
        "1 to 4, drawn for each client and round",
    ]
    wrong = {"client_lr": {"z": 1, "x": -1.0}, "outer_steps": 2, "local_steps": [1, 0, 1], "capacity": [1, 0]}
    with pytest.raises(ConfigurationError) as refused:
        resolve({"task": "quadratic", "algorithm": "simfbo", "clients": wrong, "run": {"rounds": 0}})
    assert [mistake.got for mistake in refused.value.wrong] == [0, [1, 0], "client_lr.z", -1.0, "outer_steps", 0]
    assert task_of(spec.replace(clients={"capacity": "none"})).clients.capacity is None


def test_mistakes_of_all_sections_are_said_at_once() -> None:
    parts = {"inner": {"lr": 0, "round": 3}, "hypergradient": {"solver": {"name": "cgg"}}}
    tables = {"task": {"clients": "many", "cliens": 3}, "run": {"rounds": 0, "cohrt": 3}}
    tables["algorithm"] = {"name": "fednest", "outer_lr": -1, **parts}
    with pytest.raises(ConfigurationError) as caught:
        resolve(tables)
    assert {(one.path, one.got, one.near) for one in caught.value.wrong} == {
        ("field of task", "cliens", "clients"),
        ("task.clients", "many", ""),
        ("algorithm.outer_lr", -1, ""),
        ("algorithm.inner.lr", 0, ""),
        ("field of algorithm.inner", "round", "rounds"),
        ("part for algorithm.hypergradient.solver", "cgg", "cg"),
        ("run.rounds", 0, ""),
        ("field of run", "cohrt", "cohort"),
    }
    assert all(one.allowed for one in caught.value.wrong)
    assert str(caught.value).splitlines() == [str(one) for one in caught.value.wrong]


@pytest.mark.parametrize(
    ("tables", "paths"),
    [
        ({"algorithm": {"server_lr": {"x": "a", "y": -1}}}, ["algorithm.server_lr.x", "algorithm.server_lr.y"]),
        ({"algorithm": {"server_lr": {"z": 1, "q": 1}}}, ["part of algorithm.server_lr"] * 2),
        ({"algorithm": {"server_lr": 0}}, ["algorithm.server_lr.x"]),
        (
            {"run": {"rounds": 3, "bytes": 10}, "clock": {"spread": -1}, "asynchronous": {"max_staleness": 2}},
            ["asynchronous.max_staleness", "", "Clock.spread"],
        ),
        ({"run": 3, "clock": {"sped": 3}, "tasks": {}}, ["run", "section of a spec", "field of clock"]),
    ],
)
def test_mistakes_of_step_sizes_and_rules_of_several_fields_are_said_at_once(tables, paths) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(tables)
    assert [one.path for one in caught.value.wrong] == paths


def test_a_misspelt_section_or_name_hides_no_other_mistake() -> None:
    wrong = {"engne": {}, "run": {"rounds": 0}, "task": 3, "algorithm": {"client_lr": 0}}
    for make in (resolve, configure):
        with pytest.raises(ConfigurationError) as caught:
            make(wrong)
        paths = [one.path for one in caught.value.wrong]
        assert paths[:3] == ["section of a spec", "task", "algorithm.client_lr.x"]
        assert paths[-1] == "run.rounds"
    with pytest.raises(ConfigurationError) as caught:
        resolve({"engne": {}, "task": "quadratik", "algorithm": "simfob"})
    assert [one.got for one in caught.value.wrong] == ["engne", "quadratik", "simfob"]
    with pytest.raises(ConfigurationError) as caught:
        configure(settings=["local_stesp=3", "clinets=2", "rounds=0"])
    assert [one.got for one in caught.value.wrong] == ["local_stesp", "clinets", 0]
    assert [one.near for one in caught.value.wrong] == ["local_steps", "clients", ""]


def test_a_file_that_cannot_be_loaded_is_said_once(tmp_path) -> None:
    for name in ("none.py:task", "none.py"):
        with pytest.raises(ConfigurationError) as caught:
            configure(task=str(tmp_path / name), settings=["rounds=5", "clients=3"])
        assert len(caught.value.wrong) == 1


def test_settings_may_be_values_of_python() -> None:
    values = {"server_lr.x": 0.05, "clients": 7, "rounds": 9}
    assert configure(values=values) == configure(settings=["server_lr.x=0.05", "clients=7", "rounds=9"])
    assert resolve({"algorithm": {"client_lr": XYV(1, 2, 3)}}).algorithm.fields["client_lr"] == {"x": 1, "y": 2, "v": 3}
    with refuses("run.rounds", "x"):
        resolve({}).replace(run={"rounds": "x"})


def test_the_field_of_a_part_is_not_taken_for_that_of_a_task() -> None:
    """A setting means a field of a section rather than of a part, and if several places fit, an error lists them."""
    assert configure(task="quadratic", algorithm="fednest", settings=["rounds=9"]).run.rounds == 9
    with refuses("setting", "local_steps", "inner.local_steps or clients.local_steps"):
        configure(task="quadratic", algorithm="fednest", settings=["local_steps=9"])


def test_a_class_may_have_an_optimizer_without_a_name(monkeypatch) -> None:
    """A method may have a default optimizer for which there is no name, and a spec then calls it "default"."""

    class Mine(ALGORITHMS["simfbo"]):
        server_optimizer: optax.GradientTransformation = static(default=optax.adam(0.5))

    monkeypatch.setitem(ALGORITHMS, "mine", Mine)
    spec = resolve({"task": "quadratic", "algorithm": "mine"})
    assert spec.algorithm.fields["server_optimizer"] == {"name": "default"}
    assert resolve(tomllib.loads(spec.to_toml())) == spec
    assert algorithm_of(spec).server_optimizer is Mine().server_optimizer


@pytest.mark.parametrize("bounds", [[-3, -4], [], [1], [1, 2, 3], "low", {"penalty": [2, 1]}, [0, None]])
def test_bounds_of_x_that_are_none_are_refused(bounds):
    """Values of `x_bounds` that are not bounds are refused."""
    with refuses("run.x_bounds.penalty" if isinstance(bounds, dict) else "run.x_bounds"):
        resolve({"run": {"x_bounds": bounds}})


def test_x_stays_between_the_bounds_of_a_spec():
    """x stays between the bounds that a spec sets.

    With these presets, x starts at log(0.01) = −4.605, and the first steps move some entries down, to the lower bound.
    """
    spec = resolve({"task": "regularization", "run": {"rounds": 3, "x_bounds": [-4.61, -4.6]}})
    made = build(spec)
    x = made.solve(spec.run, rounds=3).x
    assert np.min(x) == -4.61
    assert np.max(x) <= -4.6
    with refuses("part of x in run.x_bounds", "penalty", "[]"):
        build(spec.replace(run={"x_bounds": {"penalty": [-5, -4]}}))


def test_words_of_python_are_read_where_no_text_is_allowed():
    """None, True and False are read as in Python, but a field for texts, such as the name of a column, keeps them."""
    settings = ["algorithm.batch_size=None", "algorithm.joint=True", "algorithm.inner.rounds=1"]
    spec = configure(task="quadratic", algorithm="lfednest", settings=settings)
    assert (spec.algorithm.fields["batch_size"], spec.algorithm.fields["joint"]) == (None, True)
    spec = configure(task="tables", algorithm="simfbo", settings=["task.positive=True", "task.target=None"])
    assert (spec.task.fields["positive"], spec.task.fields["target"]) == ("True", "None")
    with refuses("algorithm.batch_size", True, "positive integer or None"):
        configure(task="quadratic", algorithm="lfednest", settings=["algorithm.batch_size=True"])
