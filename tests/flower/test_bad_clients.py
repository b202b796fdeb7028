"""One client sends replies that are far too large.

The server refuses some of them, undoes the rounds of others, and can notice the rest by neither rule.

The federations follow targets, y ← y + ½·mean(t_i − y). NumPy computes the same, and each run must equal a run with
only the replies that should count.
"""

import json
from dataclasses import replace
from functools import cache

import federations
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.errors import ExchangeError, NonFiniteError
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.tree import XY
from fedbilevel.flower.client.site import Site, client_app
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Refusal
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.server.terms import NormBounds, Terms
from refusals import refuses

ROUNDS = 6
BAD = 1  # the client


class Following(authoring.Algorithm):
    """y follows the clients' targets; y⁴ overflows long before y does, with clients or, `there`, on the server."""

    there: bool = static(default=False)
    keeps: bool = static(default=False)

    def init(self, x, y):
        return XY(x, y)

    def init_client(self, x, y):
        return jnp.zeros(()) if self.keeps else None

    @authoring.phase
    def towards(self, client, y, key):
        """A client that keeps anything counts its answers, and adds 0.01 for each before."""
        target = jnp.mean(client.outer_batch(key, None)["t"], 0)
        calls = client.state if self.keeps else 0.0
        size = 0.0 if self.there else jnp.sum(y**4)
        state = calls + 1 if self.keeps else None
        return authoring.Reply(target - y + 0.01 * calls, state=state, metrics={"size": size + 0.0})

    def round(self, fed, state, key):
        step = fed.mean(self.towards, state.y, key)
        size = 0 * jnp.sum(step**4) if self.there else 0.0
        return XY(state.x, state.y + 0.5 * step + size)


PROBLEM = fb.Bilevel(lambda x, y, batch: jnp.sum(y) + jnp.sum(batch["t"]), lambda x, y, batch: jnp.vdot(y, y) + x[0])
X0, Y0 = np.zeros(1), np.zeros(3)


def targets(clients):
    """Honest ones differ a hundredfold."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(clients, 3)) * 10 ** rng.uniform(-1, 1, (clients, 1))


def bad(attack):
    """A fault: the answer's numbers times a factor, or that number in their place."""

    def fault(response, message):
        numbers = np.frombuffer(response.payload)
        return replace(response, payload=np.asarray(attack(numbers), float).tobytes())

    return fault


def filled(value):
    return bad(lambda numbers: np.full_like(numbers, value))


@cache
def app_of(clients, algorithm, folder=None, privacy=None):
    """The clients' app, which keeps their programs from test to test."""
    t = targets(clients)

    def site(run, node):
        k = node["partition-id"]
        own = {"outer": {"t": t[k, None]}, "limits": federations.FREE, "privacy": privacy}
        own["folder"] = folder and folder / str(k)
        return Site(id=k, algorithm=algorithm, problem=PROBLEM, x0=X0, y0=Y0, **own)

    return client_app(site)


def play(clients, faults, terms=None, *, algorithm=None, there=False, keeps=False, folder=None, privacy=None,
         rounds=ROUNDS, log=None, **more):  # fmt: skip
    """The run in which `faults[client, round]` are done."""
    algorithm = algorithm or Following(there=there, keeps=keeps)
    app = app_of(clients, algorithm, folder, privacy)
    app = federations.misbehaving(app, {(c, r, 0): fault for (c, r), fault in faults.items()})
    example = {"t": np.zeros((1, 3))}
    engine = Flower(grid=InProcess(app, clients), name=federations.NAME, terms=terms or Terms(join=1.0), log=log)
    known = fb.RemoteClients(clients, example, example)
    return fb.solve(algorithm, PROBLEM, known, X0, Y0, rounds=rounds, key=1, engine=engine, **more)


def by_hand(clients, absent=(), keeps=False, rounds=ROUNDS):
    """y of each round, when (client, round) in `absent` do not count."""
    t, y, calls = targets(clients), Y0, np.zeros(clients)
    for round in range(rounds):
        here = [c for c in range(clients) if (c, round) not in absent]
        y = y + 0.5 * np.mean([t[c] - y + 0.01 * keeps * calls[c] for c in here], axis=0)
        calls[here] += 1
    return y


