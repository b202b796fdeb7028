"""Pages of the documentation name fields, helpers, parts, methods and tests that exist."""

import json
import re
from pathlib import Path

import numpy as np

import fedbilevel as fb
from fedbilevel import authoring

DOCS = Path(__file__).resolve().parent.parent / "docs"
LETTER = DOCS.parent / "papers" / "to-the-letter.md"
OTHERS = {"ALGORITHMS", "Diagnosis", "History", "HypergradientReport", "Ledger"}
"""Names of `authoring` that are no helpers of a method: the registry of methods, and types that the library returns."""
TEST = re.compile(r"\[(\w+)\]\(([\w./]+\.py)\)")
PARTS = ["Place", "Printed", "Right", "Why", "Shown by"]
"""The parts of each entry of the errata."""
STATE = re.compile(r"\*right\*: \[(\w+)\]\(([\w./]+\.py)\)|\*departs\*: .+")


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def has_test(name: str, file: str, folder: Path = DOCS / "reference") -> bool:
    """Return whether a file, to which a page of this folder links, has a test of this name."""
    text = (folder / file).read_text("utf-8")
    return bool(re.search(rf"^ *def {name}\(", text, re.MULTILINE))


def test_the_page_on_exchanges_names_the_fields_of_a_reply() -> None:
    said = next(part for part in page("explanation/exchanges.md").split("\n\n") if "It returns a `Reply`" in part)
    assert set(re.findall(r"`(\w+)`", said.partition("a `Reply`")[2])) == set(authoring.Reply._fields)


def test_the_table_of_helpers_is_complete() -> None:
    table = page("how-to/own-method.md").partition("\n## Helpers\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) == set(authoring.__all__) - OTHERS


def test_the_page_on_choosing_names_parts_that_exist() -> None:
    """Everything that the pages on methods and their costs write as a call, such as `CG()`, is a part or public."""
    text = page("how-to/choosing.md") + page("reference/costs.md")
    called = set(re.findall(r"\b([A-Z]\w+)\(", text))
    assert called >= {"CG", "Implicit"}
    assert {name for name in called if not hasattr(fb.parts, name) and name not in fb.__all__} == set()
    assert "`cg`" not in text


def test_the_hospitals_page_says_what_its_splits_gave() -> None:
    """The accuracies on the page about hospitals are those that benchmarks/hospitals.json has for five splits.

    They are the mean over the splits, and half of Student's interval, with t(0.975; 4) = 2.7764.
    """
    kept = json.loads((DOCS.parent / "benchmarks" / "hospitals.json").read_text("utf-8"))["test_accuracy"]
    rows = re.findall(
        r"^\| (\w[\w ,]*) \| ((?:0\.\d+ ± 0\.\d+[ |]*)+)\|$", page("tutorials/hospitals.md"), re.MULTILINE
    )
    names = {name: name.removesuffix(", pooled").removesuffix(" for all") for name, _ in rows}
    assert list(names.values()) == ["FedAvg", "FedLin", "SimFBO", "FedNest", "alone", "FedAvg, one intercept"]
    for name, cells in rows:
        read = np.array(kept[names[name]])
        halves = 2.7764 * read.std(axis=0, ddof=1) / 5**0.5
        pairs = zip(read.mean(axis=0), halves, strict=True)
        assert cells.strip().split(" | ") == [f"{mean:.3f} ± {half:.3f}" for mean, half in pairs], name


def test_the_page_on_the_papers_names_code_and_tests_that_exist() -> None:
    """papers/to-the-letter.md names code and tests that exist.

    Each item is marked as right, with a link to a file that has the named test, or as departing from the paper.
    """
    tables = re.findall(r"^\|(?!item|-)(.+)\|$", LETTER.read_text("utf-8"), re.MULTILINE)
    files = (DOCS.parent / "src").rglob("*.py")
    code = {name for file in files for name in re.findall(r"\w+", file.read_text("utf-8"))}
    assert len(tables) > 70
    for item, _, where, state in (row.split("|") for row in tables):
        found = STATE.fullmatch(state)
        assert found, (item, state)
        assert set(re.findall(r"\w+", where)) <= code, item
        assert not found[1] or has_test(found[1], found[2], LETTER.parent), item


def test_each_erratum_says_what_is_right_and_names_tests_that_exist() -> None:
    """Each erratum has all its parts, and names tests that exist.

    Errata are numbered by paper. papers/to-the-letter.md does not describe slips of the papers a second time.
    """
    entries = re.split(r"^### (.+)\n", page("reference/errata.md"), flags=re.MULTILINE)
    numbers: dict[str, int] = {}
    for heading, text in zip(entries[1::2], entries[2::2], strict=True):
        paper, number = heading.split()
        numbers[paper] = numbers.get(paper, 0) + 1
        assert int(number) == numbers[paper], heading
        assert re.findall(r"^- \*\*(.+?)\*\*:\s", text, re.MULTILINE) == PARTS, heading
        shown = TEST.findall(text.partition("**Shown by**:")[2])
        assert shown, heading
        assert [test for test, file in shown if not has_test(test, file)] == [], heading
    assert set(numbers) == {"SimFBO", "RABO", "FedNest", "AFBO", "FISM"}
    assert "slip" not in LETTER.read_text("utf-8").partition("## ")[2]
