"""The process that replies to all messages of a client: JAX, data and compiled programs stay warm between them.

A SuperNode starts it (`private.PipedWorker`) and ends it. A message that cannot be replied to gets an error reply, and
the worker goes on. It ends at once, whatever it computes, when nobody is at the other end of its pipe: a SuperNode that
is started again has a worker of its own, and two must not write one client's state.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.flower.launch import private

logger = logging.getLogger("fedbilevel.worker")

AppSource = Callable[[Any, Any], Callable]
"""(run, its app as Flower delivers it) -> the ClientApp that replies to the run's messages."""


def pinned(reference: str) -> AppSource:
    """Find an app of the site's own, "package.module:NAME"; its package is installed, or in the working directory. The
    app that a run brings is never installed, imported or executed.

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
        """Import the ClientApp of `run`, unless the message before had the same app."""
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


def serve(pipe: Connection, apps: AppSource, leave: Callable[[], object]) -> None:
    """Reply to what comes over the pipe.

    Args:
        apps: where the ClientApp of a message is found.
        leave: called, in a thread of its own, as soon as nobody is at the other end.
    """
    requests: SimpleQueue[list[bytes] | None] = SimpleQueue()

    def listen() -> None:
        try:
            while True:
                requests.put(private.receive(pipe))
        except (EOFError, OSError):
            requests.put(None)
            leave()

    private.send(pipe, [])  # ready
    threading.Thread(target=listen, daemon=True).start()
    while (request := requests.get()) is not None:
        message, context, run, fab = private.opened(request)
        kind, failure = message.metadata.message_type, ""
        try:
            reply = apps(run, fab)(message=message, context=context)
            if not hasattr(reply, "metadata"):
                raise TypeError(f"the ClientApp returned {type(reply).__name__} for a {kind!r} message, not a Message")
        except Exception as error:
            logger.exception("type=%s failed", kind)
            failure, reply = f"{type(error).__name__}: {error}", private.error_reply(message, error)
        try:
            private.send(pipe, private.answer(reply, context, failure))
        except OSError:
            return


def main() -> None:
    """Serve the pipe whose number is the first argument, with the app that the second names, if there is a second."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("fedbilevel").setLevel(logging.INFO)
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the SuperNode decides
    number, *reference = sys.argv[1:]
    try:
        apps = pinned(reference[0]) if reference else InstalledApps(private.load)
    except ConfigurationError as error:
        print(f"fedbilevel: {error}", file=sys.stderr)
        sys.exit(2)  # called wrongly
    serve(Connection(int(number)), apps, lambda: os._exit(0))


if __name__ == "__main__":
    main()
