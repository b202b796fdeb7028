"""Do pages about runs have the runs' numbers and a sound structure, and does nothing in them command a browser?"""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fedbilevel import experiments
from fedbilevel.cli import main
from fedbilevel.core.writing import write_json
from fedbilevel.experiments.export import write_page
from run_folders import write_run

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&\u202e"
VOID = {"meta", "img"}


class Elements(HTMLParser):
    """All elements of a page with their attributes, and the text inside each of them."""

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

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self.open.pop()][0] == tag
        self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for place in self.open:
            self.texts[place] += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for one, attributes in self.found if one == tag]

    def text(self, tag: str) -> list[str]:
        return [" ".join(said.split()) for (one, _), said in zip(self.found, self.texts, strict=True) if one == tag]


ENVIRONMENT = {"jax": "0.10.2", "resumed": [{"jax": "0.10.3"}, {"jax": "0.10.2"}]}


def keep_runs(out: Path, *algorithms: str) -> Path:
    """Write a folder with two runs of each algorithm, and return it."""
    for algorithm in algorithms:
        for seed in (0, 1):
            settings = ["rounds=20", f"run.seed={seed}"]
            spec = experiments.configure(task="quadratic", algorithm=algorithm, settings=settings)
            write_json(write_run(out / algorithm / f"seed-{seed}", spec) / "environment.json", ENVIRONMENT)
    return out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    runs = keep_runs(tmp_path_factory.mktemp("pages") / "runs", "simfbo", "fedbio")
    pages = {"comparison": [runs], "run": [runs / "simfbo" / "seed-0"]}
    return {kind: write_page(folders).read_text() for kind, folders in pages.items()}


@pytest.mark.parametrize("kind", ["comparison", "run"])
def test_a_page_is_sound_asks_for_nothing_and_runs_nothing(written: dict[str, str], kind: str) -> None:
    """A page is well-formed, contains its picture, loads nothing from elsewhere, and has no script."""
    page = Elements(written[kind])
    assert page.open == []
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("footer")) == 1
    assert len(page.all("caption")) == len(page.all("table")) == (6 if kind == "run" else 4)
    assert page.all("html") == [{"lang": "en"}]
    assert page.all("script") == page.all("link") == page.all("a") == []
    (policy,) = [one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    (image,) = page.all("img")
    assert image["alt"]
    svg = base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,"))
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert re.findall(rb"<script|href=\"http", svg) == []


def test_a_comparisons_page_has_the_table_that_compare_prints(written: dict[str, str]) -> None:
    """The page of a comparison has the table that `compare` prints.

    The relative error of every run ends at 1/21 = 0.04762.
    """
    page = Elements(written["comparison"])
    assert "run rounds exchanges MB gradients hvps GFLOP final best seconds exchanges to 0.1" in page.text("tr")
    assert any(row.startswith("SimFBO (2 seeds) 20 20 0.0024 60 0 2e-06 0.04762 ± 0 ") for row in page.text("tr"))
    assert "Best relative error at the end: 0.04762 ± 0, by FedBiO and SimFBO." in page.text("p")
    assert page.text("summary") == ["Spec of FedBiO (2 seeds)", "Spec of SimFBO (2 seeds)"]
    assert {"jax 0.10.2", "jax 0.10.3"} <= set(page.text("tr"))
    assert "<b>0.04762 ± 0</b>" in written["comparison"]


def test_a_pooled_run_is_not_named_as_the_best(tmp_path: Path) -> None:
    """The page names SimFBO, whose error ends at 1/21, though the error of the pooled run ends at 1/41."""
    specs = [
        experiments.configure(task="quadratic", algorithm="simfbo", settings=[f"run.pooled={pooled}"])
        for pooled in ("false", "true")
    ]
    write_run(tmp_path / "simfbo", specs[0])
    write_run(tmp_path / "centralised", specs[1], rounds=40)
    page = Elements(write_page([tmp_path]).read_text())
    assert any("centralised" in row and " 40 40 " in row for row in page.text("tr"))
    assert "Best relative error at the end: 0.04762, by SimFBO." in page.text("p")


def test_a_runs_page_has_its_history_spec_and_ledger(written: dict[str, str]) -> None:
    page = Elements(written["run"])
    assert "Relative error at the end: 0.04762." in page.text("p")  # a single run is not the best of several
    assert any(row.startswith("10 10 ") and row.endswith(" 0.0909091") for row in page.text("tr"))  # 1/11, ten rounds
    assert "bytes_down 1600" in page.text("tr")
    assert any('name = "quadratic"' in one for one in page.text("pre"))
    assert page.text("h1") == ["quadratic · simfbo"]


def test_a_long_history_is_thinned_and_says_so(tmp_path: Path) -> None:
    """Of a long history, a page shows at most 200 rows: of 401 rows, every third from the last one."""
    place = keep_runs(tmp_path, "simfbo") / "simfbo" / "seed-0"
    row = json.loads((place / "history.jsonl").read_text().splitlines()[-1])
    (place / "history.jsonl").write_text("".join(json.dumps({**row, "round": k}) + "\n" for k in range(401)))
    assert "134 of 401 rows" in Elements(write_page([place]).read_text()).text("caption")


def test_strangers_names_are_text(tmp_path: Path) -> None:
    """Names that strangers may choose, of a folder, a metric or a package, are only text on a page."""
    runs = keep_runs(tmp_path / "x<script>alert(3)<", "simfbo")
    places = [runs / "simfbo" / f"seed-{seed}" for seed in (0, 1)]
    for place in places:
        (place / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
        for name in ("summary.json", "history.jsonl"):
            text = (place / name).read_text()
            (place / name).write_text(text.replace("relative_error", "<script>$\\\\frac$ \\u202e"))
    for folders in (places[:1], [runs]):
        html = write_page(folders).read_text()
        page = Elements(html)
        assert page.all("script") == []
        assert len(page.all("img")) == 1
        assert [name for _, one in page.found for name in one if name.startswith("on")] == []
        assert "&lt;script&gt;" in html
        assert "\u202e" not in html


def test_the_command_writes_pages_beside_what_they_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = keep_runs(tmp_path / "runs", "simfbo")
    assert main(["report", str(runs)]) == main(["report", str(runs / "simfbo" / "seed-0")]) == 0
    assert main(["report", str(runs), "--out", str(tmp_path / "new" / "mine.html")]) == 0
    printed = [line.split()[-1] for line in capsys.readouterr().out.splitlines()]
    names = ["runs/report.html", "runs/simfbo/seed-0/report.html", "new/mine.html"]
    assert printed == [str(tmp_path / name) for name in names]
