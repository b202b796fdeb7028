"""Pages as they are written: their numbers, their structure, and that nothing in them commands a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.cli import main
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.report import page as pages
from fedbilevel.report import write
from fedbilevel.report.entries import entry_page, write_entry, write_index
from fedbilevel.reproduce import outcome
from fedbilevel.reproduce.entry import load
from report_pages import CONTENT, FINDING, HOLDS, every_page, keep, keep_runs, made_up, outcome_for

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"
VOID = {"meta", "link", "line", "br", "img", "path", "use", "rect"}


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text below each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.open: list[int] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))
        self.texts.append("")
        if tag not in VOID:
            self.open.append(len(self.found) - 1)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.found.append((tag, dict(attributes)))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag
        self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.texts[place] += data

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.found if tag in tags]

    def text(self, tag: str) -> list[str]:
        return [" ".join(said.split()) for (one, _), said in zip(self.found, self.texts, strict=True) if one == tag]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: file.read_text() for name, file in every_page(tmp_path_factory.mktemp("pages")).items()}


KINDS = pytest.mark.parametrize("kind", ["entry", "index", "comparison", "run"])


@KINDS
def test_a_page_is_sound_in_structure(written: dict[str, str], kind: str) -> None:
    page = Elements(written[kind])
    assert page.open == []
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("header")) == len(page.all("footer")) == 1
    assert page.all("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in page.found if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in zip([0, *levels], levels, strict=False))
    ids = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    referred = [one[name] for _, one in page.found for name in ("aria-labelledby", "aria-describedby") if name in one]
    referred += re.findall(r"url\(#([^)]+)\)", written[kind])
    referred += [one["href"][1:] for _, one in page.found if one.get("href", "").startswith("#")]
    assert set(referred) <= set(ids)


@KINDS
def test_every_table_has_a_caption_and_headings(written: dict[str, str], kind: str) -> None:
    page = Elements(written[kind])
    assert len(page.all("caption")) == len(page.all("table")) > 0
    assert all(one.get("scope") in ("col", "row") for one in page.all("th"))
    assert all(one.get("aria-label") for _, one in page.found if one.get("role") == "region")


@KINDS
def test_a_page_asks_for_nothing_and_runs_one_script(written: dict[str, str], kind: str) -> None:
    page = Elements(written[kind])
    asked = [one[name] for _, one in page.found for name in ("src", "href") if name in one]
    assert all(one.startswith("#") or one == "data:," or one.endswith(".html") for one in asked)
    assert re.findall(r"@import|https?://(?!www\.w3\.org/2000/svg)", written[kind]) == []
    (script,) = re.findall(r"<script>(.*?)</script>", written[kind], re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}';" in policy


def hostile_pages(out: Path) -> list[str]:
    """Pages in which every name that can be a stranger's is hostile."""
    tables = {"FedBiO": "fedbio", HOSTILE: "simfbo"}
    methods = {name: {"algorithm": {"name": of}, "grid": {"local_steps": [1]}} for name, of in tables.items()}
    claims = [{"says": HOSTILE, "better": HOSTILE, "than": ["FedBiO"]}]
    texts = dict.fromkeys(("paper", "part", "title", "shows", "setting"), HOSTILE)
    entry = made_up(**texts, panels={HOSTILE: {}}, methods=methods, claims=claims, differences=[HOSTILE])
    found = outcome_for(
        entry, date=HOSTILE, selected_on=HOSTILE, environment={HOSTILE: HOSTILE}, errors={HOSTILE: HOSTILE}
    )
    found["findings"] = [{**one, "says": HOSTILE, "panel": HOSTILE, "note": HOSTILE} for one in found["findings"]]
    folder = outcome.keep(found, outcome.file_of(entry, "quick", out).parent).parent
    runs = keep_runs(out / "x<script>alert(3)<", "simfbo")
    (run, other) = (runs / "simfbo" / f"seed-{seed}" for seed in (0, 1))
    for place in (run, other):
        (place / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
        for name in ("summary.json", "history.jsonl"):
            said = (place / name).read_text().replace("relative_error", "<script>$\\\\frac")
            (place / name).write_text(said)
    index, page = write_index([entry], out)
    return [one.read_text() for one in (index, page, write_entry(entry, folder), *write([run]), *write([runs]))]


def test_strangers_names_are_text(tmp_path: Path) -> None:
    for html in hostile_pages(tmp_path):
        page = Elements(html)
        assert len(page.all("script")) == 1
        assert page.all("img") == []
        assert [name for _, one in page.found for name in one if name.startswith("on")] == []
        assert "&lt;script&gt;" in html
        assert "\u202e" not in html


def test_an_entrys_page_says_what_was_found() -> None:
    """The differences are 0.1 ± 0.02 of an accuracy, and -200 ± 50 exchanges."""
    entry = made_up()
    html = entry_page(entry, outcome_for(entry))
    rows = Elements(html).text("tr")
    claim = "SimFBO ends higher ✓ holds iid SimFBO / FedBiO 90.00 % / 80.00 % 10 [8, 12] percentage points"
    assert claim in rows
    assert "1,200 / 1,000 -200 [-250, -150] exchanges" in " | ".join(rows)
    assert "1 of 2 comparisons hold; contradicted: 1, in the quick setting" in " ".join(Elements(html).text("p"))
    said = " ".join(Elements(html).text("td"))
    for text in ("90.00 ± 1.41 %", "91.2 ± 0.3 %", "client_lr.x = 0.01", "79.00 %, 81.00 %", "0.10.2", "12.5", "3.2"):
        assert text in said
    assert "fedbilevel reproduce made-up --quick --seeds 0,1" in Elements(html).text("code")
    assert 'partition_by = "shards"' in " ".join(Elements(html).text("code"))  # in a spec
    assert "Five clients in place of ten." in Elements(html).text("li")


def test_a_method_that_failed_has_a_row_and_no_curve() -> None:
    entry = made_up()
    found = outcome_for(entry)
    lost = {"chosen": None, "failed_runs": 2, "values": [], "mean": None, "sd": None, "costs": {}, "curve": None}
    found["panels"]["iid"]["FedBiO"] |= lost
    html = entry_page(entry, found)
    assert "every trial failed" in html
    assert html.count('class="curve" data-curve="0"') == 2  # in the other panel: its line and its band


def test_panels_may_be_left_out_and_have_methods_of_their_own() -> None:
    panels = {"iid": {}, "two shards": {"methods": ["SimFBO"]}, "all data": {}}
    entry = made_up(
        panels=panels, claims=[{**CONTENT["claims"][0], "panels": ["iid"]}], quick={"only": ["iid", "two shards"]}
    )
    page = Elements(entry_page(entry, outcome_for(entry)))
    assert page.text("figcaption") == ["iid", "two shards"]
    rows = page.text("tr")
    assert "FedBiO 90.00 ± 1.41 % –" in rows
    assert "SimFBO 80.00 ± 1.41 % 80.00 ± 1.41 %" in rows


def test_a_series_is_one_panel_over_its_values() -> None:
    panels = {"ten": {"value": 10.0}, "hundred": {"value": 100.0}}
    entry = made_up(series="number of clients", panels=panels)
    page = Elements(entry_page(entry, outcome_for(entry)))
    assert len(page.all("figure")) == 1
    assert "SimFBO 100 80.00 % 1.41 %" in page.text("tr")


def test_what_is_compared_by_a_cost_has_bars() -> None:
    entry = made_up(metric="gflop", against="rounds")
    found = outcome_for(entry)
    for methods in found["panels"].values():
        for of in methods.values():
            of["curve"] = None
    page = Elements(entry_page(entry, found))
    assert len(page.all("figure")) == 1
    assert "SimFBO two shards 0.8 0.01414" in page.text("tr")


def test_a_claim_of_a_slope_is_drawn_as_it_is_read() -> None:
    """The second halves of the curves (0.1, 0.7, 0.8) have the mean 0.75, not the 0.80 at their ends."""
    panels = {"ten": {"value": 10.0}, "hundred": {"value": 100.0}}
    claims = [{"says": "SimFBO ends higher", "better": "SimFBO", "by": "late", "slope": 0.5}]
    entry = made_up(series="number of clients", panels=panels, claims=claims)
    fit = {"than": "", "better_mean": 0.39, "than_mean": 0.5, "difference": -0.11, "half_width": 0.05}
    finding = {**FINDING, **HOLDS, **fit, "panel": "", "unit": "in slope"}
    html = entry_page(entry, outcome_for(entry, findings=[finding]))
    page = Elements(html)
    assert "SimFBO 100 75.00 %" in page.text("tr")
    assert "SimFBO ends higher ✓ holds SimFBO 0.39 / 0.5 -0.11 [-0.16, -0.06] in slope" in page.text("tr")
    assert "SimFBO, mean over the second half: slope 0.39 ± 0.05, predicted 0.5 (thin line)." in page.text("p")


@pytest.mark.parametrize(
    "change",
    [
        {"id": "other"},
        {"panels": {"iid": {}}},
        {"chosen": {"client_lr.x": 7.0}},
        {"chosen": {"task.name": "/tmp/evil.py:TASK"}},
    ],
    ids=["id", "panels", "value", "field"],
)
def test_an_outcome_of_another_entry_becomes_no_spec(change: dict[str, Any]) -> None:
    entry = made_up()
    found = outcome_for(entry, **{name: of for name, of in change.items() if name != "chosen"})
    if "chosen" in change:
        found["panels"]["iid"]["FedBiO"]["chosen"] = change["chosen"]
    with pytest.raises(ConfigurationError, match="not of entry made-up as it is now"):
        entry_page(entry, found)


def test_the_index_has_every_entry_with_its_state(tmp_path: Path) -> None:
    entry, other = made_up(), load("simfbo-4")
    keep(entry, tmp_path)
    index, page = write_index([entry, other], tmp_path)
    rows = Elements(index.read_text()).text("tr")
    assert "◐ partly reproduced 1 of 2 hold; 2026-01-31, 3.2 minutes – not run takes 60 min" in rows[1]
    assert "simfbo-4" in rows[2]
    said = "2 entries. Quick: 1 partly reproduced, 1 not run. Full: 2 not run."
    assert said in Elements(index.read_text()).text("p")
    assert rows[2].count("not run") == 2
    (link,) = [one["href"] for one in Elements(index.read_text()).all("a") if one["href"].endswith("report.html")]
    assert index.parent / link == page
    (back,) = [one["href"] for one in Elements(page.read_text()).all("a") if "index" in one["href"]]
    assert (page.parent / back).resolve() == index.resolve()


def test_a_page_and_the_index_say_what_was_revised(tmp_path: Path) -> None:
    entry = made_up(revised="Seeds were added.")
    keep(entry, tmp_path)
    index, page = (Elements(one.read_text()) for one in write_index([entry], tmp_path))
    assert index.text("tr")[1].endswith("Revised: Seeds were added.")
    assert "Revised: Seeds were added." in page.text("p")
    assert any(said.startswith("Claims. A difference") for said in page.text("caption"))
    assert any(
        said.startswith("Claims, written before")
        for said in Elements(entry_page(made_up(), outcome_for(made_up()))).text("caption")
    )


def test_a_page_has_what_a_slope_is_fitted_to() -> None:
    """The second halves of SimFBO's curves (0.1, 0.7, 0.8) have the mean 0.75, not the 0.80 at their ends."""
    panels = {"ten": {"value": 10.0}, "hundred": {"value": 100.0}}
    claims = [{"says": "-", "better": "SimFBO", "by": "late", "slope": 0.5}]
    entry = made_up(series="number of clients", panels=panels, claims=claims)
    finding = {**FINDING, **HOLDS, "says": "-", "panel": "", "than": ""}
    page = Elements(entry_page(entry, outcome_for(entry, findings=[finding])))
    assert "SimFBO, mean over the second half 75.00 % 75.00 %" in page.text("tr")
    assert any(said.endswith("; of the mean curve where another reading is named") for said in page.text("caption"))


def test_the_index_says_which_outcome_is_stale(tmp_path: Path) -> None:
    keep(made_up(), tmp_path)
    (index,) = write_index([made_up(spec={"task": {"name": "quadratic"}})], tmp_path)
    assert "! stale: play it again played on 2026-01-31" in Elements(index.read_text()).text("tr")[1]


def test_an_outcome_that_cannot_be_shown_leaves_the_index_to_the_others(tmp_path: Path) -> None:
    entry = made_up()
    keep(entry, tmp_path, id="other")
    with pytest.warns(UserWarning, match="no page of made-up, quick: .* is not of entry made-up as it is now"):
        (index,) = write_index([entry], tmp_path)
    assert "! not readable" in Elements(index.read_text()).text("tr")[1]
    assert "it is not of entry made-up as it is now: play the entry again" in index.read_text()


def test_a_comparisons_page_has_the_table_that_compare_prints(written: dict[str, str]) -> None:
    """The relative error of every run ends at 1/21."""
    page = Elements(written["comparison"])
    headings = "run rounds exchanges MB gradients hvps GFLOP final best seconds exchanges to 0.1"
    assert headings in page.text("tr")
    assert any(row.startswith("simfbo (2 seeds) 20 20 0.0 60 0 2e-06 0.04762 ± 0 ") for row in page.text("tr"))
    assert [one["aria-pressed"] for one in page.all("button")] == ["true", "true"]
    assert "Best relative error at the end: 0.04762 ± 0, by fedbio and simfbo." in page.text("p")


def test_a_runs_page_has_its_history_spec_and_ledger(written: dict[str, str]) -> None:
    page = Elements(written["run"])
    assert "relative error 10 0.09091" in page.text("tr")  # 1/11 after ten rounds
    assert "bytes_down 1,600" in page.text("tr")
    assert any('name = "quadratic"' in one for one in page.text("code"))
    assert page.all("button") == []


def test_the_command_writes_pages_beside_what_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = keep_runs(tmp_path / "runs", "simfbo")
    assert main(["report", str(runs)]) == main(["report", str(runs / "simfbo" / "seed-0")]) == 0
    assert main(["report", str(runs), "--out", str(tmp_path / "new" / "mine.html")]) == 0
    keep(load("simfbo-4"), tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path / "simfbo-4" / "quick")]) == 0
    printed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    names = ["runs/report.html", "runs/simfbo/seed-0/report.html", "new/mine.html"]
    names += ["index.html", "simfbo-4/quick/report.html", "simfbo-4/quick/report.html"]
    assert printed == [str(tmp_path / name) for name in names]


