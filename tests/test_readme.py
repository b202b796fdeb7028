"""Does the documentation's code run as it is printed? The README always, the pages of docs/ among the slow tests."""

import re
from pathlib import Path

import pytest

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


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return FENCE.findall((ROOT / page).read_text(encoding="utf-8"))


def test_the_quick_start_is_two_lines():
    assert blocks("README.md")[0] == ("", "make demo\nmake test\n")


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """In one namespace, from top to bottom, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    program = "\n".join(text for language, text in blocks(page) if language == "python")
    assert program
    exec(compile(program, page, "exec"), {"__name__": "__main__"})


def test_installing_is_explained_before_it_is_needed_and_never_by_a_name_on_an_index():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.index("## Quick start") < readme.index("## Install") < readme.index("```python")
    written = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").iterdir()]
    files = [ROOT / "README.md", *(file for file in written if file.suffix in (".md", ".py"))]
    by_name = re.compile(r"""(pip install|dependencies = \[)\s*["']?fedbilevel""")
    assert [str(file) for file in files if by_name.search(file.read_text(encoding="utf-8"))] == []
    assert by_name.search('pip install "fedbilevel[cli]"')
    assert by_name.search('dependencies = ["fedbilevel[cli,flower]==0.1.0"]')
