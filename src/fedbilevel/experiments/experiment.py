"""Run the objects that a spec describes: by `solve`, or by another class that an algorithm has registered."""

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
from fedbilevel.experiments.plans import RunPlan
from fedbilevel.experiments.spec import Spec
from fedbilevel.tasks import Task

ROWS = 50  # the number of rows of a history, if the spec does not set `eval_every`
PROBE = 4  # the number of rounds that are run to measure the costs of a round


class Experiment(NamedTuple):
    """The objects that a spec describes, which are the arguments of `solve`."""

    task: Task
    algorithm: Algorithm
    engine: Engine
    privacy: Privacy | None = None

    def check(self, spec: Spec) -> None:
        """Raise a ConfigurationError if the spec cannot be run. Nothing is computed for this."""

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
        """Run `solve` on the task's problem, with the cohort and the seed of a plan.

        Args:
            eval_every: the number of rounds between two rows of the history. None: if the plan has a budget, a number
                with which the history has about ROWS rows.
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
    """Return the class of an algorithm's experiments.

    An algorithm that is not run by `solve` registers another class than `Experiment`.
    """
    return Experiment


def cohort_of(plan: RunPlan) -> int | Cohort | None:
    """Return the cohort of a plan in the form that `solve` takes; None: all clients."""
    return Cohort(plan.cohort, plan.replacement) if plan.cohort is not None and plan.replacement else plan.cohort


def rounds_between_rows(experiment: Experiment, plan: RunPlan) -> int:
    """Return how many rounds to make between two rows of the history, so that the plan's budget gives about ROWS rows.

    The first PROBE rounds of the run are run to measure the cost of a round.
    """
    name, amount = plan.budget
    report_stage(MEASURING)
    with warnings.catch_warnings(action="ignore"):  # the run itself issues the same warnings again
        first = experiment.solve(plan, rounds=PROBE, eval_every=1, progress=False)
    probed = cost(first.history.rows[-1], name)
    return max(1, int(min(ENDLESS, amount * PROBE / (ROWS * probed)))) if probed > 0 else 1
