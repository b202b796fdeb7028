"""Does the ledger add up the costs of exchanges in exact integers?"""

from dataclasses import asdict

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.fed import Reply
from fedbilevel.engines.costs import PART, Book, ExchangeCount, Ledger, RoundCosts, Sums, split_count, weigh


def a_book(calls, gradients=0, hvps=0, cohort=1, lost=0):
    """Return the costs of exchanges with `cohort` clients, of which `lost` never reply.

    `calls` says how often each kind of exchange was made.
    """
    counts = {
        call: ExchangeCount(n, np.asarray(n) * cohort, np.asarray(n) * (cohort - lost)) for call, n in calls.items()
    }
    work = (np.moveaxis(split_count(np.asarray(number)), 0, -1) for number in (gradients, hvps))
    return RoundCosts(counts, *work, {}, np.zeros(2, int))


def test_bytes_are_counted_per_client_and_exchange():
    ledger = Ledger()
    calls = {("ask", 100, 7): np.array([1, 2, 0]), ("tell", 30, 50): np.array([1, 1, 1])}
    ledger.add(a_book(calls, [5, 0, 1], [2, 2, 2], cohort=10), rounds=3)
    assert (ledger.rounds, ledger.exchanges) == (3, 3 + 3)
    assert ledger.bytes_down == 10 * (3 * 100 + 3 * 30)
    assert ledger.bytes_up == 10 * (3 * 7 + 3 * 50)
    assert (ledger.replies, ledger.gradients, ledger.hvps) == (60, 6, 6)
    assert ledger.exchanges_by_phase == {"ask": 3, "tell": 3}
    assert ledger.gradients_per_client == ledger.hvps_per_client == 0.1
    assert Ledger().gradients_per_client == 0  # 0, and no division by 0


def test_those_who_do_not_answer_are_sent_to_but_send_nothing():
    ledger = Ledger()
    ledger.add(a_book({("ask", 100, 7): np.array([1, 2]), ("ask", 16, 7): 1}, cohort=10, lost=4), rounds=2)
    assert (ledger.exchanges, ledger.replies, ledger.exchanges_by_phase) == (4, 4 * 6, {"ask": 4})
    assert (ledger.bytes_down, ledger.bytes_up) == (10 * (3 * 100 + 16), 4 * 6 * 7)


def test_flops_are_those_of_answers():
    ledger = Ledger(flops=0)
    costs = {("ask", 100, 7): 1000, ("tell", 30, 50): 10**15}
    ledger.add(a_book({("ask", 100, 7): np.array([1, 2]), ("tell", 30, 50): 3}, cohort=10, lost=4), 2, costs)
    assert ledger.flops == ledger.columns()["flops"] == 6 * 3 * (1000 + 10**15)


def test_an_exchange_of_unknown_cost_leaves_the_sum_unknown():
    for costs in (None, {}, {("ask", 8, 8): None}, {("ask", 8, 16): 5}):
        ledger = Ledger(flops=0)
        ledger.add(a_book({("ask", 8, 8): 1}), 1, costs)
        ledger.add(a_book({("ask", 8, 8): 1}), 1, {("ask", 8, 8): 5})
        assert ledger.flops is None
        assert "flops" not in ledger.columns()


def test_what_was_saved_before_they_were_counted_goes_on_without():
    saved = asdict(Ledger(rounds=3, exchanges=6))
    del saved["flops"]
    ledger = Ledger(**saved)
    ledger.add(a_book({("ask", 8, 8): 1}), 1, {("ask", 8, 8): 5})
    assert (ledger.exchanges, ledger.flops) == (7, None)


def test_parts_of_a_run_add_up_to_the_whole():
    calls = {("ask", 4, 2): np.arange(6)}
    counts = np.arange(6) * 3
    whole, parts = Ledger(), Ledger()
    whole.add(a_book(calls, counts, counts, cohort=5), rounds=6)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        some = {call: n[part] for call, n in calls.items()}
        parts.add(a_book(some, counts[part], counts[part], cohort=5), rounds=part.stop - part.start)
    assert parts == whole


def test_totals_do_not_overflow():
    """Totals do not overflow: rounds have int32 counts, but ten rounds of 2³⁰ gradients, and petabytes, are exact."""
    ledger = Ledger()
    much = np.full(10, 2**30, np.int32)
    ledger.add(a_book({("ask", 2**40, 2**41): much}, much, much), rounds=10)
    assert ledger.gradients == 10 * 2**30
    assert ledger.bytes_up == 10 * 2**30 * 2**41
    assert isinstance(ledger.bytes_up, int)


