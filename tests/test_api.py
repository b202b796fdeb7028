"""The API reference has every public name; tests/experiments/test_listing.py compares its pages with the code."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
API = runpy.run_path(str(ROOT / "scripts" / "api.py"))
PAGES = ROOT / "docs" / "reference" / "api"
PLACES = {"fedbilevel": "fedbilevel.public", "fedbilevel.projections": "fedbilevel.core.projections"}
"""The module that lists the public names of a module, if it is another one."""
WITHOUT = {"fedbilevel.estimators": "sklearn", "fedbilevel.flower": "flwr"}


def headings(module: str) -> set[str]:
    page = PAGES / f"{module.rpartition('.')[2]}.md"
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
    index = (PAGES / "README.md").read_text("utf-8")
    assert [one for one in names if f"[{one}]({name.rpartition('.')[2]}.md#{one.lower()})" not in index] == []


def test_every_public_module_has_a_page_but_that_of_tasks_which_has_its_own() -> None:
    """Every package with a list of public names has a page, except two whose names are on other pages.

    The names of `fedbilevel.algorithms` are on the page of `fedbilevel`, and tasks are on docs/reference/tasks.md.
    """
    rooms = (ROOT / "src" / "fedbilevel").glob("*/__init__.py")
    listing = {f"fedbilevel.{room.parent.name}" for room in rooms if "__all__" in room.read_text("utf-8")}
    inside = {"fedbilevel.algorithms", "fedbilevel.tasks"}
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


def test_code_in_a_docstring_becomes_what_its_link_says_and_so_does_the_name_of_an_error() -> None:
    doc = "See `Solve` and `x`.\n\nRaises:\n    Wrong: `Solve` fails.\n    x: text."
    assert API["markdown"](doc, lambda code: f"[{code}](#s)" if code[1].isupper() else code).split("\n\n") == [
        "See [`Solve`](#s) and `x`.",
        "Raises:",
        "- [`Wrong`](#s): [`Solve`](#s) fails.\n- `x`: text.\n",
    ]


@pytest.mark.parametrize(
    ("module", "name", "path"),
    [
        ("fedbilevel.core.fed", "Fed", "fedbilevel.core.fed.Fed"),
        ("fedbilevel.public", "Bilevel", "fedbilevel.core.problem.Bilevel"),  # through two imports
        ("fedbilevel.core.client", "PyTree", "fedbilevel.core.tree.PyTree"),  # a name for a type
        ("fedbilevel.core.client", "Array", None),  # of another library
        ("fedbilevel.core.client", "Nowhere", None),
        ("fedbilevel.nowhere", "Fed", None),
    ],
)
def test_the_definition_of_a_type_is_found_through_imports(module: str, name: str, path: str | None) -> None:
    found = API["definition"](module, name)
    assert (found and found.path) == path


def test_a_signature_is_followed_by_links_to_its_types() -> None:
    """A signature is followed by links to the types of this library that it names, public or not.

    Bilevel is public, Problem is not, and Array belongs to another library.
    """
    rooms = ("fedbilevel.engines.solve", "fedbilevel.core.problem")
    entry = API["Entry"]("f", "f(a: Problem, b: Bilevel | Array) -> Bilevel", "", rooms)
    found = list(API["types_in"](entry))
    assert [one.path for one in found] == ["fedbilevel.core.problem.Problem", "fedbilevel.core.problem.Bilevel"]
    page = (PAGES / "fedbilevel.md").read_text("utf-8").partition("### solve\n")[2].partition("\n### ")[0]
    links = re.search(r"^Types: (.*)$", page, re.MULTILINE)
    assert links is not None
    assert "[`Problem`](types.md#problem), [`Clients`](fedbilevel.md#clients)" in links[1]


def test_every_type_that_a_signature_names_is_described_once() -> None:
    """Every link of the reference to a type of the library leads to a heading, whether a module exports it or not."""
    links = {
        link
        for page in PAGES.glob("[a-z]*.md")
        for link in re.findall(r"\]\((\w+\.md)#(\w+)\)", page.read_text("utf-8"))
    }
    assert len(links) > 150
    headings = {
        (page.name, line.lstrip("# ").lower())
        for page in PAGES.glob("[a-z]*.md")
        for line in page.read_text("utf-8").splitlines()
        if line.startswith("##")
    }
    assert links - headings == set()


def test_an_example_of_no_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = next(one for one in API["MODULES"] if one.name == "fedbilevel.errors")
    page = API["page"]
    monkeypatch.setitem(page.__globals__, "examples", lambda name: {"Misspelt": "1"})
    with pytest.raises(SystemExit, match="Misspelt"):
        page(module, API["Reference"]([module]))
