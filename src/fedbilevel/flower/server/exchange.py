"""Make an exchange over Flower: ask clients, collect replies until enough count, and handle failures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from fedbilevel.algorithms.parts.wrappers import without_wrappers
from fedbilevel.core.errors import ExchangeError
from fedbilevel.core.fed import Request
from fedbilevel.core.own import OwnNumbers
from fedbilevel.core.privacy import comparable_norm
from fedbilevel.flower import wire
from fedbilevel.flower.refusal import Refusal
from fedbilevel.flower.server.roster import ClientReply, tell_stalled
from fedbilevel.flower.server.session import CountedReply, Session, SpoiledError
from fedbilevel.flower.server.terms import CheckedReply, check_public, check_response
from fedbilevel.flower.wire import CallSignature, Contract, RequestMessage

NEW_PHASE = ", in the first exchange of this phase, for which each site compiles a program"


class EncodedMessage(NamedTuple):
    """A message as bytes, with the contract of the run and the signature of the call (a phase and its shapes).

    From the contract and the signature, a client knows which phase to run and which layout the bytes have.
    """

    contract: Contract
    call: CallSignature
    payload: bytes


@dataclass(frozen=True)
class ExchangeSpec:
    """An exchange to be made: its phase, message and key, and which replies it waits for."""

    phase: str
    round: int
    number: int  # the number of the exchange within its round
    encoded: Callable[[int], EncodedMessage]  # client -> its message
    key: Array
    fresh: bool  # whether the exchange asks a fresh cohort
    first: bool  # whether the exchange ends with the first replies; replies to its earlier requests then count too

    def concerns(self, request: RequestMessage) -> bool:
        """Return whether this exchange waits for a reply to `request`."""
        if self.first:
            return request.phase == self.phase
        return (request.round, request.exchange) == (self.round, self.number)


class Exchange:
    """One exchange with clients, from its first requests to the replies that count.

    A client works on one request at a time. An idle client is asked at once, and any other client as soon as it is
    idle. A reply to an earlier request of another phase is kept for the next exchange of that phase.

    Args:
        session: the run on the server.
        spec: the description of the exchange.
        own: the clients to ask, each with its own numbers (`Clients.own`).
        needed: the number of replies that must count.
        overdue: clients for whose replies the exchange must wait, however many others reply (see `Fed.sum_first`).
    """

    def __init__(
        self, session: Session, spec: ExchangeSpec, own: dict[int, OwnNumbers], needed: int, overdue: set[int]
    ) -> None:
        self.session, self.spec, self.own, self.needed, self.overdue = session, spec, own, needed, overdue
        self.replies: list[CountedReply] = session.phase_queues.kept.pop(spec.phase, []) if spec.first else []
        self.done: set[int] = set()  # the clients with a reply that has counted since the exchange began
        self.asked: list[int] = []  # for each message that was sent, its client
        self.failed: dict[int, Refusal] = {}  # client -> why it failed in this attempt

    def gather(self) -> list[CountedReply]:
        """Return the replies that count, in the order of `own`. If too few clients reply, they are asked again.

        Raises:
            ExchangeError: too few replies count.
            SpoiledError: too few replies count, and at least half of the clients report numbers that are not finite.
        """
        session, logged = self.session, 0
        reasons: dict[int, Refusal] = {}
        places = {client: place for place, client in enumerate(self.own)}
        for attempt in range(session.terms.attempts):
            here = [client for client in self.own if client not in session.take.without]
            rested = [c for c in here if attempt or not session.backoff.resting(c, self.spec.round)]
            left = [client for client in rested if client not in self.done]
            if attempt:
                session.roster.wait(left, missing := self.needed - len(self.replies), missing)
            place = self.spec.round, self.spec.number, self.spec.phase, attempt
            began, sent = session.clock.time(), self.attempt(left)
            first = not session.norms.past.get(self.spec.phase)
            tell_stalled(self.failed, len(left), NEW_PHASE if first else "")
            responses = [reply.checked.response for reply in self.replies[logged:]]
            seconds = session.clock.time() - began
            session.exchange_log(place, seconds, sent, responses, self.failed)
            reasons |= self.failed
            logged = len(self.replies)
            if len(self.replies) >= self.needed:
                norms = {reply.client: reply.checked.norm for reply in self.replies}
                session.norms.note(self.spec.phase, norms)
                session.take.hear(norms)
                return sorted(self.replies, key=lambda reply: places[reply.client])
        reasons = {client: why for client, why in sorted(reasons.items()) if client not in self.done}
        spoiled = 2 * sum(why.code.of_state for why in reasons.values()) >= len(self.own)
        times = "" if session.terms.attempts == 1 else f" after {session.terms.attempts} attempts"
        said = f"round {self.spec.round}, phase {self.spec.phase}: {len(self.replies)} of {self.needed} needed replies "
        said += f"count{times} ({session.roster.names.in_words(reasons.values())})"
        raise (SpoiledError if spoiled else ExchangeError)(
            said,
            round=self.spec.round,
            phase=self.spec.phase,
            replies=len(self.replies),
            needed=self.needed,
            refusals=reasons.values(),
        )

    def attempt(self, left: list[int]) -> list[RequestMessage]:
        """Ask each of these clients once, and wait until enough replies count or no more can come.

        Returns:
            The requests that were sent.
        """
        roster, began, sent = self.session.roster, self.session.clock.time(), []
        self.failed, wanted = {}, set(left)
        self.overdue &= wanted | {client for client, _ in roster.unsettled()}
        roster.collect()
        while True:
            self.keep_others()
            sent += self.send(left)
            hope = any(self.spec.concerns(request) or client in wanted for client, request in roster.requests())
            if self.spec.first or not hope:  # an exchange that waits for all replies counts them together
                self.count()
            if self.enough() or not hope:
                return sent
            roster.look(began)

    def enough(self) -> bool:
        """Return whether enough replies have arrived, if the exchange ends after a given number of replies."""
        return self.spec.first and len(self.replies) >= self.needed and not self.overdue

    def keep_others(self) -> None:
        """Check the replies to requests of other phases, and keep them for these phases.

        The clients of these replies are then idle.
        """
        for reply in [reply for reply in self.session.roster.ready if not self.spec.concerns(reply.request)]:
            kept, opened = self.session.phase_queues.kept[reply.request.phase], self.checked(reply)
            own = [opened.norm] if isinstance(opened, CheckedReply) else []
            if counted := self.accept(reply, opened, [*own, *(other.checked.norm for other in kept)]):
                kept.append(counted)

    def send(self, left: list[int]) -> list[RequestMessage]:
        """Send requests to those of the clients `left` that are idle and were not asked in this attempt.

        Return the requests.
        """
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
        """Count the replies that have arrived: up to the number that is needed, or all of them if any reply is overdue.

        Replies that arrived together are sorted by their requests, the oldest first, and then by client id; overdue
        replies come last. They count in this order.
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
        """Make all checks of a reply that need no other reply.

        Return the checked reply, or the refusal if a check fails.
        """
        session = self.session
        try:
            with wire.reading(reply.client):
                contract, request = session.roster.contract_of(reply.client), reply.request
                call = contract.calls[request.call]
                checked = check_response(reply.response(), call, session.terms, len(session.clients))
            message = partial(wire.from_bytes, request.payload, call.message)
            method, own = without_wrappers(contract.algorithm), json.loads(request.own)
            check_public(checked.update, lambda: Request(method, message(), own))
            return checked
        except Refusal as refusal:
            return refusal

    def accept(self, reply: ClientReply, counted: CheckedReply | Refusal, here: Sequence[float]) -> CountedReply | None:
        """Count a reply if it passed its checks and its norm is not too large; else record the reason and return None.

        Later messages tell the client that its reply counts, and the client continues from the state after this reply.
        This also holds if the reply is used only in a later exchange.

        Args:
            reply: the reply.
            counted: what `checked` returned for this reply.
            here: the norms of all updates of the exchange so far, including this one.
        """
        session, (client, request, _) = self.session, reply
        session.roster.ready.remove(reply)
        try:
            if isinstance(counted, Refusal):
                raise counted
            sent = partial(wire.from_bytes, request.payload, counted.call.message)
            session.norms.check(request.phase, counted.norm, here, lambda: comparable_norm(sent()), client)
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
        """Return the request of this exchange to a client."""
        session, spec = self.session, self.spec
        contract, call, payload = spec.encoded(client)
        epsilon, delta = session.exchange_log.spent.get(client, (0.0, 0.0))
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
            own=json.dumps(self.own[client], default=np.generic.item),  # numbers may be scalars of NumPy
            fresh=spec.fresh,
            counted_round=int(session.counted[client, 0]),
            counted_exchange=int(session.counted[client, 1]),
            epsilon=epsilon,
            delta=delta,
            payload=payload,
        )
