"""Store the approvals of a site: hashes of texts, such as specs or studies, that a person at the site has approved.

A site with `approve="ask"` takes part only in runs whose text is approved. A text that is not approved is stored as
`asked-HASH.txt` in the state folder, so that a person can read it. If `approve` is the file of an `ApprovalRule`, runs
that fit the rule are also approved. Approved texts are stored as `approved-HASH.txt`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError, ConfigurationError, require
from fedbilevel.core.writing import write_json, write_text
from fedbilevel.engines import lock
from fedbilevel.flower.client.approval_rule import ApprovalRule, Proposal
from fedbilevel.flower.client.audit import Audit, now
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.wire import digest
from fedbilevel.reading import read_json
from fedbilevel.wording import in_a_line, printable

ASK, ALL = "ask", "all"
TEXTS = {"asked": 20, "approved": 1000}  # the largest numbers of stored texts, since a server may send many


class Approvals:
    """The approvals in a state folder, for all clients that use the folder.

    Each change adds a line to the folder's audit.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.lock = folder, folder / "approvals.json", folder / ".approvals.lock"

    def read(self) -> dict[str, str]:
        """Return a dictionary: hash of an approved text -> a note by whom and when it was approved.

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
            raise CheckpointError(f"{self.path} is damaged: delete it, and approve again", path=self.path)
        return found

    def change(self, name: str, by: str, approve: bool) -> None:
        """Approve the text that has this hash, or withdraw its approval.

        Args:
            name: the hash.
            by: the name of the person who approves or withdraws.
            approve: whether to approve; otherwise the approval is withdrawn.

        Raises:
            ConfigurationError: the folder does not exist, `name` is not a hash, `by` is not a name, or the approval to
                withdraw does not exist.
            CheckpointError: the audit or the approvals cannot be written.
        """
        require(self.folder.is_dir(), "FOLDER", str(self.folder), "a folder, the site's state-folder")
        fits = re.fullmatch("[0-9a-f]{32}", name) is not None
        require(fits, "HASH", name, "32 hexadecimal digits, as `flower check` and the refusal show them")
        require(0 < len(by) <= 200 and by.strip() == printable(by), "--by", by, "the name of the person who approves")
        with lock.wait_for_lock(self.lock):
            approvals = self.read()
            known = approve or name in approvals
            require(known, "HASH", name, "the hash of a text that is approved in this folder")
            Audit(self.folder).append("approved" if approve else "withdrawn", subject=name, by=by)
            approvals.pop(name, None)
            write_json(self.path, approvals | ({name: f"{by} approved at {now()}"} if approve else {}))

    def decision(self, proposal: Proposal, approve: str) -> tuple[str, str]:
        """Return who has approved a proposal, and a reason: (name, "") if it is approved, ("", why) if it is not.

        Args:
            approve: "ask" if only a person can approve; otherwise the path of a rule that can approve, too.

        Raises:
            ConfigurationError: the rule cannot be read, or is wrong.
        """
        if (said := self.read().get(digest(proposal.text))) or approve == ASK:
            return said or "", ""
        if not (path := path_of(approve)).exists():
            return "", f"rule {path}: there is no such file, and without it no rule approves a run"
        rule, name = ApprovalRule.read(path)
        unknown = "" if rule.app is None or proposal.app is not None else ", if the app's hash is in app"
        why = rule.mismatch(proposal)
        return ("", f"{name}: {why}") if why else (f"{name} approves{unknown}", "")

    def require(self, proposal: Proposal, approve: str) -> str:
        """Store the text of a proposal for a person to read. Return who has approved it; otherwise refuse it.

        Raises:
            Refusal: the text is not approved. The refusal names the hash and the command that approves it. The cause of
                the error says why the rule does not approve the text; it is logged at the site and not sent.
            ConfigurationError: the rule cannot be read, or is wrong.
        """
        name, (by, why) = digest(proposal.text), self.decision(proposal, approve)
        kind = "approved" if by else "asked"
        file = self.folder / f"{kind}-{name}.txt"
        if not file.exists():
            write_text(file, proposal.text)
            texts = sorted(self.folder.glob(f"{kind}-*.txt"), key=lambda file: file.stat().st_mtime_ns)
            for old in texts[: -TEXTS[kind]]:
                old.unlink(missing_ok=True)
        if by:
            return by
        raise unapproved(name) from (ConfigurationError(f"it does not fit {why}") if why else None)

    def described(self, proposal: Proposal, approve: str) -> str:
        """Say in words who has approved a proposal, or what a person has to do to approve it."""
        name, (by, why) = digest(proposal.text), self.decision(proposal, approve)
        needed = f"needed: {command(str(self.folder), name)}" + f"; it does not fit {why}" * bool(why)
        return f"{name}, which {by}" if by else needed

    def text_of(self, name: str) -> Path:
        """Return the path at which a text that was not approved is stored for a person to read; `name` is its hash."""
        return self.folder / f"asked-{name}.txt"


def check_approve(path: str, approve: Any) -> None:
    """Check that a site's `approve` is "ask", "all" or the path of a rule's file, and that this file is a valid rule.

    The file may be missing. Then no rule approves anything, and the site takes part only in runs that a person has
    approved.

    Raises:
        ConfigurationError: the value or the file is wrong. The error names `path`, or the rule's file.
    """
    fits = approve in (ASK, ALL) or (isinstance(approve, str) and approve.endswith(".toml"))
    require(fits, path, approve, "'ask', 'all', or the .toml file of a rule")
    if approve not in (ASK, ALL) and path_of(approve).exists():
        ApprovalRule.read(path_of(approve))


def path_of(rule: str) -> Path:
    """Return the path of a rule's file; a `~` is replaced by the home folder.

    Raises:
        ConfigurationError: the home folder is not known.
    """
    try:
        return Path(rule).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(in_a_line(error), where=f"rule {rule}") from error


def command(folder: Path | str, name: str) -> str:
    """Return the command that approves the text with this hash."""
    return f"fedbilevel flower approve {folder} {name} --by NAME"


def unapproved(name: str) -> Refusal:
    """Return the refusal of a text that is not approved; `name` is its hash."""
    return Refusal(Code.APPROVAL, f"{name} is not approved at this site; to approve it: {command('FOLDER', name)}")
