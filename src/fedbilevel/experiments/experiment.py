"""Hold the objects that a spec describes, and run them by `solve`, or as registered for an algorithm's class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, NamedTuple

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.privacy import Privacy
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.engine import Cohort, Engine
from fedbilevel.engines.foreseen import cost_of_round
from fedbilevel.engines.history import ENDLESS, Callback, Result, cost
from fedbilevel.engines.progress import MEASURING, report_stage
from fedbilevel.engines.solve import solve
from fedbilevel.experiments.spec import RunPlan, Spec
from fedbilevel.tasks import Task

ROWS = 50  # in a history, if the spec does not set how often to evaluate
PROBE = 4  # rounds that are run to count the costs of a round


class Experiment(NamedTuple):
    """Hold the objects that a spec describes, which are the arguments of `solve`."""

    task: Task
    algorithm: Algorithm
    engine: Engine
    privacy: Privacy | None = None

    def check(self, spec: Spec) -> None:
        """Raise a ConfigurationError if the spec cannot be run, before anything is computed."""

    def cost_of_round(self) -> Ledger:
        """Return the costs of a round with all clients, without computing the round: see `engines.foreseen`."""
        task = self.task
        if not isinstance(task.clients, Clients):
            raise ConfigurationError("the cost of a round is counted on the clients' samples, which are not here")
        return cost_of_round(self.algorithm, task.problem, task.clients, task.x0, task.y0)

    def solve(
        self,
        plan: RunPlan,
        *,
        rounds: int,
        eval_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        **given: Any,
    ) -> Result:
        """Solve the task's problem with the plan's cohort and seed.

        Args:
            eval_every: the number of rounds between rows. None with a plan that has a budget takes a number with which
                the history has about ROWS rows.
            rounds, callbacks, given: see `fedbilevel.solve`.
        """
        if eval_every is None and plan.rounds is None:
            eval_every = rounds_between_rows(self, plan)
        return solve(
            self.algorithm,
            self.task.problem,
            self.task.clients,
            self.task.x0,
            self.task.y0,
            rounds=rounds,
            cohort=cohort_of(plan),
            key=plan.seed,
            engine=self.engine,
            eval_every=eval_every,
            callbacks=callbacks,
            best_by=plan.best_by,
            on_divergence=plan.on_divergence,
            privacy=self.privacy,
            **given,
        )


@singledispatch
def experiment_with(algorithm: Algorithm) -> type[Experiment]:
    """Return the class of an algorithm's experiments; algorithms that `solve` does not run register another class."""
    return Experiment


def cohort_of(plan: RunPlan) -> int | Cohort | None:
    """Return the cohort of a plan, as `solve` takes it; None: all clients."""
    return Cohort(plan.cohort, plan.replacement) if plan.cohort is not None and plan.replacement else plan.cohort


def rounds_between_rows(experiment: Experiment, plan: RunPlan) -> int:
    """Return the number of rounds between two rows with which about ROWS rows fit the plan's budget.

    The first PROBE rounds of the run are run to measure the cost of a round.
    """
    name, amount = plan.budget
    report_stage(MEASURING)
    with warnings.catch_warnings(action="ignore"):  # the run itself issues the same warnings again
        first = experiment.solve(plan, rounds=PROBE, eval_every=1, progress=False)
    probed = cost(first.history.rows[-1], name)
    return max(1, int(min(ENDLESS, amount * PROBE / (ROWS * probed)))) if probed > 0 else 1
