"""A run finds the compiled program of an earlier run if its own program is the same, and only then.

Its numbers are the same as if it had compiled the program itself.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.authoring import XY, Algorithm, Reply, phase, positive, static
from fedbilevel.engines.progress import COMPILING
from fedbilevel.machinery.kept import LIMIT, kept
from fedbilevel.tasks import quadratic
from fixed_steps import fixed
from representatives import slow_but

SAMPLES = np.random.default_rng(0).normal(size=(4, 5, 3))
CLIENTS = fb.Clients(SAMPLES, SAMPLES[::-1].copy())
START = jnp.ones(2), jnp.zeros(3)
STRENGTH = FACTOR = 1.0
COMPILED = []  # the names of the functions that XLA compiled


def outer(x, y, batch):
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) + STRENGTH * y @ y


PROBLEM = fb.Bilevel(outer, inner)


class Own(Algorithm):
    """A user's method with one exchange, whose code reads a variable of its module."""

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

    fb.Local.forget()
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield
    jax.monitoring.unregister_event_duration_listener(listen)
    fb.Local.forget()


class Compiles(BaseException):
    """Raised if a run has to compile, because it finds no program of an earlier run."""


class Stops:
    """A display that ends a run before it compiles its rounds."""

    def stage(self, name):
        if name.startswith(COMPILING):
            raise Compiles

    def advance(self, *rounds):
        pass

    close = advance


def simfbo(**fields):
    return fixed(fb.SimFBO(local_steps=2, batch_size=2, **fields))


def solved(algorithm=None, problem=PROBLEM, clients=CLIENTS, start=START, **options):
    if isinstance(problem, fb.SingleLevel):
        algorithm, clients, start = algorithm or fb.FedAvg(batch_size=2), fb.Clients(SAMPLES), start[:1]
    return fb.solve(algorithm or simfbo(), problem, clients, *start, **{"rounds": 3, "key": 0} | options)


def found(*given, **options):
    """Run with the program of an earlier run; without one, raise Compiles."""
    return solved(*given, progress=Stops(), **options)


def is_fresh(*given, **options):
    """Return whether a run would compile its own rounds; it is stopped before it does."""
    try:
        found(*given, **options)
    except Compiles:
        return True
    return False


def numbers(result):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.history.rows]
    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.x, result.y))], str(rows)


LATE = fb.Asynchronous(fixed(fb.FedBiO(batch_size=2)), wait_for=2)
MORE, FEWER = [*SAMPLES[:3], SAMPLES[3, :4]], [*SAMPLES[:3], SAMPLES[3, :3]]
SAME = {
    "other numbers, and functions of the same code": (
        {},
        {
            "key": 7,
            "rounds": 9,
            "eval_every": 3,
            "algorithm": simfbo(client_lr=0.03, server_lr=0.5, radius=4.0),
            "problem": fb.Bilevel(lambda *given: outer(*given), lambda *given: inner(*given)),
            "clients": fb.Clients(2 * SAMPLES, SAMPLES - 1, weights=[1, 2, 3, 4]),
        },
    ),
    "a few more samples": ({"clients": fb.Clients(FEWER, MORE)}, {"clients": fb.Clients(MORE, FEWER)}),
    "late replies by another clock": (
        {"algorithm": LATE, "engine": fb.Local(clock=fb.Clock(spread=0.5))},
        {"algorithm": LATE, "engine": fb.Local(clock=fb.Clock(spread=1.0, seed=3))},
    ),
    "a method of one's own": ({"algorithm": Own()}, {"algorithm": Own(lr=0.2)}),
}
OTHER = {
    "more local steps": {"algorithm": fixed(fb.SimFBO(local_steps=3, batch_size=2))},
    "another method": {"algorithm": fixed(fb.FedBiO(local_steps=2, batch_size=2))},
    "another loss": {"problem": fb.Bilevel(outer, lambda x, y, batch: inner(x, y, batch) + 1)},
    "a cohort": {"cohort": 2},
    "one more client": {"clients": fb.Clients([*SAMPLES, SAMPLES[0]], [*SAMPLES, SAMPLES[0]])},
    "a clock": {"engine": fb.Local(clock=fb.Clock(compute=1.0))},
    "one client at a time": {"engine": fb.Local(chunk=1)},
    "two devices": {"engine": fb.Local(devices=2)},
}


@pytest.mark.checked
@pytest.mark.parametrize(
    "case", slow_but("other numbers, and functions of the same code", "a method of one's own", of=SAME)
)
def test_a_run_of_the_same_shapes_is_not_compiled_and_has_the_numbers_of_one_that_is(case):
    before, options = SAME[case]
    solved(**before)
    again = found(**options)
    fb.Local.forget()
    np.testing.assert_equal(numbers(again), numbers(solved(**options)))


@pytest.mark.parametrize("case", OTHER)
def test_a_run_of_another_program_is_compiled(case):
    solved()
    assert is_fresh(**OTHER[case])
    assert not is_fresh()


