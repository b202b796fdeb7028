"""The only door between an algorithm and its clients."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from fedbilevel.core.tree import PyTree


class Reply(NamedTuple):
    """What a phase hands back.

    `update` is averaged over the cohort; `state` is the client's own next state, which never leaves it; `metrics`
    (scalars by name) are averaged into the history and never fed back; `gradients` and `products` count the batch
    gradients and the Hessian- or Jacobian-vector products that the client computed, for the ledger.
    """

    update: PyTree
    state: PyTree = None
    metrics: dict[str, Array] | None = None
    gradients: int | Array = 0
    products: int | Array = 0


class Fed(Protocol):
    """The exchanges that a round may make. No primitive returns per-client values to the server."""

    def mean(self, phase: Callable[..., Reply], message: PyTree, key: Array, *, unbiased: bool = False) -> PyTree:
        """One exchange: send `message` to the cohort, run `phase` there, return the weighted mean of the updates.

        Σ p_i u_i / Σ p_i over those who responded; with `unbiased`, Σ (M/P) p_i u_i, whose expectation over uniform
        cohorts of P out of M clients is the mean over the whole population.
        """
        ...

    def repeat(self, n: int | Array, body: Callable[["Fed", Any, Array], Any], carry: PyTree, key: Array) -> PyTree:
        """carry ← body(fed, carry, key_i), n times, with key_i = fold_in(key, i): a loop of exchanges."""
        ...
