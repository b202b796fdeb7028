"""A client's privacy on disk: its secret, and the account of all that ever left it, whatever the run."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedbilevel.core.tree import PyTree
from fedbilevel.engines.checkpoint import write_atomically
from fedbilevel.flower.accounting import Spent
from fedbilevel.flower.privacy import Privacy, load_secret


class Guard:
    """Protects updates; the account is written before anything leaves. Processes of several runs take turns."""

    def __init__(self, privacy: Privacy, folder: Path) -> None:
        self.privacy, self.folder = privacy, folder
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = load_secret(folder / "secret")
        self.account = folder / "account.json"

    def protect(self, update: PyTree, context: Sequence[int | str]) -> tuple[PyTree, float]:
        """What may be sent in place of `update`, and ε so far, this reply included."""
        with self.turn():
            spent = Spent.from_json(self.account.read_text()) if self.account.exists() else Spent()
            sent, spent = self.privacy.protect(update, self.secret, spent, context)
            write_atomically(self.account, lambda file: file.write(spent.to_json().encode()))
        return sent, spent.epsilon(self.privacy.delta)

    @contextmanager
    def turn(self) -> Iterator[None]:
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
