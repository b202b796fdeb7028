"""A later run of the same program finds that of an earlier one, and no other run does; its numbers are those of a run
on its own."""

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Reply, phase, positive, static
from fedbilevel.machinery.kept import LIMIT, kept
from fedbilevel.tasks import location, quadratic

SAMPLES = np.random.default_rng(0).normal(size=(4, 5, 3))
CLIENTS = fb.Clients(SAMPLES, SAMPLES[::-1].copy())
START = jnp.ones(2), jnp.zeros(3)


COMPILED = []  # the names of the functions that XLA compiled


def outer(x, y, batch):
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + STRENGTH * y @ y


STRENGTH = 1.0
FACTOR = 1.0


class Own(Algorithm):
    """A method of one's own, of one exchange, whose code reads a variable of its module."""

    lr: float = positive(default=0.1)
    scale: object = static(default=1)

    def init(self, x, y):
        return XY(x, y)

    @phase(takes=("x", "y"), gives="y")
    def gradients(self, client, message, key):
        x, y = message
        slope = FACTOR * jax.grad(client.problem.inner, 1)(x, y, client.inner_batch(key, None))
        return Reply(slope / 2 if isinstance(self.scale, float) else slope, gradients=1)

    def round(self, fed, state, key):
        return state._replace(y=state.y - self.lr * fed.mean(self.gradients, tuple(state), key))


@pytest.fixture(scope="module", autouse=True)
def listening():
    def listen(event, seconds, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            COMPILED.append(more.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(autouse=True)
def nothing_kept():
    fb.Local.forget()
    yield
    fb.Local.forget()


class Solved(NamedTuple):
    result: fb.Result
    compiled: list[str]

    @property
    def fresh(self):
        """Whether the run compiled rounds of its own."""
        return any("rounds" in name for name in self.compiled)


def solved(algorithm=None, problem=None, clients=CLIENTS, start=START, within=nullcontext, **options):
    algorithm = algorithm or fb.SimFBO(local_steps=2, batch_size=2)
    problem = problem or fb.Bilevel(outer, inner)
    options = {"rounds": 3, "key": 0} | options
    before = len(COMPILED)
    with within():
        result = fb.solve(algorithm, problem, clients, *start, **options)
    return Solved(result, COMPILED[before:])


def numbers(run):
    result, dropped = run.result, {"seconds"}
    rows = [{k: v for k, v in row.items() if k not in dropped} for row in result.history.rows]
    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.x, result.y))], str(rows)


def wrapped():
    return fb.Bilevel(lambda *given: outer(*given), lambda *given: inner(*given))


def simfbo(**fields):
    return fb.SimFBO(local_steps=2, batch_size=2, **fields)


def step(end):
    return fb.XYV(optax.linear_schedule(0.1, end, 3), 0.1, 0.1)


LATE = fb.Asynchronous(fb.FedBiO(batch_size=2), wait_for=2)
MORE, FEWER = [*SAMPLES[:3], SAMPLES[3, :4]], [*SAMPLES[:3], SAMPLES[3, :3]]
SAME = {
    "the same again": {},
    "another seed": {"key": 7},
    "more rounds": {"rounds": 9, "eval_every": 3},
    "other steps": {"algorithm": simfbo(client_lr=0.03, server_lr=0.5, radius=4.0)},
    "other samples": {"clients": fb.Clients(2 * SAMPLES, SAMPLES - 1)},
    "a few more samples": {"clients": fb.Clients(MORE, FEWER)},
    "other weights": {"clients": fb.Clients(SAMPLES, SAMPLES[::-1].copy(), weights=[1, 2, 3, 4])},
    "functions of the same code": {"problem": wrapped()},
    "late replies by another clock": {"algorithm": LATE, "engine": fb.Local(clock=fb.Clock(spread=1.0, seed=3))},
    "the schedule of before": {"algorithm": simfbo(server_lr=step(0.01))},
    "the optimizer of before": {"algorithm": simfbo(server_optimizer=optax.adam(1.0))},
    "a method of one's own": {"algorithm": Own(lr=0.2)},
}
OTHER = {
    "more local steps": {"algorithm": fb.SimFBO(local_steps=3, batch_size=2)},
    "another method": {"algorithm": fb.FedBiO(local_steps=2, batch_size=2)},
    "another loss": {"problem": fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + 1)},
    "a cohort": {"cohort": 2},
    "one more client": {"clients": fb.Clients([*SAMPLES, SAMPLES[0]], [*SAMPLES, SAMPLES[0]])},
    "a clock": {"engine": fb.Local(clock=fb.Clock(compute=1.0))},
    "one client at a time": {"engine": fb.Local(chunk=1)},
    "two devices": {"engine": fb.Local(devices=2)},
    "another schedule": {"algorithm": simfbo(server_lr=step(0.05))},
    "another optimizer": {"algorithm": simfbo(server_optimizer=optax.adam(1.0, b1=0.8))},
    "a static field that is equal and of another type": {"algorithm": Own(scale=1.0)},
    "other random bits": {"within": partial(jax.threefry_partitionable, False)},
}


