"""A site's processes: a SuperNode and a worker that stays, as one unit that is restarted when it fails.

    python -m fedbilevel.flower.launch.supernode --superlink HOST:PORT --root-certificates ca.crt \\
        --auth-supernode-private-key client.key --node-config "partition-id=0"

All options are those of `flower-supernode`, except `--fastest`, `--slowest` and `--app`. Where Flower is of a version
that was not tried, `flower-supernode` itself is started: one process per message, slower, same numbers.
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

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.flower.launch import children
from fedbilevel.flower.versions import TESTED, require_flower, tested

FASTEST, SLOWEST = 0.02, 2.0
BACKOFF = (1.0, 10.0)  # seconds before a restart: the first one, the longest
STEADY = 60.0  # seconds after which a process counts as having come up

logger = logging.getLogger("fedbilevel.supernode")


def interval(quiet: float, fastest: float = FASTEST, slowest: float = SLOWEST) -> float:
    """Seconds to wait before the SuperLink is asked again, `quiet` seconds after the last message.

    A tenth of the quiet time, within limits: a message waits at most a tenth longer than it took to come, and the
    number of questions grows with the logarithm of the time.
    """
    return min(max(quiet / 10, fastest), slowest)


def flower_command(name: str) -> list[str]:
    """A command of Flower's, from the environment that this Python runs in."""
    return [str(Path(sys.executable).parent / name)]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base`, with no news sent to Flower's makers and with JAX keeping compiled programs in the client's directory."""
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


def supervise(commands: Mapping[str, Callable[[], subprocess.Popen]], backoff: tuple[float, float] = BACKOFF) -> int:
    """Start the processes, start again what ends, each time after a longer wait, until SIGTERM or Ctrl-C.

    A process that ends with status 2 was called wrongly: everything ends with that status.

    Returns:
        exit status.
    """
    running: dict[str, subprocess.Popen] = {}
    due = dict.fromkeys(commands, 0.0)
    wait = dict.fromkeys(commands, backoff[0])
    began: dict[str, float] = {}

    def leave(*_: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        while True:
            now = time.monotonic()
            for name, start in commands.items():
                child = running.get(name)
                if child is None:
                    if now >= due[name]:
                        running[name], began[name] = start(), now
                elif (status := child.poll()) is not None:
                    if status == 2:
                        return 2
                    del running[name]
                    wait[name] = backoff[0] if now - began[name] > STEADY else wait[name]
                    logger.warning("%s ended with status %d: again in %.0f s", name, status, wait[name])
                    due[name], wait[name] = now + wait[name], min(2 * wait[name], backoff[1])
            time.sleep(0.1)
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            try:
                child.wait(children.GRACE / 2)
            except subprocess.TimeoutExpired:
                child.kill()


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our options and those of Flower's that concern the worker too, what is passed on to `flower-supernode`)."""
    parser = argparse.ArgumentParser(
        prog="python -m fedbilevel.flower.launch.supernode",
        description="A SuperNode with a worker that stays. Further options are those of `flower-supernode`.",
        allow_abbrev=False,
    )
    parser.add_argument("--fastest", type=float, default=FASTEST, help="seconds between questions after a message")
    parser.add_argument("--slowest", type=float, default=SLOWEST, help="seconds between questions in quiet times")
    parser.add_argument("--host", default="127.0.0.1", help="where the worker finds the SuperNode")
    parser.add_argument("--port", type=int, default=9094, help="where the worker finds the SuperNode")
    parser.add_argument("--ssl-ca-certfile", help="with --ssl-certfile and --ssl-keyfile: TLS between the two")
    parser.add_argument("--app", metavar="MODULE:NAME", help="reply with this app, whatever app a run brings")
    options, passed = parser.parse_known_args(arguments)
    if not 0 < options.fastest <= options.slowest:
        parser.error("it must be 0 < --fastest <= --slowest")
    if any(name.split("=")[0] == "--isolation" for name in passed):
        parser.error("--isolation is chosen here: `process`, or Flower's default for a version that was not tried")
    passed += ["--host", options.host, "--port", str(options.port)]
    if options.ssl_ca_certfile:
        passed += ["--ssl-ca-certfile", options.ssl_ca_certfile]
    return options, passed


def processes(arguments: list[str], version: str) -> dict[str, list[str]]:
    """The commands of the unit, by name: SuperNode and worker, or only the stock SuperNode."""
    options, passed = parse(arguments)
    if not tested(version):
        if options.app:
            tried = ", ".join(TESTED)
            raise ConfigurationError(f"--app needs a Flower that was tried ({tried}); {version} would run any app")
        logger.warning("Flower %s was not tried (%s were): starting flower-supernode", version, ", ".join(TESTED))
        return {"supernode": [*flower_command("flower-supernode"), *passed]}
    polling = [str(options.fastest), str(options.slowest)]
    worker = [sys.executable, "-m", "fedbilevel.flower.launch.worker", "--address", f"{options.host}:{options.port}"]
    if options.ssl_ca_certfile:
        worker += ["--root-certificates", options.ssl_ca_certfile]
    if options.app:
        worker += ["--app", options.app]
    return {
        "supernode": [sys.executable, "-m", __spec__.name, "serve", *polling, *passed, "--isolation", "process"],
        "worker": worker,
    }


def main() -> None:
    """Run the unit, or, as its child, the SuperNode alone."""
    if sys.argv[1:2] == ["serve"]:
        from fedbilevel.flower.launch import private

        fastest, slowest = map(float, sys.argv[2:4])
        private.run_supernode(sys.argv[4:], partial(interval, fastest=fastest, slowest=slowest))
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        commands = processes(sys.argv[1:], require_flower())
    except ConfigurationError as error:
        sys.exit(f"fedbilevel: {error}")
    env = environment(os.environ)
    sys.exit(supervise({name: partial(children.spawn, c, env=env, group=False) for name, c in commands.items()}))


if __name__ == "__main__":
    main()
