"""One call runs a method: check the arguments, pose the problem, identify the run, and let it run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
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

HALVINGS = 3  # of all steps in a run, at most
ROWS = 20  # of a history, where the number of rounds between two rows is left open
KEPT = 2**29  # bytes of what simulated clients keep for steps that adapt; above it they begin anew each time
IDLE = 2**25  # the same of those whom a round does not ask: the more there are, the longer a round takes


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
    """Run a federated algorithm.

    Args:
        algorithm: e.g. SimFBO(local_steps=10); steps that are None adapt (`AdaptiveSteps`).
        problem: the losses.
        clients: each client's samples; or, for an engine that reaches clients elsewhere, what is known of them.
        x0, y0: where to start; any pytrees (their floating arrays are the variables); a single-level problem has no y0.
        rounds: how many rounds in total, those before a resumption included; fewer where the algorithm has finished.
        cohort: clients per round, drawn uniformly without replacement; None takes everyone. `fedbilevel.Cohort(10,
            replacement=True)` draws with replacement.
        key: a seed or a JAX key; with the arguments above it determines the numbers, whatever the engine.
        engine: Local() by default.
        eval_every: rounds between rows of the history; None makes about twenty rows.
        metrics: functions (x, y) -> scalar by name, computed for every row; `Metric` says whether larger is better.
        metrics_per_client: functions (x, y, batch) -> number by name, means over the samples of the batch, computed for
            every row on all outer samples of each client (`PerClient(function, "inner")`: the inner ones). The history
            gets NAME.mean, by the clients' weights, NAME.worst, NAME.best and the deciles NAME.p10 … NAME.p90.
        best_by: the column of the history by whose best row `result.best` is chosen, such as a metric on validation
            samples; None: "outer_loss", the validation loss in the rounds before the row, where the method tells it.
        on_divergence: what to do where an iterate is not finite. "stop" raises NonFiniteError, whose `result` has the
            last finite x and y. "shrink" returns to the row before the best and continues with half of every step size,
            with a warning, 3 times at most. It also does so where a loss grows and was more than 10 times that of the
            start in the last two rows; the fourth time this ends the run. The history then has a column "halvings";
            what was spent stays counted. None: "shrink" where steps adapt, on this machine alone and without privacy;
            else "stop".
        privacy: terms of local differential privacy, as a site of a federation has them, here of every client: each
            reply is clipped and noised, by the keys of the run and in its float type, and clients tell no metrics. The
            history has the ε of the client with the most replies; exchanges with fresh cohorts, and all where clients
            have capacities, count for everyone: an upper bound. A run ends before the first round that would take a
            client over the budget; `result.stopped` says so.
        callbacks: called after every stretch of rounds, by process 0 if there are several (see engines.multihost). A
            callback that returns a reason stops the run. Where a callback raises, the run is saved first; no callback
            is called again for the rounds before, and what others returned then is lost.
        checkpoint: a file to save the whole run to, atomically, and to resume from; process 0's, if there are several.
        checkpoint_every: rounds between saves; None saves once a second, or as often as takes a tenth of the time, and
            with `RemoteClients` after every round. Also before round 0, at the end, on Ctrl-C, and where a callback
            raises.
        resume: True continues from `checkpoint`, to the same bits as an unbroken run, but that a run which diverges
            later returns no further than to where it was resumed; "auto" does where the file exists, and else starts;
            "force" is True, and goes on where arguments are others than those that the run was begun with, with a
            warning that names them.
        count_flops: trace a round once more for what it costs the clients in operations (see recorder.py): 0.2 to 1 s.
        progress: show what is being done (tracing, compiling), and the rounds with their speed and the time left. None:
            in a notebook, and on a terminal where `rich` is installed; nothing goes into pipes and files. True: there,
            too, in plain lines on standard error. False: never. Or an object with methods stage(name),
            advance(round, rounds) and close(), called ten times a second at most.

    Raises:
        ConfigurationError: an argument is not allowed; nothing was computed.
        NumericalError: an iterate or a metric is NaN or infinite (NonFiniteError), or what the method assumes does not
            hold here; the last good checkpoint stays, mostly that of the round before (docs/explanation/engines.md).
        ExchangeError: too few clients replied, again and again; the rounds before are in the checkpoint. Or another
            process was lost (LostProcess of engines.process_group); the last checkpoint stays.
        CheckpointError: a checkpoint could not be written or read, another process writes it (its lock file,
            .NAME.lock beside it, says which), or it belongs to another run: samples, start, losses, metrics,
            hyperparameters, key or cohort are others; the message names them.
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
    posed.look()
    execution = Execution(method, posed, engine, cohort, options.jax_key, privacy)
    carry = execution.first_carry(posed.x, posed.y)
    loop = loop_of(execution, carry, options)
    group = current_group()
    group.saved = ""
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
        return loop.play(carry)


