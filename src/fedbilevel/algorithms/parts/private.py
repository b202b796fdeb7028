"""Simulate clients that reply under local differential privacy, as sites of a federation do.

The noise of a reply is drawn from the key of the phase, which differs between clients, rounds and exchanges, and from
the number of the client's reply. Clipping and noise are computed in the float type of the run: float32, or float64 if
JAX's `jax_enable_x64` is on. The metrics of clients are dropped, since a site would not send them. They are replaced,
for each phase, by the mean norm of replies before clipping, quantiles of this norm, and the share of replies that are
longer than the clip. These numbers are exact, so that a clip can be chosen by them. The guarantee of ε does not cover
them: only a simulation can report them, since it has the samples anyway. Quantiles are computed from the shares of
replies whose norm is at most some bounds, since only sums over clients leave an exchange. Counts of work are kept: the
simulated clock needs them, and a site does not hide the time of a reply either.

Each client counts its replies for the privacy budget. A client cannot keep a count in fresh cohorts, nor if clients
hold submodels. In these cases every exchange is counted as a reply of every client, which is an upper bound. A method
must then use a different key for every exchange, since two replies of a client with the same key would have the same
noise. In a federation, a client without remaining budget is absent. Here the run ends instead (engines/execution.py),
since an empty cohort has no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.algorithms.parts.layers import Ask, Asked, Inside, Kept, Layer
from fedbilevel.algorithms.parts.slots import slots_of
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client
from fedbilevel.core.config import static
from fedbilevel.core.fed import Reply, Total
from fedbilevel.core.privacy import Privacy, norm_of, private_part, vector_of
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

NOISE = 0x6E6F6973  # the number that derives the key of the noise from the key of a phase
BOUNDS = 2.0 ** (np.arange(-32, 33) / 4)
"""Bounds of norms for quantiles, in units of the clip C: four for each doubling, from C/256 to 256 C."""
QUANTILES = (10, 50, 90)  # in per cent


class Private(Privacy, Layer):
    """Clip the replies of every client and add noise to them, under the same terms of privacy for all clients.

    Args:
        counts: whether clients count their replies; False if clients cannot keep a state between rounds.
    """

    kind, place, needs, cannot = "private", "privacy", "noise", "cannot have noise"
    hides_losses = True
    tells = (
        "the client clips its reply and adds noise, and also sends the exact norm of the reply before clipping; this "
        "layer is for simulations"
    )

    counts: bool = static(default=True)
    _vectors = True

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> PyTree:
        """Return 0: the server will count the exchanges whose replies the clients do not count."""
        return jnp.zeros((), jnp.int32)

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """Return 0, a client's number of replies before round 0; None if clients do not count their replies."""
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

    The logarithms of norms are interpolated linearly between two bounds. A quantile outside of the bounds is left out.

    Args:
        name: "within.PHASE", for the phase PHASE.
        shares: for each of BOUNDS, the share of replies whose norm is at most this bound times C.
        clip: C, the clip.
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
    """Return an upper bound of the number of replies of any client, from the states of the server and of all clients.

    If all clients count their replies, the bound is exact.
    """
    return sum(int(jnp.max(count)) for count in slots_of((state, clients), "private"))
