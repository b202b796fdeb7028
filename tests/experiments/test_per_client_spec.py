"""Does a spec's run measure its clients, and show what it measured?"""

import numpy as np
import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel.experiments import compare, configure, display, federation, load_run, measure, run
from fedbilevel.experiments.parts import task_of
from fedbilevel.experiments.plots import run_figure
from fedbilevel.tasks import MEASURED_PER_CLIENT, TASKS

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
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_run_measures_each_client_on_its_own_images(place):
    """Three clients' accuracies: the mean has equal weights, the median is the middle one."""
    row = load_run(place).history.rows[-1]
    low, middle, high = (row[f"client_accuracy.{end}"] for end in ("worst", "p50", "best"))
    assert low <= middle <= high
    assert row["client_accuracy.mean"] == pytest.approx((low + middle + high) / 3, rel=1e-12)
    assert row["client_accuracy.p10"] == pytest.approx(low + 0.2 * (middle - low), rel=1e-12)


def test_the_closing_table_the_comparison_and_the_picture_show_it(place):
    one = load_run(place)
    row = one.history.rows[-1]
    worst = measure.text("client_accuracy", row["client_accuracy.worst"])
    text = shown(display.summary_table(one.summary))
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
    with pytest.raises(fb.ConfigurationError, match=r"task quadratic has no metrics_per_client; .* hyper_cleaning"):
        run(spec, tmp_path / "run", plot=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_that_an_error_names_are_those_that_have_such_metrics(name):
    assert bool(task_of(configure(task=name, settings=["task.clients=6"])).metrics_per_client) == (
        name in MEASURED_PER_CLIENT
    )


def test_a_node_tells_only_if_its_configuration_says_so(spec):
    silent, telling = (federation.site(spec, {}, {"partition-id": 0, **more}) for more in ({}, {"tell-metrics": True}))
    assert (silent.tells_metrics, telling.tells_metrics) == (False, True)
    assert list(telling.metrics_per_client) == ["client_accuracy"]
