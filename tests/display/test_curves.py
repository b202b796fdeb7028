"""Does a curve have the right metric at the right cost, and are runs and comparisons drawn as they should be?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.display.curves import (
    COLOURS,
    COSTS,
    DASHES,
    ONCE,
    Curve,
    comparison_figure,
    curve,
    draw_history,
    draw_panel,
    encoded,
    new_figure,
    run_figure,
)
from fedbilevel.engines.history import History
from refusals import refuses

COST = {"exchanges": 1, "bytes_down": 10, "bytes_up": 20, "gradients": 3, "hvps": 4, "seconds": 0.5}


def history(*values: float, **columns: float) -> History:
    """Return a history of the metric "e", with an exchange and a million bytes between two rows, and no other costs."""
    zeros = {"gradients": 0, "hvps": 0, "seconds": 0.0}
    row = {"bytes_down": 0, **zeros, **columns}
    return History(
        [{"round": i, "exchanges": i, "bytes_up": i * 10**6, **row, "e": value} for i, value in enumerate(values)]
    )


def panel_of(curves, panel="exchanges", percent=False):
    axes = new_figure((6, 4)).subplots()
    draw_panel(axes, curves, panel, percent=percent)
    return axes


def line(label, costs, values) -> Curve:
    costs = np.array(costs, float)
    return Curve(label, {"rounds": np.arange(len(costs)), "exchanges": costs}, np.array(values, float))


def test_the_mean_and_the_spread_of_a_curve() -> None:
    """A curve has the mean and the standard deviation over runs, at the rounds that all runs have."""
    one = History([{"round": 0, **COST, "e": 1.0}, {"round": 5, **COST, "e": 0.2}, {"round": 7, **COST, "e": 9.0}])
    two = History([{"round": 0, **COST, "e": 3.0}, {"round": 5, **COST, "e": 0.4}])
    mean = curve("x", [one, two], "e")
    np.testing.assert_array_equal(mean.costs["rounds"], [0, 5])
    np.testing.assert_allclose(mean.value, [2.0, 0.3])
    np.testing.assert_allclose(mean.spread, [2**0.5, 0.1 * 2**0.5])
    np.testing.assert_allclose(mean.costs["megabytes"], [30e-6, 30e-6])
    np.testing.assert_array_equal(mean.costs["evaluations"], [7, 7])
    assert "gflop" not in mean.costs
    counted = History([{"round": 0, **COST, "e": 1.0, "flops": 0}, {"round": 5, **COST, "e": 1.0, "flops": 3e9}])
    np.testing.assert_array_equal(curve("x", [counted], "e").costs["gflop"], [0, 3])


@pytest.mark.parametrize("end", [0.01, 1.9])  # with means that span decades the axis is logarithmic
def test_a_band_on_a_log_axis_goes_as_far_down_as_up(end) -> None:
    """On a logarithmic axis, a band goes down by the factor (mean + sd)/mean, as far as it goes up.

    At the start the mean is 1 and the sd is 1.27, so that mean − sd is negative, and it is negative at the end, too.
    """
    values = np.array([[1.9, end], [0.1, 0.1 * end]])
    costs = {"rounds": np.array([0, 5]), "exchanges": np.array([0.0, 1.0])}
    axes = panel_of([Curve("x", costs, values.mean(0), values.std(0, ddof=1))])
    log = axes.get_yscale() == "log"
    assert log == (end == 0.01)
    lowest = axes.collections[0].get_paths()[0].vertices[:, 1].min()
    mean, deviation = values.mean(0), values.std(0, ddof=1)
    band = mean**2 / (mean + deviation) if log else mean - deviation
    assert lowest == pytest.approx(band.min())


def test_a_band_of_shares_goes_one_deviation_up_and_one_down() -> None:
    """Shares are drawn in percent, and so is their band: an accuracy of 0.5 ± 0.1 is a band from 40 to 60."""
    shares = Curve("x", {"exchanges": np.array([0.0, 1.0])}, np.full(2, 0.5), np.full(2, 0.1))
    heights = panel_of([shares], percent=True).collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((40, 60))


def test_a_pooled_run_is_a_line_at_its_last_value() -> None:
    axes = panel_of([line("x", [0, 1], [3, 1]), replace(line("all", [0, 1, 2], [3, 5, 2]), level=True)])
    assert list(axes.lines[1].get_ydata()) == [2, 2]


@pytest.mark.parametrize(("dear", "scale"), [(100, "linear"), (110, "symlog")])
def test_runs_whose_costs_are_more_than_ten_times_apart_share_a_log_axis_and_a_start(dear, scale) -> None:
    """Two runs are drawn on a logarithmic axis of costs if one costs more than ten times as much as the other.

    The runs end at 10 and at 100 or 110, and begin at the same place, at cost 0.
    """
    axes = panel_of([line("cheap", [0, 5, 10], [1, 0.9, 0.8]), line("dear", [0, 50, dear], [1, 0.9, 0.8])])
    assert axes.get_xscale() == scale
    starts = {tuple(axes.transData.transform(one.get_xydata()[0]).round(6)) for one in axes.lines}
    assert len(starts) == 1
    assert axes.get_xlim()[0] == 0
    across, _ = axes.transAxes.inverted().transform(axes.transData.transform(axes.lines[0].get_xydata()[-1]))
    assert (across > 0.5) == (scale == "symlog")  # on the linear axis, it ends at a tenth of the width


def test_a_history_is_drawn_against_the_cost_that_was_asked_for() -> None:
    axes = draw_history(history(3, 2, 1), "e", panel="megabytes", size=(3.3, 2.4))
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[0, 3], [1, 2], [2, 1]])
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("traffic (MB)", "e")
    assert tuple(axes.figure.get_size_inches()) == (3.3, 2.4)
    assert axes.xaxis.label.get_size() == 8
    into = new_figure((6, 4)).subplots()
    assert draw_history(history(3, 2, 1, outer_loss=1, inner_loss=2), ["outer_loss", "inner_loss"], axes=into) is into
    assert [text.get_text() for text in into.get_legend().get_texts()] == ["outer loss", "inner loss"]
    assert into.get_ylabel() == "loss"


def test_a_second_run_in_the_same_axes_has_another_colour_and_leaves_the_first_in_sight() -> None:
    axes = draw_history(history(0.1, 0.5), "e", axes=new_figure((6, 4)).subplots())
    draw_history(history(0.1, 0.4), "e", axes=axes)
    assert [(one.get_color(), one.get_linestyle()) for one in axes.lines] == list(
        zip(COLOURS[:2], DASHES[:2], strict=True)
    )
    shares = new_figure((6, 4)).subplots()
    for end in (0.9, 0.5, 0.7):  # a run alone has an axis from 3 % below its end to 1 % above it
        rows = [{**COST, "round": i, "exchanges": i, "accuracy": value} for i, value in enumerate((0.1, end))]
        draw_history(History(rows), "accuracy", axes=shares)
    assert shares.get_ylim() == pytest.approx((47, 91))


def test_what_was_measured_once_is_a_dot_and_the_picture_says_how_to_get_more() -> None:
    once = draw_history(history(3), "e", axes=new_figure((6, 4)).subplots())
    assert (once.lines[0].get_marker(), once.get_title()) == ("o", ONCE)
    twice = draw_history(history(3, 2), "e", axes=new_figure((6, 4)).subplots())
    assert (twice.lines[0].get_marker(), twice.get_title()) == ("None", "")


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"metrics": "f"}, ("column of the history", "f", "", "ef")),
        ({"metrics": []}, ("metrics", [], "columns")),
        ({"panel": "exchange"}, ("panel", "exchange", "", "exchanges")),
        ({"panel": "gflop"}, ("panel", "gflop", "counted")),
        ({"size": (3.3, 2), "axes": 1}, ("size", (3.3, 2), "axes")),
    ],
)
def test_what_a_history_cannot_be_drawn_against_is_refused(asked, refusal) -> None:
    with refuses(*refusal):
        draw_history(**{"history": history(3, 2, 1, ef=1), "metrics": "e", **asked})


@pytest.mark.parametrize(("inner", "labels"), [(3.0, ["e", "loss"]), (0.1, ["e", "outer loss", "inner loss"])])
def test_each_curve_of_a_run_is_drawn_once_and_losses_of_unequal_size_apart(inner, labels) -> None:
    figure = run_figure(history(2, 2, bytes_down=3e6, average_e=3.0, outer_loss=14.0, inner_loss=inner), "e", "")
    assert [panel.get_ylabel() for panel in figure.axes] == labels
    assert {panel.get_xlabel() for panel in figure.axes} == {"exchanges"}
    drawn = [one.get_label() for panel in figure.axes for one in panel.lines]
    assert drawn == ["e", "average e", "outer loss", "inner loss"]
    assert figure.get_supxlabel() == "in all: 1 exchanges · 4 MB · 0.0 s in rounds"  # 3 MB down, 1 MB up


def several(number: int) -> list[Curve]:
    costs = {name: np.array([0.0, 1.0]) for name in COSTS}
    return [Curve(f"method number {i}", costs, np.array([1.0, 0.5 + i])) for i in range(number)]


@pytest.mark.parametrize(("panels", "cells"), [(1, 1), (3, 3), (4, 4), (5, 6)])
def test_every_curve_is_named_in_the_picture(panels, cells) -> None:
    """A picture names all nine curves, in a free cell or below its panels, in a legend no wider than the picture."""
    for size in (None, (3.3, 2.6)):
        figure = comparison_figure(several(9), "e", "title", list(COSTS)[:panels], size)
        assert [axes.get_xlabel() != "" for axes in figure.axes] == [i < panels for i in range(cells)]
        (legend,) = figure.legends or [figure.axes[panels].get_legend()]
        assert len(legend.get_texts()) == 9
        assert legend.get_window_extent().width <= figure.bbox.width
        assert figure.get_suptitle() == ("title" if size is None else "")


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.pdf", b"%PDF-"), ("C.SVG", b"<?xml")])
def test_the_suffix_decides_the_format_and_the_bytes_can_be_had_again(name, start) -> None:
    figures = [comparison_figure(several(2), "e", "", ["exchanges"], (3.3, 2.4)) for _ in range(2)]
    written = [encoded(figure, Path(name)) for figure in figures]
    assert written[0].startswith(start)
    assert written[0] == written[1]
    if name == "c.pdf":  # 3.3 by 2.4 inches of 72 points each, with TrueType fonts
        assert re.search(rb"/MediaBox \[ ?0 0 237\.6 172\.8 ?\]", written[0])
        assert b"/Type3" not in written[0]
    with refuses("name of a picture", "png", ".png, .pdf, .svg"):
        encoded(figures[0], Path("png"))
