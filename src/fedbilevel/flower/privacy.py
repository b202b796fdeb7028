"""Local differential privacy at a client: each reply is clipped and noised, whatever the server asks, and the account
of what has left the client is kept on its disk."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, NonFiniteError, require, require_count
from fedbilevel.core.facts import No
from fedbilevel.core.fed import LastReply, Public, ReplyDelta, Withheld
from fedbilevel.core.tree import PyTree, is_floating, nonfinite_leaves
from fedbilevel.engines import lock
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.wording import in_a_line, missing

SENSITIVITY = 2.0  # in clipping bounds: two vectors of norm ≤ C are at most 2C apart


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

    def plus(self, noise_multiplier: float) -> PrivacyAccount:
        """Return the account after a further reply."""
        z = float(noise_multiplier)
        return PrivacyAccount({**self.releases, z: self.releases.get(z, 0) + 1})

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
            raise ConfigurationError(f"accounting for privacy needs {missing('dp-accounting', 'flower')}") from None
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        for noise_multiplier, count in self.releases.items():
            accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / SENSITIVITY), count)
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
            return cls({float(noise_multiplier): count for noise_multiplier, count in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            said = f"{text[:200]!r} ({in_a_line(error)})"
            raise ConfigurationError(f"this is not a stored privacy account: {said}") from None


SECRET_BYTES = 32


class NoiseError(ConfigurationError):
    """The algorithm cannot do with replies that are clipped and noised; the message says why, and nothing of data."""


def check_noise(algorithm: Algorithm) -> None:
    """Refuse an algorithm, with the fields that it has, whose numbers noise would spoil."""
    if isinstance(no := algorithm.allows.noise, No):
        raise NoiseError(f"Site.privacy: {algorithm.label} does not bear noised replies: {no.why}")


@dataclass(frozen=True)
class Privacy:
    """Local differential privacy of a client's replies: clipping, then Gaussian noise, counted reply by reply.

    A setting of the client's own: no message of a server changes it. What a reply sends, all leaves together, is
    one vector u. It leaves as u·min(1, C/‖u‖₂) + N(0, (zC)²·I). Two data sets of a client, *any* two, give clipped
    vectors that are at most 2C apart (both lie in the ball of radius C), so that a reply is a Gaussian mechanism of
    noise multiplier zC/2C = z/2, and n replies, asked adaptively, are composed by `PrivacyAccount.epsilon`. The (ε, δ)
    thus holds for the client's data set as a whole, not for a sample of it, and against the server itself.

    Not covered: metrics, counts of work and the text of errors, which the caller must not send; the time a reply
    takes; the low bits of floating-point noise (Mironov, "On significance of the least significant bits for
    differential privacy", CCS 2012).

    Args:
        clip: C > 0, the bound on the L2 norm of what is sent.
        noise_multiplier: z > 0; every entry gets noise of standard deviation zC.
        delta: δ in (0, 1), at which ε is stated.
        epsilon: ε > 0, the budget: no reply leaves that would take the account over it. With None it always replies.
    """

    clip: float
    noise_multiplier: float
    delta: float
    epsilon: float | None = None

    def __post_init__(self) -> None:
        _require_number("Privacy.clip", self.clip, 0.0, math.inf)
        _require_number("Privacy.noise_multiplier", self.noise_multiplier, 0.0, math.inf)
        _require_number("Privacy.delta", self.delta, 0.0, 1.0)
        if self.epsilon is not None:
            _require_number("Privacy.epsilon", self.epsilon, 0.0, math.inf)

    def epsilon_after(self, replies: int) -> float:
        """Return ε, at `delta`, of `replies` ≥ 0 replies under this setting."""
        return PrivacyAccount({float(self.noise_multiplier): replies} if replies else {}).epsilon(self.delta)

    def charge(self, spent: PrivacyAccount) -> PrivacyAccount:
        """Return the account after a further reply.

        Raises:
            BudgetSpentError: it would pass `epsilon`.
        """
        after = spent.plus(self.noise_multiplier)
        if self.epsilon is not None and (cost := after.epsilon(self.delta)) > self.epsilon:
            raise BudgetSpentError(
                f"privacy budget spent: after {spent.total} replies a further reply would take ε to {cost:.6g} at "
                f"δ = {self.delta:g}, and Privacy.epsilon = {self.epsilon:g}"
            )
        return after

    def protect(
        self, update: PyTree, secret: bytes, spent: PrivacyAccount, context: Sequence[int | str]
    ) -> tuple[PyTree, PrivacyAccount]:
        """Return the clipped and noised update, and the account to store before it is sent.

        Parts marked `Public` are sent as they are, of those marked `Withheld` zeros (see core/fed.py); all else is
        the vector that is clipped and noised.

        The noise is a function of the secret, the number of the reply, the context, the clipped vector and zC. A number
        is never used twice, so that every reply has noise of its own, also to a repeated request: asking again
        averages the noise, and that is what the account charges for. (Noise that came back with the same request
        would tell, by two replies being equal or not, whether the data make a difference.) Should an account
        be lost and a number come back, the noise still differs wherever another argument does.

        Args:
            update: a pytree of floating leaves, but for its public parts.
            secret: of `load_secret`; it must not leave the client.
            spent: the account so far.
            context: what names the request: the run, round, exchange and phase.

        Returns:
            update: NumPy arrays of the shapes, dtypes and structure that came; computed in float64, then rounded.
            spent: the account, this reply included.

        Raises:
            BudgetSpentError: the budget does not allow it.
            ConfigurationError: a leaf is not floating (an integer cannot be hidden in noise), or a bad argument.
            NonFiniteError: the update holds a NaN or an infinity.
        """
        after = self.charge(spent)
        private = jax.tree.map(lambda part: None if is_marked(part) else part, update, is_leaf=is_marked)
        vector = clipped(flat(private), self.clip)
        deviation = self.clip * self.noise_multiplier
        key = noise_key(secret, after.total, context, vector, deviation)
        vector = vector + deviation * gaussian(key, vector.size)
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, private))
        parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves], dtype=int))  # and an empty part
        sent = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=False)]
        return jax.tree.map(as_sent, update, jax.tree.unflatten(structure, sent), is_leaf=is_marked), after


def load_secret(path: str | Path) -> bytes:
    """Load a client's 32 secret bytes from the file `path`, which is made, of mode 0600, where there is none.

    A file per client: two that share a file may come to share noise, and then each could take it off the other.

    Raises:
        ConfigurationError: others may read the file, or it does not hold 32 bytes.
    """
    path = Path(path)
    if not path.exists():
        _create_secret(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    require(mode & 0o077 == 0, f"the mode of {path}", oct(mode), "0o600: others could read this client's secret")
    secret = path.read_bytes()
    require(len(secret) == SECRET_BYTES, f"the length of {path}", len(secret), f"{SECRET_BYTES} bytes")
    return secret


def is_marked(part: object) -> bool:
    """Tell whether a part of an update is no part of the vector that is clipped and noised."""
    return isinstance(part, Public | Withheld)


def as_sent(part: PyTree, noised: PyTree) -> PyTree:
    """Return the part of an update that is sent in place of `part`: `noised`, unless `part` is marked."""
    if isinstance(part, Withheld):
        return jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), part)
    return jax.tree.map(np.asarray, part) if isinstance(part, Public) else noised


def flat(update: PyTree) -> np.ndarray:
    """Put all leaves into a float64 vector.

    Raises:
        ConfigurationError, NonFiniteError: as in `Privacy.protect`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(update)
    for path, leaf in leaves:
        got = str(getattr(leaf, "dtype", type(leaf).__name__))
        field = f"the dtype of update{jax.tree_util.keystr(path)}"
        require(is_floating(leaf), field, got, "floating, for noise to be added to it")
    if bad := nonfinite_leaves(update):
        raise NonFiniteError(f"NaN or infinity in the update to protect: {', '.join(bad)}")
    return np.concatenate([np.zeros(0), *(np.asarray(leaf, np.float64).ravel() for _, leaf in leaves)])


def clipped(vector: np.ndarray, bound: float) -> np.ndarray:
    """Scale `vector` (float64, finite) down to the L2 norm `bound` if it is longer; no square over- or underflows."""
    largest = float(np.max(np.abs(vector), initial=0.0))
    if largest == 0.0:
        return vector
    scaled = vector / largest
    norm = math.sqrt(scaled @ scaled)
    return vector if largest * norm <= bound else scaled * (bound / norm)


def noise_key(secret: bytes, number: int, context: Sequence[int | str], vector: np.ndarray, deviation: float) -> bytes:
    """Return 32 bytes, pseudo-random to whoever lacks the secret, others for every other argument (HMAC-SHA256)."""
    fits = isinstance(secret, bytes) and len(secret) == SECRET_BYTES
    require(fits, "secret", "(not shown)", f"{SECRET_BYTES} bytes")
    fits = not isinstance(context, str) and all(isinstance(part, int | str) for part in context)
    require(fits, "context", context, "a sequence of whole numbers and strings")
    named = ["fedbilevel noise", number, list(context), deviation, hashlib.sha256(vector.tobytes()).hexdigest()]
    return hmac.digest(secret, json.dumps(named).encode(), "sha256")


def gaussian(key: bytes, count: int) -> np.ndarray:
    """Draw `count` standard normal numbers, float64, by Box and Muller from the ChaCha20 stream of a key used only
    once.

    Uniforms have 64 bits, so that no number is beyond √(128·ln 2) = 9.42, where a normal number is with chance 5e-21.
    """
    pairs = (count + 1) // 2
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(16 * pairs))
    uniform = (np.frombuffer(stream, "<u8").astype(np.float64) + 1.0) * 2.0**-64  # in (0, 1]: its log is finite
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _create_secret(path: Path) -> None:
    """Write a new secret under a temporary name and link it to `path`, so that no process ever reads half of it. Where
    two processes do so at a time, the secret of the first stays."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # the other process's is as good
    finally:
        os.unlink(temporary)


def _require_number(field: str, got: object, low: float, high: float) -> None:
    fits = isinstance(got, int | float) and not isinstance(got, bool) and low < got < high
    require(fits, field, got, f"a number above {low:g} and below {high:g}")


def is_kept(part: object) -> bool:
    return isinstance(part, LastReply)


def without_replies(state: PyTree) -> PyTree:
    """Return the state as a phase has to see it, for its change to be the reply itself: the last replies are 0."""

    def emptied(part: Any) -> Any:
        return part._replace(update=jax.tree.map(np.zeros_like, part.update)) if is_kept(part) else part

    return jax.tree.map(emptied, state, is_leaf=is_kept)


def released(sent: PyTree, before: PyTree, after: PyTree) -> tuple[PyTree, PyTree]:
    """Return the update to send and the state to keep, where a reply is sent as its difference from the last reply.

    The difference of two noised replies is sent, not the noised difference of two replies: what the server has added up
    is then each client's last reply with the noise of a single reply, however many there were. All that leaves the
    client, and all that it keeps, is made of replies that were clipped and noised, so that nothing more is spent.

    Args:
        sent: the update, noised; a `ReplyDelta` has the reply itself.
        before: what the client kept, or None.
        after: what the phase, called with `without_replies(before)`, would keep.
    """
    if not isinstance(sent, ReplyDelta):
        return sent, after
    last: list[Any] = []

    def renewed(old: Any, new: Any) -> Any:
        if not is_kept(old):
            return new
        if int(new.exchange) == int(old.exchange):  # of another kind of reply
            return old
        last.append(old.update)
        return new._replace(update=sent.update)

    kept = jax.tree.map(renewed, before, after, is_leaf=is_kept)
    (old,) = last
    return sent._replace(update=optax.tree.sub(sent.update, jax.tree.map(np.asarray, old))), kept


class PrivacyGuard:
    """Clips and noises updates with the secret and the account of a folder, for one process at a time.

    The account is written before an update leaves the client.

    Raises:
        ConfigurationError: the folder is another client's, or its account is missing or damaged.
        CheckpointError: the folder cannot be locked.
    """

    def __init__(self, privacy: Privacy, folder: Path, client: int) -> None:
        self.privacy, self.lock = privacy, folder / "lock"
        self.account, owner, secret = folder / "account.json", folder / "client", folder / "secret"
        folder.mkdir(parents=True, exist_ok=True)
        with lock.wait_for_lock(self.lock):
            if not owner.exists():
                write_text(owner, str(client))
            whose = owner.read_text(errors="replace")
            require(whose == str(client), "Site.id", client, f"{whose[:20]}, whose {folder} is")
            if not secret.exists() and not self.account.exists():  # never later: an account must not begin anew
                self.write(PrivacyAccount())
            self.read()
            self.secret = load_secret(secret)

    def protect(self, update: PyTree, context: Sequence[int | str]) -> tuple[PyTree, float]:
        """Return the clipped and noised update, and ε so far, this reply included."""
        with lock.wait_for_lock(self.lock):
            sent, spent = self.privacy.protect(update, self.secret, self.read(), context)
            self.write(spent)
        return sent, spent.epsilon(self.privacy.delta)

    def read(self) -> PrivacyAccount:
        if not self.account.exists():
            raise ConfigurationError(f"{self.account} is missing: what has left this client is not known; restore it")
        try:
            return PrivacyAccount.from_json(self.account.read_text(errors="replace"))
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.account} is damaged, restore it: {error}") from error

    def write(self, spent: PrivacyAccount) -> None:
        write_text(self.account, spent.to_json())
