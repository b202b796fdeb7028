"""A client's privacy on disk: its secret, and the account of all its replies, of all runs together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import lock
from fedbilevel.engines.checkpoint import write_atomically
from fedbilevel.flower.privacy.accounting import PrivacyAccount
from fedbilevel.flower.privacy.mechanism import Privacy, load_secret


class PrivacyGuard:
    """Clips and noises updates with the secret and the account of a folder, for one process at a time.

    The account is written before an update leaves the client.

    Raises:
        ConfigurationError: the folder is another client's, or its account is missing or damaged.
        CheckpointError: the folder cannot be locked.
    """

    def __init__(self, privacy: Privacy, folder: Path, client: int) -> None:
        self.privacy, self.folder = privacy, folder
        self.account, owner, secret = folder / "account.json", folder / "client", folder / "secret"
        folder.mkdir(parents=True, exist_ok=True)
        with self.turn():
            if not owner.exists():
                write_atomically(owner, lambda file: file.write(str(client).encode()))
            whose = owner.read_text(errors="replace")
            require(whose == str(client), "Site.id", client, f"{whose[:20]}, whose {folder} is")
            if not secret.exists() and not self.account.exists():  # never later: an account must not begin anew
                self.write(PrivacyAccount())
            self.read()
            self.secret = load_secret(secret)

    def protect(self, update: PyTree, context: Sequence[int | str]) -> tuple[PyTree, float]:
        """The clipped and noised update, and ε so far, this reply included."""
        with self.turn():
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
        write_atomically(self.account, lambda file: file.write(spent.to_json().encode()))

    def turn(self) -> AbstractContextManager[None]:
        return lock.turn(self.folder / "lock")
