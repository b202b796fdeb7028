"""The privacy spent by a client's replies: (ε, δ) by Rényi differential privacy, from the library dp-accounting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedbilevel.core.errors import ConfigurationError, FedbilevelError, require, require_count
from fedbilevel.extras import missing
from fedbilevel.quoting import in_a_line

SENSITIVITY = 2.0  # in clipping bounds: two vectors of norm ≤ C are at most 2C apart


class BudgetSpentError(FedbilevelError):
    """One more reply would cost a client more privacy than it allows; it does not answer."""


@dataclass(frozen=True)
class PrivacyAccount:
    """A client's privacy account: how many replies have left it under each noise multiplier.

    It depends on no data, so that it may be shown to anyone. Whoever keeps it stores it before the reply is sent, and
    lets a client answer one message at a time: an account that was written over forgets replies.

    Args:
        releases: noise multiplier z -> replies, 1 or more.
    """

    releases: Mapping[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for noise_multiplier, count in self.releases.items():
            fits = isinstance(noise_multiplier, float) and 0 < noise_multiplier < math.inf
            require(fits, "Spent.releases: a noise multiplier", noise_multiplier, "a positive float")
            require_count(f"Spent.releases[{noise_multiplier}]", count)

    @property
    def total(self) -> int:
        """Replies so far."""
        return sum(self.releases.values())

    def plus(self, noise_multiplier: float) -> PrivacyAccount:
        """The account after one more reply."""
        z = float(noise_multiplier)
        return PrivacyAccount({**self.releases, z: self.releases.get(z, 0) + 1})

    def epsilon(self, delta: float) -> float:
        """ε of all replies together at `delta`, by the RDP accountant of dp-accounting; 0.0 before the first.

        A reply is a Gaussian mechanism of noise zC and sensitivity 2C (see `Privacy`), that is of noise multiplier
        z/2. The figure is an upper bound: the exact ε of such replies solves, with μ² = Σ (2/z)² over them,
        δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) (Dong, Roth and Su, "Gaussian differential privacy", arXiv:1905.02383).
        No amplification by sampling is claimed: who draws the cohort knows who was asked.

        Raises:
            ConfigurationError: dp-accounting is not installed.
        """
        if not self.releases:
            return 0.0
        try:
            import dp_accounting  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigurationError(f"accounting for privacy needs {missing('dp-accounting', 'flower')}") from None
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        for noise_multiplier, count in self.releases.items():
            accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / SENSITIVITY), count)
        return float(accountant.get_epsilon(delta))

    def to_json(self) -> str:
        """As text that `from_json` reads back exactly."""
        return json.dumps({repr(noise_multiplier): count for noise_multiplier, count in self.releases.items()})

    @classmethod
    def from_json(cls, text: str) -> PrivacyAccount:
        """The account that `to_json` wrote.

        Raises:
            ConfigurationError: the text is anything else; it is never taken for an empty account.
        """
        try:
            return cls({float(noise_multiplier): count for noise_multiplier, count in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            said = f"{text[:200]!r} ({in_a_line(error)})"
            raise ConfigurationError(f"this is not a stored privacy account: {said}") from None
