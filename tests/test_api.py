"""Does the API reference have every public name? tests/experiments/test_listing.py compares its pages with the code."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
API = runpy.run_path(str(ROOT / "scripts" / "api.py"))
PLACES = {"fedbilevel": "fedbilevel.public", "fedbilevel.projections": "fedbilevel.core.projections"}
"""Where the names of a module are listed, if that is another module."""
WITHOUT = {"fedbilevel.estimators": "sklearn", "fedbilevel.flower": "flwr"}


def headings(module: str) -> set[str]:
    page = ROOT / "docs" / "reference" / "api" / f"{module.rpartition('.')[2]}.md"
    return set(re.findall(r"^###? (\w+)$", page.read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("name", [module.name for module in API["MODULES"]])
def test_a_page_has_every_public_name_of_its_module_and_the_index_links_to_it(name: str) -> None:
    if name in WITHOUT:
        pytest.importorskip(WITHOUT[name])
    public = importlib.import_module(PLACES.get(name, name)).__all__
    modules = {module.name for module in API["MODULES"]}
    names = {one for one in public if f"{name}.{one}" not in modules}
    assert names
    assert headings(name) >= names
    index = (ROOT / "docs" / "reference" / "api" / "README.md").read_text("utf-8")
    assert [one for one in names if f"[{one}]({name.rpartition('.')[2]}.md#{one.lower()})" not in index] == []


def test_every_public_module_has_a_page_but_that_of_tasks_which_has_its_own() -> None:
    """Modules that `fedbilevel` hands out, and packages with a list of names that no page of the reference replaces."""
    rooms = (ROOT / "src" / "fedbilevel").glob("*/__init__.py")
    listing = {f"fedbilevel.{room.parent.name}" for room in rooms if "__all__" in room.read_text("utf-8")}
    inside = {"fedbilevel.algorithms", "fedbilevel.tasks"}  # listed by `fedbilevel`; docs/reference/tasks.md
    assert listing - inside <= {module.name for module in API["MODULES"]}


def test_a_docstring_becomes_lists_and_its_marks_stay_text() -> None:
    doc = "Solve.\n\nArgs:\n    x, y: where y*(x) is,\n        in two lines.\n    z: a `b*c`.\n\n"
    doc += "Returns:\n    The\n    end."
    assert API["markdown"](doc).split("\n\n") == [
        "Solve.",
        "Arguments:",
        "- `x, y`: where y\\*(x) is, in two lines.\n- `z`: a `b*c`.",
        "Returns: The end.\n",
    ]


def test_an_example_of_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = next(one for one in API["MODULES"] if one.name == "fedbilevel.errors")
    page = API["page"]
    monkeypatch.setitem(page.__globals__, "examples", lambda name: {"Misspelt": "1"})
    with pytest.raises(SystemExit, match="Misspelt"):
        page(module, "errors.md", {})
