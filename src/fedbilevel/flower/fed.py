"""The exchanges of one round over Flower's Grid, on the server."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, require, require_count
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.cohort import RoundKeys, draw_cohort, work_of
from fedbilevel.engines.costs import (
    ExchangeCount,
    ExchangeKind,
    RoundCosts,
    Sums,
    add_costs,
    empty_costs,
    normalise,
    weigh,
)
from fedbilevel.engines.engine import loop
from fedbilevel.flower.contract import Call, Contract
from fedbilevel.flower.gathering import Gathering, Question, Wording
from fedbilevel.flower.lanes import Arrival
from fedbilevel.flower.wire import layout, shapes, to_bytes

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun

Metrics = dict[str, tuple[Any, Any]]
"""By name: (Σ p_i m_i, Σ p_i)."""


class FlowerFed:
    """See `Fed`. Who does not answer, or answers what cannot count, is as if absent from that exchange."""

    def __init__(self, run: FlowerRun, algorithm: Algorithm, round: int, keys: RoundKeys) -> None:
        self.run, self.algorithm, self.round, self.keys = run, algorithm, round, keys
        self.problem = run.problem
        self.has_client_steps, self.sampled = run.clients.local_steps is not None, run.cohort < len(run.clients)
        self.own = self.cohort(keys)
        self.run.roster.refresh()
        self.round_costs = empty_costs()
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
        question = self.question(phase, message, key, fresh=fresh is not None, first=False)
        cohort = self.own if fresh is None else self.cohort(self.keys.of_fresh(int(fresh)))
        gathering = Gathering(self.run, question, cohort, self.run.terms.needed(len(cohort)), set())
        answers = gathering.gather()
        sums = self.total(question.phase, answers)
        self.enter(question, gathering, sums, self.measured(answers))
        mean = normalise(sums, len(self.run.clients), unbiased)
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
        """See `Fed.first`; who fails or passes its deadline is not waited for.

        Raises:
            ExchangeError: fewer than n answers can be expected.
        """
        run, count = self.run, len(self.run.clients)
        require(1 <= n <= count, "fed.first: n", n, f"1 to {count} (all clients)")
        require_count("fed.first: max_staleness", max_staleness, optional=True)
        question = self.question(phase, message, key, fresh=False, first=True)
        name, lanes = question.phase, run.lanes
        now = lanes.exchanges[name]
        working = {client for client, ask in run.courier.unsettled() if question.concerns(ask)}
        overdue = set() if max_staleness is None else lanes.overdue(name, self.own, working, max_staleness)
        before, asked = lanes.resumed.get(name, (None, 0.0))
        gathering = Gathering(run, question, self.own, n if before is None else n - int(before.responders), overdue)
        answers = gathering.gather()
        sums, _ = self.early(name, answers)
        stale = sum(run.weights[one.client] * (now - one.asked) for one in answers)
        stale += 0.0 if before is None else now * before.weight - asked
        lanes.exchanges[name] += 1
        lanes.resumed.pop(name, None)
        metrics = {**self.measured(answers), "staleness": (np.asarray(stale), sums.weight)}
        self.enter(question, gathering, sums, metrics)
        return jax.tree.map(jnp.asarray, sums.update)

    def early(self, phase: str, answers: list[Arrival]) -> tuple[Sums, float]:
        """The sum of these and of what is left from before a stop, and Σ p_i·asked."""
        sums, asked = self.run.lanes.resumed.get(phase, (None, 0.0))
        new = [self.total(phase, answers)] if answers else []
        parts = new if sums is None else [sums._replace(metrics={}), *new]
        return reduce(lambda a, b: jax.tree.map(np.add, a, b), parts), asked + sum(
            self.run.weights[one.client] * one.asked for one in answers
        )

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

    def question(
        self, phase: Callable[..., Reply], message: PyTree, key: Array, *, fresh: bool, first: bool
    ) -> Question:
        """What this exchange asks."""
        name = self.algorithm.phase_name(phase)
        number, self.exchanges = self.exchanges, self.exchanges + 1
        return Question(name, self.round, number, self.wording(name, message), key, fresh, first)

    def wording(self, phase: str, message: PyTree) -> Callable[[int], Wording]:
        """What it asks each client: the same."""
        same = self.worded(self.run.contract, phase, message)
        return lambda client: same

    def worded(self, contract: Contract, phase: str, message: PyTree) -> Wording:
        """The message as one of the contract's calls."""
        message = jax.tree.map(np.asarray, message)
        name = Call(phase, shapes(message), None, ()).name
        if name not in contract.calls:
            raise ConfigurationError(
                f"round {self.round} asks phase {phase} with {', '.join(layout(message)) or 'nothing'}, which tracing "
                "a round did not find: the shapes and dtypes of messages must be the same in every round"
            )
        return Wording(contract, contract.calls[name], to_bytes(message))

    def total(self, phase: str, answers: list[Arrival]) -> Sums:
        """The weighted sums: all that the algorithm sees. A protocol that reveals sums alone would stand here.

        In NumPy, which adds bytes that came over a network in a tenth of the time that single JAX operations take.
        """
        real = jnp.result_type(float)
        sums = []
        for client, counted, _ in answers:
            weight: Any = np.asarray(self.run.weights[client], real)
            one: Any = np.ones((), real)
            answer = counted.answer
            if answer.epsilon > 0:
                epsilon, delta = self.privacy or (0.0, 0.0)
                self.privacy = max(epsilon, answer.epsilon), max(delta, answer.delta)
            reply = Reply(counted.update, gradients=answer.gradients, hvps=answer.hvps)
            sums.append(weigh(reply, weight, one))
        return reduce(lambda a, b: jax.tree.map(np.add, a, b), sums)

    def measured(self, answers: list[Arrival]) -> Metrics:
        """Each metric's sums over those who sent it: under privacy a client sends none."""
        real = jnp.result_type(float)
        found: Metrics = {}
        for client, counted, _ in answers:
            weight = self.run.weights[client]
            for name, value in counted.metrics.items():
                values, weights = found.get(name, (0.0, 0.0))
                found[name] = values + weight * value, weights + weight
        return {
            name: (np.asarray(values, real), np.asarray(weights, real)) for name, (values, weights) in found.items()
        }

    def enter(self, question: Question, gathering: Gathering, sums: Sums, metrics: Metrics) -> None:
        """Note what an exchange cost and measured."""
        entry = empty_costs()._replace(
            calls=self.costs(question, gathering, sums),
            gradients=sums.gradients,
            hvps=sums.hvps,
            metrics={(question.phase, name): pair for name, pair in metrics.items()},
        )
        self.round_costs = add_costs(self.round_costs, entry)

    def costs(self, question: Question, gathering: Gathering, sums: Sums) -> dict[ExchangeKind, ExchangeCount]:
        """How often messages of each size were sent and answered."""
        size = question.wording(0).call.size  # the same for all
        return {size: ExchangeCount(*np.array([1, len(gathering.asked), sums.responders], np.int32))}

    def total_costs(self) -> RoundCosts:
        """The costs of the round, at its end."""
        return self.round_costs
