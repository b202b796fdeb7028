"""Differential privacy in a simulation: clipping, the law of the noise, ε, the budget, and the agreement of engines.

Each random test uses one seed, so that it always gives the same result, and allows four standard errors.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.parts.layers import Asked
from fedbilevel.algorithms.parts.private import Private
from fedbilevel.core import on_disk
from fedbilevel.engines.engine import round_keys
from fedbilevel.engines.local.engine import LocalRun
from fedbilevel.engines.saver import START_ANEW
from fedbilevel.errors import CheckpointError, CheckpointWarning, NonFiniteError
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses, warns_with

TASK = quadratic(clients=6, dim_x=2, dim_y=3, samples=(3, 5))
SIMFBO = fixed(fb.SimFBO(batch_size=2, local_steps=2))
NEUMANN = fb.parts.Implicit(solver=fb.parts.Neumann(terms=2))
FEDNEST = fixed(fb.FedNest(batch_size=2, inner=fb.parts.SVRG(local_steps=1), hypergradient=NEUMANN))
FEW = fb.Privacy(clip=1e6, noise_multiplier=1e-20, delta=1e-5)  # noise of deviation 1e-14
PRIVACY = fb.Privacy(clip=0.5, noise_multiplier=0.3, delta=1e-5)


def solve(algorithm, task=TASK, **given):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, **({"rounds": 3, "key": 1} | given))


def close(one, other, tolerance=1e-12):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# What is sent


class Sums(NamedTuple):
    """Sums over exchanges, where v is the mean of the replies minus its expectation.

    The sums are Σ v, Σ v vᵀ, and Σ v uᵀ with the v of the exchange before as u. The last replies are kept too.
    """

    x: jax.Array
    y: jax.Array
    square: jax.Array
    lagged: jax.Array
    got: jax.Array
    last: jax.Array


class Gradients(authoring.Algorithm):
    """Ask for the same gradients again and again; with `again`, also with the same key."""

    exchanges: int = authoring.static(default=1)
    again: bool = authoring.static(default=False)

    def init(self, x, y):
        table = jnp.zeros((x.size, x.size))
        return Sums(x, y, table, table, {"u": x, "w": x[:1], "n": jnp.zeros(()), "q": x}, x)

    @authoring.phase
    def gradient(self, client, x, key):
        u = jax.grad(client.problem.outer)(x, x, client.outer_batch(key, None))
        marks = {"n": authoring.Public(jnp.ones(())), "q": authoring.Withheld(u)}
        return authoring.Reply({"u": u, "w": u[:1], **marks}, metrics={"size": u @ u}, gradients=1)

    def round(self, fed, state, key):
        def step(fed, state, other):
            got = fed.mean(self.gradient, state.x, key if self.again else other)
            v, marks = got["u"], {"n": got["n"].public, "q": got["q"].withheld}
            square, lagged = state.square + jnp.outer(v, v), state.lagged + jnp.outer(v, state.last)
            return Sums(state.x, state.y + v, square, lagged, got | marks, v)

        return fed.repeat(self.exchanges, step, state, key)


D, P = 3, 4


def centres(t):
    """Return a problem with f_i(x) = ‖x − t_i‖²/2, clients of equal weights, which reply −t_i at x = 0, and a start."""
    problem = fb.Bilevel(
        lambda x, y, b: jnp.mean(jnp.sum((x - b["t"]) ** 2, -1)) / 2 + 0 * y @ y, lambda x, y, b: jnp.sum((x - y) ** 2)
    )
    return problem, fb.Clients([{"t": row[None]} for row in t]), jnp.zeros(D), jnp.zeros(D)


@pytest.mark.parametrize("again", [False, True])
def test_noise_of_a_mean_has_variance_z_squared_c_squared_over_p(again):
    """Noise has the mean 0, the covariance σ²/P·I with σ = zC, and no correlation in time, also with one key.

    This is measured over n exchanges. Sums of n squares have the variance 2n·(σ²/P)², and sums of products of
    independent numbers half of it.
    """
    n, sigma = 20_000, 0.7 * 2.0
    terms, v = fb.Privacy(clip=2.0, noise_multiplier=0.7, delta=1e-5), sigma**2 / P
    state = fb.solve(
        Gradients(exchanges=n, again=again), *centres(np.zeros((P, D))), rounds=1, privacy=terms, key=3
    ).state.inside
    assert np.all(np.abs(state.y) < 4 * np.sqrt(n * v))
    assert np.all(np.abs(state.square / n - v * np.eye(D)) < 4 * v * np.sqrt((1 + np.eye(D)) / n))
    assert np.all(np.abs(state.lagged / n) < 4 * v / np.sqrt(n))


@pytest.mark.parametrize(("clip", "size"), [(0.5, 1.0), (2.0, 1.0), (100.0, 1.0), (0.5, 1e200)])
def test_all_unmarked_leaves_together_are_clipped(clip, size):
    """All leaves of a reply that are not marked are clipped together; marked leaves have no part in it.

    Each client replies u and its first entry once more. ‖(u, u_0)‖ is 0.7 to 6 times `size`, whose square may be
    infinite.
    """
    t = size * np.array([[0.5, 0, 0], [0, 1, 2], [3, 2, 1], [-4, 0, 1.0]])
    terms = fb.Privacy(clip=clip, noise_multiplier=1e-15, delta=1e-5)
    result = fb.solve(Gradients(), *centres(t), rounds=1, privacy=terms, eval_every=1)
    whole = np.concatenate([-t, -t[:, :1]], 1)
    lengths = size * np.linalg.norm(whole / size, axis=1)
    sent = whole * np.minimum(1, clip / lengths)[:, None]
    got = result.state.inside.got
    np.testing.assert_allclose(np.concatenate([got["u"], got["w"]]), sent.mean(0), atol=1e-12)
    assert (float(got["n"]), got["q"].tolist()) == (1.0, [0.0] * D)
    assert "size" not in result.history.columns  # as from a site, which reports no metrics
    assert result.history["reply_norm.gradient"][-1] == pytest.approx(lengths.mean(), rel=1e-12)
    assert result.history["clipped.gradient"][-1] == np.mean(lengths > clip)
    columns = {f"reply_norm.gradient.p{percent}": at for percent, at in ((10, 0), (50, 1), (90, 3))}
    if size == 1e200:  # too large for the columns
        assert not columns.keys() & {*result.history.columns}
    else:  # the quantiles of four: in the same quarter of an octave as the shortest, the second and the longest
        found = np.array([result.history[name][-1] / np.sort(lengths)[at] for name, at in columns.items()])
        assert np.all(np.abs(np.log2(found)) < 1 / 4)
    assert result.ledger.gradients == P  # counted for the clock


METHODS = {
    "SimFBO": SIMFBO,
    "FedNest, fresh cohorts": FEDNEST,
    "a client state": TwoPhase(),
    "Asynchronous": fb.Asynchronous(SIMFBO, wait_for=2),
    "SDBO, first replies": fixed(fb.SDBO()),
}
QUICK = ("a client state",)
SOME = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in METHODS]
TIMED = fb.Clock(compute=0.5, spread=0.3)


def given(name):
    return {"cohort": None} if name in ("Asynchronous", "SDBO, first replies") else {"cohort": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_without_noise_and_clip_a_run_is_what_it_is_without_privacy(name):
    """With noise of σ = 1e-14 and no clip, a run equals a run without privacy.

    This noise is below the rounding of numbers of size 1.
    """
    plain = solve(METHODS[name], **given(name), engine=fb.Local(clock=TIMED))
    hidden = solve(METHODS[name], **given(name), engine=fb.Local(clock=TIMED), privacy=FEW)
    close((plain.x, plain.y), (hidden.x, hidden.y), 1e-11)
    assert float(jnp.linalg.norm(plain.x - TASK.x0)) > 1e-4
    for cost in ("exchanges", "bytes_down", "bytes_up", "replies", "gradients", "hvps", "ticks"):
        assert getattr(plain.ledger, cost) == getattr(hidden.ledger, cost)


# Engines


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_engines_agree(name):
    """Engines agree to 1e-12 on numbers that contain noise of deviation 0.15, as in tests/engines/test_agreement.py.

    test_layered.py has a case for each time.
    """
    engines = fb.Reference(clock=TIMED), fb.Local(clock=TIMED, devices=2, chunk=2)
    one, other = (solve(METHODS[name], **given(name), privacy=PRIVACY, engine=engine, rounds=2) for engine in engines)
    close(one.state, other.state)
    assert one.ledger == other.ledger
    assert one.ledger.epsilon > 0


@pytest.mark.slow
def test_clients_with_submodels_have_it_too():
    """Clients with submodels support privacy.

    Since they keep nothing between rounds, each exchange counts as a reply of every client.
    """
    task = quadratic(clients=5, dim_x=3, dim_y=4, samples=(3, 3), units=2)
    task = task.with_own(own={}, capacity=[1.0, 0.5, 0.5, 1.0, 0.5])
    algorithm = fixed(fb.RABO(batch_size=None))
    results = [
        solve(algorithm, task, cohort=3, rounds=2, privacy=PRIVACY, engine=engine)
        for engine in (fb.Reference(), fb.Local())
    ]
    close(results[0].state, results[1].state)
    ledger = results[1].ledger
    assert ledger.epsilon == PRIVACY.epsilon_after(ledger.exchanges)


# The account


def test_epsilon_is_that_of_all_replies_where_everyone_takes_part():
    """If all clients take part, ε is computed from all replies.

    Here a round has three inner exchanges and a correction.
    """
    result = solve(TwoPhase(), rounds=4, eval_every=2, privacy=PRIVACY)
    expected = [0.0, PRIVACY.epsilon_after(2 * 4), PRIVACY.epsilon_after(4 * 4)]
    assert result.history["epsilon"].tolist() == expected
    assert result.ledger.epsilon == expected[-1]
    assert "epsilon" not in result.history.measured
    assert f"ε = {expected[-1]:.4g} at δ = 1e-05" in str(result.summary())


def drawn(rounds, cohort, key=1):
    """Return how often each client is drawn for a round."""
    draw = fb.Cohort(cohort).draw
    ids = [draw(round_keys(jax.random.key(key), round).cohort, 6) for round in range(rounds)]
    return np.bincount(np.concatenate(ids), minlength=6)


def test_epsilon_with_cohorts_is_that_of_the_client_that_was_drawn_most():
    counts = drawn(8, 2)
    assert 1 <= counts.min() + 1 < counts.max() < 8
    assert solve(SIMFBO, rounds=8, cohort=2, privacy=PRIVACY).ledger.epsilon == PRIVACY.epsilon_after(counts.max())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.NumericalWarning")
def test_an_exchange_with_a_fresh_cohort_counts_for_everyone():
    """An exchange with a fresh cohort counts as a reply of every client.

    FedNest asks its own cohort for the inner steps, and a fresh one in each exchange of the hypergradient.
    """
    result = solve(FEDNEST, rounds=5, cohort=2, privacy=PRIVACY)
    phases = result.ledger.exchanges_by_phase
    fresh = sum(count for name, count in phases.items() if name.startswith("hypergradient"))
    own = (result.ledger.exchanges - fresh) // 5
    assert fresh > 0 < own
    most = drawn(5, 2).max()
    assert most < 5
    assert result.ledger.epsilon == PRIVACY.epsilon_after(most * own + fresh)


def test_epsilon_with_asynchronous_clients_counts_their_messages():
    """With asynchronous clients, ε counts the messages that each client gets.

    The first exchange asks all six clients, which are equally fast. Client 0, which has the lowest number, ends it, and
    is asked again in the second exchange, which client 1 ends, and so on. The seventh exchange asks client 5 again, and
    the eighth asks client 0.
    """
    result = solve(fb.Asynchronous(SIMFBO, wait_for=1), rounds=8, cohort=None, privacy=PRIVACY, eval_every=1)
    most = [0, 1, 2, 2, 2, 2, 2, 2, 3]
    assert result.history["epsilon"].tolist() == [PRIVACY.epsilon_after(replies) for replies in most]


@pytest.mark.parametrize(("counts", "fresh", "added"), [(True, None, 0), (True, 0, 1), (False, None, 1)])
def test_the_server_counts_the_exchanges_whose_replies_clients_do_not_count(counts, fresh, added):
    """The server counts the exchanges with fresh cohorts, or all exchanges if clients keep nothing.

    Clients count the other exchanges.
    """
    layer = Private(clip=1.0, noise_multiplier=1.0, delta=1e-5, counts=counts)
    asked = Asked(SIMFBO, "local_updates", None, jax.random.key(0), fresh=fresh)
    assert layer.exchange(asked, jnp.asarray(4), lambda again: again)[1] == 4 + added
    assert (layer.client_slot(SIMFBO, TASK.problem, TASK.x0, TASK.y0) is None) == (not counts)


# The budget


@pytest.mark.parametrize("eval_every", [1, 4, 100])
def test_a_run_ends_before_the_round_that_would_pass_the_budget(eval_every):
    terms = fb.Privacy(0.5, 5.0, 1e-5, budget=fb.Privacy(0.5, 5.0, 1e-5).epsilon_after(6) * 1.0001)
    result = solve(SIMFBO, rounds=20, eval_every=eval_every, privacy=terms)
    assert (result.round, result.ledger.exchanges, result.history.rows[-1]["round"]) == (6, 6, 6)
    assert result.ledger.epsilon == terms.epsilon_after(6) <= terms.budget < terms.epsilon_after(7)
    said = f"privacy budget spent after round 6: ε = {terms.epsilon_after(6):.6g} at δ = 1e-05, and "
    assert result.stopped == f"{said}{terms.epsilon_after(7):.6g} after one more, over {terms.budget:g}"
    close(solve(SIMFBO, rounds=6, privacy=terms).x, result.x, 0)


def test_with_cohorts_it_ends_where_a_client_is_drawn_once_too_often():
    terms = fb.Privacy(0.5, 5.0, 1e-5, budget=fb.Privacy(0.5, 5.0, 1e-5).epsilon_after(3))
    expected = next(n for n in range(20) if drawn(n + 1, 2).max() > 3)
    result = solve(SIMFBO, rounds=20, cohort=2, privacy=terms)
    assert result.round == expected
    assert result.stopped


@pytest.mark.slow
@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_budget_copies_no_tables_of_clients_states_on_disk(eval_every, monkeypatch):
    """A budget copies no tables of clients' states on disk.

    Rounds change the tables in place. A refused round leaves the rows as they were, also those of its own cohort, and
    no table is made between the first round and the last.
    """
    terms = fb.Privacy(0.5, 5.0, 1e-5)
    each = solve(TwoPhase(), rounds=1).ledger.exchanges
    limited = fb.Privacy(0.5, 5.0, 1e-5, budget=terms.epsilon_after(3 * each))
    allowed = next(n for n in range(20) if drawn(n + 1, 4).max() > 3)
    made = []

    class Watched(fb.Local):
        def start(self, *given):
            run = super().start(*given)
            made.clear()  # so that only tables that rounds make are counted
            return run

    carries, real, table = [], LocalRun.advance, on_disk.table

    def advance(self, carry, rounds):
        stretch = real(self, carry, rounds)
        carries.append((stretch.carry.clients, stretch.rounds))
        return stretch

    monkeypatch.setattr(on_disk, "table", lambda shape, *given: made.append(shape) or table(shape, *given))
    monkeypatch.setattr(LocalRun, "advance", advance)
    given = {"cohort": 4, "engine": Watched(stream=True), "eval_every": eval_every}
    result = solve(TwoPhase(), rounds=20, privacy=limited, **given)
    assert (result.round, made) == (allowed, [])
    assert len(carries) == allowed + 1  # the last round was refused
    tables = jax.tree.map(np.array, carries[-1][0])
    carries.clear()
    whole = solve(TwoPhase(), rounds=allowed, privacy=terms, **given)
    close(whole.state, result.state, 0)
    close(jax.tree.map(np.array, carries[-1][0]), tables, 0)
    assert whole.ledger == result.ledger


def test_a_budget_below_one_round_allows_none():
    terms = fb.Privacy(0.5, 5.0, 1e-5, budget=0.01)
    result = solve(SIMFBO, privacy=terms)
    assert (result.round, len(result.history), result.ledger.epsilon) == (0, 1, 0.0)
    assert "after round 0" in result.stopped


# Going on


@pytest.mark.parametrize("name", SOME)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(name, tmp_path):
    whole = solve(METHODS[name], **given(name), rounds=5, eval_every=1, privacy=PRIVACY)
    file = tmp_path / "run.npz"
    solve(METHODS[name], **given(name), rounds=2, eval_every=1, privacy=PRIVACY, checkpoint=file)
    again = solve(METHODS[name], **given(name), rounds=5, eval_every=1, privacy=PRIVACY, checkpoint=file, resume=True)
    close(whole.state, again.state, 0)
    assert whole.ledger == again.ledger
    assert whole.history["epsilon"].tolist() == again.history["epsilon"].tolist()


def test_a_run_that_spent_its_budget_ends_again_where_it_ended(tmp_path):
    terms = fb.Privacy(0.5, 5.0, 1e-5, budget=fb.Privacy(0.5, 5.0, 1e-5).epsilon_after(2))
    given = {"rounds": 20, "privacy": terms, "checkpoint": tmp_path / "run.npz"}
    first = solve(SIMFBO, **given)
    again = solve(SIMFBO, **given, resume=True)
    assert (first.round, first.stopped) == (again.round, again.stopped)
    assert [row["round"] for row in again.history.rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("terms", "differences"),
    [
        (fb.Privacy(0.5, 0.4, 1e-5), {"privacy.noise_multiplier": (0.3, 0.4)}),
        (fb.Privacy(0.5, 0.3, 1e-6), {"privacy.delta": (1e-5, 1e-6)}),
        (fb.Privacy(0.5, 0.3, 1e-5, budget=9.0), {"privacy.budget": (None, 9.0)}),
        (None, {"privacy.clip": (0.5, None)}),
    ],
)
def test_a_checkpoint_of_other_terms_is_refused(terms, differences, tmp_path):
    file = tmp_path / "run.npz"
    solve(SIMFBO, privacy=PRIVACY, checkpoint=file)
    with raises_with(CheckpointError, path=file, differences=differences):
        solve(SIMFBO, privacy=terms, rounds=5, checkpoint=file, resume=True)


def test_not_even_by_force_is_another_noise_gone_on_with(tmp_path):
    """A run is not continued with other noise, not even by force, since clients count replies, but not their noise."""
    file = tmp_path / "run.npz"
    solve(SIMFBO, privacy=PRIVACY, checkpoint=file)
    changed = {"privacy.noise_multiplier": (0.3, 0.4)}
    with raises_with(CheckpointError, path=file, differences=changed, remedy=""):
        solve(SIMFBO, privacy=fb.Privacy(0.5, 0.4, 1e-5), rounds=5, checkpoint=file, resume="force")
    with warns_with(CheckpointWarning, path=file, differences={"privacy.clip": (0.5, 0.7)}):
        more = solve(SIMFBO, privacy=fb.Privacy(0.7, 0.3, 1e-5), rounds=5, checkpoint=file, resume="force")
    assert more.ledger.epsilon == PRIVACY.epsilon_after(5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fedbilevel.errors.NumericalWarning")
def test_a_run_that_diverged_is_not_gone_on_from_with_a_new_account(tmp_path):
    wide = fb.Privacy(clip=1e300, noise_multiplier=1e-150, delta=1e-5)
    given = {"rounds": 60, "eval_every": 1, "privacy": wide, "checkpoint": tmp_path / "run.npz"}
    given |= {"metrics": {"bounded": lambda x, y: jnp.sum(jnp.tanh(x))}, "best_by": "bounded"}
    steep = fixed(fb.SimFBO(batch_size=None, local_steps=1, server_lr=1e30))
    with raises_with(NonFiniteError, "lower client_lr or server_lr"):
        solve(steep, **given)
    with raises_with(CheckpointError, path=tmp_path / "run.npz", differences={}, remedy=START_ANEW):
        solve(SIMFBO, resume="force", **given)


# What is refused


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"algorithm": fb.FISM()}, ("", ANY, "FISM ", "", "privacy")),
        ({"algorithm": fb.SimFBO()}, ("", ANY, "server_lr", "", "privacy")),
        ({"privacy": {"clip": 1}}, ("privacy", {"clip": 1}, "fedbilevel.Privacy")),
        ({"on_divergence": "shrink"}, ("on_divergence", "shrink", "privacy")),
        ({"clients": fb.RemoteClients.of(TASK.clients)}, ("privacy", ANY, "None in a federation")),
        ({"cohort": fb.Cohort(3, replacement=True)}, ("Cohort.replacement", True)),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_what_does_not_go_together_is_refused(changes, refusal):
    algorithm = changes.pop("algorithm", SIMFBO)
    simple = isinstance(algorithm, fb.FISM)
    problem = fb.SimpleBilevel(lambda x: x @ x, lambda x, b: jnp.sum(x), fb.projections.box(-1, 1))
    start = (jnp.ones(2),) if simple else (TASK.x0, TASK.y0)
    with refuses(*refusal):
        fb.solve(
            algorithm,
            problem if simple else TASK.problem,
            changes.pop("clients", TASK.clients),
            *start,
            **({"rounds": 1, "privacy": PRIVACY} | changes),
        )