@pytest.fixture(scope="module")
def in_turn():
    """The runs of all cases, one after the other, after those that they have their programs of; and the first again."""
    fb.Local.forget()
    assert solved().fresh
    for algorithm in (simfbo(server_lr=step(0.01)), simfbo(server_optimizer=optax.adam(1.0)), Own()):
        assert solved(algorithm).fresh
    assert solved(clients=fb.Clients(FEWER, MORE)).fresh
    assert solved(LATE, engine=fb.Local(clock=fb.Clock(spread=0.5))).fresh
    return {case: solved(**options) for case, options in (SAME | OTHER).items()} | {"first": solved()}


@pytest.mark.parametrize("case", SAME)
def test_a_run_of_the_same_shapes_is_not_compiled_and_has_the_numbers_of_one_that_is(case, in_turn):
    found, alone = in_turn[case], solved(**SAME[case])
    assert [found.fresh, alone.fresh] == [False, True]
    np.testing.assert_equal(numbers(found), numbers(alone))


@pytest.mark.parametrize("case", OTHER)
def test_a_run_of_another_program_is_compiled(case, in_turn):
    assert in_turn[case].fresh
    assert not in_turn["first"].fresh  # which is kept beside the other ones


def defined_again(calls):
    """The losses of a notebook's cell, or of a search's objective, which are new functions each time."""

    def first(x, y, batch):
        calls.append(1)
        return outer(x, y, batch)

    def second(x, y, batch):
        return first(x, y, batch) + STRENGTH * y @ y

    return fb.Bilevel(first, second)


@pytest.mark.parametrize(
    "options",
    [{}, {"count_flops": True, "metrics": {"m": lambda x, y: x @ y[:2]}}, {"algorithm": LATE}],
    ids=["plain", "operations and metrics", "asynchronous"],
)
def test_the_same_code_defined_again_compiles_nothing_and_is_called_once_by_each_loss(options):
    first = solved(problem=defined_again([]), **options)
    again = solved(problem=defined_again(calls := []), **options)
    assert again.compiled == []
    assert len(calls) == 2
    np.testing.assert_equal(numbers(again), numbers(first))


def test_submodels_of_other_seeds_share_a_program():
    for seed in range(2):
        task = quadratic(clients=4, samples=(5, 5), units=4, capacities=(0.5, 1.0), seed=seed)
        found = solved(fb.RABO(), task.problem, task.clients, (task.x0, task.y0))
    assert found.compiled == []


def test_the_rounds_that_ask_for_hypergradients_are_not_those_of_the_method():
    """They are played by a class of the same name and fields."""
    task = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 2))
    method = fb.LFedNest(inner=fb.parts.LocalSGD(lr=0.1), batch_size=None)
    solved(method, task.problem, task.clients, (task.x0, task.y0))
    options = {"estimators": {"own": method}, "draws": 2, "steps": 2, "directions": 1}
    after = fb.check_hypergradient(task.problem, task.clients, task.x0, task.y0, **options)["own"]
    fb.Local.forget()
    alone = fb.check_hypergradient(task.problem, task.clients, task.x0, task.y0, **options)["own"]
    assert after == alone


def test_a_loss_that_differs_on_several_samples_alone_is_another_one():
    def squares(divide):
        return fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + jnp.sum(batch @ y) / divide(len(batch)))

    runs = [solved(problem=squares(divide)) for divide in (lambda n: n, lambda n: n**2)]
    assert [run.fresh for run in runs] == [True, True]
    assert not np.array_equal(runs[0].result.y, runs[1].result.y)


def test_a_loss_of_one_sample_finds_its_program():
    def alone(x, y, batch):
        return inner(x, y, batch.reshape(1, 3))

    runs = [solved(fb.SimFBO(batch_size=1), fb.Bilevel(alone, alone)) for _ in range(2)]
    assert [run.fresh for run in runs] == [True, False]


