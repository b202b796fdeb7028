"""Fields of algorithms that hold parts: configurations with fields of their own, in specs and on the command line."""

from __future__ import annotations

import tomllib
from typing import Any, ClassVar

import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.algorithm import ALGORITHMS
from fedbilevel.core.config import at, config, counts, positive, static, step_sizes
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.tables import merged
from fedbilevel.experiments import configure, presets, resolve
from fedbilevel.experiments.presets import Preset
from fedbilevel.experiments.runner import algorithm_of


@config
class Krylov:
    kind: ClassVar[str] = "krylov"

    max_steps: int = counts(default=20)
    tolerance: float = positive(default=1e-3)


@config
class Series:
    kind: ClassVar[str] = "series"

    terms: int = counts(default=5)
    sampling: str | None = static(default=None)


@config
class Implicit:
    kind: ClassVar[str] = "implicit"

    solver: Krylov | Series = Krylov(max_steps=7)


@config
class Unrolled:
    kind: ClassVar[str] = "unrolled"


@config
class Descent:
    kind: ClassVar[str] = "descent"

    rounds: int = counts(default=3)
    lr: Any = positive(default=0.5)


class _Nested(authoring.Algorithm):
    inner: Descent = Descent()
    hypergradient: Implicit | Unrolled = Implicit()
    extra: Series | None = None
    outer_lr: fb.XYV = step_sizes(default=fb.XYV(0.1, 0.2, 0.3))

    def init(self, x: Any, y: Any) -> Any:
        return None

    def round(self, fed: Any, state: Any, key: Any) -> Any:
        return state


FIRST = {"name": "krylov", "max_steps": 7, "tolerance": 1e-3}


@pytest.fixture(autouse=True)
def nested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "nested", _Nested)


def spec_of(*settings: str, **fields: Any) -> Any:
    return configure({"task": "quadratic", "algorithm": {"name": "nested", **fields}}, settings=settings)


def solver_of(*settings: str, **fields: Any) -> Any:
    return spec_of(*settings, **fields).algorithm.fields["hypergradient"]["solver"]


def test_a_spec_of_parts_is_complete_and_survives_writing() -> None:
    spec = spec_of()
    assert spec.algorithm.fields == {
        "inner": {"name": "descent", "rounds": 3, "lr": 0.5},
        "hypergradient": {"name": "implicit", "solver": FIRST},
        "extra": None,
        "outer_lr": {"x": 0.1, "y": 0.2, "v": 0.3},
    }
    assert algorithm_of(spec) == _Nested()
    text = spec.to_toml()
    assert '\n[algorithm.hypergradient.solver]\nname = "krylov"\nmax_steps = 7\ntolerance = 0.001\n' in text
    assert resolve(tomllib.loads(text)) == spec


@pytest.mark.parametrize(
    ("settings", "solver"),
    [
        (["hypergradient.solver.max_steps=30"], {**FIRST, "max_steps": 30}),
        (["algorithm.hypergradient.solver.tolerance=0.1"], {**FIRST, "tolerance": 0.1}),
        (["hypergradient.solver=krylov"], {**FIRST, "max_steps": 20}),  # the class's default, not Implicit's
        (["hypergradient.solver=series"], {"name": "series", "terms": 5, "sampling": None}),
        (["hypergradient.solver.name=series"], {"name": "series", "terms": 5, "sampling": None}),
        (
            ["hypergradient.solver=series", "hypergradient.solver.terms=9", "hypergradient.solver.sampling=random"],
            {"name": "series", "terms": 9, "sampling": "random"},
        ),
        (["hypergradient={solver = {max_steps = 3}}"], {**FIRST, "max_steps": 3}),
        (["hypergradient.solver={name = 'series', terms = 2}"], {"name": "series", "terms": 2, "sampling": None}),
        (["hypergradient=unrolled", "hypergradient=implicit"], FIRST),
    ],
)
def test_settings_reach_parts(settings: list[str], solver: dict[str, Any]) -> None:
    assert solver_of(*settings) == solver


