"""Local differential privacy of a client's replies: its terms, what is done to a reply, and the account of replies.

A site of a federation and a simulation have the same terms and do the same to a reply, but for where the noise comes
from: from a secret of the site's (flower/privacy.py), or from the keys of the run (algorithms/parts/private.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import config, is_concrete, refuse_no_number
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, require, require_count
from fedbilevel.core.facts import No
from fedbilevel.core.fed import Public, Withheld
from fedbilevel.core.tree import PyTree, is_floating
from fedbilevel.reading import parse_json
from fedbilevel.wording import in_a_line, missing

SENSITIVITY = 2.0  # in clipping bounds: two vectors of norm ≤ C are at most 2C apart
SPENT = "privacy budget spent"


class BudgetSpentError(FedbilevelError):
    """One more reply would cost a client more privacy than it allows; it does not reply."""


@dataclass(frozen=True)
class PrivacyAccount:
    """A client's privacy account: how many replies have left it under each noise multiplier.

    It depends on no data, so that it may be shown to anyone. Whoever keeps it stores it before the reply is sent, and
    lets a client reply to one message at a time: an account that was written over forgets replies.

    Args:
        releases: noise multiplier z -> replies, 1 or more.
    """

    releases: Mapping[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for noise_multiplier, count in self.releases.items():
            fits = isinstance(noise_multiplier, float) and 0 < noise_multiplier < math.inf
            require(fits, "PrivacyAccount.releases: a noise multiplier", noise_multiplier, "a positive float")
            require_count(f"PrivacyAccount.releases[{noise_multiplier}]", count)

    @property
    def total(self) -> int:
        """Replies so far."""
        return sum(self.releases.values())

    def plus(self, noise_multiplier: float, replies: int = 1) -> PrivacyAccount:
        """Return the account after so many further replies."""
        z = float(noise_multiplier)
        return PrivacyAccount({**self.releases, z: self.releases.get(z, 0) + replies})

    def epsilon(self, delta: float) -> float:
        """Return ε of all replies together at `delta`, by the RDP accountant of dp-accounting; 0.0 before the first.

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
            raise ConfigurationError(f"accounting for privacy needs {missing('dp-accounting', 'privacy')}") from None
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        for noise_multiplier, count in self.releases.items():
            accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / SENSITIVITY), int(count))
        return float(accountant.get_epsilon(delta))

    def to_json(self) -> str:
        """Write text that `from_json` reads back exactly."""
        return json.dumps({repr(noise_multiplier): count for noise_multiplier, count in self.releases.items()})

    @classmethod
    def from_json(cls, text: str) -> PrivacyAccount:
        """Read the account that `to_json` wrote.

        Raises:
            ConfigurationError: the text is anything else; it is never taken for an empty account.
        """
        try:
            return cls({float(noise_multiplier): count for noise_multiplier, count in parse_json(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            said = f"{text[:200]!r} ({in_a_line(error)})"
            raise ConfigurationError(f"this is not a stored privacy account: {said}") from None


class NoiseError(ConfigurationError):
    """The algorithm cannot do with replies that are clipped and noised; the message says why, and nothing of data."""


def check_noise(where: str, algorithm: Algorithm) -> None:
    """Refuse an algorithm, with the fields that it has, whose numbers noise would spoil; `where` begins the message."""
    if isinstance(no := algorithm.allows.noise, No):
        raise NoiseError(f"{where}: {algorithm.label} does not bear noised replies: {no.why}")


def positive_below(below: float, **default: Any) -> Any:
    """A field for a positive number below a bound; with the default None it may be None. It needs no name."""

    def prepare(name: str, value: Any) -> Any:
        allowed = f"a number above 0 and below {below:g}"
        if value is not None or not default:
            refuse_no_number(name, value, allowed)
            several = np.ndim(value) > 0 if is_concrete(value) else callable(value)
            require(not several and not isinstance(value, bytes | complex), name, value, allowed)
        if is_concrete(value):
            number = np.asarray(value, float)
            require(bool(np.all((number > 0) & (number < below))), name, value, allowed)
        return value

    return field(kw_only=False, metadata={"prepare": prepare}, **default)


@config
class Privacy:
    """Local differential privacy of a client's replies: clipping, then Gaussian noise, counted reply by reply.

    At a site of a federation it is a setting of the client's own: no message of a server changes it. What a reply
    sends, all leaves together, is one vector u. It leaves as u·min(1, C/‖u‖₂) + N(0, (zC)²·I). Two data sets of a
    client, *any* two, give clipped vectors that are at most 2C apart (both lie in the ball of radius C), so that a
    reply is a Gaussian mechanism of noise multiplier zC/2C = z/2, and n replies, asked adaptively, are composed by
    `PrivacyAccount.epsilon`. The (ε, δ) thus holds for the client's data set as a whole, not for a sample of it, and
    against the server itself.

    Not covered: metrics, counts of work and the text of errors, which the caller must not send; the time a reply
    takes; the low bits of floating-point noise (Mironov, "On significance of the least significant bits for
    differential privacy", CCS 2012).

    Args:
        clip: C > 0, the bound on the L2 norm of what is sent.
        noise_multiplier: z > 0; every entry gets noise of standard deviation zC.
        delta: δ in (0, 1), at which ε is stated.
        budget: of ε, above 0: no reply leaves that would take the account over it. With None it always replies.
    """

    clip: float = positive_below(math.inf)
    noise_multiplier: float = positive_below(math.inf)
    delta: float = positive_below(1.0)
    budget: float | None = positive_below(math.inf, default=None)

    def epsilon_after(self, replies: int) -> float:
        """Return ε, at `delta`, of `replies` ≥ 0 replies under this setting."""
        return PrivacyAccount({float(self.noise_multiplier): replies} if replies else {}).epsilon(self.delta)

    def what_to_lower(self) -> str:
        """Say what noise may do to a run that diverges, and what makes less of it; nothing of data."""
        noise = f"privacy adds noise of standard deviation zC = {self.clip * self.noise_multiplier:g} to every number"
        return f"{noise}, and each step multiplies it: lower steps, clip or noise multiplier"

    def charge(self, spent: PrivacyAccount) -> PrivacyAccount:
        """Return the account after a further reply.

        Raises:
            BudgetSpentError: it would pass `budget`.
        """
        after = spent.plus(self.noise_multiplier)
        if self.budget is not None and (cost := after.epsilon(self.delta)) > self.budget:
            raise BudgetSpentError(
                f"{SPENT}: after {spent.total} replies a further reply would take ε to {cost:.6g} at "
                f"δ = {self.delta:g}, and Privacy.budget = {self.budget:g}"
            )
        return after

    def noised(self, update: PyTree, normal: Callable[[Any], Any], xp: Any) -> PyTree:
        """Return the clipped and noised update, of the shapes, dtypes and structure that came.

        Parts marked `Public` are sent as they are, of those marked `Withheld` zeros (see core/fed.py); all else is
        the vector that is clipped and noised.

        Args:
            update: a pytree of floating leaves, but for its public parts.
            normal: draws a standard normal number for each entry of the clipped vector, which it is given.
            xp: NumPy, which computes in float64, or JAX's, in float32 or under x64 in float64; each leaf is then
                rounded to its own dtype.

        Raises:
            ConfigurationError: a leaf is not floating: an integer cannot be hidden in noise.
        """
        private = private_part(update)
        for path, leaf in jax.tree_util.tree_leaves_with_path(private):
            got = str(getattr(leaf, "dtype", type(leaf).__name__))
            field = f"the dtype of update{jax.tree_util.keystr(path)}"
            require(is_floating(leaf), field, got, "floating, for noise to be added to it")
        leaves, structure = jax.tree.flatten(jax.tree.map(xp.asarray, private))
        vector = clipped(vector_of(leaves, xp), self.clip, xp)
        vector = vector + self.clip * self.noise_multiplier * normal(vector)
        parts = xp.split(vector, np.cumsum([leaf.size for leaf in leaves], dtype=int))  # and an empty part
        sent = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=False)]

        def of_part(part: PyTree, noised: PyTree) -> PyTree:
            if isinstance(part, Withheld):
                return jax.tree.map(lambda leaf: xp.zeros_like(xp.asarray(leaf)), part)
            return jax.tree.map(xp.asarray, part) if isinstance(part, Public) else noised

        return jax.tree.map(of_part, update, jax.tree.unflatten(structure, sent), is_leaf=is_marked)


def is_marked(part: object) -> bool:
    """Tell whether a part of an update is no part of the vector that is clipped and noised."""
    return isinstance(part, Public | Withheld)


def private_part(update: PyTree) -> PyTree:
    """Return an update with None in place of the parts that are marked."""
    return jax.tree.map(lambda part: None if is_marked(part) else part, update, is_leaf=is_marked)


def vector_of(update: PyTree, xp: Any = np) -> Any:
    """Return all numbers of an update as one vector, in float64, or as JAX's in the run's float type."""
    return xp.concatenate([xp.zeros(0), *(xp.asarray(leaf).astype(float).ravel() for leaf in jax.tree.leaves(update))])


def norm_of(vector: Any, xp: Any = np) -> Any:
    """Return the L2 norm of a finite vector; no square over- or underflows."""
    largest = xp.max(xp.abs(vector), initial=0.0)
    scaled = vector / xp.where(largest > 0, largest, 1)
    return largest * xp.sqrt(scaled @ scaled)


def clipped(vector: Any, bound: Any, xp: Any = np) -> Any:
    """Scale a finite vector down to the L2 norm `bound` if it is longer; no square over- or underflows."""
    with np.errstate(over="ignore"):
        scaled = vector / xp.maximum(xp.max(xp.abs(vector), initial=0.0), xp.finfo(vector.dtype).tiny)
        return xp.where(norm_of(vector, xp) <= bound, vector, scaled * (bound / xp.maximum(norm_of(scaled, xp), 1)))