def test_a_variable_of_the_module_that_changes_is_noticed(monkeypatch):
    with_one = solved()
    monkeypatch.setitem(globals(), "STRENGTH", 5.0)
    with_five = solved()
    assert with_five.fresh
    assert not np.array_equal(with_one.result.y, with_five.result.y)


def test_a_helper_that_is_defined_again_is_noticed(monkeypatch):
    assert solved().fresh
    monkeypatch.setitem(globals(), "outer", lambda x, y, batch: jnp.mean((batch @ y - 2 * jnp.sum(x)) ** 2))
    assert solved().fresh


def test_a_variable_around_the_function_that_changes_is_noticed():
    strength = 1.0

    def loss(x, y, batch):
        return outer(x, y, batch) + strength * jnp.vdot(y, y)

    problem = fb.Bilevel(outer, loss)
    with_one = solved(problem=problem)
    strength = 5.0
    assert [with_one.fresh, solved(problem=problem).fresh] == [True, True]


class Held:
    """A loss that reads an attribute."""

    def __init__(self, strength):
        self.strength = strength

    def loss(self, x, y, batch):
        return outer(x, y, batch) + self.strength @ y


def test_an_attribute_or_an_array_that_changes_in_place_is_noticed():
    held = Held(np.ones(3))
    assert solved(problem=fb.Bilevel(outer, held.loss)).fresh
    assert not solved(problem=fb.Bilevel(outer, held.loss)).fresh
    held.strength[1] = 3.0
    assert solved(problem=fb.Bilevel(outer, held.loss)).fresh


def test_what_a_method_of_ones_own_reads_is_noticed(monkeypatch):
    assert solved(Own()).fresh
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert solved(Own()).fresh


def rate(round):
    return 0.1 * FACTOR


class Rate:
    """A schedule that is the method of an object."""

    def at(self, round):
        return rate(round)


@pytest.mark.parametrize(
    "fields",
    [
        {"server_lr": rate},
        {"server_lr": partial(rate)},
        {"server_optimizer": optax.sgd(rate)},
        {"server_optimizer": optax.chain(optax.scale_by_schedule(rate), optax.scale(-1.0))},
        {"server_optimizer": optax.sgd(Rate().at)},
    ],
    ids=["a schedule", "a partial one", "an optimizer", "a chain", "a method"],
)
def test_what_a_schedule_reads_is_noticed(fields, monkeypatch):
    algorithm = simfbo(**fields)
    one = solved(algorithm)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    two = solved(algorithm)
    assert [one.fresh, two.fresh] == [True, True]
    assert not np.array_equal(one.result.y, two.result.y)


class Settings:
    strength = 1.0


def test_an_attribute_of_a_class_that_changes_is_noticed(monkeypatch):
    problem = fb.Bilevel(outer, lambda x, y, batch: outer(x, y, batch) + Settings.strength * jnp.vdot(y, y))
    assert solved(problem=problem).fresh
    monkeypatch.setattr(Settings, "strength", 2.0)
    assert solved(problem=problem).fresh


SLOPE = 1.0


@jax.custom_vjp
def own(y):
    return jnp.vdot(y, y)


own.defvjp(lambda y: (own(y), y), lambda y, g: (2 * SLOPE * g * y,))


def test_a_rule_of_ones_own_for_derivatives_that_changes_is_noticed(monkeypatch):
    problem = fb.SingleLevel(lambda x, batch: own(x) + jnp.mean(batch))

    def fitted():
        before = len(COMPILED)
        x = fb.solve(fb.FedAvg(batch_size=2), problem, fb.Clients(SAMPLES), jnp.ones(2), rounds=2).x
        return x, any("rounds" in name for name in COMPILED[before:])

    one, fresh = fitted()
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    three, again = fitted()
    assert [fresh, again] == [True, True]
    assert not np.array_equal(one, three)


def with_a_rule_inside_a_rule(factor):
    """y² with the slope that `twice` gives, whose own slope is `factor`."""

    @jax.custom_jvp
    def twice(y):
        return 2 * y

    @jax.custom_jvp
    def square(y):
        return y**2

    twice.defjvp(lambda at, along: (2 * at[0], factor * along[0]))
    square.defjvp(lambda at, along: (at[0] ** 2, twice(at[0]) * along[0]))
    return fb.Bilevel(outer, lambda x, y, batch: outer(x, y, batch) + jnp.sum(square(y)))


