"""Identify a run by its arguments, and list the values that must be the same in all its processes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.engines import fingerprint
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.execution import Execution
from fedbilevel.engines.fingerprint import Fingerprint
from fedbilevel.engines.loop import Loop
from fedbilevel.engines.options import RunOptions

LONGEST = 500  # the largest number of characters of a clock's description; longer descriptions are hashed


def identity_of(execution: Execution, carry: Carry) -> Fingerprint:
    """Take the fingerprint of a run before round 0, without its samples; a checkpoint must agree with it."""
    posed, cohort, clock = execution.posed, execution.cohort, execution.engine.clock
    stated: dict[str, Any] = {"cohort": cohort.size, **({"replacement": True} if cohort.replacement else {})}
    stated["key"] = np.asarray(jax.random.key_data(execution.key)).tolist()
    programs = dict(posed.programs)
    if clock is not None:
        words = repr(clock)
        stated["clock"] = words if len(words) < LONGEST else _hashed(words)
        if callable(arrivals := clock.arrivals):
            programs["Clock.arrivals"] = jax.make_jaxpr(arrivals)(0, 0, execution.key)
        elif arrivals is not None:
            stated["clock's arrivals"] = _hashed(repr(arrivals))
    taken = fingerprint.take(stated, execution.method, posed.problem, posed.clients, posed.x, posed.y, programs)
    evaluation = posed.evaluation
    traced = {name: evaluation.trace(name, posed.x, carry.state.y) for name in evaluation.metrics}
    measured, metrics = {**posed.per_client_programs, **traced}, {**posed.per_client, **evaluation.metrics}
    return replace(taken, metrics=fingerprint.of_metrics(measured, metrics))


def in_common(loop: Loop, options: RunOptions) -> dict[str, Any]:
    """List the values that must be the same in all processes of a run.

    Samples are left out, since a process may have only those of its own clients.
    """
    identity, plan = loop.saver.fingerprint, loop.plan
    metrics = {"metrics": options.metrics, "metrics_per_client": options.per_client}
    return {
        **identity.stated,
        **identity.hashed,
        **{name: str(hashes) for name, hashes in identity.by_round.items()},
        **identity.functions,
        "engine": repr(loop.execution.engine),
        "resume": str(options.resume),
        **{kind: ", ".join(sorted(named or {})) for kind, named in metrics.items()},
        "rounds": plan.rounds,
        "eval_every": plan.eval_every,
        "checkpoint_every": plan.save_every,
        "checkpoint": "None" if options.path is None else "given",
        "jax_enable_x64": jnp.result_type(float) == np.float64,
        "JAX's backend": jax.default_backend(),
    }


def _hashed(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()
