"""Log why a client refuses requests, in few lines even if a server sends many requests."""

from __future__ import annotations

import logging
import os
from collections import Counter

from fedbilevel.core.errors import CheckpointError, ConfigurationError, FedbilevelError, FloorError
from fedbilevel.core.privacy import BudgetSpentError, NoiseError
from fedbilevel.flower.privacy import AccountError
from fedbilevel.flower.refusal import OPERATOR, Code, Refusal, has_line

log = logging.getLogger("fedbilevel.client")
REASONS = 100  # the largest number of different reasons of a client that are counted separately
MEANT: dict[type[Exception], Code] = {
    BudgetSpentError: Code.BUDGET,
    FloorError: Code.FLOOR,
    NoiseError: Code.METHOD,
    AccountError: Code.ACCOUNT,
}
"""The classes of errors whose text may be sent to a server, with their codes."""


class RefusalLog:
    """The lines about refusals in a site's log, with advice for the site's owner.

    Refusals with the same reason are counted from the client's last reply on. Only the first, second, fourth, eighth,
    and so on, get a line, which contains the count. The counts are not stored on the disk.
    """

    def __init__(self) -> None:
        self.counts: dict[int, Counter[str]] = {}  # client -> reason -> the number of refusals since the last reply

    def replied(self, client: int) -> None:
        """Set the counts of a client back to 0, because it has replied to a request."""
        self.counts.pop(client, None)

    def refusal(self, client: int, error: Exception, what: str) -> Refusal:
        """Return the refusal for an error of a client, and log the error.

        The text of an error may name files of the site. The refusal therefore contains the text only for the classes in
        MEANT, and the name of the class for all other errors. If the operating system refused a file of the site, such
        as on a full disk, the refusal also contains the system's reason.

        Args:
            client: the number of the client; -1 if it is not known.
            error: the error.
            what: the request, in words.
        """
        code = MEANT.get(type(error), Code.SETTINGS if isinstance(error, ConfigurationError) else Code.FAILED)
        why = str(error) if type(error) in MEANT else f"{type(error).__name__}; the client's log says more"
        if isinstance(error, CheckpointError) and error.errno is not None:
            code, why = Code.DISK, f"a file of its state-folder cannot be read or written: {os.strerror(error.errno)}"
        refusal = error if isinstance(error, Refusal) else Refusal(code, why)
        number = self.count(client, refusal.code, error)
        if has_line(number):
            advice = "" if refusal.code.who == OPERATOR else f" ({refusal.code.how})"
            times = "" if number == 1 else f" ({number} times since the last reply)"
            trace = not isinstance(error, FedbilevelError)
            log.warning("%s: refused: %s%s%s", what, _in_words(error), advice, times, exc_info=trace)
        return refusal

    def count(self, client: int, code: Code, error: Exception) -> int:
        """Count a refusal, and return the number of refusals with the same reason.

        After REASONS different reasons, refusals with a new reason are counted together by their code.
        """
        counts, reason = (
            self.counts.setdefault(client, Counter()),
            f"{code.word}: {type(error).__name__} {_in_words(error)}",
        )
        if reason not in counts and len(counts) >= REASONS:
            reason = code.word
        counts[reason] += 1
        return counts[reason]


def _in_words(error: Exception) -> str:
    """Return the text of an error and, if an error of this library caused it, the text of the cause.

    The result is for the site only, since it may name files.
    """
    cause = f": {error.__cause__}" if isinstance(error.__cause__, FedbilevelError) else ""
    return f"{error}{cause}"
