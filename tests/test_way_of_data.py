"""Does what a run is made of go one way through the rooms, and come back to none more than once?

A room is left when a function of another room is called, and come back to when that one, or what it calls, calls into
it again. `core` and `wording` import no other room and are at hand in all of them, so that they do not count.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import fedbilevel as fb
from fedbilevel.cli import main

PACKAGE = Path(fb.__file__).parent
AT_HAND = {"core", "wording"}
HANDED_OVER = {"ProcessGroup.decide", "Guarded._tell", "Loop.call_back"}
"""Where engines call what experiments hand to them: what one of several processes does, a display, callbacks."""


class Way:
    """A profiler: the ways from room to room on the stack, and who calls back into a room."""

    def __init__(self) -> None:
        self.ways: set[tuple[str, ...]] = set()
        self.returns: set[tuple[str, str, str, str]] = set()  # (room, function called; room and function that call it)
        self.stack: list[tuple[tuple[str, ...], str]] = [((), "")]  # of each frame: the way to it, and its function
        self.rooms: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and len(self.stack) > 1:
            self.stack.pop()
        if event != "call":
            return
        way, caller = self.stack[-1]
        room, name = self.room_of(frame.f_code.co_filename), frame.f_code.co_qualname.split(".<locals>")[0]
        if caller == "<module>" or not room or way[-1:] == (room,):  # an import is on no way
            self.stack.append((way, name if room and caller != "<module>" else caller))
            return
        if name != "<module>":
            self.returns |= {(room, name, way[-1], caller)} if room in way else set()
            way = (*way, room)
            self.ways.add(way)
        self.stack.append((way, name))

    def room_of(self, file: str) -> str:
        """The room, if it counts; "" for all else."""
        if file not in self.rooms:
            path = Path(file)
            room = path.relative_to(PACKAGE).with_suffix("").parts[0] if path.is_relative_to(PACKAGE) else ""
            self.rooms[file] = "" if room in AT_HAND or room.startswith("__") else room
        return self.rooms[file]


def test_the_rooms_of_a_run(tmp_path: Path) -> None:
    """A command's spec, the problem that is made of it, and the messages of a round's exchange."""
    way = Way()
    command = "run quadratic --algorithm simfbo --quiet --set rounds=1 --set clients=2 --set local_steps=1"
    sys.setprofile(way)
    try:
        code = main([*command.split(), "--out", str(tmp_path / "run")])
    finally:
        sys.setprofile(None)
    assert code == 0
    down = ("cli", "experiments", "engines")
    assert {("cli", "experiments", "tasks"), (*down, "tasks"), (*down, "algorithms", "oracles")} <= way.ways
    assert (*down, "algorithms", "engines", "algorithms", "oracles") in way.ways
    assert max(one.count(room) for one in way.ways for room in one) == 2

    assert {room for room, *_ in way.returns} == {"algorithms", "engines", "experiments"}
    assert {name for room, name, *_ in way.returns if room == "algorithms"} == {"SimFBO.local_updates"}  # the phase
    assert {caller for room, _, _, caller in way.returns if room == "experiments"} == HANDED_OVER
    asked = {one for one in way.returns if one[0] == "engines" and one[2] != "experiments"}  # which writes the folder
    assert asked == {  # the exchange; and when a round is traced for its messages
        ("engines", name, "algorithms", "SimFBO.round") for name in ("LocalFed.mean", "Recorder.mean")
    }