def test_the_command_says_which_outcome_has_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (keep(load("simfbo-4"), tmp_path) / outcome.FILE).write_text("{")
    assert main(["report", str(tmp_path)]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("fedbilevel: warning: no page of simfbo-4, quick: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "it must be the folder of a run"),
        (["empty", "--out", "x.png"], "ends in .html"),
        (["made", "--out", "x.html"], "lie in their folders"),
        (["made", "empty"], "one at a time"),
    ],
)
def test_wrong_folders_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    keep(load("simfbo-4"), tmp_path / "made")
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def colours() -> dict[str, dict[str, str]]:
    """The colours of the style sheet, by scheme."""
    light, dark = re.findall(r":root \{(.*?)\}", pages._source("style.css"), re.DOTALL)
    return {
        scheme: dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for scheme, block in {"light": light, "dark": dark}.items()
    }


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of the relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_contrast_is_as_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # the known grey that just fails


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out(scheme: str) -> None:
    of = colours()[scheme]
    seen = {name: colour for name, colour in of.items() if name not in ("page", "surface", "rule")}
    assert len(seen) == 6 + 7
    pale = {name: round(contrast(colour, of["page"]), 2) for name, colour in seen.items()}
    assert {name: ratio for name, ratio in pale.items() if ratio < 4.5} == {}
    on_surface = {name: contrast(of[name], of["surface"]) for name in ("ink", "muted")}
    assert min(on_surface.values()) >= 4.5


