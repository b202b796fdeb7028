"""Draw when each client works on which message, by the clock of the engines: docs/images/timeline.png.

There are five clients, one of which is slow. An answer takes ten gradients and products. In the upper panel every
exchange waits for all clients, and in the lower panel for the first three answers. A bar is the work on one message,
from the time when it was sent to the time when the answer arrives. The number and the colour of a bar say in which
exchange the message was sent.
"""

import sys
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fedbilevel as fb
from fedbilevel.engines.virtual_time import TICK, ClockState

CLIENTS, SECONDS = 5, 24.0
CLOCK = fb.Clock(compute=0.1, network=1.0, spread=0.3, stragglers=1, slowdown=4.0, seed=4)
UNITS = 10  # the number of batch gradients and products of an answer
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


class Work(NamedTuple):
    """A client's work on one message."""

    client: int
    asked: int  # the exchange in which the message was sent, from 1
    begins: float
    ends: float


def play(n: int) -> tuple[list[Work], list[float], dict[Work, int]]:
    """Simulate exchanges that wait for n replies.

    Return all work, the ends of exchanges, and the exchange in which each reply counted.
    """
    pace, now = CLOCK.pace(CLIENTS), ClockState.start()
    busy: list[Work] = []
    done: list[Work] = []
    ends = [0.0]
    counted: dict[Work, int] = {}
    while ends[-1] < SECONDS:
        lasts = np.asarray(pace.durations(now, jnp.arange(CLIENTS), jnp.full(CLIENTS, UNITS))) * TICK
        idle = sorted({*range(CLIENTS)} - {work.client for work in busy})
        asked = [Work(client, len(ends), ends[-1], ends[-1] + lasts[client]) for client in idle]
        done += asked
        busy = sorted(busy + asked, key=lambda work: work.ends)
        arriving, busy = busy[:n], busy[n:]
        counted |= dict.fromkeys(arriving, len(ends))
        now = now.later(pace, jnp.int32(round((arriving[-1].ends - ends[-1]) / TICK)))
        ends.append(arriving[-1].ends)
    return done, ends[1:], counted


def draw(panel: Any, n: int) -> None:
    """Draw a panel for one number of awaited replies: a row for each client, and a line for each exchange."""
    works, ends, counted = play(n)
    slow = max(works, key=lambda work: work.ends - work.begins).client
    rows = [client for client in range(CLIENTS) if client != slow] + [slow]
    for row in range(CLIENTS):
        panel.barh(row, SECONDS, height=0.62, color="#EEEEEE", zorder=0)
    for work in works:
        colour, row = COLOURS[(work.asked - 1) % len(COLOURS)], rows.index(work.client)
        panel.barh(row, work.ends - work.begins, left=work.begins, height=0.62, color=colour, edgecolor="white")
        shown = min(work.ends, SECONDS) - work.begins
        if shown > 0.7:
            text, late = str(work.asked), counted.get(work, 0) - work.asked
            if work.client == slow and late > 0:
                text += f", counts in {counted[work]}: staleness {late}"
            behind = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            style = {"color": "white", "fontsize": 9, "weight": "bold", "bbox": behind, "zorder": 4}
            panel.text(work.begins + shown / 2, row, text, ha="center", va="center", **style)
    within = [end for end in ends if end <= SECONDS]
    for number, (begin, end) in enumerate(pairwise([0.0, *within, SECONDS]), start=1):
        if end < SECONDS:
            panel.axvline(end, color="#222222", linewidth=1.1, zorder=3)
        panel.text((begin + end) / 2, -0.62, str(number), ha="center", va="bottom", fontsize=9, color="#222222")
    panel.text(-0.25, -0.62, "exchange", ha="right", va="bottom", fontsize=8.5, color="#222222")
    waits = "all five" if n == CLIENTS else f"the first {n}"
    panel.set_title(f"waits for {waits}: {len(within)} exchanges in {SECONDS:.0f} s", loc="left", fontsize=11, pad=18)
    panel.set_yticks(
        range(CLIENTS), [f"client {k + 1}" + (" (slow)" if k == CLIENTS - 1 else "") for k in range(CLIENTS)]
    )
    panel.set_ylim(CLIENTS - 0.5, -0.6)
    panel.set_xlim(0, SECONDS)
    panel.tick_params(left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)


def main(picture: str) -> None:
    figure = Figure(figsize=(10.5, 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    draw(above, CLIENTS)
    draw(below, 3)
    below.set_xlabel(
        "virtual seconds   (bars: work on the message of that exchange; grey: idle; lines: ends of exchanges)"
    )
    figure.savefig(picture, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:] or ["docs/images/timeline.png"])
