"""A figure is run to its end: its trials choose values, its runs have every seed, and its outcome is kept."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from papers import page
from papers import play as playing
from papers.__main__ import main, reported
from papers.figure import PAPERS, Figure, files, load
from papers.picture import apart_from_each_other, beside_table, costs, curves, draw, left_out, points
from papers.play import play, rehearse
from small_figure import CONTENT, UNTUNED, made_up

from fedbilevel import experiments
from fedbilevel.authoring import History
from fedbilevel.errors import CheckpointError, ConfigurationError, InUse
from refusals import raises_with, refuses


def silent(line: str) -> None:
    pass


run = partial(play, say=silent)


SPENT = (("FedBiO", 40.0), ("SimFBO", 20.0))


@pytest.fixture(scope="module")
def figure() -> Figure:
    return made_up()


@pytest.fixture(scope="module")
def place(figure: Figure, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("papers")
    (out / "outcome.json").write_text(json.dumps(run(figure, "quick", out, seeds=(0, 1))))
    return out


def outcome(place: Path) -> dict[str, Any]:
    return json.loads((place / "outcome.json").read_text())


@pytest.mark.slow
def test_an_outcome_says_what_was_chosen_and_found(place: Path) -> None:
    found = outcome(place)
    methods = found["panels"]["all"]
    assert methods["FedBiO"]["chosen"] == {"client_lr.x": 0.01}  # with the other value it diverges
    assert methods["SimFBO"]["chosen"] == {"server_lr.x": 0.05}  # with the other value it hardly moves
    assert (found["trials"], found["seeds"], found["selected_on"]) == (2, [0, 1], "outer_loss")
    assert methods["SimFBO"]["curve"]["cost"] == [0, 2, 4]
    assert methods["SimFBO"]["mean"] == pytest.approx(sum(methods["SimFBO"]["values"]) / 2, rel=1e-4)
    assert methods["SimFBO"]["costs"]["exchanges"] == 4
    (finding,) = found["findings"]
    assert finding["better_mean"] == methods["SimFBO"]["mean"]
    assert finding["state"] in ("holds", "contradicted", "open")


def test_a_dead_network_is_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of few-shot learning counts as failed if it ends at the loss of constant predictions.

    Among N characters this loss is log N. A run that ends there has learned nothing, even if its loss was lower before.
    A run that only begins there has not failed, and neither has one that is at chance on test images only.
    """
    tables = {"task": {"name": "few_shot", "way": 5}, "algorithm": {"name": "fedavg"}}
    one = playing.Run("all · FedAvg · seed 0", tables, 0, tmp_path)

    def came(losses: list[float], run: playing.Run = one) -> History | str:
        rows = [{"round": k, "outer_loss": loss, "test_accuracy": 0.2} for k, loss in enumerate(losses)]
        monkeypatch.setattr(experiments, "run_of", lambda *_, **__: History(rows))
        return run.play(experiments.TaskCache())

    level = math.log(5)
    said = came([3.0, 1.2, level, level * 1.0005])
    assert isinstance(said, str)
    assert "the network is dead" in said
    assert "log 5 = 1.6094" in said
    for alive in ([level, level, level, 1.2], [level, level, level * 0.998, level], [0.9]):
        assert isinstance(came(alive), History)
    quadratic = playing.Run("all · FedAvg · seed 0", CONTENT["spec"], 0, tmp_path)
    assert isinstance(came([level] * 4, quadratic), History)


def test_the_seeds_of_trials_are_not_those_of_runs(figure: Figure, place: Path, tmp_path: Path) -> None:
    folders = {file.parent for file in place.rglob("summary.json")}
    assert {one.name for one in folders if "trials" in one.parts} == {"seed-100"}
    assert {one.name for one in folders if "runs" in one.parts} == {"seed-0", "seed-1"}
    with refuses("", fact="seeds [100] are those of the trials"):
        run(figure, "quick", tmp_path, seeds=(0, 100))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_more_seeds_take_the_values_that_were_chosen_before(figure: Figure, place: Path, tmp_path: Path) -> None:
    found = run(figure, "quick", tmp_path, seeds=(0, 1, 2), before=outcome(place))
    folders = {file.parent for file in tmp_path.rglob("summary.json")}
    assert {one.name for one in folders} == {"seed-0", "seed-1", "seed-2"}
    assert not any("trials" in one.parts for one in folders)
    for method, of in found["panels"]["all"].items():
        before = outcome(place)["panels"]["all"][method]
        assert (of["chosen"], of["tried"]) == (before["chosen"], before["tried"])
        assert of["values"][:2] == pytest.approx(before["values"])
    assert found["trials"] == 2


