"""Can parts, which are fields of algorithms with fields of their own, be set in specs and on the command line?"""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

import fedbilevel as fb
from fedbilevel.core.algorithm import ALGORITHMS
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.tables import merged
from fedbilevel.experiments import configure, presets, resolve
from fedbilevel.experiments.presets import Preset
from fedbilevel.experiments.runner import algorithm_of
from fedbilevel.parts import CG, Implicit, LocalImplicit, Neumann
from refusals import refuses


class _Nested(fb.FedNest):
    hypergradient: Implicit | LocalImplicit = Implicit(solver=Neumann(terms=7))
    extra: CG | None = None


NEUMANN = {"name": "neumann", "terms": 20, "step": None, "sampling": None}
FIRST = {**NEUMANN, "terms": 7}
KRYLOV = {"name": "cg", "max_steps": CG().max_steps, "tolerance": CG().tolerance}


@pytest.fixture(autouse=True)
def nested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "nested", _Nested)
    monkeypatch.setitem(presets.PRESETS, ("quadratic", None), Preset())


def spec_of(*settings: str, **fields: Any) -> Any:
    return configure({"task": "quadratic", "algorithm": {"name": "nested", **fields}}, settings=settings)


def solver_of(*settings: str, **fields: Any) -> Any:
    return spec_of(*settings, **fields).algorithm.fields["hypergradient"]["solver"]


def test_a_spec_of_parts_is_complete_and_survives_writing() -> None:
    spec = spec_of()
    assert spec.algorithm.fields["hypergradient"]["solver"] == FIRST
    assert spec.algorithm.fields["extra"] is None
    assert algorithm_of(spec) == _Nested()
    text = spec.to_toml()
    assert '\n[algorithm.hypergradient.solver]\nname = "neumann"\nterms = 7\nstep = "none"\nsampling = "none"\n' in text
    assert resolve(tomllib.loads(text)) == spec


@pytest.mark.parametrize(
    ("settings", "solver"),
    [
        (["hypergradient.solver.terms=30"], {**FIRST, "terms": 30}),
        (["algorithm.hypergradient.solver.step=0.2"], {**FIRST, "step": 0.2}),
        (["hypergradient.solver=neumann"], NEUMANN),  # the default of Neumann, and not of the method
        (["hypergradient.solver=cg"], KRYLOV),
        (["hypergradient.solver.name=cg"], KRYLOV),
        (["hypergradient.solver=cg", "hypergradient.solver.max_steps=9"], {**KRYLOV, "max_steps": 9}),
        (["hypergradient={solver = {terms = 3}}"], {**FIRST, "terms": 3}),
        (["hypergradient.solver={name = 'cg', max_steps = 2}"], {**KRYLOV, "max_steps": 2}),
        (["hypergradient=local", "hypergradient=implicit"], NEUMANN),
    ],
)
def test_settings_reach_parts(settings: list[str], solver: dict[str, Any]) -> None:
    assert solver_of(*settings) == solver


def test_an_accepted_part_is_built() -> None:
    schedule = "inner.lr={schedule = 'linear_schedule', init_value = 1.0, end_value = 0.0, transition_steps = 10}"
    made: Any = algorithm_of(spec_of("hypergradient.solver=cg", "extra=cg", "extra.max_steps=2", schedule))
    assert made.hypergradient == Implicit(solver=CG())
    assert made.extra == CG(max_steps=2)
    assert float(at(made, 5).inner.lr) == 0.5  # half-way from 1 to 0
    assert spec_of("extra=cg", "extra=none").algorithm.fields["extra"] is None


def test_a_table_without_a_name_changes_the_default_and_an_instance_is_a_table() -> None:
    """A table without the name of a part changes the default part, and an instance of a part counts as its table."""
    assert solver_of(hypergradient={"solver": {"terms": 2}}) == {**FIRST, "terms": 2}
    assert solver_of(hypergradient=Implicit(solver=Neumann(terms=4))) == {**FIRST, "terms": 4}


def test_settings_leave_the_spec_as_it_was() -> None:
    spec = spec_of()
    before = spec.to_toml()
    configure(spec.tables(), settings=["hypergradient.solver.terms=30", "outer_lr=0.9"])
    assert spec.to_toml() == before


def test_presets_give_parts_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset may set fields of a part. Given fields take precedence, and a part given by name has its defaults."""
    shared = {"hypergradient": {"solver": {"step": 0.3}}}
    own = {"nested": {"hypergradient": {"solver": {"terms": 50}}}}
    monkeypatch.setitem(presets.PRESETS, ("quadratic", None), Preset(shared=shared, algorithms=own))
    assert solver_of() == {**NEUMANN, "terms": 50, "step": 0.3}
    assert solver_of(hypergradient={"solver": {"terms": 2}}) == {**NEUMANN, "terms": 2, "step": 0.3}
    assert solver_of("hypergradient.solver=neumann") == NEUMANN


def test_a_preset_with_a_name_replaces_one_that_it_is_merged_with() -> None:
    """When presets are merged, a table with a name or a schedule replaces the earlier one. Other tables change it."""
    first = {"solver": {"name": "cg", "tolerance": 1.0}, "rate": {"x": 1, "y": 2}}
    assert merged(first, {"solver": {"name": "neumann"}}) == {"solver": {"name": "neumann"}, "rate": {"x": 1, "y": 2}}
    assert merged(first, {"rate": {"y": 3}})["rate"] == {"x": 1, "y": 3}
    assert merged(first, {"rate": {"schedule": "linear"}})["rate"] == {"schedule": "linear"}


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("hypergradient.solver=neuman", ("part for algorithm.hypergradient.solver", "neuman", "", "neumann")),
        ("hypergradient.solvr=cg", ("field of algorithm.hypergradient", "solvr", "", "solver")),
        ("hypergradient.solver.term=3", ("field of algorithm.hypergradient.solver", "term", "", "terms")),
        ("hypergradient.solver.terms=x", ("algorithm.hypergradient.solver.terms", "x")),
        ("hypergradient.solver.terms.x=3", ("algorithm.hypergradient.solver.terms", {"x": 3})),
        ("hypergradient.solver.max_steps=3", ("field of algorithm.hypergradient.solver", "max_steps", "", "step")),
        ("hypergradient.solver=3", ("algorithm.hypergradient.solver", 3, "{name")),
        ("hypergradient=none", ("part for algorithm.hypergradient", "none")),
        ("extra.terms=3", ("algorithm.extra.name", None, "cg")),
        ("hypergradiant=local", ("field", "hypergradiant", "", "hypergradient")),
    ],
)
def test_what_no_part_is_or_has_is_refused_by_its_path(setting: str, refusal: tuple) -> None:
    """An unknown part, an unknown field of a part, and a wrong value are refused with the path of the field."""
    with refuses(*refusal) as error:
        spec_of(setting)
    assert "\n" not in str(error.value)


def test_steps_that_adapt_are_none_in_a_spec() -> None:
    """A step size that adapts is "none" in a spec, and a method whose steps cannot adapt refuses it."""
    settings = ["server_lr=none", "client_lr=0.1", "client_lr.y=none"]
    method = algorithm_of(configure(task="quadratic", algorithm="simfbo", settings=settings))
    assert method.server_lr == (None, None, None)
    assert method.client_lr == (0.1, None, 0.1)
    with refuses("algorithm.server_lr", None):
        configure(task="quadratic", algorithm="adbo", settings=["server_lr=none"])
