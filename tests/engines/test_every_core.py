"""Are all cores used without a setting, if this is faster, and does a resumed run give the same bits?"""

import json
import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines import checkpoint, machine
from fedbilevel.engines.engine import Cohort
from fedbilevel.engines.local.engine import CACHE, MUCH_STATE, Local, default_chunk, default_devices
from fedbilevel.engines.local.samples import in_place, replicate
from refusals import warns_with
from representatives import slow_but

LARGE = MUCH_STATE // 16 + 1  # numbers of four bytes: four clients then have more than MUCH_STATE
PROGRAM = """
import json, pathlib, sys, tempfile, warnings
import jax, jax.numpy as jnp, numpy as np
import fedbilevel as fb
from fedbilevel.engines import checkpoint, machine

machine.cores = lambda: 3
folder = pathlib.Path(tempfile.mkdtemp())

def said(make, size, clients=4):
    "Devices that JAX has, those of the run, and what was said."
    problem = fb.SingleLevel(lambda x, batch: ((x - batch.mean()) ** 2).sum())
    population = fb.Clients([np.full((1, 1), i, np.float32) for i in range(clients)])
    file = folder / f"{len(list(folder.iterdir()))}.npz"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x0 = make((size,), np.float32)
        fb.solve(fb.FedAvg(lr=0.1, batch_size=None), problem, population, x0, rounds=1, checkpoint=file)
    about = [str(one.message) for one in told if "cores" in str(one.message)]
    return jax.local_device_count(), checkpoint.load_meta(file)["devices"], about
"""


def told_by(lines, flags=""):
    """Return what a new process, in which JAX has not started, prints as JSON."""
    quick = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag and "eigen" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join([*quick, flags]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM + lines], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "flags", "found"),
    [
        (f"said(np.ones, {LARGE}), said(np.ones, 2)", "", [[3, 2, []], [3, 1, []]]),  # four clients: two on each device
        (f"said(np.ones, {LARGE}, clients=1), said(np.ones, {LARGE}, clients=1)", "", [[1, 1, []]] * 2),
        (f"said(np.ones, {LARGE})", "--xla_force_host_platform_device_count=2", [2, 2, []]),
        (f"fb.tune_cpu(1), said(np.ones, {LARGE})", "", [None, [1, 1, []]]),
        (f"fb.tune_cpu(), said(jnp.ones, {LARGE})", "", [None, [3, 2, []]]),
    ],
)
def test_a_first_computation_has_every_core(calls, flags, found):
    assert told_by(f"print(json.dumps(({calls})))", flags) == found


@pytest.mark.slow
def test_where_jax_has_started_a_sentence_says_once_what_would_be_faster():
    calls = f"said(jnp.ones, 2), said(jnp.ones, {LARGE}), said(jnp.ones, {LARGE})"
    tiny, large, again = told_by(f"print(json.dumps(({calls})))")
    assert tiny == again == [1, 1, []]
    (text,) = large[2]
    assert "fb.tune_cpu() before the first array" in text
    assert "all 3 cores" in text


