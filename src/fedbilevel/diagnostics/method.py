"""Check a method: run it in every way that it supports, and compare the results."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.parts.layers import layered
from fedbilevel.algorithms.parts.memory import Asynchronous
from fedbilevel.core.algorithm import Algorithm, check_algorithm
from fedbilevel.core.card import aligned
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import CheckError, FedbilevelError, require, require_count
from fedbilevel.core.facts import No
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.tree import PyTree, epsilon
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.history import Result
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.solve import solve

ROUNDING = 1e4
"""The largest allowed difference of results, in units of the precision of x; see `difference`."""

FEATURES = {
    "submodels": "clients of limited capacity",
    "local_x": "an x that clients keep",
    "own_y": "leaves of y that are each client's own",
    "project_x": "an x in a set",
}
"""Features that a problem decides about: a method's word for them is reported, and nothing is run."""


@dataclass(frozen=True)
class MethodCheck:
    """Hold the outcome of one check of a method.

    Args:
        name: what was checked.
        outcome: "passed", "failed"; "refused" if the method says that it does not support this; or "allowed" if it says
            that it does, and nothing was run.
        detail: the largest difference, the reason of a refusal, or the error.
    """

    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, repr=False)
class MethodReport:
    """Hold the result of `check_method`; it prints as a table.

    Args:
        method: the label of the method.
        checks: the outcomes, in the order in which they were found.
    """

    method: str
    checks: tuple[MethodCheck, ...]

    @property
    def failed(self) -> tuple[MethodCheck, ...]:
        """Return the checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "failed")

    def __repr__(self) -> str:
        rows = [(check.name, check.outcome, check.detail) for check in self.checks]
        return aligned([(self.method, "", ""), *rows])


@dataclass(frozen=True)
class Runs:
    """Runs of one method from one start, whose results are compared."""

    method: Algorithm
    problem: Any
    clients: Clients
    x0: PyTree
    y0: PyTree
    rounds: int
    key: int

    def run(self, engine: Engine, **options: Any) -> Result:
        """Return the result of a run, of `rounds` rounds if the options do not say otherwise."""
        options = {"rounds": self.rounds, "key": self.key, **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few rounds need not converge
            return solve(self.method, self.problem, self.clients, self.x0, self.y0, engine=engine, **options)

    def compared(self, first: Result, second: Result, exact: bool = False) -> str:
        """Return the largest difference between two results, in words.

        Raises:
            CheckError: they differ by more than rounding; with `exact`, at all.
        """
        pairs = list(zip(leaves(first), leaves(second), strict=True))
        worst, path = max((difference(a, b), path) for (path, a), (_, b) in pairs)
        allowed = 0.0 if exact else ROUNDING * float(epsilon(self.x0, self.y0))
        if not worst <= allowed:
            raise CheckError(f"state{path} differs by {worst:.2g} of its size; allowed are {allowed:.2g}")
        if (counts := (first.ledger, second.ledger))[0] != counts[1]:
            raise CheckError(f"the costs differ: {counts[0]} and {counts[1]}")
        return "equal to the bit" if worst == 0 else f"differ by {worst:.1g}"


def check_method(
    method: Algorithm, problem: Any, clients: Clients, x0: PyTree, y0: PyTree = None, *, rounds: int = 3, key: int = 0
) -> MethodReport:
    """Run a method in every way that it supports, and compare the results: a test of a method of your own in one call.

    These checks are made:

    - Rounds move x or y, and the state stays finite.
    - A seed repeats a run to the bit.
    - `Reference`, which computes one client after the other without vectorising, and `Local`, with all clients at once,
      one by one and streamed, have the same state and costs. So have both for a cohort of half the clients.
    - A run that is resumed from a checkpoint continues to the bit.
    - Late replies and noised replies work, or the method refuses them.

    States may differ by 10⁴ units of rounding, relative to the largest entry of a leaf or to 1, whichever is larger.
    In float32 that is 1e-3, so switch on float64 for a sharp check. Take small data of clients that differ, and that
    have unequal weights and numbers of samples, since equal clients hide mistakes. Whether the method solves the
    problem is not checked: compare the result of `solve` with a solution that you know.

    Args:
        method: the method; steps that are None adapt, as in `solve`.
        problem, clients, x0, y0: as for `solve`, with at least two clients.
        rounds: the number of rounds of each run, at least 2.
        key: the seed of all runs.

    Returns:
        The report, in which no check failed.

    Raises:
        CheckError: a check failed. Its message is the report.
        ConfigurationError: an argument is not allowed, or the first run was refused.
    """
    check_algorithm(method)
    require_count("rounds", rounds)
    require(rounds > 1, "rounds", rounds, "at least 2, since a run is interrupted and resumed")
    require(isinstance(clients, Clients) and len(clients) > 1, "clients", clients, "Clients of at least two")
    runs = Runs(method, problem, clients, x0, y0, rounds, key)
    plain = runs.run(Local())
    report = MethodReport(method.label, tuple(outcome(*check) for check in checks(runs, plain)))
    if report.failed:
        raise CheckError(f"{len(report.failed)} of {len(report.checks)} checks failed\n{report!r}")
    return report


def checks(runs: Runs, plain: Result) -> Iterator[tuple[str, Callable[[], str] | No]]:
    """Yield the name of each check, and a function that returns a detail or raises; or why the method refuses it."""
    allows, half = runs.method.allows, max(1, len(runs.clients) // 2)
    yield "rounds move the state", lambda: moved(runs, plain)
    yield "a seed repeats a run", lambda: runs.compared(plain, runs.run(Local()), exact=True)
    yield "one client after the other", lambda: runs.compared(plain, runs.run(Reference()))
    yield "chunks of one client", lambda: runs.compared(plain, runs.run(Local(chunk=1)))
    yield "streamed samples", lambda: runs.compared(plain, runs.run(Local(stream=True)))
    everyone = No("its rounds need all clients")
    cohort = lambda: runs.compared(runs.run(Local(), cohort=half), runs.run(Reference(), cohort=half))  # noqa: E731
    yield f"a cohort of {half}", cohort if runs.method.asks.cohorts else everyone
    yield "resumed from a checkpoint", lambda: resumed(runs, plain)
    yield "late replies", allows.late if isinstance(allows.late, No) else lambda: late(runs, half)
    yield "noised replies", allows.noise if isinstance(allows.noise, No) else lambda: noised(runs)
    for name, words in FEATURES.items():
        allowed = getattr(allows, name)
        yield words, allowed if isinstance(allowed, No) else lambda: ""


def outcome(name: str, check: Callable[[], str] | No) -> MethodCheck:
    """Run one check."""
    if isinstance(check, No):
        return MethodCheck(name, "refused", check.why)
    try:
        detail = check()
    except FedbilevelError as error:
        return MethodCheck(name, "failed", str(error))
    return MethodCheck(name, "passed" if detail else "allowed", detail)


def moved(runs: Runs, plain: Result) -> str:
    """Check that a state moved, in x or y."""
    start = [np.asarray(leaf) for leaf in jax.tree.leaves((runs.x0, runs.y0))]
    end = [np.asarray(leaf) for leaf in jax.tree.leaves((plain.x, plain.y))]
    most = max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(end, start, strict=True))
    if not 0 < most < float("inf"):
        raise CheckError(f"after {runs.rounds} rounds x and y have moved by {most}")
    return f"by {most:.1g}"


def resumed(runs: Runs, plain: Result) -> str:
    """Check that a run that is interrupted before its last round and resumed ends at the same state."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run"
        runs.run(Local(), rounds=runs.rounds - 1, checkpoint=checkpoint)
        return runs.compared(plain, runs.run(Local(), checkpoint=checkpoint, resume=True), exact=True)


def late(runs: Runs, wait_for: int) -> str:
    """Check that both engines agree where rounds continue after the first replies."""
    asynchronous = replace(runs, method=layered(runs.method, Asynchronous(wait_for=wait_for)))
    return asynchronous.compared(asynchronous.run(Local()), asynchronous.run(Reference()))


def noised(runs: Runs) -> str:
    """Check that the state stays finite where replies are clipped and noised."""
    result = runs.run(Local(), privacy=Privacy(clip=1.0, noise_multiplier=0.1, delta=1e-5))
    return moved(runs, result)


def leaves(result: Result) -> list[tuple[str, Any]]:
    """Return the leaves of a result's state by their paths."""
    found = jax.tree_util.tree_leaves_with_path(result.state)
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in found if is_number_array(leaf)]


def is_number_array(leaf: Any) -> bool:
    """Return whether a leaf of a state holds numbers, not the key of a random generator."""
    return not jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the larger of 1 and their largest entry; inf if NaN."""
    if a.shape != b.shape or not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return float("inf")
    size = max(1.0, float(np.max(np.abs(a), initial=0)))
    return float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0)) / size