def said(log):
    """Whose reply of which round does not count, and why; and (round, clients that it was played again without)."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refused = {(int(c), line["round"]): why for line in lines for c, why in line.get("refused", {}).items()}
    return refused, [(line["round"], line["without"]) for line in lines if "undone" in line]


# Out of proportion


@pytest.mark.parametrize(
    ("clients", "round", "value"),
    [(2, 0, 3e18), (3, 3, 1e30), (5, 0, np.nan), (5, 3, -1e9), (5, 2, 1e200)],
)
def test_what_is_out_of_proportion_does_not_count(clients, round, value, tmp_path):
    log = tmp_path / "log.jsonl"
    result = play(clients, {(BAD, round): filled(value)}, log=log)
    np.testing.assert_allclose(result.y, by_hand(clients, {(BAD, round)}), rtol=1e-12)
    refused, undone = said(log)
    assert {place: why["code"] for place, why in refused.items()} == {(BAD, round): "bound"}
    assert undone == []


def test_what_is_refused_is_said(tmp_path):
    """Median of three norms; the factor and its name are in the sentence."""
    log = tmp_path / "log.jsonl"
    play(3, {(BAD, 0): filled(1e30)}, Terms(norm_factor=1000.0, join=1.0), log=log)
    middle = np.sort(np.linalg.norm(np.delete(targets(3), BAD, 0), axis=1))[-1]
    (why,) = said(log)[0].values()
    expected = (
        f"its update has a norm of 1.73e+30; the usual norm is {middle:.3g}, and the bound is {1000 * middle:.3g}"
    )
    assert why["why"] == f"{expected} (norm_factor = 1000, message_factor = 10)"


@pytest.mark.parametrize(("factor", "norm_factor"), [(-1, 1e4), (100, 1e4), (1e30, None)])
def test_lies_within_proportion_and_without_a_factor_any_count(factor, norm_factor):
    """Signs turned, or a hundredfold: nothing here tells such a lie from the truth."""
    fault = {(BAD, 0): bad(lambda numbers: factor * numbers)}
    result = play(5, fault, Terms(norm_factor=norm_factor), rounds=1)
    t = targets(5)
    t[BAD] *= factor
    np.testing.assert_allclose(result.y, 0.5 * t.mean(0), rtol=1e-12)


def test_of_one_the_first_counts_and_the_next_are_measured_by_the_past(tmp_path):
    """Round 0 has no past; later 1e30 is refused by it, and asked again in the same round."""
    drawn, late = federations.cohorts(ROUNDS, 1, 6), ROUNDS - 1
    faults = {(drawn[0][0], 0): bad(lambda numbers: 5000 * numbers), (drawn[late][0], late): filled(1e30)}
    log = tmp_path / "log.jsonl"
    with pytest.raises(ExchangeError, match=f"round {late}"):
        play(6, faults, cohort=1, log=log)
    assert set(said(log)[0]) == {(drawn[late][0], late)}


def test_an_absurd_first_reply_of_a_cohort_of_one_does_not_count(tmp_path):
    """3e18 in each of three numbers would be y for good; nothing is usual yet, so that norm_factor² is the bound."""
    log = tmp_path / "log.jsonl"
    with pytest.raises(ExchangeError, match="round 0"):
        play(1, {(0, 0): filled(3e18)}, log=log)
    (why,) = said(log)[0].values()
    known = "its update has a norm of 5.2e+18, and there is no other update to compare it with; the bound is 1e+08"
    assert why["why"] == f"{known}, and norm_bound can set another"


# What is usual


def check(norms, phase, norm, here, message=0.0):
    norms.check(phase, norm, here, lambda: message)


def test_the_larger_of_here_and_the_past_is_usual():
    norms = NormBounds(Terms(norm_factor=10.0))
    with pytest.raises(Refusal, match="norm of 31; the usual norm is 3, and the bound is 30"):
        check(norms, "a", 31.0, [1.0, 3.0, 31.0])
    norms.note("a", [1.0, 3.0, 5.0])
    assert norms.usual("a", [0.1, 0.2, 0.3]) == 3.0  # near the end all are short: the past holds
    assert norms.usual("a", [7.0, 8.0, 9.0]) == 8.0  # all have grown
    assert norms.usual("b", [7.0]) is None  # another phase
    with pytest.raises(Refusal):
        check(norms, "a", 31.0, [31.0])


def test_zeros_say_nothing():
    """Most have nothing to correct, one has; and all have nothing."""
    norms = NormBounds(Terms(norm_factor=10.0))
    check(norms, "a", 5.0, [0.0, 0.0, 0.0, 5.0])
    check(norms, "a", 0.0, [0.0, 0.0, 0.0])
    norms.note("a", [0.0, 0.0])
    assert norms.usual("a", [0.0, 0.0, 0.0]) is None


@pytest.mark.parametrize("factor", [10.0, 3.0])
def test_what_is_no_longer_than_so_many_times_the_point_is_no_harm(factor):
    """Rounding errors for most, a real step for one: it may be message_factor · ‖message‖ long, whose norm is 0.5."""
    norms, most = NormBounds(Terms(norm_factor=10.0, message_factor=factor)), factor / 2
    check(norms, "a", most, [1e-17, 2e-17, most], message=0.5)
    with pytest.raises(Refusal, match=rf"the bound is {most:g} \(norm_factor = 10, message_factor = {factor:g}\)"):
        check(norms, "a", most + 0.1, [1e-17, 2e-17, most + 0.1], message=0.5)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), None])
def test_a_factor_of_the_message_is_a_positive_number(factor):
    with refuses("Terms.message_factor", factor):
        Terms(message_factor=factor)


@pytest.mark.parametrize(("message", "most"), [(0.0, 100.0), (0.5, 100.0), (3.0, 300.0)])
def test_where_nothing_is_usual_the_message_or_one_is_the_measure(message, most):
    """norm_factor² = 100 times that; of four answers three are 0, and one norm tells nothing of the others."""
    norms = NormBounds(Terms(norm_factor=10.0))
    for here in ([most], [0.0, 0.0, 0.0, most]):
        check(norms, "a", most, here, message)
    with pytest.raises(Refusal, match=f"no other update to compare it with; the bound is {most:g}"):
        check(norms, "a", 1.01 * most, [1.01 * most], message)
    check(NormBounds(Terms(norm_factor=10.0, norm_bound=1e9)), "a", 1e8, [1e8], message)


# Undone

ANY = Terms(norm_factor=None, join=1.0)  # what the bound would have kept out comes in


@pytest.mark.parametrize("keeps", [False, True], ids=["", "clients keep state"])
@pytest.mark.parametrize("there", [False, True], ids=["clients see it", "the server sees it"])
@pytest.mark.parametrize("round", [0, 3])
def test_a_round_that_spoils_everything_is_undone(round, there, keeps, tmp_path, caplog):
    """1e100 is finite, its fourth power is not. The round is played again without that client, which also sits out the
    next; all that clients keep is as if it had never been."""
    log = tmp_path / "log.jsonl"
    result = play(5, {(BAD, round): filled(1e100)}, ANY, there=there, keeps=keeps, log=log,
                  checkpoint=tmp_path / "c.npz", checkpoint_every=1, eval_every=1)  # fmt: skip
    absent = {(BAD, round)} if there else {(BAD, round), (BAD, round + 1)}
    np.testing.assert_allclose(result.y, by_hand(5, absent, keeps), rtol=1e-12)
    assert said(log)[1] == [(round, [BAD])]
    assert f"round {round} is undone" in caplog.text
    assert [row["round"] for row in result.history.rows] == list(range(ROUNDS + 1))
    assert result.ledger.rounds == ROUNDS


class Later(authoring.Algorithm):
    """As `Following`, with a second exchange, which alone meets y⁴; clients keep what the first one changes."""

    def init(self, x, y):
        return XY(x, y)

    def init_client(self, x, y):
        return jnp.zeros(())

    @authoring.phase
    def towards(self, client, y, key):
        target = jnp.mean(client.outer_batch(key, None)["t"], 0)
        return authoring.Reply(target - y + 0.01 * client.state, state=client.state + 1)

    @authoring.phase
    def size(self, client, y, key):
        return authoring.Reply(jnp.zeros(()), metrics={"size": jnp.sum(y**4)})

    def round(self, fed, state, key):
        step = fed.mean(self.towards, state.y, key)
        fed.mean(self.size, state.y, key)
        return XY(state.x, state.y + 0.5 * step)


@pytest.mark.parametrize("folder", [True, False], ids=["folder", "context"])
def test_a_round_is_undone_though_clients_have_begun_the_next(folder, tmp_path):
    """They keep the states with which both rounds began."""
    log, place = tmp_path / "log.jsonl", tmp_path if folder else None
    result = play(5, {(BAD, 2): filled(1e100)}, ANY, algorithm=Later(), folder=place, log=log)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2), (BAD, 3)}, keeps=True), rtol=1e-12)
    assert said(log)[1] == [(2, [BAD])]


def test_a_round_is_undone_though_privacy_hides_what_clients_met(tmp_path):
    log, privacy = tmp_path / "log.jsonl", Privacy(clip=100.0, noise_multiplier=1e-6, delta=1e-5)
    result = play(5, {(BAD, 2): filled(1e100)}, ANY, folder=tmp_path, privacy=privacy, rounds=4, log=log)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2), (BAD, 3)}, rounds=4), atol=1e-2)
    refused, undone = said(log)
    assert {why["code"] for why in refused.values()} == {"hidden"}
    assert undone == [(2, [BAD])]


def test_who_comes_back_to_it_is_undone_again(tmp_path):
    """It spoils every round that it is asked in; y still ends where the others' targets are."""
    log, rounds = tmp_path / "log.jsonl", 16
    result = play(5, {(BAD, round): filled(1e100) for round in range(rounds)}, ANY, rounds=rounds, log=log)
    undone = said(log)[1]
    assert len(undone) >= 3
    assert all(without == [BAD] for _, without in undone)
    others = np.delete(targets(5), BAD, 0).mean(0)
    np.testing.assert_allclose(result.y, others, atol=2.0**-rounds * np.max(np.abs(others)) * (1 + 1e-9))


