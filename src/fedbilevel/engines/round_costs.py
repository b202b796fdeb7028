"""What a round cost and measured: a small pytree that engines fill, exchange by exchange."""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.fed import Reply
from fedbilevel.core.tree import PyTree, nbytes

ExchangeKind = tuple[str, int, int]
"""(phase, bytes down per client, bytes up per client)."""


PART = 2**14


class ExchangeCount(NamedTuple):
    """How often something was exchanged."""

    exchanges: Any
    asked: Any  # messages sent down, summed over the exchanges
    answered: Any  # replies that counted


class RoundCosts(NamedTuple):
    """Sums over the exchanges made so far; leaves are scalars (per round) or (rounds,) arrays."""

    calls: dict[ExchangeKind, ExchangeCount]  # the exchanges of each kind
    gradients: Array  # batch gradients, summed over clients
    hvps: Array  # Hessian- and Jacobian-vector products, likewise
    metrics: dict[tuple[str, str], Any]  # (phase, name) -> (Σ weight·value, Σ weight)
    time: Array  # (2,) what the clock says it took: see `in_parts`
    privacy: tuple[float, float] | None = None  # the largest ε and δ that clients say to have spent; of whole rounds


def empty() -> RoundCosts:
    zero = jnp.zeros((), jnp.int32)
    return RoundCosts({}, zero, zero, {}, in_parts(0))


def merge(a: RoundCosts, b: RoundCosts) -> RoundCosts:
    """The sum of two costs."""
    calls = _added(a.calls, b.calls, ExchangeCount(0, 0, 0))
    metrics = _added(a.metrics, b.metrics, (jnp.zeros(()), jnp.zeros(())))
    return RoundCosts(calls, a.gradients + b.gradients, a.hvps + b.hvps, metrics, a.time + b.time)


def _added(a: dict[Any, Any], b: dict[Any, Any], nothing: Any) -> dict[Any, Any]:
    """Entry by entry; one that is missing counts as `nothing`."""
    return {k: jax.tree.map(operator.add, a.get(k, nothing), b.get(k, nothing)) for k in {**a, **b}}


def stack(costs: Sequence[RoundCosts]) -> RoundCosts:
    """The costs of some rounds, with leaves (rounds,); what a round did not do counts 0 there."""
    nothing = jax.tree.map(jnp.zeros_like, reduce(merge, costs))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(merge(nothing, round_costs) for round_costs in costs))


def entry(
    phase: str,
    message: PyTree,
    sums: "Sums",
    asked: int | Array,
    ticks: int | Array = 0,
    age: Array | None = None,
    *,
    update: PyTree = None,
    exchanges: int = 1,
) -> RoundCosts:
    """The costs of one exchange, in which so many clients were asked, and which took so many ticks of the clock.

    `age`: of one that was asked by `first`, Σ p_i·(exchanges since its client was asked), for the metric `staleness`.
    `update`: what one client sent, where the sum is shaped otherwise. `exchanges`: 0 for a further part of one, with
    clients whose messages have other sizes.
    """
    count = ExchangeCount(jnp.asarray(exchanges, jnp.int32), jnp.asarray(asked, jnp.int32), sums.responders)
    metrics = {(phase, name): (value, sums.weight) for name, value in sums.metrics.items()}
    if age is not None:
        metrics[phase, "staleness"] = age, sums.weight
    call = (phase, nbytes(message), nbytes(sums.update if update is None else update))
    return RoundCosts({call: count}, sums.gradients, sums.hvps, metrics, in_parts(ticks))


def in_parts(ticks: int | Array) -> Array:
    """Ticks as (multiples of PART, rest): sums over the 65,536 longest exchanges that there can be fit into 32 bits."""
    return jnp.stack([jnp.asarray(ticks // PART, jnp.int32), jnp.asarray(ticks % PART, jnp.int32)])


class Sums(NamedTuple):
    """Weighted sums over clients of one exchange's replies: all that ever reaches the server."""

    update: PyTree  # Σ p_i u_i
    weight: Array  # Σ p_i
    metrics: dict[str, Array]  # Σ p_i m_i
    responders: Array
    gradients: Array
    hvps: Array
    held: PyTree = None  # of submodels: Σ p_i over those who hold an entry, shaped like the update


def weigh(reply: Reply, weight: Array, counts: Array) -> Sums:
    """One client's contribution; `counts` is 1, or 0 for a place that only pads the cohort."""
    weight = weight * counts

    def weighted(leaf: Array) -> Array:
        return leaf * weight.astype(leaf.dtype)

    return Sums(
        jax.tree.map(weighted, reply.update),
        weight,
        {name: weight * value for name, value in (reply.metrics or {}).items()},
        counts.astype(jnp.int32),
        (counts * reply.gradients).astype(jnp.int32),
        (counts * reply.hvps).astype(jnp.int32),
    )


def normalise(sums: Sums, population: float, unbiased: bool) -> PyTree:
    """The mean that `Fed.mean` promises: Σ p_i u_i / Σ p_i, or (M/P) Σ p_i u_i over the P who answered.

    `population`: M; where some are never there, how many are, over the sum of their p_i. Of submodels each entry has
    the sums of those alone who hold it, and 0 where nobody does; the second mean is then (M/P) Σ p_i times the first.
    """
    if sums.held is not None:
        share = population / sums.responders * sums.weight if unbiased else jnp.ones(())

        def mean(leaf: Array, held: Array) -> Array:
            return leaf / jnp.where(held > 0, held, 1) * share.astype(leaf.dtype)

        return jax.tree.map(mean, sums.update, sums.held)
    if unbiased:
        return jax.tree.map(lambda leaf: leaf * (population / sums.responders.astype(leaf.dtype)), sums.update)
    return jax.tree.map(lambda leaf: leaf / sums.weight.astype(leaf.dtype), sums.update)
