"""Clients' own numbers: each form gives what it says, phases find them in their fields, other forms are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import SINGLE_LEVEL

import fedbilevel as fb
from fedbilevel.core.own import as_client, check_own, numbers_of, own_fields, read
from fedbilevel.errors import ConfigurationError
from fedbilevel.parts import MeanGradient, Mixed
from fedbilevel.tasks.quadratic import quadratic
from refusals import ANY, raises_with, refuses

CLIENTS = 3
IDS = jnp.array([2, 0])
KEY = jax.random.key(0)
ROWS = {"outer": np.ones((CLIENTS, 4, 2)), "inner": np.ones((CLIENTS, 4, 2))}


def numbers(given, round=1, key=KEY):
    return np.asarray(numbers_of({"n": read("n", given, CLIENTS)}, key, jnp.asarray(round), IDS)["n"])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (4, [4, 4]),
        (0.5, [0.5, 0.5]),
        ([5, 6, 7], [7, 5]),
        (np.array([[1, 2, 3], [5, 6, 7]]), [7, 5]),
        (lambda round, client, key: 10 * round + client, [12, 10]),
        (np.arange(12).reshape(2, 2, 3), [8, 6]),
        (lambda round, client, key, k: 100 * k + 10 * round + client, [12, 10]),
        (lambda round, client, key, shift=100: shift + client, [102, 100]),
    ],
)
def test_each_form_gives_what_it_says(given, expected):
    np.testing.assert_array_equal(numbers(given), expected)


@pytest.mark.parametrize("bounds", [(1, 10), (3, 3), (5, 6)])
def test_a_range_is_uniform_between_its_bounds(bounds):
    """The shares of 20,000 draws from a range are equal, within five standard deviations."""
    (low, high), draws = bounds, 20_000
    drawn = numbers_of({"n": read("n", bounds, CLIENTS)}, KEY, jnp.asarray(0), jnp.arange(draws))["n"]
    assert drawn.dtype == np.int32
    found = np.bincount(np.asarray(drawn) - low, minlength=high - low + 1)
    assert len(found) == high - low + 1  # no draw is outside; bincount refuses negative numbers
    share = 1 / len(found)
    assert np.all(np.abs(found / draws - share) <= 5 * np.sqrt(share * (1 - share) / draws))


def test_what_is_drawn_depends_on_the_client_not_on_its_place():
    own, ids = {"n": read("n", {"low": 0.5, "high": 0.6}, CLIENTS)}, jnp.array([5, 2, 9, 0])
    draw = lambda ids: numbers_of(own, KEY, jnp.asarray(0), ids)["n"].tolist()  # noqa: E731
    assert draw(ids[::-1]) == draw(ids)[::-1]
    assert draw(ids[1:2]) == draw(ids)[1:2]
    assert len(set(draw(ids))) == 4
    assert all(0.5 <= number <= 0.6 for number in draw(ids))


def test_two_names_are_drawn_apart():
    own = {name: read(name, (0.0, 1.0), CLIENTS) for name in ("a", "b", "local_steps")}
    found = numbers_of(own, KEY, jnp.asarray(0), IDS)
    assert len({float(column[0]) for column in found.values()}) == 3


def test_numbers_of_inner_rounds_are_apart():
    """Numbers differ between inner rounds.

    In the second of two rounds, a table gives the row of k, and keys differ with k, the client and the round.
    """
    table, draw = np.arange(12).reshape(2, 2, 3), lambda round, client, key, k: jax.random.uniform(key)
    own, drawn = {"n": read("n", table, CLIENTS)}, {"n": read("n", draw, CLIENTS)}
    for k in (0, 1):
        assert numbers_of(own, KEY, jnp.asarray(1), IDS, k)["n"].tolist() == table[1, k, IDS].tolist()
    found = [numbers_of(drawn, KEY, jnp.asarray(1), IDS, k)["n"].tolist() for k in (0, 1)]
    assert len({*found[0], *found[1]}) == 4


def test_a_method_has_the_numbers_in_its_fields():
    changed = as_client(
        fb.SimFBO(server_lr=0.2, local_optimizer=Mixed()), {"client_lr.y": 0.3, "local_optimizer.pull": 0.2}
    )
    assert (changed.client_lr.y, changed.client_lr.x, changed.local_optimizer.pull) == (0.3, 0.05 * 0.2, 0.2)
    assert "inner.client_lr" in dict(own_fields(fb.Asynchronous(fb.AFBO(inner=MeanGradient()), wait_for=2)))


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        (
            [1, 2],
            ("Clients.own['n']", [1, 2], "(rounds, inner rounds, 3)"),
        ),
        ([1, np.nan, 2], ("Clients.own['n']", [1, np.nan, 2])),
        ([1, 2**32 + 2, 1], ("Clients.own['n']", [1, 2**32 + 2, 1])),
        ("much", ("Clients.own['n']", "much")),
        ((4, 2), ("Clients.own['n']", (4, 2), "low ≤ high")),
        ((1, 2, 3), ("Clients.own['n']", (1, 2, 3), "(low, high)")),
        ({"low": 1}, ("Clients.own['n']", {"low": 1}, "{low = …, high = …}")),
        (lambda round: 1, ("Clients.own['n']", ANY, "(round, client, key)")),
        (
            lambda round, client, key: jnp.ones(2),
            ("Clients.own['n']", ANY, "(round, client, key, k)"),
        ),
    ],
)
def test_what_is_none_of_the_forms_is_refused(given, refusal):
    with refuses(*refusal):
        fb.Clients(**ROWS, own={"n": given})


@pytest.mark.parametrize(
    ("method", "own", "refusal"),
    [
        (
            fb.SimFBO(),
            {"client_lr.z": 1},
            ("name in the clients' own numbers for SimFBO", "client_lr.z", "", "client_lr.y"),
        ),
        (fb.SimFBO(), {"client_lr.x": [0, 1, 2]}, ("Clients.own['client_lr.x']", 0)),
        (fb.FedNest(), {"outer_steps": [1, 2, 0]}, ("Clients.own['outer_steps']", 0)),
        (fb.FedNest(), {"outer_steps": 1.5}, ("Clients.own['outer_steps']", 1.5)),
        (
            fb.SimFBO(local_optimizer=Mixed()),
            {"local_optimizer.decay": [0, 0.5, 1]},
            ("Clients.own['local_optimizer.decay']", 1.0, "at least 0 and below 1"),
        ),
        (
            fb.SimFBO(),
            {"local_steps": lambda round, client, key: 2 - client},
            ("Clients.own['local_steps'] in round 0, of client 2", 0),
        ),
        (
            fb.SimFBO(),
            {"local_steps": lambda round, client, key: 1.5 + client},
            ("Clients.own['local_steps'] in round 0, of client 0", 1.5),
        ),
        (
            fb.SimFBO(),
            {"client_lr.x": lambda round, client, key: 0.1 - 0.01 * round},
            ("Clients.own['client_lr.x'] in round 10, of client 0", 0.0),
        ),
        (
            fb.FedNest(),
            {"outer_steps": lambda round, client, key: 17 - round},
            ("Clients.own['outer_steps'] in round 17, of client 0", 0),
        ),
        (
            fb.Asynchronous(fb.AFBO(inner=MeanGradient(rounds=4)), wait_for=2),
            {"local_steps": lambda round, client, key, k: 3 - k},
            ("Clients.own['local_steps'] in round 0, inner round 3, of client 0", 0),
        ),
        (fb.SimFBO(), {"local_steps": np.ones((1, 2, 3), int)}, ("Clients.own['local_steps']", ANY, "SimFBO")),
        (
            fb.SimFBO(),
            {"local_steps": lambda round, client, key, k: 1 + k},
            ("Clients.own['local_steps']", ANY, "SimFBO"),
        ),
        (
            fb.FedNest(),
            {"outer_steps": lambda round, client, key, k: 1 + k},
            ("Clients.own['outer_steps']", ANY, "inner rounds"),
        ),
        (fb.LFedNest(), {"outer_steps": np.ones((5, 1, 3), int)}, ("Clients.own['outer_steps']", ANY, "inner rounds")),
        (
            fb.Asynchronous(fb.AFBO(inner=MeanGradient(rounds=4)), wait_for=2),
            {"local_steps": np.ones((5, 2, 3), int)},
            ("Clients.own['local_steps']", "of shape (5, 2, 3)", "(5, 4, M)"),
        ),
        (
            fb.AFBO(inner=MeanGradient(rounds=lambda round: 1 + round // 2)),
            {"local_steps": np.ones((5, 2, 3), int)},
            ("Clients.own['local_steps']", "of shape (5, 2, 3)", "(5, 3, M)"),
        ),
    ],
)
def test_a_method_refuses_what_its_field_would(method, own, refusal):
    with refuses(*refusal):
        check_own(method, fb.Clients(**ROWS, own=own).own, CLIENTS, rounds=18)


def test_all_that_is_wrong_is_said_at_once():
    own = fb.Clients(**ROWS, own={"client_lr.x": -1.0, "outer_steps": 2}).own
    with pytest.raises(ConfigurationError) as refused:
        check_own(fb.SimFBO(), own)
    assert [(wrong.path, wrong.got) for wrong in refused.value.wrong] == [
        ("Clients.own['client_lr.x']", -1.0),
        ("name in the clients' own numbers for SimFBO", "outer_steps"),
    ]


def test_local_steps_are_counts_and_given_once():
    with refuses("Clients.local_steps", 0):
        fb.Clients(**ROWS, local_steps=[0, 1, 1])
    with refuses("Clients.own", "local_steps", "Clients.local_steps"):
        fb.Clients(**ROWS, local_steps=2, own={"local_steps": 2})


def test_a_run_is_no_longer_than_its_table():
    problem = fb.Bilevel(lambda x, y, b: jnp.sum(y**2), lambda x, y, b: jnp.sum((y - x) ** 2))
    clients = fb.Clients(**ROWS, local_steps=np.ones((2, CLIENTS), int))
    with refuses("rounds", 3, "at most 2"):
        fb.solve(fb.SimFBO(), problem, clients, np.ones(2), np.ones(2), rounds=3)


@pytest.mark.slow
def test_a_longer_table_is_no_other_run(tmp_path):
    """A resumed run may have more rows in a table, but no other numbers in rows of rounds that are done."""
    task, table = quadratic(clients=CLIENTS, samples=(5, 5)), np.ones((4, CLIENTS), int)

    def run(rounds, table, **resume):
        clients = fb.Clients(task.clients.outer, local_steps=table)
        given = SINGLE_LEVEL, clients, task.x0
        options = {"checkpoint": tmp_path / "run.npz", "engine": fb.Reference(), **resume}
        return fb.solve(fb.FedAvg(), *given, rounds=rounds, **options)

    run(2, table[:2])
    assert run(4, table, resume=True).round == 4
    with raises_with(fb.errors.CheckpointError, differences={"clients' local steps": None}):
        run(4, 2 * table, resume=True)
    with raises_with(fb.errors.CheckpointError, differences={"clients' local steps": None}):
        run(4, table[0], resume=True)


@pytest.mark.slow
def test_a_rule_that_reads_something_changed_is_noticed():
    """A rule that reads a value that has changed gets another program.

    Programs are found by what their rules compute, not by the names of the rules.
    """
    task = quadratic(clients=CLIENTS)
    steps = [1]
    outcomes = []
    for number in (1, 3):
        steps[0] = number
        clients = fb.Clients(task.clients.outer, local_steps=lambda r, c, k: jnp.asarray(steps[0]))
        outcomes.append(fb.solve(fb.FedAvg(), SINGLE_LEVEL, clients, task.x0, rounds=1).ledger.gradients)
    assert outcomes[1] == 3 * outcomes[0]
