"""Make a Jupyter notebook of each tutorial: `make notebooks`, or `python scripts/notebooks.py FOLDER [--execute]`.

The notebooks are made from the pages of docs/tutorials/. The Python blocks of a page become cells of code, and the text
between them becomes cells of text. Only nbformat is used: jupytext would split pages in the same way, but would not
adapt links.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PAGES = Path(__file__).resolve().parent.parent / "docs" / "tutorials"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:)([^)#\s]+)")  # the path of a link, without a heading; no links to the web


def notebook(page: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook of a page for a folder. The links are adapted to this folder."""

    def from_folder(link: re.Match[str]) -> str:
        target = (page.parent / link[1]).resolve()
        return f"{target.stem}.ipynb" if target.parent == page.parent else os.path.relpath(target, folder)

    cells = []
    for i, part in enumerate(BLOCK.split(page.read_text(encoding="utf-8"))):  # the parts are text, code, text, …
        if source := part.strip():
            name = f"cell-{len(cells)}"  # not a random name, so that the same page gives the same notebook
            text = LINK.sub(from_folder, source)
            cells.append(new_code_cell(source, id=name) if i % 2 else new_markdown_cell(text, id=name))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=cells, metadata={"kernelspec": kernel})


def run(made: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run the cells of a notebook in a folder, and return the notebook with their outputs."""
    from nbclient import NotebookClient

    return NotebookClient(made, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()


def write(folder: Path, execute: bool) -> list[Path]:
    """Write the notebook of every tutorial to a folder, and return the paths."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for page in sorted(PAGES.glob("*.md")):
        made = notebook(page, folder)
        files.append(folder / f"{page.stem}.ipynb")
        nbformat.write(run(made, folder) if execute else made, files[-1])
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Jupyter notebook of each tutorial.")
    parser.add_argument("folder", type=Path, help="where to write them")
    parser.add_argument("--execute", action="store_true", help="run their cells")
    given = parser.parse_args()
    print("\n".join(map(str, write(given.folder, given.execute))))


if __name__ == "__main__":
    main()
