"""Do the event files that `TensorBoard` writes have the rows, parameters and results of runs?"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from recorders import METHOD, TASK, solved

import fedbilevel as fb
from fedbilevel import cli, experiments
from fedbilevel.errors import TrackerWarning

pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

SMALL = ["quadratic", "--set", "task.clients=3", "--set", "samples=[2, 2]", "--set", "dim_y=2"]
SMALL += ["--rounds", "4", "--set", "eval_every=2", "--log", "tensorboard", "--quiet"]


def events(folder: Path) -> list[Any]:
    """Return the events in the files of a folder.

    A file has, for each event, its length (8 bytes), a checksum (4 bytes), the event, and a checksum (4 bytes).
    """
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return (step, value) of a column as TensorBoard shows it.

    A start of the run replaces all earlier values from the step on at which it starts.
    """
    shown: list[tuple[int, float]] = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            shown = [(step, value) for step, value in shown if step < event.step]
        values = [value for value in event.summary.value if value.tag == tag and value.HasField("simple_value")]
        shown += [(event.step, value.simple_value) for value in values]
    return shown


def expected(result: fb.Result, column: str) -> list[tuple[int, float]]:
    return [(row["round"], pytest.approx(row[column], rel=1e-6)) for row in result.history.rows]


def tags(folder: Path) -> set[str]:
    return {value.tag for event in events(folder) for value in event.summary.value}


def test_every_column_is_a_scalar_over_the_rounds(tmp_path) -> None:
    result = solved(4, fb.trackers.TensorBoard(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("SimFBO-")
    for column in ("relative_error", "bytes_up", "exchanges"):
        assert scalars(folder, column) == expected(result, column)
    assert set(result.history.columns) - {"round"} <= tags(folder)
    values = [value for event in events(folder) for value in event.summary.value]
    (text,) = [one.tensor.string_val[0].decode() for one in values if one.tag == "parameters/text_summary"]
    assert "| algorithm.server_lr.x | 0.05 |" in text
    assert {"_hparams_/session_start_info", "ending/text_summary"} <= tags(folder)
    (ledger,) = [one.tensor.string_val[0].decode() for one in values if one.tag == "ledger/text_summary"]
    assert f'"exchanges": {result.ledger.exchanges}' in ledger
    assert fb.Result.load(folder / "result.npz").history.rows == result.history.rows


def test_a_resumed_run_takes_back_the_rounds_that_are_repeated(tmp_path) -> None:
    def fails(result, row):
        if row and row["round"] == 6:
            raise KeyboardInterrupt

    given = {"checkpoint": tmp_path / "run.npz", "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):  # only round 0 was saved
        solved(8, fb.trackers.TensorBoard(tmp_path / "events"), fails, **given)
    (folder,) = (tmp_path / "events").iterdir()
    assert [step for step, _ in scalars(folder, "exchanges")] == [0, 2, 4, 6]
    result = solved(8, fb.trackers.TensorBoard(tmp_path / "events"), resume=True, **given)
    assert [*(tmp_path / "events").iterdir()] == [folder]
    assert scalars(folder, "relative_error") == expected(result, "relative_error")


def test_a_full_disk_ends_no_run(tmp_path, monkeypatch) -> None:
    write, room = RecordWriter.write, [4]

    def full(self, data) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.warns(TrackerWarning, match=r"^TensorBoard .*OSError: No space left") as caught:
        result = solved(8, fb.trackers.TensorBoard(tmp_path))
    assert (result.round, len([one for one in caught if one.category is TrackerWarning])) == (8, 1)


def test_runs_of_a_sweep_have_folders_in_that_of_the_sweep(tmp_path) -> None:
    fb.sweep(
        METHOD, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=2, grid={"server_lr.x": [0.05, 0.1]},
        select="relative_error", metrics=TASK.metrics, callbacks=[fb.trackers.TensorBoard(tmp_path)], progress=False,
    )  # fmt: skip
    (group,) = tmp_path.iterdir()
    assert group.name.startswith("sweep-of-server_lr.x-")
    assert sorted(folder.name for folder in group.iterdir()) == ["server_lr.x=0.05-seed-0", "server_lr.x=0.1-seed-0"]


@pytest.mark.drawn
def test_the_command_writes_into_the_folder_of_the_run(tmp_path, capsys) -> None:
    folder = tmp_path / "first"
    assert cli.main(["run", *SMALL, "--out", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(folder)]
    run = experiments.load_run(folder)
    assert scalars(folder, "exchanges") == expected(run, "exchanges")
    (picture,) = [value.image for event in events(folder) for value in event.summary.value if value.tag == "plot"]
    assert picture.encoded_image_string == (folder / "plot.png").read_bytes()
    assert (picture.width, picture.height) == png_size(folder / "plot.png")
    assert "spec/text_summary" in tags(folder)
    resumed = ["run", "--resume", str(folder), "--rounds", "6", "--log", "tensorboard", "--quiet"]
    assert cli.main(resumed) == 0
    assert [step for step, _ in scalars(folder, "exchanges")] == [0, 2, 4, 6]


def png_size(file: Path) -> tuple[int, int]:
    from matplotlib.image import imread

    height, width = imread(file).shape[:2]
    return width, height


def test_the_command_records_seeds_and_sweeps(tmp_path) -> None:
    assert cli.main(["run", *SMALL, "--seeds", "0,1", "--out", str(tmp_path / "seeds")]) == 0
    assert cli.main(["run", *SMALL, "--seeds", "0,1,2", "--out", str(tmp_path / "seeds")]) == 0
    for seed in range(3):
        assert [step for step, _ in scalars(tmp_path / "seeds" / f"seed-{seed}", "exchanges")] == [0, 2, 4]
    assert cli.main(["sweep", *SMALL, "--grid", "server_lr=0.05,0.1", "--out", str(tmp_path / "sweep")]) == 0
    for step in ("0.05", "0.1"):
        folder = tmp_path / "sweep" / f"server_lr-{step}" / "seed-0"
        assert [step for step, _ in scalars(folder, "exchanges")] == [0, 2, 4]
