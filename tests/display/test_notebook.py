"""Does a Jupyter kernel show plots, a progress bar, and objects as tables?

The tests need nbclient and ipykernel, which `make notebooks` installs, and are skipped without them.
"""

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

RUN = """
import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
task = quadratic(clients=3, dim_x=2, dim_y=2)
result = fb.solve(fb.SimFBO(local_steps=1), task.problem, task.clients, task.x0, task.y0, rounds=40, eval_every=10)
"""
CELLS = {
    "run": RUN,
    "first plot": "result.plot()",
    "second plot": "result.plot(panel='rounds')",
    "two plots": "result.plot(size=(3, 2))\nresult.plot()",
    "the user's own": "from matplotlib import pyplot\npyplot.plot([1, 2]);",
    "result": "result",
    "clients": "task.clients",
}


@pytest.fixture(scope="module")
def shown():
    """Return the outputs of each cell of CELLS, run in a new kernel."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    book = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    return {name: cell.outputs for name, cell in zip(CELLS, book.cells, strict=True)}


@pytest.mark.parametrize(
    ("name", "pictures"), [("first plot", 1), ("second plot", 1), ("two plots", 2), ("the user's own", 1)]
)
def test_every_plot_is_shown(shown, name, pictures):
    assert sum("image/png" in output.get("data", ()) for output in shown[name]) == pictures


def test_a_run_shows_one_bar_and_nothing_else(shown):
    (bar,) = shown["run"]
    assert bar.data["text/plain"].startswith("round 40/40  ")
    assert bar.data["text/html"].startswith('<progress value="40" max="40">')


@pytest.mark.parametrize(("name", "words"), [("result", "40 of 40 rounds"), ("clients", "3 clients")])
def test_objects_are_shown_as_tables(shown, name, words):
    (output,) = shown[name]
    assert words in output.data["text/html"]
    assert "<table>" in output.data["text/html"]
