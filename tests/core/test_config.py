"""Are hyperparameters checked when they are set, static or traced as declared, and able to follow schedules?"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.afbo import AFBO, MeanGradient
from fedbilevel.algorithms.parts.hypergradients import LocalImplicit
from fedbilevel.algorithms.parts.linear_solvers import Neumann
from fedbilevel.algorithms.parts.local_steps import Momentum, Proximal
from fedbilevel.algorithms.simfbo import SimFBO
from fedbilevel.core.config import Schedule, config, fraction, positive, static, step_sizes
from fedbilevel.core.hyperparameters import at, entries, hyperparameters, replaced
from fedbilevel.core.tree import XYV
from refusals import ANY, refuses


@config
class Example:
    """A class with one field of each kind."""

    count: int = static(default=3)
    lr: XYV = step_sizes(default=XYV(x=0.1, y=0.2, v=0.3))
    radius: float = positive(default=2.0)
    decay: float = fraction(default=0.5)


def test_hyperparameters_are_what_json_holds():
    """`hyperparameters` returns what JSON can hold: numbers and words, and several counts as a list.

    An optax optimizer is a tuple of functions, and is left out.
    """
    each = LocalImplicit(solver=Neumann(terms=np.array([2, 3])))
    several, optimizer = (hyperparameters(one) for one in (AFBO(hypergradient=each), SimFBO()))
    assert several["hypergradient.solver.terms"] == [2, 3]
    assert json.loads(json.dumps([several, optimizer])) == [several, optimizer]
    assert "server_optimizer" not in optimizer


def test_entries_are_those_of_the_fields_in_order_and_of_parts_after_the_part():
    inner = MeanGradient(rounds=2, lr=[0.1, lambda round: 0.2])
    method = fb.Asynchronous(AFBO(inner=inner), wait_for=2)
    found = {entry.path: entry for entry in entries(method)}
    names = ["algorithm", "hypergradient", "solver", "terms"]
    assert list(found)[:4] == [".".join(names[: depth + 1]) for depth in range(4)]
    assert found["algorithm.inner.lr[1]"].holders == (method, method.algorithm, inner)
    assert found["algorithm.inner.lr[1]"].keys == ("algorithm", "inner", "lr", 1)
    assert "inner.lr[1]" in [entry.path for entry in entries(method, unwrapped=True)]
    assert [entry.of for entry in entries(SimFBO()) if entry.field.name == "client_lr"] == ["x", "y", "v"]


def test_a_value_is_replaced_where_its_keys_lead():
    method = fb.Asynchronous(AFBO(inner=MeanGradient(rounds=2, lr=[0.1, 0.2])), wait_for=2)
    changed = replaced(method, ("algorithm", "inner", "lr", 1), 0.5)
    assert (changed.algorithm.inner.lr, method.algorithm.inner.lr) == ((0.1, 0.5), (0.1, 0.2))
    assert replaced(SimFBO(), ("client_lr", "y"), 0.5).client_lr == XYV(None, 0.5, None)


@pytest.mark.parametrize(
    "given",
    [0.7, np.float64(0.7), np.float32(0.7), np.array(0.7), {"x": 0.7, "y": 0.7, "v": 0.7}, XYV(0.7, 0.7, 0.7)],
)
def test_one_number_serves_x_y_and_v(given):
    lr = Example(lr=given).lr
    assert isinstance(lr, XYV)
    assert [float(size) for size in lr] == pytest.approx([0.7] * 3, rel=2.0**-23)


def test_one_swept_number_is_not_taken_for_x_y_and_v_which_have_names():
    sizes = jnp.array([0.1, 0.2, 0.3])
    assert all(np.array_equal(size, sizes) for size in Example(lr=sizes).lr)
    assert Example(lr={"v": 3.0, "x": 1.0, "y": 2.0}, radius=np.inf).lr == XYV(1.0, 2.0, 3.0)


BAD = [
    *((lambda bad=bad: Example(lr=bad), ("Example.lr.x", bad)) for bad in (0, np.nan, np.inf, "0.1")),
    *((lambda bad=bad: Example(lr=bad), ("Example.lr", bad)) for bad in ({"x": 1.0}, (1.0, 2.0))),
    *(
        (lambda bad=bad: SimFBO(client_lr=bad), ("SimFBO.client_lr.x", bad))
        for bad in (np.array(-1.0), jnp.array([0.1, 0.0]), True)
    ),
    (lambda: Example(lr={"x": 1.0, "y": 1.0, "v": -3}), ("Example.lr.v", -3)),
    *((lambda bad=bad: Example(radius=bad), ("Example.radius", bad)) for bad in (0.0, np.nan, "wide")),
    *(
        (lambda bad=bad: Example(decay=bad), ("Example.decay", bad, "0 and 1"))
        for bad in (0.0, 1.0, -0.5, np.nan, "half")
    ),
    (lambda: Momentum(decay=1.0), ("Momentum.decay", 1.0)),
    (lambda: Proximal(pull=1.0), ("Proximal.pull", 1.0)),
    (lambda: SimFBO(local_steps=0), ("SimFBO.local_steps", 0)),
    (lambda: SimFBO(batch_size=0), ("SimFBO.batch_size", 0)),
]


@pytest.mark.parametrize(("make", "refusal"), BAD)
def test_bad_numbers_are_refused(make, refusal):
    with refuses(*refusal):
        make()


def test_the_error_of_a_schedule_is_shown():
    with refuses("FedNest.outer_lr") as error:
        fb.FedNest(outer_lr=lambda r: {}["no such table"])
    assert "no such table" in str(error.value)


def test_a_misspelt_field_is_answered_with_the_nearest():
    with refuses("field of SimFBO", "sever_lr", "local_steps", near="server_lr"):
        SimFBO(sever_lr=0.1)
    with refuses("field of Example", "qqq", "['count', 'decay', 'lr', 'radius']"):
        Example(qqq=1)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("T", ["inner=fb.parts.SVRG(rounds=…)"]),
        ("rounds", ["inner=fb.parts.SVRG(rounds=…)"]),
        ("N", ["hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=…))"]),
        ("tau", ["inner=fb.parts.SVRG(local_steps=…)", "outer_steps=…"]),
        ("the", []),
    ],
)
def test_a_symbol_or_a_field_of_a_part_is_answered_with_its_place(name, places):
    """Symbols are those of the docstrings of FedNest and its parts; "the" begins an entry there and is no symbol."""
    with refuses("field of FedNest", name) as error:
        fb.FedNest(**{name: 5})
    assert [place for place in re.split(" is set by | or |; | \\(allowed", str(error.value)) if "=" in place] == places


def test_configurations_are_frozen_and_take_names_only():
    with pytest.raises(AttributeError, match=r"^Example .*dataclasses\.replace\(…, count=…\)"):
        Example().count = 4
    with refuses("", fact="count, lr, radius, decay", where="Example"):
        Example(4)


def test_numbers_are_arguments_and_static_fields_are_not():
    """A changed number uses the same compiled program; a changed count needs another one."""
    traces = []

    @jax.jit
    def program(configuration):
        traces.append(configuration.count)
        return configuration.lr.x * configuration.count

    assert float(program(Example(lr=0.5))) == 1.5
    assert float(program(Example(lr=0.25, radius=7.0, decay=0.1))) == 0.75
    assert traces == [3]
    assert float(program(Example(lr=0.5, count=4))) == 2.0
    assert traces == [3, 4]


def halving(round):
    return 0.5**round


def test_schedules_are_evaluated_at_a_traced_round():
    traces = []

    @jax.jit
    def program(configuration, round):
        traces.append(1)
        now = at(configuration, round)
        return now.lr.x, now.lr.y, now.radius

    schedule = optax.linear_schedule(1.0, 0.5, 4)
    scheduled = Example(lr={"x": halving, "y": 0.3, "v": 1.0}, radius=schedule)
    assert isinstance(scheduled.lr.x, Schedule)
    for round in range(6):
        got = [float(value) for value in program(scheduled, round)]
        assert got == pytest.approx([0.5**round, 0.3, 1 - min(round, 4) / 8], rel=1e-15)
    assert len(traces) == 1
    assert list(at(Example(lr=halving), 2).lr) == [0.25] * 3
    assert at(Example(), 5) == Example()


def sweep(algorithms):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *algorithms)


@pytest.mark.parametrize("form", ["stacked", "array"])
def test_a_sweep_is_a_vmap_over_the_algorithm(form):
    sizes, radius = [0.1, 0.5, 1.0], 0.75
    x, y = jnp.array([1.0, -2.0]), jnp.array([0.5, 0.25, 2.0])
    q = XYV(x * 2, y * 3, y - 1)
    each = [SimFBO(server_lr=size, radius=radius) for size in sizes]
    if form == "stacked":
        together = jax.vmap(lambda algorithm: algorithm.server_update(*algorithm.init(x, y), q)[0])(sweep(each))
    else:
        together = jax.vmap(
            lambda size: SimFBO(server_lr=size, radius=radius).server_update(*each[0].init(x, y), q)[0]
        )(jnp.array(sizes))
    for i, algorithm in enumerate(each):
        alone = algorithm.server_update(*algorithm.init(x, y), q)[0]
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=4 * np.finfo(float).eps)
    assert not np.array_equal(together.x[0], together.x[1])


def test_a_schedule_may_reach_zero_wherever_it_is_evaluated():
    """A schedule may be 0 in some rounds, on every engine.

    Compiled engines evaluate it with a tracer and the others with a number; a run must not fail on one of them only.
    """
    falling = SimFBO(server_lr=optax.linear_schedule(0.1, 0.0, 2), local_optimizer=Momentum(decay=0.5))
    for round in (2, jnp.asarray(2)):
        assert float(at(falling, round).server_lr.x) == 0.0
    assert float(jax.jit(lambda a, r: at(a, r).server_lr.x)(falling, 1)) == pytest.approx(0.05)
    assert at(falling, 0).local_optimizer == falling.local_optimizer


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.SimFBO(local_optimizer="momentum"),
            ("SimFBO.local_optimizer", "momentum", "Momentum(…)"),
        ),
        (
            lambda: fb.SimFBO(server_optimizer="adam"),
            ("SimFBO.server_optimizer", "adam", "optax.adam(1.0)"),
        ),
        (lambda: fb.FedNest(outer_lr=optax.sgd(1.0)), ("FedNest.outer_lr",)),
        (lambda: fb.FedNest(outer_lr={"schedule": "cosine"}), ("FedNest.outer_lr", {"schedule": "cosine"})),
        (lambda: fb.FedAvg(lr=None), ("FedAvg.lr", None)),
        (
            lambda: fb.SimFBO(local_steps=2**31),
            ("SimFBO.local_steps", 2147483648, "at most 1,000,000,000"),
        ),
        (lambda: fb.FedNest(inner=fb.parts.SVRG), ("FedNest.inner", ANY, "SVRG(…)")),
        (lambda: fb.FISM(refresh="no"), ("FISM.refresh", "no", "True or False")),
    ],
)
def test_what_a_field_cannot_hold_is_refused_before_a_run(make, refusal):
    with refuses(*refusal):
        make()


def test_a_local_optimizer_of_ones_own():
    """A user's local optimizer is used: steps that are twice as long in q equal steps of twice the size."""

    class Double(authoring.LocalOptimizer):
        def step(self, q, memory, d):
            return q + 2 * d, None

    assert fb.SimFBO(local_optimizer=Double()).local_optimizer.total(3) == 6


@pytest.mark.parametrize(
    "schedule",
    [lambda r: jnp.where(r < 1, 1.0, 1 / r), lambda r: 0.1 / (1 + r.astype(jnp.float32))],
    ids=["an int would divide by 0", "an int has no astype"],
)
def test_a_schedule_is_asked_with_what_it_gets_in_a_run(schedule):
    assert fb.FedNest(outer_lr=schedule).outer_lr.function is schedule
