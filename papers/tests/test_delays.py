"""The axis of theory-delay, the number of exchanges for which a late reply is used, follows from the clock's rules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from papers.figure import PAPERS, load

from representatives import slow_but

CLIENTS, SPREAD, ROUNDS = 16, 0.3, 4000
IDLE = -1


def arrivals(wait_for: int) -> Iterator[np.ndarray]:
    """Yield, for each exchange of the first of two alternating phases, whether each client's reply arrives.

    A client computes one reply at a time. It is asked when an exchange of a phase begins, or as soon as it has sent its
    reply of the other phase. An exchange ends with the first `wait_for` replies. A reply of the other phase that
    arrives meanwhile waits, and is counted first in the next exchange of its phase.
    """
    rng = np.random.default_rng(0)
    kind, left = np.full(CLIENTS, IDLE), np.zeros(CLIENTS)
    early = np.zeros((2, CLIENTS), bool)
    for exchange in range(2 * ROUNDS):
        phase = exchange % 2
        times = np.exp(SPREAD * rng.normal(size=CLIENTS) - SPREAD**2 / 2)
        begins = np.where(kind == phase, 0, left)  # when a client gets its message, if it does not have one
        arrives = np.where(kind == phase, left, left + times)
        needed = max(wait_for - int(early[phase].sum()), 0)
        first = np.argsort(arrives)[:needed]
        ends = arrives[first].max(initial=0.0)
        asked = (kind != phase) & (begins <= ends)
        early[1 - phase] |= (kind == 1 - phase) & (left <= ends)
        kind = np.where(asked, phase, np.where(left <= ends, IDLE, kind))
        left = np.where(asked, arrives - ends, np.maximum(left - ends, 0))
        kind[first], left[first] = IDLE, 0.0
        here = early[phase].copy()
        here[first] = True
        early[phase] = False
        if phase == 0:
            yield here


@pytest.mark.parametrize("panel", slow_but("n = 16", "n = 2", of=["n = 16", "n = 8", "n = 4", "n = 2"]))
def test_the_axis_is_the_mean_of_the_squares_over_the_mean(panel: str) -> None:
    """The value of a panel is E[u²]/E[u], to 2 %, where u is the number of exchanges for which a reply is used."""
    at = load(PAPERS / "theory" / "theory-delay.toml").panels[panel]
    table = np.array(list(arrivals(int(at.spec["asynchronous"]["wait_for"]))))
    used = np.concatenate([np.diff(np.flatnonzero(column)) for column in table.T])
    assert np.mean(used**2) / np.mean(used) == pytest.approx(at.value, rel=0.02)
