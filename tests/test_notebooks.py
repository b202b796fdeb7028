"""Notebooks contain the whole tutorials, and run.

The tests need nbformat, which `make notebooks` installs, and are skipped without it.
"""

import re
import runpy
from pathlib import Path

import pytest

import hospital_files
from fedbilevel.data import loaders

nbformat = pytest.importorskip("nbformat")
new_code_cell = nbformat.v4.new_code_cell
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
scripts = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))


def test_a_notebook_holds_its_page_and_every_link_leads_somewhere(tmp_path):
    written = scripts["write"](tmp_path, execute=False)
    assert [file.stem for file in written] == [page.stem for page in PAGES]
    for file, page in zip(written, PAGES, strict=True):
        made = nbformat.read(file, as_version=4)
        nbformat.validate(made)
        code = [cell.source for cell in made.cells if cell.cell_type == "code"]
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
        assert code == [block.strip() for block in blocks]
        text = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
        assert links
        assert [link for link in links if not (tmp_path / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_a_notebook(page, tmp_path, monkeypatch):
    """A tutorial runs as a notebook, also a second time in the same kernel and folder, as readers may run it.

    The hospitals' patients are made up, and are as many as the real ones.
    """
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if "import torch" in page.read_text("utf-8"):
        pytest.importorskip("torch")
    hospital_files.write(tmp_path, monkeypatch, loaders.HOSPITALS)
    monkeypatch.delenv("JAX_ENABLE_X64")  # readers do not set it
    made = scripts["notebook"](page, tmp_path)
    made.cells += [new_code_cell(cell.source) for cell in made.cells if cell.cell_type == "code"]
    scripts["run"](made, tmp_path)
    shown = [output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]
    assert shown
    assert [output.text for output in shown if output.get("name") == "stderr"] == []
