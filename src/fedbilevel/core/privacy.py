"""Implement local differential privacy of a client's replies: its settings, clipping and noise, and its accounting.

A site of a federation and a simulation use the same settings and treat replies in the same way. Only the source of the
noise differs: a secret of the site (flower/privacy.py), or the keys of the run (algorithms/parts/private.py).
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
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, UnsupportedError, require, require_count
from fedbilevel.core.facts import No
from fedbilevel.core.fed import Public, Withheld
from fedbilevel.core.tree import PyTree, is_floating
from fedbilevel.reading import parse_json
from fedbilevel.wording import in_a_line, missing

SENSITIVITY = 2.0  # in units of the clipping bound C: two vectors of norm at most C are at most 2C apart
SPENT = "privacy budget spent"


class BudgetSpentError(FedbilevelError):
    """Report that a client does not reply, since another reply would exceed its privacy budget."""


@dataclass(frozen=True)
class PrivacyAccount:
    """Hold a client's privacy account: the number of replies that it has sent with each noise multiplier.

    The account does not depend on data and may be public. Store it before a reply is sent, and let a client answer one
    message at a time: an account that overwrites a newer one would forget replies.

    Args:
        releases: a mapping from a noise multiplier z to the number of replies that were sent with it, at least 1.
    """

    releases: Mapping[float, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for noise_multiplier, count in self.releases.items():
            fits = isinstance(noise_multiplier, float) and 0 < noise_multiplier < math.inf
            require(fits, "PrivacyAccount.releases: a noise multiplier", noise_multiplier, "a positive float")
            require_count(f"PrivacyAccount.releases[{noise_multiplier}]", count)

    @property
    def total(self) -> int:
        """Return the number of replies so far."""
        return sum(self.releases.values())

    def plus(self, noise_multiplier: float, replies: int = 1) -> PrivacyAccount:
        """Return the account after further replies with a noise multiplier."""
        z = float(noise_multiplier)
        return PrivacyAccount({**self.releases, z: self.releases.get(z, 0) + replies})

    def epsilon(self, delta: float) -> float:
        """Return ε of all replies together at `delta`, by the RDP accountant of dp-accounting; 0.0 without any reply.

        A reply is a Gaussian mechanism with noise zC and sensitivity 2C (see `Privacy`), so that its noise multiplier
        is z/2. The result is an upper bound. The exact ε solves δ = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2), where μ² is the
        sum of (2/z)² over all replies (Dong, Roth and Su, "Gaussian differential privacy", arXiv:1905.02383). There is
        no amplification by sampling, since the server, which draws the cohort, knows which clients it asked.

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
        """Return the account as a JSON text that `from_json` reads back exactly."""
        return json.dumps({repr(noise_multiplier): count for noise_multiplier, count in self.releases.items()})

    @classmethod
    def from_json(cls, text: str) -> PrivacyAccount:
        """Return the account from a text that `to_json` wrote.

        Raises:
            ConfigurationError: the text is not a stored account. Such a text is never read as an empty account.
        """
        try:
            return cls({float(noise_multiplier): count for noise_multiplier, count in parse_json(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            message = f"this is not a stored privacy account: {text[:200]!r} ({in_a_line(error)})"
            allowed = "a text of PrivacyAccount.to_json"
            raise ConfigurationError(path="privacy account", got=text, allowed=allowed, message=message) from None


class NoiseError(UnsupportedError):
    """Report an algorithm that does not support clipped and noisy replies; the message has the reason, and no data."""


def check_noise(where: str, algorithm: Algorithm) -> None:
    """Refuse an algorithm that, with its present fields, does not support noisy replies; `where` begins the message."""
    if isinstance(no := algorithm.allows.noise, No):
        raise NoiseError(f"{algorithm.label} does not support noisy replies: {no.why}", where=where)


def positive_below(below: float, **default: Any) -> Any:
    """Make a field for a positive number below a bound; None is also allowed if it is the default.

    The field may be passed by position.
    """

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
    """Describe the local differential privacy of a client's replies: clipping, Gaussian noise, and accounting.

    All arrays of a reply together are one vector u, which is sent as u·min(1, C/‖u‖₂) + N(0, (zC)²·I). The clipped
    vectors of *any* two data sets of a client lie in the ball of radius C and are at most 2C apart. A reply is
    therefore a Gaussian mechanism with the noise multiplier zC/2C = z/2. `PrivacyAccount.epsilon` composes the replies
    to n messages, where a message may depend on earlier replies. The guarantee (ε, δ) is for the whole data set of a
    client, not for a single sample, and holds also against the server. At a site of a federation, the setting belongs
    to the client, and no message of a server changes it.

    The guarantee does not cover metrics, counts of work and texts of errors, which the caller must not send; the time
    that a reply takes; and the low bits of floating-point noise (Mironov, "On significance of the least significant
    bits for differential privacy", CCS 2012).

    Args:
        clip: C > 0, the bound on the L2 norm of a reply.
        noise_multiplier: z > 0; every entry of a reply gets noise of standard deviation zC.
        delta: δ, strictly between 0 and 1: the probability in the guarantee (ε, δ) for which ε is computed.
        budget: the largest ε of the account, above 0. A client does not send a reply that would exceed it. None: no
            limit.
    """

    clip: float = positive_below(math.inf)
    noise_multiplier: float = positive_below(math.inf)
    delta: float = positive_below(1.0)
    budget: float | None = positive_below(math.inf, default=None)

    def epsilon_after(self, replies: int) -> float:
        """Return ε at `delta` after `replies` ≥ 0 replies with this setting."""
        return PrivacyAccount({float(self.noise_multiplier): replies} if replies else {}).epsilon(self.delta)

    def what_to_lower(self) -> str:
        """Return advice for a run that diverges: the size of the noise and how to lower it. The text holds no data."""
        deviation = f"standard deviation {self.clip * self.noise_multiplier:g} (noise multiplier × clip)"
        noise = f"privacy adds noise of {deviation} to every number, and the step size scales this noise"
        return f"{noise}: lower the step sizes, clip or the noise multiplier"

    def charge(self, spent: PrivacyAccount) -> PrivacyAccount:
        """Return the account after another reply.

        Raises:
            BudgetSpentError: the reply would exceed `budget`.
        """
        after = spent.plus(self.noise_multiplier)
        if self.budget is not None and (cost := after.epsilon(self.delta)) > self.budget:
            raise BudgetSpentError(
                f"{SPENT}: after {spent.total} replies, another reply would raise ε to {cost:.6g} at "
                f"δ = {self.delta:g}, and the budget is {self.budget:g}"
            )
        return after

    def noised(self, update: PyTree, normal: Callable[[Any], Any], xp: Any) -> PyTree:
        """Return an update after clipping and noise; structure, shapes and dtypes stay the same.

        Parts marked `Public` do not change, and parts marked `Withheld` become zeros (see core/fed.py). All other parts
        form the vector that is clipped and noised.

        Args:
            update: a pytree of floating arrays; its public parts may have other types.
            normal: a function that gets the clipped vector and draws a standard normal number for each of its entries.
            xp: `numpy`, which computes in float64, or `jax.numpy`, which computes in float64 only if `jax_enable_x64`
                is on. Each array is then rounded to its own dtype.

        Raises:
            ConfigurationError: a leaf is not floating, since noise cannot hide an integer.
        """
        private = private_part(update)
        for path, leaf in jax.tree_util.tree_leaves_with_path(private):
            got = str(getattr(leaf, "dtype", type(leaf).__name__))
            field = f"the dtype of update{jax.tree_util.keystr(path)}"
            require(is_floating(leaf), field, got, "floating, so that noise can be added")
        leaves, structure = jax.tree.flatten(jax.tree.map(xp.asarray, private))
        vector = clipped(vector_of(leaves, xp), self.clip, xp)
        vector = vector + self.clip * self.noise_multiplier * normal(vector)
        parts = xp.split(vector, np.cumsum([leaf.size for leaf in leaves], dtype=int))  # the last part is empty
        sent = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=False)]

        def of_part(part: PyTree, noised: PyTree) -> PyTree:
            if isinstance(part, Withheld):
                return jax.tree.map(lambda leaf: xp.zeros_like(xp.asarray(leaf)), part)
            return jax.tree.map(xp.asarray, part) if isinstance(part, Public) else noised

        return jax.tree.map(of_part, update, jax.tree.unflatten(structure, sent), is_leaf=is_marked)


def is_marked(part: object) -> bool:
    """Return whether a part of an update is marked as public or withheld, so that it is not clipped and noised."""
    return isinstance(part, Public | Withheld)


def private_part(update: PyTree) -> PyTree:
    """Return an update with None in place of its public and withheld parts."""
    return jax.tree.map(lambda part: None if is_marked(part) else part, update, is_leaf=is_marked)


def vector_of(update: PyTree, xp: Any = np) -> Any:
    """Return all numbers of an update as one vector: in float64 if `xp` is NumPy, in JAX's float type if it is JAX."""
    return xp.concatenate([xp.zeros(0), *(xp.asarray(leaf).astype(float).ravel() for leaf in jax.tree.leaves(update))])


def comparable_norm(tree: PyTree) -> float:
    """Return the L2 norm of a message or of an update, as a server compares it with the norms of others.

    The norm is taken of all leaves of a real floating type, except those in parts marked `Public` with a bounded range.
    Integers and booleans, such as the number of an exchange in a message, are left out, and so are public counts: they
    have another unit than the other numbers, and may grow in every exchange. A public part without a bounded range is
    checked by nothing else, so it counts in the norm.
    """
    is_checked = lambda part: isinstance(part, Public) and part.within.bounded  # noqa: E731
    rest = jax.tree.map(lambda part: None if is_checked(part) else part, tree, is_leaf=is_checked)
    return float(norm_of(vector_of([leaf for leaf in jax.tree.leaves(rest) if is_floating(leaf)])))


def norm_of(vector: Any, xp: Any = np) -> Any:
    """Return the L2 norm of a finite vector, without overflow or underflow of squares."""
    largest = xp.max(xp.abs(vector), initial=0.0)
    scaled = vector / xp.where(largest > 0, largest, 1)
    return largest * xp.sqrt(scaled @ scaled)


def clipped(vector: Any, bound: Any, xp: Any = np) -> Any:
    """Scale a finite vector down to the L2 norm `bound` if it is longer, without overflow or underflow of squares."""
    with np.errstate(over="ignore"):
        scaled = vector / xp.maximum(xp.max(xp.abs(vector), initial=0.0), xp.finfo(vector.dtype).tiny)
        return xp.where(norm_of(vector, xp) <= bound, vector, scaled * (bound / xp.maximum(norm_of(scaled, xp), 1)))
