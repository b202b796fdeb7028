"""Each text that scripts/mistakes.toml replaces by a mistake occurs once in src."""

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_each_text_stands_in_one_place():
    script = runpy.run_path(str(ROOT / "scripts" / "mistakes.py"))
    mistakes = tomllib.loads(script["LISTED"].read_text("utf-8"))["mistake"]
    places = {one["what"]: script["place_of"](one["right"], ROOT / "src") for one in mistakes}
    assert {what: place for what, place in places.items() if isinstance(place, str)} == {}
    assert len(places) == len(mistakes) >= 100
