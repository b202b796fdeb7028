"""Local differential privacy at a client: each reply is clipped and noised, whatever the server asks, by noise of the
client's own secret, and the account of what has left the client is kept on its disk."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedbilevel.core.card import counted
from fedbilevel.core.errors import ConfigurationError, NonFiniteError, require
from fedbilevel.core.privacy import Privacy, PrivacyAccount, private_part
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.core.writing import write_text
from fedbilevel.engines import lock

SECRET_BYTES = 32


def protect(
    privacy: Privacy, update: PyTree, secret: bytes, spent: PrivacyAccount, context: Sequence[int | str]
) -> tuple[PyTree, PrivacyAccount]:
    """Return the clipped and noised update (see `Privacy.noised`), and the account to store before it is sent.

    The noise is a function of the secret, the number of the reply, the context, the clipped vector and zC. A number
    is never used twice, so that every reply has noise of its own, also to a repeated request: asking again
    averages the noise, and that is what the account charges for. (Noise that came back with the same request
    would tell, by two replies being equal or not, whether the data make a difference.) Should an account
    be lost and a number come back, the noise still differs wherever another argument does.

    Args:
        privacy: the client's terms.
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
    after = privacy.charge(spent)
    if bad := nonfinite_leaves(private_part(update)):
        raise NonFiniteError(f"NaN or infinity in the update to protect: {', '.join(bad)}")

    def normal(vector: np.ndarray) -> np.ndarray:
        key = noise_key(secret, after.total, context, vector, privacy.clip * privacy.noise_multiplier)
        return gaussian(key, vector.size)

    return privacy.noised(update, normal, np), after


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


class AccountError(ConfigurationError):
    """The account counts fewer replies than have left the client; the message has ε alone, and nothing of data."""


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
            sent, spent = protect(self.privacy, update, self.secret, self.read(), context)
            self.write(spent)
        return sent, spent.epsilon(self.privacy.delta)

    def check_account(self, epsilon: float, delta: float) -> None:
        """Refuse to go on from an account that is older than what this client has told a server.

        Args:
            epsilon, delta: as the server has them from this client; 0 where it has nothing. A server that lies gets
                no reply.

        Raises:
            AccountError: the account counts fewer replies.
        """
        if epsilon > 0 and 0 < delta < 1 and epsilon > (here := self.read().epsilon(delta)) * (1 + 1e-9):
            known = f"{epsilon:.4g} at δ = {delta:g}, where its account has {here:.4g}"
            raise AccountError(f"this client has said to have spent ε = {known}: the account is an older one")

    def forecast(self, replies: float, rounds: int) -> str:
        """Say ε after a round and after a run, what was spent before included, and how many rounds the budget allows.

        Args:
            replies: in a round where the client takes part, asked once each time; not finite where that is not known.
        """
        if not math.isfinite(replies):
            return "ε is not known before: how often a round asks is decided in the run"
        terms, spent = self.privacy, self.read()

        def after(round: int) -> float:
            return spent.plus(terms.noise_multiplier, int(replies) * round).epsilon(terms.delta)

        said = ", ".join(f"ε = {after(end):.4g} after {counted(end, 'round')}" for end in sorted({1, rounds}))
        allowed = bisect_right(range(1, rounds + 1), terms.budget or math.inf, key=after)
        ends = "" if allowed == rounds else f"; the budget ends it after {counted(allowed, 'round')}"
        return f"{said}, if it takes part in each: {counted(int(replies), 'exchange')} a round{ends}"

    def read(self) -> PrivacyAccount:
        if not self.account.exists():
            raise ConfigurationError(f"{self.account} is missing: what has left this client is not known; restore it")
        try:
            return PrivacyAccount.from_json(self.account.read_text(errors="replace"))
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.account} is damaged, restore it: {error}") from error

    def write(self, spent: PrivacyAccount) -> None:
        write_text(self.account, spent.to_json())
