"""Is what version 0.1 called by another name refused with the name of today?

The lists are those of version 0.1: what its public modules handed out, the fields of its methods, its attributes.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel import authoring, experiments
from fedbilevel.core import renames
from fedbilevel.engines.history import History
from fedbilevel.experiments import configure, resolve
from fedbilevel.tasks import Task

NAMES = """ALGORITHMS AbsenceWarning CapacityWarning CheckpointError CheckpointWarning Client ConfigurationError
Diagnosis ExchangeError Fed FedbilevelError History HypergradientReport InfluenceWarning Ledger Momentum NonFiniteError
NumericalError NumericalWarning Plain Proximal Public Reply Withheld algorithm fraction load_result phase positive
static steps"""
SOLVER = "cg_iterations cg_tolerance inverse neumann_step neumann_terms"
NESTED = f"{SOLVER} fresh_cohorts inner_lr inner_rounds inner_server_lr local_steps paired"
PLANES = "consensus_damping consensus_lr consensus_penalty consensus_steps plane_damping planes tolerance"
UNITS = "fixed min_coverage policy pruned"
FIELDS = {
    "adbo": f"{PLANES} first",
    "sdbo": PLANES,
    "afbo": f"{NESTED} merged client_lr delay_penalty first max_staleness own_x system_lr",
    "aggitd": "inner_lr inner_rounds inverse local_steps",
    "bi-fista": "lr_decay",
    "fedavg": UNITS,
    "fedlin": UNITS,
    **dict.fromkeys(("fedmbo", "fednest", "fednest-sgd"), NESTED),
    "lfednest": f"{NESTED} merged",
    "fism": "first max_staleness",
    "irig": "first max_staleness refresh",
    "rabo": f"{NESTED} merged {UNITS}",
    "rafbo": f"{NESTED} merged {UNITS} coordinates estimator perturbation",
    **dict.fromkeys(("simfbo", "shrofbo"), f"{UNITS} coefficients first max_staleness own_x"),
}
SAME = {*UNITS.split(), "delay_penalty", "max_staleness"}
"""Fields that settings without a section still name, in [submodels] or [asynchronous]."""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_public_name(name: str) -> None:
    now = r": (it is now )?(a method is .*)?fedbilevel\.\w+\."
    with pytest.raises(AttributeError, match=now):
        getattr(fb, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'fedbilevel'{now}") as refused:
        exec(f"from fedbilevel import {name}")
    assert refused.type is ImportError, "no module is missing"


@pytest.mark.parametrize(
    ("statement", "now"),
    [
        ("from fedbilevel.authoring import steps", r"fedbilevel\.authoring\.step_sizes"),
        ("from fedbilevel.experiments import Parts", r"fedbilevel\.experiments\.Experiment"),
        ("from fedbilevel.engines import hosts", r"fedbilevel\.engines\.multihost"),
        ("import fedbilevel.engines.ledger", r"fedbilevel\.authoring\.Ledger"),
        ("from fedbilevel.flower.accounting import Spent", "PrivacyAccount for Spent"),
    ],
)
def test_an_import(statement: str, now: str) -> None:
    with pytest.raises(ImportError, match=f"it is now .*{now}"):
        exec(statement)


@pytest.mark.parametrize("module", renames.MODULES)
def test_a_module_that_is_used_by_its_path(module: str) -> None:
    room, _, name = module.rpartition(".")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': it is now {renames.MODULES[module]}"):
        getattr(importlib.import_module(f"fedbilevel.{room}"), name)


def test_a_module_that_is_run() -> None:
    command = [sys.executable, "-m", "fedbilevel.flower.supernode"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert "it is now fedbilevel.flower.launch.supernode" in shown.stderr


def test_what_stands_for_a_module_is_there() -> None:
    for said in renames.MODULES.values():
        place, _, name = said.partition(",")[0].rpartition(".")
        assert hasattr(importlib.import_module(place), name) or importlib.util.find_spec(f"{place}.{name}")


@pytest.mark.parametrize("method", FIELDS)
def test_a_field_of_a_method(method: str) -> None:
    cls = authoring.ALGORITHMS[method]
    for field in FIELDS[method].split():
        with pytest.raises(fb.errors.ConfigurationError, match=f"'{field}': it is now .+"):
            cls(**{field: 1})
        for name in (f"algorithm.{field}", *({field} - SAME)):
            with pytest.raises(
                fb.errors.ConfigurationError, match=rf"'{field}'(: it is now| is no field of {method} now)"
            ):
                configure(task="quadratic", algorithm=method, settings=[f"{name}=1"])


@pytest.mark.parametrize("method", FIELDS)
def test_all_fields_of_a_method_at_once(method: str) -> None:
    """One line for each, so that a spec of version 0.1 is changed in one go."""
    old = dict.fromkeys(FIELDS[method].split(), 1)
    with pytest.raises(fb.errors.ConfigurationError) as in_python:
        authoring.ALGORITHMS[method](**old)
    with pytest.raises(fb.errors.ConfigurationError) as in_a_spec:
        resolve({"task": "quadratic", "algorithm": {"name": method, **old}})
    for refused in (in_python, in_a_spec):
        lines = str(refused.value).splitlines()
        assert all(f"'{name}': it is now " in line for name, line in zip(old, lines, strict=True))


@pytest.mark.parametrize(
    ("method", "field", "now"),
    [
        ("simfbo", "first", "wait_for, of the wrapper Asynchronous"),
        ("adbo", "first", "wait_for$"),
        ("fednest", "inverse", "the part hypergradient.solver"),
        ("aggitd", "inverse", "sampling, "),
    ],
)
def test_a_field_with_another_name_in_each_class(method: str, field: str, now: str) -> None:
    with pytest.raises(fb.errors.ConfigurationError, match=f"'{field}': it is now {now}"):
        authoring.ALGORITHMS[method](**{field: 1})


@pytest.mark.parametrize(
    ("method", "value", "now"),
    [("fednest", "global", "implicit"), ("afbo", "global", "steps"), ("rafbo", "coordinate", "coordinates")],
)
def test_the_value_of_a_field(method: str, value: str, now: str) -> None:
    with pytest.raises(fb.errors.ConfigurationError, match=f"'{value}': it is now .*{now}"):
        configure(task="quadratic", algorithm=method, settings=[f"hypergradient={value}"])
    with pytest.raises(fb.errors.ConfigurationError, match=r"\(…\) or "):
        authoring.ALGORITHMS[method](hypergradient=value)
    with pytest.raises(fb.errors.ConfigurationError, match=f"(?s)'inner_lr': it is now .*'{value}': it is now .*{now}"):
        resolve({"task": "quadratic", "algorithm": {"name": method, "hypergradient": value, "inner_lr": 1}})


def test_a_value_that_other_methods_still_have() -> None:
    with pytest.raises(
        fb.errors.ConfigurationError, match=r"'local'.*allowed: coordinates, local-differences, printed"
    ):
        configure(task="quadratic", algorithm="rafbo", settings=["hypergradient=local"])


def test_arguments_and_attributes() -> None:
    for call, fields in (
        (authoring.Reply, {"update": 0, "products": 1}),
        (Task, {"split_x": True}),
        (experiments.run, {"spec": None, "parts": None}),
    ):
        with pytest.raises(TypeError, match=r"\w+ is now .+"):
            call(**fields)
    history = History([{"round": 0, "hvps": 1}])
    for column, now in (("products", "hvps"), ("inner_delay", r"delay\.inner_gradients")):
        with pytest.raises(fb.errors.ConfigurationError, match=f"'{column}': it is now {now}"):
            _ = history[column]
    for thing, name in ((authoring.Reply(0), "products"), (authoring.Ledger(), "products_per_client")):
        with pytest.raises(AttributeError, match="it is now hvps"):
            getattr(thing, name)
    assert authoring.Reply(0)._replace(hvps=2) == authoring.Reply(update=0, hvps=2)


def test_a_default_without_its_name() -> None:
    for make, given in itertools.product((authoring.positive, authoring.fraction, authoring.static), (0.1,)):
        with pytest.raises(fb.errors.ConfigurationError, match=rf"write {make.__name__}\(default=0\.1\)"):
            make(given)
    with pytest.raises(fb.errors.ConfigurationError, match=r"step_sizes\(default=XYV"):
        authoring.step_sizes(0.1, 0.2, 0.3)


@pytest.mark.parametrize(("hook", "now"), renames.HOOKS.items())
def test_a_hook(hook: str, now: str) -> None:
    with pytest.raises(fb.errors.ConfigurationError, match=f"Mine.{hook}: it is now {now}"):
        type("Mine", (fb.SimFBO,), {hook: property(lambda self: 1)})


def rows() -> list[tuple[str, str]]:
    """The migration table of the changelog: (before, now)."""
    text = (Path(__file__).resolve().parent.parent / "CHANGELOG.md").read_text("utf-8")
    table = text.partition("\n| before | now |\n")[2].partition("\n\n")[0]
    return re.findall(r"^\| (.+?) \| (.+) \|$", table, re.MULTILINE)


def dotted(cell: str) -> Iterator[str]:
    """Names below `fedbilevel` in full; after `fedbilevel.a.b`, `.c` is `fedbilevel.a.c`."""
    place = ""
    for found in re.findall(r"\b(?:fb|fedbilevel)(?:\.\w+)+|(?<=`)\.\w+(?=`)", cell):
        name = f"{place}{found}" if found.startswith(".") else re.sub(r"^fb\b", "fedbilevel", found)
        place = name.rpartition(".")[0]
        yield name


def called(cell: str) -> Iterator[tuple[type, str]]:
    """(class, field) of calls in which no other call stands."""
    for name, arguments in re.findall(r"\b(\w+)\(([^()]*)\)", cell):
        cls = getattr(fb, name, None) or getattr(fb.parts, name, None) if name[0].isupper() else None
        if cls is not None:
            yield from ((cls, field) for field in re.findall(r"(\w+)=", arguments))


@pytest.mark.parametrize(("before", "now"), rows(), ids=[before[:40] for before, _ in rows()])
def test_the_migration_table_is_true(before: str, now: str) -> None:
    names = list(dotted(now))
    for name in names:
        pkgutil.resolve_name(name)
    for cls, field in called(now):
        assert field in inspect.signature(cls).parameters, (cls, field)
    for name in dotted(before):
        with pytest.raises((AttributeError, ImportError)) as refused:
            pkgutil.resolve_name(name)
        assert any(place.rpartition(".")[0] in str(refused.value) for place in names), name
    for cls, field in called(before):
        with pytest.raises(fb.errors.ConfigurationError, match=f"'{field}': it is now "):
            cls(**{field: "old"})


def test_the_migration_table_names_all_that_left_the_top_level() -> None:
    said = {name for before, _ in rows() for name in dotted(before)}
    errors = {name for name in NAMES.split() if hasattr(fb.errors, name)}
    assert {f"fedbilevel.{name}" for name in set(NAMES.split()) - errors - {"Public", "Withheld"}} <= said
