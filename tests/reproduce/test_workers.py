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
from fedbilevel.reproduce import workers
from fedbilevel.reproduce.entry import Entry, read

BEGIN = int  # does nothing


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
