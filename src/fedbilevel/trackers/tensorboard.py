"""Record runs as event files of TensorBoard."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import explain_misspelt
from fedbilevel.core.writing import write_bytes
from fedbilevel.engines.history import Row
from fedbilevel.engines.tracking import Ending, Record, TrackedRun, Tracker

FOLDER = "tensorboard"


@explain_misspelt
class TensorBoard(Tracker):
    """A tracker that records runs as event files of TensorBoard, by the package tensorboardX.

    TensorBoard shows the columns of the history under Scalars, with the round as the step, the parameters under HParams
    and Text, the spec and the ledger under Text, and the picture of the run under Images. If the run has no folder, its
    result is saved beside the event files. The events of a resumed run follow the earlier ones; TensorBoard leaves out
    rounds that are repeated.

    Args:
        folder: each run gets a folder within this folder, with the run's name, and each sweep gets a folder that
            contains the folders of its runs. None: the run's own folder if it has one, else ./tensorboard.

    Raises:
        ConfigurationError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        self.library("tensorboardX", "tensorboard")
        self.folder = None if folder is None else Path(folder)

    def open(self, run: TrackedRun, group: Record | None, identifier: str, last: int) -> Record:
        place = self._place(run, group, identifier).resolve()
        return Record(str(place)) if run.is_group else EventFile(place, run, last)

    def _place(self, run: TrackedRun, group: Record | None, before: str) -> Path:
        """Return the folder for a run or a sweep: the run's own, the one that was used before, or a new one."""
        if self.folder is None and run.folder is not None:
            return run.folder
        if before:
            return Path(before)
        parts = [re.sub(r"[^\w.=+-]+", "-", part) for part in run.name.split("/") if part.strip(".")]
        within = self.folder or Path(FOLDER) if group is None else Path(group.identifier)
        place = within.joinpath(*parts)
        if group is None:
            place = place.with_name(f"{place.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        first, count = place, 1
        while place.exists():
            count += 1
            place = first.with_name(f"{first.name}-{count}")
        return place


class EventFile(Record):
    """An event file to which events are written at once.

    No thread writes later, so that an error of the disk is raised where it occurs.

    Args:
        folder: the folder of the file.
        run: the run to record.
        last: the round of the last row in earlier files of the folder; -1 without earlier files.
    """

    def __init__(self, folder: Path, run: TrackedRun, last: int) -> None:
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        super().__init__(str(folder), last)
        self.summary, self.events, self.summaries = summary, event_pb2, summary_pb2
        self.has_folder = run.folder is not None
        given, self.columns = run.flat_parameters(), dict[str, float]()
        self.parameters = {name: str(one) if one in (inf, -inf) or one != one else one for name, one in given.items()}
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if last >= 0:  # TensorBoard drops events of earlier files from this step on
            self._write(last + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        lines = [f"| {name} | {value} |".replace("\n", " ") for name, value in self.parameters.items()]
        self._write(0, summary=summary.text("parameters", "\n".join(["| parameter | value |", "|---|---|", *lines])))
        self.writer.flush()

    def add(self, row: Row) -> None:
        numbers = {name: float(value) for name, value in row.items() if name != "round"}
        values = [self.summaries.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self.columns |= dict.fromkeys(numbers, 0.0)
        self._write(int(row["round"]), summary=self.summaries.Summary(value=values))
        self.writer.flush()
        self.last = int(row["round"])

    def close(self, ending: Ending, outcome: Mapping[str, Any], files: Sequence[Path]) -> None:
        step = max(self.last, 0)
        for part in self.summary.hparams(self.parameters, self.columns):
            self._write(step, summary=part)
        for name, value in {"ending": ending, **outcome}.items():
            self._write(step, summary=self.summary.text(name, str(value)))
        for file in files:
            if file.suffix == ".png":
                self._write(step, summary=self.summaries.Summary(value=[self._picture(file)]))
            elif file.suffix == ".toml" or file.name == "ledger.json":
                text = f"```\n{file.read_text(encoding='utf-8')}\n```"
                self._write(step, summary=self.summary.text(file.stem, text))
            elif file.suffix == ".npz" and not self.has_folder:
                write_bytes(Path(self.identifier, file.name), file.read_bytes())
        self.writer.close()

    def _picture(self, file: Path) -> Any:
        png = file.read_bytes()
        width, height = (int.from_bytes(png[start : start + 4]) for start in (16, 20))
        image = self.summaries.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        return self.summaries.Summary.Value(tag=file.stem, image=image)

    def _write(self, step: int, **content: Any) -> None:
        self.writer.write_event(self.events.Event(wall_time=time.time(), step=step, **content))
