"""Run a SuperNode whose ClientApp stays in memory between messages, in a worker process.

`flower-supernode` starts a process for every message, and sleeps up to 3.5 s for each. This module keeps Flower's
command line, its connection to the SuperLink, and its steps that receive a message and send the reply. It replaces only
`start_client_internal`, the function that the command calls last. A message that was received goes to a worker process,
which returns the whole reply. The two processes are connected by a pipe. The pipe has no address, so that no other
process can reach it. It needs no tokens and no polling, and nothing is pickled. Each process notices at once when the
other process has ended.

The worker, `python -m fedbilevel.flower.launch.private`, replies to all messages of a client, so that JAX, data and
compiled programs stay in memory. If a message causes an error, the reply reports the error, and the worker continues.
When the SuperNode ends, the worker ends at once, even during a computation: a restarted SuperNode has a worker of its
own, and two workers must not write the state of one client.

This module imports private names of Flower. It was tested with the versions of Flower in `versions.TESTED`.
"""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import click
import httpx
from flwr.app import Context, Error, Message
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_project_dir
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE, ErrorCode, Status, SubStatus
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    fab_from_proto,
    fab_to_proto,
    message_from_proto,
    message_to_proto,
    run_from_proto,
    run_to_proto,
)
from flwr.proto.fab_pb2 import Fab as FabProto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.run_pb2 import Run as RunProto
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType

from fedbilevel.errors import CheckpointError, ConfigurationError, FedbilevelError
from fedbilevel.extending import printable, require
from fedbilevel.flower.launch.connection import why_unreached
from fedbilevel.flower.versions import quick_pulls

PATIENCE = 3  # the wait before the next request, in response times of the SuperLink, so that it is not overloaded
LONGEST = 3.0  # the longest wait before the next request, in seconds, which is Flower's default
STILL_ONLINE = (
    "the SuperLink regards another SuperNode with this key as online. If the other SuperNode was killed or cut off, "
    f"this one is accepted after at most {HEARTBEAT_PATIENCE * HEARTBEAT_DEFAULT_INTERVAL} s; otherwise stop the other"
)
ALIVE = 10.0  # the seconds between two checks whether the worker's run is still going on

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"

logger = logging.getLogger("fedbilevel.supernode")


def send(pipe: Connection, parts: Sequence[bytes]) -> None:
    """Send byte strings over a pipe, without pickling: first their number, then each of them."""
    pipe.send_bytes(len(parts).to_bytes(4))
    for part in parts:
        pipe.send_bytes(part)


def receive(pipe: Connection) -> list[bytes]:
    """Return the byte strings that `send` has sent.

    Raises:
        EOFError, OSError: the process at the other end has ended.
    """
    return [pipe.recv_bytes() for _ in range(int.from_bytes(pipe.recv_bytes(4)))]


