"""Approvals at a site: the hashes of what a person there has read and accepted, such as a spec or a study.

A site with `approve="ask"` takes part in nothing else. What it is asked, and nobody has approved, is kept as
`asked-HASH.txt` in its state folder, to be read.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedbilevel.core.errors import CheckpointError, require
from fedbilevel.core.writing import write_json, write_text
from fedbilevel.engines import lock
from fedbilevel.flower.client.audit import Audit, now
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import digest
from fedbilevel.reading import read_json
from fedbilevel.wording import printable

RULES = "ask", "all"
TEXTS = 20  # that were asked and are kept: whoever serves may ask as many as it likes


class Approvals:
    """The approvals in a state folder, for all clients of this folder; each is a line of its audit, too."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.lock = folder, folder / "approvals.json", folder / ".approvals.lock"

    def read(self) -> dict[str, str]:
        """Return hash -> who approved it, and when.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.path.exists():
            return {}
        try:
            found = read_json(self.path)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not all(isinstance(said, str) for said in found.values()):
            raise CheckpointError(f"{self.path} is damaged: delete it, and approve again")
        return found

    def change(self, name: str, by: str, approve: bool) -> None:
        """Approve what has this hash, or withdraw an approval; `by`: the person who does.

        Raises:
            ConfigurationError: there is no such folder, or this is no hash, no name, or no approval that there is.
            CheckpointError: the audit or the approvals cannot be written.
        """
        require(self.folder.is_dir(), "FOLDER", str(self.folder), "a folder, the site's state-folder")
        fits = re.fullmatch("[0-9a-f]{32}", name) is not None
        require(fits, "HASH", name, "32 hexadecimal digits, as `flower check` and the refusal show them")
        require(0 < len(by) <= 200 and by.strip() == printable(by), "--by", by, "a name, of the person who approves")
        with lock.wait_for_lock(self.lock):
            approvals = self.read()
            known = approve or name in approvals
            require(known, "HASH", name, "the hash of what was approved in this folder")
            Audit(self.folder).append("approved" if approve else "withdrawn", subject=name, by=by)
            approvals.pop(name, None)
            write_json(self.path, approvals | ({name: f"{by} approved at {now()}"} if approve else {}))

    def require(self, text: str) -> None:
        """Refuse what nobody has approved, and keep its text.

        Raises:
            Refusal: nobody has; it has the hash and the command.
        """
        name = digest(text)
        if name in self.read():
            return
        asked = self.text_of(name)
        if not asked.exists():
            write_text(asked, text)
            texts = sorted(self.folder.glob("asked-*.txt"), key=lambda file: file.stat().st_mtime_ns)
            for old in texts[:-TEXTS]:
                old.unlink(missing_ok=True)
        raise unapproved(name)

    def text_of(self, name: str) -> Path:
        """Return the path of the text with this hash, if it was asked."""
        return self.folder / f"asked-{name}.txt"


def command(folder: Path | str, name: str) -> str:
    """Return the command that approves what has this hash."""
    return f"fedbilevel flower approve {folder} {name} --by NAME"


def unapproved(name: str) -> Refusal:
    """Make the refusal of what nobody has approved."""
    return Refusal(Code.APPROVAL, f"nobody at this site has approved {name}: {command('FOLDER', name)}")