def test_where_it_cannot_be_undone_the_last_good_state_is_kept(tmp_path):
    """A cohort of one has nobody to go on without. The run ends, and goes on from before the round when resumed: the
    numbers are those of a run in which nothing happened."""
    place = {"checkpoint": tmp_path / "c.npz", "checkpoint_every": 1, "eval_every": 1}
    with pytest.raises(ExchangeError, match=r"round 3, .*not finite.*; the last good state is the one before round 2"):
        play(1, {(0, 2): filled(1e100)}, ANY, keeps=True, folder=tmp_path, **place)
    result = play(1, {}, ANY, keeps=True, folder=tmp_path, resume=True, **place)
    np.testing.assert_allclose(result.y, by_hand(1, keeps=True), rtol=1e-12)
    assert [row["round"] for row in result.history.rows] == list(range(ROUNDS + 1))
    assert result.ledger.rounds == ROUNDS


def test_what_ends_a_run_after_a_round_was_undone_does_not_save_the_undone_result(tmp_path):
    """Round 2 is undone and played again; in round 3 too few reply. The run goes on from the start of that one."""
    place = {"checkpoint": tmp_path / "c.npz", "checkpoint_every": 1, "eval_every": 1}

    def lost(response, message):
        if response.refused:  # the state is no use: round 2 is about to be undone
            return response
        raise RuntimeError("lost")

    faults = {(BAD, 2): filled(1e100), **{(client, 3): lost for client in range(5)}}
    with pytest.raises(ExchangeError, match="round 3"):
        play(5, faults, ANY, **place)
    result = play(5, {}, ANY, resume=True, **place)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2)}), rtol=1e-12)


