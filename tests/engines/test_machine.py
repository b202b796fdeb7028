"""Programs on disk serve later processes, and do not grow without bound."""

import os
import subprocess
import sys
import time

import pytest

import fedbilevel as fb
from fedbilevel.engines import machine

PROGRAM = """
import sys
import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic

fb.Local.keep_on_disk(sys.argv[1], megabytes=int(sys.argv[2]))
task = quadratic(clients=2)
fb.solve(fb.FedBiO(local_steps=1), task.problem, task.clients, task.x0, task.y0, rounds=1)
"""


def programs(folder, megabytes):
    """The files of the programs that are in the folder after a process used it."""
    subprocess.run([sys.executable, "-c", PROGRAM, str(folder), str(megabytes)], check=True)
    return {file.name for file in folder.glob("*-cache")}


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    first = programs(tmp_path, 100)
    assert first
    assert programs(tmp_path, 100) == first


@pytest.mark.parametrize("given", [0, -1, 1.5, "10"])
def test_a_bound_that_is_none_is_refused(given, tmp_path):
    with pytest.raises(fb.errors.ConfigurationError, match="megabytes"):
        fb.Local.keep_on_disk(tmp_path, megabytes=given)


def test_what_jax_is_told_by_the_environment_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    told = []
    monkeypatch.setattr(machine.jax.config, "update", lambda name, value: told.append(name))
    assert fb.Local.keep_on_disk() == tmp_path
    assert not {"jax_compilation_cache_dir", "jax_compilation_cache_max_size"} & set(told)


def test_the_missing_package_is_named_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fb.errors.ConfigurationError, match=r'filelock.*pip install "\.\[cli\]"'):
        fb.Local.keep_on_disk()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.jax.config, "update", lambda *_: None)
    for name, age in {"whole-cache": 100, "half-cache": 100, "new-cache": 1}.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "whole-atime").write_bytes(b"")
    fb.Local.keep_on_disk(tmp_path)
    assert {file.name for file in tmp_path.glob("*-cache")} == {"whole-cache", "new-cache"}
