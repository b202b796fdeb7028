"""One call runs a method: check the arguments, say what identifies the run, start the engine, play the rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import check_algorithm, check_fields, check_solves
from fedbilevel.core.client import Clients, check_samples, require_clients
from fedbilevel.core.config import hyperparameters
from fedbilevel.core.errors import (
    require,
    require_count,
)
from fedbilevel.core.functions import require_function
from fedbilevel.core.influence import warn_without_influence
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel, check_losses
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.tree import PyTree, nonfinite_leaves, split
from fedbilevel.engines import hosts, submodels
from fedbilevel.engines.desk import open_desk
from fedbilevel.engines.engine import Engine, check_cohort, first_carry
from fedbilevel.engines.evaluation import Evaluation, Metric
from fedbilevel.engines.flops import known_flops
from fedbilevel.engines.local import Local
from fedbilevel.engines.loop import Loop, Plan
from fedbilevel.engines.result import Callback, Result


def solve(
    algorithm: Any,
    problem: Problem,
    clients: Clients | RemoteClients,
    x0: PyTree,
    y0: PyTree = None,
    *,
    rounds: int,
    cohort: int | None = None,
    key: int | Array = 0,
    engine: Engine | None = None,
    eval_every: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    count_flops: bool = False,
) -> Result:
    """Run a federated algorithm.

    Args:
        algorithm: e.g. SimFBO(local_steps=10).
        problem: the losses.
        clients: who holds which samples; or, for an engine that reaches clients elsewhere, what is known of them.
        x0, y0: where to start; any pytrees (their floating arrays are the variables); a single-level problem has no y0.
        rounds: how many rounds in total, those before a resumption included; fewer where the algorithm has finished.
        cohort: clients per round, drawn uniformly without replacement; None takes everyone.
        key: a seed or a JAX key; with the arguments above it determines the numbers, whatever the engine.
        engine: Local() by default.
        eval_every: rounds between rows of the history; None writes the first and the last row only.
        metrics: functions (x, y) -> scalar by name, computed for every row.
        callbacks: called after every stretch of rounds, by process 0 if there are several (see engines.hosts); one that
            returns a reason stops the run.
        checkpoint: a file to save the whole run to, atomically, and to resume from; process 0's, if there are several.
        checkpoint_every: rounds between saves; None saves at each row. Also before round 0, at the end and on Ctrl-C.
        resume: continue from `checkpoint`; the result is bit-identical to that of an unbroken run.
        count_flops: trace a round once more for what it costs the clients in operations (see flops.py): 0.2 to 1 s.

    Raises:
        ConfigurationError: an argument is not allowed; nothing was computed.
        NumericalError: an iterate or a metric is NaN or infinite (NonFiniteError), or what the method assumes does not
            hold here; the last good checkpoint stays.
        ExchangeError: too few clients answered, again and again; the rounds before are in the checkpoint. Or another
            process was lost (engines.leaving.LostProcess); the last checkpoint stays.
        CheckpointError: a checkpoint could not be written, or belongs to another run.
    """
    check_algorithm(algorithm)
    check_solves(algorithm, problem)
    clients = clients if isinstance(clients, RemoteClients) else require_clients(clients)
    check_samples(problem, clients)
    require_count("rounds", rounds)
    require_count("eval_every", eval_every, optional=True)
    require_count("checkpoint_every", checkpoint_every, optional=True)
    require(not resume or checkpoint is not None, "resume", resume, "used together with checkpoint")
    cohort = check_cohort(cohort, len(clients))
    require(metrics is None or isinstance(metrics, Mapping), "metrics", metrics, "functions (x, y) -> number by name")
    for i, callback in enumerate(callbacks):
        require_function(f"callbacks[{i}]", callback, "result, row", " -> a reason to stop, or None")
    path = None if checkpoint is None else Path(checkpoint)
    key = _as_key(key)
    (x, x_fixed), (y, y_fixed) = split(x0), split(y0)
    _check_start("x0", x0, x)
    if isinstance(problem, SingleLevel | SimpleBilevel):
        require(y0 is None, "y0", y0, f"None, as {type(problem).__name__} problems have no inner variable")
        known = not isinstance(problem, SimpleBilevel) or problem.known
        require(known, "SimpleBilevel.outer", None, "a function (x) where the server is: it alone asks for H")
    else:
        _check_start("y0", y0, y)
    problem = problem.with_fixed(x_fixed, y_fixed)
    y_fixed = x_fixed if isinstance(problem, SimpleBilevel) else y_fixed  # its results' y is an average of x
    check_losses(problem, x, y, *clients.examples())
    warn_without_influence(problem, x, y, *clients.examples(), stacklevel=2)
    check_fields(algorithm, problem, clients, x, y)

    remote, worked = isinstance(clients, RemoteClients), clients.local_steps is not None
    carry = first_carry(algorithm, x, y, len(clients), remote)
    desk = open_desk(algorithm, problem, x, y, clients.examples(), worked, len(clients), remote)
    carry = carry._replace(desk=desk)
    identity = {
        "algorithm": type(algorithm).__name__,
        "clients": len(clients),
        "cohort": cohort,
        "key": np.asarray(jax.random.key_data(key)).tolist(),
        **hyperparameters(algorithm),
    }
    if clients.capacity is not None:
        identity["capacity"] = hashlib.sha256(clients.capacity.tobytes()).hexdigest()
    chosen: Engine = engine or Local()
    if (clock := getattr(chosen, "clock", None)) is not None:
        said = repr(clock)
        identity["clock"] = said if len(said) < 500 else hashlib.sha256(said.encode()).hexdigest()
    plan = Plan(rounds, eval_every or rounds, checkpoint_every or eval_every or rounds, path, identity)
    hosts.here.saved = ""
    if hosts.count() > 1:
        parts = {"engine": repr(chosen) if isinstance(chosen, Local) else type(chosen).__name__}
        parts |= {"resume": str(resume), "metrics": ", ".join(sorted(metrics or {}))}
        hosts.require_same(parts | _described(plan, clients, x, y))
    fresh = lambda: resume or path is None or not path.exists()  # noqa: E731
    taken = "a new file, unless resume=True continues from it"
    hosts.decide(lambda: require(fresh(), "checkpoint", str(path), taken))
    evaluation = Evaluation(metrics or {}, x_fixed, y_fixed)
    loop = Loop(plan, evaluation, callbacks, algorithm, here=not remote)
    if count_flops:
        held = submodels.classes(algorithm, problem, clients, x, y)
        loop.costs = known_flops(algorithm, problem, clients, x, y, held)
        loop.ledger.flops = None if loop.costs is None else 0
    if resume:
        carry = loop.restore(carry)
    run = chosen.start(algorithm, problem, clients, cohort, key, carry)
    try:
        return loop.play(run, carry)
    finally:
        run.close()


def _described(plan: Plan, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> dict[str, Any]:
    """What several processes must have in common; but for the samples, of which each may have only its own."""
    sizes = (clients.outer.size, clients.inner.size, clients.local_steps) if isinstance(clients, Clients) else ()
    return {
        **plan.identity,
        "rounds": plan.rounds,
        "eval_every": plan.eval_every,
        "checkpoint_every": plan.save_every,
        "checkpoint": "None" if plan.path is None else "given",
        "x0": _digest(x),
        "y0": _digest(y),
        "clients' weights": _digest(clients.weights),
        "clients' numbers of samples or local steps": _digest(sizes),
        "jax_enable_x64": jnp.result_type(float) == np.float64,
        "JAX's backend": jax.default_backend(),
    }


def _digest(tree: PyTree) -> str:
    """A word that stands for a tree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype}{array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()[:16]


def _as_key(key: object) -> Array:
    """A JAX key from a seed or a key."""
    if isinstance(key, Integral) and not isinstance(key, bool):
        return jax.random.key(int(key))
    is_key = isinstance(key, Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ()
    require(is_key, "key", key, "a whole number or a key made by jax.random.key")
    assert isinstance(key, Array)
    return key


def _check_start(name: str, given: PyTree, variable: PyTree) -> None:
    require(bool(jax.tree.leaves(variable)), name, given, "a pytree with at least one floating array")
    require(not nonfinite_leaves(variable), name, nonfinite_leaves(variable), "finite in every leaf")
