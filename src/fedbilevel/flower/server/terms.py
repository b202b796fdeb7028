"""Define the server's rules: when a reply counts, when an exchange counts, and when a failed client is asked again."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import require, require_count
from fedbilevel.core.fed import Public, Request, decoded
from fedbilevel.core.privacy import comparable_norm
from fedbilevel.core.tree import PyTree, is_floating, nonfinite_leaves
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import CallSignature, ResponseMessage, from_bytes, layout, require_layout

LONGEST_REST = 32  # the largest number of rounds before a failed client is asked again


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The server's rules: which replies count, which exchanges count, and how long the server waits.

    The norm of an update or of a message is the Euclidean norm of all its floating-point numbers together, except those
    in parts that the method marks as `authoring.Public` with a range. These parts, such as counts, and integers, such
    as the number of an exchange, are left out. Every public number of a reply has to be in the range that the method
    declares.

    Args:
        quorum: the share of a cohort that must reply, above 0 and at most 1.
        deadline: the seconds that a client has for a reply, including both transfers.
        attempts: how many times a client is asked for one reply, at most. If there is no quorum after the last attempt,
            the run stops.
        join: the seconds to wait for clients that are not online, at the start and before another attempt.
        norm_factor: the largest allowed ratio of an update's norm to the usual norm of updates of the same phase, which
            `NormBounds` computes. None: no bound on this ratio.
        message_factor: the bound of `norm_factor` does not apply to an update whose norm is at most this number times
            the norm of the server's message.
        norm_bound: the largest Euclidean norm of an update, whatever the other bounds allow; None: no such bound.
        poll: the largest number of seconds between two requests to the SuperLink for replies.
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
        """Return how many clients must reply in a cohort of this size."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class Backoff:
    """The times at which failed clients are asked again, by exponential backoff.

    A client that fails in round t is asked again in round t + 1. If it fails again, it is asked after 2 rounds, then
    after 4 rounds, and so on, at most after LONGEST_REST rounds, until it replies.
    """

    def __init__(self) -> None:
        self.until: dict[int, tuple[int, int]] = {}  # client -> (when it is asked again, as a round; failures in a row)

    def resting(self, client: int, round: int) -> bool:
        """Return whether a client is not asked in this round because it failed before."""
        return client in self.until and round < self.until[client][0]

    def failed(self, client: int, round: int) -> None:
        """Record that a client failed in a round. Several failures in one round are recorded as one."""
        back, failures = self.until.get(client, (0, 0))
        if round >= back:
            rest = min(2**failures, LONGEST_REST)
            self.until[client] = (round + rest, failures + 1)

    def replied(self, client: int) -> None:
        """Record that a client replied: it is no longer left out."""
        self.until.pop(client, None)


LARGEST = 2**31 - 1  # the largest count of work that the costs of a round can hold


@dataclass(frozen=True)
class CheckedReply:
    """A response, with its decoded update, that has passed all checks except comparisons with other replies."""

    response: ResponseMessage
    call: CallSignature
    update: PyTree
    norm: float  # the Euclidean norm of the update without its public parts and integers (`comparable_norm`)
    metrics: dict[str, float]


def check_response(response: ResponseMessage, call: CallSignature, terms: Terms, population: int) -> CheckedReply:
    """Check the form, the numbers and the norm of a response to a call, and return it with its decoded update.

    Args:
        response: the response.
        call: the call to which it belongs.
        terms: the server's rules.
        population: the number of clients; it bounds the counts of work.

    Raises:
        Refusal: the response must not count.
    """
    require_layout("its update", response.layout, layout(call.update))
    update = decoded(from_bytes(response.payload, call.update))
    if bad := nonfinite_leaves(update):
        raise Refusal(Code.BOUND, f"its update is not finite in {', '.join(bad)}")
    if huge := [path for path, leaf in jax.tree_util.tree_leaves_with_path(update) if too_large(leaf)]:
        text = f"its update is so large in {jax.tree_util.keystr(huge[0]) or 'value'} that its square is not finite"
        raise Refusal(Code.BOUND, text)
    norm = comparable_norm(update)
    if terms.norm_bound is not None and norm > terms.norm_bound:
        text = f"its update has a norm of {norm:.3g}, above the bound of {terms.norm_bound:g}"
        raise Refusal(Code.BOUND, text)
    metrics = response.numbers()
    if set(metrics) - set(call.metrics) or not all(np.isfinite(value) for value in metrics.values()):
        raise Refusal(Code.MALFORMED, "its metrics are not those of the phase, or are not finite")
    most = LARGEST // population  # so that the sum over all clients does not overflow
    if not (0 <= response.gradients <= most and 0 <= response.hvps <= most):
        text = f"its counts ({response.gradients}, {response.hvps}) are not between 0 and {most}"
        raise Refusal(Code.MALFORMED, text)
    if not (0 <= response.epsilon < math.inf and 0 <= response.delta < 1):
        raise Refusal(Code.MALFORMED, f"it cannot have spent ε = {response.epsilon} at δ = {response.delta}")
    return CheckedReply(response, call, update, norm, metrics)


def check_public(update: PyTree, request: Callable[[], Request]) -> None:
    """Check that every public number of an update is in its range (`Public.within`).

    Bounds on norms do not apply to these numbers, which are weights of other parts, for example. A single false count
    could otherwise change the result as much as all replies together.

    Args:
        update: the decoded update, whose numbers are finite.
        request: returns what was sent to the client; called only if the update has public parts.

    Raises:
        Refusal: a number is outside of its range.
    """
    leaves = jax.tree_util.tree_leaves_with_path(update, is_leaf=lambda part: isinstance(part, Public))
    parts = [(path, part) for path, part in leaves if isinstance(part, Public)]
    if not parts:
        return
    sent = request()
    for path, part in parts:
        for number in (float(number) for leaf in jax.tree.leaves(part) for number in leaf.flat):
            if not part.within.contains(number, sent):
                name, allowed = f"update{jax.tree_util.keystr(path)}", part.within.in_words(sent)
                raise Refusal(Code.MALFORMED, f"{name}, a public number, is {number:g}, and it must be {allowed}")


