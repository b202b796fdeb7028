"""`fedbilevel algorithms` and `fedbilevel tasks`: what stands in docstrings, at every width."""

from __future__ import annotations

import collections
import io
import re
import typing

import pytest
from rich.console import Console

from fedbilevel.algorithms import ALGORITHMS, FedAvg
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments import catalogue
from fedbilevel.experiments.fields import complete, of_function
from fedbilevel.tasks import TASKS


@pytest.mark.parametrize("facts", catalogue.algorithms(), ids=lambda facts: facts.name)
def test_every_algorithm_says_what_people_choose_by(facts) -> None:
    told = (facts.title, facts.paper, facts.exchanges, facts.needs, facts.good_for)
    assert catalogue.MISSING not in told
    assert "" not in told


def test_what_a_class_says_goes_before_its_module(monkeypatch) -> None:
    class Mine(FedAvg):
        """A method of mine. It has more to say.

        Ann Author and Bob Author. "A paper". Somewhere 2020, arXiv:2001.00001.

        Needs: patience,
        and luck. Much of it.
        """

        __module__ = "fedbilevel.algorithms.simfbo"  # whose docstring has the rest

    monkeypatch.setitem(ALGORITHMS, "mine", Mine)
    mine = next(facts for facts in catalogue.algorithms() if facts.name == "mine")
    assert mine.title == "A method of mine"
    assert mine.paper == "Author et al. 2020, arXiv:2001.00001"
    assert mine.needs == "patience, and luck"
    assert mine.exchanges == "one"
    assert mine.good_for == catalogue.MISSING


def test_who_trains_submodels_is_said() -> None:
    able = {facts.name for facts in catalogue.algorithms() if facts.submodels == "yes"}
    assert able == {"fedavg", "fedbio", "fedlin", "rabo", "rafbo", "shrofbo", "simfbo"}


def test_algorithms_with_the_same_fields_stand_together() -> None:
    rows = catalogue.algorithm_fields()
    (names, fields) = next(row for row in rows if "simfbo" in row[0])
    assert "shrofbo" in names
    assert fields["radius"] == "inf"
    assert sorted(name for names, _ in rows for name in names) == sorted(ALGORITHMS)


@pytest.mark.parametrize("width", [40, 71, 72, 109, 110, 149, 150, 200])
def test_nothing_is_cut_off(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(catalogue.algorithms_table(width))
    console.print(catalogue.algorithm_fields_table(width))
    console.print(catalogue.tasks_table(width))
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
