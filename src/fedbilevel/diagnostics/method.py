"""Check a method: run it in every way that it supports, and compare the results."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.parts.adaptive_steps import adapted, adaptive
from fedbilevel.algorithms.parts.layers import Layered, layered, layers_at
from fedbilevel.algorithms.parts.memory import Asynchronous
from fedbilevel.algorithms.parts.own_leaves import serves_mixed
from fedbilevel.core.algorithm import Algorithm, check_algorithm
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import CheckError, NonFiniteError, UnsupportedError, require, require_count
from fedbilevel.core.facts import No
from fedbilevel.core.hyperparameters import entries, replaced
from fedbilevel.core.own_y import path_of
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.problem import Bilevel, SingleLevel
from fedbilevel.core.projections import box
from fedbilevel.core.tree import PyTree, is_floating, nbytes, split
from fedbilevel.diagnostics.report import LONGEST, CheckReport, NamedCheck, report_of
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.history import Result
from fedbilevel.engines.local.engine import Local
from fedbilevel.engines.reference import Reference
from fedbilevel.engines.solve import solve
from fedbilevel.tasks.quadratic import quadratic
from fedbilevel.wording import in_a_line

TOLERANCE = 1e-10
"""The largest allowed difference of results in float64; see `difference`.

Engines add numbers in different orders, which changes a sum by some units of rounding, 2e-16. Many local steps or an
ill-conditioned system can multiply this difference by a few thousand. A mistake in a method causes a far larger
difference."""

FEATURES = {"submodels": "clients of limited capacity", "local_x": "an x that clients keep"}
"""Features that depend on the problem. For them, the method's declaration is reported, and nothing is run."""

IN_BOX = 0.1
"""The box in which x is kept ends after this share of the way that x moves in a run without a box."""

ROUNDS_TO_REST = 2000
SOLVED = 1e-6  # a quadratic problem is considered solved if the relative error of x is at most this


@dataclass(frozen=True)
class Runs:
    """Make runs of one method on one problem, from the same start, so that their results can be compared."""

    method: Algorithm
    problem: Any
    clients: Clients
    x0: PyTree
    y0: PyTree
    rounds: int
    key: int

    def run(self, engine: Engine, **options: Any) -> Result:
        """Return the result of a run, of `rounds` rounds if the options do not say otherwise."""
        options = {"rounds": self.rounds, "key": self.key, "clients": self.clients, **options}
        clients = options.pop("clients")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a few rounds need not converge
            return solve(self.method, self.problem, clients, self.x0, self.y0, engine=engine, **options)


def check_method(
    method: Algorithm, problem: Any, clients: Clients, x0: PyTree, y0: PyTree = None, *, rounds: int = 3, key: int = 0
) -> CheckReport:
    """Run a method in every way that it supports, and compare the results: a test of a method of your own in one call.

    These checks are made:

    - Rounds move x or y, and the state stays finite.
    - A seed repeats a run to the bit, also if it is resumed from a checkpoint. Another seed gives another run if the
      method has a batch size.
    - `Reference`, which computes one client after the other without vectorising, and `Local`, with all clients at once,
      one by one and streamed, have the same state and costs, and the ledger has the bytes of the replies. The same
      holds for a cohort of half the clients, and for a federation over Flower in this process, if Flower is installed.
    - Late replies and noised replies work, or the method refuses them.
    - If leaves of y are each client's own, engines agree. With a single client, fixed step sizes and no layer that
      compresses, replaces the mean or waits for fewer replies, the run ends where it ends with a shared y: otherwise
      the variables or the step sizes in `Allows.own_y` are wrong.
    - If x is kept in a box, engines agree, and every copy of x in the state is in the box, as x is.
    - With the fact `bias="nothing"`, and full batches, the method ends at the solution of a quadratic problem whose
      clients differ in losses, weights and numbers of samples.

    A check counts as refused if the method declares that it does not support what is checked, or if the run raises
    `UnsupportedError`. Every other error is a failure.

    Everything is computed in float64, whatever the dtypes of x0 and y0 are. States may differ by 1e-10, relative to the
    largest entry of a leaf or to 1, whichever is larger. A loss that itself computes in float32 cannot agree so well.
    Take small data of clients that differ, and that have unequal weights and numbers of samples, since equal clients
    hide mistakes. If the method lacks the fact `bias="nothing"`, the checks do not show whether it solves the problem:
    then compare the result of `solve` with a solution that you know.

    Args:
        method: the method; a step size that is None adapts during the run, as in `solve`.
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
    with jax.enable_x64(True):
        runs = Runs(method, problem, clients, in_float64(x0), in_float64(y0), rounds, key)
        return report_of(with_layers(method), checks(runs, runs.run(Local())))


def with_layers(method: Algorithm) -> str:
    """Return the name of a method and the names of its layers."""
    layers = ", ".join(type(layer).__name__ for layer in layers_at(method))
    return f"{method.label} with {layers}" if layers else method.label


def in_float64(tree: PyTree) -> PyTree:
    """Return a tree with its floating arrays and numbers in float64."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64) if is_floating(leaf) else leaf, tree)


