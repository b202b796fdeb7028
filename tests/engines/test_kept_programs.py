"""A later run whose tracing gives the same program finds that of an earlier one, and no other run does."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.authoring import Algorithm, Allows, Reply, phase, positive
from fedbilevel.core.kept import PROGRAMS, BoundedCache
from fedbilevel.tasks import location, quadratic

SAMPLES = np.random.default_rng(0).normal(size=(4, 5, 3))
CLIENTS = fb.Clients(SAMPLES, SAMPLES[::-1].copy())


FRESH, RESULTS = {}, []


def outer(x, y, batch):
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + STRENGTH * y @ y


STRENGTH = 1.0
FACTOR = 1.0


class Own(Algorithm):
    """A method of one's own, of one exchange, whose code reads a variable of its module."""

    allows = Allows(late=("gradients",))

    lr: float = positive(default=0.1)

    def init(self, x, y):
        return fb.authoring.XY(x, y)

    @phase(takes=("x", "y"), gives="y")
    def gradients(self, client, message, key):
        x, y = message
        return Reply(FACTOR * jax.grad(client.problem.inner, 1)(x, y, client.inner_batch(key, None)), gradients=1)

    def round(self, fed, state, key):
        return state._replace(y=state.y - self.lr * fed.mean(self.gradients, tuple(state), key))


@pytest.fixture(autouse=True)
def nothing_kept():
    fb.Local.forget()
    yield
    fb.Local.forget()


def solved(algorithm=None, problem=None, clients=CLIENTS, **options):
    algorithm = algorithm or fb.SimFBO(local_steps=2, batch_size=2)
    problem = problem or fb.Bilevel(outer, inner)
    options = {"rounds": 3, "key": 0} | options
    before = PROGRAMS.made
    result = fb.solve(algorithm, problem, clients, jnp.ones(2), jnp.zeros(3), **options)
    FRESH[id(result)] = PROGRAMS.made > before
    RESULTS.append(result)  # alive, so that no id is given twice
    return result


def is_fresh(result):
    """Whether the run compiled a program of its own."""
    return FRESH[id(result)]


def wrapped():
    return fb.Bilevel(lambda *given: outer(*given), lambda *given: inner(*given))


LATE = fb.Asynchronous(Own(), wait_for=2)
SAME = {
    "the same again": {},
    "another seed": {"key": 7},
    "more rounds": {"rounds": 9, "eval_every": 3},
    "other steps": {"algorithm": fb.SimFBO(local_steps=2, batch_size=2, client_lr=0.03, server_lr=0.5, radius=4.0)},
    "other samples": {"clients": fb.Clients(2 * SAMPLES, SAMPLES - 1)},
    "a few more samples": {"clients": fb.Clients([*SAMPLES[:3], SAMPLES[3, :4]], [*SAMPLES[:3], SAMPLES[3, :3]])},
    "other weights": {"clients": fb.Clients(SAMPLES, SAMPLES[::-1].copy(), weights=[1, 2, 3, 4])},
    "functions of the same code": {"problem": wrapped()},
    "late replies by another clock": {"algorithm": LATE, "engine": fb.Local(clock=fb.Clock(spread=1.0, seed=3))},
}
OTHER = {
    "more local steps": {"algorithm": fb.SimFBO(local_steps=3, batch_size=2)},
    "another method": {"algorithm": fb.FedBiO(local_steps=2, batch_size=2)},
    "another loss": {"problem": fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + 1)},
    "a cohort": {"cohort": 2},
    "one more client": {"clients": fb.Clients([*SAMPLES, SAMPLES[0]], [*SAMPLES, SAMPLES[0]])},
    "a clock": {"engine": fb.Local(clock=fb.Clock(compute=1.0))},
    "one client at a time": {"engine": fb.Local(chunk=1)},
}


@pytest.fixture(scope="module")
def in_turn():
    """The runs of all cases, one after the other, after one without options and a late one; and the first again."""
    fb.Local.forget()
    assert is_fresh(solved())
    assert is_fresh(solved(LATE, engine=fb.Local(clock=fb.Clock(spread=0.5))))
    return {case: solved(**options) for case, options in (SAME | OTHER).items()} | {"first": solved()}


@pytest.mark.parametrize("case", SAME)
def test_a_run_of_the_same_shapes_is_not_compiled_and_has_the_numbers_of_one_that_is(case, in_turn):
    kept, alone = in_turn[case], solved(**SAME[case])
    assert [is_fresh(kept), is_fresh(alone)] == [False, True]
    for a, b in zip(jax.tree.leaves((kept.x, kept.y)), jax.tree.leaves((alone.x, alone.y)), strict=True):
        np.testing.assert_array_equal(a, b)
    dropped = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in dropped} for row in kept.history.rows] == [
        {k: v for k, v in row.items() if k not in dropped} for row in alone.history.rows
    ]


@pytest.mark.parametrize("case", OTHER)
def test_a_run_of_another_program_is_compiled(case, in_turn):
    assert is_fresh(in_turn[case])
    assert not is_fresh(in_turn["first"])  # which is kept beside the other ones


def test_a_variable_of_the_module_that_changes_is_noticed(monkeypatch):
    with_one = solved(Own())
    monkeypatch.setitem(globals(), "STRENGTH", 5.0)
    with_five = solved(Own())
    assert is_fresh(with_five)
    assert not np.array_equal(with_one.y, with_five.y)