def test_a_panel_may_have_more_seeds_than_the_others(place: Path, tmp_path: Path) -> None:
    """A panel with a number of seeds of its own has these seeds, and the other panels those of the figure."""
    both = made_up(panels={"all": {}, "more": {"seeds": 3}}, seeds=2)
    before = outcome(place)
    panels = {"all": before["panels"]["all"], "more": before["panels"]["all"]}
    then = {**before, "panels": panels, "findings": 2 * before["findings"], "played_for": both.fingerprint("quick")}
    found = run(both, "quick", tmp_path, before=then)
    assert (found["seeds"], found["seeds_of"]) == ([0, 1], {"more": [0, 1, 2]})
    assert {panel: len(of["SimFBO"]["values"]) for panel, of in found["panels"].items()} == {"all": 2, "more": 3}
    assert next(iter(page.origin(both, found))).count("Seeds: 0, 1 in “all”; 0, 1, 2 in “more”.") == 1


def test_only_a_panel_that_is_new_is_tuned_and_run(place: Path, tmp_path: Path) -> None:
    """A panel that the stored outcome has with the same seeds keeps its numbers, and only the other one is run.

    The stored outcome is of the same figure, when its scale left out the other panel. Both panels have the same spec,
    so that they must come out alike. If no panel is left to run, only the words of claims are new.
    """
    two = {"all": {}, "more": {}}
    before = outcome(place)
    before |= {"played_for": made_up(panels=two).fingerprint("quick", before["panels"]), "minutes": 1.0}
    before["findings"] = [*before["findings"], {**before["findings"][0], "panel": "more", "state": "open"}]
    found = run(made_up(panels=two, seeds=2), "quick", tmp_path, before=before)
    assert {folder.name for name in ("trials", "runs") for folder in tmp_path.rglob(f"{name}/*")} == {"more"}
    assert list(found["panels"]) == ["all", "more"]
    assert found["panels"]["all"] == before["panels"]["all"]
    for method, of in found["panels"]["more"].items():
        stored = before["panels"]["all"][method]
        assert (of["chosen"], of["tried"], of["values"]) == (stored["chosen"], stored["tried"], stored["values"])
    first, second = found["findings"]
    assert first == before["findings"][0]
    assert second == {**first, "panel": "more"}
    assert found["minutes"] >= 1
    claims = [{**CONTENT["claims"][0], "says": "in other words"}]
    again = run(made_up(panels=two, seeds=2, claims=claims), "quick", tmp_path / "again", before=found)
    assert not (tmp_path / "again").exists()
    assert {one["says"] for one in again["findings"]} == {"in other words"}
    assert {**again, "findings": 0} == {**found, "findings": 0}


def test_a_claim_that_was_added_is_decided_by_the_values_that_are_stored(place: Path, tmp_path: Path) -> None:
    """The claims compare the ends of runs: in one panel, and of one method in two panels with other numbers of clients.

    They come out as if they had been in the file from the start. A claim about another reading needs the runs.
    """
    panels = {"all": {}, "more": {"task": {"clients": 5}}}
    first = {"says": "a", "better": "SimFBO", "than": ["FedBiO"], "panels": ["all"]}
    second = {"says": "b", "better": "SimFBO", "than": ["SimFBO"], "than_in": "all", "level": 0.1}
    before = run(made_up(panels=panels, seeds=2, claims=[first]), "quick", tmp_path)
    both = made_up(panels=panels, seeds=2, claims=[first, second])
    found, whole = run(both, "quick", tmp_path / "new", before=before), run(both, "quick", tmp_path)
    assert not (tmp_path / "new").exists()
    assert [(one["panel"], one["than"]) for one in found["findings"]] == [("all", "FedBiO"), ("more", "SimFBO")]
    for now, then in zip(found["findings"], whole["findings"], strict=True):
        for name, value in then.items():
            assert now[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value)
    assert found["findings"][1]["difference"] != 0
    with refuses("", fact="without --chosen"):
        late = made_up(panels=panels, seeds=2, claims=[first, {**second, "by": "late"}])
        run(late, "quick", tmp_path / "new", before=before)


