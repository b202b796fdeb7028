"""One call runs a method: check the arguments, say what identifies the run, start the engine, play the rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.algorithms.parts.private import Private
from fedbilevel.core.algorithm import Algorithm, check_algorithm, check_fields, check_solves
from fedbilevel.core.client import Clients, RemoteClients, check_samples, require_clients
from fedbilevel.core.config import open_steps
from fedbilevel.core.errors import explain_call, require, require_count
from fedbilevel.core.inputs import require_start
from fedbilevel.core.metrics import MetricFunction, directions
from fedbilevel.core.privacy import Privacy, check_noise
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import PyTree, nbytes, split
from fedbilevel.display import Display
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines import fingerprint, lock, submodels
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.divergence import Met, what_was_met
from fedbilevel.engines.engine import Carry, Cohort, Engine, Run, check_cohort, first_carry
from fedbilevel.engines.evaluation import Evaluation, Measure, PerClient, PerClientRow, as_per_client, check_per_client
from fedbilevel.engines.first_look import first_look
from fedbilevel.engines.history import Callback, History, Result, check_callbacks
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.loop import Loop, LoopPlan
from fedbilevel.engines.machine import use_every_core
from fedbilevel.engines.multihost import current_group
from fedbilevel.engines.progress import TRACING, require_progress, showing
from fedbilevel.engines.recorder import known_flops

Resume = bool | Literal["auto", "force"]
RESUME = (False, True, "auto", "force")
OnDivergence = Literal["stop", "shrink"]
HALVINGS = 3  # of all steps in a run, at most
ROWS = 20  # of a history, where nobody says how many rounds lie between two
KEPT = 2**29  # bytes of what simulated clients keep for steps that adapt; above it they begin anew each time


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
            process was lost (LostProcess of engines.multihost); the last checkpoint stays.
        CheckpointError: a checkpoint could not be written or read, another process writes it (its lock file,
            .NAME.lock beside it, says which), or it belongs to another run: samples, start, losses, metrics,
            hyperparameters, key or cohort are others; the message names them.
    """
    check_algorithm(algorithm)
    check_solves(algorithm, problem)
    clients = clients if isinstance(clients, RemoteClients) else require_clients(clients)
    check_samples(problem, clients)
    require_count("rounds", rounds)
    require_count("eval_every", eval_every, optional=True)
    require_count("checkpoint_every", checkpoint_every, optional=True)
    require(resume in RESUME, "resume", resume, "True, False, 'auto' or 'force'")
    require(not resume or checkpoint is not None, "resume", resume, "used together with checkpoint")
    cohort = check_cohort(cohort, len(clients))
    chosen: Engine = engine or Local()
    if isinstance(chosen, Local) and chosen.devices is None and cohort.size > 1 and current_group().processes == 1:
        use_every_core()  # before anything here starts JAX
    require(metrics is None or isinstance(metrics, Mapping), "metrics", metrics, "functions (x, y) -> number by name")
    require(best_by is None or isinstance(best_by, str), "best_by", best_by, "the name of a column of the history")
    shrinks = on_divergence == "shrink"
    require(on_divergence in (None, "stop", "shrink"), "on_divergence", on_divergence, "'stop', 'shrink' or None")
    remote = isinstance(clients, RemoteClients)
    here = not remote and current_group().processes == 1
    require(here or not shrinks, "on_divergence", on_divergence, "'stop' where other processes know the steps")
    require(privacy is None or isinstance(privacy, Privacy), "privacy", privacy, "fedbilevel.Privacy(…) or None")
    require(privacy is None or not remote, "privacy", privacy, "None in a federation, whose sites have their own")
    taken_back = "'stop' under privacy: what clients have sent cannot be taken back"
    require(privacy is None or not shrinks, "on_divergence", on_divergence, taken_back)
    check_callbacks(callbacks)
    require_progress(progress)
    path = None if checkpoint is None else Path(checkpoint)
    (x, x_fixed), (y, y_fixed) = split(x0), split(y0)  # before JAX is asked for anything
    key = _as_key(key)
    algorithm = adaptive(algorithm, problem, isinstance(clients, RemoteClients) or len(clients) * nbytes(y) <= KEPT)
    exact = "None under privacy: clients' own values would leave them without noise"
    own = as_per_client(metrics_per_client)
    require(privacy is None or not own, "metrics_per_client", [*own], exact)
    if privacy is not None:
        privacy.epsilon_after(1)  # the accountant is installed
        check_noise("privacy", algorithm)
    noise = None if privacy is None else Private(**vars(privacy), counts=clients.capacity is None)
    algorithm = composed(algorithm, problem, noise)
    require_start("x0", x0, x)
    if isinstance(problem, SingleLevel | SimpleBilevel):
        require(y0 is None, "y0", y0, f"None, as {type(problem).__name__} problems have no inner variable")
        known = not isinstance(problem, SimpleBilevel) or problem.known
        require(known, "SimpleBilevel.outer", None, "a function (x) where the server is: it alone asks for H")
    else:
        require_start("y0", y0, y)
    given = {name: values.rounds for name, values in clients.own.items()}
    if clients.capacity is not None and clients.capacity.ndim == 2:
        given["capacity"] = len(clients.capacity)
    for name, most in given.items():
        enough = most is None or rounds <= most
        require(enough, "rounds", rounds, f"at most {most}: for so many rounds clients' {name} are given")
    problem = problem.with_fixed(x_fixed, y_fixed).prepared()
    y_fixed = x_fixed if isinstance(problem, SimpleBilevel) else y_fixed  # its results' y is an average of x
    examples = clients.examples()
    programs = problem.traced(x, y, examples)
    problem = problem.keyed(x, y, examples, programs)
    check_fields(algorithm, problem, clients, x, y, rounds)
    measured = check_per_client(own, x0, x0 if isinstance(problem, SimpleBilevel) else y0, examples)
    evaluation = Evaluation(metrics or {}, x_fixed, y_fixed)
    if isinstance(clients, Clients):
        current_group().decide(lambda: first_look(problem, clients, x, y, programs))

    carry = first_carry(algorithm, problem, clients, x, y)
    if on_divergence is None and here and privacy is None and open_steps(algorithm):
        shrinks = nbytes((carry.state, carry.clients)) <= KEPT  # a copy or two are kept to return to
    if remote and path is not None and (checkpoint_every or 1) > 1:
        fits = algorithm.client_state(problem, x, y) is None
        allowed = f"1 or None: the clients of {algorithm.label} keep a state, which goes back by one round alone"
        require(fits, "checkpoint_every", checkpoint_every, allowed)
    drawn = {"cohort": cohort.size, **({"replacement": True} if cohort.replacement else {})}
    stated = {**drawn, "key": np.asarray(jax.random.key_data(key)).tolist()}
    if chosen.clock is not None:
        words = repr(chosen.clock)
        stated["clock"] = words if len(words) < 500 else hashlib.sha256(words.encode()).hexdigest()
        if callable(arrivals := chosen.clock.arrivals):
            programs = {**programs, "Clock.arrivals": jax.make_jaxpr(arrivals)(0, 0, key)}
        elif arrivals is not None:
            stated["clock's arrivals"] = hashlib.sha256(repr(arrivals).encode()).hexdigest()
    group = current_group()
    begun = fingerprint.Fingerprint({}, {}, {})
    if path is not None or group.processes > 1:  # else nobody compares it
        begun = fingerprint.take(stated, algorithm, problem, clients, x, y, programs)
        measured |= {name: evaluation.trace(name, x, carry.state.y) for name in evaluation.metrics}
        begun = replace(begun, metrics=fingerprint.of_metrics(measured, {**own, **evaluation.metrics}))
    save_every = 1 if remote and checkpoint_every is None else checkpoint_every  # a round is costly there
    plan = LoopPlan(rounds, eval_every or -(-rounds // ROWS), save_every, path, begun)
    group.saved = ""
    if group.processes > 1:
        group.require_same(_in_common(plan, chosen, resume, {"metrics": metrics, "metrics_per_client": own}))
    history = History(directions=directions({**own, **(metrics or {})}))

    def met(last_x: PyTree, last_y: PyTree) -> Met:
        if not isinstance(clients, Clients) or group.processes > 1:
            return Met()
        return what_was_met(problem, clients, (x, y), (split(last_x)[0], split(last_y)[0]))

    loop = Loop(
        plan,
        evaluation,
        callbacks,
        algorithm,
        lambda x, own_y: first_carry(algorithm, problem, clients, x, own_y if jax.tree.leaves(y) else y),
        met,
        history,
        Ledger(virtual=not remote, delta=0.0 if privacy is None else privacy.delta),
        everyone=cohort.size == len(clients) and not cohort.replacement,
        simulated=not remote,
        group=group,
        best_by=best_by,
        halvings_at_most=HALVINGS * shrinks,
        privacy=privacy,
    )
    locked = nullcontext() if path is None else lock.exclusive(path.with_name(f".{path.name}.lock"), path, group)
    with locked, showing(progress) as display:
        display.stage(TRACING)
        if count_flops:
            capacities = submodels.classes(algorithm, problem, clients, x, y)
            loop.costs = known_flops(algorithm, problem, clients, x, y, capacities)
            loop.ledger.flops = None if loop.costs is None else 0
        going_on = group.decide(lambda: _goes_on(path, resume))
        if path is not None:
            loop.plan = replace(plan, begun=replace(begun, samples=fingerprint.of_samples(clients, group)))
        if going_on:
            carry = loop.restore(carry, force=resume == "force")
        settled: Engine = chosen
        if isinstance(chosen, Local):
            settled = chosen.settled(carry.state, cohort, before=loop.devices)
            loop.devices = settled.devices
        loop.display = display

        def begin(algorithm: Algorithm, carry: Carry) -> tuple[Run, PerClientRow | None]:
            run = settled.start(algorithm, problem, clients, cohort, key, carry)
            return run, run.per_client(own, (x_fixed, y_fixed)) if own else None

        return loop.play(begin, carry)


def _goes_on(path: Path | None, resume: Resume) -> bool:
    """Tell whether to continue from a checkpoint; only `resume` = "auto" goes by whether the file exists."""
    exists = path is not None and files.exist(path)
    if not resume:
        require(not exists, "checkpoint", str(path), "a new file, unless resume=True continues from it")
    return exists if resume == "auto" else bool(resume)


def _in_common(
    plan: LoopPlan, engine: Engine, resume: Resume, metrics: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, Any]:
    """List what several processes must have in common; but for the samples, of which each may have only its own."""
    return {
        **plan.begun.stated,
        **plan.begun.hashed,
        **{name: str(hashes) for name, hashes in plan.begun.by_round.items()},
        **plan.begun.functions,
        "engine": repr(engine),
        "resume": str(resume),
        **{kind: ", ".join(sorted(named or {})) for kind, named in metrics.items()},
        "rounds": plan.rounds,
        "eval_every": plan.eval_every,
        "checkpoint_every": plan.save_every,
        "checkpoint": "None" if plan.path is None else "given",
        "jax_enable_x64": jnp.result_type(float) == np.float64,
        "JAX's backend": jax.default_backend(),
    }


def _as_key(key: object) -> Array:
    """Make a JAX key from a seed or a key."""
    if isinstance(key, Integral) and not isinstance(key, bool):
        return jax.random.key(int(key))
    is_key = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    require(is_key, "key", key, "a whole number or a key made by jax.random.key")
    assert isinstance(key, Array)
    return key
