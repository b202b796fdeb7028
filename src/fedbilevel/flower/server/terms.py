"""The server's rules: when a reply counts, when an exchange does, and when a client that failed is asked again."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import require, require_count
from fedbilevel.core.fed import decoded
from fedbilevel.core.privacy import norm_of, vector_of
from fedbilevel.core.tree import PyTree, is_floating, nonfinite_leaves
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import CallSignature, ResponseMessage, from_bytes, layout, require_layout

LONGEST_REST = 32  # rounds


@dataclass(frozen=True, kw_only=True)
class Terms:
    """When an exchange counts.

    Args:
        quorum: the share of a cohort that must reply, 0 < quorum ≤ 1.
        deadline: seconds that a client has for a reply, the way there and back included.
        attempts: how often those who have not replied are asked, before the run stops below its quorum.
        join: seconds to wait for clients that are not online, at the start and before another attempt.
        norm_factor: how many times as long as usual an update may be (see `NormBounds`); None sets no such bound.
        message_factor: how many times as long as the message that was sent an update may be in any case but that of
            norm_bound: what norm_factor would refuse counts up to there.
        norm_bound: the largest Euclidean norm that an update may have, in any case; None sets no bound.
        poll: seconds between two looks for replies, at most.
    """

    quorum: float = 0.5
    deadline: float = 120.0
    attempts: int = 3
    join: float = 60.0
    norm_factor: float | None = 1e4
    message_factor: float = 10.0
    norm_bound: float | None = None
    poll: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.quorum <= 1, "Terms.quorum", self.quorum, "above 0 and at most 1")
        require_count("Terms.attempts", self.attempts)
        for name in ("deadline", "join", "poll"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"Terms.{name}", value, "a positive number of seconds")
        factor, bound = self.norm_factor, self.norm_bound
        require(factor is None or 1 <= factor < math.inf, "Terms.norm_factor", factor, "1 or more, or None")
        of_message = self.message_factor
        positive = isinstance(of_message, int | float) and 0 < of_message < math.inf
        require(positive, "Terms.message_factor", of_message, "a positive number")
        require(bound is None or 0 < bound < math.inf, "Terms.norm_bound", bound, "positive, or None")

    def needed(self, cohort: int) -> int:
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class Backoff:
    """Exponential backoff: a client that fails in round t is asked again in t + 1, then, should it fail once more, 2
    rounds after that, then 4, …, at most LONGEST_REST, until it replies."""

    def __init__(self) -> None:
        self.until: dict[int, tuple[int, int]] = {}  # client -> (first round it is asked again, failures in a row)

    def resting(self, client: int, round: int) -> bool:
        return client in self.until and round < self.until[client][0]

    def failed(self, client: int, round: int) -> None:
        back, failures = self.until.get(client, (0, 0))
        if round >= back:  # several failures in a round count once
            rest = min(2**failures, LONGEST_REST)
            self.until[client] = (round + rest, failures + 1)

    def replied(self, client: int) -> None:
        self.until.pop(client, None)


LARGEST = 2**31 - 1  # that the costs of a round can hold for a round


@dataclass(frozen=True)
class CheckedReply:
    response: ResponseMessage
    call: CallSignature
    update: PyTree
    norm: float  # Euclidean, of the whole update
    metrics: dict[str, float]


def check_response(response: ResponseMessage, call: CallSignature, terms: Terms, population: int) -> CheckedReply:
    """Decode a response to a call, if it is valid in every respect.

    Raises:
        Refusal: the response must not count.
    """
    require_layout("its update", response.layout, layout(call.update))
    update = decoded(from_bytes(response.payload, call.update))
    if bad := nonfinite_leaves(update):
        raise Refusal(Code.BOUND, f"its update is not finite in {', '.join(bad)}")
    if huge := [path for path, leaf in jax.tree_util.tree_leaves_with_path(update) if too_large(leaf)]:
        text = f"the square of its update is not finite in {jax.tree_util.keystr(huge[0]) or 'value'}"
        raise Refusal(Code.BOUND, text)
    norm = norm_of(vector_of(update))
    if terms.norm_bound is not None and norm > terms.norm_bound:
        text = f"its update has a norm of {norm:.3g}, above the bound of {terms.norm_bound:g}"
        raise Refusal(Code.BOUND, text)
    metrics = response.numbers()
    if set(metrics) - set(call.metrics) or not all(np.isfinite(value) for value in metrics.values()):
        raise Refusal(Code.MALFORMED, "its metrics are not those of the phase, or not finite")
    most = LARGEST // population  # so that their sum is exact
    if not (0 <= response.gradients <= most and 0 <= response.hvps <= most):
        text = f"its counts ({response.gradients}, {response.hvps}) are not between 0 and {most}"
        raise Refusal(Code.MALFORMED, text)
    if not (0 <= response.epsilon < math.inf and 0 <= response.delta < 1):
        raise Refusal(Code.MALFORMED, f"it cannot have spent ε = {response.epsilon} at δ = {response.delta}")
    return CheckedReply(response, call, update, norm, metrics)


def too_large(leaf: np.ndarray) -> bool:
    """Tell whether squares of its numbers are infinite, in their own dtype or, where that is short, in float32: no
    loss, norm or product of such numbers would be a number."""
    if not is_floating(leaf):
        return False
    largest = math.sqrt(max(float(jnp.finfo(leaf.dtype).max), float(np.finfo(np.float32).max)))
    return bool(np.max(np.abs(np.asarray(leaf, np.float64)), initial=0.0) > largest)


FEWEST = 2
"""Norms of an exchange that can be compared. Of two the shorter is taken for usual: nothing tells which of them is
false, but a false norm that is long spoils the state for everybody, and a short norm delays the other client's updates,
which the log then says in every round."""
WINDOW = 100  # exchanges of a phase


class NormBounds:
    """A bound on the norm of updates, from the norms of other updates of the same phase: nobody has to give a number.

    In each exchange, with ‖·‖ the Euclidean norm of a whole update, a reply u counts if

        ‖u‖ ≤ max(norm_factor · median of the ‖u_j‖ here,  norm_factor · median over earlier exchanges of the phase,
                  message_factor · ‖message‖)

    Norms of 0 are left out of both medians: an update may rightly be 0 for most and not for all. The first median is of
    what has come in, u included, where that is FEWEST or more; the second of the medians of the last WINDOW exchanges
    of this process. Where neither is known, as of a first exchange with one client, norm_bound is the bound, and with
    None norm_factor² times the message's norm, or 1 if that is more: gradients have another unit than points have. The
    message's norm is there for updates that are rounding errors for most: what is no longer than some times the point
    itself cannot spoil it for good. Its factor is small, or a lie, which makes the next message longer, would make room
    for a larger lie.

    norm_factor is for what would end a run, and has to let pass whatever honest clients send. Labels dealt by
    Dirichlet's 0.05, digits, a client's own hypergradients (LFedNest): the longest was 1,020 times the median.

    Args:
        terms: norm_bound itself is checked elsewhere.
    """

    def __init__(self, terms: Terms) -> None:
        self.factor, self.of_message, self.bound = terms.norm_factor, terms.message_factor, terms.norm_bound
        self.past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def check(self, phase: str, norm: float, here: Sequence[float], message: Callable[[], float]) -> None:
        """Refuse an update that is out of proportion.

        Args:
            norm: its own.
            here: the norms of all that came in, this norm among them.
            message: the norm of what the client was sent; asked for only where it matters.

        Raises:
            Refusal: it is.
        """
        if self.factor is None or norm == 0:
            return
        if (usual := self.usual(phase, here)) is None:
            if self.bound is None and norm > (bound := self.factor * self.factor * max(1.0, message())):
                text = f"its update has a norm of {norm:.3g}, where no other update tells what is usual"
                raise Refusal(Code.BOUND, f"{text}, and {bound:.3g} is the bound; norm_bound = NUMBER sets another")
        elif norm > self.factor * usual and norm > (bound := max(self.factor * usual, self.of_message * message())):
            text = f"its update has a norm of {norm:.3g}, where {usual:.3g} is usual and {bound:.3g} the bound"
            raise Refusal(Code.BOUND, f"{text} (norm_factor = {self.factor:g}, message_factor = {self.of_message:g})")

    def usual(self, phase: str, here: Sequence[float]) -> float | None:
        """Return the larger of the two medians, if any is known."""
        some, past = [norm for norm in here if norm > 0], self.past[phase]
        known = [statistics.median_low(some)] if len(some) >= FEWEST else []
        return max([*known, *([statistics.median_low(past)] if past else [])], default=None)

    def note(self, phase: str, accepted: Sequence[float]) -> None:
        """Remember an exchange by the replies that counted."""
        if some := [norm for norm in accepted if norm > 0]:
            self.past[phase].append(statistics.median_low(some))