def test_a_claim_that_stored_values_do_not_decide_is_refused_before_anything_is_run(
    place: Path, tmp_path: Path
) -> None:
    """A method of the panel "more" was left out, and would be tuned and run. The new claim is about the panel "all"."""
    whole, panels = outcome(place), {"all": {}, "more": {}}
    of = {"all": whole["panels"]["all"], "more": {"SimFBO": whole["panels"]["all"]["SimFBO"]}}
    left_out = {**CONTENT["quick"], "left_out": {"more": ["FedBiO"]}}
    before = {**whole, "panels": of, "played_for": made_up(panels=panels, quick=left_out).fingerprint("quick")}
    before["findings"] = [{**whole["findings"][0], "panel": panel} for panel in panels]
    claim = {**CONTENT["claims"][0], "panels": ["all"], "by": "late"}
    added = made_up(panels=panels, seeds=2, claims=[*CONTENT["claims"], claim])
    with refuses("", fact="without --chosen"):
        run(added, "quick", tmp_path / "new", before=before)
    assert not (tmp_path / "new").exists()
    with refuses("", fact="without --chosen"):  # stored values of a cost are not read
        playing.require_at_end(made_up(metric="exchanges"), added.claims[0], [])
    failed = {**before, "panels": {**of, "all": {name: {**one, "failed_runs": 1} for name, one in of["all"].items()}}}
    with refuses("", fact="without --chosen"):
        at_end = made_up(panels=panels, seeds=2, claims=[*CONTENT["claims"], {**claim, "by": "end"}])
        run(at_end, "quick", tmp_path / "new", before=failed)
    assert not (tmp_path / "new").exists()


def test_a_method_that_was_left_out_is_tuned_and_its_panel_is_run(place: Path, tmp_path: Path) -> None:
    """The stored outcome is of the same figure, when its scale left out a method. The other method has no trials.

    All methods of the panel are run, since a comparison needs the histories of both. They come out as in an outcome
    that had both methods from the start.
    """
    whole = outcome(place)
    only = made_up(quick={**CONTENT["quick"], "left_out": {"all": ["FedBiO"]}})
    panels = {"all": {"SimFBO": whole["panels"]["all"]["SimFBO"]}}
    before = {**whole, "panels": panels, "played_for": only.fingerprint("quick")}
    found = run(made_up(seeds=2), "quick", tmp_path, before=before)
    assert {folder.name for folder in tmp_path.rglob("trials/all/*")} == {"FedBiO"}
    assert {folder.name for folder in tmp_path.rglob("runs/all/*")} == {"FedBiO", "SimFBO"}
    for method, of in found["panels"]["all"].items():
        stored = whole["panels"]["all"][method]
        assert (of["chosen"], of["tried"], of["values"]) == (stored["chosen"], stored["tried"], stored["values"])
    assert found["findings"] == whole["findings"]


def test_minutes_of_an_earlier_outcome_count_if_a_part_of_it_is_used(place: Path) -> None:
    """Nothing of it is used if there are no trials, and every panel is run with other seeds."""
    before, found = {**outcome(place), "minutes": 3.0}, {**outcome(place), "minutes": 2.0}
    untuned = {**found, "trials": 0}
    assert playing.joined(made_up(), untuned, before, set())["minutes"] == 2
    assert playing.joined(made_up(), untuned, before, {"all"})["minutes"] == 5
    assert playing.joined(made_up(), found, before, set())["minutes"] == 5


def test_the_machine_of_a_panel_is_known_from_outcomes_of_both_formats() -> None:
    """Outcomes of earlier formats have one environment for all panels. Nothing is known if no run has ended."""
    old, new = {"environment": {"cpus": 2}}, {"environments": {"all": [{"cpus": 16}]}}
    assert playing.made_before(old, "all") == [{"cpus": 2}]
    assert playing.made_before(new, "all") == [{"cpus": 16}]
    assert playing.made_before(new, "more") == []