def test_other_random_bits_and_a_static_field_that_is_equal_and_of_another_type_are_another_program():
    solved(Own())
    assert is_fresh(Own(scale=1.0))
    with jax.threefry_partitionable(False):
        assert is_fresh(Own())


@pytest.mark.parametrize(
    "make",
    [
        lambda size: {"server_lr": fb.XYV(optax.linear_schedule(0.1, size, 3), 0.1, 0.1)},
        lambda size: {"server_optimizer": optax.adam(1.0, b1=size)},
    ],
    ids=["a schedule", "an optimizer"],
)
def test_what_a_library_makes_is_known_by_its_numbers(make):
    first = solved(simfbo(**make(0.5)))
    np.testing.assert_equal(numbers(found(simfbo(**make(0.5)))), numbers(first))
    assert is_fresh(simfbo(**make(0.8)))


def defined_again(calls):
    """Return two losses, which are new functions at each call.

    A cell of a notebook, or the objective of a search, makes them anew in the same way.
    """

    def first(x, y, batch):
        calls.append(1)
        return outer(x, y, batch)

    def second(x, y, batch):
        return first(x, y, batch) + STRENGTH * y @ y

    return fb.Bilevel(first, second)


@pytest.mark.checked
@pytest.mark.parametrize(
    "options",
    [
        {"count_flops": True, "metrics": {"m": lambda x, y: x @ y[:2]}},
        pytest.param({"algorithm": LATE}, marks=pytest.mark.slow),
    ],
    ids=["operations and metrics", "asynchronous"],
)
def test_the_same_code_defined_again_compiles_nothing_and_is_called_once_by_each_loss(options):
    first = solved(problem=defined_again([]), **options)
    before = len(COMPILED)
    again = solved(problem=defined_again(calls := []), **options)
    assert COMPILED[before:] == []
    assert len(calls) == 2
    np.testing.assert_equal(numbers(again), numbers(first))


@pytest.mark.slow
def test_submodels_of_other_seeds_share_a_program():
    for seed, run in enumerate((solved, found)):
        task = quadratic(clients=4, samples=(5, 5), units=4, seed=seed).with_own(capacity=[0.5, 1, 0.5, 1])
        run(None, task.problem, task.clients, (task.x0, task.y0))


@pytest.mark.slow
def test_the_rounds_that_ask_for_hypergradients_are_not_those_of_the_method():
    """check_hypergradient does not use the program of a run of the method, although names and fields are equal.

    Its rounds are run by another class with the same name and fields as the method.
    """
    task = quadratic(clients=3, dim_x=2, dim_y=3, samples=(2, 2))
    method = fixed(fb.LFedNest(inner=fb.parts.LocalSGD(lr=0.1), batch_size=None))
    solved(method, task.problem, task.clients, (task.x0, task.y0))
    options = {"estimators": {"own": method}, "draws": 2, "steps": 2, "directions": 1}
    after = fb.check_hypergradient(task.problem, task.clients, task.x0, task.y0, **options)["own"]
    fb.Local.forget()
    alone = fb.check_hypergradient(task.problem, task.clients, task.x0, task.y0, **options)["own"]
    assert after == alone


def test_a_loss_that_differs_on_several_samples_alone_is_another_one():
    def squares(divide):
        return fb.SingleLevel(lambda x, batch: x @ x + jnp.sum(x) * jnp.sum(batch) / divide(len(batch)))

    solved(problem=squares(lambda n: n))
    assert is_fresh(problem=squares(lambda n: n**2))


def test_a_loss_of_one_sample_finds_its_program():
    for run in (solved, found):
        run(fb.FedAvg(batch_size=1), fb.SingleLevel(lambda x, batch: jnp.sum(batch.reshape(1, 3)) * x @ x))


class Settings:
    strength = 1.0


def around():
    strength = 1.0

    def change():
        nonlocal strength
        strength = 5.0

    return lambda x: strength * x @ x, change


def in_place():
    strength = np.ones(2)
    return lambda x: strength @ x**2, lambda: strength.__setitem__(1, 3.0)


def of_a_class():
    return lambda x: Settings.strength * x @ x, lambda: setattr(Settings, "strength", 2.0)


def of_a_rule():
    slope = [1.0]
    square = jax.custom_vjp(lambda x: x @ x)
    square.defvjp(lambda x: (x @ x, x), lambda x, g: (2 * slope[0] * g * x,))
    return square, lambda: slope.__setitem__(0, 3.0)


@pytest.mark.parametrize("make", [around, in_place, of_a_class, of_a_rule], ids=lambda make: make.__name__)
def test_what_a_loss_reads_is_noticed_where_it_changes(make):
    size, change = make()
    problem = fb.SingleLevel(lambda x, batch: size(x) + jnp.mean(batch))
    solved(problem=problem)
    change()
    assert is_fresh(problem=problem)


def rate(round):
    return 0.1 * FACTOR


class Rate:
    """A schedule that is the method of an object."""

    def at(self, round):
        return rate(round)


