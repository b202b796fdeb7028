"""Define the facts that a method declares about itself.

The class of a method states its costs, needs and uses once, in `Facts`; `help()`, tables and pages show them. An
instance states the optional features that it supports (`Allows`) and the demands of its rounds on an engine (`Asks`).
During a run, it reports errors, warnings and additional columns of the history from the state of the run (`Findings`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fedbilevel.core.errors import explain_misspelt
from fedbilevel.core.submodel import UnitPolicy

HEADINGS = {
    "paper": "Paper",
    "needs": "Needs",
    "good_for": "Good for",
    "exchanges": "Exchanges per round",
    "up": "Vectors up per client",
    "hvps": "Hvps per client",
    "cost": "Cost per local step",
    "client_state": "Client state",
    "bias": "Bias",
}
"""The headings of the facts."""


@explain_misspelt
@dataclass(frozen=True, kw_only=True)
class Facts:
    """Hold the costs, needs and uses of a method, in a few words each, with the symbols of the method's docstring.

    Args:
        paper: the first author, year and number of the paper: "Yang et al. 2023, arXiv:2305.19442".
        good_for: the problems for which to try the method first, and the problems for which to choose another.
        exchanges: the number of exchanges between server and clients in a round.
        up: the number of vectors that a client sends in a round: how many have the shape of x ("1 like x") and how many
            have the shape of y ("2 like y").
        bias: the error that remains after any number of rounds; "nothing" if there is none.
        cost: the cost of a local step, in gradients and second-order products on a batch.
        needs: the assumptions on the losses besides the kind of problem; "" if there are none.
        hvps: the number of products with second derivatives that a client computes in a round.
        client_state: the vectors that a client keeps between rounds.
    """

    paper: str
    good_for: str
    exchanges: str
    up: str
    bias: str
    cost: str
    needs: str = ""
    hvps: str = "none"
    client_state: str = "none"

    def __str__(self) -> str:
        """Return a line for each fact that is not empty, after its heading, as `help()` shows them."""
        facts = {heading: getattr(self, name) for name, heading in HEADINGS.items()}
        lines = (f"{heading}: {fact}." for heading, fact in facts.items() if fact)
        return "\n".join(textwrap.fill(line, 116, subsequent_indent="    ") for line in lines)


class No(NamedTuple):
    """Say why a method does not support a feature; its truth value is False.

    Args:
        why: the reason, in words for an error message: "it asks for …".
    """

    why: str

    def __bool__(self) -> bool:
        return False


class OwnParts(NamedTuple):
    """Name the variables in a phase's message and update that have the shape of y, for clients that keep leaves of y.

    Args:
        takes: the variables in the message that have the shape of y, in their order: "y", "v", or another variable.
        gives: for each part of the update that has the shape of y: the variable that the client changes along this
            part, and a function of the method that returns the size of this step: variable ← variable − size·part.
        alone: whether each client solves a linear system of its own in this phase, which is only right if no leaf is
            shared.
        start_at_y: the variables whose own leaves start at the leaves of y0. The own leaves of other variables start at
            0.
    """

    takes: tuple[str, ...]
    gives: tuple[tuple[str, Callable[[Any], Any]], ...] = ()
    alone: bool = False
    start_at_y: tuple[str, ...] = ("y",)


class Allows(NamedTuple):
    """Declare the optional features that a method supports; `No(reason)` for a feature that it does not support.

    Args:
        late: for `Asynchronous`: the names of all phases of a round. Their replies may come from earlier exchanges. The
            decorator `phase` must declare the replies, with only the leaves "x", "y" and "number".
        submodels: for clients of limited capacity: the default policy by which they hold units; `UnitPolicy()` means
            the units of largest weights. Every phase must declare its message and its reply.
        noise: whether replies may be clipped and noised.
        local_x: for problems whose clients keep x: the size of the server's step on x along the part of a reply that
            has the shape of x. Each client makes this step on its own block. Every phase must declare its message and
            its reply.
        project_x: whether x may be projected onto a set at the end of a round.
        own_y: for problems with leaves of y that are each client's own (`Bilevel.own`): an `OwnParts` for each phase
            for which a round asks, by the name of the phase. Every phase must declare its message and its reply.
    """

    late: tuple[str, ...] | No = No("it does not say which of its phases may be late")
    submodels: UnitPolicy | No = No("it does not say that clients may train parts of the model")
    noise: Literal[True] | No = True
    local_x: Any = No("it needs x on the server")
    project_x: Literal[True] | No = True
    own_y: Mapping[str, OwnParts] | No = No("it needs all of y on the server")


class Asks(NamedTuple):
    """Declare what the rounds of a method ask of an engine, besides means over a cohort.

    Args:
        first: the number of replies for which an asynchronous exchange waits (`Fed.sum_first`); None: exchanges wait
            for all replies.
        everyone: whether all clients must take part in every round. In asynchronous methods all clients always do.
        fresh_cohorts: the largest number of fresh cohorts in a round; `fresh` in `Fed.mean` must be less than this.
        differences: whether clients send changes of what they keep, and the server adds them up. Its sum is wrong if a
            client begins anew, so a federation continues without a client that has lost what it kept.
        replies: the least number of replies that each exchange needs, as for a robust rule.
    """

    first: int | None = None
    everyone: bool = False
    fresh_cohorts: int = 0
    differences: bool = False
    replies: int = 1

    @property
    def asynchronous(self) -> bool:
        """Return whether a round continues after the first replies."""
        return self.first is not None

    @property
    def cohorts(self) -> bool:
        """Return whether a round may ask a cohort that does not contain all clients."""
        return not (self.everyone or self.asynchronous)


class Findings(NamedTuple):
    """Report what a method finds in the server's state during a run.

    Args:
        error: the reason why the run must end with an error; "" if it may continue.
        warning: a warning for the user, which is given once in a run; "" for none.
        columns: additional columns of the history, numbers by name.
    """

    error: str = ""
    warning: str = ""
    columns: dict[str, Any] = {}  # noqa: RUF012  # the default is never changed