class Killed(BaseException):
    """Ends a run as `kill -9` would: nothing more is saved."""


def test_a_killed_server_goes_on_where_clients_keep_a_state(tmp_path):
    """They go back by one round alone. It is killed when round 3 is over, before that is saved."""

    def kill(result, row):
        if result.round == 4:
            raise Killed

    place = {"checkpoint": tmp_path / "c.npz", "eval_every": 3}
    whole = play(3, {}, keeps=True, folder=tmp_path / "whole", eval_every=3)
    with pytest.raises(Killed):
        play(3, {}, keeps=True, folder=tmp_path / "clients", callbacks=[kill], **place)
    resumed = play(3, {}, keeps=True, folder=tmp_path / "clients", resume=True, **place)
    np.testing.assert_array_equal(resumed.y, whole.y)
    np.testing.assert_allclose(resumed.y, by_hand(3, keeps=True), rtol=1e-12)


def test_rarer_saves_are_for_clients_that_keep_nothing(tmp_path):
    with refuses("checkpoint_every", 2, "1 or None: the clients of Following"):
        play(3, {}, keeps=True, checkpoint=tmp_path / "c.npz", checkpoint_every=2)
    assert play(3, {}, keeps=True, checkpoint_every=2, rounds=1).round == 1  # saves nothing
    assert play(3, {}, checkpoint=tmp_path / "c.npz", checkpoint_every=2, rounds=1).round == 1


def test_a_run_that_is_spoiled_from_the_start_ends(tmp_path):
    """Everyone's first answer spoils the sum: three rounds are undone, then the error says so."""
    log = tmp_path / "log.jsonl"
    with pytest.raises(NonFiniteError, match=r"round 0, server update: .* also happens without clients 0, 1, 2"):
        play(8, {(c, 0): filled(1e100) for c in range(8)}, ANY, there=True, log=log)
    assert said(log)[1] == [(0, [0]), (0, [0, 1]), (0, [0, 1, 2])]


def test_one_lie_makes_no_room_for_a_larger_one():
    """A message that a lie has made a thousand times as long lets ten times its own norm pass, not the whole factor."""
    norms = NormBounds(Terms())
    norms.check("step", 9e3, [1.0, 1.0, 9e3], lambda: 1.0)
    with pytest.raises(Refusal, match=r"norm of 4e\+05; the usual norm is 1, and the bound is 1e\+04"):
        norms.check("step", 4e5, [1.0, 1.0, 4e5], lambda: 1e3)
    norms.check("step", 4e5, [1.0, 1.0, 4e5], lambda: 1e5)  # rounding errors of the others at a point that is this far
