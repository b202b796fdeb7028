"""What a method says of itself.

Its class says once what the method costs, needs and is good for: `help()`, tables and pages have it from there. An
object of it says what may be done with it beside running it as it is, for each how, or why not; what its rounds ask of
an engine; and what it finds in its state.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
"""The words that stand before each fact."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a method costs, needs and is good for.

    A few words each, in the letters of the method's own docstring.

    Args:
        paper: its first author, year and number: "Yang et al. 2023, arXiv:2305.19442".
        good_for: where to try the method first, and where not.
        exchanges: between server and clients in a round.
        up: what a client sends in a round: vectors of the shapes of x and of y.
        bias: what the result stays off by however many rounds it has; "nothing" for none.
        cost: of a local step, in gradients and products on a batch.
        needs: what the losses have to be beside the kind of problem; "" for nothing else.
        hvps: products of a vector with second derivatives that a client computes in a round.
        client_state: what a client keeps between rounds.
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
        """Write a line for each fact that is said, under its heading, as `help()` shows them."""
        said = {heading: getattr(self, name) for name, heading in HEADINGS.items()}
        lines = (f"{heading}: {text}." for heading, text in said.items() if text)
        return "\n".join(textwrap.fill(line, 116, subsequent_indent="    ") for line in lines)


class No(NamedTuple):
    """Why something may not be done with a method; as a truth value it is false.

    Args:
        why: in words for an error message: "it asks for …".
    """

    why: str

    def __bool__(self) -> bool:
        return False


class Allows(NamedTuple):
    """What may be done with a method: for each, how, or `No` and why not.

    Args:
        late: the phases that a round asks, all of them, whose replies may be those of earlier exchanges: for
            `Asynchronous`. What they give has to be declared by `phase`, with the leaves "x", "y" and "number" alone.
        submodels: which units clients of limited capacity hold, `UnitPolicy()` being those of most weight. Every phase
            then says what it takes and gives.
        noise: whether replies may be clipped and noised.
        local_x: the size of the server's step on x along the x of a reply, for problems whose clients keep x and make
            that step themselves. Every phase then says what it takes and gives.
        project_x: whether x may be projected onto a set at the end of a round.
    """

    late: tuple[str, ...] | No = No("it does not say which of its phases may be late")
    submodels: UnitPolicy | No = No("it does not say that clients may train parts of the model")
    noise: Literal[True] | No = True
    local_x: Any = No("it needs x on the server")
    project_x: Literal[True] | No = True


class Asks(NamedTuple):
    """What the rounds of a method ask of an engine, beside means over a cohort.

    Args:
        first: how many replies an asynchronous exchange waits for (`Fed.sum_first`); None: exchanges wait for all.
        everyone: whether all clients have to take part in every round; in asynchronous ones they have to in any case.
        fresh_cohorts: how many fresh cohorts a round may ask beside its own: the bound of `fresh` in `Fed.mean`.
    """

    first: int | None = None
    everyone: bool = False
    fresh_cohorts: int = 0

    @property
    def asynchronous(self) -> bool:
        """Whether a round goes on with the first replies."""
        return self.first is not None

    @property
    def cohorts(self) -> bool:
        """Whether a round may ask a cohort of some clients."""
        return not (self.everyone or self.asynchronous)


class Findings(NamedTuple):
    """What a method finds in its state.

    Args:
        error: why the run must end with an error; "" where it may go on.
        warning: for the user, given once in a run; "" for none.
        columns: further columns of the history, numbers by name.
    """

    error: str = ""
    warning: str = ""
    columns: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