def test_an_accepted_part_is_built() -> None:
    schedule = "inner.lr={schedule = 'linear_schedule', init_value = 1.0, end_value = 0.0, transition_steps = 10}"
    spec = spec_of("hypergradient.solver=series", "extra=series", "extra.terms=2", schedule)
    made: Any = algorithm_of(spec)
    assert made.hypergradient == Implicit(solver=Series())
    assert made.extra == Series(terms=2)
    assert float(at(made, 5).inner.lr) == 0.5  # half-way from 1 to 0
    assert spec_of("extra=series", "extra=none").algorithm.fields["extra"] is None


def test_a_table_without_a_name_changes_the_default_and_an_instance_is_a_table() -> None:
    assert solver_of(hypergradient={"solver": {"max_steps": 2}}) == {**FIRST, "max_steps": 2}
    assert solver_of(hypergradient=Implicit(solver=Krylov(max_steps=4))) == {**FIRST, "max_steps": 4}


def test_settings_leave_the_spec_as_it_was() -> None:
    spec = spec_of()
    before = spec.to_toml()
    configure(spec.tables(), settings=["hypergradient.solver.max_steps=30", "outer_lr.x=0.9"])
    assert spec.to_toml() == before


def test_presets_give_parts_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"hypergradient": {"solver": {"tolerance": 1e-6}}, "outer_lr": {"x": 0.01}}
    own = {"nested": {"hypergradient": {"solver": {"max_steps": 50}}}}
    monkeypatch.setitem(presets.PRESETS, ("quadratic", None), Preset(shared=shared, algorithms=own))
    assert solver_of() == {"name": "krylov", "max_steps": 50, "tolerance": 1e-6}
    assert solver_of(hypergradient={"solver": {"max_steps": 2}}) == {**FIRST, "max_steps": 2, "tolerance": 1e-6}
    assert spec_of(outer_lr={"y": 5.0}).algorithm.fields["outer_lr"] == {"x": 0.01, "y": 5.0, "v": 0.3}
    assert solver_of("hypergradient.solver=krylov") == {**FIRST, "max_steps": 20}


def test_a_preset_with_a_name_replaces_one_that_it_is_merged_with() -> None:
    first = {"solver": {"name": "krylov", "tolerance": 1.0}, "rate": {"x": 1, "y": 2}}
    assert merged(first, {"solver": {"name": "series"}}) == {"solver": {"name": "series"}, "rate": {"x": 1, "y": 2}}
    assert merged(first, {"rate": {"y": 3}})["rate"] == {"x": 1, "y": 3}
    assert merged(first, {"rate": {"schedule": "linear"}})["rate"] == {"schedule": "linear"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("hypergradient.solver=krilov", "part for algorithm.hypergradient.solver 'krilov'; did you mean 'krylov'"),
        ("hypergradient.solvr=krylov", "field of algorithm.hypergradient 'solvr'; did you mean 'solver'"),
        ("hypergradient.solver.max_step=3", "algorithm.hypergradient.solver 'max_step'; did you mean 'max_steps'"),
        ("hypergradient.solver.max_steps=x", "algorithm.hypergradient.solver.max_steps = 'x' is not allowed"),
        ("hypergradient.solver.max_steps.x=3", "algorithm.hypergradient.solver.max_steps = {'x': 3"),
        ("hypergradient.solver.terms=3", "field of algorithm.hypergradient.solver 'terms'"),
        ("hypergradient.solver=3", "algorithm.hypergradient.solver = 3 is not allowed: it must be a table like {name"),
        ("hypergradient=none", "unknown part for algorithm.hypergradient 'none'"),
        ("extra.terms=3", "algorithm.extra"),
        ("hypergradiant=unrolled", "did you mean 'hypergradient'"),
    ],
)
def test_what_no_part_is_or_has_is_refused_by_its_path(setting: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        spec_of(setting)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