def too_large(leaf: np.ndarray) -> bool:
    """Return whether a number in the array has an infinite square, in float32 or in the array's dtype if it is wider.

    Losses and norms that are computed from such numbers would not be finite.
    """
    if not is_floating(leaf):
        return False
    largest = math.sqrt(max(float(jnp.finfo(leaf.dtype).max), float(np.finfo(np.float32).max)))
    return bool(np.max(np.abs(np.asarray(leaf, np.float64)), initial=0.0) > largest)


FEWEST = 2
"""The smallest number of norms of an exchange that are compared with each other.

Of two norms, the smaller one is taken as the usual norm. It is not known which of two different norms is false. A false
large norm would make the state useless for all clients. A false small norm only has the effect that the other client's
updates are refused, which the log reports in every round.
"""
WINDOW = 100  # the number of exchanges of a phase whose norms are kept


class NormBounds:
    """Bounds on the norms of updates, computed from the norms of other updates of the same phase.

    Let ‖·‖ be the Euclidean norm of the floating-point numbers of an update or a message, without its public parts
    (`comparable_norm`). In each exchange, a reply u counts if

        ‖u‖ ≤ max(norm_factor · median of the ‖u_j‖ of this exchange,
                  norm_factor · median of the medians of earlier exchanges of the phase,
                  message_factor · ‖message‖)

    Norms of 0 are left out of both medians, since a correct update may be 0 for most clients and not for all. The first
    median is over the replies that have arrived, including u, if there are at least FEWEST of them. The second is over
    the last WINDOW exchanges of this process. If neither is known, as in a first exchange with one client, the bound is
    norm_bound. If norm_bound is None, the bound is norm_factor² · max(1, ‖message‖). This is large, because the update
    may be a gradient and the message a point, which have different units.

    The bound by the message's norm is for phases in which the updates of most clients are only rounding errors. The
    message contains a point such as y. An update that is at most a few times as long as this point cannot spoil the
    point for good. message_factor must be small: a false update makes the next message longer, which allows an even
    longer false update.

    If clients send differences from what they sent before (`Asks.differences`), updates become short as a run
    converges, and only the first update of a client is a whole one. A client that joins late would then be refused for
    good. So the first update of a client to a phase may also be norm_factor times as long as the median of the other
    clients' first updates to this phase, in this process.

    norm_factor should refuse only updates that would end a run, and must accept all updates of honest clients. In a
    test with images of digits, labels divided among the clients by a Dirichlet distribution with α = 0.05, and
    hypergradients that each client computes on its own (LFedNest), the longest honest update was 1,020 times as long as
    the median.

    Args:
        terms: the server's rules; `check_response` checks norm_bound.
        differences: whether clients send differences from what they sent before.
    """

    def __init__(self, terms: Terms, differences: bool = False) -> None:
        self.factor, self.of_message, self.bound = terms.norm_factor, terms.message_factor, terms.norm_bound
        self.differences = differences
        self.past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.first: defaultdict[str, dict[int, float]] = defaultdict(dict)  # phase -> client -> its first norm above 0

    def check(
        self, phase: str, norm: float, here: Sequence[float], message: Callable[[], float], client: int | None = None
    ) -> None:
        """Refuse an update that is too long in comparison with others.

        Args:
            phase: the phase of the update.
            norm: the norm of the update.
            here: the norms of all updates of this exchange so far, including this one.
            message: returns the norm of the message to the client; called only if it is needed.
            client: the client, whose first update is compared with other first updates; None: it is not.

        Raises:
            Refusal: the update is too long.
        """
        if self.factor is None or norm == 0:
            return
        if (usual := self.usual(phase, here, client)) is None:
            if self.bound is None and norm > (bound := self.factor * self.factor * max(1.0, message())):
                text = f"its update has a norm of {norm:.3g}, and there is no other update to compare it with"
                raise Refusal(Code.BOUND, f"{text}; the bound is {bound:.3g}, and norm_bound can set another")
        elif norm > self.factor * usual and norm > (bound := max(self.factor * usual, self.of_message * message())):
            text = f"its update has a norm of {norm:.3g}; the usual norm is {usual:.3g}, and the bound is {bound:.3g}"
            raise Refusal(Code.BOUND, f"{text} (norm_factor = {self.factor:g}, message_factor = {self.of_message:g})")

    def usual(self, phase: str, here: Sequence[float], client: int | None = None) -> float | None:
        """Return the largest of the known medians: of this exchange, of the past, and, for a first update, of others.

        It is None if no median is known.
        """
        some, first = [norm for norm in here if norm > 0], self.first[phase]
        whole = client is not None and client not in first
        medians = [some if len(some) >= FEWEST else (), self.past[phase], first.values() if whole else ()]
        return max([statistics.median_low(norms) for norms in medians if norms], default=None)

    def note(self, phase: str, accepted: Mapping[int, float]) -> None:
        """Record the norms of the updates that counted in an exchange, by client."""
        some = {client: norm for client, norm in accepted.items() if norm > 0}
        if some:
            self.past[phase].append(statistics.median_low(some.values()))
        if self.differences:
            self.first[phase] = some | self.first[phase]
