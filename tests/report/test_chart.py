"""Curves of a page: the places of their points are those of the drawn line, and the numbers are those of the curve."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from fedbilevel.display.curves import Curve
from fedbilevel.report.chart import POINTS, SVG, Chart, amount, chart

AT = np.array([0.0, 10.0, 20.0, 40.0])


def line(label: str, value: np.ndarray, spread: float | None = None, level: bool = False) -> Curve:
    costs = {"rounds": np.arange(len(value)), "exchanges": np.linspace(0, 40, len(value))}
    if spread is None:
        return Curve(label, costs, value, level=level)
    return Curve(label, costs, value, np.full(len(value), spread))


def drawn(made: Chart, number: int) -> list[list[float]]:
    """The points of a curve's path in the SVG."""
    root = ElementTree.fromstring(made.svg)
    groups = [one for one in root.iter(f"{{{SVG}}}g") if one.get("data-curve") == str(number)]
    (path,) = [one.attrib["d"] for group in groups for one in group.findall(f"{{{SVG}}}path")]
    return [[float(one) for one in pair] for pair in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]


@pytest.mark.parametrize("metric", ["relative_error", "test_accuracy"])
def test_points_lie_on_their_curve(metric: str) -> None:
    """Corners that no path may simplify away: each curve turns at every point."""
    zigzag = np.array([0.5, 0.9, 0.6, 0.95])
    made = chart([line("A", zigzag), line("B", 1.4 - zigzag, 0.02)], metric, "exchanges", title="-", numbers=[2, 0])
    for curve in made.curves:
        places = [[float(one) for one in point.at.split()] for point in curve.points]
        inside = places[1:]  # an accuracy's axis may leave out the untrained model
        np.testing.assert_allclose(inside, drawn(made, curve.number)[1:], atol=0.6)
    assert [curve.number for curve in made.curves] == [2, 0]


def test_numbers_are_those_of_the_curve() -> None:
    made = chart([line("A", np.array([0.5, 0.25]), 0.125)], "test_accuracy", "exchanges", title="-")
    (curve,) = made.curves
    assert [(one.cost, one.value, one.spread) for one in curve.points] == [
        ("0", "50.00 %", "12.50 %"),
        ("40", "25.00 %", "12.50 %"),
    ]
    assert (made.value, made.cost, made.spread) == ("test accuracy (%)", "exchanges", True)


def test_long_curves_are_thinned_and_say_so() -> None:
    value = np.linspace(1, 2, 1000)
    made = chart([line("A", value)], "relative_error", "exchanges", title="-")
    points = made.curves[0].points
    assert len(points) == POINTS
    assert (points[0].value, points[-1].value) == ("1", "2")
    assert made.note == "200 of 1,000 evaluations are shown."


def test_colours_are_the_pages() -> None:
    made = chart([line(str(i), AT + i, 1.0) for i in range(8)], "relative_error", "exchanges", title="-")
    assert set(re.findall(r"var\(--curve-(\d)\)", made.svg)) == set("0123456")  # the eighth has the first's, and dashes
    assert re.findall(r"(?:stroke|fill): #\w+", made.svg) == []


def test_a_level_has_one_number() -> None:
    made = chart([line("A", AT + 1), line("all data", np.array([5.0, 3.0]), level=True)], "x", "exchanges", title="-")
    (point,) = made.curves[1].points
    assert (point.cost, point.value) == ("–", "3")


@pytest.mark.parametrize(
    ("cost", "said"),
    [(0.0, "0"), (12.0, "12"), (1234567.0, "1,234,567"), (0.05041, "0.05041"), (12345.6, "12,346"), (1e18, "1e+18")],
)
def test_costs_are_written_for_people(cost: float, said: str) -> None:
    assert amount(cost) == said
