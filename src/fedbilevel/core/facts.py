"""What a method costs, needs and is good for, said once on its class: `help()`, tables and pages have it from there."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

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