def test_a_variable_around_the_function_that_changes_is_noticed():
    strength = 1.0

    def loss(x, y, batch):
        return outer(x, y, batch) + strength * jnp.vdot(y, y)

    problem = fb.Bilevel(outer, loss)
    with_one = solved(Own(), problem)
    strength = 5.0
    assert [is_fresh(with_one), is_fresh(solved(Own(), problem))] == [True, True]


class Held:
    """A loss that reads an attribute."""

    def __init__(self, strength):
        self.strength = strength

    def loss(self, x, y, batch):
        return outer(x, y, batch) + self.strength @ y


def test_an_attribute_or_an_array_that_changes_in_place_is_noticed():
    held = Held(np.ones(3))
    assert is_fresh(solved(Own(), fb.Bilevel(outer, held.loss)))
    assert not is_fresh(solved(Own(), fb.Bilevel(outer, held.loss)))
    held.strength[1] = 3.0
    assert is_fresh(solved(Own(), fb.Bilevel(outer, held.loss)))


def test_what_a_method_of_ones_own_reads_is_noticed(monkeypatch):
    assert is_fresh(solved(Own()))
    assert not is_fresh(solved(Own(lr=0.2)))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert is_fresh(solved(Own()))


class Settings:
    strength = 1.0


def test_an_attribute_of_a_class_that_changes_is_noticed(monkeypatch):
    problem = fb.Bilevel(outer, lambda x, y, batch: outer(x, y, batch) + Settings.strength * jnp.vdot(y, y))
    assert is_fresh(solved(Own(), problem))
    monkeypatch.setattr(Settings, "strength", 2.0)
    assert is_fresh(solved(Own(), problem))


SLOPE = 1.0


@jax.custom_vjp
def own(y):
    return jnp.vdot(y, y)


own.defvjp(lambda y: (own(y), y), lambda y, g: (2 * SLOPE * g * y,))


def test_a_rule_of_ones_own_for_derivatives_that_changes_is_noticed(monkeypatch):
    problem = fb.SingleLevel(lambda x, batch: own(x) + jnp.mean(batch))

    def fitted():
        before = PROGRAMS.made
        x = fb.solve(fb.FedAvg(batch_size=2), problem, fb.Clients(SAMPLES), jnp.ones(2), rounds=2).x
        return x, PROGRAMS.made > before

    one, fresh = fitted()
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    three, again = fitted()
    assert [fresh, again] == [True, True]
    assert not np.array_equal(one, three)


def test_a_program_that_calls_back_is_not_kept():
    def loss(x, y, batch):
        jax.debug.callback(lambda: None)
        return inner(x, y, batch)

    problem = fb.Bilevel(outer, loss)
    assert [is_fresh(solved(Own(), problem)) for _ in range(2)] == [True, True]


@pytest.mark.parametrize(("rows", "kept"), [(10, True), (100_000, False)])
def test_a_program_that_holds_much_data_is_not_kept(rows, kept):
    table = jnp.ones((rows, 3))
    problem = fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + jnp.mean(table @ y))
    first, second = solved(Own(), problem), solved(Own(), problem)
    assert [is_fresh(first), is_fresh(second)] == [True, not kept]


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
    local, reference = (solved(OwnKey(), engine=engine).state.key for engine in (fb.Local(), fb.Reference()))
    assert local.dtype == reference.dtype
    np.testing.assert_array_equal(jax.random.key_data(local), jax.random.key_data(reference))


def test_metrics_find_their_programs_and_their_own_constants():
    def distance(to):
        return lambda x, y: jnp.sum((y - to) ** 2)

    first, second = (solved(Own(), metrics={"d": distance(np.full(3, c))}) for c in (0.0, 1.0))
    y = np.asarray(first.y, np.float64)
    np.testing.assert_allclose(first.history.rows[-1]["d"], np.sum(y**2), rtol=1e-6)
    np.testing.assert_allclose(second.history.rows[-1]["d"], np.sum((y - 1) ** 2), rtol=1e-6)


@pytest.fixture
def compilations():
    """A list that gets an entry whenever XLA compiles something."""
    found = []

    def listen(event, seconds, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(more)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("engine", [fb.Local(), fb.Reference()], ids=["local", "reference"])
def test_metrics_of_clients_are_compiled_once_and_find_their_own_constants(engine, compilations):
    """However many runs measure them: another number that the metric reads needs no program, another metric does."""

    def measured(shape, to):
        metric = {"d": lambda x, y, batch: jnp.mean(shape(batch @ (y - to)))}
        before = len(compilations)
        result = solved(Own(), metrics_per_client=metric, engine=engine)
        y, rows = np.asarray(result.y, np.float64), CLIENTS.outer.values
        want = np.mean(np.asarray(shape(jnp.asarray(rows @ (y - to)))))
        np.testing.assert_allclose(result.history.rows[-1]["d.mean"], want, rtol=1e-5)
        return len(compilations) - before

    assert measured(jnp.square, np.zeros(3)) > 0
    assert measured(jnp.square, np.ones(3)) == 0
    assert measured(jnp.abs, np.ones(3)) > 0


def test_the_number_of_programs_is_bounded():
    cache = BoundedCache(2)
    made = []
    for key in ("a", "b", "a", "c", "a", "b", None, None):
        cache.get(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "b", None, None]  # b went when c came: a had been asked for since
    assert len(cache.values) == 2


def test_a_task_made_twice_shares_its_programs():
    for seed in range(2):
        task = quadratic(samples=(5, 5), seed=seed)
        result = fb.solve(fb.SimFBO(), task.problem, task.clients, task.x0, task.y0, rounds=2, key=seed)
        assert result.round == 2
    assert len(PROGRAMS.values) == 2  # the rounds, and what the server begins with


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
