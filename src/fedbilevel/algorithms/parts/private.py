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
federation: the run ends (engines/loop.py), since a cohort of nobody has no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.algorithms.parts.wrappers import KeepingFed, Wrapper
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client
from fedbilevel.core.config import static
from fedbilevel.core.facts import Findings
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.privacy import Privacy, norm_of, private_part, vector_of
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

NOISE = 0x6E6F6973  # of a phase's key, the stream of the noise
BOUNDS = 2.0 ** (np.arange(-32, 33) / 4)
"""Of norms, in clips, for quantiles: four in an octave, from C/256 to 256 C."""
QUANTILES = (10, 50, 90)  # per cent


class ServerState(NamedTuple):
    """The server's state."""

    inside: Any  # the state of the method inside
    uncounted: Array  # exchanges so far whose replies the clients did not count

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class ClientState(NamedTuple):
    """A client's state, kept between rounds."""

    inside: PyTree  # what the method inside has it keep
    replies: Array  # so far


class Private(Wrapper):
    """A method whose replies are clipped and noised at each client.

    Args:
        algorithm: the method.
        privacy: the terms of every client.
        counts: whether clients count their replies; False where they can keep nothing between rounds.
    """

    privacy: Privacy
    counts: bool = static(default=True)

    def init(self, x: PyTree, y: PyTree) -> ServerState:
        return ServerState(self.algorithm.init(x, y), jnp.zeros((), jnp.int32))

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        inside = self.algorithm.client_state(problem, x, y)
        return ClientState(inside, jnp.zeros((), jnp.int32)) if self.counts else inside

    def round(self, fed: Fed, state: ServerState, key: Array) -> ServerState:
        counting = CountingFed(fed, state.uncounted, self.counts)
        inside = self.algorithm.round(counting, state.inside, key)
        return ServerState(inside, counting.kept)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        kept = client.state
        counted = isinstance(kept, ClientState)  # not in a fresh cohort, where what a client keeps is out of reach
        inside, number = kept if counted else (kept, jnp.zeros((), jnp.int32))
        reply = self.algorithm.run_phase(name, replace(client, state=inside), message, key)
        stream = jax.random.fold_in(jax.random.fold_in(key, NOISE), number)
        sent = self.privacy.noised(reply.update, lambda u: jax.random.normal(stream, u.shape, u.dtype), jnp)
        norm = norm_of(vector_of(private_part(reply.update), jnp), jnp)
        within = (norm <= self.privacy.clip * jnp.asarray(BOUNDS)).astype(norm.dtype)
        clipped = (norm > self.privacy.clip).astype(norm.dtype)
        metrics = {f"reply_norm.{name}": norm, f"clipped.{name}": clipped, f"within.{name}": within}
        state = reply.state
        if counted:
            state = ClientState(inside if state is None else state, number + 1)
        return reply._replace(update=sent, state=state, metrics=metrics)

    def finished(self, state: ServerState) -> Any:
        return self.algorithm.finished(state.inside)

    def findings(self, state: ServerState) -> Findings:
        return self.algorithm.findings(state.inside)


class CountingFed(KeepingFed):
    """A `Fed` that counts the exchanges whose replies the clients do not count."""

    def __init__(self, fed: Fed, kept: Array, counts: bool) -> None:
        super().__init__(fed, kept, fed.sampled)
        self.counts = counts

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        self.kept = self.kept + int(fresh is not None or not self.counts)
        return self.fed.mean(phase, message, key, unbiased=unbiased, fresh=fresh)

    def sum_first(self, n: int, phase: Phase, message: PyTree, key: Array, **options: Any) -> PyTree:
        self.kept = self.kept + int(not self.counts)
        return self.fed.sum_first(n, phase, message, key, **options)


def private(algorithm: Algorithm, privacy: Privacy, counts: bool) -> Algorithm:
    """Return a method whose replies are clipped and noised, within the wrappers that it has: what `Asynchronous` keeps
    and sends differences of is then what left a client."""
    if isinstance(algorithm, Wrapper):
        return replace(algorithm, algorithm=private(algorithm.algorithm, privacy, counts))
    return Private(algorithm, privacy=privacy, counts=counts)


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
    own = [node.replies for node in jax.tree.leaves(clients, is_leaf=_keeps) if _keeps(node)]
    servers = [node.uncounted for node in jax.tree.leaves(state, is_leaf=_keeps) if _keeps(node)]
    return sum(int(jnp.max(count)) for count in own + servers)


def _keeps(node: object) -> bool:
    return isinstance(node, ServerState | ClientState)
