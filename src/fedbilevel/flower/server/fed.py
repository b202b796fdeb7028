"""Make the exchanges of a round on the server, over Flower's Grid, and compute the sums that the algorithm gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, require, require_count
from fedbilevel.core.fed import Phase, Reply, Total
from fedbilevel.core.submodel import Units
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import costs
from fedbilevel.engines.costs import ExchangeCount, ExchangeKind, RoundCosts, Sums
from fedbilevel.engines.engine import Cohort, Cohorts, PythonFed, RoundKeys
from fedbilevel.engines.submodels import RoundSubmodels, WholeModels
from fedbilevel.flower import wire
from fedbilevel.flower.server.exchange import EncodedMessage, Exchange, ExchangeSpec
from fedbilevel.flower.server.session import CountedReply, Session
from fedbilevel.flower.wire import CallSignature, Contract

Metrics = dict[str, tuple[Any, Any]]
"""Metric name -> (Σ p_i m_i, Σ p_i) over the clients that sent the metric."""


class FlowerFed(PythonFed):
    """Make the exchanges of a round over Flower.

    A client that does not reply, or whose reply does not count, is treated as absent from the exchange.

    With submodels, each client gets its part of the message, and the mean of an entry is over the clients that hold the
    entry. Only the server knows which units a client holds; the client itself only gets smaller arrays. If a submodel
    consists of single weights, the client also gets the places of these weights in the whole arrays.

    Args:
        session: the run on the server.
        algorithm: the method, with the hyperparameters of this round.
        round: the number of the round.
        keys: the PRNG keys of this round.
        models: the units of the model that each client holds in this round.
    """

    def __init__(
        self,
        session: Session,
        algorithm: Algorithm,
        round: int,
        keys: RoundKeys,
        models: WholeModels | RoundSubmodels,
    ) -> None:
        cohorts = Cohorts(Cohort(session.cohort), len(session.clients), session.clients.own, keys)
        super().__init__(algorithm, session.problem, cohorts, models)
        self.session, self.round = session, round
        self.replied: set[int] = set()  # clients of the round's cohort that have replied
        self.session.roster.refresh()
        self.exchanges = 0
        self.privacy: tuple[float, float] | None = None  # the largest ε of a client of this round, and its δ
        self.units: Callable[[int], Units] = cache(models.units_of)
        self.representative: Callable[[int], int] = cache(models.representative)

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        spec = self.spec(phase, message, key, fresh=fresh is not None, first=False)
        members = self.members if fresh is None else self.cohorts.fresh(int(fresh)).members()
        exchange = Exchange(self.session, spec, dict(members), self.session.needed(len(members)), set())
        replies = exchange.gather()
        sums = self.total(spec.phase, replies)
        self.record(exchange, sums, self.measured(replies))
        rows = [self.weighed(reply).row for reply in replies] if each else None
        total = sums.total(len(self.session.clients), rows and jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
        return jax.tree.map(jnp.asarray, total)

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        """Return the weighted sum of the first n replies: see `Fed.sum_first`.

        The exchange does not wait for a client that fails or misses its deadline.

        Raises:
            ExchangeError: fewer than n replies can be expected.
        """
        session, count = self.session, len(self.session.clients)
        if session.submodel_plan is not None:
            raise ConfigurationError("fed.sum_first does not support submodels: it needs clients with the whole model")
        require(1 <= n <= count, "fed.sum_first: n", n, f"1 to {count} (all clients)")
        require_count("fed.sum_first: max_staleness", max_staleness, optional=True)
        spec = self.spec(phase, message, key, fresh=False, first=True)
        name, own, queues = spec.phase, dict(self.members), session.phase_queues
        now = queues.exchanges[name]
        working = {client for client, request in session.roster.unsettled() if spec.concerns(request)}
        overdue = set() if max_staleness is None else queues.overdue(name, own, working, max_staleness)
        before, asked = queues.resumed.get(name, (None, 0.0))
        exchange = Exchange(session, spec, own, n if before is None else n - int(before.responders), overdue)
        replies = exchange.gather()
        sums, _ = self.early(name, replies)
        stale = sum(session.clients.weights[reply.client] * (now - reply.asked) for reply in replies)
        stale += 0.0 if before is None else now * before.weight - asked
        queues.exchanges[name] += 1
        queues.resumed.pop(name, None)
        self.record(exchange, sums, {**self.measured(replies), "staleness": (np.asarray(stale), sums.weight)})
        return jax.tree.map(jnp.asarray, sums.rounded)

    def early(self, phase: str, replies: list[CountedReply]) -> tuple[Sums, float]:
        """Return the weighted sums of these replies and of replies from a checkpoint, and the sum of p_i·e_i.

        Here e_i is the number of the exchange in which client i was asked for its reply.
        """
        sums, asked = self.session.phase_queues.resumed.get(phase, (None, 0.0))
        new = [self.total(phase, replies)] if replies else []
        parts = new if sums is None else [sums._replace(metrics={}), *new]
        return reduce(partial(jax.tree.map, np.add), parts), asked + sum(
            self.session.clients.weights[reply.client] * reply.asked for reply in replies
        )

    def spec(self, phase: Phase, message: PyTree, key: Array, *, fresh: bool, first: bool) -> ExchangeSpec:
        """Return the description of the round's next exchange.

        The message is encoded once for all clients that hold the same units.
        """
        name = self.algorithm.phase_name(phase)

        @cache
        def part(client: int) -> EncodedMessage:
            small = self.session.programs.cut(self.unbound(name), message, self.units(client))
            return self.encode(self.session.roster.contract_of(client), name, small)

        number, self.exchanges = self.exchanges, self.exchanges + 1
        encoded = lambda client: part(self.representative(client))  # noqa: E731
        return ExchangeSpec(name, self.round, number, encoded, key, fresh, first)

    def unbound(self, phase: str) -> Phase:
        """Return a phase as an unbound function, so that its programs are compiled once for all rounds."""
        method: Any = self.algorithm.phases[phase]
        return method.__func__

    def encode(self, contract: Contract, phase: str, message: PyTree) -> EncodedMessage:
        """Encode a message, and find the call of the contract that has the message's shapes."""
        message = jax.tree.map(np.asarray, message)
        name = CallSignature(phase, wire.shapes(message), None, ()).name
        if name not in contract.calls:
            asked = ", ".join(wire.layout(message)) or "nothing"
            allowed = "of the same shapes and dtypes in every round"
            message = f"round {self.round} sends {asked} to phase {phase}, and the contract has no such call: "
            message += f"messages must be {allowed}"
            raise ConfigurationError(path=f"message of phase {phase}", got=asked, allowed=allowed, message=message)
        return EncodedMessage(contract, contract.calls[name], wire.to_bytes(message))

    def total(self, phase: str, replies: list[CountedReply]) -> Sums:
        """Return the weighted sums of replies, in the shapes of the whole model. The algorithm gets nothing else.

        This is the place for secure aggregation, a protocol that reveals only sums. Replies of clients that hold the
        same units are summed before they are put into the shapes of the whole model. NumPy computes the sums, since it
        adds arrays from a network in a tenth of the time of single JAX operations.
        """
        groups: dict[int, list[CountedReply]] = {}
        for reply in replies:
            groups.setdefault(self.representative(reply.client), []).append(reply)
        totals = []
        for client, group in groups.items():
            sums = reduce(partial(jax.tree.map, np.add), map(self.weighed, group))
            sums = self.session.programs.put_back(self.unbound(phase), sums, self.units(client))
            totals.append(sums._replace(sent=None))
        return reduce(partial(jax.tree.map, np.add), totals)

    def weighed(self, reply: CountedReply) -> Sums:
        """Return a reply multiplied by its client's weight. If the client has privacy, record its ε and δ."""
        real, response = jnp.result_type(float), reply.checked.response
        if response.epsilon > 0:
            epsilon, delta = self.privacy or (0.0, 0.0)
            self.privacy = max(epsilon, response.epsilon), max(delta, response.delta)
        weight: Any = np.asarray(self.session.clients.weights[reply.client], real)
        count: Any = np.ones((), real)
        content = Reply(reply.checked.update, gradients=response.gradients, hvps=response.hvps)
        return costs.weigh(content, weight, count)

    def measured(self, replies: list[CountedReply]) -> Metrics:
        """Return the weighted sum of each metric over the clients that sent it; a client with privacy sends none."""
        real = jnp.result_type(float)
        found: Metrics = {}
        for reply in replies:
            weight = self.session.clients.weights[reply.client]
            for name, value in reply.checked.metrics.items():
                values, weights = found.get(name, (0.0, 0.0))
                found[name] = values + weight * value, weights + weight
        return {name: (np.asarray(sums[0], real), np.asarray(sums[1], real)) for name, sums in found.items()}

    def record(self, exchange: Exchange, sums: Sums, metrics: Metrics) -> None:
        """Add the costs and metrics of an exchange to those of the round."""
        spec = exchange.spec
        entry = costs.empty_costs()._replace(
            calls=message_counts(exchange, int(sums.responders)),
            gradients=costs.split_count(sums.gradients),
            hvps=costs.split_count(sums.hvps),
            metrics={(spec.phase, name): pair for name, pair in metrics.items()},
        )
        self.book.add(entry)
        if not spec.fresh:
            self.replied |= {reply.client for reply in exchange.replies}

    def total_costs(self) -> RoundCosts:
        """Return the costs of the round at its end.

        With submodels, they include the number of clients that replied and hold an entry, for each entry of x and y.
        """
        alike = Counter(map(self.representative, sorted(self.replied or dict(self.members))))
        count = self.models.holders
        holders = (count(self.units(client), jnp.asarray(float(number))) for client, number in alike.items())
        return self.models.covered(self.book.costs, holders)


def message_counts(exchange: Exchange, responders: int) -> dict[ExchangeKind, ExchangeCount]:
    """Count the messages and the replies of an exchange, by the size of the message.

    The exchange itself, and the replies from a checkpoint, are entered under the first of the sizes.

    Args:
        exchange: the exchange, after its end.
        responders: the number of replies in the exchange's sums, including those from a checkpoint.
    """
    sizes = [exchange.spec.encoded(client).call.size for client in exchange.asked or list(exchange.own)[:1]]
    asked = Counter(sizes[: len(exchange.asked)])
    replied = Counter(reply.checked.call.size for reply in exchange.replies)
    replied[sizes[0]] += responders - len(exchange.replies)
    return {
        size: ExchangeCount(*np.array([number == 0, asked[size], replied[size]], np.int32))
        for number, size in enumerate(dict.fromkeys(sizes))
    }
