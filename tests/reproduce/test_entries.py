"""Entries: what their files may say, and that all of them can be resolved into specs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments.spec import configure
from fedbilevel.reproduce.claims import findings
from fedbilevel.reproduce.entry import SCALES, Entry, Size, ids, load, read
from fedbilevel.sweeps import measured_on_test

ENTRIES = [load(id) for id in ids()]
LONGER = {"simfbo-2", "leaderboard", "fednest-3", "rabo-table-2"}
"""Entries of which two cores take more than ten minutes: CIFAR-10, few-shot learning, all methods on MNIST."""
CONTENT: dict[str, Any] = {
    **dict.fromkeys(("paper", "part", "title", "shows", "setting"), "-"),
    "metric": "test_accuracy",
    "against": "exchanges",
    "spec": {"task": {"name": "hyper_representation"}},
    "panels": {"iid": {}},
    "methods": {
        "A": {"algorithm": {"name": "simfbo"}, "grid": {"radius": [1.0, 2.0]}},
        "B": {"algorithm": {"name": "fednest"}, "grid": {"outer_lr": [1.0, 2.0]}},
    },
    "tuning": {"select": "validation_accuracy", "spec": {"task": {"holdout": 0.1}}},
    "claims": [{"says": "-", "better": "A", "than": ["B"]}],
    "quick": {"minutes": 1},
    "full": {"minutes": 1},
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: one.id)
@pytest.mark.parametrize("scale", SCALES)
def test_every_entry_gives_complete_specs(entry: Entry, scale: Any) -> None:
    for panel in entry.panels:
        for method in entry.methods_of(panel):
            spec, grid = configure(entry.tables(panel, method, scale)), entry.grid(panel, method, scale)
            for name, values in grid.items():
                configure(spec.tables(), settings=[f"{name}={values[-1]}"])
            if entry.tuning and grid:
                trial = configure(entry.tables(panel, method, scale, tuning=True))
                assert "holdout" not in trial.task.fields or trial.task.fields["holdout"] > 0
                assert spec.task.fields.get("holdout", 0) == 0  # the runs are measured on test data


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: one.id)
def test_no_entry_chooses_by_test_data(entry: Entry) -> None:
    if entry.tuning:
        assert not any(measured_on_test(entry.selected_in(panel)) for panel in entry.panels)
        assert len({len(method.grid) > 0 for method in entry.methods.values()}) == 1
    assert entry.quick.minutes
    assert (entry.quick.minutes > 10) == (entry.runs in LONGER)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: one.id)
def test_both_scales_say_how_long_they_take(entry: Entry) -> None:
    """Where nothing but the minutes is another, the full scale takes as long as the quick one."""
    assert entry.full.minutes
    if replace(entry.quick, minutes=None) == replace(entry.full, minutes=None):
        assert entry.full.minutes == entry.quick.minutes


def test_how_long_an_entry_takes_is_said_in_words() -> None:
    assert [Size(minutes=minutes).takes for minutes in (None, 7, 119, 120, 11000)] == [
        "< 1 min",
        "7 min",
        "119 min",
        "2 h",
        "183 h",
    ]


def test_every_figure_and_table_has_an_entry() -> None:
    papers = {
        "afbo": ["1", "2", "3", "4"],
        "fednest": ["2a", "2b", "2c", "3", "4"],
        "fism": ["2", "3", "table-1"],
        "leaderboard": [""],
        "rabo": ["2", "3", "4", "5", "6", "table-2", "table-3"],
        "simfbo": ["2", "3", "4", "5"],
        "theory": [
            "clients",
            "coverage",
            "delay",
            "drift",
            "local-steps",
            "mask-noise",
            "mask-step",
            "participation",
            "unequal-work",
            "work-spread",
        ],
    }
    assert [entry.id for entry in ENTRIES] == [
        f"{paper}-{part}".strip("-") for paper, parts in papers.items() for part in parts
    ]
    assert all(entry.id.startswith(entry.paper) for entry in ENTRIES)


def test_a_panel_may_have_fewer_methods_and_a_scale_fewer_panels() -> None:
    change: dict[str, Any] = {"panels": {"iid": {}, "other": {"methods": ["A"]}}}
    claims = [{"says": "-", "better": "A", "than": ["B"], "panels": ["iid"]}]
    made = read("made-up", {**CONTENT, **change, "claims": claims, "quick": {"minutes": 1, "only": ["other"]}})
    assert list(made.methods_of("other")) == ["A"]
    assert (list(made.panels_at("quick")), list(made.panels_at("full"))) == (["other"], ["iid", "other"])
    (found,) = findings(made, {"other": {"A": []}})
    assert (found.state, found.note) == ("open", "iid is not played at this scale")
    with pytest.raises(ConfigurationError, match="claims in panel other"):
        read("made-up", {**CONTENT, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tuning": {"select": "test_accuracy"}}, "test_accuracy"),
        ({"tuning": None}, "untuned"),
        ({"against": "exchange"}, "exchanges"),
        ({"reported": [{"what": "-", "value": "1", "source": "read of the figure"}]}, "read off the figure"),
        ({"claims": []}, "claims"),
        ({"claims": [{"says": "-", "better": "A", "than": ["C"]}]}, "C"),
        ({"claims": [{"says": "-", "better": "A", "than": ["B"], "panels": ["idd"]}]}, "iid"),
        ({"claims": [{"says": "-", "better": "A", "than": ["B"], "by": "first"}]}, "reach"),
        ({"claims": [{"says": "-", "better": "A", "slope": 1.0}]}, "slope"),
        ({"panels": {"iid": {"tsak": {}}}}, "task"),
        ({"quick": {"minutes": 1, "panels": {"non": {}}}}, "iid"),
        ({"quick": {"minutes": 1, "tuning_of": {"non": {}}}}, "iid"),
        ({"methods": {**CONTENT["methods"], "B": {"algorithm": {"name": "fednest"}}}}, "as many points"),
        ({"title": None, "shown": "-"}, "shown"),
        ({"spec": {**CONTENT["spec"], "run": {"exchanges": 40, "eval_every": 1000}}}, "eval_every"),
        ({"quick": {"tuning": {"run": {"time": 60, "eval_every": 5}}}}, "at most 4 beside a budget"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    content = {name: value for name, value in {**CONTENT, **change}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=message):
        read("made-up", content)


def test_tables_are_merged_in_their_order() -> None:
    made = read(
        "made-up",
        {
            **CONTENT,
            "spec": {"task": {"name": "hyper_representation", "clients": 1}, "run": {"rounds": 1}},
            "quick": {"minutes": 1, "spec": {"run": {"rounds": 2}}, "tuning": {"run": {"rounds": 3}}},
            "panels": {"iid": {"task": {"clients": 5}}},
        },
    )
    runs, trial = made.tables("iid", "A", "quick"), made.tables("iid", "A", "quick", tuning=True)
    assert (runs["run"]["rounds"], trial["run"]["rounds"], runs["task"]["clients"]) == (2, 3, 5)
    assert (runs["task"].get("holdout"), trial["task"]["holdout"]) == (None, 0.1)
    assert made.tables("iid", "A", "full")["run"]["rounds"] == 1
    assert made.trials == 2


def test_a_method_may_try_other_values_in_a_panel_as_many_as_all_others() -> None:
    own = {"other": {"server_lr": [0.01, 0.02]}}
    methods = {"A": {**CONTENT["methods"]["A"], "grid_in": own}}
    made = read(
        "made-up", {**CONTENT, "panels": {"iid": {}, "other": {}}, "methods": {**CONTENT["methods"], **methods}}
    )
    assert made.grid("other", "A", "quick") == own["other"] != made.grid("iid", "A", "quick")
    assert made.trials == 2
    for wrong, said in (({"other": {"server_lr": [0.01]}}, "as many points"), ({"noniid": own["other"]}, "noniid")):
        methods["A"]["grid_in"] = wrong
        with pytest.raises(ConfigurationError, match=said):
            read(
                "made-up", {**CONTENT, "panels": {"iid": {}, "other": {}}, "methods": {**CONTENT["methods"], **methods}}
            )


def test_a_panel_may_have_trials_of_its_own_at_a_scale() -> None:
    of_all, of_one = {"run": {"rounds": 3, "cohort": 2}}, {"other": {"run": {"rounds": 1}}}
    panels: dict[str, Any] = {"iid": {}, "other": {}}
    quick = {"minutes": 1, "tuning": of_all, "tuning_of": of_one}
    made = read("made-up", {**CONTENT, "panels": panels, "quick": quick})
    assert made.tables("iid", "A", "quick", tuning=True)["run"] == {"rounds": 3, "cohort": 2}
    assert made.tables("other", "A", "quick", tuning=True)["run"] == {"rounds": 1, "cohort": 2}
    assert "run" not in made.tables("other", "A", "quick")
    assert "run" not in made.tables("other", "A", "full", tuning=True)


def test_a_method_leaves_what_spec_and_panel_say_of_the_algorithm() -> None:
    """Its name does not take their fields away; a part that it names takes the place of theirs."""
    made = read(
        "made-up",
        {
            **CONTENT,
            "spec": {**CONTENT["spec"], "algorithm": {"batch_size": 7, "local_optimizer": {"name": "momentum"}}},
            "panels": {"iid": {"algorithm": {"client_lr": 0.5}}},
            "methods": {"A": {"algorithm": {"name": "simfbo", "local_optimizer": {"name": "sgd"}}}},
            "tuning": None,
            "untuned": "-",
            "claims": [{"says": "-", "better": "A", "than": ["A"]}],
        },
    )
    fields = {"batch_size": 7, "client_lr": 0.5, "name": "simfbo", "local_optimizer": {"name": "sgd"}}
    assert made.tables("iid", "A", "quick")["algorithm"] == fields
