"""Run a method on an engine: start the engine, run rounds within the privacy budget, and restart with smaller steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.parts.private import replies_at_most
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NonFiniteError, NumericalError, NumericalWarning, warn
from fedbilevel.core.hyperparameters import halved
from fedbilevel.core.local_x import gather_x
from fedbilevel.core.own_y import gathered
from fedbilevel.core.privacy import SPENT, Privacy
from fedbilevel.core.tree import PyTree, is_table
from fedbilevel.engines import submodels
from fedbilevel.engines.costs import ExchangeKind, empty_costs
from fedbilevel.engines.engine import Carry, Cohort, Engine, Run, Stretch, check_own_parts, first_carry
from fedbilevel.engines.evaluation import PerClientRow
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.local.samples import local
from fedbilevel.engines.posed import PosedProblem
from fedbilevel.engines.recorder import known_flops


@dataclass
class Execution:
    """Hold a method, the problem that it solves, and the engine that runs the method.

    No field may refer back to this object: because of such a reference cycle, samples would stay in memory until the
    garbage collector runs.
    """

    method: Algorithm  # the method within the layers that the run asks for, with its steps after halvings
    posed: PosedProblem
    engine: Engine
    cohort: Cohort
    key: Array
    privacy: Privacy | None  # the privacy terms of simulated clients
    devices: int | None = None  # the number of devices over which the engine distributes a cohort
    run: Run = field(init=False)
    per_client: PerClientRow | None = field(init=False)
    warned: bool = False

    def first_carry(self, x: PyTree, y: PyTree) -> Carry:
        """Make the carry before round 0 of a run that starts at x and y; y is ignored without an inner variable."""
        y = y if jax.tree.leaves(self.posed.y) else self.posed.y
        problem, clients, engine = self.posed.problem, self.posed.clients, self.engine
        on_disk = isinstance(engine, Local) and isinstance(clients, Clients) and engine.keeps_states_on_disk(clients)
        return first_carry(self.method, problem, clients, x, y, on_disk)

    def reply_flops(self) -> dict[ExchangeKind, int] | None:
        """Trace a round, and return the operations that a client's reply costs, by kind of exchange; None: unknown."""
        given = self.method, self.posed.problem, self.posed.clients, self.posed.x, self.posed.y
        return known_flops(*given, submodels.classes(*given))

    def settle(self, carry: Carry) -> None:
        """Decide how many devices to use for the whole run; a resumed run uses as many as before."""
        if isinstance(self.engine, Local):
            self.engine = self.engine.settled(carry.state, self.cohort, before=self.devices)
            self.devices = self.engine.devices

    def start(self, carry: Carry) -> None:
        """Start the engine from a carry."""
        posed = self.posed
        self.run = self.engine.start(self.method, posed.problem, posed.clients, self.cohort, self.key, carry)
        self.per_client = self.run.per_client(posed.per_client, posed.fixed) if posed.per_client else None

    def restart(self, carry: Carry) -> None:
        """Halve every step size, and start the engine again from another carry."""
        self.halve()
        self.run.close()
        self.start(carry)

    def halve(self, times: int = 1) -> None:
        """Halve every step size `times` times."""
        for _ in range(times):
            self.method = halved(self.method)

    def advance(self, carry: Carry, rounds: int) -> tuple[Stretch, float, str]:
        """Run some rounds.

        Returns:
            The stretch; the seconds that it took, without compilation; and the reason why the privacy budget allows no
            further round, "" if it allows one.
        """
        began, compiling = time.perf_counter(), self.run.compile_seconds
        stretch, spent = self.within_budget(carry, rounds)
        try:
            self.check_state(local(stretch.carry.state), int(stretch.carry.round) - stretch.rounds)
        except NumericalError as error:
            error.costs = stretch.costs
            raise
        return stretch, time.perf_counter() - began - (self.run.compile_seconds - compiling), spent

    def within_budget(self, carry: Carry, rounds: int) -> tuple[Stretch, str]:
        """Run `rounds` rounds, or as many as the privacy budget allows: none if the next round would exceed it."""
        if (terms := self.privacy) is None:
            return self.run.advance(carry, rounds), ""
        while True:
            before = carry if terms.budget is None else jax.tree.map(_kept, carry)
            replies = replies_at_most(local(carry.state), local(carry.clients))
            try:
                stretch = self.run.advance(carry, rounds)
            except NonFiniteError as error:
                if terms.budget is None or rounds == 1:
                    if error.costs is not None:
                        replies += sum(int(np.sum(calls.exchanges)) for calls in error.costs.calls.values())
                        error.costs = error.costs._replace(privacy=(terms.epsilon_after(replies), terms.delta))
                    raise
                carry, rounds = before, rounds // 2  # the budget may end the run before the failing round
                continue
            cost = self.epsilon(terms, stretch.carry)
            if terms.budget is None or cost <= terms.budget:
                return stretch._replace(costs=stretch.costs._replace(privacy=(cost, terms.delta))), ""
            if stretch.undo is not None:
                stretch.undo()
            carry, rounds = before, stretch.rounds // 2
            if rounds == 0:
                now = f"ε = {self.epsilon(terms, carry):.6g} at δ = {terms.delta:g}"
                why = f"{now}, and {cost:.6g} after one more, over {terms.budget:g}"
                return Stretch(carry, 0, empty_costs()), f"{SPENT} after round {int(carry.round)}: {why}"

    @staticmethod
    def epsilon(terms: Privacy, carry: Carry) -> float:
        """Compute the ε of the client with the most replies so far."""
        return terms.epsilon_after(replies_at_most(local(carry.state), local(carry.clients)))

    def check_state(self, state: Any, round: int) -> None:
        """Raise the error, or issue the warning, that the method finds in a state.

        `round` is the first of the rounds that led to the state.
        """
        found = self.method.findings(state)
        if found.error:
            raise NumericalError(f"round {round} or soon after: {found.error}", round=round)
        if not self.warned and found.warning:
            warn(NumericalWarning(f"round {round} or soon after: {found.warning}"))
            self.warned = True

    def point(self, carry: Carry) -> tuple[PyTree, PyTree, Any]:
        """Return (x, y, server's state) of a carry.

        The arrays of the server's state are never changed later. Parts that clients keep are copied, except tables on
        disk, which the next rounds change.

        Raises:
            NonFiniteError: the parts of x or y that clients keep are not all finite.
        """
        state = jax.device_put(local(carry.state))  # JAX arrays stay where they are; NumPy arrays move to the device
        x, y = carry._replace(state=state).x, state.y
        if not self.posed.simulated or (carry.local_x is None and self.posed.problem.own is None):
            return x, y, state
        carry = carry._replace(clients=local(carry.clients))
        check_own_parts(carry)
        return x if carry.local_x is None else gather_x(carry.clients), gathered(y, carry.clients), state

    def ending(self, state: Any) -> str:
        """Return the reason for the end of the run if the method has finished, else ""."""
        return f"{self.method.label} has finished" if self.method.finished(state) else ""

    def close(self) -> None:
        """Release the engine's threads and buffers."""
        self.run.close()


def _kept(leaf: Any) -> Any:
    """Copy an array, since a round may consume it. Return a table as it is, since `Stretch.undo` restores its rows."""
    return leaf if is_table(leaf) else jnp.copy(leaf)
