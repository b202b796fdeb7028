"""A spec has the same final state in our simulation, in Flower's simulation, and over SuperLink and SuperNodes."""

import json
import os
import time

import jax
import numpy as np
import pytest

from fedbilevel.experiments import configure, run
from fedbilevel.experiments.federation import write_app
from fedbilevel.flower.launch import children
from fedbilevel.flower.launch.processes import Console, Federation, flower_command, free_ports, listens
from fedbilevel.flower.launch.supernode import environment

pytestmark = pytest.mark.slow

CLIENTS = 3
SETTINGS = {
    "simfbo": ["local_steps=2"],
    "fednest": ["hypergradient.solver=cg", "hypergradient.solver.max_steps=3", "inner.rounds=1"],
    "fedmbo": ["inner.rounds=1", "hypergradient.solver=neumann", "hypergradient.solver.terms=2"],
}
TOLERANCES = {False: 1e-6, True: 1e-12}  # float32 and float64: relative and absolute, for a state of size 1


def spec_of(name):
    """Return a spec with three heterogeneous, weighted clients of unequal size, of which two are in a cohort."""
    task = [f"task.clients={CLIENTS}", "task.samples=[9, 14]", "run.cohort=2", "run.rounds=3", "run.eval_every=3"]
    return configure(task="quadratic", algorithm=name, settings=[*task, "batch_size=8", *SETTINGS[name]])


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "float64"])
def x64(request):
    return request.param


@pytest.fixture(scope="module")
def apps(tmp_path_factory):
    place = tmp_path_factory.mktemp("apps")
    for name in SETTINGS:
        write_app(spec_of(name), place / name)
    return place


@pytest.fixture(scope="module")
def expected(x64, tmp_path_factory):
    """Return the final states of runs of `Local`, by method."""
    place = tmp_path_factory.mktemp("local")
    with jax.enable_x64(x64):
        for name in SETTINGS:
            run(spec_of(name), place / name, plot=False)
    return {name: state(place / name) for name in SETTINGS}


@pytest.fixture(scope="module")
def deployment(x64, apps, tmp_path_factory):
    place = tmp_path_factory.mktemp("deployment")
    env = {"JAX_ENABLE_X64": str(int(x64)), "JAX_PLATFORMS": "cpu"}
    with Federation(place, CLIENTS, env=env) as federation:
        for name in SETTINGS:
            lines = list(federation.run(apps / name, f'out="{place / name}"', timeout=300))
            assert (place / name / "summary.json").exists(), "".join(lines)
    return place


@pytest.fixture(scope="module")
def simulation(x64, apps, tmp_path_factory):
    place = tmp_path_factory.mktemp("simulation")
    (port,) = free_ports(1)
    home = place / "home"
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.simulation]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    ray["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    floats = {"JAX_ENABLE_X64": str(int(x64)), "JAX_PLATFORMS": "cpu"}
    env = environment({**os.environ, **ray, **floats, "FLWR_HOME": str(home)})
    command = [*flower_command("flower-superlink"), "--insecure", "--simulation", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--disable-runtime-dependency-installation"]
    link = children.spawn(command, place / "superlink.log", env)
    console = Console(env, place)
    until = time.monotonic() + 60
    try:
        while not listens(port):
            assert time.monotonic() < until, "the SuperLink did not start"
            time.sleep(0.2)
        for name in SETTINGS:
            options = ["--federation-config", f"num-supernodes={CLIENTS} client-resources-num-cpus=1"]
            options += ["--run-config", f'out="{place / name}"', "--stream"]
            lines = list(console.lines("run", str(apps / name), "simulation", *options, timeout=400))
            assert (place / name / "summary.json").exists(), "".join(lines)
    finally:
        console.close()
        children.stop([link])
    return place


def state(folder):
    """Return all leaves of the server's state at the end of a run."""
    with np.load(folder / "checkpoint.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files if name.startswith(".state")}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("engine", ["deployment", "simulation"])
def test_the_same_state_after_three_rounds(name, engine, x64, expected, request):
    place = request.getfixturevalue(engine)
    mine, theirs = state(place / name), expected[name]
    assert mine.keys() == theirs.keys()
    assert len(mine) >= 2
    for leaf in mine:
        assert mine[leaf].dtype == theirs[leaf].dtype
        np.testing.assert_allclose(mine[leaf], theirs[leaf], rtol=TOLERANCES[x64], atol=TOLERANCES[x64], err_msg=leaf)
    answered = [json.loads(line)["answered"] for line in (place / name / "exchanges.jsonl").read_text().splitlines()]
    assert all(len(clients) == 2 for clients in answered)
