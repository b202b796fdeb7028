"""Does a spec's run measure its clients, and show what it measured?"""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import hospital_files
from fedbilevel import authoring
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.display.curves import COLOURS, run_figure
from fedbilevel.experiments import compare, configure, federation, load_run, run, tables
from fedbilevel.experiments.runner import task_of
from fedbilevel.experiments.series import play_all
from fedbilevel.tasks import MEASURED_PER_CLIENT, TASKS
from refusals import refuses
from representatives import slow_but

SETTINGS = ["task.clients=3", "task.hidden=[4]", "run.rounds=1", "run.eval_every=1", "run.cohort=none"]


@pytest.fixture(scope="module")
def spec():
    settings = [*SETTINGS, "run.metrics_per_client=true"]
    return configure(task="classification", algorithm="fedavg", settings=settings)


@pytest.fixture(scope="module")
def place(spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "measured"
    run(spec, folder, plot=False)
    return folder


def shown(table):
    console = Console(width=200, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.slow
def test_a_run_measures_each_client_on_its_own_images(place):
    """A run measures the accuracy of each of three clients on its own images.

    The mean has equal weights, and the median is the middle accuracy. The first decile of three numbers is interpolated
    at 0.1·2 between the lowest and the middle one.
    """
    row = load_run(place).history.rows[-1]
    low, middle, high = (row[f"client_accuracy.{end}"] for end in ("worst", "p50", "best"))
    assert low <= middle <= high
    assert row["client_accuracy.mean"] == pytest.approx((low + middle + high) / 3, rel=1e-12)
    assert row["client_accuracy.p10"] == pytest.approx(low + 0.2 * (middle - low), rel=1e-12)


def test_the_closing_table_the_comparison_and_the_picture_show_it(place):
    """The closing table of a run, a comparison and a picture show the accuracy per client."""
    one = load_run(place)
    row = one.history.rows[-1]
    worst = tables.text("client_accuracy", row["client_accuracy.worst"])
    text = shown(tables.summary_table(one.summary))
    assert "client_accuracy, worst" in text
    assert worst in text
    text = shown(compare.comparison_table(compare.load_groups([place])))
    assert "client_accuracy.worst" in text
    assert worst in text
    narrow = compare.comparison_table(compare.load_groups([place]), width=40)
    assert "client_accuracy.worst" in narrow.caption
    *_, axes = run_figure(one.history, one.metric, "title").axes
    assert axes.get_ylabel() == "client accuracy (%)"
    mean = 100 * one.history["client_accuracy.mean"]
    np.testing.assert_allclose(axes.lines[0].get_ydata(), mean)
    assert len(axes.collections) == 1  # the band


def test_a_task_without_such_metrics_is_refused_by_name(tmp_path):
    spec = configure(task="quadratic", algorithm="simfbo", settings=["run.metrics_per_client=true"])
    with refuses("run.metrics_per_client", True, "hyper_cleaning"):
        run(spec, tmp_path / "run", plot=False)
    assert not (tmp_path / "run").exists()


def test_a_comparison_draws_the_clients_of_those_who_measured_them(place, tmp_path, monkeypatch):
    """A panel of clients' metrics draws the runs that measured them, and names the others.

    The second of three runs did not measure them, and the third still has the third colour.
    """
    one = load_run(place)
    rows = [{key: value for key, value in row.items() if "client" not in key} for row in one.history.rows]
    silent = replace(one, history=authoring.History(rows))
    groups = [compare.RunGroup(name, [run]) for name, run in (("a", one), ("b", silent), ("c", one))]
    drawn = []
    monkeypatch.setattr(compare.curves, "encoded", lambda figure, path: drawn.append(figure) or b"")
    compare.draw(groups, tmp_path / "c.png", ["exchanges", "per_client:megabytes"])
    cost, clients = drawn[0].axes
    assert (cost.get_ylabel(), clients.get_ylabel()) == ("test accuracy (%)", "client accuracy (%)")
    assert (len(cost.lines), clients.get_xlabel()) == (3, "traffic (MB, down + up, whole cohort)")
    assert clients.get_title().endswith("not measured: b, FedAvg")
    assert len(clients.collections) == 2  # bands from the first to the last decile
    solid, worst = clients.lines[2:]  # of run c
    assert solid.get_color() == worst.get_color() == cost.lines[2].get_color() == COLOURS[2]
    np.testing.assert_allclose(solid.get_ydata(), 100 * one.history["client_accuracy.mean"])
    np.testing.assert_allclose(worst.get_ydata(), 100 * one.history["client_accuracy.worst"])
    with refuses("panel", "per_client", "run.metrics_per_client=true"):
        compare.draw(groups[1:2], tmp_path / "c.png", ["per_client"])


def test_a_misspelt_panel_is_answered_with_the_nearest():
    for panel in ("per_clients", "per_client:exchange", "per_client:"):
        with pytest.raises(ConfigurationError) as error:
            compare.is_per_client(panel)
        assert (error.value.path, error.value.got) == ("panel", panel)
        assert error.value.near.startswith("per_client")


def test_a_panel_of_clients_whom_no_run_will_measure_is_refused_before_anything_runs(tmp_path):
    specs = {"fedavg": configure(task="classification", algorithm="fedavg", settings=SETTINGS)}
    with refuses("panel", "per_client", "run.metrics_per_client=true"):
        play_all(specs, tmp_path / "c", panels=["per_client"])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", slow_but(*(TASKS.keys() - {"few_shot"}), of=TASKS))
def test_the_tasks_that_an_error_names_are_those_that_have_such_metrics(name, tmp_path, monkeypatch):
    hospital_files.write(tmp_path, monkeypatch)
    settings = [] if name in ("hospitals", "tables") else ["task.clients=6"]
    assert bool(task_of(configure(task=name, settings=settings)).metrics_per_client) == (name in MEASURED_PER_CLIENT)


def test_a_node_tells_only_if_its_configuration_says_so(spec):
    """A node reports metrics of its samples only if its configuration has `tell-metrics`."""
    silent, telling = (federation.site(spec, {}, {"partition-id": 0, **more}) for more in ({}, {"tell-metrics": True}))
    assert (silent.tells_metrics, telling.tells_metrics) == (False, True)
    assert list(telling.metrics_per_client) == ["client_accuracy"]
