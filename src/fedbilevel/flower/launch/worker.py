"""One process that replies to all messages of a client: JAX, data and compiled programs stay warm between them.

`python -m fedbilevel.flower.launch.worker --address HOST:PORT` takes the place of `flower-superexec` beside a SuperNode
that was started with `--isolation process`; `fedbilevel.flower.launch.supernode` starts both. The app that a run brings
is executed unchanged; with `--app` the site's own app is executed in its place.

A message that cannot be replied to gets an error reply, and the worker goes on. It ends when its SuperNode has been out
of reach for PATIENCE seconds, on SIGTERM and Ctrl-C, and when a run is over while one of its messages is being worked
on: a computation cannot be interrupted, and the client should not work for nobody.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.flower.versions import require_flower

if TYPE_CHECKING:
    from fedbilevel.flower.launch.private import SuperNodeConnection

PATIENCE = 30.0  # seconds without a SuperNode
BEAT = 15.0  # seconds between two signs of life; a SuperNode gives a task up after 60
PUSHES = 3  # attempts to deliver a reply

logger = logging.getLogger("fedbilevel.worker")


AppSource = Callable[[Any, Any], Callable]
"""(run, its app as Flower delivers it) -> the ClientApp that replies to the run's messages."""


def pinned(reference: str) -> AppSource:
    """One app of the site's own, "package.module:NAME"; its package is installed, or in the working directory. The app
    that a run brings is never installed, imported or executed.

    Raises:
        ConfigurationError: there is none of that name.
    """
    module, colon, name = reference.partition(":")
    require(bool(module and colon and name), "--app", reference, "package.module:NAME")
    sys.path.insert(0, str(Path.cwd()))
    try:
        app = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--app {reference} cannot be loaded: {error}") from error
    require(callable(app), "--app", reference, "the name of a ClientApp")
    return lambda run, fab: app


class InstalledApps:
    """The app of the latest message. Another app, or another version of it, takes its place in this process."""

    def __init__(self, load: Callable[[Any, Any], tuple[Callable, Path]]) -> None:
        self.load, self.hash, self.directory = load, "", Path()
        self.app: Callable | None = None

    def __call__(self, run: Any, fab: Any) -> Callable:
        """The ClientApp of `run`, imported when the message before was for another one."""
        if self.app is not None and fab.hash_str == self.hash:
            return self.app
        if self.app is not None:
            forget(self.directory)
        self.app = None  # also when the next line fails
        self.app, self.directory = self.load(run, fab)
        self.hash = fab.hash_str
        return self.app


def forget(directory: Path) -> None:
    """Drop the modules imported from `directory`, so that another app's of the same name can be imported."""
    for name, module in list(sys.modules.items()):
        if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(directory):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry != str(directory)]


class Heartbeat:
    """Beats while a task is being worked on, so that a long one is not given up."""

    def __init__(self, node: SuperNodeConnection, abandoned: Callable[[], None], interval: float = BEAT) -> None:
        self.node, self.abandoned, self.interval = node, abandoned, interval
        self.lock, self.working = threading.Lock(), False
        threading.Thread(target=self.run, daemon=True, name="heartbeat").start()

    def set(self, working: bool) -> None:
        """Begin or end a task; waits for a beat under way."""
        with self.lock:
            self.working = working

    def run(self) -> None:
        while True:
            time.sleep(self.interval)
            with self.lock:
                if self.working and not self.alive():
                    self.abandoned()

    def alive(self) -> bool:
        """Whether the SuperNode still waits for the task; a beat that gets no reply counts as yes."""
        try:
            return self.node.beat()
        except Exception as error:  # noqa: BLE001 - the task itself will meet what is wrong with the connection
            logger.warning("heartbeat failed: %s", type(error).__name__)
            return True


