"""What a method says of itself: what may be done with it beside running it as it is, for each how, or why not; what its
rounds ask of an engine; and what it finds in its state."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from fedbilevel.core.submodel import UnitPolicy


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
    """

    late: tuple[str, ...] | No = No("it does not say which of its phases may be late")
    submodels: UnitPolicy | No = No("it does not say that clients may train parts of the model")
    noise: Literal[True] | No = True
    local_x: Any = No("it needs x on the server")


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
