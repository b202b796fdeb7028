"""Search for the best x by trials, in place of a bilevel method.

Optuna draws the x of each trial; the first trial takes x0. At this x, y is trained on the inner loss by the local steps
of FedAvg. Training starts at the best y of all earlier trials, which may have been trained at another x. Then every
client measures the outer loss on all its outer samples, and the server takes the mean by the clients' weights. Trials
are judged only by this value: the result is the point (x, y) with the smallest value. The task's metrics, which may use
test data, are computed at that point and have no influence.

Every exchange is counted as a cost. Most exchanges train y. If step sizes adapt, the first exchange of a trial only
measures curvature. Each measurement of the outer loss needs one more exchange, which sends x and y down and a number
up. The budget is a number of exchanges, bytes or evaluations (batch gradients and hvps), which all trials share. The
run ends when a further trial would exceed the budget, and the last trial is shortened to what is left. The bytes or
evaluations of one training exchange are estimated by the mean over the trials so far. Before the first trial, a few
rounds are run to measure these costs; the rounds themselves are not counted.

Under privacy, clients add noise to all replies of every trial, and also clip the outer loss and add noise to it. All
these replies are counted in ε, so that k trials spend as much ε as a single run with as many exchanges. The search ends
before a trial that would exceed the privacy budget.

A trial diverges if its numbers, or its outer loss, are not finite, or if an assumption of the method fails. Such a
trial is charged what it has spent, and the search continues. For Optuna, the state of the trial is "pruned": TPE then
ranks the trial below all trials that have a value, and avoids its x. (If its state were FAIL, TPE would ignore the
trial, and might draw the same x again.) The column `diverged` of the history counts these trials. If all trials of a
search have diverged, the search ends with an error.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.fedex import TrainingAtX
from fedbilevel.algorithms.parts.slots import server_parts
from fedbilevel.core.algorithm import Algorithm, phase
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive_integer
from fedbilevel.core.errors import (
    ConfigurationError,
    NonFiniteError,
    NumericalError,
    NumericalWarning,
    is_number,
    require,
)
from fedbilevel.core.facts import Allows, No
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.metrics import directions
from fedbilevel.core.privacy import SPENT, Privacy
from fedbilevel.core.problem import Bilevel, Project
from fedbilevel.core.tree import XY, PyTree, move, nbytes
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import DIVERGED, Budget, Callback, History, Result, Row, cost, require_new
from fedbilevel.engines.posed import losses_seen
from fedbilevel.engines.solve import solve
from fedbilevel.engines.tracking import TrackedRun, Tracking
from fedbilevel.experiments.experiment import PROBE, Experiment, cohort_of, experiment_with
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.plans import RunPlan
from fedbilevel.experiments.spec import Spec
from fedbilevel.tasks import Task
from fedbilevel.wording import missing

if TYPE_CHECKING:
    import optuna

ENTRIES = 1_000  # the largest number of entries of x, because Optuna's samplers draw each entry separately
SHARED = ("exchanges", "bytes", "evaluations")  # the kinds of budget that trials can share
MOST_REPLIES = 2**20  # the largest number of replies for which ε is computed
NOISE = 2**31  # added to the number of a measurement, so that its random key differs from those of all trials
VALIDATION = "validation"  # the name of the outer loss as a metric per client
FREE = 20  # the largest number of trials in a row that use none of the budget, since they diverge at the start


class OuterSearch(TrainingAtX):
    """The base class of the searches. Its rounds train y at a fixed x."""

    @property
    def allows(self) -> Allows:
        why = No("its trials are separate runs, and each is judged by whole models that every client measures")
        return Allows(late=why, submodels=why, local_x=why)

    @property
    @abstractmethod
    def rungs(self) -> tuple[int, ...]:
        """Return the numbers of training exchanges after which a trial is judged.

        The last number is the length of a whole trial.
        """

    @abstractmethod
    def study(self, seed: int) -> optuna.Study:
        """Make the Optuna study that draws x and may end trials early."""

    def init(self, x: PyTree, y: PyTree) -> XY:
        return XY(x, y)

    def round(self, fed: Fed, state: XY, key: Array) -> XY:
        return state._replace(y=move(state.y, self.server_lr, fed.mean(self.train, state, key, unbiased=True)))

    @phase(takes=XY("x", "y"), gives="y", measures=True)
    def train(self, client: Client, at: XY, key: Array) -> Reply:
        """Reply with the change of y by local steps at x."""
        return self.trained(client, at.x, at.y, key)

    def affordable(self, left: float, training: float = 1, measuring: float = 1) -> int:
        """Return how many exchanges can train y in a trial that may cost `left` in total.

        Args:
            left: the part of the budget that is not yet spent.
            training: the cost of an exchange that trains y.
            measuring: the cost of a measurement of the outer loss.
        """
        measurements = {n: 1 + sum(rung < n for rung in self.rungs) for n in range(1, self.rungs[-1] + 1)}
        return max((n for n, of in measurements.items() if n * training + of * measuring <= left), default=0)


class WholeTrials(OuterSearch):
    """The base class of the searches that judge a trial only at its end.

    Args:
        trial_exchanges: the number of exchanges that train y in a whole trial.
    """

    trial_exchanges: int = positive_integer(default=20)

    @property
    def rungs(self) -> tuple[int, ...]:
        return (self.trial_exchanges,)


class Random(WholeTrials):
    """Random search: x is drawn uniformly."""

    def study(self, seed: int) -> optuna.Study:
        import optuna

        return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))


class TPE(WholeTrials):
    """Bayesian search by Optuna's tree-structured Parzen estimator.

    Args:
        startup_trials: the number of trials before the estimator is used. The first has x0; the others have x drawn
            uniformly.
    """

    startup_trials: int = positive_integer(default=5)

    def study(self, seed: int) -> optuna.Study:
        import optuna

        sampler = optuna.samplers.TPESampler(n_startup_trials=self.startup_trials, seed=seed)
        return optuna.create_study(sampler=sampler)


class Halving(OuterSearch):
    """Random search with Optuna's successive halving: bad trials end after a ninth or a third of their length.

    Args:
        trial_exchanges: the number of exchanges that train y in a whole trial, a multiple of 9.
    """

    trial_exchanges: int = positive_integer(default=45)

    def validate(self) -> None:
        require(self.trial_exchanges % 9 == 0, "Halving.trial_exchanges", self.trial_exchanges, "a multiple of 9")

    @property
    def rungs(self) -> tuple[int, ...]:
        first = self.trial_exchanges // 9
        return first, 3 * first, 9 * first

    def study(self, seed: int) -> optuna.Study:
        import optuna

        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=self.rungs[0], reduction_factor=3)
        return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), pruner=pruner)


class Validated(NamedTuple):
    """A point and the outer loss that clients measured there."""

    x: PyTree
    y: PyTree
    loss: Any


class Validation(Algorithm):
    """A method that measures the outer loss at (x, y) in one exchange.

    Every client replies with its loss on all its outer samples.
    """

    def init(self, x: PyTree, y: PyTree) -> Validated:
        return Validated(x, y, jnp.zeros(()))

    def round(self, fed: Fed, state: Validated, key: Array) -> Validated:
        return state._replace(loss=fed.mean(self.loss_at, XY(state.x, state.y), key))

    @phase(takes=XY("x", "y"), gives="number")
    def loss_at(self, client: Client, at: XY, key: Array) -> Reply:
        """Reply with the client's outer loss."""
        return Reply(client.problem.outer(at.x, at.y, client.outer_batch(key, None)))


