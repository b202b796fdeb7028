"""Say at the end of a run whether y is far from trained, and the columns of the samples differ in scale.

In a linear model the curvature of the inner loss along a weight is proportional to the square of its feature. A step on
y that is stable for all weights is as short as the largest feature requires. If another feature is a hundred times
smaller, each round then removes about a ten-thousandth of the error in its weight, and the history looks as if y were
trained. Samples only give a reason to look. What decides is a descent from the last y: it shows how far the inner loss
can still fall.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NumericalWarning
from fedbilevel.core.metrics import text
from fedbilevel.core.problem import Problem
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.ends import WORSE, descent, losses_at
from fedbilevel.engines.process_group import warn_on_first

ROWS = 1000  # the largest number of samples that are read to compare columns
NUMBERS = 2**22  # the largest number of numbers that are read from an array, unless a single sample has more
UNEVEN = 10  # columns whose scales differ by this factor give a reason to look
FEWEST = 10  # the number of gradients that a descent must be allowed
LEFT = 0.1  # y is far from trained if the inner loss still has to fall by this share of its fall from the first y


def untrained(problem: Problem, clients: Clients, x: PyTree, y0: PyTree, y: PyTree, evaluations: int) -> str:
    """Warn, and return the warning, if columns of the inner samples differ in scale and y is far from trained; else "".

    Args:
        problem: the prepared problem, whose losses take only the floating arrays of x and y; clients share x.
        clients: the population.
        x, y: the end of the run.
        y0: the start of y.
        evaluations: the largest number of inner gradients on all samples for the descent.
    """
    spread = spread_of(clients.inner)
    if spread < UNEVEN or evaluations < FEWEST:
        return ""
    with np.errstate(all="ignore"):  # losses may be infinite
        (begin,) = losses_at(problem, clients, "inner", [(x, y0)])
        found = descent(problem, clients, x, y, evaluations)
        left = found.first - found.last
    if not math.isfinite(begin) or not left > LEFT * (begin - found.last):
        return ""
    if left <= WORSE * abs(found.first):  # for example if y0 was trained by an earlier run
        return ""
    first, last = (text("inner_loss", loss) for loss in (found.first, found.last))
    remark = (
        f"y is not trained to the end: at the last x the inner loss of all clients is {first}, and can fall to {last} "
        f"or lower. A possible cause: columns of the samples differ in scale by a factor of {spread:,.0f}, and the "
        "largest column makes steps on y short. Then give all columns the same scale, for example the standard "
        "deviation 1. Otherwise run more rounds"
    )
    warn_on_first(NumericalWarning(remark))
    return remark


def spread_of(rows: Ragged) -> float:
    """Return the largest over the smallest scale of the columns of samples; at least 1.

    A column is a floating number of each sample: an array with one number for each sample, or an entry of its rows. Its
    scale is the root mean square of its values without zeros, since columns that are mostly 0, such as pixels at the
    border of images, need not be scaled. Columns that are all 0, or not finite, are left out, and so are arrays of more
    dimensions. At most ROWS samples are read, spread evenly over the samples of all clients.
    """
    ends = np.cumsum(rows.size)
    scales = []
    for leaf in jax.tree.leaves(rows.values):
        if leaf.ndim in (1, 2) and jnp.issubdtype(leaf.dtype, jnp.floating):
            count = max(1, min(ROWS, NUMBERS // max(1, math.prod(leaf.shape[1:]))))
            sample = np.unique(np.linspace(0, ends[-1] - 1, count).astype(int))  # numbers of samples, client by client
            owner = np.searchsorted(ends, sample, side="right")
            places = rows.start[owner] + sample - (ends - rows.size)[owner]  # stored arrays may also hold padding
            column = np.asarray(leaf[places], np.float64).reshape(len(places), -1)
            with np.errstate(over="ignore", invalid="ignore"):
                scale = np.sqrt(np.sum(column**2, axis=0) / np.maximum(1, np.sum(column != 0, axis=0)))
            scales += scale[np.isfinite(scale) & (scale > 0)].tolist()
    return max(scales) / min(scales) if scales else 1.0