def test_reproduce_writes_pages_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = lambda entry, scale, options: keep(entry, options.out)  # noqa: E731
    monkeypatch.setattr("fedbilevel.cli.reproduce._one", played)
    assert main(["reproduce", "simfbo-4", "--out", str(tmp_path), "--report"]) == 0
    pages = [tmp_path / "simfbo-4" / "quick" / "report.html", tmp_path / "index.html"]
    assert [line for line in capsys.readouterr().out.splitlines() if "report " in line] == [
        f"report {one}" for one in pages
    ]
    assert all(one.is_file() for one in pages)


@pytest.mark.parametrize("installed", [True, False])
def test_reproduce_draws_where_it_can(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedbilevel.reproduce.protocol.play", lambda *arguments, **given: None)
    monkeypatch.setattr("fedbilevel.reproduce.outcome.outcome_of", lambda played: outcome_for(load("simfbo-4")))
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["reproduce", "simfbo-4", "--out", str(tmp_path), "--quiet"]) == 0
    folder = tmp_path / "simfbo-4" / "quick"
    drawn = ["figure.png"] if installed else []
    assert sorted(path.name for path in folder.iterdir()) == [*drawn, outcome.FILE]
    assert ("nothing is drawn: pictures need matplotlib" in capsys.readouterr().err) is not installed
