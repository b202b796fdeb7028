"""Per-client metrics over Flower: what the server asks between rounds, of those who tell."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from fedbilevel.core.errors import AbsenceWarning, require
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.evaluation import PerClient, spread
from fedbilevel.engines.history import Row
from fedbilevel.flower.courier import Letter
from fedbilevel.flower.records import reading
from fedbilevel.flower.wire import METRICS, Ask, Refusal, to_bytes

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun


class Measuring:
    """The columns of per-client metrics, over the clients that are here and tell: NAME.clients says how many did.

    The questions are no exchange of the algorithm's: nothing of them is in the ledger, and no answer reaches a round.
    """

    def __init__(self, run: FlowerRun, metrics: Mapping[str, PerClient]) -> None:
        whole = run.submodel_plan is None
        require(whole, "metrics_per_client", list(metrics), "left out over Flower where clients hold submodels")
        waits = not run.algorithm.asynchronous
        name = run.algorithm.label
        require(waits, "metrics_per_client", list(metrics), f"left out over Flower with {name}, which is asynchronous")
        alike = run.problem.local is None
        require(alike, "metrics_per_client", list(metrics), "left out over Flower where clients keep their own x")
        self.run, self.metrics, self.names, self.warned = run, metrics, sorted(metrics), False

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Ask everyone who is here, wait for answers until the deadline, and sum them up."""
        told, silent = self.ask(round, to_bytes(jax.tree.map(np.asarray, (x, y))))
        population = len(self.run.clients)
        if len(told) < population and not self.warned:
            reasons = "; ".join(sorted(set(silent.values()))[:3]) or "they are not online"
            text = f"per-client metrics are those of {len(told)} of {population} clients ({reasons})"
            warnings.warn(AbsenceWarning(text), stacklevel=4)
            self.warned = True
        row: Row = {}
        for name in self.names:
            row[f"{name}.clients"] = len(told)
            if told:
                values = np.array([numbers[name] for numbers in told.values()])
                row |= spread(name, values, self.run.weights[list(told)], self.metrics[name].larger_is_better)
        return row

    def ask(self, round: int, payload: bytes) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """Each client's metrics by name; of those without, why."""
        courier, roster = self.run.courier, self.run.roster
        roster.refresh()
        asks = {
            client: Ask(
                run=self.run.name,
                contract=roster.contract_of(client).digest,
                round=round,
                phase=METRICS,
                weight=float(self.run.weights[client]),
                payload=payload,
            )
            for client in sorted(roster.nodes)
        }
        began = self.run.clock.time()
        silent, told = courier.send(asks), {}
        while any(ask.phase == METRICS for _, ask in courier.asks()):
            courier.look(began)
        for letter in [letter for letter in courier.ready if letter.ask.phase == METRICS]:
            courier.ready.remove(letter)
            try:
                with reading():
                    told[letter.client] = self.accepted(letter)
            except Refusal as refusal:
                silent[letter.client] = str(refusal)
        return dict(sorted(told.items())), silent

    def accepted(self, letter: Letter) -> dict[str, float]:
        """The numbers in an answer, if it is right in every respect."""
        client, ask, outcome = letter
        if isinstance(outcome, Refusal):
            raise outcome
        if (outcome.run, outcome.round, outcome.client) != (ask.run, ask.round, client):
            raise Refusal("it answers another question")
        numbers = outcome.numbers()
        if sorted(numbers) != self.names:
            raise Refusal(f"it measures {', '.join(sorted(numbers)) or 'nothing'}, not {', '.join(self.names)}")
        if not all(map(math.isfinite, numbers.values())):
            raise Refusal("its metrics are not finite")
        return numbers