def method_of(algorithm: Algorithm, posed: PosedProblem, cohort: Cohort, options: RunOptions) -> Algorithm:
    """Return the method as it runs: with steps that adapt where they are None, in the layers that are asked for.

    Raises:
        ConfigurationError: it does not allow one of them.
    """
    count, size = len(posed.clients), nbytes(posed.y)
    remember = not posed.simulated or (count * size <= KEPT and (count - cohort.size) * size <= IDLE)
    algorithm, noise = adaptive(algorithm, posed.problem, remember), None
    if (terms := options.privacy) is not None:
        terms.epsilon_after(1)  # the accountant is installed
        check_noise("privacy", algorithm)
        noise = Private(**vars(terms), counts=posed.clients.capacity is None)
    return composed(algorithm, posed.problem, noise)


def loop_of(execution: Execution, carry: Carry, options: RunOptions) -> Loop:
    """Put together what runs, measures, saves and rescues a run that begins with `carry`."""
    posed, terms, cohort = execution.posed, options.privacy, execution.cohort
    save_every = options.checkpoint_every
    if not posed.simulated:
        check_saves(execution, options)
        save_every = save_every or 1  # a round is costly there
    identity = Fingerprint({}, {}, {})
    if options.path is not None or current_group().processes > 1:  # else it is compared with nothing
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
        Rescue(posed.met, not cohort.some(len(posed.clients)), halvings_at_most(execution, carry, options)),
        options.callbacks,
    )


def halvings_at_most(execution: Execution, carry: Carry, options: RunOptions) -> int:
    """Say how often a run that diverges may halve its steps: as `on_divergence` says, or where steps adapt."""
    shrinks = options.on_divergence == "shrink"
    here = execution.posed.simulated and current_group().processes == 1
    if options.on_divergence is None and here and options.privacy is None and open_steps(execution.method):
        shrinks = nbytes((carry.state, carry.clients)) <= KEPT  # a copy or two are kept to return to
    return HALVINGS * shrinks


def check_saves(execution: Execution, options: RunOptions) -> None:
    """Refuse rare checkpoints of clients elsewhere that keep a state: it goes back by a single round."""
    if options.path is not None and (options.checkpoint_every or 1) > 1:
        method, posed = execution.method, execution.posed
        fits = method.client_state(posed.problem, posed.x, posed.y) is None
        allowed = f"1 or None: the clients of {method.label} keep a state, which goes back by one round alone"
        require(fits, "checkpoint_every", options.checkpoint_every, allowed)


def goes_on(options: RunOptions) -> bool:
    """Tell whether to continue from a checkpoint; only `resume` = "auto" goes by whether the file exists."""
    path, resume = options.path, options.resume
    exists = path is not None and files.exist(path)
    if not resume:
        require(not exists, "checkpoint", str(path), "a new file, unless resume=True continues from it")
    return exists if resume == "auto" else bool(resume)
