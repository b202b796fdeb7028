"""An entry played to its end: trials on a holdout, runs with every seed, an outcome that is kept."""

from __future__ import annotations

import json
import subprocess
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedbilevel.cli import main
from fedbilevel.cli.reproduce import _listing
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments import series
from fedbilevel.experiments.runner import task_of
from fedbilevel.reproduce import outcome, picture, protocol, workers
from fedbilevel.reproduce.entry import Entry, Scale, load, load_all, read

ROUNDS = {"run": {"rounds": 4, "eval_every": 2}}
CONTENT: dict[str, Any] = {
    **dict.fromkeys(("paper", "part", "title", "shows", "setting"), "-"),
    "metric": "relative_error",
    "against": "exchanges",
    "spec": {"task": {"name": "quadratic", "clients": 3}},
    "panels": {"all": {}},
    "methods": {
        "FedBiO": {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": [0.01, 1e9]}},
        "SimFBO": {"algorithm": {"name": "simfbo"}, "grid": {"server_lr.x": [1e-9, 0.05]}},
    },
    "tuning": {"select": "outer_loss", "spec": {"run": {"rounds": 2, "eval_every": 1}}},
    "claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"]}],
    "quick": {"minutes": 1, "spec": ROUNDS},
    "full": {"minutes": 1, "spec": ROUNDS},
}


@pytest.fixture(scope="module")
def entry() -> Entry:
    return read("made-up", CONTENT)


