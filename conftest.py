"""Prepare what every test needs before jax is imported: float64, two devices, and a folder for compiled programs."""

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
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of small products of NumPy wait in loops and slow others
os.environ["TERM"] = "xterm"  # tests of a dumb terminal set it themselves
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # if it is set, each process of a test compiles what it imports
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job in the background; some tests send this signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
quickly = [  # tests spend most time on compiling, and more than half of it on the emitters of fused loops
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_parallel_codegen_split_count=1",  # programs that are split, into up to 32 parts, take longer to compile
    *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),  # later versions do not have it
]
PROGRAMS = 500 * 10**6  # bytes of compiled programs that are kept between runs; one run compiles some 100 million
LARGE = 1.5 * 10**9  # bytes in use after a module, beyond which compiled programs are freed; imports alone take 0.6
UNCHECKED = (  # rooms whose tests run `solve`, but do not test its checks of the losses
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
    """Keep compiled programs between runs, and collect garbage less often.

    JAX's key of a compiled program depends on the program, the flags and the compiler. Python collected garbage 2,700
    times in 90 s, and JAX did so each time, too.
    """
    import jax

    gc.set_threshold(20_000, 20, 20)  # tracing makes many objects, and little garbage
    _share_contexts()
    kept = {
        "jax_compilation_cache_dir": str(_programs()),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
        "jax_traceback_in_locations_limit": 0,  # a traceback for each operation is 5 % of a solve that is compiled
    }
    for name, value in kept.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # also for processes that tests start


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one for each core, and at most 4, since each takes a gigabyte."""
    return min(os.cpu_count() or 1, 4)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the newest compiled programs, up to PROGRAMS bytes.

    If JAX bounded the folder itself, it would look at all programs for each new one.
    """
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
    """Return the folder of compiled programs.

    It is in the user's cache, so that a new clone finds what another clone has compiled. If there is no such folder, or
    it cannot be written, the folder is in this clone.
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
    """Lower many programs in one MLIR context.

    JAX makes a context for each program, and loads all dialects into it, which takes 4 ms.
    """
    from jax._src.interpreters import mlir

    make, kept = mlir.make_ir_context, threading.local()

    def shared() -> Any:
        kept.uses = getattr(kept, "uses", 0) + 1
        if kept.uses % 200 == 1:  # a context stores every type, constant and location of its programs
            kept.context = make()
        return kept.context

    mlir.make_ir_context = shared


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Skip a test that needs two devices if JAX_PLATFORMS=cuda,cpu finds one GPU; on a CPU there always are two."""
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
    """Write the bytecode of tests and of what they import, even if PYTHONDONTWRITEBYTECODE is set.

    scripts/bootstrap.py does so, too. In each worker, rewriting the assertions of all tests and compiling the tests
    takes half of the time of their collection.
    """
    as_set, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = as_set


def pytest_collection_finish() -> None:
    """Exclude all present objects from garbage collection, since what is imported by now stays to the end."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _flags_stay_as_they_are() -> Iterator[None]:
    """Remove what a command in this process has added to XLA_FLAGS, by `tune_cpu`, before JAX started.

    JAX reads these flags once, but hashes them into the key of every program. So all later programs would be compiled
    again, in this run and in the next one.
    """
    before = os.environ["XLA_FLAGS"]
    yield
    os.environ["XLA_FLAGS"] = before


@pytest.fixture(scope="module", autouse=True)
def _losses_are_not_checked(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, str, Any]]]:
    """Leave out the checks of the losses before and after each run in the rooms UNCHECKED, and yield these checks.

    Every problem needs programs of its own for the checks, which took a fifth of the time of tests of methods. Fixtures
    of a module run without the checks, too. The marker `checked` keeps them in a test or a file of these rooms.
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
        (PosedProblem, "uneven", lambda posed, end, spent: ""),
        (first_look, "first_look", lambda *arguments: None),  # sites and diagnostics call it in this module
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
    """Write a picture of one pixel for each figure of a command, in the rooms UNDRAWN, whose tests run commands.

    The figure is made as usual. Only its conversion into bytes is left out, which took a quarter of the time of a
    command. Tests in tests/display draw figures of all kinds. The marker `drawn` keeps the conversion for one test.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.relative_to(request.config.rootpath).as_posix().startswith(UNDRAWN):
            from fedbilevel.display import curves
            from fedbilevel.experiments import export, runner  # noqa: F401  export must import the real one

            for module in (curves, runner):  # each of them has the name `encoded`
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
            monkeypatch.setattr(module, "encoded", export.encoded)  # this name is never replaced


@pytest.fixture(scope="session", autouse=True)
def _files_are_not_forced_to_disk() -> Iterator[None]:
    """Leave out os.fsync, which waits for the disk some milliseconds at each of thousands of files.

    The files of a test need not survive a power failure. Tests of a full disk put a failing function in its place.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _heap_is_trimmed_after_modules_alone() -> Iterator[Any]:
    """Leave out `trim_heap` at the end of each run, and yield the function that finds the C library's malloc_trim.

    It returned memory that the next run needs again: 3 % of the time went into these calls and into page faults.
    """
    from fedbilevel.engines import machine

    find = machine._trim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_trim", lambda: None)
        yield find


@pytest.fixture(scope="module", autouse=True)
def _programs_go_after_their_module(_heap_is_trimmed_after_modules_alone: Any) -> Iterator[None]:
    """If LARGE bytes are in use after a module, return the memory that compiling took, or else free compiled programs.

    Kept to the end, they would take gigabytes in each process. Below LARGE bytes the programs stay, because most of
    them are single operations, which the next module needs again.
    """
    import jax

    yield
    trim = _heap_is_trimmed_after_modules_alone() or (lambda pad: None)
    if _resident() > LARGE:
        trim(0)
    if _resident() > LARGE:
        jax.clear_caches()
        gc.collect()  # otherwise most of their memory is in use until the next full collection
        trim(0)


def _resident() -> float:
    """Return the number of bytes that this process has in memory, or infinity if the system does not report it."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else float("inf")
