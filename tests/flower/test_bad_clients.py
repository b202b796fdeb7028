"""One client sends replies that are far too large.

The server refuses some of them, undoes the rounds of others, and cannot notice the rest by either rule.

In these federations y follows the clients' targets t_i: y ← y + ½·mean(t_i − y). NumPy computes the same, and each run
must equal a run with only the replies that should count.
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
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.engine import Flower
from fedbilevel.flower.server.terms import NormBounds, Terms
from refusals import raises_with, refuses

ROUNDS = 6
BAD = 1  # the client with the faults


class Following(authoring.Algorithm):
    """Let y follow the clients' targets, and compute y⁴, which overflows long before y does.

    Args:
        there: whether the server computes y⁴; otherwise clients do, and send it as a metric.
        keeps: whether clients keep a state.
    """

    there: bool = static(default=False)
    keeps: bool = static(default=False)

    def init(self, x, y):
        return XY(x, y)

    def init_client(self, x, y):
        return jnp.zeros(()) if self.keeps else None

    @authoring.phase
    def towards(self, client, y, key):
        """Reply with the way to the target. With a state, count the replies, and add 0.01 for each earlier one."""
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
    """Return the clients' targets, whose sizes differ by a factor of up to 100."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(clients, 3)) * 10 ** rng.uniform(-1, 1, (clients, 1))


def bad(attack):
    """Return a fault in which `attack` changes the numbers of a reply."""

    def fault(response, message):
        numbers = np.frombuffer(response.payload)
        return replace(response, payload=np.asarray(attack(numbers), float).tobytes())

    return fault


def filled(value):
    return bad(lambda numbers: np.full_like(numbers, value))


@cache
def app_of(clients, algorithm, folder=None, privacy=None):
    """Return the clients' app. It keeps their programs, which several tests share."""
    t = targets(clients)

    def site(run, node):
        k = node["partition-id"]
        own = {"outer": {"t": t[k, None]}, "limits": federations.FREE, "privacy": privacy}
        own["folder"] = folder and folder / str(k)
        return Site(id=k, algorithm=algorithm, problem=PROBLEM, x0=X0, y0=Y0, **own)

    return client_app(site)


def play(clients, faults, terms=None, *, algorithm=None, there=False, keeps=False, folder=None, privacy=None,
         rounds=ROUNDS, log=None, **more):  # fmt: skip
    """Return the result of a run in which `faults[client, round]` happen."""
    algorithm = algorithm or Following(there=there, keeps=keeps)
    app = app_of(clients, algorithm, folder, privacy)
    app = federations.misbehaving(app, {(c, r, 0): fault for (c, r), fault in faults.items()})
    example = {"t": np.zeros((1, 3))}
    engine = Flower(grid=InProcess(app, clients), name=federations.NAME, terms=terms or Terms(join=1.0), log=log)
    known = fb.RemoteClients(clients, example, example)
    return fb.solve(algorithm, PROBLEM, known, X0, Y0, rounds=rounds, key=1, engine=engine, **more)


def by_hand(clients, absent=(), keeps=False, rounds=ROUNDS):
    """Return the last y, computed in NumPy, if the replies of (client, round) in `absent` do not count."""
    t, y, calls = targets(clients), Y0, np.zeros(clients)
    for round in range(rounds):
        here = [c for c in range(clients) if (c, round) not in absent]
        y = y + 0.5 * np.mean([t[c] - y + 0.01 * keeps * calls[c] for c in here], axis=0)
        calls[here] += 1
    return y


def said(log):
    """Return what a log says of refused replies and of undone rounds.

    The first result is (client, round) → the refusal. The second one has, for each round that was undone, the round and
    the clients without which it was repeated.
    """
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
    """The refusal has the norm of the reply, the usual norm, the bound, and the factors that give the bound.

    The usual norm is the median of the three norms here, and so the larger norm of the two honest replies.
    """
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
    """A false reply counts if its norm is usual. Without norm_factor, false replies of any norm count.

    The norms of honest replies differ by a factor of up to 100. So a norm does not show that a reply has the wrong
    sign, or is a hundred times too long.
    """
    fault = {(BAD, 0): bad(lambda numbers: factor * numbers)}
    result = play(5, fault, Terms(norm_factor=norm_factor), rounds=1)
    t = targets(5)
    t[BAD] *= factor
    np.testing.assert_allclose(result.y, 0.5 * t.mean(0), rtol=1e-12)


