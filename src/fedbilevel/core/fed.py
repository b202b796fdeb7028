"""Define how an algorithm reaches its clients: exchanges, replies, and marks on the parts of a reply's update.

An algorithm has no other way to reach its clients. The marks `Public` and `Withheld` matter if clients clip their
replies and add noise (docs/explanation/privacy.md); without privacy they have no effect. Server and clients read the
marks from the algorithm's own code, and the contract of a federation shows them in the paths of parts. No message of
the server can change which parts a client clips and adds noise to.

A federation's server also uses the mark `Public`, with privacy and without. Public numbers, such as counts, have to be
in the `PublicRange` that is declared with the mark, and are no part of the norms of updates that the server compares.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.errors import require
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree


class Reply(NamedTuple):
    """Hold a client's reply to an exchange; a phase returns it.

    Args:
        update: the pytree that is averaged over the cohort. Under privacy it is clipped and noised, except the parts
            that are marked `Public` or `Withheld`.
        state: the client's own next state, which never leaves the client; None: the client keeps its present state.
        metrics: numbers by name. Their means over clients are in the history, and the algorithm does not get them.
        gradients: the number of gradients on a batch that the client computed, for the ledger and the clock. An
            asynchronous exchange must know it in advance, so it should not depend on the results of a loop.
        hvps: the number of products of a vector with second derivatives that the client computed. The same
            restriction holds as for `gradients`.
    """

    update: PyTree
    state: PyTree = None
    metrics: dict[str, Array] | None = None
    gradients: int | Array = 0
    hvps: int | Array = 0


Phase = Callable[..., Reply]
"""A phase: a method of the algorithm, or of one of its parts, that is marked with `phase`."""

LoopBody = Callable[["Fed", Any, Array], Any]
"""(fed, carry, key) -> carry: the function that `Fed.repeat` repeats."""


class Total(NamedTuple):
    """Hold the result of an exchange, summed over the P clients that replied.

    If clients hold submodels, each entry is the sum over the clients that hold it, and an entry that no client holds is
    0. The unbiased mean is then (M/P) Σ p_i times the mean over the clients that hold the entry.

    Args:
        update: Σ p_i u_i, where p_i is the weight of client i and u_i its update.
        weight: Σ p_i, the sum of the weights of the clients that replied.
        responders: P, the number of clients that replied.
        population: M, the number of all clients. If some clients are never available, this is M'/Σ p_i instead, where
            M' is the number of the available clients, and the sum is over these clients.
        held: for submodels, Σ p_i over the clients that hold an entry, for each entry of the update.
        rows: the single replies, if a layer asked for them: their updates, with leaves of shape (P, ...), and their
            weights, of shape (P,), which are 0 for rows that only pad the cohort. Otherwise None, as for all methods.
    """

    update: PyTree
    weight: Any
    responders: Any
    population: Any
    held: PyTree = None
    rows: Any = None

    @classmethod
    def of_mean(cls, mean: PyTree) -> "Total":
        """Make the total whose mean is `mean`, which is already a mean over all clients."""
        one = jnp.ones(())
        return cls(mean, one, one, 1)

    def mean(self, unbiased: bool = False) -> PyTree:
        """Return the mean of the updates, as `Fed.mean` defines it."""
        if self.held is not None:
            share = self.population / self.responders * self.weight if unbiased else jnp.ones(())

            def mean(leaf: Array, held: Array) -> Array:
                return leaf / jnp.where(held > 0, held, 1) * share.astype(leaf.dtype)

            return jax.tree.map(mean, self.update, self.held)
        if unbiased:
            return jax.tree.map(lambda u: u * (self.population / self.responders.astype(u.dtype)), self.update)
        return jax.tree.map(lambda leaf: leaf / self.weight.astype(leaf.dtype), self.update)


class Means:
    """Provide `Fed.mean` for a class that has `Fed.sum`."""

    sum: Callable[..., Total]

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        """Return the mean of the updates; see `Fed.mean`."""
        return self.sum(phase, message, key, fresh=fresh).mean(unbiased)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """Hold a part of an update in the form in which it is sent. It is decoded before replies are weighted and summed.

    Args:
        wire: a pytree of arrays, whose bytes the ledger counts.
        decode: wire -> the part of the update. It must be a function of a module, or a frozen dataclass, so that the
            functions of two replies are equal.
    """

    wire: PyTree
    decode: Callable[[PyTree], PyTree] = field(metadata={"static": True})


def decoded(update: PyTree) -> PyTree:
    """Decode the parts of an update that are `Coded`."""
    coded = lambda part: isinstance(part, Coded)  # noqa: E731
    return jax.tree.map(lambda part: part.decode(part.wire) if coded(part) else part, update, is_leaf=coded)


class Fed(Protocol):
    """Make the exchanges of a round. Methods never get the value of a single client; layers can, by `sum`."""

    problem: Problem
    """The problem as the server knows it: the losses and their properties, without samples of any client."""

    sampled: bool
    """Whether a round asks a drawn cohort instead of all clients."""

    @property
    def repetition(self) -> int | Array:
        """Return the number of the present repetition in the innermost `repeat`, from 0 on; outside of `repeat`, 0."""
        ...

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        """Make an exchange: send `message` to the cohort, run `phase` there, and return the updates' weighted mean.

        Let p_i be the weight of client i, and u_i its update. The mean is Σ p_i u_i / Σ p_i over the clients that
        replied. With `unbiased` it is Σ (M/P) p_i u_i, whose expectation over uniform cohorts of P out of M clients is
        the mean over the whole population.

        With `fresh` = c, the exchange asks the c-th fresh cohort of the round, 0 ≤ c < asks.fresh_cohorts, instead of
        the round's own cohort. A fresh cohort has as many clients, and is drawn independently of all other cohorts. Its
        clients have no access to the state that they keep between rounds.
        """
        ...

    def sum(
        self, phase: Phase, message: PyTree, key: Array, *, fresh: int | Array | None = None, each: bool = False
    ) -> Total:
        """Make an exchange as `mean` does, and return the `Total`. With `each` the total also has every single update.

        Layers use it; methods use `mean`.
        """
        ...

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        """Make an exchange that ends with the first n replies, and return Σ p_i u_i, the weighted sum of their updates.

        Idle clients get this message. Busy clients first finish their work on an earlier message, and their reply to
        the earlier message is one of the n replies. A client works on one message at a time, and has at most one reply
        in an exchange. A client that has replied gets its next message when the next exchange begins. If n = M in every
        exchange, and no client is lost, the result is that of `mean`.

        A client that is busy with another phase gets this message as soon as it has finished. Its reply to the other
        phase is one of the replies to the next `sum_first` of that other phase, which then waits for fewer replies.

        With `max_staleness` = s, the exchange also waits for every client that was asked s or more exchanges of this
        phase ago, so that no reply is older. It also waits for every client that was away, or busy with other phases,
        for more than s exchanges of this phase. All replies that arrive in that time are in the sum, even if there are
        more than n.

        Only algorithms that declare `first` in their `asks` may call this method. In such algorithms there are no
        cohorts: all clients take part.
        """
        ...

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        """Repeat exchanges: carry ← body(fed, carry, key_i) for i < n, with key_i = fold_in(key, i).

        The repetition ends early as soon as `until`(carry) is true.
        """
        ...


class Request(NamedTuple):
    """Hold what a server has sent to a client, from which the ends of a `PublicRange` are computed.

    Args:
        method: the method, without its layers. A field that is a schedule is the function.
        message: the message, as layers have changed it.
        own: the client's own numbers in this round, by the path of the method's field. A site of a federation may have
            numbers of its own instead, which the server does not know.
    """

    method: Any
    message: PyTree
    own: Mapping[str, int | float]


End = float | Callable[[Request], float]
"""An end of a range: a number, or a function of a module that computes it from the request."""

SLACK = 1e-5  # the relative rounding error that a public number in float32 may have at an end of its range


@dataclass(frozen=True, eq=False)
class PublicRange:
    """Declare which values a public number of an update can have.

    A federation's server refuses a reply with any other value, since the reply does not come from the method's own
    code. Engines that run the clients themselves check nothing.

    Two ranges count as equal, so that trees of updates have the same structure whatever ranges their marks have.

    Args:
        lowest: the lowest value, or a function that returns it for a `Request`. It must be a function of a module.
        highest: the highest value, or a function that returns it, in the same way. The default, infinity, allows any
            finite number.
        whole: whether the value is a whole number.
        difference: whether the value is sent as the difference from an earlier value in the same range; the first
            value is sent as the difference from 0.
    """

    lowest: End = -math.inf
    highest: End = math.inf
    whole: bool = False
    difference: bool = False

    def __post_init__(self) -> None:
        for name, end in (("lowest", self.lowest), ("highest", self.highest)):
            number = isinstance(end, int | float) and not math.isnan(end)
            require(number or callable(end), name, end, "a number, or a function of a Request")
        if not (callable(self.lowest) or callable(self.highest)):
            require(self.lowest <= self.highest, "lowest", self.lowest, f"at most highest, which is {self.highest:g}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicRange)

    def __hash__(self) -> int:
        return hash(PublicRange)

    @property
    def bounded(self) -> bool:
        """Whether both ends are declared: finite numbers, or functions."""
        return all(callable(end) or math.isfinite(end) for end in (self.lowest, self.highest))

    def of_difference(self) -> "PublicRange":
        """Return the range of the difference between two values of this range, or between one value and 0."""
        return replace(self, difference=True)

    def ends(self, request: Request) -> tuple[float, float]:
        """Return the lowest and the highest value in a reply to a request."""
        low, high = (float(end(request) if callable(end) else end) for end in (self.lowest, self.highest))
        return (low - max(high, 0), high - min(low, 0)) if self.difference else (low, high)

    def contains(self, number: float, request: Request) -> bool:
        """Return whether a finite number is in the range, up to rounding."""
        low, high = self.ends(request)
        inside = low - SLACK * abs(low) <= number <= high + SLACK * abs(high)
        return inside and (not self.whole or number == round(number))

    def in_words(self, request: Request) -> str:
        """Describe the range in messages, such as "a whole number from 0 to 1"."""
        low, high = self.ends(request)
        kind = "a whole number" if self.whole else "a number"
        if math.isinf(low) or math.isinf(high):
            bounds = [f"at least {low:g}"] * math.isfinite(low) + [f"at most {high:g}"] * math.isfinite(high)
            return " ".join([kind, *bounds])
        return f"{kind} from {low:g} to {high:g}" if low < high else f"{low:g}"


FLAG = PublicRange(0, 1, whole=True)
"""The range of a number that is 1 if something is true, and otherwise 0."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Public:
    """Mark a part of an update that is independent of the client's data: it is sent without clipping and noise.

    Mark only values that would be the same with any other data and any number of samples, such as counts that depend
    only on the server's messages and the algorithm's fields. Declare the range of these values: a client of a
    federation could otherwise send any number that the bounds on norms of updates allow.

    Args:
        public: the part of the update, a pytree of arrays.
        within: the range of every number of this part. By default every finite number is allowed, and the part counts
            in the norm of the update, as do parts without a mark. If a phase declares `gives`, give the mark in this
            declaration the same range.
    """

    public: Any
    within: PublicRange = field(default=PublicRange(), metadata={"static": True})


class Withheld(NamedTuple):
    """Mark a part of an update that noise would make useless, so that under privacy zeros are sent in its place.

    The part depends on the client's data. It is a diagnostic for which 0 means that there is nothing to report. A
    method must also work if it gets these zeros.

    Args:
        withheld: the part of the update, a pytree.
    """

    withheld: Any
