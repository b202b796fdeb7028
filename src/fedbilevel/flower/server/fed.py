"""The exchanges of one round over Flower's Grid, on the server: which clients each asks and when, which replies end it,
how it treats failures; and the sums that an algorithm gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, ExchangeError, require, require_count
from fedbilevel.core.fed import Phase, Reply
from fedbilevel.core.submodel import Units
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import costs
from fedbilevel.engines.costs import ExchangeCount, ExchangeKind, RoundCosts, Sums
from fedbilevel.engines.engine import RoundKeys, draw_cohort, repeated, work_of
from fedbilevel.engines.submodels import RoundSubmodels, covered
from fedbilevel.flower import wire
from fedbilevel.flower.refusal import Refusal, in_words
from fedbilevel.flower.server.roster import ClientReply
from fedbilevel.flower.server.session import CountedReply, Session, SpoiledError
from fedbilevel.flower.server.terms import CheckedReply, check_response, euclidean
from fedbilevel.flower.wire import CallSignature, Contract, RequestMessage


class EncodedMessage(NamedTuple):
    """A message as bytes, with the contract and the call that a client knows it by."""

    contract: Contract
    call: CallSignature
    payload: bytes


@dataclass(frozen=True)
class ExchangeSpec:
    """The phase, message and key of one exchange."""

    phase: str
    round: int
    number: int  # of the exchange, within its round
    encoded: Callable[[int], EncodedMessage]  # for each client
    key: Array
    fresh: bool
    first: bool  # it ends with the first replies, to earlier requests of the phase too

    def concerns(self, request: RequestMessage) -> bool:
        """Tell whether this exchange waits for a reply to `request`."""
        if self.first:
            return request.phase == self.phase
        return (request.round, request.exchange) == (self.round, self.number)


class Exchange:
    """An exchange in progress.

    A client works on one request at a time: an idle client is asked at once, any other as soon as it is idle. A reply
    to an earlier request of another phase is kept for the next exchange of that phase.

    Args:
        works: the local steps of each client that is to be asked.
        needed: how many replies have to count.
        overdue: clients that `sum_first` waits for in any case.
    """

    def __init__(
        self, session: Session, spec: ExchangeSpec, works: dict[int, int | None], needed: int, overdue: set[int]
    ) -> None:
        self.session, self.spec, self.works, self.needed, self.overdue = session, spec, works, needed, overdue
        self.replies: list[CountedReply] = session.phase_queues.kept.pop(spec.phase, []) if spec.first else []
        self.done: set[int] = set()  # clients that have replied since the exchange began
        self.asked: list[int] = []  # the client of each message sent
        self.failed: dict[int, Refusal] = {}  # client -> why, in this attempt

    def gather(self) -> list[CountedReply]:
        """Gather the replies that count, in the order of `works`. Where too few clients reply they are asked again.

        Raises:
            ExchangeError: too few replies count.
            SpoiledError: too few replies count, and most clients report numbers that are not finite.
        """
        session, logged = self.session, 0
        reasons: dict[int, Refusal] = {}
        places = {client: place for place, client in enumerate(self.works)}
        for attempt in range(session.terms.attempts):
            here = [client for client in self.works if client not in session.take.without]
            rested = [c for c in here if attempt or not session.backoff.resting(c, self.spec.round)]
            left = [client for client in rested if client not in self.done]
            if attempt:
                session.roster.wait(left, missing := self.needed - len(self.replies), missing)
            place = self.spec.round, self.spec.number, self.spec.phase, attempt
            began, sent = session.clock.time(), self.attempt(left)
            responses = [reply.checked.response for reply in self.replies[logged:]]
            seconds = session.clock.time() - began
            session.exchange_log(place, seconds, sent, responses, self.failed)
            reasons |= self.failed
            logged = len(self.replies)
            if len(self.replies) >= self.needed:
                norms = {reply.client: reply.checked.norm for reply in self.replies}
                session.norms.note(self.spec.phase, list(norms.values()))
                session.take.hear(norms)
                return sorted(self.replies, key=lambda reply: places[reply.client])
        spoiled = 2 * sum(why.code.of_state for why in reasons.values()) >= len(self.works)
        times = "" if session.terms.attempts == 1 else f" after {session.terms.attempts} attempts"
        said = f"round {self.spec.round}, phase {self.spec.phase}: {len(self.replies)} clients replied where "
        said += f"{self.needed} are needed{times} ({in_words(why for _, why in sorted(reasons.items()))})"
        raise (SpoiledError if spoiled else ExchangeError)(said)

    def attempt(self, left: list[int]) -> list[RequestMessage]:
        """Ask each of these clients once; wait until enough replies count or no more can come.

        Returns:
            the requests sent.
        """
        roster, began, sent = self.session.roster, self.session.clock.time(), []
        self.failed, wanted = {}, set(left)
        self.overdue &= wanted | {client for client, _ in roster.unsettled()}
        roster.collect()
        while True:
            self.keep_others()
            sent += self.send(left)
            hope = any(self.spec.concerns(request) or client in wanted for client, request in roster.requests())
            if self.spec.first or not hope:  # all of them at once, where all are waited for
                self.count()
            if self.enough() or not hope:
                return sent
            roster.look(began)

    def enough(self) -> bool:
        return self.spec.first and len(self.replies) >= self.needed and not self.overdue

    def keep_others(self) -> None:
        """Keep replies to requests of other phases for their exchanges: their clients are idle."""
        for reply in [reply for reply in self.session.roster.ready if not self.spec.concerns(reply.request)]:
            kept, opened = self.session.phase_queues.kept[reply.request.phase], self.checked(reply)
            own = [opened.norm] if isinstance(opened, CheckedReply) else []
            if counted := self.accept(reply, opened, [*own, *(other.checked.norm for other in kept)]):
                kept.append(counted)

    def send(self, left: list[int]) -> list[RequestMessage]:
        """Send requests to the clients that are idle and were not asked yet."""
        session = self.session
        busy = {client for client, _ in session.roster.unsettled()}
        requests = {c: self.request(c) for c in left if c not in self.failed and c not in self.done and c not in busy}
        failed = session.roster.send(requests)
        self.asked += [client for client in requests if client not in failed]
        self.failed |= failed
        self.overdue -= failed.keys()
        if self.spec.first:
            now = session.phase_queues.exchanges[self.spec.phase]
            session.phase_queues.since[self.spec.phase] |= {client: now for client in requests if client not in failed}
        return [request for client, request in requests.items() if client not in failed]

    def count(self) -> None:
        """Take what has come, as much as is needed: of what came together older requests first, then lower ids.

        Where a reply came that the exchange waits for in any case, all count that came with it.
        """
        asked = self.session.phase_queues.since[self.spec.phase]

        def order(reply: ClientReply) -> tuple[bool, int, int]:
            return reply.client in self.overdue, asked[reply.client], reply.client

        arrived = [(reply, self.checked(reply)) for reply in sorted(self.session.roster.ready, key=order)]
        here = [reply.checked.norm for reply in self.replies]
        here += [checked.norm for _, checked in arrived if isinstance(checked, CheckedReply)]
        for reply, opened in arrived:
            if self.enough():
                return
            if counted := self.accept(reply, opened, here):
                self.replies.append(counted)
                self.done.add(reply.client)
            self.overdue.discard(reply.client)

    def checked(self, reply: ClientReply) -> CheckedReply | Refusal:
        """Check a reply, as far as no other reply is needed; the refusal where it fails."""
        session = self.session
        try:
            with wire.reading(reply.client):
                call = session.roster.contract_of(reply.client).calls[reply.request.call]
                return check_response(reply.response(), call, session.terms, len(session.clients))
        except Refusal as refusal:
            return refusal

    def accept(self, reply: ClientReply, counted: CheckedReply | Refusal, here: Sequence[float]) -> CountedReply | None:
        """Count a reply that passed its checks, if its norm is usual; else note why not. `here`: see
        `NormBounds.check`.

        From now on messages to its client say that it counts, and what the client keeps depends on that, though the
        reply may be used only later.
        """
        session, (client, request, _) = self.session, reply
        session.roster.ready.remove(reply)
        try:
            if isinstance(counted, Refusal):
                raise counted
            sent = partial(wire.from_bytes, request.payload, counted.call.message)
            session.norms.check(request.phase, counted.norm, here, lambda: euclidean(sent()))
        except Refusal as refusal:
            if not self.spec.concerns(request):
                refusal = Refusal(refusal.code, f"round {request.round}, phase {request.phase}: {refusal.why}")
            refusal.client, self.failed[client] = client, refusal
            session.backoff.failed(client, self.spec.round)
            return None
        session.backoff.replied(client)
        if not request.fresh:
            session.counted[client] = request.round, request.exchange
        since, now = session.phase_queues.since[request.phase], session.phase_queues.exchanges[request.phase]
        asked, since[client] = since[client], now
        return CountedReply(client, counted, asked)

    def request(self, client: int) -> RequestMessage:
        """Make the request as a client gets it."""
        session, spec, work = self.session, self.spec, self.works[client]
        contract, call, payload = spec.encoded(client)
        return RequestMessage(
            run=session.name,
            contract=contract.digest,
            round=spec.round,
            exchange=spec.number,
            phase=spec.phase,
            call=call.name,
            key=np.asarray(jax.random.key_data(spec.key)).tobytes(),
            key_kind=str(jax.random.key_impl(spec.key)),
            weight=float(session.clients.weights[client]),
            work=-1 if work is None else work,
            fresh=spec.fresh,
            counted_round=int(session.counted[client, 0]),
            counted_exchange=int(session.counted[client, 1]),
            payload=payload,
        )


Metrics = dict[str, tuple[Any, Any]]
"""Metric name -> (Σ p_i m_i, Σ p_i) over the clients that sent it."""


class FlowerFed:
    """The `Fed` of one round over Flower. A client that does not reply, or whose reply cannot count, is treated as
    absent from that exchange.

    With submodels each client is sent its part of the message, and an entry is averaged over the clients that hold it.
    The server alone knows which units these are: a client sees arrays of its own size.

    Args:
        algorithm: with the hyperparameters of this round.
        keys: the PRNG keys of this round.
        submodels: the units that each client holds in this round; None where all hold the whole model.
    """

    def __init__(
        self, session: Session, algorithm: Algorithm, round: int, keys: RoundKeys, submodels: RoundSubmodels | None
    ) -> None:
        self.session, self.algorithm, self.round, self.keys, self.submodels = session, algorithm, round, keys, submodels
        self.problem, clients = session.problem, session.clients
        self.sampled = session.cohort < len(clients)
        self.own = self.cohort(keys)
        self.replied: set[int] = set()  # clients of the round's own cohort that have replied
        self.session.roster.refresh()
        self.round_costs = costs.empty_costs()
        self.exchanges = 0
        self.privacy: tuple[float, float] | None = None  # the largest ε and δ that a client of this round has spent
        self.units: Callable[[int], Units] = cache(self.units_of)
        classes = np.zeros(len(clients), int) if submodels is None else submodels.submodel_plan.number
        self.classes = classes  # (M,) the capacity class of each client
        self.first_of_class = np.unique(classes, return_index=True)[1]

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        spec = self.spec(phase, message, key, fresh=fresh is not None, first=False)
        cohort = self.own if fresh is None else self.cohort(self.keys.of_fresh(int(fresh)))
        exchange = Exchange(self.session, spec, cohort, self.session.terms.needed(len(cohort)), set())
        replies = exchange.gather()
        sums = self.total(spec.phase, replies)
        self.record(exchange, sums, self.measured(replies))
        mean = costs.normalise(sums, len(self.session.clients), unbiased)
        return jax.tree.map(jnp.asarray, mean)

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        """See `Fed.sum_first`. A client that fails or passes its deadline is not waited for.

        Raises:
            ExchangeError: fewer than n replies can be expected.
        """
        session, count = self.session, len(self.session.clients)
        if self.submodels is not None:
            raise ConfigurationError("clients who hold submodels reply together: fed.sum_first is not for them")
        require(1 <= n <= count, "fed.sum_first: n", n, f"1 to {count} (all clients)")
        require_count("fed.sum_first: max_staleness", max_staleness, optional=True)
        spec = self.spec(phase, message, key, fresh=False, first=True)
        name, queues = spec.phase, session.phase_queues
        now = queues.exchanges[name]
        working = {client for client, request in session.roster.unsettled() if spec.concerns(request)}
        overdue = set() if max_staleness is None else queues.overdue(name, self.own, working, max_staleness)
        before, asked = queues.resumed.get(name, (None, 0.0))
        exchange = Exchange(session, spec, self.own, n if before is None else n - int(before.responders), overdue)
        replies = exchange.gather()
        sums, _ = self.early(name, replies)
        stale = sum(session.clients.weights[reply.client] * (now - reply.asked) for reply in replies)
        stale += 0.0 if before is None else now * before.weight - asked
        queues.exchanges[name] += 1
        queues.resumed.pop(name, None)
        self.record(exchange, sums, {**self.measured(replies), "staleness": (np.asarray(stale), sums.weight)})
        return jax.tree.map(jnp.asarray, sums.update)

    def early(self, phase: str, replies: list[CountedReply]) -> tuple[Sums, float]:
        """Return the weighted sums of these replies and of those resumed from a checkpoint; and Σ p_i·(exchange in
        which the client was asked) over both."""
        sums, asked = self.session.phase_queues.resumed.get(phase, (None, 0.0))
        new = [self.total(phase, replies)] if replies else []
        parts = new if sums is None else [sums._replace(metrics={}), *new]
        return reduce(partial(jax.tree.map, np.add), parts), asked + sum(
            self.session.clients.weights[reply.client] * reply.asked for reply in replies
        )

    repeat = repeated

    def cohort(self, keys: RoundKeys) -> dict[int, int | None]:
        """Draw clients by `keys` -> their numbers of local steps, None where the server does not set them."""
        clients = self.session.clients
        ids = draw_cohort(keys.cohort, len(clients), self.session.cohort)
        works = work_of(keys.work, ids, clients.local_steps)
        amounts = [None] * len(ids) if works is None else works.tolist()
        return dict(zip(ids.tolist(), amounts, strict=True))

    def representative(self, client: int) -> int:
        """Return the lowest id among the clients that hold the same units as this client."""
        alike = self.submodels is None or self.submodels.alike
        return int(self.first_of_class[self.classes[client]]) if alike else client

    def units_of(self, client: int) -> Units:
        """Return the units that a client holds in this round."""
        assert self.submodels is not None
        plan = self.submodels.submodel_plan
        return self.submodels.units(int(plan.number[client]), client, int(plan.rank[client]))

    def spec(self, phase: Phase, message: PyTree, key: Array, *, fresh: bool, first: bool) -> ExchangeSpec:
        """Describe the next exchange of the round. Its message is encoded once for all clients that hold the same
        units."""
        name = self.algorithm.phase_name(phase)

        @cache
        def part(client: int) -> EncodedMessage:
            small = message
            if self.submodels is not None:
                small = self.session.submodel_programs.cut(self.unbound(name), message, self.units(client))
            return self.encode(self.session.roster.contract_of(client), name, small)

        number, self.exchanges = self.exchanges, self.exchanges + 1
        encoded = lambda client: part(self.representative(client))  # noqa: E731
        return ExchangeSpec(name, self.round, number, encoded, key, fresh, first)

    def unbound(self, phase: str) -> Phase:
        """Return a phase as the function of its class, for which programs are compiled once, whatever the round's
        fields."""
        method: Any = self.algorithm.phases[phase]
        return method.__func__

    def encode(self, contract: Contract, phase: str, message: PyTree) -> EncodedMessage:
        """Encode the message, for the call of the contract that has its shapes."""
        message = jax.tree.map(np.asarray, message)
        name = CallSignature(phase, wire.shapes(message), None, ()).name
        if name not in contract.calls:
            asked = ", ".join(wire.layout(message)) or "nothing"
            raise ConfigurationError(
                f"round {self.round} asks phase {phase} with {asked}, which tracing a round did not find: "
                "the shapes and dtypes of messages must be the same in every round"
            )
        return EncodedMessage(contract, contract.calls[name], wire.to_bytes(message))

    def total(self, phase: str, replies: list[CountedReply]) -> Sums:
        """Sum replies with their weights, in the shapes of the whole model: all that the algorithm sees. Secure
        aggregation, a protocol that reveals nothing but sums, would be called here.

        Replies of clients that hold the same units are summed before they are put back into the whole model. The sums
        are computed in NumPy, which adds bytes from a network in a tenth of the time that single JAX operations take.
        """
        groups: dict[int, list[CountedReply]] = {}
        for reply in replies:
            groups.setdefault(self.representative(reply.client), []).append(reply)
        totals = []
        for client, group in groups.items():
            sums = reduce(partial(jax.tree.map, np.add), map(self.weighed, group))
            if self.submodels is not None:
                sums = self.session.submodel_programs.put_back(self.unbound(phase), sums, self.units(client))
            totals.append(sums)
        return reduce(partial(jax.tree.map, np.add), totals)

    def weighed(self, reply: CountedReply) -> Sums:
        """Multiply a reply by its client's weight. Notes the ε and δ that the client has spent, where it is private."""
        real, response = jnp.result_type(float), reply.checked.response
        if response.epsilon > 0:
            epsilon, delta = self.privacy or (0.0, 0.0)
            self.privacy = max(epsilon, response.epsilon), max(delta, response.delta)
        weight: Any = np.asarray(self.session.clients.weights[reply.client], real)
        count: Any = np.ones((), real)
        content = Reply(reply.checked.update, gradients=response.gradients, hvps=response.hvps)
        return costs.weigh(content, weight, count)

    def measured(self, replies: list[CountedReply]) -> Metrics:
        """Sum each metric, weighted, over the clients that sent it; a client under privacy sends none."""
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
            gradients=sums.gradients,
            hvps=sums.hvps,
            metrics={(spec.phase, name): pair for name, pair in metrics.items()},
        )
        self.round_costs = costs.add_costs(self.round_costs, entry)
        if not spec.fresh:
            self.replied |= {reply.client for reply in exchange.replies}

    def total_costs(self) -> RoundCosts:
        """Return the costs of the round, at its end; with submodels also how many of the clients that replied hold each
        entry of x and y."""
        if self.submodels is None:
            return self.round_costs
        alike = Counter(map(self.representative, sorted(self.replied or self.own)))
        holders = self.submodels.holders
        held = [holders(self.units(client), jnp.asarray(float(number))) for client, number in alike.items()]
        return covered(self.round_costs, held)


def message_counts(exchange: Exchange, responders: int) -> dict[ExchangeKind, ExchangeCount]:
    """Count the messages of each size that an exchange sent, and those that had a reply; the exchange itself, and
    replies resumed from a checkpoint, are counted with the first size.

    Args:
        responders: number of replies in the exchange's sums, resumed ones included.
    """
    sizes = [exchange.spec.encoded(client).call.size for client in exchange.asked or list(exchange.works)[:1]]
    asked = Counter(sizes[: len(exchange.asked)])
    replied = Counter(reply.checked.call.size for reply in exchange.replies)
    replied[sizes[0]] += responders - len(exchange.replies)
    return {
        size: ExchangeCount(*np.array([number == 0, asked[size], replied[size]], np.int32))
        for number, size in enumerate(dict.fromkeys(sizes))
    }
