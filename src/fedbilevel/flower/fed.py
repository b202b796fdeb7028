"""The exchanges of one round over Flower's Grid, on the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import phase_name
from fedbilevel.core.errors import ConfigurationError, ExchangeError, require
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import book
from fedbilevel.engines.cohort import RoundKeys, draw_cohort, work_of
from fedbilevel.engines.engine import loop
from fedbilevel.flower.contract import Call
from fedbilevel.flower.counting import Counted, accepted
from fedbilevel.flower.exchange_log import Exchange
from fedbilevel.flower.records import reading
from fedbilevel.flower.wire import Ask, Refusal, layout, shapes, to_bytes

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun

Metrics = dict[str, tuple[Any, Any]]
"""By name: (Σ p_i m_i, Σ p_i)."""


class FlowerFed:
    """See `Fed`. Who does not answer, or answers what cannot count, is as if absent from that exchange."""

    def __init__(self, run: FlowerRun, algorithm: Any, round: int, keys: RoundKeys) -> None:
        self.run, self.algorithm, self.round, self.keys = run, algorithm, round, keys
        self.indirect = run.problem.indirect
        self.worked = run.clients.local_steps is not None
        self.own = self.cohort(keys)
        self.run.roster.refresh()
        self.book = book.empty()
        self.exchanges = 0
        self.privacy: tuple[float, float] | None = None  # the largest ε and δ that a client of this round has spent

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
        answers, asked = self.gather(question, cohort, self.run.terms.needed(len(cohort)))
        sums = self.total(answers)
        self.enter(question, asked, sums, self.measured(answers))
        mean = book.normalise(sums, len(self.run.clients), unbiased)
        return jax.tree.map(jnp.asarray, mean)

    def first(
        self,
        n: int,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        max_staleness: int | None = None,
    ) -> PyTree:
        """Σ p_i u_i over the first n answers to arrive, each computed on the message that its client was last sent.

        Clients that are idle are sent this message first; those still at work on an earlier message of the same kind
        go on with that one, in later rounds too. History: `staleness`, the mean number of rounds between a question
        and its answer's use.

        Raises:
            ExchangeError: fewer than n answers can be expected.
        """
        count = len(self.run.clients)
        require(1 <= n <= count, "fed.first: n", n, f"1 to {count} (all clients)")
        question = self.question(phase, message, key, fresh=False)
        works = work_of(self.keys.work, jnp.arange(count), self.run.clients.local_steps)
        everyone = dict(enumerate([None] * count if works is None else works.tolist()))
        answers, asked = self.gather(question, everyone, n, early=True)
        sums = self.total(answers)
        stale = sum(self.run.weights[client] * (self.round - one.answer.round) for client, one in answers.items())
        self.enter(question, asked, sums, {**self.measured(answers), "staleness": (jnp.asarray(stale), sums.weight)})
        return jax.tree.map(jnp.asarray, sums.update)

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        return loop(self, n, body, carry, key, until)

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
        if made not in self.run.contract.calls:
            raise ConfigurationError(
                f"round {self.round} asks phase {name} with {', '.join(layout(message)) or 'nothing'}, which tracing a "
                "round did not find: the shapes and dtypes of messages must be the same in every round"
            )
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
            counted_round=int(self.run.counted[client, 0]),
            counted_exchange=int(self.run.counted[client, 1]),
            payload=question.payload,
        )

    def gather(
        self, question: Question, works: dict[int, int | None], needed: int, early: bool = False
    ) -> tuple[dict[int, Counted], int]:
        """Ask these clients, again where too few answer.

        Args:
            works: the local steps of each client.
            needed: how many have to answer.
            early: take the first `needed` answers, to earlier questions of the kind too; clients at work are let be.

        Returns:
            answers: by client, in the order of `works`.
            asked: how many messages were sent.
        """
        run, asked = self.run, 0
        counted: dict[int, Counted] = {}
        reasons: dict[int, str] = {}

        def wanted(ask: Ask) -> bool:
            this = (ask.round, ask.exchange) == (self.round, question.number)
            return ask.call == question.call.name if early else this

        for attempt in range(run.terms.attempts):
            left = [c for c in works if c not in counted and (attempt or not run.rests.resting(c, self.round))]
            if attempt:
                run.roster.wait(left, needed - len(counted), needed - len(counted))
            if attempt or not early:  # an early one too has nothing to hope for but those at work on something else
                run.courier.settle(left)
            if early:
                left = [client for client in left if not run.courier.busy(client, wanted)]
            exchange = Exchange(run.clock, self.round, question.number, question.call.phase, attempt)
            asks = {client: self.ask(question, client, works[client]) for client in left}
            failed = run.courier.send(asks)
            sent = [ask for client, ask in asks.items() if client not in failed]
            new: dict[int, Counted] = {}
            for client, ask, outcome in run.courier.listen(wanted, lambda: early and len(counted) >= needed):
                try:
                    with reading():
                        one = accepted(outcome, ask, question.call, client, run.terms, len(run.clients))
                    new[client] = counted[client] = one
                    run.rests.answered(client)
                    if not question.fresh:  # a late answer to `first` may count after a newer one
                        run.counted[client] = max(tuple(run.counted[client]), (ask.round, ask.exchange))
                except Refusal as refusal:
                    failed[client] = str(refusal)
                    run.rests.failed(client, self.round)
            exchange.done(sent, {client: one.answer for client, one in new.items()}, failed)
            run.exchange_log(exchange)
            reasons |= failed
            asked += len(sent)
            if len(counted) >= needed:
                return {client: counted[client] for client in works if client in counted}, asked
        raise ExchangeError(self.complaint(question, len(counted), needed, reasons))

    def total(self, answers: dict[int, Counted]) -> book.Sums:
        """The weighted sums: all that the algorithm sees. A protocol that reveals sums alone would stand here.

        In NumPy, which adds bytes that came over a network in a tenth of the time that single JAX operations take.
        """
        real = jnp.result_type(float)
        sums = []
        for client, counted in answers.items():
            weight: Any = np.asarray(self.run.weights[client], real)
            one: Any = np.ones((), real)
            answer = counted.answer
            if answer.epsilon > 0:
                epsilon, delta = self.privacy or (0.0, 0.0)
                self.privacy = max(epsilon, answer.epsilon), max(delta, answer.delta)
            reply = Reply(counted.update, gradients=answer.gradients, products=answer.products)
            sums.append(book.weigh(reply, weight, one))
        return reduce(lambda a, b: jax.tree.map(np.add, a, b), sums)

    def measured(self, answers: dict[int, Counted]) -> Metrics:
        """Each metric's sums over those who sent it: under privacy a client sends none."""
        real = jnp.result_type(float)
        found: Metrics = {}
        for client, counted in answers.items():
            weight = self.run.weights[client]
            for name, value in counted.metrics.items():
                values, weights = found.get(name, (0.0, 0.0))
                found[name] = values + weight * value, weights + weight
        return {
            name: (np.asarray(values, real), np.asarray(weights, real)) for name, (values, weights) in found.items()
        }

    def enter(self, question: Question, asked: int, sums: book.Sums, metrics: Metrics) -> None:
        phase = question.call.phase
        entry = book.entry(phase, question.call.message, sums, asked)
        entry = entry._replace(metrics={(phase, name): pair for name, pair in metrics.items()})
        self.book = book.merge(self.book, entry)

    def complaint(self, question: Question, got: int, needed: int, reasons: dict[int, str]) -> str:
        said = [f"client {client}: {why}" for client, why in sorted(reasons.items())]
        left_out = [] if len(said) <= 5 else [f"and {len(said) - 5} more"]
        attempts = self.run.terms.attempts
        times = "" if attempts == 1 else f" after {attempts} attempts"
        return (
            f"round {self.round}, phase {question.call.phase}: {got} clients answered where {needed} are needed{times} "
            f"({'; '.join(said[:5] + left_out)})"
        )


@dataclass(frozen=True)
class Question:
    """What an exchange asks everyone."""

    call: Call
    number: int  # of the exchange, within its round
    payload: bytes
    key: Array
    fresh: bool