def box_of(project: Project | None, x0: PyTree) -> tuple[float, float] | None:
    """Return the bounds (low, high) of all entries of x; None if the set of x is not a box with equal sides.

    The set is examined by projecting distant points onto it.
    """
    if project is None:
        return None
    start, unravel = ravel_pytree(x0)

    def projected(point: Any) -> np.ndarray:
        return np.asarray(ravel_pytree(project(unravel(jnp.asarray(point, start.dtype))))[0])

    far = 1e30
    low, high = (np.unique(projected(np.full(start.size, end))) for end in (-far, far))
    if not low.size == high.size == 1 or low[0] == -far or high[0] == far:
        return None
    spread = 2 * (high - low) * np.random.default_rng(0).standard_normal(start.size) + (low + high) / 2
    clipped = np.clip(spread.astype(start.dtype), low, high)
    return (float(low[0]), float(high[0])) if np.array_equal(projected(spread), clipped) else None


def require_optuna(what: str) -> None:
    """Check that Optuna is installed, and silence its log, which repeats this library's messages.

    Raises:
        ConfigurationError: Optuna is not installed; the message names the command that installs it.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ConfigurationError(f"{what} needs {missing('optuna', 'sweep')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def refuse_search(spec: Spec, task: Task) -> None:
    """Reject a spec that a search cannot run. This is checked before anything runs.

    Raises:
        ConfigurationError: Optuna is not installed; the problem is not `Bilevel`; the budget is not one of SHARED; x
            has no bounds, too many entries, or starts outside its bounds; the spec has a robust rule, capacities or
            metrics per client; or the spec has privacy together with cohorts or steps that adapt.
    """
    method: OuterSearch = spec.algorithm.value
    name = label(spec.algorithm.name)
    require_optuna(name)
    rule = spec.layers.rule
    allowed = f"none for {name}, whose trials are judged by the mean of all clients' losses"
    require(rule is None, "layers.rule", rule and rule.label, allowed)
    kind, bilevel = type(task.problem).__name__, isinstance(task.problem, Bilevel) and task.problem.local is None
    require(bilevel, "problem", kind, f"a Bilevel problem with x on the server for {name}, which searches over x")
    allowed = f"given for {name}, or run.bytes or run.evaluations: its trials share this budget"
    require(spec.run.budget[0] in SHARED, "run.exchanges", None, allowed)
    start, low, high = np.asarray(ravel_pytree(task.x0)[0]), method.low, method.high
    require(start.size <= ENTRIES, "x0", f"{start.size:,} entries", f"at most {ENTRIES:,} entries for {name}")
    if low is None or high is None:
        raise ConfigurationError(f"{name} draws x between bounds: give algorithm.low and algorithm.high")
    inside, ends = bool(np.all((start >= low) & (start <= high))), f"{start.min():.4g} to {start.max():.4g}"
    require(inside, "x0", ends, f"between the bounds {low:g} and {high:g} for {name}: x0 is the first trial")
    method.check(task.problem, task.clients, task.x0, task.y0)
    if spec.privacy.terms is not None:
        allowed = f"a number for {name} under privacy, since noise hides the curvature to which steps adapt"
        require(method.lr is not None, f"{type(method).__name__}.lr", None, allowed)
        allowed = f"none for {name} under privacy: all clients then spend the same ε"
        require(spec.run.cohort is None, "run.cohort", spec.run.cohort, allowed)
    whole = task.clients.capacity is None
    require(whole, "clients.capacity", "given", f"left out for {name}, whose clients train whole models")
    each = spec.run.metrics_per_client
    require(not each, "run.metrics_per_client", each, f"false for {name}, which measures no metrics of single clients")


@dataclass
class SearchRun:
    """A search in progress.

    Args:
        method: the search.
        task: the problem, clients, start and metrics.
        budget: the cost that all trials share, one of SHARED, and its amount.
        seed: the seed of the draws of x, of samples and of cohorts.
        callbacks: called after each measurement of the outer loss, with the result so far and the row.
        rounds: the number of rounds that the result reports as requested.
        given: further arguments of `solve`, the same for each trial.
        privacy: the privacy of each client's replies in all trials together; None: replies are exact.
    """

    method: OuterSearch
    task: Task
    budget: Budget
    seed: int
    callbacks: Sequence[Callback]
    rounds: int
    given: Mapping[str, Any]
    privacy: Privacy | None = None

    def play(self) -> Result:
        """Run trials until the budget is spent, and return the best point with the history of all trials."""
        task, names = self.task, [f"x{i}" for i in range(ravel_pytree(self.task.x0)[0].size)]
        start, unravel = ravel_pytree(task.x0)
        low, high = self.method.low, self.method.high
        assert low is not None
        assert high is not None
        self.history, self.ledger = History(directions=directions(task.metrics)), Ledger(delta=self.account(0)[1])
        self.seconds = self.compiling = 0.0
        self.x, self.y, self.least, self.stopped = task.x0, task.y0, math.inf, ""
        self.diverged, self.why = 0, ""  # the number of trials that diverged, and the error of the last of them
        self.free = 0  # the number of trials since the last one that has used some of the budget
        self.values = self.measure()
        self.record({})
        study = self.method.study(self.seed)
        study.enqueue_trial(dict(zip(names, start.tolist(), strict=True)))
        while not self.stopped and (rounds := self.affordable()):
            trial, spent = study.ask(), self.cost(self.ledger)
            drawn = jnp.asarray([trial.suggest_float(name, low, high) for name in names], start.dtype)
            with losses_seen(task.clients) if trial.number else nullcontext():
                self.train(study, trial, unravel(drawn), rounds)
            self.free = self.free + 1 if self.cost(self.ledger) == spent else 0
            if self.free == FREE:
                self.stopped = f"{FREE} trials in a row diverged before they had used any of the budget"
        if self.diverged and self.least == math.inf:
            raise self.nothing_found()
        if not self.stopped and not self.ledger.exchanges:
            self.stopped = f"the budget of {self.budget[1]:g} {self.budget[0]} allows no trial"
        return self.result()

    @property
    def noise(self) -> dict[str, Any]:
        """Return the arguments of `solve` for privacy.

        These arguments contain no budget, because the search itself adds up the privacy cost of all its runs.
        """
        return {} if self.privacy is None else {"privacy": replace(self.privacy, budget=None)}

    def affordable(self) -> int:
        """Return how many exchanges can train y in the next trial; 0 if no budget is left for a trial."""
        within = self.within_budget()
        if self.privacy is None or self.privacy.budget is None:
            return within
        replies, epsilon = range(self.ledger.exchanges, MOST_REPLIES), self.privacy.epsilon_after
        left = bisect_right(replies, self.privacy.budget, key=epsilon) - 1
        trained = min(within, self.method.affordable(left))
        if within and not trained:
            spent = epsilon(self.ledger.exchanges)
            self.stopped = f"{SPENT}: ε is {spent:.6g}, and {self.privacy.budget:g} allows no further trial"
        return trained

    def within_budget(self) -> int:
        """Return how many exchanges may train y in the next trial by the budget of costs; privacy is not considered."""
        name, amount = self.budget
        left = amount - self.cost(self.ledger)
        if name == "exchanges":
            return self.method.affordable(left)
        measuring, phases = self.cost(self.spent(Ledger(), Ledger(), 1)), self.ledger.exchanges_by_phase
        if trained := phases.get("train", 0):
            training = (self.cost(self.ledger) - phases[VALIDATION] * measuring) / trained
        else:
            training = self.probed()
        return self.method.affordable(left, training, measuring)

    def probed(self) -> float:
        """Return the mean cost of an exchange that trains y, from a few rounds that are not counted."""
        given = {"rounds": PROBE, "eval_every": PROBE, "progress": False, **self.given, **self.noise}
        try:
            ledger = solve(self.method, self.task.problem, self.task.clients, self.x, self.y, **given).ledger
        except NumericalError as error:
            if error.ledger is None or not error.ledger.exchanges:
                raise
            ledger = error.ledger
        return self.cost(ledger) / ledger.exchanges

    def cost(self, ledger: Ledger) -> float:
        """Return the total of a ledger in the unit of the budget."""
        return cost(ledger.columns(), self.budget[0])

    def train(self, study: optuna.Study, trial: optuna.Trial, x: PyTree, rounds: int) -> None:
        """Train y at x, and judge the trial at each rung, until the trial ends, is pruned, or diverges."""
        import optuna

        before, seconds, losses = replace(self.ledger), self.seconds, list[float]()
        rungs = {rung for rung in self.method.rungs if rung < rounds} | {rounds}

        def judge(result: Result, row: Row | None) -> str | None:
            if row is None or row["round"] not in rungs:
                return None
            losses.append(self.validated(result) if self.privacy else float(row[f"{VALIDATION}.mean"]))
            self.ledger = self.spent(before, result.ledger, len(losses))
            self.seconds = seconds + row["seconds"]
            if losses[-1] < self.least:
                self.x, self.y, self.least = result.x, result.y, losses[-1]
                self.values = self.measure()
            self.record({"outer_loss": losses[-1]})
            trial.report(losses[-1], int(row["round"]))
            return "pruned" if trial.should_prune() else self.stopped or None

        try:
            with warnings.catch_warnings(action="ignore", category=NumericalWarning):  # the outer loss may rise
                run = solve(
                    self.method,
                    self.task.problem,
                    self.task.clients,
                    x,
                    self.y,
                    rounds=rounds,
                    key=jax.random.fold_in(jax.random.key(self.seed), trial.number),
                    eval_every=min(self.method.rungs[0], rounds),
                    metrics_per_client=None if self.privacy else {VALIDATION: self.task.problem.outer},
                    on_divergence="stop",
                    callbacks=[judge],
                    progress=False,
                    **self.given,
                    **self.noise,
                )
        except NumericalError as error:
            measured = len(losses) + (isinstance(error, NonFiniteError) and not error.of_iterate)
            self.ledger = self.spent(before, error.ledger or Ledger(), measured)
            self.diverged, self.why = self.diverged + 1, str(error)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            self.record({})
            return
        self.compiling += run.compile_seconds
        pruned = run.stopped == "pruned" and run.round < rounds
        study.tell(trial, None if pruned else losses[-1], optuna.trial.TrialState.PRUNED if pruned else None)

    def validated(self, result: Result) -> float:
        """Return the outer loss at a trial's (x, y) from clients that clip it and add noise."""
        key = jax.random.fold_in(jax.random.key(self.seed), NOISE + len(self.history))
        given = {"rounds": 1, "key": key, "progress": False, **self.given, **self.noise}
        try:
            run = solve(Validation(), self.task.problem, self.task.clients, result.x, result.y, **given)
        except NonFiniteError as error:  # the error's ledger is not used: the caller counts this exchange
            raise NonFiniteError(f"{VALIDATION}: {error}") from error
        return float(server_parts(run.state).inside.loss)

    def nothing_found(self) -> NumericalError:
        """Return the error for a search whose trials have all diverged."""
        name, method = type(self.method).__name__, self.method
        step = f"lower {name}.lr = {method.lr:g}" if is_number(method.lr) else f"give {name}.lr a small number"
        error = NumericalError(
            f"all {self.diverged} trials of {method.label} diverged: {step}, or draw x between bounds closer to x0 "
            f"than {name}.low = {method.low:g} and {name}.high = {method.high:g} (--search-box); the last: {self.why}"
        )
        error.ledger = self.ledger
        return error

    def account(self, replies: int) -> tuple[float, float]:
        """Return ε and δ of each client after a number of replies; (0, 0) without privacy."""
        return (0.0, 0.0) if self.privacy is None else (self.privacy.epsilon_after(replies), self.privacy.delta)

    def spent(self, before: Ledger, trial: Ledger, measurements: int) -> Ledger:
        """Return the ledger after a trial and its measurements. Every client takes part in measurements."""
        replies = measurements * len(self.task.clients)
        down = nbytes(jax.tree.map(jnp.asarray, (self.task.x0, self.task.y0)))
        ended, phases = before.exchanges_by_phase, {**trial.exchanges_by_phase, VALIDATION: measurements}
        exchanges = before.exchanges + trial.exchanges + measurements
        epsilon, delta = self.account(exchanges)
        return Ledger(
            epsilon=epsilon,
            delta=delta,
            rounds=before.rounds + trial.rounds,
            exchanges=exchanges,
            bytes_down=before.bytes_down + trial.bytes_down + replies * down,
            bytes_up=before.bytes_up + trial.bytes_up + replies * jnp.zeros(()).dtype.itemsize,
            replies=before.replies + trial.replies + replies,
            gradients=before.gradients + trial.gradients,
            hvps=before.hvps + trial.hvps,
            exchanges_by_phase={name: ended.get(name, 0) + phases.get(name, 0) for name in {**ended, **phases}},
            ticks=before.ticks + trial.ticks + measurements * trial.ticks // max(trial.exchanges, 1),
        )

    def measure(self) -> Row:
        """Compute the task's metrics at the best point so far."""
        for name in self.task.metrics:
            require_new(name, {"outer_loss"})
        return {name: float(metric(self.x, self.y)) for name, metric in self.task.metrics.items()}

    def record(self, measured: Row) -> None:
        """Add a row to the history, and call the callbacks."""
        costs = {**self.ledger.columns(), "seconds": self.seconds}
        diverged = {DIVERGED: self.diverged} if self.diverged else {}
        row: Row = {"round": len(self.history), **costs, **diverged, **measured, **self.values}
        self.history.rows.append(row)
        result = self.result()
        reasons = [callback(result, row) for callback in self.callbacks]
        self.stopped = next((reason for reason in reasons if isinstance(reason, str) and reason), "")

    def result(self) -> Result:
        return Result(
            self.x,
            self.y,
            round=len(self.history) - 1,
            rounds=self.rounds,
            history=self.history,
            ledger=self.ledger,
            compile_seconds=self.compiling,
            stopped=self.stopped,
        )


class SearchExperiment(Experiment):
    """Hold what a spec describes (task, method, engine) for a search over x, and run this search in place of `solve`.

    The search writes no checkpoints, and makes the rows of its history itself.
    """

    def check(self, spec: Spec) -> None:
        refuse_search(spec, self.task)

    def solve(self, plan: RunPlan, *, rounds: int, callbacks: Sequence[Callback] = (), **_: Any) -> Result:
        assert isinstance(self.algorithm, OuterSearch)
        given = {"cohort": cohort_of(plan), "engine": self.engine}
        search = SearchRun(
            self.algorithm, self.task, plan.budget, plan.seed, callbacks, rounds, given, privacy=self.privacy
        )
        with Tracking(callbacks, TrackedRun(self.algorithm.label, {"algorithm": self.algorithm})) as tracking:
            return tracking.ended(search.play())


@experiment_with.register
def _(algorithm: OuterSearch) -> type[Experiment]:
    return SearchExperiment