def test_of_one_the_first_counts_and_the_next_are_measured_by_the_past(tmp_path):
    """In a cohort of one, the first reply counts, and later replies are compared with the replies of earlier rounds.

    So a first reply that is 5,000 times too long counts. In the last round a reply of 1e30 is refused in all attempts.
    """
    drawn, late = federations.cohorts(ROUNDS, 1, 6), ROUNDS - 1
    faults = {(drawn[0][0], 0): bad(lambda numbers: 5000 * numbers), (drawn[late][0], late): filled(1e30)}
    log = tmp_path / "log.jsonl"
    with raises_with(ExchangeError, round=late):
        play(6, faults, cohort=1, log=log)
    assert set(said(log)[0]) == {(drawn[late][0], late)}


def test_an_absurd_first_reply_of_a_cohort_of_one_does_not_count(tmp_path):
    """The first reply of a cohort of one does not count if its norm is above norm_factor² = 1e8.

    There is no usual norm yet. Three numbers of 3e18 have the norm 3e18·√3 = 5.2e18, and would spoil y for good.
    """
    log = tmp_path / "log.jsonl"
    with raises_with(ExchangeError, round=0):
        play(1, {(0, 0): filled(3e18)}, log=log)
    (why,) = said(log)[0].values()
    known = "its update has a norm of 5.2e+18, and there is no other update to compare it with; the bound is 1e+08"
    assert why["why"] == f"{known}, and norm_bound can set another"


# The usual norm


def check(norms, phase, norm, here, message=0.0):
    norms.check(phase, norm, here, lambda: message)


def test_the_larger_of_here_and_the_past_is_usual():
    """The usual norm is the larger of two medians: over this exchange, and over earlier exchanges of the same phase."""
    norms = NormBounds(Terms(norm_factor=10.0))
    with raises_with(Refusal, "the usual norm is 3, and the bound is 30", code=Code.BOUND):
        check(norms, "a", 31.0, [1.0, 3.0, 31.0])
    norms.note("a", {0: 1.0, 1: 3.0, 2: 5.0})
    assert norms.usual("a", [0.1, 0.2, 0.3]) == 3.0  # near the end of a run all are short
    assert norms.usual("a", [7.0, 8.0, 9.0]) == 8.0  # all have grown
    assert norms.usual("b", [7.0]) is None  # the first exchange of another phase, with one client
    with pytest.raises(Refusal):
        check(norms, "a", 31.0, [31.0])


def test_zeros_say_nothing():
    """Norms of 0 do not count for the usual norm, whether most updates are 0 or all of them."""
    norms = NormBounds(Terms(norm_factor=10.0))
    check(norms, "a", 5.0, [0.0, 0.0, 0.0, 5.0])
    check(norms, "a", 0.0, [0.0, 0.0, 0.0])
    norms.note("a", {0: 0.0, 1: 0.0})
    assert norms.usual("a", [0.0, 0.0, 0.0]) is None


class Approaching(authoring.Algorithm):
    """Let y follow the clients' targets. Replies may be late, so clients can send differences of replies."""

    allows = authoring.Allows(late=("towards",))

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase(takes="y", gives="y")
    def towards(self, client, y, key):
        return authoring.Reply(jnp.mean(client.outer_batch(key, None)["t"], 0) - y)

    def round(self, fed, state, key):
        return XY(state.x, state.y + 0.5 * fed.mean(self.towards, state.y, key))


