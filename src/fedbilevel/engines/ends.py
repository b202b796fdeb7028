"""The outer loss of all clients at the start and at the end of a run, where the rows of its history cannot say which of
the two is larger.

A row has the losses of the clients that a round asked, on the samples that they drew, and the loss "at the start" is
that of the first round alone. Of small cohorts and batches the two may differ by more than the run has gained or lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Minimax, Padded, Problem, SimpleBilevel
from fedbilevel.core.tree import PyTree, on_device
from fedbilevel.machinery.kept import compiled

BLOCK = 256  # samples that are in memory together; a loss that takes all of a client's samples gets them all
WORSE = 1e-3  # relative, of two losses: less is no change


class Ends(NamedTuple):
    """The outer loss of all clients on all their samples."""

    start: float
    end: float

    @property
    def worse(self) -> bool:
        """Whether the loss at the end is above that at the start by more than rounding, or is not finite."""
        return not self.end <= self.start + WORSE * abs(self.start)


def comparable(problem: Problem) -> bool:
    """Tell whether the outer losses of two points tell which is the better one: not where the inner variable is to
    raise the outer loss (minimax), nor where the inner loss decides first (simple bilevel problems)."""
    return not isinstance(problem, Minimax | SimpleBilevel)


def affordable(clients: Clients, gradients: int, batch_size: int | None) -> bool:
    """Tell whether two evaluations take no more than about a third of the time of so many gradients on batches.

    Derivatives of a loss take at least three times as long as its value.
    """
    samples = int(clients.outer.size.sum())
    batch = samples / len(clients) if batch_size is None else batch_size
    return 2 * samples <= gradients * batch


def outer_losses(problem: Problem, clients: Clients, points: list[tuple[PyTree, PyTree]]) -> list[float]:
    """Compute Σ p_i f_i of all clients at each point (x, y), in blocks of samples, summed in float64.

    Args:
        problem: prepared, in the floating arrays of x and y alone.
        points: all of the same shapes.
    """
    local = problem.local is not None

    def each(x: PyTree, y: PyTree, stacked: PyTree) -> Array:
        return jax.vmap(problem.outer, (0 if local else None, None, 0))(x, y, stacked)

    sums, programs = np.zeros(len(points)), {}
    for owner, stacked, weights in blocks(clients, whole="outer" in problem.whole):
        for place, (x, y) in enumerate(points):
            own = jax.tree.map(lambda leaf, owner=owner: leaf[owner][:, None], x) if local else x
            given = on_device((own, y, stacked))
            if (kind := isinstance(stacked, Padded)) not in programs:
                key = problem.key and ("outer losses of blocks", kind, problem.key)
                programs[kind] = compiled(each, *given, key=key)
            sums[place] += np.vdot(weights, np.asarray(programs[kind](*given), np.float64))
    return sums.tolist()


def blocks(clients: Clients, whole: bool) -> Iterator[tuple[np.ndarray, PyTree, np.ndarray]]:
    """Cut the outer samples of each client into blocks, and stack blocks of one length, as many as fit into BLOCK.

    Yields whose they are, (blocks,), samples, leaves (blocks, length, ...), `Padded` where blocks are shorter, and
    weights, (blocks,): p_i times the block's share of its client's samples, 0 for a block that fills up a stack.

    Args:
        clients: whose outer samples are read.
        whole: whether a block has all samples of its client.
    """
    rows = clients.outer
    longest = int(rows.size.max())
    width = longest if whole else min(longest, BLOCK)
    count = -(-rows.size // width)
    owner = np.repeat(np.arange(len(count)), count)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)) * width
    size = np.minimum(width, rows.size[owner] - offset)
    weight = clients.weights[owner] * size / rows.size[owner]

    for short in (False, True):
        those = np.flatnonzero((size < width) == short)
        together = min(len(those), max(1, BLOCK // width))
        for first in range(0, len(those), max(1, together)):
            chosen = np.resize(those[first : first + together], together)
            inside = np.minimum(np.arange(width), size[chosen][:, None] - 1)
            index = rows.start[owner[chosen]][:, None] + offset[chosen][:, None] + inside
            samples = jax.tree.map(lambda leaf, index=index: np.asarray(leaf[index]), rows.values)
            if short:
                samples = Padded(samples, np.arange(width) < size[chosen][:, None])
            counted = np.arange(together) < len(those) - first
            yield owner[chosen], samples, np.where(counted, weight[chosen], 0)
