"""Run a site: a SuperNode that keeps its worker process between messages, and is restarted if it fails.

    python -m fedbilevel.flower.launch.supernode --superlink HOST:PORT --root-certificates ca.crt \\
        --auth-supernode-private-key client.key --node-config "partition-id=0"

All options are options of `flower-supernode`, except `--app` and `--flower-log`. If this library was not tested with
the installed version of Flower, `flower-supernode` itself is started. That command starts a process for each message,
which is slower and gives the same numbers.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fedbilevel.errors import ConfigurationError
from fedbilevel.flower.launch import children
from fedbilevel.flower.versions import TESTED, require_flower, tested

FASTEST, SLOWEST = 0.02, 2.0  # the shortest and the longest time between two requests for a message, in seconds
BACKOFF = (1.0, 10.0)
STOPPED = "the site has stopped; to take part again, start it with the same command and the same state-folder"
STEADY = 60.0  # after a process has run for this many seconds, the wait before a restart is short again

logger = logging.getLogger("fedbilevel.supernode")


def interval(quiet: float) -> float:
    """Return the seconds to wait before the SuperLink is asked again, `quiet` seconds after the last message.

    The wait is a tenth of `quiet`, but at least FASTEST and at most SLOWEST. This makes the time between two messages
    at most a tenth longer, and the number of requests grows only with the logarithm of this time.
    """
    return min(max(quiet / 10, FASTEST), SLOWEST)


def flower_command(name: str) -> list[str]:
    """Return the path of a command of Flower, from the environment of this Python, as a list."""
    return [str(Path(sys.executable).parent / name)]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment `base`, with two defaults: no telemetry of Flower, and JAX's cache in the Flower home."""
    home = Path(base.get("FLWR_HOME") or Path.home() / ".flwr")
    defaults = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "JAX_COMPILATION_CACHE_DIR": str(home / "jax-compilation-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    scripts = str(Path(sys.executable).parent)  # Flower's commands call each other by name
    return {**defaults, **base, "PATH": os.pathsep.join([scripts, base.get("PATH", os.defpath)])}


def supervise(start: Callable[[], subprocess.Popen], backoff: tuple[float, float] = BACKOFF) -> int:
    """Start a process, and restart it whenever it ends, until SIGTERM or Ctrl-C. Then the log says how to go on.

    The wait before a restart doubles each time, and is short again after the process has run for STEADY seconds.

    Args:
        start: a function that starts the process.
        backoff: the shortest and the longest wait before a restart, in seconds.

    Returns:
        The exit status 2, if the process ends with it. This status means wrong arguments, so that the process is not
        restarted.
    """

    def leave(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        return restarted(start, backoff)
    except SystemExit:
        logger.info(STOPPED)
        raise


def restarted(start: Callable[[], subprocess.Popen], backoff: tuple[float, float]) -> int:
    """Start a process, and restart it whenever it ends; return 2 if it ends with this status (see `supervise`)."""
    wait = backoff[0]
    while True:
        began, child = time.monotonic(), start()
        try:
            status = child.wait()
        finally:
            end(child)
        if status == 2:
            return 2
        wait = backoff[0] if time.monotonic() - began > STEADY else wait
        logger.warning("the SuperNode ended with status %d: restarting it in %.0f s", status, wait)
        time.sleep(wait)
        wait = min(2 * wait, backoff[1])


def end(child: subprocess.Popen) -> None:
    """Ask a process to end, and kill it if it does not."""
    child.terminate()
    try:
        child.wait(children.GRACE / 2)
    except subprocess.TimeoutExpired:
        child.kill()


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return (the options of this program, the arguments for `flower-supernode`)."""
    parser = argparse.ArgumentParser(
        prog="python -m fedbilevel.flower.launch.supernode",
        description="Run a SuperNode with a worker that stays. Further options are those of `flower-supernode`.",
        allow_abbrev=False,
    )
    parser.add_argument("--app", metavar="MODULE:NAME", help="reply with this app, and never run the app of a run")
    parser.add_argument("--flower-log", action="store_true", help="also log Flower's own lines")
    options, passed = parser.parse_known_args(arguments)
    if any(name.split("=")[0] == "--isolation" for name in passed):
        parser.error("--isolation is not allowed: this program sets it")
    return options, passed


def command(arguments: list[str], version: str) -> list[str]:
    """Return the command of the SuperNode: that of this library, or `flower-supernode` for an untested Flower."""
    options, passed = parse(arguments)
    if tested(version):
        return [sys.executable, "-m", __spec__.name, "serve", options.app or "", "all" * options.flower_log, *passed]
    tried = ", ".join(TESTED)
    if options.app:
        allowed = f"left out with Flower {version}"
        message = f"--app needs a tested version of Flower ({tried}): with {version}, any run's app would be executed"
        raise ConfigurationError(path="--app", got=options.app, allowed=allowed, message=message)
    logger.warning("Flower %s was not tested (%s were tested): starting flower-supernode", version, tried)
    return [*flower_command("flower-supernode"), *passed]


def main() -> None:
    """Supervise the SuperNode; or, in the child process with the argument "serve", run the SuperNode itself."""
    if sys.argv[1:2] == ["serve"]:
        from fedbilevel.flower.launch import private

        app, flower_log, *passed = sys.argv[2:]
        private.run_supernode(passed, interval, app or None, bool(flower_log))
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        words = command(sys.argv[1:], require_flower())
    except ConfigurationError as error:
        sys.exit(f"fedbilevel: {error}")
    sys.exit(supervise(partial(children.spawn, words, env=environment(os.environ), group=False)))


if __name__ == "__main__":
    main()
