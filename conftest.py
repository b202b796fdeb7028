"""What every test needs before jax is imported: float64, two devices, one place for compiled programs."""

import base64
import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TERM"] = "xterm"  # what a dumb terminal shows is tested by name
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set, each process of a test compiles what it imports
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
quickly = [  # compiling is most of it, and the emitters of fused loops are more than half of compiling
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # cut into up to 32 parts, a program costs more to compile
    *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),  # unknown to later ones
]
PROGRAMS = 500 * 10**6  # bytes of compiled programs that are kept between runs; one run compiles some 100 million
UNCHECKED = (  # rooms of tests that run solve for other claims than about its checks of the losses
    "tests/algorithms/",
    "tests/core/",
    "tests/diagnostics/",
    "tests/display/",
    "tests/engines/",
    "tests/estimators/",
    "tests/experiments/",
    "tests/flower/",
    "tests/oracles/",
    "tests/sweeps/",
    "tests/tasks/",
    "tests/trackers/",
    "papers/tests/",
)
UNDRAWN = ("tests/experiments/", "tests/flower/", "tests/sweeps/", "tests/trackers/", "papers/tests/")
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)  # a PNG
os.environ["XLA_FLAGS"] = " ".join([*flags, *quickly, "--xla_force_host_platform_device_count=2"])


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs: JAX's key for one covers the program, the flags and the compiler.

    And look for garbage seldom: Python did it 2,700 times in 90 s, and JAX each time, too.
    """
    import jax

    gc.set_threshold(20_000, 20, 20)  # tracing makes many objects, and little garbage
    _share_contexts()
    kept = {
        "jax_compilation_cache_dir": str(_programs()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_traceback_in_locations_limit": 0,  # of each operation; 5 % of a solve that is compiled
    }
    for name, value in kept.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for processes of tests, too


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: a worker for each core, up to 4, since each takes a gigabyte."""
    return min(os.cpu_count() or 1, 4)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the newest of the compiled programs, up to PROGRAMS bytes; JAX itself would look at all for each new one."""
    if hasattr(session.config, "workerinput"):
        return
    room, files = PROGRAMS, []
    for file in _programs().iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            found = file.stat()
            files.append((found.st_mtime, found.st_size, file))
    for _, size, file in sorted(files, reverse=True):
        room -= size
        if room < 0:
            file.unlink(missing_ok=True)


def _programs() -> Path:
    """The folder of compiled programs: the user's, so that a new clone finds what another has compiled.

    Without a folder of the user's, or where nothing can be written there, it is one of this clone.
    """
    places = [os.environ.get("XDG_CACHE_HOME"), os.path.expanduser("~/.cache"), str(Path(__file__).parent / "build")]
    for place in filter(os.path.isabs, filter(None, places)):
        folder = Path(place) / "fedbilevel" / "tests"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise OSError("there is no folder for compiled programs")


def _share_contexts() -> None:
    """Lower many programs in one MLIR context: JAX makes one for each, and loads all dialects into it, in 4 ms."""
    from jax._src.interpreters import mlir

    make, kept = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % 200 == 1:  # a context keeps every type, constant and location that it has met
            kept.context = make()
        return kept.context

    mlir.make_ir_context = shared


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip what wants two devices where JAX_PLATFORMS=cuda,cpu finds one GPU; of a CPU there always are two."""
    import jax

    from fedbilevel.errors import ConfigurationError

    try:
        return (yield)
    except ConfigurationError as error:
        if jax.default_backend() == "cpu" or not str(error).startswith("Local.devices = 2"):
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the bytecode of tests and of what they import, whatever PYTHONDONTWRITEBYTECODE says, as bootstrap.py does.

    To rewrite the assertions of all tests and to compile them takes half of the time in which they are collected, in
    each worker.
    """
    as_set, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = as_set


def pytest_collection_finish() -> None:
    """What is imported by now stays: no need to look for garbage in it."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _flags_stay_as_they_are() -> Iterator[None]:
    """Take back what a command that ran here has added to XLA_FLAGS (`tune_cpu`).

    JAX reads them once, but hashes them into the key of every program: all later ones would be compiled again, here and
    in the next run.
    """
    before = os.environ["XLA_FLAGS"]
    yield
    os.environ["XLA_FLAGS"] = before


@pytest.fixture(scope="module", autouse=True)
def _losses_are_not_checked(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, str, Any]]]:
    """Leave out the checks of the losses before and after each run, in tests of what is in between, and yield them.

    Each problem has programs of its own for them, which took a fifth of the time of tests of methods. Fixtures of a
    module run without them, too. The marker `checked` keeps the checks in a test or a file of one of these rooms.
    """
    place = request.path.relative_to(request.config.rootpath).as_posix()
    if not place.startswith(UNCHECKED) or request.node.get_closest_marker("checked"):
        yield []
        return
    from fedbilevel.engines import first_look
    from fedbilevel.engines.posed import PosedProblem

    left_out = [
        (PosedProblem, "look", lambda posed, method: None),
        (PosedProblem, "ends", lambda posed, before, end, spent: None),
        (first_look, "first_look", lambda *arguments: None),  # sites and diagnoses call it there
    ]
    checks = [(owner, name, getattr(owner, name)) for owner, name, _ in left_out]
    with pytest.MonkeyPatch.context() as patch:
        for replacement in left_out:
            patch.setattr(*replacement)
        yield checks


@pytest.fixture(autouse=True)
def _losses_are_checked(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    _losses_are_not_checked: list[tuple[Any, str, Any]],
) -> None:
    """Check the losses in a test with the marker `checked`."""
    if request.node.get_closest_marker("checked"):
        for check in _losses_are_not_checked:
            monkeypatch.setattr(*check)


@pytest.fixture(scope="module", autouse=True)
def _pictures_are_not_drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write a picture of one pixel for each figure of a command, in rooms whose tests run commands.

    The figure is made as always, and only its last step to bytes is left out, which took a quarter of the time of a
    command. Tests in tests/display draw figures of all kinds, and the marker `drawn` keeps this step for one test.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(request.config.rootpath).as_posix().startswith(UNDRAWN):
            from fedbilevel.display import curves
            from fedbilevel.experiments import export, runner  # noqa: F401  export must import the real one

            for module in (curves, runner):  # each of them has this name
                patch.setattr(module, "encoded", lambda figure, file: curves.require_picture(file) or PIXEL)
        yield


@pytest.fixture(autouse=True)
def _a_picture_is_drawn(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _pictures_are_not_drawn: None
) -> None:
    """Draw pictures in a test with the marker `drawn`."""
    if request.node.get_closest_marker("drawn"):
        from fedbilevel.display import curves
        from fedbilevel.experiments import export, runner

        for module in (curves, runner):
            monkeypatch.setattr(module, "encoded", export.encoded)  # which is never replaced


@pytest.fixture(scope="module", autouse=True)
def _programs_go_after_their_module() -> Iterator[None]:
    """Compiled programs and the memory that compiling took: kept to the end they would be gigabytes in each process.

    Up to one gigabyte they stay: most are of single operations, which the next module needs again.
    """
    import jax

    from fedbilevel.engines import machine

    yield
    machine.trim_heap()
    if _resident() > 10**9:
        jax.clear_caches()
        machine.trim_heap()


def _resident() -> float:
    """Bytes that this process holds in memory; infinite where the system does not say so."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else float("inf")