def checks(runs: Runs, plain: Result) -> Iterator[NamedCheck]:
    """Yield all checks of a method; `plain` is the result of a run on `Local`."""
    asks, half = runs.method.asks, max(1, len(runs.clients) // 2)
    allows = adaptive(runs.method, runs.problem).allows  # as `solve` runs the method; adaptive steps refuse noise
    yield "rounds move the state", lambda: moved(runs, plain)
    yield "a seed repeats a run", lambda: repeated(runs, plain)
    yield "another seed", lambda: another_seed(runs, plain)
    yield "one client after the other", lambda: one_by_one(runs, plain)
    yield "chunks of one client", lambda: compared(plain, runs.run(Local(chunk=1)))
    together = No("its rounds do not wait for all clients")
    streamed = lambda: compared(plain, runs.run(Local(stream=True)))  # noqa: E731
    yield "streamed samples", together if asks.asynchronous else streamed
    everyone = No("its rounds need all clients")
    cohort = lambda: compared(runs.run(Local(), cohort=half), runs.run(Reference(), cohort=half))  # noqa: E731
    yield f"a cohort of {half}", cohort if asks.cohorts else everyone
    yield (
        "over Flower",
        (together if asks.asynchronous else not_over_flower(runs)) or (lambda: over_flower(runs, plain)),
    )
    waits = together if asks.asynchronous else adaptive(uncompressed(runs.method), runs.problem).allows.late
    yield "late replies", waits if isinstance(waits, No) else lambda: late(runs, half)
    yield "noised replies", allows.noise if isinstance(allows.noise, No) else lambda: noised(runs)
    facts = type(runs.method).facts
    claims = facts is not None and facts.bias == "nothing" and isinstance(runs.problem, Bilevel)
    unclaimed = No('its facts do not have bias="nothing", or the problem is not a Bilevel problem')
    yield "the solution of a quadratic problem", (lambda: solved(runs)) if claims else unclaimed
    for name, words in FEATURES.items():
        allowed = getattr(allows, name)
        yield words, allowed if isinstance(allowed, No) else lambda: ""
    own, in_set = allows.own_y, allows.project_x
    yield "leaves of y that are each client's own", own if isinstance(own, No) else lambda: with_own_leaves(runs)
    yield "an x in a set", in_set if isinstance(in_set, No) else lambda: in_a_box(runs, plain)


def uncompressed(method: Algorithm) -> Algorithm:
    """Return a method without its compressor.

    A method with a compressor allows no late replies, since its replies are differences. But `Asynchronous` can be put
    around it: the two then share what they keep of the last replies.
    """
    return replace(method, coded=None) if isinstance(method, Layered) else method


def moved(runs: Runs, plain: Result) -> str:
    """Check that x or y moved, and return by how much; without a y0, only x counts.

    Without a y0, y is not a variable, but may be an average of x, as for simple bilevel problems.
    """
    start = [np.asarray(leaf) for leaf in jax.tree.leaves((runs.x0, runs.y0))]
    end = [np.asarray(leaf) for leaf in jax.tree.leaves((plain.x, None if runs.y0 is None else plain.y))]
    most = max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(end, start, strict=True))
    if not 0 < most < float("inf"):
        raise CheckError(f"after {runs.rounds} rounds x and y have moved by {most}")
    return f"by {most:.1g}"


