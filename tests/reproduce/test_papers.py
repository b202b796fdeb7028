"""The pages of docs/papers say what the outcomes beside them say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_pages_are_as_they_are_written() -> None:
    found = list(runpy.run_path(str(ROOT / "scripts" / "papers.py"))["written"]())
    assert [file.stem for file, _ in found] == [
        "README",
        "README",
        "afbo",
        "fednest",
        "fism",
        "leaderboard",
        "rabo",
        "simfbo",
        "theory",
    ]
    assert [file.name for file, text in found if file.read_text("utf-8") != text] == []
    assert dict(found)[ROOT / "README.md"].count("](docs/papers/") == 23 + 3  # a row each, and three links besides
