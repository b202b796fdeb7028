"""Run a method with one call: check the arguments, prepare the problem, identify the run, and drive it to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from jax import Array

from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.algorithms.parts.private import Private
from fedbilevel.core.algorithm import Algorithm, check_algorithm, check_fields, check_solves
from fedbilevel.core.client import Clients, RemoteClients, check_samples, require_clients
from fedbilevel.core.errors import explain_call, require
from fedbilevel.core.hyperparameters import open_steps
from fedbilevel.core.metrics import MetricFunction
from fedbilevel.core.privacy import Privacy, check_noise
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, nbytes
from fedbilevel.display import Display
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines import lock
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.engine import Carry, Cohort, Engine, check_cohort
from fedbilevel.engines.evaluation import Measure, PerClient
from fedbilevel.engines.execution import Execution
from fedbilevel.engines.fingerprint import Fingerprint, of_samples
from fedbilevel.engines.history import Callback, History, Result
from fedbilevel.engines.identity import identity_of, in_common
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.loop import Loop, LoopPlan
from fedbilevel.engines.machine import use_every_core
from fedbilevel.engines.measurements import RunMeasurements
from fedbilevel.engines.options import OnDivergence, Resume, RunOptions, refuse_combinations
from fedbilevel.engines.posed import PosedProblem
from fedbilevel.engines.process_group import current_group
from fedbilevel.engines.progress import TRACING, showing
from fedbilevel.engines.rescue import Rescue
from fedbilevel.engines.resumption import take_up
from fedbilevel.engines.saver import Saver
from fedbilevel.engines.tracking import MEMORY, TrackedRun, Tracking

HALVINGS = 3  # the largest number of halvings of all steps in a run
ROWS = 20  # the number of rows of a history, if the user sets no number of rounds between two rows
KEPT = 2**29  # the most bytes that simulated clients keep for adaptive steps; otherwise each measurement begins anew
IDLE = 2**25  # the most of these bytes for clients that a round does not ask, since such bytes make rounds slower


@explain_call
def solve(
    algorithm: Algorithm,
    problem: Problem,
    clients: Clients | RemoteClients,
    x0: PyTree,
    y0: PyTree = None,
    *,
    rounds: int,
    cohort: int | Cohort | None = None,
    key: int | Array = 0,
    engine: Engine | None = None,
    eval_every: int | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    metrics_per_client: Mapping[str, Measure | PerClient] | None = None,
    best_by: str | None = None,
    on_divergence: OnDivergence | None = None,
    privacy: Privacy | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: Resume = False,
    count_flops: bool = False,
    progress: bool | Display | None = None,
) -> Result:
    """Run a federated algorithm on a problem and clients, and return the result: x, y, history and costs.

    Args:
        algorithm: the method, such as SimFBO(local_steps=10). Step sizes that are None adapt during the run
            (`AdaptiveSteps`).
        problem: the losses.
        clients: each client's samples (`Clients`). If the clients are on other machines, this is a description of them
            (`RemoteClients`).
        x0, y0: the start. Each is a pytree: an array, a dict, list or tuple of arrays, or a model that JAX can take
            apart. Its arrays of floating-point numbers are the variables. A single-level problem has no y0.
        rounds: the total number of rounds, including the rounds before a resumption. The run ends earlier if the
            algorithm has finished.
        cohort: the number of clients per round, which are drawn uniformly without replacement; None: all clients.
            `fedbilevel.Cohort(10, replacement=True)` draws 10 clients with replacement.
        key: a seed or a JAX key. Two runs have the same numbers, also on different engines, if this key and the
            arguments from `algorithm` to `cohort` are the same.
        engine: what carries out the rounds: `Local` (the default), `Reference`, or `Flower` for clients on other
            machines.
        eval_every: the number of rounds between two rows of the history; None makes about twenty rows.
        metrics: a dict from names to functions (x, y) -> number, which are computed for every row of the history.
            `Metric(function, larger_is_better)` in place of a function says whether a larger number is better.
        metrics_per_client: a dict from names to functions (x, y, batch) -> number. A function returns a mean over the
            samples of the batch. For every row of the history, each client's mean over all of its outer samples is
            computed, from calls with single samples. A `WholeLoss` in place of a function gets all samples of a client
            at once. `PerClient(function, "inner")` takes the inner samples instead. The history gets NAME.mean (the
            mean with the clients' weights), NAME.worst, NAME.best and the deciles NAME.p10 … NAME.p90.
        best_by: the column of the history by which `result.best` is chosen, such as a metric on validation samples;
            None: "outer_loss", the mean of the outer loss over the rounds since the previous row. If the method does
            not measure this loss, `result.best` is None.
        on_divergence: what to do if the run diverges. "stop" raises NonFiniteError if x, y or another variable of the
            run has an entry that is NaN or infinite; the `result` of this error has the last finite x and y. "shrink"
            returns to the row before the best row, halves every step size, and continues with a warning. (The losses in
            a row were measured in the rounds before it, so the run may already have begun to diverge at the best row.)
            "shrink" acts in two cases: a variable is not finite; or a loss is more than 10 times its first value in two
            consecutive rows, and still grows. It can act 3 times; if a fourth time would be needed, the run ends. Once
            it has acted, the history has a column "halvings". Abandoned rounds still count in `result.ledger`. None:
            "shrink" if steps adapt, clients are simulated in one process, and there is no privacy; else "stop".
        privacy: terms of local differential privacy for every client. Each reply is clipped, and noise is added. The
            noise is drawn from the run's key, in the float type of the run. Clients report no metrics. The history has
            ε, the privacy cost of the client with the most replies. If the method draws new clients within a round, as
            FedNest does with cohorts, or if clients can hold only a part of the model (`Clients.capacity`), every
            exchange counts as a reply of every client. Then ε is never too small, but may be too large. A run ends
            before the first round in which a client would exceed the budget; `result.stopped` says so.
        callbacks: functions (result, row) that are called between rounds, about twice a second. They are also called
            whenever the history has a new row; otherwise row is None. If a run has several processes, process 0 calls
            them (docs/how-to/several-hosts.md). A callback stops the run by returning a text, which is the reason. If a
            callback raises an error, the run is saved before the error is passed on. A resumed run does not call
            callbacks again for rounds that are already done. So if a callback stopped the run at such a round, the
            resumed run continues after it. `fedbilevel.trackers` has callbacks that record runs.
        checkpoint: the file to which process 0 saves the whole run, atomically, and from which the run resumes.
        checkpoint_every: the number of rounds between two checkpoints. None: a checkpoint is saved once a second, or
            less often, so that saving takes at most a tenth of the time; with `RemoteClients`, after every round. Runs
            are also saved before round 0, at the end, on Ctrl-C, and if a callback raises.
        resume: True continues from `checkpoint`. The results have the same bits as those of an uninterrupted run, with
            one exception: if the run diverges later, it cannot return to rows before the point where it was resumed.
            "auto" continues if the file exists, and otherwise starts a new run. "force" continues even if some
            arguments differ from those with which the run was started; a warning names these arguments.
        count_flops: whether to trace a round once more to count the clients' operations, which takes 0.2 to 1 s.
        progress: whether to show the current stage (tracing, compiling), the rounds, their speed and the time left.
            None: in a notebook, and on a terminal if `rich` is installed, but not in pipes and files. True: also in
            pipes and files, as plain lines on standard error. False: never. An object with methods
            stage(name), advance(round, rounds) and close() shows the progress itself; it is called at most ten times a
            second.

    Returns:
        The result at the end of the run.

    Raises:
        ConfigurationError: an argument is not allowed; nothing was computed.
        NumericalError: an iterate or a metric is NaN or infinite (NonFiniteError), or an assumption of the method does
            not hold. The last good checkpoint remains. If the state before the failed round is still in memory, this
            state is saved first, as the last good checkpoint (docs/explanation/engines.md).
        ExchangeError: too few clients replied, even after several attempts, or another process of the run was lost.
            The last checkpoint remains, with all rounds up to it.
        CheckpointError: a checkpoint could not be written or read; or another process is writing it (the file
            .NAME.lock in the same folder names this process); or it belongs to another run, and the message lists what
            differs (samples, start, losses, metrics, hyperparameters, key or cohort).
    """
    check_algorithm(algorithm)
    check_solves(algorithm, problem)
    clients = clients if isinstance(clients, RemoteClients) else require_clients(clients)
    check_samples(problem, clients)
    options = RunOptions(
        rounds=rounds, cohort=cohort, key=key, engine=engine, eval_every=eval_every, metrics=metrics,
        metrics_per_client=metrics_per_client, best_by=best_by, on_divergence=on_divergence, privacy=privacy,
        callbacks=callbacks, checkpoint=checkpoint, checkpoint_every=checkpoint_every, resume=resume,
        count_flops=count_flops, progress=progress,
    )  # fmt: skip
    refuse_combinations(options, problem, clients, y0)
    cohort, engine = check_cohort(cohort, len(clients)), engine or Local()
    if isinstance(engine, Local) and engine.devices is None and cohort.size > 1 and current_group().processes == 1:
        use_every_core()  # before anything here starts JAX
    posed = PosedProblem.of(problem, clients, x0, y0, options)
    method = method_of(algorithm, posed, cohort, options)
    check_fields(method, posed.problem, clients, posed.x, posed.y, rounds)
    posed.look(method)
    execution = Execution(method, posed, engine, cohort, options.jax_key, privacy)
    carry = execution.first_carry(posed.x, posed.y)
    loop = loop_of(execution, carry, options)
    group = current_group()
    group.saved.path = ""
    if group.processes > 1:
        group.require_same(in_common(loop, options))
    path = options.path
    locked = nullcontext() if path is None else lock.exclusive(path.with_name(f".{path.name}.lock"), path)
    with locked, showing(progress) as display:
        display.stage(TRACING)
        loop.display = display
        if count_flops:
            loop.measurements.count_flops(execution.reply_flops())
        going_on = group.decide(lambda: goes_on(options))
        if path is not None:
            loop.saver.fingerprint = replace(loop.saver.fingerprint, samples=of_samples(clients, group))
        if going_on:
            carry = take_up(loop, carry, force=resume == "force")
        execution.settle(carry)
        with Tracking(callbacks, tracked_run(algorithm, options, len(clients), going_on)) as tracking:
            return tracking.ended(loop.play(carry))


def tracked_run(algorithm: Algorithm, options: RunOptions, clients: int, resumed: bool) -> TrackedRun:
    """Describe a run to trackers, by the names that a spec has."""
    names = "rounds", "cohort", "eval_every", "best_by", "on_divergence"
    run = {name: getattr(options, name) for name in names}
    run |= {"seed": options.key, "clients": clients}
    memory = options.path and options.path.with_name(f"{options.path.name}.{MEMORY}")
    parameters = {"algorithm.name": algorithm.label, "algorithm": algorithm, "run": run, "privacy": options.privacy}
    private = options.privacy is not None
    return TrackedRun(algorithm.label, parameters, memory=memory, resumed=resumed, is_private=private)


def method_of(algorithm: Algorithm, posed: PosedProblem, cohort: Cohort, options: RunOptions) -> Algorithm:
    """Return the method as it runs: with adaptive steps in place of None, and within the layers that are asked for.

    Raises:
        ConfigurationError: the method does not allow one of the layers.
    """
    count, size = len(posed.clients), nbytes(posed.y)
    remember = not posed.simulated or (count * size <= KEPT and (count - cohort.size) * size <= IDLE)
    algorithm, noise = adaptive(algorithm, posed.problem, remember), None
    if (terms := options.privacy) is not None:
        terms.epsilon_after(1)  # raises an error if the accountant is not installed
        check_noise("privacy", algorithm)
        noise = Private(**vars(terms), counts=posed.clients.capacity is None)
    return composed(algorithm, posed.problem, noise)


def loop_of(execution: Execution, carry: Carry, options: RunOptions) -> Loop:
    """Make the loop of a run that starts with `carry`, with the objects that execute, measure, save and rescue it."""
    posed, terms, cohort = execution.posed, options.privacy, execution.cohort
    save_every = options.checkpoint_every
    if not posed.simulated:
        check_saves(execution, options)
        save_every = save_every or 1  # a round with remote clients is expensive
    identity = Fingerprint({}, {}, {})
    if options.path is not None or current_group().processes > 1:  # otherwise the fingerprint is not needed
        identity = identity_of(execution, carry)
    return Loop(
        LoopPlan(options.rounds, options.eval_every or -(-options.rounds // ROWS), save_every),
        execution,
        RunMeasurements(
            posed.evaluation,
            History(directions=options.directions),
            Ledger(virtual=posed.simulated, delta=0.0 if terms is None else terms.delta),
            best_by=options.best_by,
            clip=None if terms is None else terms.clip,
        ),
        Saver(options.path, identity),
        Rescue(
            partial(posed.met, execution.method),
            (posed.x, posed.y),
            not cohort.some(len(posed.clients)),
            halvings_at_most(execution, carry, options),
        ),
        options.callbacks,
    )


def halvings_at_most(execution: Execution, carry: Carry, options: RunOptions) -> int:
    """Return how often a run that diverges may halve its steps.

    A run may halve them if `on_divergence` says so; if it is None, a run may halve them if steps adapt.
    """
    shrinks = options.on_divergence == "shrink"
    here = execution.posed.simulated and current_group().processes == 1
    if options.on_divergence is None and here and options.privacy is None and open_steps(execution.method):
        shrinks = nbytes((carry.state, carry.clients)) <= KEPT  # a run that may return keeps up to two copies
    return HALVINGS * shrinks


def check_saves(execution: Execution, options: RunOptions) -> None:
    """Reject a checkpoint every few rounds if remote clients keep a state.

    A site can roll such a state back by one round only, so that a checkpoint is needed after every round.
    """
    if options.path is not None and (options.checkpoint_every or 1) > 1:
        method, posed = execution.method, execution.posed
        fits = method.client_state(posed.problem, posed.x, posed.y) is None
        allowed = f"1 or None: the clients of {method.label} keep a state, which can be rolled back by one round only"
        require(fits, "checkpoint_every", options.checkpoint_every, allowed)


def goes_on(options: RunOptions) -> bool:
    """Return whether to continue from a checkpoint; with `resume` = "auto", this depends on whether the file exists."""
    path, resume = options.path, options.resume
    exists = path is not None and files.exist(path)
    if not resume:
        require(not exists, "checkpoint", str(path), "a new file, unless resume=True continues from it")
    return exists if resume == "auto" else bool(resume)
