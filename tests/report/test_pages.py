"""Pages as they are written: their numbers, their structure, and that nothing in them commands a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.cli import main
from fedbilevel.report import page as pages
from fedbilevel.report import write
from report_pages import every_page, keep_runs

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


KINDS = pytest.mark.parametrize("kind", ["comparison", "run"])


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
    runs = keep_runs(out / "x<script>alert(3)<", "simfbo")
    (run, other) = (runs / "simfbo" / f"seed-{seed}" for seed in (0, 1))
    for place in (run, other):
        (place / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
        for name in ("summary.json", "history.jsonl"):
            said = (place / name).read_text().replace("relative_error", "<script>$\\\\frac")
            (place / name).write_text(said)
    return [write(folders).read_text() for folders in ([run], [runs])]


def test_strangers_names_are_text(tmp_path: Path) -> None:
    for html in hostile_pages(tmp_path):
        page = Elements(html)
        assert len(page.all("script")) == 1
        assert page.all("img") == []
        assert [name for _, one in page.found for name in one if name.startswith("on")] == []
        assert "&lt;script&gt;" in html
        assert "\u202e" not in html


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
    printed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    names = ["runs/report.html", "runs/simfbo/seed-0/report.html", "new/mine.html"]
    assert printed == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "it must be the folder of a run"),
        (["empty", "--out", "x.png"], "ends in .html"),
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
