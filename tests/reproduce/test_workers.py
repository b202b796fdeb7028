"""An entry played by several processes side by side."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_protocol import CONTENT

from fedbilevel.cli import main
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.reproduce import outcome, protocol, workers
from fedbilevel.reproduce.entry import Entry, read

BEGIN = int  # does nothing


def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    """Also where a method has no run, as all its trials fail; what they said are the lines of one process."""
    broken = {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": [1e30, 1e31]}}
    entry = read("made-up", {**CONTENT, "methods": {**CONTENT["methods"], "too far": broken}})
    said: dict[str, list[str]] = {"one": [], "two": []}
    alone = protocol.play(entry, "quick", tmp_path / "one", seeds=(0, 1), said=said["one"].append)
    workers.play_ahead(entry, "quick", tmp_path / "two", seeds=(0, 1), workers=2, begin=BEGIN, said=said["two"].append)
    (taken,) = {protocol.spent(protocol.place_of(entry, "quick", tmp_path / "two"))}
    both = protocol.play(entry, "quick", tmp_path / "two", seeds=(0, 1))
    found = [outcome.outcome_of(one) for one in (alone, both)]

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: timeless(one) for name, one in value.items() if "seconds" not in name}
        return value

    assert timeless(found[0]["panels"]) == timeless(found[1]["panels"])
    assert found[0]["errors"] == found[1]["errors"]
    assert sorted(said["one"]) == sorted(said["two"])
    assert taken == (both.seconds, both.processor_seconds)  # nothing was left for the last process
    assert len(list((tmp_path / "two").rglob("spent/*.json"))) == 3  # of two, and of this one, which looked at it first


def test_what_is_refused_in_a_process_is_refused(tmp_path: Path) -> None:
    entry = read("made-up", CONTENT)
    protocol.play(entry, "quick", tmp_path, seeds=(0,))
    changed = read("made-up", {**CONTENT, "spec": {"task": {"name": "quadratic", "clients": 4}}})
    with pytest.raises(ConfigurationError, match="cannot resume the sweep"):
        workers.play_ahead(changed, "quick", tmp_path, seeds=(0,), workers=2, begin=BEGIN, said=str)


def test_after_an_error_nothing_more_is_begun(tmp_path: Path) -> None:
    """The first sweep is refused at once; of the seven after it at most those that were begun by then are played."""
    methods = {f"method {k}": CONTENT["methods"]["FedBiO"] for k in range(8)}
    content = {**CONTENT, "methods": methods, "claims": [{"says": "-", "better": "method 0", "than": ["method 1"]}]}
    entry = read("made-up", content)
    place = protocol.place_of(entry, "quick", tmp_path) / "tuning" / "all"
    (place / "method-0").mkdir(parents=True)
    (place / "method-0" / "something else").touch()
    with pytest.raises(ConfigurationError, match="that folder is not empty"):
        workers.play_ahead(entry, "quick", tmp_path, seeds=(0,), workers=2, begin=BEGIN, said=str)
    assert len(list(place.iterdir())) < 8


def test_a_process_that_is_ended_from_outside_is_explained(tmp_path: Path) -> None:
    entry = read("made-up", CONTENT)
    with pytest.raises(ConfigurationError, match=r"2 processes was ended from outside.*try fewer --workers"):
        workers.play_ahead(entry, "quick", tmp_path, seeds=(0,), workers=2, begin=partial(os._exit, 9), said=str)


@pytest.mark.parametrize(
    ("given", "error"), [({"seeds": (100,)}, r"seeds \[100\]"), ({"workers": 0}, "workers = 0 is not allowed")]
)
def test_wrong_arguments_start_no_process(tmp_path: Path, given: dict[str, Any], error: str) -> None:
    entry: Entry = read("made-up", CONTENT)
    with pytest.raises(ConfigurationError, match=error):
        workers.play_ahead(
            entry, "quick", tmp_path, **{"seeds": (0,), "workers": 2, "begin": BEGIN, "said": str, **given}
        )


def test_the_command_line_refuses_a_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "theory-drift", "--workers", "-1"]) == 2
    assert "workers = -1 is not allowed" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be given here")
@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [({0, 1}, 2, [[0], [1]]), ({0, 1, 4, 5, 6}, 2, [[0, 1], [4, 5]]), ({3}, 2, [[3], [3]])],
)
def test_every_process_has_as_many_cores(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], count: int, expected: list[list[int]]
) -> None:
    """What convolutions add up to depends on their number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores)
    assert workers._cores(count) == expected
