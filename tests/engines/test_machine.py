"""Do later processes use the programs on disk, and is the size of these programs bounded?"""

import contextlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import fedbilevel as fb
from fedbilevel.cli import main
from fedbilevel.engines import machine
from refusals import refuses
from representatives import slow_but

PROGRAM = """
import sys
import jax
import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic

seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event))
fb.Local.keep_on_disk(sys.argv[1], megabytes=int(sys.argv[2]))
task = quadratic(clients=2)
fb.solve(fb.FedBiO(local_steps=1), task.problem, task.clients, task.x0, task.y0, rounds=1)
print(*(seen.count("/jax/compilation_cache/cache_" + kind) for kind in ("hits", "misses")))
"""


def programs(folder, megabytes):
    """Return how many programs a process found in the folder, how many it compiled, and the files in it then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(megabytes)], check=True, capture_output=True, text=True
    )
    hits, misses = map(int, done.stdout.split()[-2:])
    return hits, misses, {file.name for file in folder.glob("*-cache")}


@pytest.mark.slow
def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    _, compiled, files = programs(tmp_path, 100)
    assert compiled > 0
    found, again, later = programs(tmp_path, 100)
    assert found >= compiled
    assert again == 0
    assert later == files


@pytest.fixture
def settings():
    """Return a function that reads JAX's cache settings, which are restored after the test."""
    names = [name for name in jax.config.values if "cache" in name]
    before = {name: jax.config.values[name] for name in names}
    yield lambda: {name: jax.config.values[name] for name in names}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_folder_may_change_after_something_was_compiled(tmp_path, settings):
    for folder, factor in {"first": 2.0, "second": 3.0}.items():
        assert fb.Local.keep_on_disk(tmp_path / folder) == tmp_path / folder
        jax.jit(lambda x, factor=factor: factor * x)(jnp.ones(7)).block_until_ready()
    assert all(any((tmp_path / folder).glob("*lambda*-cache")) for folder in ("first", "second"))


def test_a_run_that_compiles_names_the_call_that_keeps_programs_where_none_are_kept(tmp_path, settings):
    rows, stages = np.ones((3, 2)), []
    told = SimpleNamespace(stage=stages.append, advance=lambda *_: None, close=lambda: None)
    jax.config.update("jax_compilation_cache_dir", None)
    for keep in (lambda: None, lambda: fb.Local.keep_on_disk(tmp_path)):
        keep()
        fb.Local.forget()
        problem = fb.SingleLevel(lambda x, batch: x @ x)
        fb.solve(fb.FedAvg(), problem, fb.Clients([rows]), rows[0], rounds=1, progress=told)
    said = [stage for stage in stages if stage.startswith("compiling")]
    assert said == ["compiling (fb.Local.keep_on_disk() keeps it)", "compiling"]


def not_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "programs"


def test_a_folder_that_cannot_be_written_is_refused_and_changes_nothing(tmp_path, settings):
    before = settings()
    with refuses("", fact="Not a directory", where=str(tmp_path / "file" / "programs")):
        fb.Local.keep_on_disk(not_a_folder(tmp_path))
    assert settings() == before


def test_a_full_disk_no_space_and_a_missing_package_are_refused(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(machine.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    with refuses("", fact="No space left on device", where=str(tmp_path)):
        fb.Local.keep_on_disk(tmp_path)
    with refuses("megabytes", 0):
        fb.Local.keep_on_disk(tmp_path, megabytes=0)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with refuses("", fact='filelock, which is not installed: in a clone of the repository, pip install ".[cli]"'):
        fb.Local.keep_on_disk()


@pytest.mark.parametrize(
    "variable", slow_but("JAX_COMPILATION_CACHE_DIR", of=["XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"])
)
def test_a_command_goes_on_without_a_place_for_programs(variable, tmp_path, monkeypatch, settings, capsys):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, str(not_a_folder(tmp_path)))
    folder = tmp_path / "run"
    command = ["run", "quadratic", "--algorithm", "fedbio", "--rounds", "1", "--quiet", "--out", str(folder)]
    assert main(command) == 0
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert said.startswith(f"fedbilevel: warning: every process compiles its programs anew: {tmp_path}")
    assert "programs cannot be kept in this folder: " in said
    assert jax.config.jax_compilation_cache_dir is None


def test_what_jax_is_told_by_the_environment_comes_first_and_its_bound_stays(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    bound = jax.config.jax_compilation_cache_max_size
    assert fb.Local.keep_on_disk(megabytes=7) == tmp_path
    assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    assert jax.config.jax_compilation_cache_max_size == bound


def test_what_a_killed_process_left_half_written_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.jax.config, "update", lambda *_: None)
    for name, age in {"whole-cache": 100, "half-cache": 100, "new-cache": 1}.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "whole-atime").write_bytes(b"")
    fb.Local.keep_on_disk(tmp_path)
    assert {file.name for file in tmp_path.glob("*-cache")} == {"whole-cache", "new-cache"}


def solved_on(devices, cohort=None):
    rows = np.ones((1, 2))
    problem, engine = fb.SingleLevel(lambda x, batch: x @ x), fb.Local(devices=devices)
    return fb.solve(fb.FedAvg(), problem, fb.Clients([rows] * 9), rows[0], rounds=1, engine=engine, cohort=cohort)


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (
            lambda: fb.tune_cpu(8),
            ("devices", 8, "at most 2"),
        ),
        (lambda: solved_on(8), ("Local.devices", 8, "fb.tune_cpu")),
        (
            lambda: solved_on(2, cohort=1),
            ("Local.devices", 2, "at most 1"),
        ),
        (lambda: fb.tune_cpu(2), None),
    ],
)
def test_devices_that_are_not_there_are_said(call, refusal, monkeypatch):
    """An error says which devices are missing; the tests' process has two.

    The flags stay as they are: JAX has started, and would only not find compiled programs that it has kept on disk.
    """
    flags = os.environ["XLA_FLAGS"]
    monkeypatch.setenv("XLA_FLAGS", flags)
    jax.devices()
    with refuses(*refusal) if refusal else contextlib.nullcontext():
        call()
    assert os.environ["XLA_FLAGS"] == flags


def test_no_more_devices_are_presented_than_work_side_by_side(monkeypatch):
    """JAX presents at most as many devices as there are cores, and at most 8.

    With 512 devices on two cores, XLA's threads waited for each other without end.
    """
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(machine, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(machine, "_asked", [])
    most = max(machine.cores(), 8)
    fb.tune_cpu(most)
    with refuses("devices", most + 1, f"at most {most}"):
        fb.tune_cpu(most + 1)