def test_a_rule_for_second_derivatives_that_changes_is_noticed():
    two, nine = (solved(problem=with_a_rule_inside_a_rule(factor)) for factor in (2.0, 9.0))
    assert [two.fresh, nine.fresh] == [True, True]
    assert not np.array_equal(two.result.x, nine.result.x)


@pytest.mark.parametrize("algorithm", [None, Own()], ids=["SimFBO", "a method of one's own"])
def test_a_program_that_calls_back_is_not_kept(algorithm):
    def loss(x, y, batch):
        jax.debug.callback(lambda: None)
        return inner(x, y, batch)

    problem = fb.Bilevel(outer, loss)
    assert [solved(algorithm, problem).fresh for _ in range(2)] == [True, True]


@pytest.mark.parametrize(("rows", "held"), [(10, True), (100_000, False)])
def test_a_program_that_holds_much_data_is_not_kept(rows, held):
    table = jnp.ones((rows, 3))
    problem = fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + jnp.mean(table @ y))
    assert [solved(problem=problem).fresh for _ in range(2)] == [True, not held]


class OwnState(NamedTuple):
    x: jax.Array
    y: jax.Array
    key: jax.Array


class OwnKey(Algorithm):
    """A method whose state holds a round's key."""

    def init(self, x, y):
        return OwnState(x, y, jax.random.key(3))

    def round(self, fed, state, key):
        return state._replace(key=key)


def test_a_state_may_hold_the_rounds_key():
    local, reference = (solved(OwnKey(), engine=engine).result.state.key for engine in (fb.Local(), fb.Reference()))
    assert local.dtype == reference.dtype
    np.testing.assert_array_equal(jax.random.key_data(local), jax.random.key_data(reference))


def test_metrics_find_their_programs_and_their_own_constants():
    def distance(to):
        return lambda x, y: jnp.sum((y - to) ** 2)

    first, second = (solved(Own(), metrics={"d": distance(np.full(3, c))}).result for c in (0.0, 1.0))
    y = np.asarray(first.y, np.float64)
    np.testing.assert_allclose(first.history.rows[-1]["d"], np.sum(y**2), rtol=1e-6)
    np.testing.assert_allclose(second.history.rows[-1]["d"], np.sum((y - 1) ** 2), rtol=1e-6)


@pytest.mark.parametrize("engine", [fb.Local(), fb.Reference()], ids=["local", "reference"])
def test_metrics_of_clients_are_compiled_once_and_find_their_own_constants(engine):
    """However many runs measure them: another number that the metric reads needs no program, another metric does."""

    def measured(shape, to):
        metric = {"d": lambda x, y, batch: jnp.mean(shape(batch @ (y - to)))}
        result, compiled = solved(Own(), metrics_per_client=metric, engine=engine)
        y, rows = np.asarray(result.y, np.float64), CLIENTS.outer.values
        want = np.mean(np.asarray(shape(jnp.asarray(rows @ (y - to)))))
        np.testing.assert_allclose(result.history.rows[-1]["d.mean"], want, rtol=1e-5)
        return len(compiled)

    assert measured(jnp.square, np.zeros(3)) > 0
    assert measured(jnp.square, np.ones(3)) == 0
    assert measured(jnp.abs, np.ones(3)) > 0


def test_what_is_kept_is_bounded_and_needs_a_key_with_a_hash():
    made = []

    def asked(key):
        return kept(key, lambda: made.append(key) or key)

    for key in (*range(LIMIT), 0, LIMIT, 0, 1, None, None, [], []):
        assert asked(key) == key
    assert made == [
        *range(LIMIT),
        LIMIT,
        1,
        None,
        None,
        [],
        [],
    ]  # 1 went when the last came: 0 had been asked for since


def test_metrics_follow_a_run_to_two_devices() -> None:
    """x and y lie on one device at the start, and on both after a round; a metric is compiled for each."""
    task = location(dim=3, targets=16, clients=4)
    first, second = (
        fb.solve(
            fb.FISM(), task.problem, task.clients, task.x0, rounds=4, eval_every=2, engine=engine, metrics=task.metrics
        )
        for engine in (fb.Local(), fb.Local(devices=2))
    )
    for name in task.metrics:
        np.testing.assert_allclose(first.history[name], second.history[name], rtol=1e-12)
