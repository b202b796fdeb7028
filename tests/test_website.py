"""The navigation of the website has every page, and names in code lead to their entries in the API reference.

The tests do not need the libraries that build the website. `make docs` builds it, and finds links that lead nowhere.
"""

import json
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAVIGATION = runpy.run_path(str(ROOT / "docs" / "website" / "navigation.py"))
WEBSITE = runpy.run_path(str(ROOT / "scripts" / "website.py"))
NAMES = runpy.run_path(str(ROOT / "docs" / "website" / "names.py"))
ENTRIES = NAMES["entries"]((ROOT / NAMES["PAGES"] / "README.md").read_text("utf-8"))


def test_every_page_is_in_the_navigation_once():
    written = [
        *ROOT.glob("*.md"),
        *(page for room in ("docs", "papers", "examples") for page in (ROOT / room).rglob("*.md")),
    ]
    assert len(written) > 60
    assert sorted(NAVIGATION["every_page"](ROOT)) == sorted(
        [*(str(page.relative_to(ROOT)) for page in written), "benchmarks/README.md"]
    )


def test_the_navigation_has_the_sections_of_the_list_of_pages_in_their_order():
    sections = NAVIGATION["sections"](ROOT)
    assert list(sections) == ["Tutorials", "How-to guides", "Reference", "Explanation", "Examples", "Project"]
    assert sections["Tutorials"][0] == "docs/tutorials/first-program.md"
    assert all(sections.values())


def test_pages_of_a_folder_are_below_its_index():
    assert "papers/fednest/README.md" in NAVIGATION["below"](ROOT, "papers/README.md")
    assert "papers/to-the-letter.md" not in NAVIGATION["below"](ROOT, "papers/README.md")  # listed by docs/README.md
    assert NAVIGATION["below"](ROOT, "docs/glossary.md") == []


def test_a_page_that_no_list_names_is_not_in_the_navigation(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text(
        "# All\n\n## Guides\n\n[a](a.md) [a](a.md#b) [w](https://w.org/w.md)\n"
    )
    for name in ("a", "b"):
        (tmp_path / "docs" / f"{name}.md").write_text(f"# {name}\n")
    assert [Path(page).name for page in NAVIGATION["every_page"](tmp_path)] == ["README.md", "README.md", "a.md"]


@pytest.mark.parametrize(
    ("code", "entry"),
    [
        ("fb.solve", "fedbilevel#solve"),
        ("solve", "fedbilevel#solve"),
        ("fb.solve(…, rounds=3)", "fedbilevel#solve"),
        ("Clients.local_steps", "fedbilevel#clients"),
        ("fb.Clients.split(samples, 0.5)", "fedbilevel#clients"),
        ("fb.parts.TopK()", "parts#topk"),
        ("TopK", "parts#topk"),
        ("data.load", "data#load"),
        ("fedbilevel.torch.load", "torch#load"),
        ("Sweep", "types#sweep"),
    ],
)
def test_a_name_in_code_leads_to_its_entry(code, entry):
    found = NAMES["entry_of"](code, ENTRIES)
    assert f"{found.page}#{found.anchor}" == f"docs/reference/api/{entry}"


@pytest.mark.parametrize("code", ["load", "x", "result.x", "fedbilevel run", "solve x", "", "…", "0.1", "Clientele"])
def test_code_that_is_no_public_name_leads_nowhere(code):
    assert NAMES["entry_of"](code, ENTRIES) is None


def test_every_entry_is_a_heading_of_its_page():
    assert len(ENTRIES) > 150
    for page in {entry.page for entry in ENTRIES.values()}:
        headings = {
            line.lstrip("# ").lower()
            for line in (ROOT / f"{page}.md").read_text("utf-8").splitlines()
            if line[:1] == "#"
        }
        assert {entry.anchor for entry in ENTRIES.values() if entry.page == page} <= headings


def test_versions_are_the_tags_of_versions_the_newest_first(tmp_path):
    def git(*arguments: str) -> None:
        person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *person, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message=First")
    for tag in ("v0.9.0", "v0.10.0", "vacation", "w1.0", "v1.0rc1"):
        git("tag", tag)
    assert WEBSITE["tags"](tmp_path) == ["v0.10.0", "v0.9.0"]


def test_the_choice_of_versions_has_the_pages_of_those_that_were_built(tmp_path):
    for page in ("0.2.0/index.html", "0.2.0/docs/a.html", "development/index.html"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("")
    WEBSITE["write_choice"](tmp_path, ["0.2.0", "0.1.0", "development"])
    text = (tmp_path / "versions.js").read_text("utf-8")
    assert json.loads(text.removeprefix("const versions = ").removesuffix(";\n")) == {
        "0.2.0": ["docs/a.html", "index.html"],
        "development": ["index.html"],
    }
    assert "url=0.2.0/index.html" in (tmp_path / "index.html").read_text("utf-8")
