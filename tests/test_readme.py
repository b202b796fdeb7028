"""The code of the documentation runs as it is printed, and every link leads to a page or a heading that exists.

The code of the README always runs, and that of the pages of docs/ runs in the slow tests.
"""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import hospital_files
from fedbilevel.data import loaders

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    "README.md",
    *(
        pytest.param(str(page.relative_to(ROOT)), marks=pytest.mark.slow)
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if "```python" in page.read_text(encoding="utf-8")
    ),
]


LINK = re.compile(r"\]\(([^)\s]+)\)")
WRITTEN = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(f for room in ("docs", "papers", "benchmarks", "examples") for f in (ROOT / room).rglob("*.md")),
    ]
)


def prose(page: Path) -> str:
    """Return the text of a page without its fenced and indented blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\n\n)(?:    .*\n)+", "", text)


def words(page: Path) -> int:
    """Count the words of a page outside code and tables; addresses of links do not count."""
    text = LINK.sub("]", re.sub(r"^\|.*$", "", prose(page), flags=re.MULTILINE))
    return sum(any(map(str.isalnum, word)) for word in text.split())


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of the page may have after "#", by GitHub's rule."""
    headings = (LINK.sub("]", heading).lower() for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of a file."""
    found = []
    for link in LINK.findall(prose(page)):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not re.match(r"[a-z]+:", link) and not (
            target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))
        ):
            found.append(link)
    return found


def addresses(page: Path) -> list[str]:
    """Return the addresses of other websites to which a page links."""
    return [
        link for link in re.findall(r"https?://[^\s)>\"`]+", prose(page)) if not re.match(r"http://(127|local)", link)
    ]


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


def test_the_quick_start_is_two_lines():
    assert blocks("README.md")[0] == ("", "make demo\nmake test\n")


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    """The Python blocks of a page run in one namespace, from top to bottom, as a reader would paste them.

    Hospitals have made-up patients. The code of the README prints the numbers that the README shows, to one unit of the
    last digit, since they are rounded.
    """
    monkeypatch.chdir(tmp_path)
    program = "\n".join(text for language, text in blocks(page) if language == "python")
    assert program
    if "import torch" in program:
        pytest.importorskip("torch")
    if "trackers.MLflow(" in program:
        pytest.importorskip("mlflow")
    if "load_heart" in program:
        hospital_files.write(tmp_path, monkeypatch, loaders.HOSPITALS)
    exec(compile(program, page, "exec"), {"__name__": "__main__"})
    if page == "README.md":
        printed = "".join(text for language, text in blocks(page) if language == "text")
        assert numbers(capsys.readouterr().out) == pytest.approx(numbers(printed), abs=0.11)


def numbers(text: str) -> list[float]:
    """Return the numbers of a printed array."""
    return [float(one) for one in re.findall(r"-?\d+\.\d*", text)]


def test_installing_is_explained_before_it_is_needed_and_never_by_a_name_on_an_index():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.index("## Quick start") < readme.index("## Install") < readme.index("```python")
    written = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").iterdir()]
    files = [ROOT / "README.md", *(file for file in written if file.suffix in (".md", ".py"))]
    by_name = re.compile(r"""(pip install|dependencies = \[)\s*["']?fedbilevel""")
    assert [str(file) for file in files if by_name.search(file.read_text(encoding="utf-8"))] == []
    assert by_name.search('pip install "fedbilevel[cli]"')
    assert by_name.search('dependencies = ["fedbilevel[cli,flower]==0.2.0"]')


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_of_it(page):
    assert broken(page) == []


def test_addresses_of_other_websites_are_whole_and_have_one_form():
    """Addresses of other websites are complete, and no address is written in two forms.

    `make links` opens them; this test needs no network.
    """
    found = {address for page in WRITTEN for address in addresses(page)}
    assert len(found) > 20
    forms: dict[str, set[str]] = {}
    for address in found:
        parts = urlsplit(address)
        assert parts.scheme == "https", address
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc), address
        assert not address.endswith((".", ",", ";", ":", ".git")), address
        path = re.sub(r"(?<=\d)v\d+$", "", parts.path.rstrip("/").removesuffix(".pdf").replace("/pdf/", "/abs/"))
        forms.setdefault(f"{parts.netloc.removeprefix('www.')}{path}#{parts.fragment}", set()).add(address)
    assert [several for several in forms.values() if len(several) > 1] == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A `heading` of it\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#a-heading-of-it) [b](there.md#no) [c](not-there.md) [d](https://example.org) [e](#no)\n"
    )
    assert broken(page) == ["there.md#no", "not-there.md", "#no"]


def test_files_name_pages_of_the_documentation_that_exist():
    """Every page that docstrings, comments and messages name, such as docs/how-to/federation.md, exists."""
    files = [file for room in ("src", "tests", "benchmarks", "examples") for file in (ROOT / room).rglob("*.py")]
    named = {(file, name) for file in files for name in re.findall(r"\bdocs/[\w./-]+\.md", file.read_text("utf-8"))}
    assert len(named) >= 5
    assert [(str(file), name) for file, name in named if not (ROOT / name).exists()] == []


def test_the_first_command_of_the_readme_comes_soon(tmp_path):
    before = tmp_path / "before.md"
    before.write_text((ROOT / "README.md").read_text("utf-8").partition("\n```")[0])
    assert 0 < words(before) <= 100


def test_every_page_is_in_an_index():
    """Every page is listed in docs/README.md, or in the index of its folder."""
    listed = set()
    for index in (ROOT / "docs").rglob("README.md"):
        listed |= {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(index))}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page != ROOT / "docs" / "README.md"}
    assert len(pages) > 30
    assert sorted(str(page.relative_to(ROOT)) for page in pages - listed) == []
