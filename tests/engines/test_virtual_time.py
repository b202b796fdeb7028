"""Does virtual time pass as the clock says?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous import Early
from compiled_losses import with_compiled_losses

import fedbilevel as fb
from fedbilevel.authoring import Asks
from fedbilevel.engines.virtual_time import QUANTILES, TICK, ClockState
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import raises_with, refuses, warns_with


class Silent(Early):
    """An asynchronous algorithm that does not declare that it is asynchronous."""

    asks = Asks()


TASK = quadratic(clients=6, samples=(4, 4))
IDS = jnp.arange(1000)


def times(algorithm, clock, rounds=4, cohort=None, task=TASK, engine=fb.Local):
    problem = with_compiled_losses(task.problem) if engine is fb.Reference else task.problem
    options = {"rounds": rounds, "cohort": cohort, "engine": engine(clock=clock), "eval_every": 1}
    return fb.solve(algorithm, problem, task.clients, task.x0, task.y0, **options).history["time"]


def solve(algorithm, clock=None, stream=None, **options):
    engine = fb.Local(clock=clock or fb.Clock(), stream=stream)
    return fb.solve(algorithm, TASK.problem, TASK.clients, TASK.x0, TASK.y0, engine=engine, **options)


def test_by_default_time_counts_exchanges():
    result = solve(Early(n=6), rounds=4, eval_every=1)
    assert result.history["time"].tolist() == result.history["exchanges"].tolist() == [0, 3, 6, 9, 12]


def test_an_exchange_costs_the_slowest_of_its_cohort():
    """An exchange takes as long as the slowest client of its cohort.

    SimFBO with one step takes 2 gradients and 2 products, so that client i takes 4 c_i + w_i.
    """
    compute, network = np.array([0.1, 0.2, 0.3, 0.1, 0.1, 0.5]), np.array([5, 1, 1, 9, 1, 0.5])
    clock = fb.Clock(compute=compute.tolist(), network=network.tolist())
    slowest = max(compute * 4 + network)
    for engine in (fb.Local, fb.Reference):
        np.testing.assert_allclose(
            times(fixed(fb.SimFBO(local_steps=1)), clock, engine=engine, rounds=2), slowest * np.arange(3), atol=TICK
        )


@pytest.mark.slow
def test_a_cohort_without_the_slow_one_is_quicker():
    """A cohort without the slow client is quicker.

    With two of six clients in a round, one of which takes 50, a share of (5 choose 2)/(6 choose 2) = 2/3 of the rounds
    takes 1.
    """
    clock = fb.Clock(stragglers=1, slowdown=50)
    took = np.diff(times(fixed(fb.SimFBO(local_steps=1)), clock, rounds=200, cohort=2))
    assert set(np.round(took).tolist()) == {1.0, 50.0}
    share = np.mean(took < 2)
    assert abs(share - 2 / 3) < 4 * np.sqrt(2 / 9 / 200)


def test_factors_are_log_normal_with_mean_one():
    """Factors are log-normal with mean one.

    The mean is 1 up to rounding. The logarithm has the standard deviation σ, except for what lies beyond the
    1/8192-quantiles.
    """
    pace = fb.Clock(spread=0.7).pace(1000)
    assert len(pace.spread) == QUANTILES
    np.testing.assert_allclose(pace.spread.mean(dtype=float), 1, atol=1e-6)
    np.testing.assert_allclose(np.log(pace.spread.astype(float)).std(), 0.7, rtol=2e-3)
    ticks = np.asarray(pace.durations(ClockState.start(), IDS, 0)) * TICK
    assert abs(ticks.mean() - 1) < 4 * pace.spread.std() / np.sqrt(1000)
    again = np.asarray(pace.durations(ClockState.start().later(pace, jnp.asarray(5)), IDS, 0)) * TICK
    assert abs(np.corrcoef(ticks, again)[0, 1]) < 4 / np.sqrt(1000)  # drawn anew for each exchange


@pytest.mark.parametrize(
    ("fields", "path", "fact"),
    [
        ({"arrivals": [[1, 0]]}, "arrivals", "booleans"),
        ({"arrivals": [[True], [True, False]]}, "arrivals", "booleans"),
        ({"arrivals": [[True, False]]}, "arrivals", "rows of 3"),
        ({"arrivals": lambda exchange, client, key: 1.0}, "arrivals", "(exchange, client, key) that returns a boolean"),
        ({"arrivals": [[True] * 3], "stragglers": 1}, "stragglers", "0 with arrivals"),
        ({"arrivals": [[True] * 3], "network": [1, 1, 2]}, "network", "one number with arrivals"),
    ],
)
def test_a_schedule_of_arrivals_that_cannot_be_is_refused(fields, path, fact):
    with refuses(f"Clock.{path}", fact=fact):
        fb.Clock(**fields).pace(3)


@pytest.mark.slow
def test_arrivals_that_read_something_changed_are_noticed():
    """A schedule of arrivals that reads a value that has changed gets another program.

    Programs are found by what their schedule computes. If no client arrives, no reply counts.
    """
    late, sent = [True], []
    algorithm = fb.Asynchronous(fixed(fb.SimFBO(batch_size=None, local_steps=1)), wait_for=1)
    for late[0] in (True, False):
        clock = fb.Clock(arrivals=lambda exchange, client, key: jnp.asarray(late[0]))
        task = quadratic(clients=3)
        run = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=2, engine=fb.Local(clock=clock))
        sent.append(run.ledger.bytes_up)
    assert sent[0] > 0 == sent[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrivals", "other", "name"),
    [
        ([[True, False, True], [False, True, False]], [[True, True, True]], "clock's arrivals"),
        (lambda e, i, key: jax.random.bernoulli(key), lambda e, i, key: e % 3 == i, "Clock.arrivals"),
    ],
)
def test_a_run_by_a_schedule_goes_on_by_it_and_by_no_other(arrivals, other, name, tmp_path):
    algorithm = fb.Asynchronous(fixed(fb.SimFBO(batch_size=None, local_steps=1)), wait_for=1)
    task = quadratic(clients=3, samples=(5, 5))

    def run(arrivals, rounds, **options):
        start, engine = (task.x0, task.y0), fb.Local(clock=fb.Clock(arrivals=arrivals))
        return fb.solve(algorithm, task.problem, task.clients, *start, rounds=rounds, engine=engine, **options)

    file = tmp_path / "run"
    run(arrivals, 3, checkpoint=file)
    with raises_with(fb.errors.CheckpointError, path=file) as error:
        run(other, 6, checkpoint=file, resume=True)
    assert [*error.value.differences] == [name]
    np.testing.assert_array_equal(run(arrivals, 6, checkpoint=file, resume=True).x, run(arrivals, 6).x)


def test_drift_lasts_for_a_period():
    pace = fb.Clock(drift=0.5, period=10.0).pace(1000)
    start = ClockState.start()
    same = start.later(pace, jnp.asarray(int(9.9 / TICK)))
    other = start.later(pace, jnp.asarray(int(10.1 / TICK)))
    ticks = [np.asarray(pace.durations(now, IDS, 0)) for now in (start, same, other)]
    assert np.array_equal(ticks[0], ticks[1])
    assert abs(np.corrcoef(ticks[0], ticks[2])[0, 1]) < 4 / np.sqrt(1000)


def test_the_clock_counts_periods_that_end_within_exchanges():
    """After exchanges of 0.4 to 2.9 periods, the clock is where their sum says."""
    pace, now, total = fb.Clock(drift=0.5, period=1.0).pace(3), ClockState.start(), 0
    for ticks in np.random.default_rng(0).integers(4_000, 29_000, size=50).tolist():
        now, total = now.later(pace, jnp.asarray(ticks)), total + ticks
        assert (int(now.periods), int(now.moment)) == divmod(total, 10_000)


def test_the_stragglers_are_as_many_and_as_slow_as_said():
    network = fb.Clock(stragglers=5, slowdown=4.0, seed=1).pace(18).network
    assert sorted(np.round(network * TICK, 6).tolist()) == [1.0] * 13 + [4.0] * 5
    assert not np.array_equal(network, fb.Clock(stragglers=5, slowdown=4.0, seed=2).pace(18).network)


def test_clients_are_there_for_their_share_of_each_period():
    clock = fb.Clock(availability=[0.25, 0.0, 1.0, 0.5], period=8.0, seed=4)
    pace = clock.pace(4)
    moments = np.arange(0, 160_000, 500)
    waits = np.array([np.asarray(pace.waits(ClockState.start(), jnp.arange(4), np.full(4, m))) for m in moments])
    np.testing.assert_allclose((waits == 0).mean(0)[[0, 2, 3]], [0.25, 1.0, 0.5], atol=0.01)
    assert clock.never_available(4).tolist() == [1]
    assert waits[:, 0].max() <= 0.75 * 8 / TICK
    begins, lasts, period = int(pace.begins[3]), 40_000, 80_000
    edges = [0, lasts - 1, lasts, period - 1]
    at = [int(pace.waits(ClockState.start(), jnp.array([3]), np.array([begins + edge]))[0]) for edge in edges]
    assert at == [0, 0, period - lasts, 1]  # exact to the tick


def test_an_exchange_waits_for_clients_to_come_back():
    """If clients reply in no time, an exchange lasts until the last of them is available."""
    clock = fb.Clock(network=0.0, availability=[1, 1, 1, 1, 1, 0.5], period=8.0, seed=0)
    begins = int(clock.pace(6).begins[5]) * TICK
    first = 0.0 if (0 - begins) % 8 < 4 else begins
    np.testing.assert_allclose(times(fixed(fb.SimFBO(local_steps=1)), clock, rounds=1)[-1], first, atol=TICK)


def test_who_is_never_there_is_told_and_left_out():
    """Clients that are never there are named and left out, with p_i normalised over the others.

    Four clients are left. The first run waits for all clients, and the second run for the first four replies: both have
    the same result. In the second run the server itself divides by the weight of the clients that have replied.
    """
    clock = fb.Clock(availability=[1, 1, 0, 1, 0, 1])
    found = []
    simfbo = fixed(fb.SimFBO(local_steps=1, batch_size=None))
    for algorithm in (simfbo, fb.Asynchronous(simfbo, wait_for=4)):
        with warns_with(fb.errors.AbsenceWarning, ": 2, 4"):
            found.append(solve(algorithm, rounds=3, clock=clock))
    assert found[0].ledger.replies == found[1].ledger.replies == 3 * 4
    np.testing.assert_allclose(found[0].y, found[1].y, rtol=1e-12, atol=1e-12)
    assert np.linalg.norm(found[0].y) > 1e-3
    with refuses("Clock.availability", "0 for 2 of 6 clients", "a cohort of 2"):
        solve(fixed(fb.SimFBO()), rounds=3, cohort=2, clock=clock)


@pytest.fixture(scope="module")
def busy():
    return fb.Clock(compute=0.2, spread=0.5, stragglers=2, drift=0.3, period=6.0, availability=[1, 0.6, 1, 1, 0.4, 1])


def test_an_asynchronous_run_resumes_to_the_bit(busy, tmp_path):
    def run(rounds, path, resume=False):
        return solve(Early(), rounds=rounds, eval_every=2, clock=busy, checkpoint=path, resume=resume)

    whole = run(6, tmp_path / "whole.npz")
    run(4, tmp_path / "parts.npz")
    parts = run(6, tmp_path / "parts.npz", resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state, parts.state)
    for a, b in zip(whole.history.rows, parts.history.rows, strict=True):
        assert a | {"seconds": 0} == b | {"seconds": 0}
    with raises_with(fb.errors.CheckpointError, path=tmp_path / "parts.npz") as error:
        solve(Early(), rounds=8, eval_every=2, checkpoint=tmp_path / "parts.npz", resume=True)
    assert [*error.value.differences] == ["clock"]


@pytest.mark.slow
def test_the_same_events_in_float32_and_float64(busy):
    """The same events happen in float32 and float64, since times are whole numbers."""
    took = []
    for x64 in (True, False):
        with jax.enable_x64(x64):
            task = quadratic(clients=6, samples=(4, 4))
            took.append(times(Early(), busy, rounds=10, task=task))
    assert np.array_equal(*took)
    assert np.all(np.diff(took[0]) > 0)


@pytest.mark.slow
def test_a_nan_of_a_client_stops_an_asynchronous_run_and_is_named(busy):
    bad = fb.Bilevel(TASK.problem.outer, lambda x, y, batch: TASK.problem.inner(x, y, batch) + jnp.sqrt(0.5 - y[0]))
    with raises_with(fb.errors.NonFiniteError, "phase inner: the reply of client "):
        fb.solve(Early(), bad, TASK.clients, TASK.x0, TASK.y0 + 1.0, rounds=5, engine=fb.Local(clock=busy))


@pytest.mark.parametrize(
    ("name", "value", "fact"),
    [
        ("network", -1.0, "0 to 13422"),
        ("network", 1e5, "0 to 13422"),
        ("compute", [1.0, np.nan], "0 to 13422"),
        ("availability", 1.5, "0 to 1"),
        ("slowdown", 0, "positive"),
        ("stragglers", 2.5, "whole number"),
        ("period", 0.0, "0.0001 to 13422"),
        ("spread", "much", "0 to 5"),
        ("seed", -1, "from 0"),
    ],
)
def test_wrong_fields_are_refused(name, value, fact):
    with refuses(f"Clock.{name}", value, fact):
        fb.Clock(**{name: value})


@pytest.mark.parametrize(
    ("algorithm", "options", "path", "got", "fact"),
    [
        (Early(n=7), {}, "fed.sum_first: n", 7, "1 to 6"),
        (Early(n=0), {}, "fed.sum_first: n", 0, "1 to 6"),
        (Early(n=6), {"clock": fb.Clock(availability=[1, 1, 1, 1, 1, 0])}, "fed.sum_first: n", 6, "1 to 5"),
        (Early(max_staleness=-1), {}, "fed.sum_first: max_staleness", -1, "positive"),
        (Early(), {"clock": fb.Clock(network=3600.0, stragglers=1)}, "Clock.slowdown", 5.0, "13422"),
        (Early(), {"cohort": 3}, "cohort", 3, "None"),
        (Early(), {"stream": True}, "algorithm", "Early", "streamed"),
        (Early(), {"clock": fb.Clock(stragglers=7)}, "Clock.stragglers", 7, "at most 6"),
        (Early(), {"clock": fb.Clock(network=[1.0, 2.0])}, "Clock.network", "2 numbers", "6"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.AbsenceWarning")
def test_what_could_never_end_is_refused(algorithm, options, path, got, fact):
    with refuses(path, got, fact):
        solve(algorithm, rounds=1, **options)


def test_a_method_that_asks_for_the_first_replies_has_to_say_so():
    with refuses("asks", fact="Asks(first"):
        solve(Silent(), rounds=1)