HIDDEN = LARGE // 64 + 1
COMMAND = f"""
from fedbilevel.cli import main
main("run --set task.hidden=[{HIDDEN}] --rounds 1 --cohort 6 --quiet --out FOLDER".split())
"""
IN_PYTHON = f"""
from fedbilevel import experiments
task = {{"name": "hyper_representation", "hidden": [{HIDDEN}]}}
spec = experiments.resolve({{"task": task, "algorithm": "simfbo", "run": {{"rounds": 1, "cohort": 6}}}})
experiments.run(spec, "FOLDER", plot=False, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lines", [COMMAND, IN_PYTHON])
def test_runs_of_specs_have_every_core(lines, tmp_path):
    lines = lines.replace("FOLDER", str(tmp_path / "run"))
    assert told_by(lines + "\nprint(jax.local_device_count())") == 3
    assert checkpoint.load_meta(tmp_path / "run" / "checkpoint.npz")["devices"] == 3


def solved(engine, rounds, **options):
    """Run with a model that is large enough for several devices; the clients pull it in different directions."""
    rows = np.random.default_rng(0).normal(size=(5, 3, LARGE)).astype(np.float32)
    problem = fb.SingleLevel(lambda x, batch: (jax.numpy.tanh(x - batch) ** 2).mean())
    arguments = fb.FedAvg(lr=30.0, batch_size=2), problem, fb.Clients(list(rows)), rows[0, 0]
    return fb.solve(*arguments, rounds=rounds, engine=engine, **options)


def test_results_lie_on_one_device_and_can_be_gone_on_from():
    end = solved(Local(), 1)
    assert end.x.sharding.device_set == {jax.devices()[0]}
    assert end.x + jax.device_put(end.x, jax.devices()[0]) is not None


@pytest.mark.parametrize(("first", "devices"), slow_but((Local(), 2), of=[(Local(), 2), (Local(devices=1), 1)]))
def test_a_run_is_resumed_on_as_many_devices_to_the_same_bits(first, devices, tmp_path):
    """A run is resumed on the number of devices with which it began, to the same bits.

    The tests' process has two devices.
    """
    file = tmp_path / "run.npz"
    solved(first, 2, checkpoint=file)
    assert checkpoint.load_meta(file)["devices"] == devices
    end = solved(Local(), 4, checkpoint=file, resume=True)
    assert checkpoint.load_meta(file)["devices"] == devices
    np.testing.assert_array_equal(end.x, solved(first, 4).x)


def test_where_fewer_devices_are_there_a_sentence_says_so(tmp_path, monkeypatch):
    file = tmp_path / "run.npz"
    solved(Local(), 2, checkpoint=file)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with warns_with(fb.errors.CheckpointWarning, " 2 devices and continues on 1"):
        end = solved(Local(), 4, checkpoint=file, resume=True)
    np.testing.assert_allclose(end.x, solved(Local(devices=2), 4).x, rtol=1e-5, atol=1e-6)


def test_devices_are_as_few_as_give_the_same_share(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    state = np.zeros(MUCH_STATE // 8 + 1, np.float32)
    assert [default_devices(state, Cohort(size)) for size in (1, 2, 8, 10, 17, 100)] == [1, 2, 8, 5, 6, 8]
    assert default_devices(state[1:], Cohort(2)) == 1


@pytest.mark.parametrize(
    ("share_of_cache", "share", "devices", "lumpy", "chunk"),
    [
        (0, 10, 2, False, 10),  # all of them
        (1e-3, 10, 2, True, 5),
        (0.1, 1000, 2, False, 10),
        (0.1, 1000, 1, False, 20),  # several cores work for the one device
        (0.1, 95, 2, False, 10),  # five of a hundred places are empty
        (0.3, 50, 2, False, 3),  # 51 places
        (0.3, 5, 2, False, 1),  # with chunks of three or two there would be six places
        (1.0, 50, 2, False, 1),
        (9.0, 50, 1, False, 1),
    ],
)
def test_as_many_clients_are_vectorised_as_a_cache_holds(share_of_cache, share, devices, lumpy, chunk):
    population = fb.Clients([np.ones((1, 1), np.float32)] * 2)
    state = np.zeros(int(CACHE * share_of_cache), np.uint8)
    assert default_chunk(state, population, share, devices, lumpy) == chunk


@pytest.mark.parametrize(
    ("state", "share", "steps", "chunk"),
    [
        (10**6, 200, None, 200),  # all of them
        (10**6, 1000, None, 250),  # 1 GB in four parts of less than 2²⁸ bytes
        (10**6, 100, [1, 2], 25),  # in quarters, since a chunk takes as long as its slowest client
        (10**6, 2000, [1, 2], 250),
        (2**29, 3, None, 1),
        (0, 5, None, 5),
    ],
)
def test_on_a_gpu_all_are_vectorised_whose_states_are_not_too_much(state, share, steps, chunk, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    population = fb.Clients([np.ones((1, 1), np.float32)] * 2, local_steps=steps)
    assert default_chunk(jax.ShapeDtypeStruct((state,), np.uint8), population, share, 1, False) == chunk


def test_devices_of_a_cpu_share_the_samples():
    mesh = jax.make_mesh((2,), ("clients",))
    rows = replicate(in_place({"image": np.ones((1000, 100), np.float32)}, mesh), mesh)["image"]
    assert len({shard.data.unsafe_buffer_pointer() for shard in rows.addressable_shards}) == 1


def test_nothing_is_said_where_the_user_chose_one_device(monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    machine.advise_of_cores.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.advise_of_cores()  # XLA_FLAGS of conftest.py sets the number of devices
