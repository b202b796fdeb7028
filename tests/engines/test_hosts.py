"""Do several processes, each with its own share of the clients, compute what one process computes?

The processes are real ones, on the loopback. Sums over processes have another order than in one process;
test_agreement.py says why states agree to 1e-12.
"""

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import host_worker
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.errors import CheckpointError, ConfigurationError
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.multihost import LOST, SLURM, check_reachable, join
from fedbilevel.engines.process_group import PIECE, KeyValueStore, LostProcess, ProcessGroup
from refusals import raises_with, refuses

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
SECONDS = 480  # a process that hangs is ended after this time
PORTS = iter(range(21000 + os.getpid() % 900, 22000))


def free_port():
    """Return a port at which no process listens."""
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


def start(processes, folder, jobs):
    """Start the processes, and return them."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "4",
    }
    where = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, host_worker.__file__, where, str(processes), str(k), str(folder), json.dumps(jobs)],
            env=environment,
            start_new_session=True,
            **PIPES,
        )
        for k in range(processes)
    ]


def ends(started):
    """Return (exit code, standard output, standard error) of each process."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def play(processes, folder, jobs):
    """Run the jobs on several processes; return a function (name, process) -> {leaf: array}."""
    for code, _, error in ends(start(processes, folder, jobs)):
        assert code == 0, error
    return lambda name, process=0: dict(np.load(folder / f"{name}.{process}.npz"))


def alone(job):
    """Run a job in this process, and return the same as `play`."""
    _, function, arguments = job
    leaves = jax.tree_util.tree_leaves_with_path(getattr(host_worker, function)(**arguments))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_agree(computed, expected):
    assert computed.keys() == expected.keys()
    for name, want in expected.items():
        if want.dtype.kind == "U":
            assert computed[name] == want
        else:
            np.testing.assert_allclose(computed[name], want, rtol=1e-12, atol=1e-12, err_msg=name)


AGREEMENT = [
    ["state", "agreement", {"case": "two phases, a loop, client state", "engine": {"devices": 2, "stream": True}}],
]
MORE = [
    ["length", "agreement", {"case": "FedMBO, fresh cohorts", "engine": {"chunk": 2}}],
    ["work", "agreement", {"case": "SimFBO, work of each client", "engine": {}}],
    ["resident", "agreement", {"case": "two phases, a loop, client state", "engine": {"devices": 2}}],
    ["streamed", "agreement", {"case": "FedNest, random lengths, fresh cohorts", "engine": {"stream": True}}],
    ["random", "agreement", {"case": "ShroFBO, ragged full batches, random work", "engine": {"chunk": 2}}],
    ["fresh", "agreement", {"case": "FedNest, random lengths, fresh cohorts", "engine": {"devices": 2}}],
]
REFUSED = {"function": "solved", "rounds": 8}
DIVERGES = {"rounds": 4, "checkpoint": None, "lr": 1e60}


@pytest.fixture(scope="module")
def vain():
    """Start process 0 of two, without the other one, and return it.

    JAX waits for the other process for 5 s more than it is asked to. The tests in between do not wait.
    """
    code = f"from fedbilevel.engines.multihost import join; join('127.0.0.1:{free_port()}', 2, 0, patience=1)"
    process = subprocess.Popen([sys.executable, "-c", code], **PIPES)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def two(tmp_path_factory, vain):
    """Run on two processes all jobs of the tests below; return the folder of their files and the outcomes."""
    folder = tmp_path_factory.mktemp("two")
    host_worker.solved(4, folder / "of-one.npz")
    jobs = [
        *AGREEMENT,
        ["said", "said", {"file": str(folder / "long"), "size": 3 * PIECE + 5}],
        ["stop", "solved", {"rounds": 8, "checkpoint": str(folder / "of-two.npz"), "stop_at": 4}],
        ["resume", "solved", {"rounds": 8, "checkpoint": str(folder / "of-one.npz"), "resume": True}],
        ["failed", "refused", {**REFUSED, "checkpoint": str(folder / "failed.npz"), "fail_at": 4}],
        ["differ", "refused", {**REFUSED, "checkpoint": None, "differ": True}],
        ["taken", "refused", {**REFUSED, "checkpoint": str(folder / "of-two.npz")}],
        ["unwritten", "refused", {**REFUSED, "checkpoint": str(folder / "long" / "no.npz")}],
    ]
    return folder, play(2, folder, jobs)


