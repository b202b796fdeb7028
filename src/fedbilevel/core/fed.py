"""The only door between an algorithm and its clients: exchanges, replies, and marks on the parts of a reply's update.

The marks are for clients whose replies are clipped and noised (docs/explanation/privacy.md); without privacy they
change nothing. Both sides have them from the algorithm's own code, and the contract of a federation shows them as parts
of the paths; no message decides what a client noises.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree


class Reply(NamedTuple):
    """A client's reply to an exchange, which a phase returns.

    Args:
        update: what is averaged over the cohort: any pytree. Under privacy it is clipped and noised, but for the parts
            that are marked `Public` or `Withheld`.
        state: the client's own next state, which never leaves it; None: it keeps its present state.
        metrics: numbers by name, whose means over clients are in the history and are never fed back.
        gradients: how many gradients on a batch the client computed, for the ledger and the clock. An asynchronous
            exchange asks every client for this number, so that it should not depend on what a loop finds.
        hvps: how many products of a vector with second derivatives the client computed, counted as `gradients` are.
    """

    update: PyTree
    state: PyTree = None
    metrics: dict[str, Array] | None = None
    gradients: int | Array = 0
    hvps: int | Array = 0


Phase = Callable[..., Reply]
"""A phase as a round names it: a method of the algorithm, or of one of its parts, that is marked with `phase`."""

LoopBody = Callable[["Fed", Any, Array], Any]
"""(fed, carry, key) -> carry: what `Fed.repeat` does again and again."""


class Total(NamedTuple):
    """What came of an exchange, summed over the P clients who replied.

    Where clients hold submodels, each entry is the sum over the clients that hold it. An entry that nobody holds is 0,
    and the unbiased mean is (M/P) Σ p_i times the mean of the others.

    Args:
        update: Σ p_i u_i.
        weight: Σ p_i.
        responders: P.
        population: M; where some clients are never available, M' / Σ p_i over the M' others.
        held: of submodels: for each entry of the update, Σ p_i over the clients that hold it.
        rows: where every reply was asked for: the updates, leaves (P, ...), and the weights (P,), 0 for a row that only
            pads the cohort.
    """

    update: PyTree
    weight: Any
    responders: Any
    population: Any
    held: PyTree = None
    rows: Any = None

    @classmethod
    def of_mean(cls, mean: PyTree) -> "Total":
        """Make a total of what is a mean over everyone already."""
        one = jnp.ones(())
        return cls(mean, one, one, 1)

    def mean(self, unbiased: bool = False) -> PyTree:
        """Take the mean that `Fed.mean` promises."""
        if self.held is not None:
            share = self.population / self.responders * self.weight if unbiased else jnp.ones(())

            def mean(leaf: Array, held: Array) -> Array:
                return leaf / jnp.where(held > 0, held, 1) * share.astype(leaf.dtype)

            return jax.tree.map(mean, self.update, self.held)
        if unbiased:
            return jax.tree.map(lambda u: u * (self.population / self.responders.astype(u.dtype)), self.update)
        return jax.tree.map(lambda leaf: leaf / self.weight.astype(leaf.dtype), self.update)


class Means:
    """`Fed.mean` by `Fed.sum`."""

    sum: Callable[..., Total]

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        """Take the mean of what came: see `Fed.mean`."""
        return self.sum(phase, message, key, fresh=fresh).mean(unbiased)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """A part of an update in the form in which it is sent. It is decoded before replies are weighed and summed.

    Args:
        wire: a pytree of arrays, whose bytes the ledger counts.
        decode: wire -> the part of the update; a module's function or a frozen dataclass, so that two are equal.
    """

    wire: PyTree
    decode: Callable[[PyTree], PyTree] = field(metadata={"static": True})


def decoded(update: PyTree) -> PyTree:
    """Decode the parts of an update that are sent otherwise."""
    coded = lambda part: isinstance(part, Coded)  # noqa: E731
    return jax.tree.map(lambda part: part.decode(part.wire) if coded(part) else part, update, is_leaf=coded)


class Fed(Protocol):
    """The exchanges that a round may make. No method gets the value of a single client; layers may, by `sum`."""

    problem: Problem
    """What the server knows of it: the losses and what they are like, without anyone's samples."""

    sampled: bool
    """Whether a round asks a cohort that is drawn, and not everyone."""

    @property
    def repetition(self) -> int | Array:
        """Return the number of the repetition within the innermost `repeat`; outside 0."""
        ...

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        """Send `message` to the cohort, run `phase` there, return the weighted mean of the updates: an exchange.

        Σ p_i u_i / Σ p_i over those who responded; with `unbiased`, Σ (M/P) p_i u_i, whose expectation over uniform
        cohorts of P out of M clients is the mean over the whole population.

        `fresh` = c asks the round's c-th fresh cohort, 0 ≤ c < asks.fresh_cohorts, instead of the round's own: as many
        clients, drawn independently of all other cohorts. What they keep between rounds is out of reach there.
        """
        ...

    def sum(
        self, phase: Phase, message: PyTree, key: Array, *, fresh: int | Array | None = None, each: bool = False
    ) -> Total:
        """Ask as `mean` does, for the total; with `each` for every reply too. For layers: methods ask for means."""
        ...

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        """Return Σ p_i u_i over the first n replies, which end the exchange; each is to its client's last message.

        Idle clients get this message. Busy clients finish their earlier one; that reply counts. A client works on one
        message at a time, and has at most one reply in an exchange. A client that has replied gets its next message
        when the next exchange begins. With n = M every time, and no client lost, this is `mean`.

        A client that is busy with another phase gets this message as soon as it has finished. Its reply to the other
        phase counts in the next `sum_first` of that phase, which then waits for fewer.

        `max_staleness` = s also waits for every client that was asked s or more exchanges of this phase ago, so that no
        reply is older, and for every client that was busy with other phases, or away, for more than s exchanges of this
        phase. Replies that arrive in that time count, too. Only for algorithms that ask for it (`asks`), in which all
        clients take part: there are no cohorts.
        """
        ...

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        """Repeat exchanges: carry ← body(fed, carry, key_i) for i < n, with key_i = fold_in(key, i).

        It ends before the n-th where `until`(carry) has become true.
        """
        ...


class Public(NamedTuple):
    """A part of an update that says nothing of the client's data: it is sent as it is, neither clipped nor noised.

    Only for what would be the same with any other data, of any number of samples: counts that the server's messages and
    the algorithm's fields determine.

    Args:
        public: the part of the update, a pytree.
    """

    public: Any


class Withheld(NamedTuple):
    """A part of an update that tells of the data, and that noise would make useless: under privacy zeros are sent.

    For diagnostics of which 0 means that nothing was met; a method must not rely on them to be right.

    Args:
        withheld: the part of the update, a pytree.
    """

    withheld: Any