CHAIN = optax.chain(optax.scale_by_schedule(rate), optax.scale(-1.0))
READ = {
    "a number that a loss reads": (simfbo(), "STRENGTH", 5.0),
    "a loss": (simfbo(), "outer", lambda x, y, batch: jnp.mean((batch @ y - 2 * jnp.sum(x)) ** 2)),
    "what a method of one's own reads": (Own(), "FACTOR", 2.0),
    "what a schedule reads": (simfbo(server_lr=partial(rate)), "FACTOR", 2.0),
    "what an optimizer's schedule reads": (simfbo(server_optimizer=CHAIN), "FACTOR", 2.0),
    "what a schedule of an object reads": (simfbo(server_optimizer=optax.sgd(Rate().at)), "FACTOR", 2.0),
}


@pytest.mark.parametrize(
    "case", slow_but("a number that a loss reads", "a loss", "what an optimizer's schedule reads", of=READ)
)
def test_what_a_module_holds_is_noticed_where_it_changes(case, monkeypatch):
    algorithm, name, value = READ[case]
    solved(algorithm)
    monkeypatch.setitem(globals(), name, value)
    assert is_fresh(algorithm)


def with_a_rule_inside_a_rule(factor):
    """Return a problem with y², whose custom derivative is the derivative of `twice`.

    The custom derivative of `twice` is `factor`.
    """

    @jax.custom_jvp
    def twice(y):
        return 2 * y

    @jax.custom_jvp
    def square(y):
        return y**2

    twice.defjvp(lambda at, along: (2 * at[0], factor * along[0]))
    square.defjvp(lambda at, along: (at[0] ** 2, twice(at[0]) * along[0]))
    return fb.Bilevel(outer, lambda x, y, batch: outer(x, y, batch) + jnp.sum(square(y)))


@pytest.mark.slow
def test_a_rule_for_second_derivatives_that_changes_is_noticed():
    solved(problem=with_a_rule_inside_a_rule(2.0))
    assert is_fresh(problem=with_a_rule_inside_a_rule(9.0))


def test_a_program_that_calls_back_is_not_kept():
    def called_back(loss):
        return lambda *given: (jax.debug.callback(lambda: None), loss(*given))[1]

    for given in [
        (None, fb.SingleLevel(called_back(lambda x, batch: x @ x + jnp.mean(batch)))),
        (Own(), fb.Bilevel(outer, called_back(inner))),
    ]:
        solved(*given)
        assert is_fresh(*given)


@pytest.mark.parametrize(("rows", "held"), [(10, True), (100_000, False)])
def test_a_program_that_holds_much_data_is_not_kept(rows, held):
    table = jnp.ones((rows, 2))
    problem = fb.SingleLevel(lambda x, batch: x @ x + jnp.mean(table @ x) + jnp.mean(batch))
    solved(problem=problem)
    assert is_fresh(problem=problem) is not held


class OwnState(NamedTuple):
    x: jax.Array
    y: jax.Array
    key: jax.Array


class OwnKey(Algorithm):
    """A method whose state has a round's key."""

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


@pytest.mark.parametrize("engine", slow_but(fb.Local(), of=[fb.Local(), fb.Reference()]), ids=["local", "reference"])
def test_metrics_of_clients_are_compiled_once_and_find_their_own_constants(engine):
    """Metrics of clients are compiled once for all runs that measure them.

    A metric that reads another number needs no new program; another metric needs one.
    """
    fb.Local.forget()

    def measured(shape, to):
        metric = {"d": lambda x, y, batch: jnp.mean(shape(batch @ (y - to)))}
        before = len(COMPILED)
        with jax.disable_jit(isinstance(engine, fb.Reference)):  # otherwise Reference would compile its phases again
            result = solved(Own(), metrics_per_client=metric, engine=engine)
        y, rows = np.asarray(result.y, np.float64), CLIENTS.outer.values
        want = np.mean(np.asarray(shape(jnp.asarray(rows @ (y - to)))))
        np.testing.assert_allclose(result.history.rows[-1]["d.mean"], want, rtol=1e-5)
        return len(COMPILED) - before

    assert measured(jnp.square, np.zeros(3)) > 0
    assert measured(jnp.square, np.ones(3)) == 0
    assert measured(jnp.abs, np.ones(3)) > 0


def test_what_is_kept_is_bounded_and_needs_a_key_with_a_hash():
    made = []

    def asked(key):
        return kept(key, lambda: made.append(key) or key)

    for key in (*range(LIMIT), 0, LIMIT, 0, 1, None, None, [], []):
        assert asked(key) == key
    # 1 was dropped for the last key, since 0 had been asked for in between
    assert made == [*range(LIMIT), LIMIT, 1, None, None, [], []]


def test_metrics_follow_a_run_to_two_devices():
    """Metrics are compiled for one device and for two.

    x and y lie on one device at the start, and on both devices after a round.
    """
    options = {"rounds": 2, "eval_every": 1, "metrics": {"d": lambda x, y: x @ y[:2]}}
    one, two = (solved(Own(), engine=engine, **options).history["d"] for engine in (fb.Local(), fb.Local(devices=2)))
    np.testing.assert_allclose(one, two, rtol=1e-12)