@pytest.mark.parametrize("job", AGREEMENT, ids=lambda job: job[0])
def test_two_processes_compute_what_one_does(two, job):
    _, outcome = two
    job = [*job[:2], {**job[2], "engine": {}}]
    assert_agree(outcome(job[0]), alone(job))
    for leaf, value in outcome(job[0]).items():
        np.testing.assert_array_equal(outcome(job[0], 1)[leaf], value)


def test_words_and_files_reach_every_process(two):
    _, outcome = two
    for process in range(2):
        heard = outcome("said", process)
        assert heard["['last']"].tolist() == [1, 1, 1]
        assert heard["['first']"] == 0
        assert np.array_equal(heard["['content']"], np.arange(3 * PIECE + 5, dtype=np.uint8))


def test_a_checkpoint_of_two_processes_is_resumed_by_one_and_the_other_way_round(two):
    folder, outcome = two
    unbroken = alone([None, "solved", {"rounds": 8, "checkpoint": None}])
    resumed = alone([None, "solved", {"rounds": 8, "checkpoint": folder / "of-two.npz", "resume": True}])
    assert_agree(resumed, unbroken)
    assert_agree(outcome("resume"), unbroken)
    assert_agree(outcome("resume", 1), unbroken)


def test_the_last_checkpoint_is_known_from_the_start_of_a_resumed_run_and_to_no_other(two):
    folder, _ = two
    checkpoint = folder / "kept.npz"
    alone([None, "solved", {"rounds": 2, "checkpoint": checkpoint}])
    alone([None, "solved", {"rounds": 4, "checkpoint": checkpoint, "resume": True}])
    assert host_worker.seen[0] == str(checkpoint)
    alone([None, "solved", {"rounds": 2, "checkpoint": None}])
    assert set(host_worker.seen) == {""}


def test_what_differs_or_process_0_refuses_is_the_error_of_both(two):
    folder, outcome = two
    said = {name: [str(outcome(name, k)["['error']"]) for k in range(2)] for name in ("differ", "taken", "unwritten")}
    assert said["differ"][0] == said["differ"][1]
    assert "key differs between processes: [0, 0] on process 0, [0, 1] on process 1" in said["differ"][0]
    taken = f"checkpoint = '{folder}/of-two.npz' is not allowed: it must be a new file, unless resume=True continues"
    assert taken in said["taken"][0]
    for name, kind in [("taken", "ConfigurationError"), ("unwritten", "CheckpointError")]:
        assert said[name][0].startswith(f"{kind}: ")
        assert said[name][1] == said[name][0].replace(": ", ": process 0: ", 1)


def ends_of(*codes):
    """Return `ends` of two processes that join and then run these lines."""
    imports = "import os, time; from unittest.mock import Mock; from fedbilevel.engines.multihost import join"
    join = f"{imports}; group = join('127.0.0.1:{free_port()}', 2, "
    lines = [f"{join} {process}, patience=60); {code}" for process, code in enumerate(codes)]
    return ends([subprocess.Popen([sys.executable, "-c", line], **PIPES) for line in lines])


@pytest.mark.slow
def test_an_error_that_nobody_catches_ends_both_with_what_it_says():
    said = ends_of("group.gather(0); {}['mine']", "group.gather(0); group.gather(0)")
    (code0, _, error0), (code1, _, error1) = said
    assert (code0, code1) == (1, LOST)
    assert "KeyError: 'mine'" in error0
    assert "LostProcess: process 0 has ended with KeyError: 'mine'; no checkpoint had been written" in error1


