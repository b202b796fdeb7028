"""Write the checkpoint of a run at suitable times, and check that a checkpoint belongs to the run that reads it."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import CheckpointError, CheckpointWarning
from fedbilevel.core.own_y import gathered
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.fingerprint import Fingerprint, in_words
from fedbilevel.engines.process_group import current_group, warn_on_first
from fedbilevel.wording import require_object

SAVE_SECONDS = 1.0  # the least time between two checkpoints, if the user sets no number of rounds
SAVE_SHARE = 0.1  # the largest share of the run's time that is spent on checkpoints
FORCE = 'resume="force" (in a shell, --force) continues with the new arguments'  # for another run's checkpoint
START_ANEW = "start a new run, and give it another checkpoint file"


@dataclass
class Saver:
    """Write and read the checkpoint file of a run; process 0 writes it."""

    path: Path | None  # None: nothing is saved
    fingerprint: Fingerprint  # the fingerprint of this run
    round: int | None = None  # the round of the checkpoint at `path`; None if it is not known to be readable
    next_save: float = -math.inf  # the time of the next save on this machine's clock; a resumed run is saved soon
    other_arguments: bool = False  # whether the run was ever continued by force with other arguments

    @property
    def is_due(self) -> bool:
        """Return whether it is time to save, by the clock."""
        return time.perf_counter() >= self.next_save

    def save(self, carry: Carry, meta: dict[str, Any]) -> None:
        """Write a checkpoint, if there is a path: a carry, and a JSON object with everything else that a run needs.

        Raises:
            CheckpointError: the file could not be written; the checkpoint before it is unchanged.
        """
        if (path := self.path) is None:
            return
        began, round, group = time.perf_counter(), int(carry.round), current_group()
        meta = {"fingerprint": asdict(self.fingerprint), "other_arguments": self.other_arguments, **meta}
        group.decide(lambda: files.save(path, carry, meta, keep=self.round not in (None, round)))
        self.round = round
        group.saved.path = str(path)
        now = time.perf_counter()
        self.next_save = now + max(SAVE_SECONDS, (now - began) / SAVE_SHARE)

    def save_before(self, error: Exception, carry: Carry, meta: dict[str, Any]) -> None:
        """Save before an error is raised again. If saving fails, a warning says so, and the first error is raised."""
        try:
            self.save(carry, meta)
        except CheckpointError as failed:
            text = f"the run ends by {type(error).__name__}, and saving it failed: {failed}"
            warn_on_first(CheckpointWarning(text, path=self.path))

    def left_off(self, round: int, rounds: int) -> str:
        """Return a message with the round at which a run was interrupted, and with how to continue it."""
        if self.path is None:
            return f"ended after round {round} of {rounds}; nothing was saved, as no checkpoint was asked for"
        return (
            f"saved after round {round} of {rounds} to {self.path}; the same call with resume=True continues from there"
        )

    def load(self, like: Carry, force: bool, anew: bool) -> tuple[Carry, dict[str, Any], Path]:
        """Read the newest checkpoint that can be read.

        Args:
            like: a carry with the structure and shapes that are expected.
            force: whether to accept the checkpoint of another run, with a warning.
            anew: whether, with `force`, a run that diverged starts again at the row with the best value of `best_by`.

        Returns:
            The carry, without a state if the method has to start again; the JSON object; and the file.

        Raises:
            CheckpointError: no checkpoint can be read, or it belongs to another run.
        """
        path, group = self.path, current_group()
        assert path is not None
        file = Path(group.decide(lambda: str(files.newest(path))))
        with group.copy_of(file) as copy:
            carry, meta = self.read(copy, like, force and anew)
        with files.as_checkpoint_error(file):
            self.compare(meta, force)
        return carry, meta, file

    def read(self, copy: Path, like: Carry, anew: bool) -> tuple[Carry, dict[str, Any]]:
        """Read a copy of the checkpoint.

        If the run diverged and is to start `anew`, read only the row with the best value of `best_by`.

        Raises:
            CheckpointError: the checkpoint does not fit; if it is another algorithm's, the message names both.
        """
        held, x = files.load_meta(copy), like.x
        best = (x, gathered(like.state.y, like.clients)) if held.get("best") else None
        if "rounds" in held:
            text = f"{self.path} has a result, but a run can only be continued from its checkpoint"
            raise CheckpointError(text, path=self.path)
        try:
            if anew and held.get("diverged") and best:
                bare = like._replace(state=None, clients=None, queues=None, local_x=None, own_y=None)
                return files.load(copy, bare._replace(best=best), part=True)
            return files.load(copy, like._replace(best=best))
        except CheckpointError as error:
            if misfit := self.misfit(held.get("fingerprint", {}).get("stated", {})):
                raise misfit from error
            raise

    def misfit(self, stated: dict[str, Any]) -> CheckpointError | None:
        """Return the error if this run cannot continue from the state of a run with this `Fingerprint.stated`."""
        mine = self.fingerprint.stated
        before, now = stated.get("algorithm"), mine["algorithm"]
        terms = {name for name in stated.keys() ^ mine.keys() if name.endswith("privacy.clip")}
        if terms and before == now:
            there, here = ("with", "has none") if terms <= stated.keys() else ("without", "has privacy")
            text = f"{self.path} belongs to a run {there} privacy, and this run {here}"
            changed = {name: (stated.get(name), mine.get(name)) for name in terms}
            return CheckpointError(text, path=self.path, differences=changed)
        layers = stated.get("layers", mine["layers"]), mine["layers"]
        if before == now and layers[0] != layers[1]:
            text = f"{self.path} belongs to another run: {in_words({'layers': layers})}"
            return CheckpointError(text, path=self.path, differences={"layers": layers}, remedy=START_ANEW)
        if before in (None, now):
            return None
        text = f"{self.path} has the state of a run of {before}, from which {now} cannot continue"
        text = f'{text}, not even with resume="force" (--force)'
        return CheckpointError(text, path=self.path, differences={"algorithm": (before, now)}, remedy=START_ANEW)

    def compare(self, meta: dict[str, Any], force: bool) -> None:
        """Raise a CheckpointError that names what differs if the checkpoint is another run's; with `force`, warn."""
        path = self.path
        if "fingerprint" not in meta:
            text = f"{path} does not record the arguments of its run: an earlier version of fedbilevel wrote it"
            raise CheckpointError(text, path=path, remedy=START_ANEW)
        require_object(meta["fingerprint"], "the arguments of the run")
        before = Fingerprint(**meta["fingerprint"])
        differences = self.fingerprint.differences(before)
        # The multiplier of the noise must not change in a run, since the count of replies assumes a single one.
        accounted = any(name.endswith("privacy.noise_multiplier") for name in differences)
        if differences and (accounted or not force):
            text = f"{path} belongs to another run: {in_words(differences)}"
            raise CheckpointError(text, path=path, differences=differences, remedy="" if accounted else FORCE)
        self.other_arguments = bool(differences) or bool(meta.get("other_arguments"))
        if differences:
            text = f"{path} is continued with other arguments: {in_words(differences)}"
            warn_on_first(CheckpointWarning(text, path=path, differences=differences))
        if before.versions != self.fingerprint.versions:
            versions = f"{path} was written by {before.versions}, and is continued by {self.fingerprint.versions}"
            text = f"{versions}: numbers may differ, and losses and schedules are not compared"
            warn_on_first(CheckpointWarning(text, path=self.path))

    def continue_from(self, file: Path, round: int) -> None:
        """Note that the run continues from the checkpoint in `file`, at this round; warn if it is not at `path`."""
        if file == self.path:
            self.round = round
        else:
            assert self.path is not None
            text = f"{files.trouble(self.path)}: the run continues from {file}, round {round}"
            warn_on_first(CheckpointWarning(text, path=self.path))
        current_group().saved.path = str(self.path)


def advise_another_folder(error: CheckpointError) -> None:
    """Replace the remedy resume="force" of an error, for callers whose runs cannot be continued by force."""
    if error.remedy == FORCE:
        error.remedy = "choose another folder"
