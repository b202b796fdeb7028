"""`fedbilevel algorithms` and `fedbilevel tasks`: what stands in docstrings, at every width, without JAX."""

from __future__ import annotations

import collections
import inspect
import io
import itertools
import re
import runpy
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from rich.console import Console

from fedbilevel.algorithms import ALGORITHMS, FedAvg
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments import catalogue, facts, listing
from fedbilevel.experiments.fields import complete, of_function
from fedbilevel.experiments.loader import apart
from fedbilevel.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_say_what_the_code_says() -> None:
    """After a new method, or a change of a docstring or a field: `make catalogue`."""
    found = list(runpy.run_path(str(ROOT / "scripts" / "catalogue.py"))["written"]())
    names = {file.name for file, _ in found}
    assert {"__init__.py", "choosing.md", "README.md", "simfbo.md", "own-method.md", "tasks.md"} <= names
    assert [str(file) for file, text in found if file.read_text("utf-8") != text] == []


HEAVY = {"jax", "jaxlib", "optax", "numpy", "matplotlib", "sklearn", "flwr"}


@pytest.mark.parametrize(
    ("arguments", "code", "unneeded"),
    [
        (["--help"], 0, HEAVY | {"rich"}),
        (["run", "--help"], 0, HEAVY | {"rich"}),
        (["run", "--roundz", "3"], 2, HEAVY | {"rich"}),
        (["algorithms"], 0, HEAVY),
        (["algorithms", "simfbo"], 0, HEAVY),
        (["tasks"], 0, HEAVY),
        (["tasks", "quadratik"], 2, HEAVY - {"numpy"}),
        (["algorithms", "simfob"], 2, HEAVY - {"numpy"}),
        (["run", "quadratik"], 2, HEAVY - {"numpy"}),
        (["run", "--algorithm", "simfob"], 2, HEAVY - {"numpy"}),
        (["compare", "quadratic", "--algorithms", "simfbo,simfob"], 2, HEAVY - {"numpy"}),
        (["check", "quadratik"], 2, HEAVY - {"numpy"}),
        (["diagnose", "--algorithm", "simfob"], 2, HEAVY - {"numpy"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_text_and_misspelt_names_do_not_wait_for_jax(arguments: list[str], code: int, unneeded: set[str]) -> None:
    program = (
        "import sys\nfrom fedbilevel.cli import main\n"
        "try:\n    code = main(sys.argv[1:])\nexcept SystemExit as end:\n    code = end.code\n"
        "print('\\nloaded', code, *{name.partition('.')[0] for name in sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    _, got, *loaded = shown.stdout.splitlines()[-1].split()
    assert int(got) == code
    assert unneeded & set(loaded) == set()
    assert code == 0 or "simfbo" in shown.stderr or "quadratic" in shown.stderr or "--roundz" in shown.stderr


@pytest.mark.parametrize("one", catalogue.algorithms(), ids=lambda one: one.name)
def test_every_algorithm_says_what_people_choose_by(one) -> None:
    told = (one.title, one.paper, one.exchanges, one.needs, one.good_for)
    assert catalogue.MISSING not in told
    assert "" not in told


@pytest.mark.parametrize("cls", [ALGORITHMS[one.name] for one in catalogue.algorithms()], ids=lambda cls: cls.name)
def test_help_ends_with_the_facts_and_the_paper_is_quoted(cls) -> None:
    doc = inspect.getdoc(cls)
    quoted = f"{inspect.getdoc(inspect.getmodule(cls))} {doc.partition(str(cls.facts))[0]}"
    assert doc.endswith(f"\n\n{cls.facts}")
    assert str(cls.facts).startswith(f"Paper: {cls.facts.paper}.\n")
    authors, year, *number = re.split(r" et al\.,? | |, ", cls.facts.paper)
    assert [words for words in (authors, year, *number) if words not in quoted] == []


def test_what_a_class_does_not_say_itself_is_not_known(monkeypatch) -> None:
    class Mine(FedAvg):
        """A method of mine. It has more to say."""

    monkeypatch.setitem(ALGORITHMS, "mine", Mine)
    mine = facts.algorithm("mine")
    assert (mine.title, mine.needs) == ("A method of mine", "SingleLevel")
    assert {mine.paper, mine.exchanges, mine.good_for, mine.bias} == {catalogue.MISSING}
    assert "Paper" not in inspect.getdoc(Mine)


def test_facts_about_a_users_own_algorithm_are_read_from_its_code(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from fedbilevel import FedAvg\nfrom fedbilevel.authoring import Facts\n\n\n"
        'class Mine(FedAvg):\n    """A method of mine. It is new."""\n\n    name = "mine"\n    local_steps: int = 17\n'
        '    facts = Facts(paper="", good_for="me", exchanges="3", up="1", bias="", cost="2", needs="patience")\n'
    )
    console = Console(width=200, file=io.StringIO(), record=True)
    with apart():
        console.print(listing.algorithms_table(200, f"{tmp_path}/own.py:Mine"))
        console.print(listing.algorithm_fields_table(200, f"{tmp_path}/own.py:Mine"))
    text = console.export_text()
    assert all(words in text for words in ("own.py:Mine", "A method of mine", "patience", "local_steps=17"))
    with pytest.raises(ConfigurationError, match=r"own\.py 'Yours' \(allowed: Mine\)"):
        listing.algorithms_table(200, f"{tmp_path}/own.py:Yours")


def test_who_trains_submodels_is_said() -> None:
    said = {facts.name: facts.submodels == "yes" for facts in catalogue.algorithms()}
    assert said == {name: bool(cls().allows.submodels) for name, cls in ALGORITHMS.items()}
    assert (said["rabo"], said["fism"]) == (True, False)


def test_algorithms_with_the_same_fields_stand_together() -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(listing.algorithm_fields_table(200))
    lines = [line.split() for line in console.export_text().splitlines() if line.strip()]
    at = [words[0] for words in lines].index("shrofbo")
    assert lines[at + 1][0] == "simfbo"  # the next line of the same row: what follows are the fields of both
    assert "radius=inf" in itertools.chain(*lines[at:])
    assert [words[0] for words in lines if words[0] in ALGORITHMS].count("simfbo") == 1


@pytest.mark.parametrize("width", [40, 71, 72, 109, 110, 149, 150, 200])
def test_nothing_is_cut_off(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(listing.algorithms_table(width))
    console.print(listing.algorithm_fields_table(width))
    console.print(listing.tasks_table(width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert all(name in text for name in [*ALGORITHMS, *TASKS])
    letters = collections.Counter(re.sub(r"[\W_]", "", text))
    facts = "".join(one.good_for + one.needs + one.exchanges for one in catalogue.algorithms())
    assert collections.Counter(re.sub(r"[\W_]", "", facts)) <= letters


Word = typing.Literal["random", "series", "cg"]


def choosing(*, inverse: Word = "random", other: Word | None = None, terms: int | Word = 3) -> None:
    """Has fields with fixed sets of words."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"inverse": "sries"},
            "x.inverse = 'sries' is not allowed: it must be one of random, series, cg; did you mean",
        ),
        ({"inverse": 3}, "x.inverse = 3 is not allowed: it must be one of random, series, cg"),
        ({"other": "cgg"}, "one of random, series, cg or \"none\"; did you mean 'cg'?"),
        ({"terms": "serie"}, "a whole number or one of random, series, cg; did you mean 'series'?"),
    ],
)
def test_a_fixed_set_of_words(given: dict, words: str) -> None:
    fields = of_function(choosing)
    assert complete("x", fields, {"inverse": "cg", "other": "none", "terms": "series"}, {}) == {
        "inverse": "cg",
        "other": None,
        "terms": "series",
    }
    with pytest.raises(ConfigurationError) as error:
        complete("x", fields, given, {})
    assert words in str(error.value)