def repeated(runs: Runs, plain: Result) -> str:
    """Check that a run that is interrupted before its last round and resumed ends at the same state."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run"
        runs.run(Local(), rounds=runs.rounds - 1, checkpoint=checkpoint)
        resumed = runs.run(Local(), checkpoint=checkpoint, resume=True)
    try:
        return compared(plain, resumed, exact=True) + ", also resumed from a checkpoint"
    except CheckError as error:
        compared(plain, runs.run(Local()), exact=True)  # raises an error if two plain runs differ, too
        raise CheckError(f"resumed from a checkpoint: {error}") from error


def another_seed(runs: Runs, plain: Result) -> str:
    """Check that a method with a batch size draws other samples with another seed."""
    other = runs.run(Local(), key=runs.key + 1)
    pairs = zip(leaves(plain), leaves(other), strict=True)
    if any(not np.array_equal(a, b) for (_, a), (_, b) in pairs):
        return "gives another run"
    if max(runs.clients.outer.size.max(), runs.clients.inner.size.max()) == 1:
        return "not checked: each client has only one sample, which makes up every batch"
    sizes = {".".join(map(str, entry.keys)): entry.value for entry in batch_sizes(runs.method)}
    drawn = {name: size for name, size in sizes.items() if size is not None}
    if drawn:
        given = ", ".join(f"{name} = {size}" for name, size in drawn.items())
        raise CheckError(f"it gives the same run with {given}: do `round` and the phases use their keys for draws?")
    return "gives the same run: nothing is drawn"


def batch_sizes(method: Algorithm) -> list[Any]:
    """Return the entries of the method's fields, and of those of its parts, that are batch sizes."""
    return [entry for entry in entries(method) if entry.field.name == "batch_size"]


def one_by_one(runs: Runs, plain: Result) -> str:
    """Check that `Reference` agrees with `Local`, and that the ledger has the bytes of all replies."""
    sizes = list[int]()
    result = runs.run(Reference(on_reply=lambda phase, client, reply: sizes.append(nbytes(reply.update))))
    if not runs.method.asks.asynchronous and sum(sizes) != result.ledger.bytes_up:
        raise CheckError(f"the ledger has {result.ledger.bytes_up} bytes of replies, and the replies have {sum(sizes)}")
    return compared(plain, result)


def not_over_flower(runs: Runs) -> No | None:
    """Return why there can be no federation over Flower with these clients, or None if there can."""
    if find_spec("flwr") is None:
        return No("Flower is not installed")
    if runs.clients.capacity is not None and runs.clients.capacity.ndim > 1:
        return No("a site over Flower has one capacity for all rounds, and these clients have capacities by round")
    return None


def over_flower(runs: Runs, plain: Result) -> str:
    """Check that a federation over Flower in this process agrees in the state and in all costs but time."""
    from fedbilevel.flower import Flower, InProcess, Limits, Site, client_app

    rows, shared = runs.clients, runs.clients.inner is runs.clients.outer
    free = Limits(min_batch_size=1, min_local_samples=1)

    def site(client: int) -> Site:
        inner = None if shared else rows.inner.row(client)
        capacity = None if rows.capacity is None else float(rows.capacity[client])
        data = {"outer": rows.outer.row(client), "inner": inner, "capacity": capacity, "limits": free}
        return Site(id=client, algorithm=runs.method, problem=runs.problem, x0=runs.x0, y0=runs.y0, **data)

    app = client_app(lambda run, node: site(int(node["partition-id"])))
    engine = Flower(grid=InProcess(app, len(rows)))
    return compared(plain, runs.run(engine, clients=RemoteClients.of(rows)), timed=False)


