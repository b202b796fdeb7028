"""Does `experiments.run_of` start, continue or read the run of a folder, so that no run is made twice?"""

from __future__ import annotations

import pytest

from fedbilevel import experiments
from fedbilevel.errors import CheckpointError
from fedbilevel.experiments import Folder, TaskCache, run_of
from fedbilevel.experiments.runner import task_of
from refusals import raises_with, refuses

SMALL = ["clients=3", "samples=[2, 2]", "dim_y=2", "run.rounds=6", "run.eval_every=2"]
SPEC = experiments.configure(task="quadratic", settings=SMALL)


def rows(history) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history.rows]


def never(spec):
    """Fail, since no run should begin."""
    raise AssertionError("nothing is to be played")


def test_it_is_started_continued_and_read(tmp_path) -> None:
    whole = rows(run_of(SPEC, tmp_path / "whole", task_of))

    def stop(result, row) -> None:
        if row and row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_of(SPEC, tmp_path / "part", task_of, callbacks=[stop])
    played = []
    assert rows(run_of(SPEC, tmp_path / "part", TaskCache(), callbacks=[lambda _, row: played.append(row)])) == whole
    assert min(row["round"] for row in played if row) == 2  # the run continues, and does not begin with round 0
    assert rows(run_of(SPEC, tmp_path / "part", never)) == whole


def test_files_with_which_no_run_can_go_on_are_no_failed_run(tmp_path) -> None:
    """Papers' figures count a ConfigurationError as a failed run of the method, so this must be another error."""
    run_of(SPEC, tmp_path / "run", task_of)
    place = Folder(tmp_path / "run")
    place.summary.unlink()
    for file in place.path.glob("checkpoint*.npz"):
        file.unlink()
    with raises_with(CheckpointError, path=place.path):
        run_of(SPEC, place.path, never)


def test_a_damaged_environment_is_refused(tmp_path) -> None:
    run_of(SPEC, tmp_path, task_of)
    for damage in ("{", "[]", '{"code": 3}'):
        Folder(tmp_path).environment.write_text(damage)
        with refuses("", fact="it is damaged", where=str(tmp_path / "environment.json")):
            run_of(SPEC, tmp_path, never)


@pytest.mark.slow
def test_another_text_of_ones_own_task_is_another_run(tmp_path) -> None:
    """If the file of a user's task has changed since a run began, the run is neither read nor continued."""
    own, text = tmp_path / "own.py", "from fedbilevel.tasks import quadratic\ndef mine(): return quadratic(clients=3)\n"
    own.write_text(text)
    spec = experiments.configure(task=f"{own}:mine", settings=["run.rounds=1", "run.eval_every=1"])
    run_of(spec, tmp_path / "run", task_of)
    own.write_text(text.replace("clients=3", "clients=4"))
    with raises_with(CheckpointError, path=tmp_path / "run", differences={"own.py": None}):
        run_of(spec, tmp_path / "run", never)
