"""In the example of four hospitals, do a simulation and a federation use the same agreed columns?"""

import runpy
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hospital_files
from fedbilevel.data import loaders
from fedbilevel.estimators import Preparer
from fedbilevel.experiments import federation, load_run, read_spec, run
from fedbilevel.experiments.runner import task_of
from fedbilevel.flower.launch.in_process import InProcess

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "four-hospitals"
NAMES = ("cleveland", "hungarian", "switzerland", "va")


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return a copy of the example with invented patients, in which make_data.py and agree.py have run.

    All slopes are missing, and some cholesterol values.
    """
    hospital_files.write(tmp_path, monkeypatch, loaders.HOSPITALS)
    place = shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("data", "runs", "__pycache__"))
    monkeypatch.chdir(place)
    for file in ("make_data.py", "agree.py"):
        runpy.run_path(file, run_name="__main__")
    return place


@pytest.mark.slow
def test_each_reads_its_own_folder_and_the_agreed_columns(example, tmp_path):
    """A federation whose hospitals read only their own folders gives the numbers of a simulation."""
    spec = read_spec("spec.toml").replace(run={"rounds": 3, "eval_every": 3})
    run(spec, tmp_path / "simulation")

    def folder(owner, *kept):
        for file in ("columns.json", *kept):
            (tmp_path / owner).mkdir(exist_ok=True)
            shutil.copy(example / "data" / file, tmp_path / owner / file)
        return str(tmp_path / owner)

    grid = InProcess(federation.client_app(spec), 4)
    for context in grid.contexts.values():
        name = NAMES[context.node_config["partition-id"]]
        context.node_config["folder"] = folder(f"of-{name}", f"{name}.csv")
    server = spec.replace(task={"folder": folder("of-server", "test.csv")})
    federation.serve(server, grid, {"out": str(tmp_path / "federation")})
    a, b = (load_run(tmp_path / kind) for kind in ("simulation", "federation"))
    accuracies = [[row["test_accuracy.va"] for row in one.history.rows] for one in (a, b)]
    assert accuracies[0] == accuracies[1]
    with np.load(a.folder.result) as mine, np.load(b.folder.result) as theirs:
        for name in ("['x']['penalty']", "['y']"):
            np.testing.assert_allclose(mine[name], theirs[name], atol=1e-5)  # samples and their products are float32
            assert np.ptp(mine[name]) > 1e-3


def test_what_was_agreed_on_is_what_all_patients_in_one_place_give(example):
    """The agreed columns equal those of a preparer that sees the patients of all hospitals together.

    The agreement leaves out rare categories, but none of these categories is rare.
    """
    parts = [pd.read_csv(f"data/{name}.csv", na_values="?") for name in NAMES]
    everyone = pd.concat(parts)
    agreed, spec = Preparer.load("data/columns.json"), read_spec("spec.toml")
    expected = Preparer(categorical=[*spec.task.fields["categorical"], "disease"]).fit_transform(everyone)
    pd.testing.assert_frame_equal(agreed.transform(everyone), expected, rtol=1e-12, atol=1e-12)
    assert expected.shape == (613, 22)  # of the columns, two are indicators of the target
    ours = task_of(spec).clients.inner.row(3)["row"]
    features = expected.drop(columns=["disease_0", "disease_1"]).to_numpy()[-len(parts[3]) :]
    np.testing.assert_allclose(ours, np.hstack([features, np.tile([0, 0, 0, 1, 1], (len(parts[3]), 1))]), atol=1e-6)


def test_the_tutorial_quotes_the_example():
    page = (ROOT / "docs" / "tutorials" / "hospitals.md").read_text("utf-8")
    quoted = [block.split("```", 1)[0] for block in page.split("```text\n")[1:]]
    code = "".join((EXAMPLE / file).read_text("utf-8") for file in ("agree.py", "spec.toml"))
    assert len(quoted) >= 2
    assert [line for block in quoted for line in block.splitlines() if line not in code.splitlines()] == []
