"""Protect a client's replies by local differential privacy, whatever the server asks.

Each reply is clipped, and the client adds noise that is computed from its own secret. A file on the client's disk, the
account, records all replies and therefore ε.
"""

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
from fedbilevel.core.errors import ConfigurationError, NonFiniteError, errors_in, require
from fedbilevel.core.privacy import Privacy, PrivacyAccount, private_part
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.core.writing import write_text
from fedbilevel.engines import lock

SECRET_BYTES = 32


def protect(
    privacy: Privacy, update: PyTree, secret: bytes, spent: PrivacyAccount, context: Sequence[int | str]
) -> tuple[PyTree, PrivacyAccount]:
    """Clip an update and add noise (see `Privacy.noised`).

    Store the returned account before the update is sent.

    The noise is a function of the secret, the number of the reply, the context, the clipped vector, and the standard
    deviation of the noise, which is noise multiplier times clip. No number is used for two replies, so every reply has
    new noise, even if the server repeats a request. A server that repeats requests can average out the noise, so the
    account charges every reply. (With the same noise for a repeated request, the server would see whether the clipped
    vector has changed, which is information about the data.) If the account is lost and a number is used again, the
    noise is still new unless all other arguments are also the same.

    Args:
        privacy: the client's terms, such as clip, noise multiplier and budget.
        update: a pytree whose leaves are floating-point arrays, except in parts that are marked as public.
        secret: the secret of `load_secret`; it must not leave the client.
        spent: the account before this reply.
        context: the run, round, exchange and phase, which together identify the request.

    Returns:
        update: NumPy arrays with the shapes, dtypes and structure of `update`; computed in float64, then rounded.
        spent: the account, in which this reply is included.

    Raises:
        BudgetSpentError: the budget does not allow the reply.
        ConfigurationError: a leaf is not floating-point (noise cannot hide an integer), or an argument is wrong.
        NonFiniteError: the update contains NaN or infinity.
    """
    after = privacy.charge(spent)
    if bad := nonfinite_leaves(private_part(update)):
        raise NonFiniteError(f"NaN or infinity in the update to protect: {', '.join(bad)}", names=bad)

    def normal(vector: np.ndarray) -> np.ndarray:
        key = noise_key(secret, after.total, context, vector, privacy.clip * privacy.noise_multiplier)
        return gaussian(key, vector.size)

    return privacy.noised(update, normal, np), after


def load_secret(path: str | Path) -> bytes:
    """Load a client's 32 secret bytes from the file `path`; a missing file is created with mode 0600.

    Each client needs its own file. Two clients that share a file may use the same noise, and each could then subtract
    it from the other's replies.

    Raises:
        ConfigurationError: other users may read the file, or it does not have 32 bytes.
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
    """Return 32 bytes that depend on all arguments and are pseudo-random without the secret (HMAC-SHA256)."""
    fits = isinstance(secret, bytes) and len(secret) == SECRET_BYTES
    require(fits, "secret", "(not shown)", f"{SECRET_BYTES} bytes")
    fits = not isinstance(context, str) and all(isinstance(part, int | str) for part in context)
    require(fits, "context", context, "a sequence of whole numbers and strings")
    named = ["fedbilevel noise", number, list(context), deviation, hashlib.sha256(vector.tobytes()).hexdigest()]
    return hmac.digest(secret, json.dumps(named).encode(), "sha256")


def gaussian(key: bytes, count: int) -> np.ndarray:
    """Draw `count` standard normal numbers, float64, by the method of Box and Muller.

    The uniform numbers come from the ChaCha20 stream of `key`, which must be used only once. They have 64 bits, so that
    no normal number is larger than √(128·ln 2) = 9.42. A true normal number is larger with probability 5e-21.
    """
    pairs = (count + 1) // 2
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(16 * pairs))
    uniform = (np.frombuffer(stream, "<u8").astype(np.float64) + 1.0) * 2.0**-64  # in (0, 1]: its log is finite
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def _create_secret(path: Path) -> None:
    """Write a new secret under a temporary name and link it to `path`, so that no process reads an incomplete secret.

    If two processes do so at the same time, the secret of the first remains.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process has written a secret
    finally:
        os.unlink(temporary)


class AccountError(ConfigurationError):
    """An account that records fewer replies than the client has sent.

    The message contains values of ε, and nothing of the data.
    """


class PrivacyGuard:
    """Clip updates and add noise, with the secret and the account that are stored in a folder.

    The account is written before an update leaves the client. While one process uses the folder, no other process can
    use it.

    Raises:
        ConfigurationError: the folder belongs to another client, or its account is missing or damaged.
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
            require(whose == str(client), "Site.id", client, f"{whose[:20]}, the client to which {folder} belongs")
            if not secret.exists() and not self.account.exists():  # with a secret, a missing account was lost
                self.write(PrivacyAccount())
            self.read()
            self.secret = load_secret(secret)

    def protect(self, update: PyTree, context: Sequence[int | str]) -> tuple[PyTree, float]:
        """Return the clipped and noised update, and ε so far, including this reply."""
        with lock.wait_for_lock(self.lock):
            sent, spent = protect(self.privacy, update, self.secret, self.read(), context)
            self.write(spent)
        return sent, spent.epsilon(self.privacy.delta)

    def check_account(self, epsilon: float, delta: float) -> None:
        """Refuse an account whose ε is smaller than an ε that this client has reported to the server.

        Args:
            epsilon, delta: the largest ε that the server has received from this client, and its δ; 0 if there is none.
                If a server sends a value that is too large, it gets no reply.

        Raises:
            AccountError: the account contains fewer replies than the client has sent.
        """
        if epsilon > 0 and 0 < delta < 1 and epsilon > (here := self.read().epsilon(delta)) * (1 + 1e-9):
            known = f"{epsilon:.4g} at δ = {delta:g}, but its account has {here:.4g}"
            raise AccountError(f"this client has reported ε = {known}: the account is an older copy")

    def forecast(self, replies: float, rounds: int) -> str:
        """Describe in a sentence how ε grows: after a round, after the run, and when the budget is spent.

        Earlier runs are included.

        Args:
            replies: the number of replies in a round, if the client is asked once in each exchange; infinity or NaN if
                this number is not known.
            rounds: the number of rounds of the run.
        """
        if not math.isfinite(replies):
            return "ε is not known beforehand, since the number of replies in a round depends on the run"
        terms, spent = self.privacy, self.read()

        def after(round: int) -> float:
            return spent.plus(terms.noise_multiplier, int(replies) * round).epsilon(terms.delta)

        said = ", ".join(f"ε = {after(end):.4g} after {counted(end, 'round')}" for end in sorted({1, rounds}))
        allowed = bisect_right(range(1, rounds + 1), terms.budget or math.inf, key=after)
        ends = "" if allowed == rounds else f"; the budget is spent after {counted(allowed, 'round')}"
        return f"{said}, if the client takes part in each: {counted(int(replies), 'exchange')} a round{ends}"

    def read(self) -> PrivacyAccount:
        """Return the account of the client's replies so far.

        Raises:
            ConfigurationError: the file is missing or damaged.
        """
        if not self.account.exists():
            text = "the file is missing, and the client's ε so far is unknown; restore the file"
            raise ConfigurationError(text, where=str(self.account))
        with errors_in(f"{self.account} is damaged; restore the file"):
            return PrivacyAccount.from_json(self.account.read_text(errors="replace"))

    def write(self, spent: PrivacyAccount) -> None:
        """Replace the account in the folder, atomically."""
        write_text(self.account, spent.to_json())
