"""Prepare a problem for a run: its losses as functions of the variables, the clients, the start, and the metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr

from fedbilevel.algorithms.parts.linear_solvers import warn_without_minimum
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.inputs import require_start
from fedbilevel.core.local_x import check_split, local_block
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.projections import acts_on_entries
from fedbilevel.core.tree import PyTree, join, split
from fedbilevel.engines.divergence import Met, curvature_needed, what_was_met
from fedbilevel.engines.ends import Ends, Spent, affordable, affordable_gradients, descent, losses_at
from fedbilevel.engines.evaluation import Evaluation, PerClient, check_per_client
from fedbilevel.engines.first_look import first_look, warn_of_no_means
from fedbilevel.engines.options import RunOptions
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.uneven import untrained

_seen: ContextVar[Clients | None] = ContextVar("clients whose losses need no further check", default=None)


@contextmanager
def losses_seen(clients: Clients | RemoteClients) -> Iterator[None]:
    """Leave out the check of the losses in runs with these clients, after a first run with them has made it."""
    token = _seen.set(clients if isinstance(clients, Clients) else None)
    try:
        yield
    finally:
        _seen.reset(token)


@dataclass(frozen=True, eq=False)
class PosedProblem:
    """Hold a problem, its clients and a start, with traced losses, ready for a run."""

    problem: Problem  # a problem whose losses take only the floating arrays of x and y, with the key of its programs
    clients: Clients | RemoteClients
    x: PyTree  # the floating arrays of x0
    y: PyTree  # the floating arrays of y0
    fixed: tuple[PyTree, PyTree]  # the other leaves of x and y
    programs: Mapping[str, ClosedJaxpr]  # the traced programs of the problem's functions, by name
    evaluation: Evaluation
    per_client: Mapping[str, PerClient]  # metrics that are measured on each client
    per_client_programs: Mapping[str, ClosedJaxpr]

    @classmethod
    def of(
        cls, problem: Problem, clients: Clients | RemoteClients, x0: PyTree, y0: PyTree, options: RunOptions
    ) -> PosedProblem:
        """Split the start into variables and fixed leaves, and trace the losses and the metrics per client.

        Raises:
            ConfigurationError: the start is not finite, it has no variables, or a function fails on it.
        """
        (x, x_fixed), (y, y_fixed) = split(x0), split(y0)
        require_start("x0", x0, x)
        if not isinstance(problem, SingleLevel | SimpleBilevel):
            require_start("y0", y0, y)
        problem = problem.with_fixed(x_fixed, y_fixed).prepared()
        examples = clients.examples()
        programs = problem.traced(x, y, examples)
        problem = problem.keyed(x, y, examples, programs)
        if problem.project_x is not None:
            problem = problem.with_couples_x(not acts_on_entries(problem.project_x, x))
        if isinstance(problem, SimpleBilevel):  # the y of its results is an average of x
            y0, y_fixed = x0, x_fixed
        x_seen = x0
        if options.per_client and problem.local is not None and isinstance(clients, Clients):
            check_split(clients, x)
            x_seen = join(local_block(x), x_fixed)  # a metric gets the block of its client
        measured = check_per_client(options.per_client, x_seen, y0, examples)
        evaluation = Evaluation(options.metrics or {}, x_fixed, y_fixed)
        fixed = x_fixed, y_fixed
        return cls(problem, clients, x, y, fixed, programs, evaluation, options.per_client, measured)

    @property
    def simulated(self) -> bool:
        """Return whether the clients' samples are on this machine."""
        return isinstance(self.clients, Clients)

    def look(self, method: Algorithm) -> None:
        """Warn of losses and metrics that would mislead, if the samples are here (`first_look`, `warn_of_no_means`)."""
        if isinstance(clients := self.clients, Clients) and clients is not _seen.get():

            def warn_here() -> None:
                first_look(self.problem, clients, self.x, self.y, self.programs)
                x = self.x if self.problem.local is None else local_block(self.x)
                y = self.x if isinstance(self.problem, SimpleBilevel) else self.y
                warn_of_no_means(self.per_client, clients, x, y, self.fixed)
                if curvature_needed(method) == 0:
                    warn_without_minimum(self.problem, clients, self.x, self.y)

            current_group().decide(warn_here)

    def met(self, method: Algorithm, x: PyTree, y: PyTree) -> Met:
        """Find out why a run of a method diverged, from its last finite x and y (see `what_was_met`)."""
        if not isinstance(self.clients, Clients) or current_group().processes > 1:
            return Met()
        start, last = (self.x, self.y), (split(x)[0], split(y)[0])
        return what_was_met(self.problem, self.clients, start, last, curvature_needed(method))

    def ends(self, before: tuple[PyTree, PyTree] | None, end: tuple[PyTree, PyTree], spent: Spent) -> Ends | None:
        """Compute the outer loss of all clients at the end of a run and at an earlier point.

        If the loss at the end is larger, y is also trained at the earlier x, with at most a sixth of the run's
        gradients.

        Args:
            before: the earlier point (x, y); None: the start of the run.
            end: (x, y) at the end of the run.
            spent: the cost of the run.

        Returns:
            The losses, or None in these cases: samples are on other machines or in other processes; the computation
            would take more than about a third of the time of the run's gradients, or more memory than there is; or
            the loss at the earlier point is not finite, for example because of a sample that no round has read.
        """
        clients, problem = self.clients, self.problem
        if not isinstance(clients, Clients) or current_group().processes > 1:
            return None
        if problem.own is not None or not affordable(clients, spent):
            return None
        x, y = (self.x, self.y) if before is None else (split(before[0])[0], split(before[1])[0])
        try:
            first, last = losses_at(problem, clients, "outer", [(x, y), (split(end[0])[0], split(end[1])[0])])
            found = Ends(first, last, first)
            evaluations = affordable_gradients(clients, spent)
            if found.above and math.isfinite(first) and self.trains and evaluations > 0:
                there = descent(problem, clients, x, y, evaluations)
                trained = losses_at(problem, clients, "outer", [(x, there.y)])[0] if there.settled else first
                found = found._replace(trained=trained)
        except (jax.errors.JaxRuntimeError, MemoryError):  # the run has ended well, and its result must not be lost
            return None
        return found if math.isfinite(found.start) else None

    def uneven(self, end: tuple[PyTree, PyTree], spent: Spent) -> str:
        """Warn if y is far from trained and the columns of the samples differ in scale; return the warning, or "".

        See uneven.py. It takes at most a sixth of the run's gradients, and only in simulations in one process. It is
        left out in the trials of a search after the first one, which show no warning.

        Args:
            end: (x, y) at the end of the run.
            spent: the cost of the run.
        """
        clients, problem = self.clients, self.problem
        if not isinstance(clients, Clients) or current_group().processes > 1:
            return ""
        if clients is _seen.get() or clients.capacity is not None or problem.own is not None:
            return ""
        if not self.trains or not problem.inner_is_mean:
            return ""
        try:
            x, y = split(end[0])[0], split(end[1])[0]
            return untrained(problem, clients, x, self.y, y, affordable_gradients(clients, spent))
        except (jax.errors.JaxRuntimeError, MemoryError):  # the run has ended well, and its result must not be lost
            return ""

    @property
    def trains(self) -> bool:
        """Return whether y is trained by a separate inner loss, at an x that all clients have in common."""
        return self.problem.implicit_term != "none" and self.problem.local is None