def test_a_client_that_joins_late_sends_a_whole_reply_among_short_differences(tmp_path):
    """The first reply of a client counts although the differences that others send have become short.

    The targets of three clients have the mean 0, so y halves in each round, and so do their differences. After the
    failures in rounds 0, 1, 3, 7 and 15, the fourth client is asked again in round 31. Its reply has a norm of 1,000,
    2e9 times the differences of this round, and more than 1e4 times their usual norm.
    """
    t, late, joins, rounds = 1000 * np.array([[1.0, 0, 0], [-1, 1, 0], [0, -1, 0], [0, 0, 1]]), 3, 31, 33
    method, log = fb.layered(Approaching(), fb.parts.TopK(share=1.0)), tmp_path / "log.jsonl"
    start, example = {"x0": X0, "y0": np.ones(3)}, {"t": np.zeros((1, 3))}

    def site(run, node):
        k = node["partition-id"]
        own = {"outer": {"t": t[k, None]}, "limits": federations.FREE}
        return Site(id=k, algorithm=method, problem=PROBLEM, **own, **start)

    def lost(client, message):
        fields = message.content["fields"]
        return np.inf if client == late and fields["phase"] and fields["round"] < joins else 0.0

    terms = Terms(deadline=1.0, attempts=1, join=1.0)
    engine = Flower(grid=InProcess(client_app(site), 4, delay=lost), name=federations.NAME, terms=terms, log=log)
    result = fb.solve(method, PROBLEM, fb.RemoteClients(4, example, example), **start, rounds=rounds, engine=engine)
    assert {(round, why["code"]) for (_, round), why in said(log)[0].items()} == {(r, "late") for r in (0, 1, 3, 7, 15)}
    y = np.ones(3)
    for round in range(rounds):
        y = y + 0.5 * np.mean([goal - y for goal in (t if round >= joins else t[:late])], axis=0)
    np.testing.assert_allclose(result.y, y, rtol=1e-9)


def test_a_first_update_is_compared_with_other_first_updates():
    """If clients send differences, the bound of a client's first update follows from the others' first updates."""
    norms = NormBounds(Terms(norm_factor=10.0), differences=True)
    norms.note("a", {0: 50.0, 1: 60.0, 2: 0.0})
    for _ in range(3):
        norms.note("a", {0: 1.0, 1: 1.0})
    assert [norms.usual("a", [], client) for client in (0, 1, 2, 3, None)] == [1.0, 1.0, 50.0, 50.0, 1.0]
    assert norms.usual("b", [], 3) is None
    norms.check("a", 500.0, [500.0], lambda: 0.0, 3)
    with raises_with(Refusal, "the usual norm is 50, and the bound is 500", code=Code.BOUND):
        norms.check("a", 501.0, [501.0], lambda: 0.0, 3)
    with raises_with(Refusal, "the usual norm is 1, and the bound is 10", code=Code.BOUND):
        norms.check("a", 11.0, [11.0], lambda: 0.0, 0)
    whole = NormBounds(Terms(norm_factor=10.0))
    whole.note("a", {0: 50.0})
    for _ in range(3):
        whole.note("a", {0: 1.0})
    assert whole.usual("a", [], 3) == 1.0


@pytest.mark.parametrize("factor", [10.0, 3.0])
def test_what_is_no_longer_than_so_many_times_the_point_is_no_harm(factor):
    """An update counts if its norm is at most message_factor · ‖message‖, whatever the usual norm is.

    Here the updates of most clients are rounding errors, one update is a real step, and ‖message‖ = 0.5.
    """
    norms, most = NormBounds(Terms(norm_factor=10.0, message_factor=factor)), factor / 2
    check(norms, "a", most, [1e-17, 2e-17, most], message=0.5)
    with raises_with(Refusal, f" {most:g} (norm_factor = 10, message_factor = {factor:g})", code=Code.BOUND):
        check(norms, "a", most + 0.1, [1e-17, 2e-17, most + 0.1], message=0.5)


@pytest.mark.parametrize("factor", [0.0, float("inf"), float("nan"), None])
def test_a_factor_of_the_message_is_a_positive_number(factor):
    with refuses("Terms.message_factor", factor):
        Terms(message_factor=factor)


