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
