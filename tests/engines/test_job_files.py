"""Which command do the files for several hosts, examples/jobs, start, also after a run was stopped?

The programs of Slurm and Kubernetes are replaced by small ones that print their arguments.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from fedbilevel.cli import parser

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "jobs"
JOB = next(each for each in yaml.safe_load_all((FOLDER / "simulation.yaml").read_text()) if each["kind"] == "Job")
POD = JOB["spec"]["template"]["spec"]


@pytest.fixture
def started(tmp_path):
    """Return a function (kind of file, environment) -> the arguments with which the file starts `fedbilevel run`."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in {"srun": 'echo "$@"', "fedbilevel": 'echo fedbilevel "$@"', "getent": "exit 0"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)

    def start(kind, **variables):
        script = (FOLDER / "simulation.sbatch").read_text()
        if kind == "kubernetes":
            script = POD["containers"][0]["args"][0].replace("/runs/", f"{tmp_path}/runs/")
        environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **variables}
        shell = "bash" if kind == "slurm" else "sh"
        done = subprocess.run(
            [shell, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        words = shlex.split(done.stdout)
        return words[words.index("fedbilevel") + 1 :], words[: words.index("fedbilevel")]

    return start


PLACES = {
    "slurm": ({"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8"}, "runs/job-7"),
    "kubernetes": ({"JOB_COMPLETION_INDEX": "0"}, "runs/simulation"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_run_is_begun_resumed_and_begun_anew_where_it_has_no_checkpoint(kind, started, tmp_path):
    variables, place = PLACES[kind]
    run = tmp_path / place
    run.parent.mkdir()

    def options():
        return parser().parse_args(started(kind, **variables)[0])

    begun = options()
    assert (begun.task, begun.rounds, begun.resume) == ("hyper_representation", 500, None)
    assert (tmp_path / begun.out) == run
    run.mkdir()
    (run / "checkpoint.npz").touch()
    resumed = options()
    assert (resumed.task, resumed.rounds, tmp_path / resumed.resume) == (None, None, run)
    assert (resumed.coordinator, resumed.processes, resumed.process) == (
        begun.coordinator, begun.processes, begun.process
    )  # fmt: skip
    (run / "checkpoint.npz").unlink()
    assert options().resume is None
    assert not run.exists()  # the folder was renamed
    assert len(list(run.parent.iterdir())) == 1


def test_slurm_tells_every_process_its_place_and_no_loss_hides_what_is_said(started):
    variables, _ = PLACES["slurm"]
    arguments, before = started("slurm", **variables)
    assert before == ["--cpus-per-task=8", "--kill-on-bad-exit=0"]
    assert parser().parse_args(arguments).coordinator == "auto"
    said = started("slurm", **variables, RUN="runs/elsewhere")[0]
    assert said[said.index("--out") + 1] == "runs/elsewhere"


def test_pods_find_process_0_and_write_in_the_volume_alone(started, tmp_path):
    arguments, _ = started("kubernetes", JOB_COMPLETION_INDEX="3")
    options = parser().parse_args(arguments)
    assert (options.coordinator, options.processes, options.process) == ("simulation-0.simulation:5678", 4, 3)
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == options.processes
    assert options.coordinator.startswith(f"{JOB['metadata']['name']}-0.{POD['subdomain']}:")
    container = POD["containers"][0]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {each["mountPath"] for each in container["volumeMounts"]} == {"/runs", "/tmp"}
    (tmp_path / "runs" / "simulation").mkdir(parents=True)
    started("kubernetes", JOB_COMPLETION_INDEX="3")
    assert (tmp_path / "runs" / "simulation").exists()  # only process 0 renames it