@pytest.mark.parametrize("kept", [{}, {"scale": "full"}, {"played_for": "another setting"}])
def test_values_that_were_chosen_for_something_else_are_not_taken(
    kept: dict[str, Any], figure: Figure, place: Path, tmp_path: Path
) -> None:
    """More seeds are refused without an outcome of the same scale and setting, from which they take their values."""
    before = {**outcome(place), **kept} if kept else {}
    with refuses("", fact="no outcome of made-up"):
        run(figure, "quick", tmp_path, before=before)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_ladder_grows_at_the_end_that_was_chosen(tmp_path: Path) -> None:
    """If the chosen value is the first or the last one that was tried, the next value beyond it is tried, too.

    SimFBO hardly moves with the step size 1e-6. So the largest step size is chosen each time, and the next one is a
    hundred times as large, until four trials are made. FedBiO diverges with its first two step sizes, so that the next
    ones are smaller.
    """
    methods = {
        "SimFBO": {"algorithm": {"name": "simfbo"}, "grid": {"server_lr.x": [1e-6, 1e-4]}},
        "FedBiO": {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": [1e30, 1e28]}},
    }
    tuning = {**CONTENT["tuning"], "trials": 4}
    found = run(made_up(methods=methods, tuning=tuning), "quick", tmp_path, seeds=(0, 1))
    of = found["panels"]["all"]
    assert [point["server_lr.x"] for point in of["SimFBO"]["tried"]] == [1e-6, 1e-4, 0.01, 1.0]
    assert [point["client_lr.x"] for point in of["FedBiO"]["tried"]] == [1e30, 1e28, 1e26, 1e24]
    assert found["trials"] == 4
    again = run(made_up(methods=methods, tuning=tuning), "quick", tmp_path, seeds=(0, 1))
    assert again["panels"] == found["panels"]


@pytest.mark.parametrize(
    ("points", "chosen", "expected"),
    [
        ([{"lr": 0.1}, {"lr": 0.3}], {"lr": 0.3}, [{"lr": 0.9}]),
        ([{"lr": 0.1}, {"lr": 0.3}], {"lr": 0.1}, [{"lr": 0.0333333}]),
        ([{"lr": 0.1}, {"lr": 0.3}, {"lr": 0.9}], {"lr": 0.3}, []),  # the chosen value is not at an end
        ([{"lr": 0.1}, {"lr": 0.3}], None, [{"lr": 0.0333333}]),  # both trials diverged
        ([{"k": 1}, {"k": 4}], {"k": 1}, []),  # the next value, a quarter, is not a whole number
        ([{"k": 1}, {"k": 4}], {"k": 4}, [{"k": 16}]),
        ([{"lr": 0.1}], {"lr": 0.1}, []),  # a single value has no factor
        ([{"lr": 0.0}, {"lr": 0.1}], {"lr": 0.0}, []),
        ([{"order": "random"}, {"order": "given"}], {"order": "given"}, []),
        (
            [{"x": 1.0, "y": 1.0}, {"x": 1.0, "y": 2.0}, {"x": 2.0, "y": 1.0}, {"x": 2.0, "y": 2.0}],
            {"x": 2.0, "y": 1.0},
            [{"x": 4.0, "y": 1.0}, {"x": 2.0, "y": 0.5}],
        ),
    ],
)
def test_what_is_tried_next(points: list[Any], chosen: Any, expected: list[Any]) -> None:
    """If the chosen value is at an end, a value beyond it is tried.

    Its ratio to the chosen value equals the ratio of the chosen value to its neighbour.
    """
    assert playing.beyond(points, chosen) == expected


def test_what_was_played_is_not_played_again(figure: Figure, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished runs are not made again, and no samples are read for them."""
    monkeypatch.setattr(experiments.TaskCache, "__call__", lambda self, spec: pytest.fail("a task is made"))
    before = {file: file.stat().st_mtime_ns for file in place.rglob("summary.json")}
    again = run(figure, "quick", place, seeds=(0, 1))
    assert {file: file.stat().st_mtime_ns for file in place.rglob("summary.json")} == before
    assert again["panels"] == outcome(place)["panels"]


@pytest.mark.parametrize("name", ["spec.toml", "environment.json", "history.jsonl", "summary.json"])
def test_a_damaged_file_is_no_failed_run(figure: Figure, place: Path, tmp_path: Path, name: str) -> None:
    """A failed run counts with the worst value of all runs, so a damaged file of a run must end the command."""
    values = outcome(place)["panels"]["all"]["SimFBO"]["chosen"]
    (there,) = playing.runs_of(figure, ("all", "SimFBO"), "quick", place, values, [0])
    (copy,) = playing.runs_of(figure, ("all", "SimFBO"), "quick", tmp_path, values, [0])
    shutil.copytree(there.folder, copy.folder)
    assert isinstance(copy.play(experiments.TaskCache()), History)
    (copy.folder / name).write_text("{")
    with pytest.raises((ConfigurationError, CheckpointError)):
        copy.play(experiments.TaskCache())


def test_runs_of_another_setting_are_not_taken_for_the_figures(place: Path) -> None:
    changed = made_up(**UNTUNED, spec={"task": {"name": "quadratic", "clients": 3, "noise": 0.2}})
    with raises_with(CheckpointError) as error:
        run(changed, "quick", place, seeds=(0,))
    assert error.value.path.name == "seed-0"
    assert error.value.differences["task.noise"] == (0.1, 0.2)


@pytest.mark.parametrize(
    ("steps", "error"),
    [([1e30, 1e31], "every trial failed"), pytest.param([1e9, 2e9], "round 3", marks=pytest.mark.slow)],
    ids=["trials", "runs"],
)
def test_a_method_that_fails_is_a_finding_and_remembered(
    tmp_path: Path, steps: list[float], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method whose trials or runs fail is worse than one whose runs do not, and the failure is stored.

    A trial has two rounds. With the step size 1e30 it overflows. With 1e9 only the third round overflows, which is part
    of a run.
    """
    broken = {"algorithm": {"name": "fedbio"}, "grid": {"client_lr.x": steps}}
    figure = made_up(methods={**CONTENT["methods"], "FedBiO": broken})
    found = run(figure, "quick", tmp_path, seeds=(0, 1))
    assert found["panels"]["all"]["FedBiO"]["failed_runs"] == 2
    assert found["findings"][0]["state"] == "holds"
    assert "FedBiO failed with 2 of 2 seeds" in found["findings"][0]["note"]
    assert all(error in one for one in found["errors"].values())
    assert ("all · FedBiO" in found["errors"]) == (error == "every trial failed")
    monkeypatch.setattr(experiments.TaskCache, "__call__", lambda self, spec: pytest.fail("a task is made"))
    assert run(figure, "quick", tmp_path, seeds=(0, 1))["errors"] == found["errors"]


def test_what_another_process_plays_is_waited_for(
    figure: Figure, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that another process makes at the moment is waited for, and the numbers are those of a single process.

    Here the first run is in use at the first attempt.
    """
    refused: list[Path] = []
    run_of = experiments.run_of

    def busy(spec: Any, folder: Path, *rest: Any, **more: Any) -> Any:
        if not refused:
            refused.append(folder)
            raise InUse("another process plays it")
        return run_of(spec, folder, *rest, **more)

    monkeypatch.setattr(experiments, "run_of", busy)
    monkeypatch.setattr(playing, "POLL", 0.0)
    said: list[str] = []
    found = play(figure, "quick", tmp_path, seeds=(0, 1), say=said.append)
    assert "FedBiO · trial client_lr.x=0.01" in said[3]  # the first of the four trials, now the last
    for name, of in outcome(place)["panels"]["all"].items():
        assert of["values"] == found["panels"]["all"][name]["values"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"algorithm": {"name": "simfbo", "radius": -1.0}}, ("algorithm.radius", -1.0)),
        ({"grid": {"server_lr.x": [0.05, -0.1]}}, ("algorithm.server_lr.x", -0.1)),
        (
            {"algorithm": {"name": "fism"}, "grid": {"lr": [0.1, 0.2]}},
            ("problem", "Bilevel", "a SimpleBilevel problem"),
        ),
        ({"task": {"noise": -1.0}}, ("task.noise", -1.0)),
        ({"run": {"cohort": 7}}, ("cohort", 7, "1 to 3")),
        ({"tsak": {"noise": 1.0}}, ("section of a spec", "tsak", "", "task")),
    ],
    ids=["field", "value of a grid", "problem", "task", "cohort", "section"],
)
def test_a_mistake_ends_a_figure_before_anything_is_played(
    tmp_path: Path, change: dict[str, Any], refusal: Any
) -> None:
    """A mistake in a figure is reported before anything is run, even if it is in the second method only."""
    methods = {**CONTENT["methods"], "SimFBO": CONTENT["methods"]["SimFBO"] | change}
    with refuses(*refusal, where="all · SimFBO"):
        run(made_up(methods=methods), "quick", tmp_path, seeds=(0,))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "seeds", "wrong"),
    [
        ({"quick": {"spec": {"run": {"rounds": 0}}}}, (0,), {"run.rounds": 0}),
        ({}, (0, -1), {"task.seed": -1, "run.seed": -1, "clock.seed": -1}),
        (
            {"tuning": {"select": "validation_accuracy"}},
            (0,),
            {"metric to choose by": "validation_accuracy"},
        ),
    ],
    ids=["runs alone", "a later seed", "metric"],
)
def test_what_only_runs_or_choices_need_is_looked_at_first(
    tmp_path: Path, change: dict[str, Any], seeds: tuple[int, ...], wrong: dict[str, Any]
) -> None:
    """A mistake that only runs, a later seed or the choice of values would meet is reported before anything is run.

    If there are several mistakes, each of them begins with the panel and the method.
    """
    with pytest.raises(ConfigurationError) as error:
        run(made_up(**change), "quick", tmp_path, seeds=seeds)
    assert {one.path: one.got for one in error.value.wrong} == wrong
    assert {one.where for one in error.value.wrong} == {"all · FedBiO"}
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_is_one_round_and_names_what_is_refused(figure: Figure, tmp_path: Path) -> None:
    said: list[str] = []
    rehearse(figure, "full", tmp_path, say=said.append)
    assert [line.partition(",")[0] for line in said] == ["all · FedBiO: one round", "all · SimFBO: one round"]
    assert {json.loads(file.read_text())["rounds"] for file in tmp_path.rglob("summary.json")} == {1}
    methods = {**CONTENT["methods"], "SimFBO": {**CONTENT["methods"]["SimFBO"], "run": {"cohort": 7}}}
    with refuses("cohort", 7, "1 to 3", where="all · SimFBO"):
        rehearse(made_up(methods=methods), "quick", tmp_path, say=silent)


def test_pictures_are_drawn(figure: Figure, place: Path) -> None:
    assert draw(figure, outcome(place)).startswith(b"\x89PNG")
    costs = made_up(metric="megabytes", against="rounds")
    found = run(costs, "quick", place, seeds=(0, 1))
    assert all(of["curve"] is None for of in found["panels"]["all"].values())
    (axes,) = points(costs, found).axes
    heights = [float(box.lines[0].get_ydata()[0]) for box in axes.containers]
    assert heights == [found["panels"]["all"][name]["mean"] for name in costs.methods]
    assert min(heights) > 0


def test_values_of_a_table_stand_beside_those_at_the_end() -> None:
    """A picture has the printed values of a table next to the values at the end of the runs.

    The rows have the order of the methods, from top to bottom. Shares are drawn in per cent, as they are in the table.
    """
    figure = made_up(metric="test_accuracy", printed={"all": {"FedBiO": 80.5}}, **UNTUNED)
    of = [{"values": [mean], "mean": mean, "sd": 0.01} for mean in (0.6, 0.7)]
    (axes,) = beside_table(figure, {"panels": {"all": dict(zip(figure.methods, of, strict=True))}}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*figure.methods][::-1]
    ours = {tuple(map(float, box.lines[0].get_xydata()[0])) for box in axes.containers}
    assert ours == {(60.0, 1.0), (70.0, 0.0)}
    (table,) = [line for line in axes.lines if line.get_marker() == "D"]
    row = [*figure.methods][::-1].index("FedBiO")
    assert table.get_xydata().tolist() == [[80.5, row]]
    with refuses("method in printed, all", "FedBio", near="FedBiO", where="made-up.toml"):
        made_up(printed={"all": {"FedBio": 80.5}})


def test_costs_that_differ_by_more_than_fifty_times_have_a_logarithmic_axis() -> None:
    """The axis of costs is logarithmic if they differ by more than fifty times, as 2 and 101 do, but not 2 and 100."""
    figure = made_up(metric="megabytes", against="rounds", **UNTUNED)
    names = list(figure.methods)[:2]
    for largest, scale in ((100.0, "linear"), (101.0, "log")):
        of = [{"values": [mean], "mean": mean, "sd": 0.0} for mean in (2.0, largest)]
        (axes,) = points(figure, {"panels": {"all": dict(zip(names, of, strict=True))}, "findings": []}).axes
        assert axes.get_yscale() == scale


def test_a_series_has_a_line_of_the_predicted_slope() -> None:
    """A picture of a series has a line with the predicted slope through the geometric middle of the readings.

    The readings 8, 4 and 2 at the values 1, 2 and 4 have the slope −1. The line has the slope −1/2, and passes through
    (2, 4).
    """
    panels = {str(value): {"value": value} for value in (1, 2, 4)}
    claims = [{"says": "-", "better": "SimFBO", "by": "late", "slope": -0.5}]
    figure = made_up(**UNTUNED, panels=panels, claims=claims, series="clients")
    curve = {"cost": [0, 1, 2, 3], "sd": [0.0] * 4}
    of = {name: {"values": [1.0], "mean": 1.0, "sd": 0.0, "curve": curve} for name in panels}
    ends = dict(zip(panels, (8.0, 4.0, 2.0), strict=True))
    found = {
        "panels": {
            name: {"SimFBO": {**of[name], "curve": {**curve, "mean": [99.0, 99.0, end, end]}}}
            for name, end in ends.items()
        },
        "findings": [{"says": "-", "difference": -0.5, "better_mean": -1.0, "half_width": 0.0}],
    }
    (axes,) = points(figure, found).axes
    predicted = next(line for line in axes.get_lines() if line.get_color() == "#666666")
    assert list(predicted.get_ydata()) == pytest.approx([4 * 2**0.5, 4, 4 / 2**0.5])
    assert axes.containers[0].get_label() == "SimFBO, mean over the second half: slope −1.00 ± 0, predicted −0.5 (grey)"


def test_counted_costs_have_a_panel_each() -> None:
    """If costs are counted, the picture has a panel for each cost that claims compare, with a bar for each method."""
    figure = load(PAPERS / "rabo" / "rabo-4.toml")
    found = json.loads(figure.file.with_suffix(".json").read_text("utf-8"))
    drawn = costs(figure, found).axes
    assert [axes.get_xlabel().split()[0] for axes in drawn] == ["GFLOP", "traffic"]
    for axes, name in zip(drawn, ("gflop", "megabytes"), strict=True):
        lengths = [bar.get_width() for bar in axes.patches]
        assert lengths == [found["panels"]["a round"][method]["costs"][name] for method in figure.methods]


def test_reported_numbers_are_drawn_beside_ours() -> None:
    """Reported numbers are hollow markers beside curves, readings and bars, or dashed levels.

    An improvement is added to the mean of the methods that it is over, and a percentage is one of their mean cost.
    """
    entry = {"what": "-", "source": "text"}
    at, level = {"panel": "all", "at": 3, "values": {"FedBiO": 80.5}}, {"values": {"SimFBO": 9.5}, "over": ["FedBiO"]}
    figure = made_up(metric="test_accuracy", reported=[{**entry, **at}, {**entry, **level}], **UNTUNED)
    curve = {"cost": [0, 4], "mean": [0.5, 0.6], "sd": [0.0, 0.0]}
    found = {"panels": {"all": {name: {"values": [0.6], "mean": 0.6, "curve": curve} for name in figure.methods}}}
    (axes,) = curves(figure, found).axes
    drawn = [line.get_xydata().tolist() for line in axes.lines if len(line.get_xdata()) and line.get_zorder() >= 2]
    assert [[3.0, 80.5]] in drawn
    assert [[0.0, 69.5], [1.0, 69.5]] in drawn  # 60 % of FedBiO and 9.5 points
    assert axes.get_ylim()[1] == 81.5
    of = {name: {"values": [cost], "mean": cost, "sd": 0.0, "costs": {"megabytes": cost}} for name, cost in SPENT}
    share = {**entry, "values": {"SimFBO": 25.0}, "over": ["FedBiO"]}
    figure = made_up(metric="megabytes", against="rounds", reported=[share], **UNTUNED)
    (axes,) = points(figure, {"panels": {"all": of}, "findings": []}).axes
    assert [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "D"] == [[10.0], []]
    (axes,) = costs(figure, {"panels": {"all": of}}).axes
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[10.0, 1.0]]]


def test_a_panel_says_how_many_runs_it_draws() -> None:
    of = {"A": {"values": [1.0], "failed_runs": 4}, "B": {"values": [1.0, 2.0], "failed_runs": 0}}
    assert left_out(of).replace("\N{NO-BREAK SPACE}", " ") == "runs that did not fail: A: 1 of 5"
    assert left_out({"B": of["B"]}) == ""
    lines = left_out(dict.fromkeys(("AFBO", "FBO-AggITD", "FedNest", "LFedNest"), of["A"])).splitlines()
    assert len(lines) > 1
    assert all(line.rstrip(",").endswith("of\N{NO-BREAK SPACE}5") for line in lines)  # a line ends after a method


def test_labels_of_near_values_are_a_line_lower() -> None:
    """A label is a line lower if it would touch the one before it; a value that occurs twice has the same label."""
    assert apart_from_each_other([512, 2400, 2800, 51200, 512]) == ["512", "2,400", "\n2,800", "51,200", "512"]


def test_the_command_plays_a_figure_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "written", lambda: [(tmp_path / "page.md", "a page")])  # keep the repository's pages
    file = tmp_path / "mine-1.toml"
    file.write_text(OWN)
    assert main([str(file), "--out", str(tmp_path), "--keep", "--seeds", "0,1"]) == 0
    said = capsys.readouterr().out
    assert "| FedBiO ends nearer: FedBiO / SimFBO |" in said
    assert {one.name for one in tmp_path.iterdir()} == {"mine-1.toml", "mine-1.json", "mine-1.png", "mine-1", "page.md"}
    assert main(["--list", str(file), "--out", str(tmp_path)]) == 0
    assert "not reproduced             Two methods" in capsys.readouterr().out
    assert main(["--list", "--out", str(tmp_path / "none")]) == 0
    listed = capsys.readouterr().out
    assert listed.count("(stored)") == len(files())  # every figure has a stored outcome


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "which figure"), (["simfbo-9"], "did you mean 'simfbo-"), (["no.toml"], "no.toml")]
)
def test_the_command_names_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "message"), [("0,0", "0,0 has a seed twice"), ("0;1", "invalid seeds value: '0;1'")])
def test_seeds_are_different_numbers(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds have to be different numbers, because a seed that counts twice would make intervals too narrow."""
    with pytest.raises(SystemExit):
        main(["fednest-4", "--seeds", given])
    assert message in capsys.readouterr().err


def test_an_interruption_ends_a_command_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert reported(interrupted) == 130
    assert capsys.readouterr().err == "papers: interrupted; the same command continues where it stopped\n"


OWN = """
part = "Figure 1"
title = "Two methods"
shows = "FedBiO is nearer."
setting = "-"
metric = "relative_error"
against = "rounds"
untuned = "-"
spec.task = { name = "quadratic", clients = 3 }
panels.all = {}
methods.FedBiO = { algorithm = { name = "fedbio" } }
methods.SimFBO = { algorithm = { name = "simfbo" } }
claims = [{ says = "FedBiO ends nearer", better = "FedBiO", than = ["SimFBO"] }]
quick = { spec = { run = { rounds = 2 } } }
full = {}
"""


@pytest.mark.slow
def test_a_counted_figure_has_the_costs_of_a_round_that_is_run(tmp_path: Path) -> None:
    """A figure that is counted has the operations and bytes of a round that is run, without a run and without a folder.

    It finds the same as the figure that is run.
    """
    once: dict[str, Any] = {"minutes": 1, "spec": {"run": {"rounds": 1, "eval_every": 1}}}
    content = {**UNTUNED, "metric": "gflop", "against": "rounds", "quick": once, "full": once, "seeds": 2}
    found, played = (
        run(made_up(**content, counted=counted), "quick", tmp_path / str(counted)) for counted in (True, False)
    )
    assert not (tmp_path / "True").exists()
    assert found["findings"] == played["findings"]
    for method, of in found["panels"]["all"].items():
        costs = played["panels"]["all"][method]["costs"]
        assert of["costs"] == {name: costs[name] for name in ("exchanges", "megabytes", "gflop")}
    with refuses("cost that is counted", "seconds", where="made-up.toml"):
        made_up(**{**content, "metric": "seconds"}, counted=True)
    with refuses("", fact="all · FedBiO: costs are counted of one round", where="made-up.toml"):
        made_up(**{**content, "quick": CONTENT["quick"]}, counted=True)