class PipedWorker:
    """A process that runs the ClientApp. It is started for the first message, and again if it has ended.

    Args:
        app: the ClientApp that replies, "package.module:NAME"; None: the app of the run.
    """

    def __init__(self, app: str | None) -> None:
        self.app = app
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None

    def start(self) -> Connection:
        """Start the process unless it is running. Wait until it is ready, and return the pipe to it.

        Raises:
            EOFError: the process has ended before it was ready.
        """
        if self.process is not None and self.process.poll() is None and self.pipe is not None:
            return self.pipe
        self.stop()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __spec__.name, str(theirs.fileno()), *([self.app] if self.app else [])]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.pipe = Connection(ours.detach())
        receive(self.pipe)
        return self.pipe

    def reply(self, request: list[bytes], goes_on: Callable[[], object]) -> list[bytes]:
        """Send a request to the worker and return its answer, in the form of `answer`.

        Args:
            request: the request, in the form of `request_of`.
            goes_on: called every ALIVE seconds while the worker computes; if it raises, the worker is ended.

        Raises:
            EOFError, OSError: the worker has ended.
        """
        try:
            pipe = self.start()
            send(pipe, request)
            while not pipe.poll(ALIVE):
                goes_on()
            return receive(pipe)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the worker, if it is running."""
        if self.pipe is not None:
            self.pipe.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = self.pipe = None


def log_warnings() -> None:
    """Write warnings to the log: warnings of this library as one line of text, all others with their line of code."""
    usual = warnings.formatwarning

    def in_a_line(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = category.__module__.startswith("fedbilevel.")
        return printable(str(message), None) if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = in_a_line
    logging.captureWarnings(True)


def begin_log(level: int, flower_log: bool = False) -> None:
    """Write the log of this process to its standard error, each line once.

    Args:
        level: the least level of lines.
        flower_log: whether the log also has Flower's own lines, and not only Flower's warnings and errors.
    """
    logging.basicConfig(level=level, format=FORMAT)
    flower = logging.getLogger("flwr")
    flower.setLevel(
        min((handler.level for handler in flower.handlers), default=logging.INFO)
    )  # FLWR_LOG_LEVEL, or INFO
    flower.handlers.clear()  # with a handler of its own, Flower would log each line twice
    if not flower_log:
        hush()


def hush() -> None:
    """Reduce what Flower and its server write to this process's log to warnings and errors."""
    for name in ("flwr", "uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.WARNING)


def run_supernode(
    arguments: list[str], interval: Callable[[float], float], app: str | None = None, flower_log: bool = False
) -> None:
    """Run `flower-supernode` until it ends, and then end this process.

    Args:
        arguments: the arguments of `flower-supernode`.
        interval: a function (seconds since the last message) -> seconds to wait before the SuperLink is asked again.
        app: the ClientApp that replies, "package.module:NAME"; None: the app of the run.
        flower_log: whether the log also has Flower's own lines, about eight for each message.
    """
    begin_log(logging.WARNING, flower_log)
    logger.setLevel(logging.INFO)
    import flwr.supernode.start_client_internal as steps
    from flwr.supernode.cli import flower_supernode as command

    replying = PipedWorker(app)
    try:
        replying.start()  # at once, to find out whether the app exists
    except EOFError:
        sys.exit(replying.process.wait() if replying.process else 1)
    module = sys.modules[command.__module__]
    vars(module)["start_client_internal"] = lambda **given: serve(steps, replying, interval, **given)
    sys.argv, status = ["flower-supernode", *arguments], 1
    try:
        command()
    except (click.ClickException, FileNotFoundError) as error:  # wrong arguments
        logger.error("%s", error)
        status = 2
    except Exception:
        logger.exception("the SuperNode's loop has failed")
    replying.stop()
    os._exit(status)  # otherwise a thread of Flower's server would keep the process alive


CONNECTION = ["server_address", "insecure", "root_certificates", "authentication_keys", "max_retries", "max_wait_time"]


def serve(steps: Any, replying: PipedWorker, interval: Callable[[float], float], **given: Any) -> None:
    """Receive messages, let the worker reply, and send the replies, without end.

    This function replaces Flower's `start_client_internal`.
    """
    state, store = given["state_factory"].state(), given["state_factory"].objectstore_factory.store()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # Flower restores this handler after the first signal
    register_signal_handlers(
        event_type=EventType.RUN_SUPERNODE_LEAVE,
        exit_message="SuperNode terminated gracefully.",
        exit_handlers=[replying.stop],
    )
    keys = given["authentication_keys"]
    if why := why_unreached(given["server_address"], given["root_certificates"], keys and keys[0]):
        logger.warning("the SuperLink is not reached yet: %s", why)  # Flower tries again without logging the reason
    with ExitStack() as stack:
        try:
            connection = stack.enter_context(steps._init_connection(**{name: given[name] for name in CONNECTION}))
        except SystemExit as ended:
            if keys and not why and isinstance(ended.__context__, httpx.HTTPStatusError):  # Flower logs no reason
                logger.warning(STILL_ONLINE)
            raise
        node, pull_message, push_message, get_run, get_fab, pull_object, push_object, confirm = connection
        state.set_node_id(node)
        logger.info("connected to the SuperLink at %s, as node %d", given["server_address"], node)
        last = time.monotonic()

        def received() -> Any:
            found = pull_message()
            if found is not None:
                quick_pulls(found[0].metadata.ttl)
            return found

        parts = {
            "state": state,
            "object_store": store,
            "node_config": given["node_config"],
            "get_fab": get_fab,
            "pull_object": pull_object,
            "confirm_message_received": confirm,
            "trusted_entities": given["trusted_entities"],
        }
        while True:
            state.delete_messages()  # remaining messages belong to a run that has ended
            store.clear()
            began = time.monotonic()
            run = steps._pull_and_store_message(**parts, receive=received, get_run=get_run)
            if run is None:
                now = time.monotonic()
                time.sleep(max(interval(now - last), min(PATIENCE * (now - began), LONGEST)))
                continue
            for message in state.get_messages_legacy(run_ids=[run], is_reply=False):
                handle(replying, state, store, message, partial(check_run, get_run, run))
            if any(entry.message.metadata.reply_to_message_id for entry in list(state.msg_store.values())):
                steps._push_messages(state=state, object_store=store, send=push_message, push_object=push_object)
            last = time.monotonic()


def check_run(get_run: Callable[[int], object], run: int) -> None:
    """Check with the SuperLink that a run is still going on.

    Raises:
        RunNotRunningException: the run has ended.
    """
    try:
        get_run(run)
    except httpx.HTTPError as error:  # no answer: assume that the run goes on
        logger.warning("the SuperLink did not report whether run %s goes on: %s", run, type(error).__name__)


def handle(replying: PipedWorker, state: Any, store: Any, message: Message, goes_on: Callable[[], object]) -> None:
    """Let the worker reply to a message, and store the whole reply for Flower's next step, which sends it."""
    number, run = message.metadata.message_id, state.get_run(message.metadata.run_id)
    context = state.get_run_series_context(run.series_id)
    state.record_message_processing_start(number)
    nodes = iterate_object_tree(store.get_object_tree(number))
    objects = {node.object_id: store.get(node.object_id) for node in nodes}
    try:
        parts = replying.reply(request_of(number, objects, context, run, state.get_fab(run.fab_hash)), goes_on)
    except RunNotRunningException:
        logger.warning("run %d has ended: stopping the worker that computed for it", run.run_id)
        store.delete(number)
        return
    except (EOFError, OSError) as error:
        ended = Message(Error(ErrorCode.CLIENT_APP_CRASHED, "the worker has ended"), reply_to=message)
        parts = answer(ended, context, f"the worker has ended: {type(error).__name__}")
    reply, tree, kept, failure, *contents = parts
    state.set_run_series_context(run.series_id, context_from_proto(ContextProto.FromString(kept)))
    state.record_message_processing_end(number)
    store.delete(number)
    state.store_message(message_from_proto(MessageProto.FromString(reply)))
    store.preregister(run.run_id, ObjectTree.FromString(tree))
    for name, content in by_name(contents).items():
        store.put(name, content)
    details = failure.decode() or "done by a persistent worker"
    for task in state.get_tasks(run_ids=[run.run_id], statuses=[Status.PENDING]):
        state.finish_task(task.task_id, sub_status=SubStatus.FAILED, details=details)


def in_turn(objects: Mapping[str, bytes]) -> list[bytes]:
    """Return a list in which each name is followed by its content; `by_name` reverses this."""
    return [part for name, content in objects.items() for part in (name.encode(), content)]


def by_name(parts: Sequence[bytes]) -> dict[str, bytes]:
    """Return name -> content from the list of `in_turn`."""
    return {name.decode(): content for name, content in zip(parts[::2], parts[1::2], strict=True)}


def request_of(number: str, objects: Mapping[str, bytes], context: Context, run: Run, fab: Fab) -> list[bytes]:
    """Return a request to the worker as byte strings: message id, context, run, app, and the message's objects."""
    about = context_to_proto(context), run_to_proto(run), fab_to_proto(fab)
    return [number.encode(), *(part.SerializeToString() for part in about), *in_turn(objects)]


def opened(request: Sequence[bytes]) -> tuple[Message, Context, Run, Fab]:
    """Return message, client's context, run and app from a request that `request_of` made."""
    number, *parts = request
    context = context_from_proto(ContextProto.FromString(parts[0]))
    run, fab = run_from_proto(RunProto.FromString(parts[1])), fab_from_proto(FabProto.FromString(parts[2]))
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run.run_id, context.node_id
    message: Any = inflate_object_from_contents(number.decode(), by_name(parts[3:]))
    message.metadata.__dict__["_message_id"] = number.decode()
    return message, context, run, fab


def answer(reply: Message, context: Context, failure: str) -> list[bytes]:
    """Return the worker's answer to the SuperNode, as a list of byte strings.

    The list has, in this order: the reply without its content, the tree of its objects, the context, the failure ("" if
    there is none), and the objects.
    """
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        tree = get_object_tree(reply)
        objects = {number: part.deflate() for number, part in get_all_nested_objects(reply).items()}
        bare = message_to_proto(remove_content_from_message(reply) if reply.has_content() else reply)
    about = bare, tree, context_to_proto(context)
    return [*(part.SerializeToString() for part in about), failure.encode(), *in_turn(objects)]


def load(run: Run, fab: Fab) -> tuple[ClientApp, Path]:
    """Install the run's app where Flower would install it, and import its ClientApp.

    Return the ClientApp and its directory.

    Raises:
        CheckpointError: the app cannot be installed, for example because the disk is full.
    """
    directory = get_project_dir(run.fab_id, run.fab_version, fab.hash_str)
    if not directory.exists():
        install(fab, directory)
    find = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return find(run.fab_id, run.fab_version, fab.hash_str), directory


def install(fab: Fab, directory: Path) -> None:
    """Install an app into another folder first, and rename this folder when the app is complete.

    Flower takes an app for installed as soon as its folder exists. If an installation ended early, on a full disk or by
    `kill -9`, the site could never run this app.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(
            prefix=".installing-", dir=directory.parent.parent, ignore_cleanup_errors=True
        ) as place:
            with redirect_stdout(io.StringIO()):  # Flower prints the path of the first folder, which is soon gone
                made = install_from_fab(fab.content, install_dir=Path(place), skip_prompt=True)
            os.rename(made, directory)
        logger.info("installed the app of the run at %s", directory)
    except OSError as error:
        number = error.errno
        if isinstance(error, shutil.Error) and (found := re.search(r"\[Errno (\d+)\]", str(error))):
            number = int(found[1])  # `shutil.copytree` raises the texts of errors
        why = str(error) if number is None else os.strerror(number)
        remedy = "free space on the disk of FLWR_HOME" if number == errno.ENOSPC else ""
        text = f"the app of the run cannot be installed: could not write {directory}: {why}"
        raise CheckpointError(text, path=directory, errno=number, remedy=remedy) from error


def error_reply(message: Message, error: Exception) -> Message:
    """Return a reply that reports an error, by Flower's code and the name of the error's class.

    The text of the error is left out, since it may name files or data. If the operating system refused a file, the
    reply also contains the system's reason.
    """
    unloadable = isinstance(error, LoadClientAppError)
    code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION if unloadable else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    reason = type(error).__name__
    if isinstance(error, CheckpointError) and error.errno is not None:
        reason += f": {os.strerror(error.errno)}"
    return Message(Error(code=code, reason=reason), reply_to=message)


AppSource = Callable[[Any, Any], Callable]
"""A function (run, the run's app as Flower delivers it) -> the ClientApp that replies to the run's messages."""


def pinned(reference: str) -> AppSource:
    """Return an `AppSource` that always returns the site's own app.

    The app of a run is never installed, imported or executed.

    Args:
        reference: the site's app, "package.module:NAME", in an installed package or in the working directory.

    Raises:
        ConfigurationError: there is no app of this name.
    """
    module, colon, name = reference.partition(":")
    require(bool(module and colon and name), "--app", reference, "package.module:NAME")
    sys.path.insert(0, str(Path.cwd()))
    try:
        app = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"--app {reference} cannot be loaded: {error}"
        allowed = "the name of an object that can be imported"
        raise ConfigurationError(path="--app", got=reference, allowed=allowed, message=message) from error
    require(callable(app), "--app", reference, "the name of a ClientApp")
    return lambda run, fab: app


class InstalledApps:
    """A loader of the apps of runs. An app with another hash replaces the present app in this process."""

    def __init__(self, load: Callable[[Any, Any], tuple[Callable, Path]]) -> None:
        self.load, self.hash, self.directory = load, "", Path()
        self.app: Callable | None = None

    def __call__(self, run: Any, fab: Any) -> Callable:
        """Return the ClientApp of a run. It is imported unless the previous message had the same app."""
        if self.app is not None and fab.hash_str == self.hash:
            return self.app
        if self.app is not None:  # forget its modules, so that another app of the same name can be imported
            for name, module in list(sys.modules.items()):
                if (file := getattr(module, "__file__", None)) and Path(file).is_relative_to(self.directory):
                    del sys.modules[name]
            sys.path[:] = [entry for entry in sys.path if entry != str(self.directory)]
        self.app = None  # if the next line fails, no app is loaded
        self.app, self.directory = self.load(run, fab)
        self.hash = fab.hash_str
        return self.app


def work(pipe: Connection, apps: AppSource, leave: Callable[[], object]) -> None:
    """Reply to all requests that come over a pipe, until the process at its other end has ended.

    Args:
        pipe: the pipe to the SuperNode.
        apps: returns the ClientApp for a request.
        leave: called in another thread as soon as the process at the other end of the pipe has ended.
    """
    requests: SimpleQueue[list[bytes] | None] = SimpleQueue()

    def listen() -> None:
        try:
            while True:
                requests.put(receive(pipe))
        except (EOFError, OSError):
            requests.put(None)
            leave()

    send(pipe, [])  # ready
    threading.Thread(target=listen, daemon=True).start()
    while (request := requests.get()) is not None:
        message, context, run, fab = opened(request)
        kind, failure = message.metadata.message_type, ""
        try:
            reply = apps(run, fab)(message=message, context=context)
            if not hasattr(reply, "metadata"):
                raise TypeError(f"the ClientApp returned {type(reply).__name__} for a {kind!r} message, not a Message")
        except Exception as error:
            if isinstance(error, FedbilevelError):
                logger.error("no reply: %s", error)
            else:
                logger.exception("type=%s failed", kind)
            failure, reply = f"{type(error).__name__}: {error}", error_reply(message, error)
        try:
            send(pipe, answer(reply, context, failure))
        except OSError:
            return


def main() -> None:
    """Reply to requests over the pipe whose file descriptor is the first argument.

    The second argument, if there is one, is the name of the app.
    """
    begin_log(logging.WARNING)
    logging.getLogger("fedbilevel").setLevel(logging.INFO)
    log_warnings()
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the SuperNode decides when this process ends
    number, *reference = sys.argv[1:]
    try:
        apps = pinned(reference[0]) if reference else InstalledApps(load)
    except ConfigurationError as error:
        print(f"fedbilevel: {error}", file=sys.stderr)
        sys.exit(2)  # wrong arguments
    work(Connection(int(number)), apps, lambda: os._exit(0))


if __name__ == "__main__":
    main()
