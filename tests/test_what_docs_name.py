"""Do the pages of the documentation name what there is: fields, helpers with their arguments, parts, methods?"""

import inspect
import re
from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel import authoring

DOCS = Path(__file__).resolve().parent.parent / "docs"
RETURNED = {"Diagnosis", "History", "HypergradientReport", "Ledger"}
"""Types of what the library returns: their pages are others."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_the_page_on_exchanges_names_the_fields_of_a_reply() -> None:
    said = next(part for part in page("explanation/exchanges.md").split("\n\n") if "It returns a `Reply`" in part)
    assert set(re.findall(r"`(\w+)`", said.partition("a `Reply`")[2])) == set(authoring.Reply._fields)


def helpers() -> dict[str, str]:
    """The first cells of the table of helpers: name -> arguments that the page prints, empty where it prints none."""
    table = page("how-to/own-method.md").partition("\n## Helpers\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return dict(re.findall(r"`(\w+)(\([^`]*\))?`", " ".join(cells)))


def test_the_table_of_helpers_is_complete() -> None:
    assert set(helpers()) == set(authoring.__all__) - RETURNED


@pytest.mark.parametrize("name", [name for name, arguments in helpers().items() if arguments])
def test_the_table_of_helpers_prints_their_arguments(name: str) -> None:
    printed = re.findall(r"\w+", helpers()[name])
    assert printed == list(inspect.signature(getattr(authoring, name)).parameters)


def test_the_page_on_choosing_names_parts_that_exist() -> None:
    """Whatever is written as a call, such as `CG()`."""
    called = set(re.findall(r"\b([A-Z]\w+)\(", page("how-to/choosing.md")))
    assert called >= {"CG", "Implicit"}
    assert {name for name in called if not hasattr(fb.parts, name) and name not in fb.__all__} == set()
    assert "`cg`" not in page("how-to/choosing.md")
