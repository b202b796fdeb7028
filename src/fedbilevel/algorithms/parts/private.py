"""A method whose clients reply under local differential privacy, as sites of a federation do, but in a simulation.

The noise of a reply is drawn from the key that the phase gets, which is another for each client, round and exchange,
and from the number of the client's reply. Clipping and noise are computed in the run's float type: float32, or float64
under x64. Metrics of clients are dropped, as a site sends none. In their place are, by phase, the mean norm of replies
before clipping, its quantiles, and the share that is longer than the clip. They are exact, so that a clip can be chosen
by them, and not covered by ε: only a simulation, which has the samples anyway, can tell them. Quantiles are made of the
shares of replies that are no longer than some bounds, since nothing but sums over clients leaves an exchange. Counts of
work stay: the simulated clock needs them, and the time that a reply takes is not hidden at a site either.

The account: a client counts its own replies. Where it cannot keep a count, in fresh cohorts and where clients hold
submodels, each exchange counts for every client: an upper bound. There a method has to give each exchange a key of its
own: two replies of a client by one key would have the same noise. A client that is out of budget is not absent, as in a
federation: the run ends (engines/execution.py), since a cohort of nobody has no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.parts.layers import Ask, Asked, Inside, Kept, Layer, slots_of
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client
from fedbilevel.core.config import static
from fedbilevel.core.fed import Reply, Total
from fedbilevel.core.privacy import Privacy, norm_of, private_part, vector_of
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

NOISE = 0x6E6F6973  # of a phase's key, the stream of the noise
BOUNDS = 2.0 ** (np.arange(-32, 33) / 4)
"""Of norms, in clips, for quantiles: four in an octave, from C/256 to 256 C."""
QUANTILES = (10, 50, 90)  # per cent


class Private(Privacy, Layer):
    """The terms of every client, as a layer: replies are clipped and noised at each client.

    Args:
        counts: whether clients count their replies; False where they can keep nothing between rounds.
    """

    kind, place, needs, cannot = "private", "privacy", "noise", "cannot have noise"

    counts: bool = static(default=True)
    _vectors = True

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> PyTree:
        """Exchanges so far whose replies the clients did not count."""
        return jnp.zeros((), jnp.int32)

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """Replies so far."""
        return jnp.zeros((), jnp.int32) if self.counts else None

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        return ask(asked), kept + int(asked.fresh is not None or not self.counts)

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        reply, number = run(asked, client), jnp.zeros((), jnp.int32) if kept is None else kept
        stream = jax.random.fold_in(jax.random.fold_in(asked.key, NOISE), number)
        sent = self.noised(reply.update, lambda u: jax.random.normal(stream, u.shape, u.dtype), jnp)
        norm = norm_of(vector_of(private_part(reply.update), jnp), jnp)
        clipped = (norm > self.clip).astype(norm.dtype)
        within = (norm <= self.clip * jnp.asarray(BOUNDS)).astype(norm.dtype)
        name = asked.phase
        metrics = {f"reply_norm.{name}": norm, f"clipped.{name}": clipped, f"within.{name}": within}
        return reply._replace(update=sent, metrics=metrics), None if kept is None else number + 1


def quantiles(name: str, shares: Sequence[float], clip: float) -> dict[str, float]:
    """Return the quantiles of the norms of replies, as columns of the history.

    Between two bounds the logarithms of norms count as uniform. A quantile beyond the bounds is left out.

    Args:
        name: "within.PHASE".
        shares: of replies that are no longer than each of BOUNDS times the clip.
        clip: C.
    """
    found = {}
    for percent in QUANTILES:
        above = int(np.searchsorted(shares, percent / 100))
        if 0 < above < len(shares):
            low, high = shares[above - 1 : above + 1]
            part = (percent / 100 - low) / (high - low)
            norm = clip * BOUNDS[above - 1] ** (1 - part) * BOUNDS[above] ** part
            found[f"reply_norm.{name.removeprefix('within.')}.p{percent}"] = float(norm)
    return found


def replies_at_most(state: Any, clients: PyTree) -> int:
    """Return how many replies have left the client with the most of them, by the states of the server and of all
    clients; where clients do not count, at most so many."""
    return sum(int(jnp.max(count)) for count in slots_of((state, clients), "private"))
