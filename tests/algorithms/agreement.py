"""Collect constants of the methods' test files for tests that go through all methods.

AGREEMENT: the cases, by name, in which every engine must give the same numbers.

NEVER_LATE: for a method class that gives its own reason, words of the reason why `Asynchronous` refuses it.

LEARNS: for a method class, the task on which it learns the digits, if this is not hyper_representation.
"""

from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compiled_losses import with_compiled_losses
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel.algorithms.parts.layers import Layered
from fedbilevel.authoring import Algorithm
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks.quadratic import inner, outer, quadratic
from fixed_steps import fixed


class Case(NamedTuple):
    """A method on eight clients of the quadratic task.

    Attributes:
        algorithm: the method; each engine runs two rounds of it.
        work: the local steps of each client, or the bounds of random ones; None: those of the method.
        problem: a problem on the task's samples, whatever their dimensions; None: the problem of the task.
        clock: the clock, for asynchronous methods.
        slow: compiling takes more than some seconds.
        own: clients' own numbers other than their local steps.
    """

    algorithm: Algorithm
    work: Any = None
    problem: fb.Bilevel | fb.SingleLevel | fb.SimpleBilevel | None = None
    clock: fb.Clock = fb.Clock()
    slow: bool = False
    own: Any = None


TWO_PHASES = "two phases, a loop, client state"
"""A case that is compared on every engine. The other cases are compared on one engine, which combines all settings."""
COHORT = 5
"""The size of a cohort of 8 clients; neither the chunks nor the numbers of devices in test_agreement.py divide it."""
LENGTHS = (3, 5, 5, 3, 5, 3, 3, 5)
"""The numbers of outer samples; clients have the inner ones in the reverse order.

Clients are therefore of only two kinds, since Reference compiles each phase for each kind.
"""
WORK = np.array([1, 2, 3, 4, 1, 2, 3, 4])
SINGLE_LEVEL = fb.SingleLevel(lambda x, batch: outer(x, jnp.resize(x, batch["t"].shape[-1]), batch))
MINIMAX = fb.Minimax(lambda x, y, batch: outer(x, y, batch) - 2 * jnp.vdot(y, y))
SIMPLE_BILEVEL = fb.SimpleBilevel(
    lambda x: jnp.vdot(x, x) / 2 + jnp.sum(jnp.abs(x - 0.1)),
    lambda x, batch: inner(jnp.zeros(batch["B"].shape[-1]), jnp.resize(x, batch["c"].shape[-1]), batch),
    fb.projections.box(-0.3, 0.5),
)


def cut(rows: Any, lengths: tuple[int, ...]) -> list[Any]:
    """Return the first samples of each client, as many as `lengths` says."""
    return [jax.tree.map(lambda leaf, n=n: leaf[:n], rows.row(i)) for i, n in enumerate(lengths)]


def unwrapped(algorithm: Algorithm) -> Algorithm:
    """Return the method inside its layers."""
    return algorithm.algorithm if isinstance(algorithm, Layered) else algorithm


@cache
def listed(constant: str, name: str = "") -> dict[Any, Any]:
    """Merge the dictionaries that are called `constant` in the test files of this folder.

    If `name` is given, only files that contain this text are loaded.
    """
    found: dict[Any, Any] = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        text = file.read_text("utf-8")
        if f"\n{constant} = {{" in text and name in text:
            found |= getattr(import_module(file.stem), constant)
    return found


def cases(name: str = "") -> dict[str, Case]:
    """Return all cases or, if `name` is given, only the cases of files that contain this text."""
    return {TWO_PHASES: Case(TwoPhase())} | listed("AGREEMENT", name)


def two_rounds(case: str, engine: Any) -> tuple[Any, Any]:
    """Run two rounds of a case; return the carry with which the third round would begin, and the costs of both."""
    algorithm, work, problem, clock, _, own = cases(case)[case]
    algorithm = fixed(algorithm)
    task = quadratic(clients=8, samples=(5, 5))
    rows, weights = (cut(task.clients.outer, LENGTHS), cut(task.clients.inner, LENGTHS[::-1])), task.clients.weights
    clients = fb.Clients(*rows, weights=weights, local_steps=work, own=own)
    problem = problem or task.problem
    # as in `solve`: only losses that draw see padded batches
    problem = problem.over_batches() if problem.draws else problem
    y0 = None if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else task.y0
    carry = first_carry(algorithm, problem, clients, task.x0, y0)
    cohort = COHORT if algorithm.asks.cohorts else len(clients)
    engine = replace(engine, clock=clock)
    # in the case TWO_PHASES, Reference traces the losses anew in each phase
    if isinstance(engine, fb.Reference) and case != TWO_PHASES:
        problem = with_compiled_losses(problem)
    run = engine.start(algorithm, problem, clients, cohort, jax.random.key(1), carry)
    costs = []
    while int(carry.round) < 2:
        carry, _, round_costs, _ = run.advance(carry, 2 - int(carry.round))
        costs.append(round_costs)
    run.close()
    return carry, jax.tree.map(lambda *leaves: np.concatenate(leaves), *costs)
