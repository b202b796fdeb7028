"""Rescue a run that diverges: return to a good row with half of every step size, a few times at most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import NonFiniteError, NumericalWarning, warn
from fedbilevel.core.on_disk import copied
from fedbilevel.core.tree import PyTree, split
from fedbilevel.engines.divergence import Met, Movement, far_away, grown, what_to_lower
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.history import History, Result
from fedbilevel.engines.process_group import warn_on_first


@dataclass
class Rescue:
    """Detect that a run diverges, and keep the carry to which it may return and the number of returns."""

    met: Callable[[PyTree, PyTree], Met]  # the last finite x and y -> why the run diverged
    start: tuple[PyTree, PyTree]  # the variables in x and y at the start of the run
    everyone: bool  # whether every exchange asks all clients
    halvings_at_most: int  # the largest number of halvings of all steps; 0: the run never returns
    halvings: int = 0  # the number of halvings so far
    growth: str = ""  # how far a loss or the norm of (x, y) has grown, in words; "" if none has grown too far
    warned_of: str = ""  # the last `growth` about which a warning was issued
    latest: Carry | None = None  # a copy of the last row's carry
    safe: Carry | None = None  # a copy of the carry to return to
    gave_up: str = ""  # why the run ended, if it still diverged with smaller step sizes; else ""

    def watch(
        self, history: History, losses: Mapping[str, list[Any]], began: Mapping[str, float], result: Result
    ) -> None:
        """Check whether losses have grown too far in a new row, and set `growth`.

        Args:
            history: the history, whose last row is the new one.
            losses: the losses of each round since the row before.
            began: the losses of the first round.
            result: the point of the row.
        """
        first = (began if self.everyone else {}) if self.halvings_at_most else None
        self.growth = grown(history, losses, first) or far_away(
            result.round, norm(self.start), norm((split(result.x)[0], result.state.y))
        )

    def keep(self, carry: Carry, is_best: bool) -> None:
        """Keep a copy of a new row's carry, and of the carry of the row before the best row, to which a run returns.

        The best row's own carry may already be diverging, because the losses that a row shows are those of the rounds
        before it. A resumed run does not return to rows before the point at which it was resumed.
        """
        if self.halvings_at_most:
            if is_best:
                self.safe = self.latest
            self.latest = jax.tree.map(copied, carry)
            self.safe = self.safe or self.latest

    def may_return(self, rows: int, result: Result) -> bool:
        """Return whether a run with `rows` rows may go back to an earlier row after numbers that are not finite.

        A run with only one row may not go back if the losses are not finite even at the start.
        """
        if rows > 1:
            return self.halvings_at_most > 0
        return self.halvings < self.halvings_at_most and not self.met(result.x, result.y).at_start

    def retreat(self, why: str, result: Result, method: Algorithm) -> Carry:
        """Return a copy of the carry to which the run returns. Count the return, and warn about it.

        If the steps were already halved as often as allowed, the run ends at this carry, and `gave_up` says why.
        """
        assert self.safe is not None
        if self.halvings == self.halvings_at_most:
            self.gave_up = self.diverging(why, result, method)
            warn(NumericalWarning(self.gave_up))
        else:
            self.halvings, self.latest = self.halvings + 1, self.safe
            back = f"the run returns to round {int(self.safe.round)}, and continues with step sizes half as large"
            warn(NumericalWarning(f"{why}; {back} (return {self.halvings} of at most {self.halvings_at_most})"))
        self.growth = ""
        return jax.tree.map(copied, self.safe)

    def diverging(self, why: str, result: Result, method: Algorithm) -> str:
        """Return a message that begins with `why`, and says that the run diverges and what may help."""
        met = self.met(result.x, result.y)
        advice = f"{self.advice(result, method)} (fb.diagnose suggests steps)" if met.by_steps else met.text
        return f"{why}: the run diverges; {advice}"

    def advice(self, result: Result, method: Algorithm) -> str:
        """Return advice on what to lower (see `what_to_lower`), from how far the run has moved x and y."""
        x, y = self.start
        moved = Movement.between(x, split(result.x)[0], (norm(y), norm(result.state.y)))
        return what_to_lower(method, self.halvings, moved)

    def warn_of_growth(self, result: Result, method: Algorithm, once: bool = False) -> None:
        """Warn if a loss or the norm of (x, y) has grown too far: once for each row, or, with `once`, once in a run."""
        if not self.growth or self.growth == self.warned_of or (once and self.warned_of):
            return
        self.warned_of = self.growth
        warn_on_first(NumericalWarning(self.diverging(self.growth, result, method)))

    def explain(self, error: NonFiniteError, method: Algorithm) -> None:
        """Add to an error that ends the run why the run diverged, and what may help.

        If smaller steps do not help, the reason comes first, before the names of what is not finite.
        """
        met = self.met(error.result.x, error.result.y)
        if not met.by_steps:
            error.begin_with(met.text)
            return
        for text in filter(
            None, ("smaller steps may help (fb.diagnose suggests some)", self.advice(error.result, method), met.text)
        ):
            error.append(text)

    def to_json(self, diverged: bool) -> dict[str, Any]:
        """Return the state that a checkpoint stores; `diverged`: whether the run ends because it diverges."""
        return {"halvings": self.halvings, "diverged": diverged or bool(self.gave_up), "gave_up": self.gave_up}

    def continue_from(self, meta: Mapping[str, Any]) -> None:
        """Restore the state that a checkpoint stores."""
        self.gave_up = str(meta.get("gave_up", ""))
        self.halvings = int(meta.get("halvings", 0))


def norm(tree: PyTree) -> float:
    """Return the norm of all entries of a tree; infinity if it is too large for a float, which counts as far away."""
    with np.errstate(over="ignore"):
        return math.hypot(*(np.linalg.norm(np.ravel(leaf)) for leaf in jax.tree.leaves(tree)))
