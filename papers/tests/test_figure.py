"""Files of figures are checked, all of them give complete specs, and the programs use public names only."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from papers.claims import findings
from papers.figure import PAPERS, SCALES, Figure, files, find, load, read
from papers.play import runs_of, trials
from small_figure import CONTENT, UNTUNED, made_up

from fedbilevel import experiments
from refusals import ANY, refuses
from representatives import slow_but

FIGURES = [load(file) for file in files()]
EVERY = pytest.mark.parametrize("figure", FIGURES, ids=lambda one: one.id)
PUBLIC = {
    "fedbilevel",
    "fedbilevel.authoring",
    "fedbilevel.data",
    "fedbilevel.errors",
    "fedbilevel.experiments",
    "fedbilevel.extending",
}
LONGER = {
    "afbo-1",
    "afbo-2",
    "afbo-3",
    "fism-2",
    "fism-3",
    "fism-table-1",
    "simfbo-2",
    "fednest-2a-published",
    "fednest-2a",
    "fednest-2b",
    "fednest-2bc-published",
    "fednest-2c",
    "fednest-3",
    "fednest-3-published",
    "rabo-3",
    "rabo-5",
    "rabo-table-2",
    "rabo-table-2-conv4",
    "rabo-table-3",
    "simfbo-4",
    "theory-coverage",
    "theory-rate-afbo",
    "theory-rate-rabo",
    "theory-rate-simfbo",
}
"""Figures that take more than ten minutes on two cores, by the stored times of their runs."""


def imported(file: Path) -> set[str]:
    """Return the modules of the library that a file imports, or from which it imports names."""
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name for name in found if name.partition(".")[0] == "fedbilevel"}


def test_everything_here_uses_public_names_alone() -> None:
    programs = sorted(PAPERS.rglob("*.py"))
    assert len(programs) > 8
    assert {str(file): imported(file) - PUBLIC for file in programs if imported(file) - PUBLIC} == {}


@EVERY
@pytest.mark.parametrize("scale", slow_but("quick", of=SCALES))
def test_every_figure_gives_whole_specs(figure: Figure, scale: Any) -> None:
    """Every figure gives complete specs, for runs on test data and for trials on a holdout.

    They are checked at the first and the last point of each grid, which have the smallest and the largest value of
    every field.
    """
    for pair in figure.pairs(scale):
        points = figure.points(*pair)
        ends = [points[0], *points[1:][-1:]]
        spec = experiments.resolve(figure.tables(*pair, scale))
        assert spec.task.fields.get("holdout", 0) == 0  # the runs are measured on test data
        for _, (trial, *_) in trials(figure, *pair, scale, Path(), ends):
            assert trial.spec.task.fields.get("holdout", 1) > 0
        for values in ends:
            (run,) = runs_of(figure, pair, scale, Path(), values, [7])
            assert run.spec.run.seed == 7


@EVERY
def test_every_figure_says_what_was_found_and_how_long_it_takes(figure: Figure) -> None:
    assert figure.found.endswith(".")
    assert figure.quick.minutes is not None
    assert figure.full.minutes is not None
    assert (figure.quick.minutes > 10) == (figure.runs in LONGER)
    if replace(figure.quick, minutes=None) == replace(figure.full, minutes=None):
        assert figure.full.minutes == figure.quick.minutes


def test_every_figure_and_table_is_there() -> None:
    papers = {
        "afbo": "1 2 3 4",
        "fednest": "2a-published 2a 2b 2bc-published 2c 3-published 3 4",
        "fism": "2 3 table-1",
        "rabo": "2 3 4 5 6 table-2-conv4 table-2 table-3",
        "simfbo": "2 3 4 5",
        "theory": "clients coverage delay drift local-steps mask-noise mask-step participation-steps participation "
        "printed-slopes rate-afbo rate-clients rate-drift-rounds rate-drift rate-fednest rate-minimax rate-rabo "
        "rate-simfbo series unequal-work work-spread",
    }
    assert [figure.id for figure in FIGURES] == [
        f"{paper}-{one}" for paper, all in papers.items() for one in all.split()
    ]


def test_figures_are_found_by_id_paper_or_path(tmp_path: Path) -> None:
    own = tmp_path / "mine-1.toml"
    own.write_bytes((PAPERS / "fednest" / "fednest-4.toml").read_bytes())
    assert [one.id for one in find(["theory-drift", str(own), "afbo"])][-2:] == ["theory-drift", "mine-1"]
    assert len(find(["all"])) == len(FIGURES)
    with refuses("figure", "afob", near="afbo"):
        find(["afob"])
    with refuses("", fact="nowhere.toml"):
        find(["nowhere.toml"])


def test_a_panel_may_have_fewer_methods_and_a_scale_fewer_panels() -> None:
    change: dict[str, Any] = {"panels": {"iid": {}, "other": {"methods": ["FedBiO"]}}}
    claims = [{"says": "-", "better": "SimFBO", "than": ["FedBiO"], "panels": ["iid"]}]
    figure = made_up(**change, claims=claims, quick={"only": ["other"]})
    assert figure.pairs("quick") == [("other", "FedBiO")]
    assert figure.pairs("full") == [("iid", "FedBiO"), ("iid", "SimFBO"), ("other", "FedBiO")]
    (found,) = findings(figure, {"other": {"FedBiO": []}})
    assert (found.state, found.note) == ("open", "iid is not run at this scale")
    with refuses("method of a claim in panel other", "SimFBO", where="made-up.toml"):
        made_up(**change)


def test_a_scale_may_leave_a_method_out_of_a_panel() -> None:
    """A comparison with a method that is left out is open, and its note names the method."""
    figure = made_up(quick={"left_out": {"all": ["FedBiO"]}})
    assert figure.pairs("quick") == [("all", "SimFBO")]
    assert figure.pairs("full") == [("all", "FedBiO"), ("all", "SimFBO")]
    (found,) = findings(figure, {"all": {"SimFBO": []}})
    assert (found.state, found.note) == ("open", "FedBiO is not run in all at this scale")
    with refuses("method in left_out, all", "FedBio", where="made-up.toml", near="FedBiO"):
        made_up(quick={"left_out": {"all": ["FedBio"]}})


def test_seeds_of_runs_leave_out_those_of_trials() -> None:
    figure = made_up(tuning={**CONTENT["tuning"], "seeds": [1, 3]}, panels={"all": {}, "more": {"seeds": 4}})
    assert (figure.seeds_of("all"), figure.seeds_of("more")) == ([0, 2, 4], [0, 2, 4, 5])


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"tuning": {"select": "test_accuracy"}}, ("", ANY, "test_accuracy ")),
        ({"tuning": {"select": "accTest2"}}, ("", ANY, "accTest2 ")),
        ({"tuning": None}, ("", ANY, "untuned")),
        ({"tuning": None, "untuned": "-"}, ("", ANY, "a grid needs [tuning]")),
        ({"against": "exchange"}, ("cost", "exchange", "", "exchanges")),
        (
            {"reported": [{"what": "-", "value": "1", "source": "read of the figure"}]},
            ("source", "read of the figure", "", "read off the figure"),
        ),
        (
            {"reported": [{"what": "-", "values": {"FedBio": 1.0}, "source": "text"}]},
            ("method in reported, all", "FedBio", "", "FedBiO"),
        ),
        ({"reported": [{"what": "-", "source": "text"}]}, ("", ANY, "either value or values")),
        ({"claims": []}, ("", ANY, "claims")),
        (
            {"claims": [{"says": "-", "better": "SimFBO", "than": ["FedBio"]}]},
            ("method of a claim in panel all", "FedBio", "", "FedBiO"),
        ),
        (
            {"claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"], "panels": ["al"]}]},
            ("panel of a claim", "al", "", "all"),
        ),
        ({"claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"], "by": "first"}]}, ("", ANY, "reach")),
        (
            {"claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"], "by": "best"}]},
            ("way to read a run", "best"),
        ),
        ({"claims": [{"says": "-", "better": "SimFBO"}]}, ("", ANY, "either than or slope")),
        ({"claims": [{"says": "-", "better": "SimFBO", "slope": 1.0}]}, ("", ANY, "slope needs")),
        ({"claims": [{"says": "-", "beter": "SimFBO"}]}, ("field", "beter", "", "better")),
        ({"panels": {"all": {"value": 1.0}}}, ("", ANY, "series")),
        ({"panels": {"all": {"seeds": 1}}}, ("", ANY, "seeds is at least 2")),
        (
            {"series": "n", "panels": {"all": {"value": 1.0, "seeds": 4}}},
            ("", ANY, "panels of a series have the same seeds"),
        ),
        ({"quick": {"panels": {"al": {}}}}, ("panel of a scale", "al", "", "all")),
        ({"quick": {"methods": {"SimFB": {}}}}, ("method of a scale", "SimFB", "", "SimFBO")),
        ({"quick": {"spec": {"run": {"exchanges": 100, "eval_every": 20}}}}, ("", ANY, "eval_every")),
        (
            {"methods": {**CONTENT["methods"], "C": {"algorithm": {}, "grid": {"outer_lr": [1, 2, 3]}}}},
            ("", ANY, "as many points"),
        ),
        ({"metrc": "-"}, ("field", "metrc", "", "metric")),
    ],
)
def test_a_mistake_in_a_file_is_named(change: dict[str, Any], refusal: Any) -> None:
    with refuses(*refusal, where="made-up.toml"):
        made_up(**change)


@pytest.mark.parametrize("name", ["shows", "panels", "quick"])
def test_an_incomplete_file_is_named(name: str) -> None:
    with refuses("", fact=repr(name), where="made-up.toml"):
        read(Path("made-up.toml"), {key: one for key, one in CONTENT.items() if key != name})


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"claims": [{**CONTENT["claims"][0], "by": "late"}]}, True),
        ({"spec": {"task": {"name": "quadratic", "clients": 4}}}, True),
        ({"tuning": {**CONTENT["tuning"], "seeds": [101]}}, True),
        (UNTUNED, True),
        ({"quick": {"spec": {"run": {"rounds": 5, "eval_every": 2}}}}, True),
        ({"full": {"spec": {"run": {"rounds": 5, "eval_every": 2}}}}, False),
        ({"quick": {**CONTENT["quick"], "minutes": 2}, "setting": "other", "found": "other"}, False),
        ({"claims": [{**CONTENT["claims"][0], "says": "other words"}]}, False),
    ],
    ids=["claim", "setting", "trials' seeds", "no trials", "scale", "other scale", "prose", "words of a claim"],
)
def test_another_setting_or_claim_has_another_fingerprint(change: dict[str, Any], stale: bool) -> None:
    """The fingerprint of a figure at a scale changes with settings and claims, and not with prose or another scale."""
    assert (made_up(**change).fingerprint("quick") != made_up().fingerprint("quick")) == stale


def test_later_tables_change_earlier_ones() -> None:
    """Later tables of a figure take precedence over earlier ones, and the table of trials over all others."""
    figure = made_up(
        spec={"task": {"name": "quadratic", "clients": 3}, "run": {"rounds": 1}},
        quick={"spec": {"run": {"rounds": 2}}, "panels": {"all": {"run": {"rounds": 3}}}},
        panels={"all": {"run": {"rounds": 9, "eval_every": 1}}},
    )
    tables = figure.tables("all", "SimFBO", "quick")
    assert tables == {
        "task": {"name": "quadratic", "clients": 3},
        "run": {"rounds": 3, "eval_every": 1},
        "algorithm": {"name": "simfbo"},
    }
    assert figure.tables("all", "SimFBO", "quick", tuning=True)["run"] == {"rounds": 2, "eval_every": 1}
