"""Pictures: which panels a run and a comparison have, and the files they are written to."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.display.curves import COSTS, Curve, comparison_figure, encoded, run_figure
from fedbilevel.engines.history import History

ZEROS = {"exchanges": 0, "bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0, "e": 2.0}


def curves(number: int) -> list[Curve]:
    costs = {name: np.array([0.0, 1.0]) for name in COSTS}
    return [Curve(f"method number {i}", costs, np.array([1.0, 0.5 + i])) for i in range(number)]


@pytest.mark.parametrize(("inner", "labels"), [(3.0, ["e", "loss"]), (0.1, ["e", "outer loss", "inner loss"])])
def test_each_curve_of_a_run_is_drawn_once_and_losses_of_unequal_size_apart(inner, labels) -> None:
    row = {**ZEROS, "round": 1, "exchanges": 1, "average_e": 3.0, "outer_loss": 14.0, "inner_loss": inner}
    figure = run_figure(History([{**ZEROS, "round": 0, "average_e": 2.0}, row]), "e", "")
    assert [panel.get_ylabel() for panel in figure.axes] == labels
    assert {panel.get_xlabel() for panel in figure.axes} == {"exchanges"}
    drawn = [line.get_label() for panel in figure.axes for line in panel.lines]
    assert drawn == ["e", "average e", "outer loss", "inner loss"]
    assert figure.get_supxlabel() == "in all: 1 exchanges · 0 MB · 0.0 s in rounds"


@pytest.mark.parametrize(("panels", "cells"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6)])
def test_every_curve_is_named_in_the_picture(panels, cells) -> None:
    names = list(COSTS)[:panels]
    for size in (None, (3.3, 2.6)):
        figure = comparison_figure(curves(9), "e", "title", names, size)
        assert [axes.get_xlabel() != "" for axes in figure.axes] == [i < panels for i in range(cells)]
        assert len(figure.axes) == cells
        (legend,) = figure.legends or [figure.axes[panels].get_legend()]
        assert len(legend.get_texts()) == 9
        assert legend.get_window_extent().width <= figure.bbox.width
        assert figure.get_suptitle() == ("title" if size is None else "")


@pytest.mark.parametrize(("name", "start"), [("c.png", b"\x89PNG"), ("c.pdf", b"%PDF-"), ("C.SVG", b"<?xml")])
def test_the_suffix_decides_the_format_and_the_bytes_can_be_had_again(name, start) -> None:
    figures = [comparison_figure(curves(2), "e", "", ["exchanges"], (3.3, 2.4)) for _ in range(2)]
    written = [encoded(figure, Path(name)) for figure in figures]
    assert written[0].startswith(start)
    assert written[0] == written[1]
    if name == "c.pdf":  # of 3.3 by 2.4 inches of 72 points, in TrueType
        assert re.search(rb"/MediaBox \[ ?0 0 237\.6 172\.8 ?\]", written[0])
        assert b"/Type3" not in written[0]


@pytest.mark.parametrize("name", ["c.jpg", "c", "png"])
def test_another_suffix_is_refused(name) -> None:
    with pytest.raises(ConfigurationError, match=r"ends in \.png, \.pdf, \.svg"):
        encoded(comparison_figure(curves(2), "e", "", ["exchanges"]), Path(name))