@pytest.mark.slow
def test_an_error_keeps_its_exit_code_though_process_0_ends_while_it_takes_leave(tmp_path):
    """A process with an error keeps its exit code, although process 0 ends while it says that it leaves.

    JAX's runtime then ends the process, from the thread that should bring the answer for which the process waits. Exit
    code 3 would mean that the runtime did not end it.
    """
    there = tmp_path / "there"
    until = f"all(time.sleep(0.01) is None for _ in iter(lambda: os.path.exists({str(there)!r}), True)); os._exit(0)"
    waits = f"lambda *_: (open({str(there)!r}, 'w').close(), time.sleep(60), os._exit(3))"
    parts = f"group.store.service = Mock(wait_at_barrier={waits}); group.part(2, 'mine')"
    said = ends_of(f"group.gather(0); {until}", f"group.gather(0); {parts}")
    assert [code for code, *_ in said] == [0, 2]


class Silent:
    """A store for the messages of three processes, whose connection is lost."""

    def blocking_key_value_get_bytes(self, key, milliseconds):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: gone")


def test_among_three_a_process_that_is_waited_for_is_not_blamed():
    with raises_with(LostProcess, "process 2"):
        ProcessGroup(KeyValueStore(Silent()), 3, 0)._hear(2)


def test_process_0s_error_reaches_the_others_without_words_and_with_its_kind(monkeypatch):
    said = []
    monkeypatch.setattr(ProcessGroup, "first", lambda self, word: said.append(json.loads(json.dumps(word))) or said[-1])
    for error in (AssertionError(), CheckpointError("full")):
        with pytest.raises(type(error)):
            ProcessGroup(None, 2, 0).decide(lambda error=error: (_ for _ in ()).throw(error))
    for kind, message in [(ConfigurationError, "process 0: AssertionError: "), (CheckpointError, "process 0: full")]:
        monkeypatch.setattr(ProcessGroup, "first", lambda self, word: said.pop(0))
        with pytest.raises(kind) as caught:
            ProcessGroup(None, 2, 1).decide(lambda: None)
        assert str(caught.value) == message


def test_hosts_that_take_their_own_name_for_loopback_are_refused():
    names = [["first", "10.0.0.1"], ["second", "127.0.1.1"]]
    with refuses("address of 'second' on the host of process 1", "127.0.1.1"):
        check_reachable("10.0.0.1:5678", names)
    check_reachable("127.0.0.1:5678", names)
    check_reachable("10.0.0.1:5678", [names[1], names[1]])  # on one host they reach each other at this address
    check_reachable("10.0.0.1:5678", [names[0], ["second", "10.0.0.2"]])


def test_a_callback_of_process_0_stops_all(two):
    _, outcome = two
    expected = alone([None, "solved", {"rounds": 8, "checkpoint": None, "stop_at": 4}])
    assert expected["['stopped']"] == "far enough"
    for process in range(2):
        assert_agree(outcome("stop", process), expected)


def test_where_a_callback_of_process_0_raises_all_of_them_save(two):
    folder, outcome = two
    errors = [str(outcome("failed", process)["['error']"]) for process in range(2)]
    assert all(error.endswith("no space for the picture") for error in errors)
    assert files.load_meta(folder / "failed.npz")["ledger"]["rounds"] == 4


@pytest.mark.slow
def test_more_cases_and_numbers_that_overflow_explained_alike(tmp_path):
    place = tmp_path / "run.npz"
    diverge = ["diverge", "refused", {"function": "solved", **DIVERGES, "checkpoint": str(place)}]
    outcome = play(2, tmp_path, [*MORE, diverge])
    for name, function, arguments in MORE:
        assert_agree(outcome(name, 1), alone([name, function, {**arguments, "engine": {}}]))
    expected = host_worker.refused("solved", **DIVERGES)["error"]
    assert "NonFiniteError: round 1, " in str(expected)
    assert files.load_meta(place)["ledger"]["rounds"] == 1
    for process in range(2):  # only one process knows which number grew first
        assert str(expected).startswith(str(outcome("diverge", process)["['error']"]))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_other_with_a_sentence(tmp_path, lost):
    checkpoint = tmp_path / "run.npz"
    job = ["long", "solved", {"rounds": 10_000_000, "checkpoint": str(checkpoint)}]
    started = start(2, tmp_path, [job])
    try:
        end = time.monotonic() + SECONDS
        while not checkpoint.exists():
            assert all(process.poll() is None for process in started)
            assert time.monotonic() < end
            time.sleep(0.05)
        first = checkpoint.stat().st_ino
        while checkpoint.stat().st_ino == first:  # at the second save, process 1 knows of the first one
            time.sleep(0.05)
        os.kill(started[lost].pid, signal.SIGKILL)
        code, _, error = ends(started)[1 - lost]
    finally:
        for process in started:
            process.kill()
    assert code == LOST
    assert f"process {lost} was lost (killed, crashed or cut off); the last checkpoint is {checkpoint}" in error
    assert Path(checkpoint).exists()


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (("nowhere", 2, 0), ("coordinator", "nowhere", "HOST:PORT")),
        (("host:99999", 2, 0), ("coordinator", "host:99999", "HOST:PORT")),
        (("127.0.0.1:1", 2, 2), ("process", 2, "0 to 1")),
        (("127.0.0.1:1", 2, None), ("process", None)),
        (("127.0.0.1:1", None, 0), ("processes", None)),
        (("auto", 2, 0), ("processes and process",)),
    ],
)
def test_bad_arguments_are_refused(arguments, refusal):
    with refuses(*refusal):
        join(*arguments)


