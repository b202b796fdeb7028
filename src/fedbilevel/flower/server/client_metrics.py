"""Per-client metrics over Flower: requests between rounds to the clients that share their metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import jax
import numpy as np

from fedbilevel.core.errors import AbsenceWarning, require
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.evaluation import PerClient, spread
from fedbilevel.engines.history import Row
from fedbilevel.flower.server.connections import ClientReply
from fedbilevel.flower.server.session import Session
from fedbilevel.flower.wire.messages import METRICS, Refusal, RequestMessage, reading, to_bytes


class ClientMetrics:
    """The columns of per-client metrics, over the clients that are online and share them; NAME.clients is their number.

    The questions are no exchange of the algorithm's: nothing of them is in the ledger, and no answer reaches a round.
    """

    def __init__(self, session: Session, metrics: Mapping[str, PerClient]) -> None:
        whole = session.submodel_plan is None
        require(whole, "metrics_per_client", list(metrics), "left out over Flower where clients hold submodels")
        waits = not session.algorithm.asynchronous
        name = session.algorithm.label
        require(waits, "metrics_per_client", list(metrics), f"left out over Flower with {name}, which is asynchronous")
        alike = session.problem.local is None
        require(alike, "metrics_per_client", list(metrics), "left out over Flower where clients keep their own x")
        self.session, self.metrics, self.names, self.warned = session, metrics, sorted(metrics), False

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Ask all clients that are online, wait for responses until the deadline, and summarise them in a row."""
        shared, silent = self.collect(round, to_bytes(jax.tree.map(np.asarray, (x, y))))
        population = len(self.session.clients)
        if len(shared) < population and not self.warned:
            reasons = "; ".join(sorted(set(silent.values()))[:3]) or "they are not online"
            text = f"per-client metrics are those of {len(shared)} of {population} clients ({reasons})"
            warnings.warn(AbsenceWarning(text), stacklevel=4)
            self.warned = True
        row: Row = {}
        for name in self.names:
            row[f"{name}.clients"] = len(shared)
            if shared:
                values = np.array([numbers[name] for numbers in shared.values()])
                row |= spread(name, values, self.session.weights[list(shared)], self.metrics[name].larger_is_better)
        return row

    def collect(self, round: int, payload: bytes) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """Client -> its metrics by name; and client -> why it has sent none that can be used."""
        dispatcher, registry = self.session.dispatcher, self.session.registry
        registry.refresh()
        requests = {
            client: RequestMessage(
                run=self.session.name,
                contract=registry.contract_of(client).digest,
                round=round,
                phase=METRICS,
                weight=float(self.session.weights[client]),
                payload=payload,
            )
            for client in sorted(registry.nodes)
        }
        began = self.session.clock.time()
        silent, shared = dispatcher.send(requests), {}
        while any(request.phase == METRICS for _, request in dispatcher.requests()):
            dispatcher.look(began)
        for reply in [reply for reply in dispatcher.ready if reply.request.phase == METRICS]:
            dispatcher.ready.remove(reply)
            try:
                with reading():
                    shared[reply.client] = self.checked(reply)
            except Refusal as refusal:
                silent[reply.client] = str(refusal)
        return dict(sorted(shared.items())), silent

    def checked(self, reply: ClientReply) -> dict[str, float]:
        """The metrics in a reply.

        Raises:
            Refusal: the reply is not valid.
        """
        client, request, outcome = reply
        if isinstance(outcome, Refusal):
            raise outcome
        if (outcome.run, outcome.round, outcome.client) != (request.run, request.round, client):
            raise Refusal("it answers another question")
        numbers = outcome.numbers()
        if sorted(numbers) != self.names:
            raise Refusal(f"it measures {', '.join(sorted(numbers)) or 'nothing'}, not {', '.join(self.names)}")
        if not all(map(math.isfinite, numbers.values())):
            raise Refusal("its metrics are not finite")
        return numbers
