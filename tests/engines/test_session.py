"""What a Python session and a notebook show: is it short, true, and harmless, whatever an object contains?"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.tasks import Task
from refusals import refuses

EVIL = "<script>alert('&')</script>"
MANY = {f"{EVIL}{i}": np.ones((3, i + 1)) for i in range(200)}  # NumPy's arrays, for which nothing is compiled


def history(rows=300):
    first = [{"round": 0, "exchanges": 0, "seconds": 0.0, EVIL: 0.5, "test_accuracy": 0.1}]
    later = [{"round": i, "exchanges": 2 * i, "seconds": 0.1 * i, EVIL: 1 / i} for i in range(1, rows)]
    last = {"round": rows, "test_accuracy": 0.5} | {f"column_{i}": 1.0 for i in range(200)}
    return authoring.History([*first, *later, last])


def ledger():
    phases = {f"phase_{EVIL}_{i}": 10**9 for i in range(100)}
    sent = {"rounds": 10**9, "exchanges": 10**12, "bytes_down": 10**18, "bytes_up": 10**18, "replies": 1}
    work = {"gradients": 10**15, "hvps": 10**15, "flops": 10**20, "epsilon": 1.0, "delta": 1e-5}
    return authoring.Ledger(**sent, **work, exchanges_by_phase=phases)


@cache  # it takes a quarter of a second; no test changes it
def clients():
    outer = [{f"{EVIL}{i}": np.ones((n, 3)) for i in range(50)} for n in range(1, 101)]
    return fb.Clients(outer, local_steps=np.arange(1, 101), capacity=np.linspace(0.1, 1, 100))


def problem():
    return fb.Bilevel(lambda x, y, batch: 0.0, lambda x, y, batch: 0.0, project_x=fb.projections.box(-8, 4))


def task():
    return Task(EVIL * 20, problem(), clients(), MANY, MANY, {f"{EVIL}{i}": lambda x, y: 0.0 for i in range(50)})


LARGE = {
    "Task": task,
    "Result": lambda: fb.Result(MANY, MANY, 10**6, 10**6, history(), ledger(), stopped=EVIL * 20),
    "History": history,
    "Ledger": ledger,
    "Clients": clients,
    "Ragged": lambda: clients().outer,
    "RemoteClients": lambda: fb.RemoteClients.of(clients()),
}
EMPTY = {
    "Result": lambda: fb.Result(None, None, 0, 1, authoring.History(), authoring.Ledger()),
    "History": authoring.History,
    "Ledger": authoring.Ledger,
    "Clients": lambda: fb.Clients([np.ones(1)]),
}


@pytest.mark.parametrize("make", [*LARGE.values(), *EMPTY.values()], ids=[*LARGE, *(f"empty {name}" for name in EMPTY)])
def test_a_repr_is_at_most_six_lines_of_110_characters(make):
    lines = repr(make()).splitlines()
    assert 1 <= len(lines) <= 6
    assert max(map(len, lines)) <= 110


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.open, self.text = set(), [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", LARGE)
def test_a_notebook_gets_a_table_in_which_names_are_text(name):
    made = LARGE[name]()
    page = Tags()
    page.feed(made._repr_html_())
    page.close()
    assert page.open == []
    assert page.tags == {"table", "caption", "b", "tbody", "tr", "th", "td"}
    assert EVIL in page.text


def test_what_is_shown_is_true():
    rows = [{"round": 0, "test_accuracy": 0.1}, {"round": 5, "test_accuracy": 0.9}, {"round": 9, "test_accuracy": 0.85}]
    ledger = authoring.Ledger(rounds=9, exchanges=1234, bytes_down=1_500_000, bytes_up=500_000, gradients=1, hvps=0)
    ledger.ticks = 7_000  # in units of 0.1 ms
    result = fb.Result(
        {"w": jnp.ones((2, 3))}, None, 9, 9, authoring.History(rows, {"test_accuracy": True}), ledger, stopped="enough"
    )
    assert repr(result).splitlines() == [
        "Result: 9 of 9 rounds, stopped: enough",
        "  x         6 numbers: w (2, 3) float64",
        "  y         none",
        "  last row  test_accuracy 85.00 %",
        "  costs     1,234 exchanges, 2.0 MB, 1 gradient, 0 hvps",
        "  more      summary(), plot(), history, ledger",
    ]
    assert dict(result.summary()) == result.summary().lines
    summary = repr(result.summary())
    assert "10.00 % → 85.00 %, best 90.00 % at round 5" in summary
    assert "1.500 MB down, 0.500 MB up" in summary
    assert re.search(r"^ *virtual time +0\.7 seconds$", summary, re.MULTILINE)
    assert re.search(r"^ *time +0\.7 seconds$", repr(authoring.Ledger(ticks=7_000, virtual=False)), re.MULTILINE)
    own = {"client_lr.x": [0.1, 0.2]}
    population = fb.Clients([np.ones((2, 4)), np.ones((3, 4))], weights="size", local_steps=(1, 5), own=own)
    assert repr(population).splitlines() == [
        "2 clients",
        "  outer samples  5, 2 to 3 a client, each (4,) float64",
        "  inner samples  the same",
        "  weights        0.4 to 0.6",
        "  local steps    1 to 5, drawn for each client and round",
        "  client_lr.x    0.1 to 0.2, one for each client",
        "  capacity       the whole model",
    ]
    name, meaning, *more = repr(problem()).splitlines()
    assert (name, more) == ("Bilevel", ["  project_x  x stays in a convex set"])
    assert meaning.startswith(
        "  problem    Minimise F(x, y*(x)) over x, with y*(x) = argmin over y of G(x, y); F and G are"
    )
    made = Task("mine", fb.SingleLevel(lambda x, batch: 0.0), population, jnp.ones(3), None, {"a": lambda x, y: 0.0})
    assert repr(made).splitlines() == [
        "Task mine",
        "  problem  SingleLevel",
        "  clients  2 clients",
        "  x0       3 numbers: (3,) float64",
        "  y0       none",
        "  metrics  a",
    ]


def test_pandas_gets_the_rows_and_is_named_where_it_is_missing(monkeypatch):
    """pandas gets the rows, and is named if it is not installed.

    A stand-in takes the place of pandas.DataFrame, which takes rows as dicts and fills missing entries with NaN.
    """
    frame = SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", frame)
    made = authoring.History([{"round": 0}, {"round": 1, "loss": 2.0}])
    assert made.to_pandas() == (made.rows, ["round", "loss"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with refuses("", fact='pip install ".[tables]"'):
        made.to_pandas()


def told(name, *values):
    """Return a history of a metric of eleven clients, with a row for each value.

    In a row, the deciles of the metric are a tenth apart, and centred at the value.
    """
    cost = {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0}
    rows = []
    for i, value in enumerate(values):
        deciles = {f"{name}.p{10 * k}": value + 0.1 * (k - 5) for k in range(1, 10)}
        own = {f"{name}.mean": value + 0.01, **deciles, f"{name}.worst": value + 0.5}
        rows.append({"round": i, "exchanges": 3 * i, **cost, **own})
    return authoring.History(rows)


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_result_draws_the_mean_of_a_per_client_metric_in_a_band_of_deciles(pyplot):
    history = told("fit_error", 1.0, 0.5, 0.6)
    result = fb.Result(None, None, 2, 2, history, authoring.Ledger())
    axes = result.plot()
    (line, worst), (band,) = axes.lines, axes.collections
    np.testing.assert_allclose(worst.get_ydata(), history["fit_error.worst"])
    assert "worst" in axes.get_title()
    np.testing.assert_allclose(line.get_xydata(), [[0, 1.01], [3, 0.51], [6, 0.61]])
    low, high = {(x, y) for x, y in np.round(band.get_paths()[0].vertices, 9)}, set()
    for x, value in ((0, 1.0), (3, 0.5), (6, 0.6)):
        high |= {(x, round(value - 0.4, 9)), (x, round(value + 0.4, 9))}
    assert low == high
    assert axes.get_ylabel() == "fit error"
    assert axes.figure.number in pyplot.get_fignums()  # notebooks show the figures with a number


def test_a_legend_that_is_given_names_alone_names_the_means(pyplot):
    axes = told("fit_error", 1.0, 0.5).plot()
    told("fit_error", 1.0, 0.7).plot(axes=axes)
    colours = [line.get_color() for line in axes.legend(["one", "other"]).get_lines()]
    first, worst, second, _ = (line.get_color() for line in axes.lines)
    assert colours == [first, second] != [first, worst]


def test_a_plot_of_a_run_without_metrics_is_of_the_outer_loss(pyplot):
    """A run without metrics plots its outer loss, not what the method reports of itself, although it comes first."""
    rows = [row | {"curvature": 2.0, "inner_loss": 1.0, "outer_loss": 3.0} for row in told("e", 1.0, 0.5).rows]
    assert authoring.History(rows).plot().get_ylabel() == "outer loss"
    assert authoring.History(rows, {"e": False}).plot().get_ylabel() == "e"


def test_what_the_first_figure_of_pyplot_sets_stays(pyplot, monkeypatch):
    """What pyplot sets at its first figure stays set: in a notebook it becomes interactive, and shows figures."""
    make = pyplot.figure

    def first(**options):
        monkeypatch.setitem(pyplot.rcParams, "interactive", True)
        return make(**options)

    monkeypatch.setattr(pyplot, "figure", first)
    assert not pyplot.isinteractive()
    axes = told("fit_error", 1.0, 0.5).plot(size=(3.3, 2.5))
    assert pyplot.isinteractive()
    assert axes.xaxis.label.get_fontsize() == 8  # the figure had the style of a narrow one


def test_a_plot_has_the_panel_the_size_and_the_axes_that_are_asked_for(pyplot):
    history = told("fit_accuracy", 0.1, 0.8)
    axes = history.plot("fit_accuracy.p10", panel="rounds", size=(3.3, 2.5))
    assert axes.figure.get_size_inches().tolist() == [3.3, 2.5]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rounds", "fit accuracy, p10 (%)")
    assert history.plot(["fit_accuracy", "fit_accuracy.p20"], axes=axes) is axes
    assert axes.get_ylabel() == "fit accuracy (%)"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["fit accuracy, p10", "fit accuracy", "fit accuracy, p20"]


@pytest.mark.parametrize(
    ("name", "value", "path", "fact", "near"),
    [
        ("metrics", "fit_acuracy", "column of the history", "fit_accuracy.p10", "fit_accuracy.p90"),
        ("panel", "exchange", "panel", "megabytes", "exchanges"),
        ("size", (3, -1), "size", "1 to 100", ""),
    ],
)
def test_a_plot_that_cannot_be_is_refused(name, value, path, fact, near, pyplot):
    with refuses(path, value, fact, near):
        told("fit_accuracy", 0.1, 0.8).plot(**{name: value})
    with refuses("metrics", None, "measured nothing"):
        authoring.History().plot()