def test_a_place_that_only_pads_the_cohort_counts_for_nothing():
    reply = Reply({"u": jnp.array([1.0, 2.0])}, metrics={"loss": jnp.asarray(3.0)}, gradients=4, hvps=5)
    for counts in (1.0, 0.0):
        sums = weigh(reply, jnp.asarray(0.25), jnp.asarray(counts))
        assert sums.update["u"].tolist() == [0.25 * counts, 0.5 * counts]
        assert float(sums.metrics["loss"]) == 0.75 * counts
        assert [int(n) for n in (sums.responders, sums.gradients, sums.hvps)] == [counts, 4 * counts, 5 * counts]


def test_the_gradients_of_many_clients_in_a_round_fit():
    """The gradients of many clients in a round fit: two exchanges with 2·10⁹ each are too many for 32 bits."""
    book, ledger = Book(), Ledger()
    sums = weigh(Reply(jnp.zeros(()), gradients=2 * 10**9, hvps=2 * 10**9), jnp.ones(()), jnp.ones(()))
    for _ in range(2):
        book.enter("ask", [(jnp.zeros(()), sums, 1)])
    ledger.add(book.costs, rounds=1)
    assert (ledger.gradients, ledger.hvps) == (4 * 10**9, 4 * 10**9)


def test_the_time_of_a_long_round_fits():
    """The time of a long round fits: 1,000 of the longest exchanges are 74 hours, too many ticks for 32 bits."""
    spent = sum((split_count(jnp.asarray(2**28)) for _ in range(999)), split_count(2**28))
    ledger = Ledger()
    ledger.add(a_book({("ask", 1, 1): np.asarray(1)})._replace(time=spent), rounds=1)
    assert ledger.ticks == 1000 * 2**28
    assert ledger.time == 1000 * 2**28 * 1e-4


def test_the_two_means_of_all_and_over_those_who_hold_an_entry():
    """Both means are right: over all clients, and over the clients that hold an entry.

    Two clients are in the cohort. Both hold the first entry, only the client of weight ¼ holds the second, and none
    holds the third. With a cohort of total weight 0.4 out of ten clients, the unbiased mean is 10/2·0.4 = 2 times the
    other mean.
    """
    whole = Sums(jnp.asarray(3.0), jnp.asarray(0.2), {}, *[jnp.asarray(2)] * 3)
    assert float(whole.total(10).mean(True)) == 15.0
    assert float(whole.total(10).mean(False)) == 3.0 / 0.2
    held = jnp.array([0.4, 0.25, 0.0])
    sums = Sums(jnp.array([0.8, 0.75, 0.0]), jnp.asarray(0.4), {}, *[jnp.asarray(2)] * 3, held)
    np.testing.assert_allclose(sums.total(10).mean(False), [2.0, 3.0, 0.0], rtol=1e-15)
    np.testing.assert_allclose(sums.total(10).mean(True), [4.0, 6.0, 0.0], rtol=1e-15)


def test_books_merge_by_kind_of_exchange_and_metric():
    sums = Sums(jnp.ones(2), jnp.asarray(0.5), {"loss": jnp.asarray(2.0)}, *[jnp.asarray(n) for n in (3, 4, 5)])
    more, gain = sums._replace(update=jnp.ones(1)), sums._replace(metrics={"gain": jnp.asarray(1.0)})
    ask, book = [({"m": jnp.zeros(3)}, sums, 3)], Book()
    book.enter("ask", ask, ticks=PART + 2)
    book.enter("tell", [(jnp.zeros(1), gain, 4)], age=jnp.asarray(3.0))
    book.enter("ask", [*ask, (jnp.zeros(1), more, 5)], ticks=1)
    counts = {kind: tuple(int(n) for n in count) for kind, count in book.costs.calls.items()}
    assert counts == {("ask", 24, 16): (2, 6, 6), ("tell", 8, 16): (1, 4, 3), ("ask", 8, 8): (0, 5, 3)}
    assert [n.tolist() for n in (book.costs.gradients, book.costs.hvps)] == [[0, 16], [0, 20]]
    assert book.costs.time.tolist() == [1, 3]
    assert {name: [float(n) for n in pair] for name, pair in book.costs.metrics.items()} == {
        ("ask", "loss"): [6.0, 1.5],
        ("tell", "gain"): [1.0, 0.5],
        ("tell", "staleness"): [3.0, 0.5],
    }


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([], r"^a list .*\(rounds, exchanges, …\)"),
        (None, "^null "),
        ({"round": 1}, "'round' .* rounds, exchanges, "),
        ({"rounds": "one"}, "^rounds .*'one'"),
        ({"exchanges_by_phase": [1]}, r"^exchanges_by_phase .*\[1\]"),
        ({"virtual": 1}, r"^virtual .*\b1\b"),
        ({"flops": 0.5}, r"^flops .*0\.5"),
    ],
)
def test_a_ledger_that_is_none_is_refused_with_what_was_found(fields, words):
    with pytest.raises(ValueError, match=words):
        Ledger.of(fields)