def reply_to_next(
    node: SuperNodeConnection, apps: AppSource, error_reply: Callable[[Any, Exception], Any]
) -> tuple[Any, str]:
    """Work on the task just acquired. What goes wrong becomes an error reply, if there is a message to reply to.

    Returns:
        what the task ends with: the client's context, and what went wrong, "" for nothing.
    """
    start = time.perf_counter()
    message = context = None
    kind, failure = "unknown", ""
    times: dict[str, float] = {}

    def mark(stage: str) -> None:
        times[stage] = time.perf_counter() - start - sum(times.values())

    try:
        message, context, run, fab = node.pull()
        kind = message.metadata.message_type
        mark("pull")
        reply = apps(run, fab)(message=message, context=context)
        if not hasattr(reply, "metadata"):
            raise TypeError(f"the ClientApp returned {type(reply).__name__} for a {kind!r} message, not a Message")
        mark("app")
    except Exception as error:
        logger.exception("type=%s failed", kind)
        failure = f"{type(error).__name__}: {error}"
        reply = None if message is None else error_reply(message, error)
    if reply is not None:
        failure = deliver(node, reply, context) or failure
        mark("push")
    stages = " ".join(f"{stage}={seconds:.3f}" for stage, seconds in times.items())
    total = time.perf_counter() - start
    logger.info("type=%s outcome=%s seconds=%.3f %s", kind, "error" if failure else "reply", total, stages)
    return context, failure


def deliver(node: SuperNodeConnection, reply: Any, context: Any) -> str:
    """Push the reply, again where that fails: what went wrong in the end, "" for nothing.

    Flower refuses an object whose upload was announced anew in the meantime; announcing once more mends that.
    """
    failure = ""
    for attempt in range(1, PUSHES + 1):
        try:
            node.push(reply, context)
            return ""
        except Exception as error:  # noqa: BLE001 - reported; one reply must not end the worker
            failure = f"the reply could not be delivered: {type(error).__name__}: {error}"
            logger.warning("push attempt %d of %d failed: %s", attempt, PUSHES, type(error).__name__)
    return failure


def serve(
    node: SuperNodeConnection, apps: AppSource, error_reply: Callable[[Any, Exception], Any], patience: float = PATIENCE
) -> None:
    """Reply to messages until the SuperNode has been out of reach for `patience` seconds."""
    heart = Heartbeat(node, abandoned)
    reached, lost = time.monotonic(), False
    while time.monotonic() - reached < patience:
        asked = time.monotonic()
        try:
            found, lost = node.acquire(), False
            if found:
                heart.set(True)
                try:
                    ended = reply_to_next(node, apps, error_reply)
                finally:
                    heart.set(False)  # before the end: whoever has finished is as unknown as one who was given up
                node.finish(*ended)
            elif time.monotonic() - asked < 0.1:  # a SuperNode that does not hold the question open
                time.sleep(0.05)
            reached = time.monotonic()
        except Exception as error:  # noqa: BLE001 - a connection that comes back is used again
            if not lost:
                logger.warning("the SuperNode is out of reach: %s", type(error).__name__)
            lost = True
            time.sleep(0.5)
    logger.error("the SuperNode has been out of reach for %.0f s: the worker ends", patience)


def abandoned() -> None:
    """The run was stopped, or the SuperNode gave the task up: end this process, whatever it computes."""
    logger.warning("nobody waits for the current task any more: the worker ends")
    os._exit(75)


def main() -> None:
    """Run a worker until its SuperNode goes away."""
    parser = argparse.ArgumentParser(prog="python -m fedbilevel.flower.launch.worker", description=serve.__doc__)
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="of the SuperNode's runtime API")
    parser.add_argument("--root-certificates", type=Path, help="verify the SuperNode with these; without: no TLS")
    parser.add_argument("--app", metavar="MODULE:NAME", help="reply with this app, whatever app a run brings")
    options = parser.parse_args()
    require_flower()
    from fedbilevel.flower.launch import private

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("fedbilevel").setLevel(logging.INFO)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    try:
        apps: AppSource = pinned(options.app) if options.app else InstalledApps(private.load)
    except ConfigurationError as error:
        parser.error(str(error))
    serve(private.SuperNodeConnection(options.address, options.root_certificates), apps, private.error_reply)
    sys.exit(1)


if __name__ == "__main__":
    main()
