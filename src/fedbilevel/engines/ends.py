"""Compare the outer loss of all clients at the end of a run with the loss at an earlier point.

The rows of the history cannot always tell which of the two is larger. A row has the losses of the clients that a round
asked, on the samples that they drew, and the loss "at the start" is that of the first round alone. With small cohorts
and batches, the noise in these losses may be larger than the change of the loss in the run. Moreover, y may not be
trained at the earlier point: if y is then trained at the same x, the outer loss can rise, although no step on x is
wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.core.client import Clients
from fedbilevel.core.metrics import text
from fedbilevel.core.problem import Minimax, Padded, Problem, SimpleBilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree, nbytes, on_device
from fedbilevel.machinery.kept import compiled

BLOCK = 256  # the largest number of samples in a block, except for a loss that takes all of a client's samples
STACK = 2**22  # the largest number of bytes of a stack of several blocks, with a copy of the variables for each sample
PADDED = 4  # short blocks that need several stacks get several lengths if one would multiply their samples by more
HELD = 2**24  # inner samples whose stacks, with padding, have at most this many bytes stay in memory while y is trained
WORSE = 1e-3  # a smaller relative difference of two losses is treated as no change
SETTLED = 0.1  # y counts as trained if the norm of the inner gradient is at most this share of the norm at first
TRAINED = 1e-6  # training stops at this share, or earlier if rounding allows no further progress
EVALUATIONS = 500  # the largest number of inner gradients for the training of y


class Ends(NamedTuple):
    """Hold the outer loss Σ p_i f_i of all clients on all their samples, at an earlier point and at the end."""

    start: float  # the loss at an earlier point, such as the start
    end: float
    # The loss at the earlier x with a trained y. This is `start` if `start` is not below `end`, or if y could not be
    # trained.
    trained: float

    @property
    def above(self) -> bool:
        """Return whether the loss at the end is above the earlier loss by more than rounding, or is not finite."""
        return above(self.end, self.start)

    @property
    def worse(self) -> bool:
        """Return whether the loss at the end is above both losses at the earlier x: with its y and with a trained y."""
        return self.above and above(self.end, self.trained)

    def text(self, column: str) -> str:
        """Return a sentence about a run that ended with a larger loss than it started with.

        It says whether the loss is larger only since y was not trained at the start. `column` is the loss's name.
        """
        start, end, trained = (text(column, value) for value in self)
        where = f"{column} of all clients on all their samples ended at {end}"
        if not self.worse:
            return f"{where}, above {start} at the start, where y was not trained: with y trained there it is {trained}"
        with_y = f" (and worse than {trained}, its value there with y trained)" if self.trained > self.start else ""
        return f"{where}, worse than {start} at the start{with_y}"


def above(loss: float, other: float) -> bool:
    """Return whether a loss is above `other` by more than rounding, or is not finite."""
    return not loss <= other + WORSE * abs(other)


def comparable(problem: Problem) -> bool:
    """Return whether the point with the lower outer loss is the better one.

    This is not so for minimax problems, whose inner variable should raise the outer loss, nor for simple bilevel
    problems, where the inner loss takes precedence.
    """
    return not isinstance(problem, Minimax | SimpleBilevel)


class Spent(NamedTuple):
    """Hold the cost of a run: its number of gradients, and their batch size (None: all samples of a client).

    The batch size is a field of the method. A part of the method may compute gradients on all samples. Each of them
    counts as a gradient on a batch here, so that `passes` is then too small.
    """

    gradients: int
    batch_size: int | None

    def passes(self, rows: Ragged) -> float:
        """Return the cost of the run as a number of gradients on all samples of all clients."""
        samples = int(rows.size.sum())
        return self.gradients * (1 / len(rows.size) if self.batch_size is None else self.batch_size / samples)


def affordable(clients: Clients, spent: Spent) -> bool:
    """Return whether two evaluations of the outer loss take at most about a third of the time of a run.

    This assumes that a gradient of a loss takes at least three times as long as its value.
    """
    return spent.passes(clients.outer) >= 2


def affordable_gradients(clients: Clients, spent: Spent) -> int:
    """Return how many inner gradients on all samples take a sixth of the time of a run, EVALUATIONS at most."""
    return min(EVALUATIONS, int(spent.passes(clients.inner) / 6))


def losses_at(problem: Problem, clients: Clients, name: str, points: list[tuple[PyTree, PyTree]]) -> list[float]:
    """Compute Σ p_i f_i or Σ p_i g_i over all clients at each point (x, y), in blocks of samples, summed in float64.

    Args:
        problem: the prepared problem, whose losses take only the floating arrays of x and y.
        clients: the population.
        name: the loss, "outer" or "inner".
        points: points (x, y) of the same shapes.
    """
    local, loss = problem.local is not None, getattr(problem, name)

    def each(x: PyTree, y: PyTree, stacked: PyTree) -> Array:
        return jax.vmap(loss, (0 if local else None, None, 0))(x, y, stacked)

    sums, programs = np.zeros(len(points)), {}
    x, y = points[0]
    variables = nbytes(y) + nbytes(x) // (len(clients) if local else 1)
    for owner, stacked, weights in blocks(clients, name, name in problem.whole, variables):
        for place, (x, y) in enumerate(points):
            own = jax.tree.map(lambda leaf, owner=owner: leaf[owner][:, None], x) if local else x
            given = on_device((own, y, stacked))
            if (kind := kind_of(stacked)) not in programs:
                key = problem.key and (name, "losses of blocks", kind, problem.key)
                programs[kind] = compiled(each, *given, key=key)
            sums[place] += np.vdot(weights, np.asarray(programs[kind](*given), np.float64))
    return sums.tolist()


class Descent(NamedTuple):
    """Hold the end of a descent in y at a fixed x.

    Args:
        y: the last y.
        first: the inner loss Σ p_i g_i of all clients at the first y.
        last: this loss at the last y.
        settled: whether the norm of the gradient has fallen to a tenth, so that y counts as trained.
    """

    y: PyTree
    first: float
    last: float
    settled: bool


def descent(problem: Problem, clients: Clients, x: PyTree, y: PyTree, evaluations: int) -> Descent:
    """Lower the inner loss of all clients in y at a fixed x on all samples, by nonlinear conjugate gradients.

    Args:
        problem: the prepared problem, whose losses take only the floating arrays of x and y; clients share x.
        clients: the population.
        x: the fixed x.
        y: the first y.
        evaluations: the number of gradients after which the descent stops at the end of a step.
    """
    from scipy.optimize import minimize  # rarely used; its import takes a fifth of the library's

    start, shaped = ravel_pytree(y)
    stacks = reread(clients, "inner", "inner" in problem.whole, nbytes((x, y)))
    programs: dict[Hashable, Callable[..., Any]] = {}
    x, done = on_device(x), 0

    def total(flat: Array, x: PyTree, stacked: PyTree, weights: Array) -> tuple[Array, Array]:
        losses = jax.vmap(problem.inner, (None, None, 0))(x, shaped(flat), stacked)
        return weights @ losses, losses

    def slope(point: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal done
        done, value, gradient = done + 1, 0.0, np.zeros(start.size)
        flat = jax.device_put(point.astype(start.dtype))
        for stacked, weights in stacks():
            if (kind := kind_of(stacked)) not in programs:
                key = problem.key and ("inner gradients of blocks", kind, problem.key)
                programs[kind] = compiled(jax.value_and_grad(total, has_aux=True), flat, x, stacked, weights, key=key)
            (_, losses), slopes = programs[kind](flat, x, stacked, weights)
            value += np.vdot(weights, np.asarray(losses, float))  # in float64, since line searches compare values
            gradient += np.asarray(slopes, float)
        return value, gradient

    def stop_at_limit(_: np.ndarray) -> None:
        if done >= evaluations:
            raise StopIteration

    first = np.asarray(start, float)
    begin, gradient = slope(first)
    steep = np.linalg.norm(gradient)
    options = {"norm": 2, "gtol": TRAINED * steep, "maxiter": evaluations}
    found = minimize(slope, first, jac=True, method="CG", callback=stop_at_limit, options=options)
    settled = bool(np.linalg.norm(found.jac) <= SETTLED * steep)
    return Descent(shaped(jnp.asarray(found.x, start.dtype)), begin, float(found.fun), settled)


def reread(clients: Clients, name: str, whole: bool, variables: int) -> Callable[[], Iterable[tuple[PyTree, Array]]]:
    """Return a function that yields the (samples, weights) of `blocks` on the device, for several passes.

    If the stacks of all samples have at most HELD bytes, they stay on the device between the passes.
    """

    def read() -> Iterator[tuple[PyTree, Array]]:
        return (on_device((stacked, weights)) for _, stacked, weights in blocks(clients, name, whole, variables))

    held, size = [], 0
    for stack in read():
        held.append(stack)
        size += nbytes(stack)
        if size > HELD:
            return read
    return lambda: held


def blocks(clients: Clients, name: str, whole: bool, variables: int) -> Iterator[tuple[np.ndarray, PyTree, np.ndarray]]:
    """Divide the samples of each client into blocks, and yield stacks of blocks of equal length.

    A stack has one block, or as many blocks as together have at most BLOCK samples. If samples and variables are small,
    a stack has more blocks, up to STACK bytes, so that many small clients need few stacks. In this limit, each sample
    counts with its own bytes and the bytes of the variables, because a loss computes about as many intermediate values
    for each sample.

    A stack is yielded as (owner, samples, weights). `owner` has the client of each block, as an array of shape
    (blocks,). `samples` has leaves of shape (blocks, length, ...), and is `Padded` if blocks are shorter than this
    length, which is that of the longest block. If this would make many stacks of mostly padding, blocks are padded to
    powers of 4 instead. `weights`, of shape (blocks,), are p_i times the block's share of its client's samples, and 0
    for blocks that only fill up a stack.

    Args:
        clients: the population whose samples are read.
        name: the loss whose samples are read, "outer" or "inner".
        whole: whether a block has all samples of its client.
        variables: the number of bytes of the variables (x, y) at which a client's loss is evaluated.
    """
    rows: Ragged = getattr(clients, name)
    longest = int(rows.size.max())
    width = longest if whole else min(longest, BLOCK)
    count = -(-rows.size // width)
    owner = np.repeat(np.arange(len(count)), count)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * width
    size = np.minimum(width, rows.size[owner] - offset)
    weight = clients.weights[owner] * size / rows.size[owner]
    bytes_of_sample = nbytes(rows.example()) + variables
    fitting = max(BLOCK, STACK // max(1, bytes_of_sample))  # the number of samples in a stack of several blocks
    short, length = size < width, np.full(len(size), width)
    if width * np.sum(short) > max(fitting, PADDED * np.sum(size[short])):
        length[short] = np.minimum(width, 4 ** np.ceil(np.log2(size[short]) / 2))

    for padded, to in sorted(set(zip(short.tolist(), length.tolist(), strict=True))):
        those = np.flatnonzero((short == padded) & (length == to))
        stacks = -(-len(those) // max(1, fitting // to))
        together = -(-len(those) // stacks)  # stacks of equal size, so that few blocks only fill up a stack
        for first in range(0, len(those), together):
            chosen = np.resize(those[first : first + together], together)
            inside = np.minimum(np.arange(to), size[chosen][:, None] - 1)
            index = rows.start[owner[chosen]][:, None] + offset[chosen][:, None] + inside
            samples = jax.tree.map(lambda leaf, index=index: np.asarray(leaf[index]), rows.values)
            if padded:
                samples = Padded(samples, np.arange(to) < size[chosen][:, None])
            counted = np.arange(together) < len(those) - first
            yield owner[chosen], samples, np.where(counted, weight[chosen], 0)


def kind_of(stacked: PyTree) -> Hashable:
    """Return what a program for a stack depends on: whether its blocks are padded, their number, and their length."""
    return isinstance(stacked, Padded), jax.tree.leaves(stacked)[0].shape[:2]