@pytest.mark.parametrize(("message", "most"), [(0.0, 100.0), (0.5, 100.0), (3.0, 300.0)])
def test_where_nothing_is_usual_the_message_or_one_is_the_measure(message, most):
    """If no usual norm is known, the bound is norm_factor² · max(1, ‖message‖), or norm_bound if it is given.

    Here norm_factor² = 100. No usual norm is known if there is one reply, or if all replies but one are 0.
    """
    norms = NormBounds(Terms(norm_factor=10.0))
    for here in ([most], [0.0, 0.0, 0.0, most]):
        check(norms, "a", most, here, message)
    with raises_with(Refusal, f"the bound is {most:g}", code=Code.BOUND):
        check(norms, "a", 1.01 * most, [1.01 * most], message)
    check(NormBounds(Terms(norm_factor=10.0, norm_bound=1e9)), "a", 1e8, [1e8], message)


# Rounds that are undone

ANY = Terms(norm_factor=None, join=1.0)  # replies count that norm_factor would refuse


@pytest.mark.parametrize("keeps", [False, True], ids=["", "clients keep state"])
@pytest.mark.parametrize("there", [False, True], ids=["clients see it", "the server sees it"])
@pytest.mark.parametrize("round", [0, 3])
def test_a_round_that_spoils_everything_is_undone(round, there, keeps, tmp_path, caplog):
    """A round that makes all later results overflow is undone, and repeated without the client that caused this.

    1e100 is finite, and its fourth power is not. If the server computes this power, it notices the overflow in the same
    round, and the client is absent from this round only. If clients compute it, they notice it in the next round, and
    the client is absent from that round, too. Clients' states are as if the undone round had never happened.
    """
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
    """Let y follow the clients' targets as `Following` does, and compute y⁴ in a second exchange.

    Clients keep a state, which the first exchange changes.
    """

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
    """A round can be undone after clients have begun the next one, since they keep the states before both rounds."""
    log, place = tmp_path / "log.jsonl", tmp_path if folder else None
    result = play(5, {(BAD, 2): filled(1e100)}, ANY, algorithm=Later(), folder=place, log=log)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2), (BAD, 3)}, keeps=True), rtol=1e-12)
    assert said(log)[1] == [(2, [BAD])]


def test_a_round_is_undone_though_privacy_hides_what_clients_met(tmp_path):
    """A round is also undone if privacy hides that numbers at the clients are not finite.

    The noise of the replies has the deviation 100·1e-6 = 1e-4, so that y is the same up to 1e-2.
    """
    log, privacy = tmp_path / "log.jsonl", Privacy(clip=100.0, noise_multiplier=1e-6, delta=1e-5)
    result = play(5, {(BAD, 2): filled(1e100)}, ANY, folder=tmp_path, privacy=privacy, rounds=4, log=log)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2), (BAD, 3)}, rounds=4), atol=1e-2)
    refused, undone = said(log)
    assert {why["code"] for why in refused.values()} == {"hidden"}
    assert undone == [(2, [BAD])]


def test_who_comes_back_to_it_is_undone_again(tmp_path):
    """A client that spoils every round in which it is asked is left out each time.

    So y goes to the mean of the other targets. It begins at 0, and its distance from the mean halves in each round, so
    that 2⁻¹⁶ of the mean is left after 16 rounds.
    """
    log, rounds = tmp_path / "log.jsonl", 16
    result = play(5, {(BAD, round): filled(1e100) for round in range(rounds)}, ANY, rounds=rounds, log=log)
    undone = said(log)[1]
    assert len(undone) >= 3
    assert all(without == [BAD] for _, without in undone)
    others = np.delete(targets(5), BAD, 0).mean(0)
    np.testing.assert_allclose(result.y, others, atol=2.0**-rounds * np.max(np.abs(others)) * (1 + 1e-9))