AUTO = """
import json, os, sys
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.multihost import join

for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    try:
        join("auto", patience=1)
    except ConfigurationError as error:
        print(error)
    for name in variables:
        del os.environ[name]
"""


def test_auto_outside_of_a_launcher_is_refused_with_a_sentence(tmp_path):
    """`auto` without a launcher is refused with a sentence.

    The cases are: no job; ssh to a node of a Slurm job; the batch script of this job; wrong variables; and only some of
    Kubernetes' variables.
    """
    one = dict.fromkeys(SLURM, "1")
    batch = {name: value for name, value in one.items() if name != "SLURM_STEP_NODELIST"}
    wrong = {**one, "SLURM_NTASKS": "none"}
    (tmp_path / "kubernetes.py").write_text(
        "class ConfigException(Exception): pass\n"
        "def fail(): raise ConfigException('Service host/port is not set.')\n"
        "class config: load_incluster_config = fail\n"
    )
    places = [{}, {"SLURM_JOB_ID": "7"}, batch, wrong, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "KUBERNETES_"))}
    environment = {**clean, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", AUTO, json.dumps(places)]
    ((status, said, error),) = ends([subprocess.Popen(command, env=environment, **PIPES)])
    assert status == 0, error
    remedy = "give HOST:PORT, processes and process"
    missing = [", ".join(SLURM[1:]), "SLURM_STEP_NODELIST"]
    parts = [f"srun did not start this process of the Slurm job ({names} not set)" for names in missing]
    assert said.splitlines() == [
        f"coordinator = 'auto': no launcher that JAX knows was found; {remedy}",
        *(f"coordinator = 'auto': {part}: start it with srun, or {remedy}" for part in parts),
        "coordinator = 'auto': invalid literal for int() with base 10: 'none'",
        "coordinator = 'auto': Service host/port is not set.",
    ]


def test_a_coordinator_that_does_not_answer_and_a_port_in_use_are_named():
    free = f"127.0.0.1:{free_port()}"
    with refuses("coordinator", free, "in 1 s"):
        join(free, 2, 1, patience=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        with refuses("coordinator", port, os.strerror(errno.EADDRINUSE)):
            join(port, 2, 0)


def test_a_name_that_nobody_knows_is_refused_at_once(monkeypatch):
    def unknown(*where, **how):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    with refuses("coordinator", "mistyped:5678", "Name or service not known"):
        join("mistyped:5678", 2, 1)


def test_joining_comes_before_jax_is_used():
    jnp.zeros(1).block_until_ready()
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    own = ctypes.cast(ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None), ctypes.c_void_p).value
    before = library.signal(signal.SIGABRT, own)
    try:
        with refuses("join", "after JAX"):
            join(f"127.0.0.1:{free_port()}", 2, 0)
    finally:
        left = library.signal(signal.SIGABRT, before)
    assert left == own  # the handler of a failed join is removed


def test_processes_that_do_not_come_are_a_sentence(vain):
    ((status, _, error),) = ends([vain])
    assert status == LOST
    assert "the 2 processes did not all come to 127.0.0.1" in error
    assert "fedbilevel: waiting up to 1 s for the 2 processes to come to 127.0.0.1" in error