@pytest.fixture(scope="module")
def place(entry: Entry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was played; all methods take the tasks of trials and of each seed from the same place."""
    out, made = tmp_path_factory.mktemp("reproduce"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "task_of", lambda spec: made.append(spec.task.fields["seed"]) or task_of(spec))
        played = protocol.play(entry, "quick", out, seeds=(0, 1))
    assert made == [100, 0, 1]
    outcome.keep(outcome.outcome_of(played), outcome.file_of(entry, "quick", out).parent)
    return out


def test_an_outcome_says_what_was_chosen_and_found(entry: Entry, place: Path) -> None:
    found = outcome.read(outcome.file_of(entry, "quick", place))
    methods = found["panels"]["all"]
    assert methods["FedBiO"]["chosen"] == {"client_lr.x": 0.01}  # the other one diverges
    assert methods["SimFBO"]["chosen"] == {"server_lr.x": 0.05}  # the other one stands still
    assert (found["trials"], found["seeds"], found["selected_on"]) == (2, [0, 1], "outer_loss")
    assert len(methods["SimFBO"]["values"]) == 2
    assert methods["SimFBO"]["curve"]["cost"] == [0, 2, 4]
    assert found["findings"][0]["state"] in ("holds", "contradicted", "open")
    assert found["processor_seconds"] > 0


def test_steps_of_a_panel_that_is_apart_are_chosen_by_trials_with_each_runs_seed(tmp_path: Path) -> None:
    """Such trials see what the seed gives a run to train on, and no more."""
    apart = read("made-up", {**CONTENT, "panels": {"all": {"apart": True}}})
    found = outcome.outcome_of(protocol.play(apart, "quick", tmp_path, seeds=(0, 1)))
    chosen = found["panels"]["all"]["SimFBO"]["chosen"]["server_lr.x"]
    runs = [tmp_path / f"made-up/quick/runs/all/SimFBO/seed-{seed}/spec.toml" for seed in (0, 1)]
    assert chosen == [tomllib.loads(run.read_text())["algorithm"]["server_lr"]["x"] for run in runs]
    assert len(set(chosen)) == 2  # the two do not choose alike
    trials = {json.loads(file.read_text())["seed"]: file for file in tmp_path.rglob("tuning/**/summary.json")}
    assert {seed: f"/seed-{seed}/" in str(file) for seed, file in trials.items()} == {0: True, 1: True}
    assert outcome.fingerprint(apart, "quick") != outcome.fingerprint(read("made-up", CONTENT), "quick")


def test_no_trial_on_the_hospitals_sees_a_test_patient() -> None:
    """Their seed says who is a test patient: trials have the seed of the run, and hold out training patients."""
    panels = [(entry, panel) for entry in load_all() for panel in entry.panels if _of_hospitals(entry, panel)]
    assert panels
    for entry, panel in panels:
        assert entry.panels[panel].apart
        for method in entry.methods_of(panel):
            assert entry.tables(panel, method, "quick", tuning=True)["task"]["holdout"] > 0


def _of_hospitals(entry: Entry, panel: str) -> bool:
    return any(
        entry.tables(panel, method, "quick")["task"]["name"] == "hospitals" for method in entry.methods_of(panel)
    )


def test_runs_of_another_setting_are_not_taken_for_the_entrys(place: Path) -> None:
    changed = read(
        "made-up",
        {
            **CONTENT,
            "spec": {"task": {"name": "quadratic", "clients": 3, "noise": 0.2}},
            "tuning": None,
            "untuned": "-",
            "methods": {name: {"algorithm": of["algorithm"]} for name, of in CONTENT["methods"].items()},
        },
    )
    with pytest.raises(
        ConfigurationError, match=r"seed-0 holds a run of another setting \(task.noise: 0.1 there, 0.2 now"
    ):
        protocol.play(changed, "quick", place, seeds=(0,))


def test_the_seeds_of_trials_are_refused_for_runs(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="100"):
        protocol.play(entry, "quick", tmp_path, seeds=(0, 100))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("steps", "error"), [([1e30, 1e31], "every trial failed"), ([1e9, 2e9], "round 3")], ids=["trials", "runs"]
)
def test_a_method_that_fails_is_a_finding(tmp_path: Path, steps: list[float], error: str) -> None:
    """At 1e30 the first two rounds, those of a trial, overflow; at 1e9 the third does."""
    broken = {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": steps}}
    entry = read("made-up", {**CONTENT, "methods": {**CONTENT["methods"], "FedBiO": broken}})
    found = outcome.outcome_of(protocol.play(entry, "quick", tmp_path, seeds=(0, 1)))
    assert found["panels"]["all"]["FedBiO"]["failed_runs"] == 2
    assert found["findings"][0]["state"] == "holds"
    assert "FedBiO failed with 2 of 2 seeds" in found["findings"][0]["note"]
    assert error in found["errors"]["all · FedBiO · seed 0"]


def test_a_failure_of_another_setting_is_not_taken_for_the_entrys(tmp_path: Path) -> None:
    def made(step: float) -> Entry:
        fedbio = {"algorithm": {"name": "fedbio", "client_lr": {"x": step}}}
        methods = {"FedBiO": fedbio, "SimFBO": {"algorithm": {"name": "simfbo"}}}
        return read("made-up", {**CONTENT, "tuning": None, "untuned": "-", "methods": methods})

    assert protocol.play(made(1e9), "quick", tmp_path, seeds=(0,)).errors
    with pytest.raises(ConfigurationError, match="another setting"):
        protocol.play(made(0.01), "quick", tmp_path, seeds=(0,))


def test_a_rehearsal_is_one_round(entry: Entry, tmp_path: Path) -> None:
    said: list[str] = []
    protocol.rehearse(entry, "full", tmp_path, said=said.append)
    assert [line.partition(",")[0] for line in said] == ["all · FedBiO: one round", "all · SimFBO: one round"]
    (summary, _) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["rounds"] == 1


def test_a_picture_is_drawn(entry: Entry, place: Path) -> None:
    figure = picture.draw(entry, outcome.read(outcome.file_of(entry, "quick", place)))
    (axes,) = figure.axes
    assert sorted(line.get_label() for line in axes.get_lines()) == ["FedBiO", "SimFBO"]
    assert axes.get_title() == "all"


def test_what_is_compared_by_a_cost_is_drawn_as_bars(place: Path) -> None:
    entry = read("made-up", {**CONTENT, "metric": "megabytes", "against": "rounds"})
    found = outcome.outcome_of(protocol.play(entry, "quick", place, seeds=(0, 1)))
    assert all(of["curve"] is None for of in found["panels"]["all"].values())
    bars = [patch.get_height() for patch in picture.draw(entry, found).axes[0].patches]
    assert bars == [found["panels"]["all"][name]["mean"] for name in entry.methods]
    assert min(bars) > 0


def test_a_difference_is_said_with_its_unit() -> None:
    found = {"difference": 0.1234, "half_width": 0.05, "unit": "percentage points"}
    assert outcome.difference_in_words(found) == "12.3 ± 5 percentage points"
    found |= {"difference": -1234.5, "half_width": None, "unit": "exchanges"}
    assert outcome.difference_in_words(found) == "-1,234 exchanges"  # to even


def test_a_finding_has_the_values_of_both_methods() -> None:
    found = {"says": "-", "better": "A", "than": "B", "better_mean": 0.9, "than_mean": None, "unit": "-"}
    claim = {"says": "-", "better": "FedBiO", "than": ["SimFBO"], "metric": "test_accuracy"}
    first = {**claim, "by": "first", "reach": 1.0}
    slope = {"says": "-", "better": "FedBiO", "slope": 0.5}

    def said(claim: dict[str, Any], **more: Any) -> str:
        panels = {"all": {"value": 1}}
        entry = read("made-up", {**CONTENT, "claims": [claim], "panels": panels, "series": "clients"})
        return outcome.readings_in_words(entry, found | more)

    assert outcome.methods_in_words(found) == "A / B"
    assert outcome.methods_in_words(found | {"than": ""}) == "A"
    assert said(claim) == "90.00 % / –"
    assert said(first, better_mean=1234.5, than_mean=49.67) == "1,234 / 49.7"
    assert said(slope, better_mean=0.3896, than_mean=0.5) == "0.39 / 0.5"


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"claims": [{**CONTENT["claims"][0], "by": "best"}]}, True),
        ({"spec": {"task": {"name": "quadratic", "clients": 4}}}, True),
        ({"tuning": {**CONTENT["tuning"], "seeds": [101]}}, True),
        ({"quick": {"minutes": 1, "spec": {"run": {"rounds": 5, "eval_every": 2}}}}, True),
        ({"full": {"minutes": 9, "spec": {"run": {"rounds": 5, "eval_every": 2}}}}, False),
        ({"quick": {"minutes": 2, "spec": ROUNDS}, "setting": "other words"}, False),
        ({"claims": [{**CONTENT["claims"][0], "says": "other words"}]}, False),
    ],
    ids=["claim", "setting", "seeds of trials", "scale", "other scale", "prose", "words of a claim"],
)
def test_an_outcome_of_other_claims_or_another_setting_is_stale(
    entry: Entry, place: Path, change: dict[str, Any], stale: bool
) -> None:
    found = outcome.read(outcome.file_of(entry, "quick", place))
    assert outcome.state_of(entry, found) == found["verdict"]
    assert outcome.state_of(read("made-up", {**CONTENT, **change}), found) == (
        "stale: play it again" if stale else found["verdict"]
    )


def test_an_interruption_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal interrupts the entry's own process, too, which says so and ends with 130."""

    class Interrupted:
        ends = iter([KeyboardInterrupt, 130])

        def __init__(self, command: list[str]) -> None:
            pass

        def wait(self) -> int:
            if (end := next(self.ends)) is KeyboardInterrupt:
                raise KeyboardInterrupt
            return end

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert main(["reproduce", "simfbo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == ""


def test_a_series_has_a_line_of_the_predicted_slope() -> None:
    """Readings of 8, 4, 2 at values of 1, 2, 4: slope −1, drawn beside a prediction of −1/2 through (2, 4)."""
    method = {"algorithm": {"name": "simfbo"}}
    panels = {str(value): {"value": value} for value in (1, 2, 4)}
    claims = [{"says": "-", "better": "A", "by": "late", "slope": -0.5}]
    bare = {**CONTENT, "tuning": None, "untuned": "-", "series": "clients"}
    entry = read("made-up", {**bare, "panels": panels, "methods": {"A": method}, "claims": claims})
    found = {"than": "", "better_mean": -1.0, "difference": -0.5, "half_width": 0.125, "note": ""}
    curves = {name: {"cost": [0, 1, 2, 3], "mean": [9, 9, 4 / int(name), 12 / int(name)]} for name in panels}
    kept = {name: {"A": {"mean": 99.0, "sd": 1.0, "curve": of}} for name, of in curves.items()}
    (axes,) = picture.draw(entry, {"findings": [found], "panels": kept}).axes
    points, *_, predicted = axes.get_lines()
    assert list(points.get_ydata()) == pytest.approx([8, 4, 2])
    assert list(predicted.get_ydata()) == pytest.approx([4 * 2**0.5, 4, 4 / 2**0.5])
    label = "A, mean over the second half: slope −1.00 ± 0.12, predicted −0.5 (grey)"
    assert axes.get_legend_handles_labels()[1] == [label]


def test_another_versions_outcome_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"schema": 0}')
    with pytest.raises(ConfigurationError, match="another version"):
        outcome.read(tmp_path / "outcome.json")


def test_the_list_goes_past_an_outcome_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "simfbo-4" / "quick" / outcome.FILE
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert main(["reproduce", "simfbo", "--list", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "not readable" in said
    assert "0 of 4 entries" in said
    assert main(["reproduce", "simfb", "--list"]) == 2
    assert capsys.readouterr().err.count(" leaderboard,") == 1


def test_the_list_has_what_the_project_kept_where_the_user_has_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table has no dates
    fism = [load(id) for id in ("fism-2", "fism-3", "fism-table-1")]
    mine = {**outcome.kept()["fism-2"], "played_for": "another setting", "date": "2026-01-31"}
    monkeypatch.setattr(outcome, "read", lambda file: mine)
    outcome.keep({}, outcome.file_of(fism[0], "quick", tmp_path).parent)
    monkeypatch.setattr(outcome, "kept", lambda: {"fism-2": mine, "fism-3": mine})

    def states(scale: Scale) -> list[str]:
        by_name = {str(column.header): list(column.cells) for column in _listing(fism, scale, tmp_path).columns}
        return [f"{state} {date}".rstrip() for state, date in zip(by_name["state"], by_name["on"], strict=True)]

    stale = f"{outcome.STALE} (kept) 2026-01-31"
    assert states("quick") == [f"{outcome.STALE} 2026-01-31", stale, "not run"]
    assert states("full") == ["not run"] * 3


def test_a_run_that_is_refused_says_why_and_the_others_are_played(tmp_path: Path) -> None:
    methods = {
        "FedNest": {"algorithm": {"name": "fednest", "hypergradient": {"solver": {"name": "neumann", "step": 1000.0}}}},
        "FedBiO": {"algorithm": {"name": "fedbio"}},
    }
    claims = [{"says": "-", "better": "FedNest", "than": ["FedBiO"]}]
    refused = read("made-up", {**CONTENT, "tuning": None, "untuned": "-", "methods": methods, "claims": claims})
    played = protocol.play(refused, "quick", tmp_path, seeds=(0,))
    assert list(played.errors) == ["all · FedNest · seed 0"]
    assert "Neumann.step = 1000.0 is not allowed" in played.errors["all · FedNest · seed 0"]
    assert played.runs["all"]["FedBiO"][0] is not None


def test_a_run_that_is_refused_is_remembered_with_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again, and its failure is not taken for that of another setting."""

    def made(step: float) -> Entry:
        fednest = {"name": "fednest", "hypergradient": {"solver": {"name": "neumann", "step": step}}}
        methods = {"SimFBO": {"algorithm": {"name": "simfbo"}}, "FedBiO": {"algorithm": fednest}}
        return read("made-up", {**CONTENT, "tuning": None, "untuned": "-", "methods": methods})

    first = protocol.play(made(1000.0), "quick", tmp_path, seeds=(0, 1))
    assert list(first.errors) == ["all · FedBiO · seed 0", "all · FedBiO · seed 1"]
    with monkeypatch.context() as patch:
        patch.setattr(series, "task_of", lambda spec: pytest.fail("a task is made"))
        assert protocol.play(made(1000.0), "quick", tmp_path, seeds=(0, 1)).errors == first.errors
    with pytest.raises(ConfigurationError, match=r"seed-0 holds a run of another setting \(algorithm.hypergradient"):
        protocol.play(made(0.5), "quick", tmp_path, seeds=(0, 1))


def test_a_folder_with_something_else_is_no_failed_run(tmp_path: Path) -> None:
    methods = {name: {"algorithm": of["algorithm"]} for name, of in CONTENT["methods"].items()}
    entry = read("made-up", {**CONTENT, "tuning": None, "untuned": "-", "methods": methods})
    folder = tmp_path / "made-up/quick/runs/all/SimFBO/seed-0"
    folder.mkdir(parents=True)
    (folder / "something else").touch()
    with pytest.raises(ConfigurationError, match="seed-0: that folder is not empty"):
        protocol.play(entry, "quick", tmp_path, seeds=(0,))
    assert [file.name for file in folder.iterdir()] == ["something else"]


PLAYERS = {"alone": protocol.play, "workers": partial(workers.play_ahead, workers=2, begin=int, said=str)}


@pytest.mark.parametrize("play", PLAYERS.values(), ids=list(PLAYERS))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"name": "simfbo", "radius": -1.0}}, "SimFBO.radius = -1.0 is not allowed"),
        ({"grid": {"server_lr.x": [0.05, -0.1]}}, "server_lr.x = -0.1 is not allowed"),
        ({"algorithm": {"name": "fism"}, "grid": {"lr": [0.1, 0.2]}}, "FISM solves SimpleBilevel problems"),
        ({"task": {"noise": -1.0}}, "noise = -1.0 is not allowed"),
        ({"run": {"cohort": 7}}, "cohort = 7 is not allowed: it must be 1 to 3"),
    ],
    ids=["field", "value of a grid", "problem", "task", "cohort"],
)
def test_a_mistake_ends_an_entry_before_anything_is_played(
    tmp_path: Path, change: dict[str, Any], message: str, play: Any
) -> None:
    """It is the second method's: the first could be played."""
    methods = {**CONTENT["methods"], "SimFBO": CONTENT["methods"]["SimFBO"] | change}
    with pytest.raises(ConfigurationError, match=f"^all · SimFBO: .*{message}"):
        play(read("made-up", {**CONTENT, "methods": methods}), "quick", tmp_path, seeds=(0,))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "seeds", "message"),
    [
        ({"quick": {"minutes": 1, "spec": {"run": {"rounds": 0}}}}, (0,), "rounds = 0 is not allowed"),
        ({}, (0, -1), "seed = -1 is not allowed"),
        ({"tuning": {"select": "validation_accuracy"}}, (0,), "unknown metric to select on 'validation_accuracy'"),
    ],
    ids=["runs alone", "a later seed", "metric"],
)
def test_what_only_runs_or_choices_need_is_looked_at_first(
    tmp_path: Path, change: dict[str, Any], seeds: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"^all · FedBiO: .*{message}"):
        protocol.play(read("made-up", {**CONTENT, **change}), "quick", tmp_path, seeds=seeds)
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_names_the_method_that_is_refused(tmp_path: Path) -> None:
    methods = {**CONTENT["methods"], "SimFBO": {**CONTENT["methods"]["SimFBO"], "run": {"cohort": 7}}}
    with pytest.raises(ConfigurationError, match=r"^all · SimFBO: cohort = 7 is not allowed"):
        protocol.rehearse(read("made-up", {**CONTENT, "methods": methods}), "quick", tmp_path)
