"""The pages of docs/papers say what the outcomes beside them say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.reproduce.entry import ids, load
from report_pages import CONTENT, HOLDS, made_up, outcome_for

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"


def test_a_page_says_what_was_compared_tried_and_left_out() -> None:
    panels = {**CONTENT["panels"], "Dirichlet": {}}
    methods = {
        name: of | {"grid": {field: [0.01, 0.1, 1.0] for field in of["grid"]}}
        for name, of in CONTENT["methods"].items()
    }
    entry = made_up(panels=panels, methods=methods, quick={"minutes": 1, "only": ["iid"]})
    found = outcome_for(entry, environment=dict.fromkeys(("jax", "numpy", "python", "cpus"), "1"))
    left = {**found["findings"][0], "panel": "Dirichlet", "state": "open", "note": "Dirichlet is not played"}
    found["findings"].append(left)
    found["panels"]["iid"]["SimFBO"]["failed_trials"] = 1
    found["panels"]["iid"]["FedBiO"]["chosen"] = {"client_lr.x": 0.1}
    page = "\n".join(runpy.run_path(str(ROOT / "scripts" / "papers.py"))["section"](entry, found))
    row = "| SimFBO ends higher | iid | SimFBO / FedBiO | 90.00 % / 80.00 % | 10 ± 2 percentage points | holds |"
    assert row in page
    assert page.count("ends higher |") == 1
    assert "Not played at this scale, so that claims about them are open: two shards; Dirichlet." in page
    assert "SimFBO server_lr.x = 0.01 of {0.01, 0.1, 1.0} (failed trials: 1)" in page
    assert "1 of 2 chosen values are the first or the last of those that were tried" in page


def test_a_page_has_what_a_slope_is_fitted_to() -> None:
    """The second halves of the curves (0.1, 0.7, 0.8) have the mean 0.75, not the 0.80 at their ends."""
    panels = {"ten": {"value": 10.0}, "hundred": {"value": 100.0}}
    claims = [{"says": "-", "better": "SimFBO", "by": "late", "slope": 0.5}]
    entry = made_up(series="number of clients", panels=panels, claims=claims)
    finding = {**HOLDS, "says": "-", "panel": "", "better": "SimFBO", "than": "", "note": ""}
    page = "\n".join(
        runpy.run_path(str(ROOT / "scripts" / "papers.py"))["claims"](entry, outcome_for(entry, findings=[finding]))
    )
    assert "| SimFBO, mean over the second half | 75.00 % | 75.00 % |" in page
    assert "| FedBiO | 90.00 ± 1.41 % | 90.00 ± 1.41 % |" in page
    assert "over the seeds; of the mean curve where another reading is named:" in page


def test_what_was_revised_and_how_much_holds_is_said_beside_the_state() -> None:
    entry = made_up(revised="Seeds were added.")
    found = outcome_for(entry, environment=dict.fromkeys(("jax", "numpy", "python", "cpus"), "1"))
    written = runpy.run_path(str(ROOT / "scripts" / "papers.py"))
    assert "\nRevised: Seeds were added.\n" in "\n".join(written["section"](entry, found))
    assert "| ◐ partly reproduced, 1 of 2 * |\n" in written["index"]([entry], {entry.id: found})
    assert "| – not run |\n" in written["index"]([made_up()], {})
    old = {entry.id: {**found, "played_for": "another setting"}}
    assert "| ! stale: play it again * |\n" in written["index"]([entry], old)


@pytest.mark.parametrize("id", [id for id in ids() if load(id).runs == id])
def test_an_entry_takes_as_long_as_it_says(id: str) -> None:
    """Three seeds of the run that was kept, on two cores: no more than what the entry says."""
    kept, minutes = json.loads((DOCS / "papers" / f"{id}.json").read_text("utf-8")), load(id).quick.minutes
    assert minutes
    assert kept["processor_seconds"] * 3 / len(kept["seeds"]) <= 2 * 60 * minutes


def test_pages_are_as_they_are_written() -> None:
    found = list(runpy.run_path(str(ROOT / "scripts" / "papers.py"))["written"]())
    assert [file.stem for file, _ in found] == [
        "README",
        "README",
        "kept",
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


@pytest.mark.parametrize("number", range(4))
def test_the_hospitals_page_says_what_its_splits_gave(number: int) -> None:
    # the mean of five splits, half of Student's interval, t(0.975; 4) = 2.7764, and the differences to FedAvg
    kept = json.loads((DOCS / "papers" / "hospitals.json").read_text(encoding="utf-8"))
    page = (DOCS / "tutorials" / "hospitals.md").read_text(encoding="utf-8").replace("\u2212", "-")
    base = np.array(kept["test_accuracy"]["FedAvg"])[:, number]
    for name in ("FedAvg", "SimFBO", "FedBiO", "FedNest", "alone", "FedAvg, one intercept"):
        read = np.array(kept["test_accuracy"][name])[:, number]
        rows = [line.split("|")[2:][number].strip() for line in page.splitlines() if line.startswith(f"| {name} |")]

        def half(values: np.ndarray) -> float:
            return 2.7764 * float(values.std(ddof=1)) / 5**0.5

        assert rows[0] == f"{read.mean():.3f} ± {half(read):.3f}", name
        assert rows[1] == f"{read[0]:.3f}", name
        if name != "FedAvg":
            assert rows[2].startswith(f"{(read - base).mean():+.3f} ± {half(read - base):.3f} ("), name