def late(runs: Runs, wait_for: int) -> str:
    """Check that both engines agree if rounds continue after the first replies."""
    asynchronous = replace(runs, method=layered(runs.method, Asynchronous(wait_for=wait_for)))
    return compared(asynchronous.run(Local()), asynchronous.run(Reference()))


def noised(runs: Runs) -> str:
    """Check that the state stays finite if replies are clipped and noised."""
    result = runs.run(Local(), privacy=Privacy(clip=1.0, noise_multiplier=0.1, delta=1e-5))
    return moved(runs, result)


def solved(runs: Runs) -> str:
    """Check that the method, with full batches, ends at the solution of a quadratic problem."""
    task = quadratic(clients=4, condition=3, samples=(2, 4))
    method = runs.method
    for entry in batch_sizes(method):
        method = replaced(method, entry.keys, None)
    own = replace(runs, method=method, problem=task.problem, clients=task.population, x0=task.x0, y0=task.y0)
    try:
        options = {"rounds": ROUNDS_TO_REST, "eval_every": ROUNDS_TO_REST // 2, "metrics": task.metrics}
        before, last = own.run(Local(), **options).history["relative_error"][-2:]
    except NonFiniteError:
        return "not checked: its steps are too long for a quadratic problem with curvatures up to 1"
    if last > SOLVED and last > before / 2:
        raise CheckError(f"after {ROUNDS_TO_REST} rounds the relative error of x is {last:.2g}, and no longer falls")
    return f"relative error of x {last:.1g} after {ROUNDS_TO_REST} rounds"


def with_own_leaves(runs: Runs) -> str | No:
    """Check a run in which the first array of y is each client's own, or all of y if clients solve their own systems.

    With a single client, the leaves that it keeps and the leaves that the server would hold move in the same way.
    """
    problem, alone = runs.problem, not serves_mixed(runs.method)
    if type(problem) is not Bilevel or problem.own is not None or problem.local is not None:
        return ""
    first = next(path_of(path) for path, leaf in jax.tree_util.tree_leaves_with_path(runs.y0) if is_floating(leaf))
    several = replace(runs, problem=problem.with_own(lambda path: alone or path == first))
    try:
        kept = several.run(Local())
    except UnsupportedError as error:
        return No(in_a_line(error, LONGEST))
    each = several.run(Reference())
    close("y", kept.y, each.y)
    found = compared(kept, each)
    # Layers at these places need several replies, or depend on which entries are sent.
    incomparable = any(layer.place in ("rule", "coded", "late") for layer in layers_at(runs.method))
    if adapted(runs.method) or incomparable:
        return found
    rows = runs.clients
    outer = [rows.outer.row(0)]
    single = Clients(outer) if rows.inner is rows.outer else Clients(outer, [rows.inner.row(0)])
    shared, own = (replace(one, clients=single).run(Local()) for one in (runs, several))
    like, kept_y = split(shared.y)[0], split(own.y)[0]
    whole = jax.tree.map(lambda leaf, one: jnp.reshape(leaf, jnp.shape(one)), kept_y, like)
    for name, a, b in (("y", like, whole), ("x", shared.x, own.x)):
        close(f"with a single client and its own leaves of y, {name}", a, b)
    return f"{found}; a single client ends where it ends with a shared y"


def in_a_box(runs: Runs, plain: Result) -> str | No:
    """Check a run in which x is kept in a box that ends a tenth of the way to the x of `plain`."""
    problem = runs.problem
    if not isinstance(problem, Bilevel | SingleLevel) or problem.project_x is not None or problem.local is not None:
        return ""
    start, end = split(runs.x0)[0], split(plain.x)[0]
    bound = jax.tree.map(lambda a, b: a + IN_BOX * (b - a), start, end)
    low, high = (jax.tree.map(side, start, bound) for side in (jnp.minimum, jnp.maximum))
    boxed = replace(runs, problem=problem.with_x_in(box(low, high)))
    try:
        result = boxed.run(Local())
    except UnsupportedError as error:
        return No(in_a_line(error, LONGEST))
    found = compared(result, boxed.run(Reference()))
    held, x = dict(leaves(result)), jax.tree.leaves(split(result.x)[0])
    for path in copies_of_x(plain, end, start):
        if not any(np.array_equal(held[path], leaf) for leaf in x):
            why = "since only x is projected; no round may begin at it"
            raise CheckError(f"state{path} is a copy of x that stays outside of the box, {why}")
    return found


def copies_of_x(result: Result, end: PyTree, start: PyTree) -> list[str]:
    """Return the paths of those leaves of a result's state that are equal to a leaf of the x at its end.

    Only leaves of x that differ between `start` and `end` are compared. Leaves with a single number are left out, since
    they may be equal by chance.
    """
    pairs = zip(jax.tree.leaves(end), jax.tree.leaves(start), strict=True)
    moved = [np.asarray(a) for a, b in pairs if np.size(a) > 1 and np.any(a != b)]
    return [path for path, leaf in leaves(result) if any(np.array_equal(leaf, a) for a in moved)]


def close(name: str, first: PyTree, second: PyTree) -> None:
    """Raise CheckError, which names the quantity, if the floating arrays of two trees differ by more than rounding."""
    pairs = zip(*(jax.tree.leaves(split(tree)[0]) for tree in (first, second)), strict=True)
    worst = max((difference(np.asarray(a), np.asarray(b)) for a, b in pairs), default=0.0)
    if not worst <= TOLERANCE:
        raise CheckError(f"{name} differs by {worst:.2g} of its size; at most {TOLERANCE:.2g} is allowed")


def compared(first: Result, second: Result, exact: bool = False, timed: bool = True) -> str:
    """Return the largest difference between two results, in words.

    Raises:
        CheckError: they differ by more than rounding; with `exact`, at all; or their costs differ, with `timed` also in
            time.
    """
    pairs = list(zip(leaves(first), leaves(second), strict=True))
    worst, path = max((difference(a, b), path) for (path, a), (_, b) in pairs)
    allowed = 0.0 if exact else TOLERANCE
    if not worst <= allowed:
        raise CheckError(f"state{path} differs by {worst:.2g} of its size; at most {allowed:.2g} is allowed")
    costs = [result.ledger if timed else replace(result.ledger, ticks=0) for result in (first, second)]
    if costs[0] != costs[1]:
        raise CheckError(f"the costs differ: {costs[0]} and {costs[1]}")
    return "equal to the bit" if worst == 0 else f"differ by {worst:.1g}"


def leaves(result: Result) -> list[tuple[str, Any]]:
    """Return the leaves of a result's state by their paths."""
    found = jax.tree_util.tree_leaves_with_path(result.state)
    return [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in found if is_number_array(leaf)]


def is_number_array(leaf: Any) -> bool:
    """Return whether a leaf of a state has numbers, and is not the key of a random generator."""
    return not jnp.issubdtype(getattr(leaf, "dtype", np.dtype(float)), jax.dtypes.prng_key)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the larger of 1 and their largest entry; inf if NaN."""
    if a.shape != b.shape or not (np.all(np.isfinite(a)) and np.all(np.isfinite(b))):
        return float("inf")
    size = max(1.0, float(np.max(np.abs(a), initial=0)))
    return float(np.max(np.abs(a.astype(float) - b.astype(float)), initial=0)) / size
