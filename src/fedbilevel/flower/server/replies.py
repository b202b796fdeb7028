"""The checks that a client's response has to pass before it can count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.tree import PyTree, is_floating, nonfinite_leaves
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire.contract import CallSignature
from fedbilevel.flower.wire.layout import Refusal, from_bytes, layout, require_layout
from fedbilevel.flower.wire.messages import NOT_FINITE, RequestMessage, ResponseMessage

LARGEST = 2**31 - 1  # that the costs of a round can hold for a round


@dataclass(frozen=True)
class CheckedReply:
    """A response that has passed all checks, decoded."""

    response: ResponseMessage
    call: CallSignature
    update: PyTree
    norm: float  # Euclidean, of the whole update
    metrics: dict[str, float]


def check_response(
    outcome: ResponseMessage | Refusal,
    request: RequestMessage,
    call: CallSignature,
    client: int,
    terms: Terms,
    population: int,
) -> CheckedReply:
    """The response of a client to a request, decoded, if it is valid in every respect.

    Raises:
        Refusal: the response must not count.
    """
    if isinstance(outcome, Refusal):
        raise outcome
    if (outcome.run, outcome.round, outcome.exchange) != (request.run, request.round, request.exchange):
        raise Refusal("it answers another question")
    if outcome.client != client:
        raise Refusal(f"client {client} answers as client {outcome.client}")
    require_layout("its update", outcome.layout, layout(call.update))
    update = from_bytes(outcome.payload, call.update)
    if bad := nonfinite_leaves(update):
        raise Refusal(f"its update is {NOT_FINITE} {', '.join(bad)}")
    if huge := [path for path, leaf in jax.tree_util.tree_leaves_with_path(update) if too_large(leaf)]:
        raise Refusal(f"the square of its update is {NOT_FINITE} {jax.tree_util.keystr(huge[0]) or 'value'}")
    norm = euclidean(update)
    if terms.norm_bound is not None and norm > terms.norm_bound:
        raise Refusal(f"its update has a norm of {norm:.3g}, above the bound of {terms.norm_bound:g}")
    metrics = outcome.numbers()
    if set(metrics) - set(call.metrics) or not all(np.isfinite(value) for value in metrics.values()):
        raise Refusal("its metrics are not those of the phase, or not finite")
    most = LARGEST // population  # so that their sum is exact
    if not (0 <= outcome.gradients <= most and 0 <= outcome.hvps <= most):
        raise Refusal(f"its counts ({outcome.gradients}, {outcome.hvps}) are not between 0 and {most}")
    if not 0 <= outcome.epsilon < math.inf:
        raise Refusal(f"it cannot have spent ε = {outcome.epsilon}")
    if not 0 <= outcome.delta < 1:
        raise Refusal(f"it cannot have spent δ = {outcome.delta}")
    return CheckedReply(outcome, call, update, norm, metrics)


def too_large(leaf: np.ndarray) -> bool:
    """Whether squares of its numbers are infinite, in their own dtype or, where that is a short one, in float32: no
    loss, norm or product of such numbers would be a number."""
    if not is_floating(leaf):
        return False
    largest = math.sqrt(max(float(jnp.finfo(leaf.dtype).max), float(np.finfo(np.float32).max)))
    return bool(np.max(np.abs(leaf.astype(np.float64)), initial=0.0) > largest)


def euclidean(tree: PyTree) -> float:
    """The norm of all leaves together, in float64; infinite where a square overflows."""
    with np.errstate(over="ignore"):
        return float(np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(tree))))
