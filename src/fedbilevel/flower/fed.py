"""The exchanges of one round over Flower's Grid, on the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import phase_name
from fedbilevel.core.errors import ExchangeError, require
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines import book
from fedbilevel.engines.cohort import RoundKeys, draw_cohort, work_of
from fedbilevel.flower.contract import Call
from fedbilevel.flower.courier import Outcome
from fedbilevel.flower.exchange_log import Exchange
from fedbilevel.flower.wire import Answer, Ask, Refusal, from_bytes, require_layout, shapes, to_bytes

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun


class FlowerFed:
    """See `Fed`. Who does not answer, or answers what cannot count, is as if absent from that exchange."""

    def __init__(self, run: FlowerRun, algorithm: Any, round: int, keys: RoundKeys) -> None:
        self.run, self.algorithm, self.round, self.keys = run, algorithm, round, keys
        self.indirect = run.problem.indirect
        self.own = self.cohort(keys)
        self.run.roster.refresh()
        self.book = book.empty()
        self.exchanges = 0

    def mean(
        self,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        unbiased: bool = False,
        fresh: int | Array | None = None,
    ) -> PyTree:
        question = self.question(phase, message, key, fresh is not None)
        cohort = self.own if fresh is None else self.cohort(self.keys.of_fresh(int(fresh)))
        answers = self.gather(question, cohort)
        sums = self.total(question, answers)
        self.enter(question, len(cohort), sums)
        return book.normalise(sums, len(self.run.clients), len(answers), unbiased)

    def first(self, n: int, phase: Callable[..., Reply], message: PyTree, key: Array) -> PyTree:
        """Σ p_i u_i over the first n answers to arrive, each computed on the message that its client was last sent.

        Clients that are idle are sent this message first; those still at work go on with the one they have, in later
        rounds too. History: `staleness`, the mean number of rounds between a question and its answer's use.

        Raises:
            ExchangeError: fewer than n answers can be expected.
        """
        clients = range(len(self.run.clients))
        require(1 <= n <= len(clients), "fed.first: n", n, f"1 to {len(clients)} (all clients)")
        question = self.question(phase, message, key, fresh=False)
        works = work_of(self.keys.work, jnp.arange(len(clients)), self.run.clients.local_steps)
        asks = {client: self.ask(question, client, None if works is None else int(works[client])) for client in clients}
        idle = {c: a for c, a in asks.items() if c in self.run.roster.nodes and not self.run.courier.busy(c)}
        exchange = Exchange(self.run.clock, self.round, question.number, question.call.phase)
        exchange.sent(idle.values())
        refused = {client: [str(reason)] for client, reason in self.run.courier.send(idle).items()}
        arrived: dict[int, tuple[Ask, Counted]] = {}
        for client, ask, outcome in self.run.courier.listen(enough=lambda: len(arrived) >= n):
            try:
                arrived[client] = ask, self.count(outcome, ask, question.call, client)
            except Refusal as refusal:
                refused.setdefault(client, []).append(str(refusal))
        answers = {client: counted for client, (_, counted) in sorted(arrived.items())}
        exchange.done(answers, refused)
        self.run.exchange_log(exchange)
        if len(answers) < n:
            raise ExchangeError(self.complaint(question, len(answers), n, 1, refused))
        sums = self.total(question, answers)
        stale = sum(self.run.weights[c] * (self.round - ask.round) for c, (ask, _) in arrived.items())
        self.enter(question, len(idle), sums._replace(metrics={**sums.metrics, "staleness": jnp.asarray(stale)}))
        return sums.update

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        for i in range(int(n)):
            if until is not None and until(carry):
                break
            carry = body(self, carry, jax.random.fold_in(key, i))
        return carry

    def cohort(self, keys: RoundKeys) -> dict[int, int | None]:
        """Who is to be asked, and how much each one works."""
        ids = draw_cohort(keys.cohort, len(self.run.clients), self.run.cohort)
        works = work_of(keys.work, ids, self.run.clients.local_steps)
        amounts = [None] * len(ids) if works is None else works.tolist()
        return dict(zip(ids.tolist(), amounts, strict=True))

    def question(self, phase: Callable[..., Reply], message: PyTree, key: Array, fresh: bool) -> Question:
        """What this exchange asks everyone."""
        name = phase_name(self.algorithm, phase)
        message = jax.tree.map(np.asarray, message)
        made = Call(name, shapes(message), None, ()).name
        assert made in self.run.contract.calls, f"the round asks {made}, which tracing it did not find"
        number, self.exchanges = self.exchanges, self.exchanges + 1
        return Question(self.run.contract.calls[made], number, to_bytes(message), key, fresh)

    def ask(self, question: Question, client: int, work: int | None) -> Ask:
        """The question as one client gets it."""
        return Ask(
            run=self.run.name,
            contract=self.run.contract.digest,
            round=self.round,
            exchange=question.number,
            phase=question.call.phase,
            call=question.call.name,
            key=np.asarray(jax.random.key_data(question.key)).tobytes(),
            key_kind=str(jax.random.key_impl(question.key)),
            weight=float(self.run.weights[client]),
            work=-1 if work is None else work,
            fresh=question.fresh,
            payload=question.payload,
        )

    def gather(self, question: Question, cohort: dict[int, int | None]) -> dict[int, Counted]:
        """Ask the cohort, again where too few answer. By client, in the cohort's order."""
        run, needed = self.run, self.run.terms.needed(len(cohort))
        counted: dict[int, Counted] = {}
        reasons: dict[int, list[str]] = {}
        for attempt in range(run.terms.attempts):
            asked = [c for c in cohort if c not in counted and (attempt or not run.rests.resting(c, self.round))]
            if attempt:
                run.roster.wait(asked, needed - len(counted))
            exchange = Exchange(run.clock, self.round, question.number, question.call.phase, attempt)
            asks = {client: self.ask(question, client, cohort[client]) for client in asked}
            exchange.sent(asks.values())
            refused = run.courier.send(asks)
            outcomes: Iterable[tuple[int, Ask, Outcome]] = [(c, asks[c], why) for c, why in refused.items()]
            for client, ask, outcome in [*outcomes, *run.courier.listen()]:
                if client not in asks:
                    continue  # an earlier exchange's, too late
                try:
                    counted[client] = self.count(outcome, ask, question.call, client)
                    run.rests.answered(client)
                except Refusal as refusal:
                    reasons.setdefault(client, []).append(str(refusal))
                    run.rests.failed(client, self.round)
            exchange.done({c: counted[c] for c in asked if c in counted}, reasons)
            run.exchange_log(exchange)
            if len(counted) >= needed:
                return {client: counted[client] for client in cohort if client in counted}
        raise ExchangeError(self.complaint(question, len(counted), needed, run.terms.attempts, reasons))

    def count(self, outcome: Outcome, ask: Ask, call: Call, client: int) -> Counted:
        """An answer that was found to be right in every respect.

        Raises:
            Refusal: it is not, and must not count.
        """
        if isinstance(outcome, Refusal):
            raise outcome
        if (outcome.run, outcome.round, outcome.exchange) != (ask.run, ask.round, ask.exchange):
            raise Refusal("it answers another question")
        if outcome.client != client:
            raise Refusal(f"client {client} answers as client {outcome.client}")
        require_layout("its update", outcome.layout, self.run.layouts[call.name])
        update = from_bytes(outcome.payload, call.update)
        if bad := nonfinite_leaves(update):
            raise Refusal(f"its update is not finite in {', '.join(bad)}")
        bound = self.run.terms.norm_bound
        if bound is not None and (norm := euclidean(update)) > bound:
            raise Refusal(f"its update has a norm of {norm:.3g}, above the bound of {bound:g}")
        metrics = outcome.numbers()
        if set(metrics) - set(call.metrics) or not all(np.isfinite(value) for value in metrics.values()):
            raise Refusal("its metrics are not those of the phase, or not finite")
        if outcome.gradients < 0 or outcome.products < 0:
            raise Refusal("its counts are negative")
        self.run.spent(outcome)
        return Counted(outcome, update, metrics)

    def total(self, question: Question, answers: dict[int, Counted]) -> book.Sums:
        """The weighted sums: all that the algorithm sees. A protocol that reveals sums alone would stand here."""
        shared = set.intersection(*(set(counted.metrics) for counted in answers.values()))
        sums = []
        for client, counted in answers.items():
            metrics = {name: jnp.asarray(counted.metrics[name]) for name in sorted(shared)}
            update = jax.tree.map(jnp.asarray, counted.update)
            answer = counted.answer
            reply = Reply(update, metrics=metrics, gradients=answer.gradients, products=answer.products)
            sums.append(book.weigh(reply, jnp.asarray(self.run.weights[client], float), jnp.ones(())))
        return reduce(lambda a, b: jax.tree.map(jnp.add, a, b), sums)

    def enter(self, question: Question, asked: int, sums: book.Sums) -> None:
        entry = book.entry(question.call.phase, question.call.message, question.call.update, sums, asked)
        self.book = book.merge(self.book, entry)

    def complaint(self, question: Question, got: int, needed: int, attempts: int, reasons: dict[int, list[str]]) -> str:
        said = "; ".join(f"client {client}: {why[-1]}" for client, why in sorted(reasons.items())[:5])
        left_out = "" if len(reasons) <= 5 else f"; and {len(reasons) - 5} more"
        times = "" if attempts == 1 else f" after {attempts} attempts"
        return (
            f"round {self.round}, phase {question.call.phase}: {got} clients answered where {needed} are needed{times} "
            f"({said}{left_out})"
        )


@dataclass(frozen=True)
class Question:
    """What an exchange asks everyone."""

    call: Call
    number: int  # of the exchange, within its round
    payload: bytes
    key: Array
    fresh: bool


@dataclass(frozen=True)
class Counted:
    """An answer that counts."""

    answer: Answer
    update: PyTree
    metrics: dict[str, float]


def euclidean(tree: PyTree) -> float:
    """The norm of all leaves together, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))