def test_where_it_cannot_be_undone_the_last_good_state_is_kept(tmp_path):
    """If a round cannot be undone, the run ends with an error, and the checkpoint has the state before this round.

    A cohort of one cannot continue without its client. The resumed run has the numbers of a run without the fault.
    """
    place = {"checkpoint": tmp_path / "c.npz", "checkpoint_every": 1, "eval_every": 1}
    with raises_with(ExchangeError, "before round 2", round=3) as error:
        play(1, {(0, 2): filled(1e100)}, ANY, keeps=True, folder=tmp_path, **place)
    assert {(why.client, why.code) for why in error.value.refusals} == {(0, Code.NUMBERS)}
    result = play(1, {}, ANY, keeps=True, folder=tmp_path, resume=True, **place)
    np.testing.assert_allclose(result.y, by_hand(1, keeps=True), rtol=1e-12)
    assert [row["round"] for row in result.history.rows] == list(range(ROUNDS + 1))
    assert result.ledger.rounds == ROUNDS


def test_what_ends_a_run_after_a_round_was_undone_does_not_save_the_undone_result(tmp_path):
    """If a run ends with an error after a round was undone, the checkpoint has the repeated round, not the undone one.

    Round 2 is undone and repeated. Too few clients reply in round 3, and the resumed run begins with round 3.
    """
    place = {"checkpoint": tmp_path / "c.npz", "checkpoint_every": 1, "eval_every": 1}

    def lost(response, message):
        if response.refused:  # because y is not finite, so that round 2 will be undone
            return response
        raise RuntimeError("lost")

    faults = {(BAD, 2): filled(1e100), **{(client, 3): lost for client in range(5)}}
    with raises_with(ExchangeError, round=3):
        play(5, faults, ANY, **place)
    result = play(5, {}, ANY, resume=True, **place)
    np.testing.assert_allclose(result.y, by_hand(5, {(BAD, 2)}), rtol=1e-12)


class Killed(BaseException):
    """Ends a run as `kill -9` would: nothing more is saved."""


def test_a_killed_server_goes_on_where_clients_keep_a_state(tmp_path):
    """If clients keep a state, a run continues to the bit after its server was killed.

    Clients can return to the states of one round before, so that each round is saved. The server is killed after round
    3, before this round is saved.
    """

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
    """If clients keep a state, a checkpoint must be written after each round."""
    with refuses("checkpoint_every", 2, "1 or None: the clients of Following"):
        play(3, {}, keeps=True, checkpoint=tmp_path / "c.npz", checkpoint_every=2)
    assert play(3, {}, keeps=True, checkpoint_every=2, rounds=1).round == 1  # without a checkpoint
    assert play(3, {}, checkpoint=tmp_path / "c.npz", checkpoint_every=2, rounds=1).round == 1


def test_a_run_that_is_spoiled_from_the_start_ends(tmp_path):
    """A run ends with an error if a round is also spoiled after it was undone three times.

    The first replies of all eight clients spoil the sum, and each repetition is without one more client.
    """
    log = tmp_path / "log.jsonl"
    with raises_with(NonFiniteError, "clients 0, 1, 2", round=0, during="server update"):
        play(8, {(c, 0): filled(1e100) for c in range(8)}, ANY, there=True, log=log)
    assert said(log)[1] == [(0, [0]), (0, [0, 1]), (0, [0, 1, 2])]


def test_one_lie_makes_no_room_for_a_larger_one():
    """A false reply that made the message a thousand times as long does not let a reply of norm 4e5 count.

    The bound is the larger one of norm_factor · usual norm = 1e4 · 1 and message_factor · ‖message‖ = 10 · 1e3.
    """
    norms = NormBounds(Terms())
    norms.check("step", 9e3, [1.0, 1.0, 9e3], lambda: 1.0)
    with raises_with(Refusal, "the usual norm is 1, and the bound is 1e+04", code=Code.BOUND):
        norms.check("step", 4e5, [1.0, 1.0, 4e5], lambda: 1e3)
    norms.check("step", 4e5, [1.0, 1.0, 4e5], lambda: 1e5)  # here the norms of 1 may be rounding errors
