"""The names of Flower's processes that are used without Flower promising them; `versions` has those of messages.

No other module imports such a name.

Tried with the versions of `versions.TESTED`; `supernode` starts Flower's own command where another one is installed.

`SuperNodeConnection` is a worker's connection to its SuperNode: the calls that `flwr-clientapp` makes for one message,
over one connection that stays. `run_supernode` is the command `flower-supernode`, with its three fixed sleeps gone:

- a worker's question for a task is replied to when there is one (instead of every second);
- a reply leaves when the worker has finished (instead of up to half a second later);
- the SuperLink is asked often after a message and seldom in quiet times (instead of every three seconds);

and with nothing left of a run that is over: its task is not handed out, nobody waits for the rest of its message, and
a worker that still computes for it is let go.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_project_dir
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    AcquireTaskResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.exit import register_signal_handlers
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedbilevel.flower.versions import quick_pulls

if TYPE_CHECKING:
    from flwr.supercore.object_store import ObjectStore
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

HOLD = 5.0  # seconds that a worker's question for a task stays open
PATIENCE = 3  # times as long as the SuperLink took for its reply is waited at least: many nodes must not drown it
ALIVE = 10.0  # seconds between two questions whether the run that a worker computes for goes on
OPEN = (Status.PENDING, Status.STARTING, Status.RUNNING)  # states of a task that is not finished

logger = logging.getLogger("fedbilevel.supernode")


class TaskToken:
    """Adds the current task's token to every request of a connection; none between tasks."""

    def __init__(self) -> None:
        self.current: RuntimeTokenHttpInterceptor | None = None

    def intercept(self, context, call_next):  # type: ignore[no-untyped-def]
        current = self.current
        return call_next(context) if current is None else current.intercept(context, call_next)


class SuperNodeClient(RuntimeHttpClient):
    """Flower's connection of an app to its SuperNode, which waits for a message no longer than the message is worth."""

    def PullMessages(self, request: PullAppMessagesRequest) -> PullAppMessagesResponse:
        """The messages of the current task, without their content, which is pulled next."""
        response = super().PullMessages(request)
        for message in response.messages_list:
            quick_pulls(message.metadata.ttl)
        return response


class SuperNodeConnection:
    """A worker's door to its SuperNode. One task at a time; only `beat` may be called from another thread.

    A request that fails raises (httpx.HTTPError); nothing is retried for ever, so that a worker does not outlive its
    SuperNode.
    """

    def __init__(self, address: str, root_certificates: Path | None) -> None:
        self.token = TaskToken()
        self.client = SuperNodeClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=None if root_certificates is None else root_certificates.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), self.token],
        )

    def acquire(self) -> bool:
        """Ask for a task; True if there is one. Returns after at most HOLD seconds where `run_supernode` is running."""
        self.token.current = None
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP], agentapp_fab_hashes=[])
        response = self.client.AcquireTask(request)
        if not (response.HasField("task") and response.token):
            return False
        self.token.current = RuntimeTokenHttpInterceptor(response.token)
        return True

    def pull(self) -> tuple[Message, Context, Run, Fab]:
        """The current task: its message, the client's context, the run and its app."""
        return pull_task_input(self.client)

    def push(self, reply: Message, context: Context) -> None:
        push_message(self.client, reply, context)

    def finish(self, context: Context | None, failure: str) -> None:
        """End the task: the context is kept for the client's next message; "" means that nothing failed."""
        push_task_output(self.client, context, SubStatus.FAILED if failure else SubStatus.COMPLETED, failure)

    def beat(self) -> bool:
        """Say that the task is still being worked on; False when nobody waits for it any more.

        The SuperNode knows only the tokens of tasks that are not finished, and treats others as strangers.
        """
        try:
            return bool(self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                return False
            raise

    def close(self) -> None:
        self.client.close()


def load(run: Run, fab: Fab) -> tuple[ClientApp, Path]:
    """Install the run's app where Flower does and import its ClientApp: (app, its directory)."""
    install_from_fab(fab.content, skip_prompt=True)
    find = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return find(run.fab_id, run.fab_version, fab.hash_str), get_project_dir(run.fab_id, run.fab_version, fab.hash_str)


def error_reply(message: Message, error: Exception) -> Message:
    """The reply that says why there is none, with the code that Flower gives for it. Only the kind of the error: its
    text may name files, or data."""
    unloadable = isinstance(error, LoadClientAppError)
    code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION if unloadable else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return Message(Error(code=code, reason=type(error).__name__), reply_to=message)


def discard(state: InMemoryNodeState, store: ObjectStore, statuses: Sequence[str]) -> None:
    """Drop all messages of a SuperNode with their objects, and finish its tasks of these states as failed."""
    for task in state.get_tasks(statuses=statuses):
        logger.warning("a task of run %d is skipped: nobody waits for its reply", task.run_id)
        state.finish_task(task.task_id, sub_status=SubStatus.FAILED, details="nobody waits for its reply")
    with state.lock_msg_store:
        left = list(state.msg_store)
    state.delete_messages(message_ids=left)
    for message in left:
        store.delete(message)


class Rendezvous:
    """Where the SuperNode's loop and its one worker wait for each other, instead of asking again and again.

    The loop has two steps, which `pull` and `push` take the place of: receive a message, and send the worker's reply.
    It sleeps in three places: 3 s when the SuperLink had no message, 0.5 s while a message is being worked on, 0.5 s
    while the content of a reply is not complete. `sleep` takes their place. `acquire` and `finish` take the place of
    the handlers of the worker's requests.
    """

    def __init__(
        self, interval: Callable[[float], float], acquire: Callable, finish: Callable, pull: Callable, push: Callable
    ) -> None:
        self.interval, self.stock_acquire, self.stock_finish = interval, acquire, finish
        self.stock_pull, self.stock_push = pull, push
        self.open = threading.Event()  # the message is complete: the worker may take its task
        self.done = threading.Event()  # the worker has finished it
        self.asking = 0
        self.last = self.woken = time.monotonic()  # the last message; the end of the last sleep
        self.incomplete = self.closed = False
        self.get_run: Callable[[Any], object] = lambda run: None  # asks the SuperLink
        self.run: int | None = None  # of the current message
        self.checked = 0.0  # when the run was last known to go on

    def pull(self, **parts: Any) -> int | None:
        """Receive the next message: its run, None when there is none. No earlier message is left to be worked on.

        Where a run ends while a message of it is being received, Flower leaves the message's task, and a worker takes
        the oldest task first.
        """
        discard(parts["state"], parts["object_store"], [Status.PENDING])

        def receive() -> Any:
            received = parts["receive"]()
            if received is not None:
                quick_pulls(received[0].metadata.ttl)
            return received

        self.run = self.stock_pull(**parts | {"receive": receive})
        self.get_run, self.checked = parts["get_run"], time.monotonic()
        return self.run

    def push(self, **parts: Any) -> None:
        try:
            self.stock_push(**parts)
        except RunNotRunningException:
            discard(parts["state"], parts["object_store"], OPEN)

    def sleep(self, seconds: float) -> None:
        """What the loop calls instead of time.sleep: in quiet times, with `seconds` the most that a slow SuperLink is
        left in peace; while the worker computes, with the run looked after."""
        if seconds >= 1:
            now = time.monotonic()
            time.sleep(max(self.interval(now - self.last), min(PATIENCE * (now - self.woken), seconds)))
            self.woken = time.monotonic()
            return
        caller = inspect.currentframe().f_back.f_code.co_name  # type: ignore[union-attr]
        if caller == "yield_object_contents":
            if self.incomplete and self.asking:  # the worker wants the next task: the rest will never come
                raise TimeoutError("the worker did not deliver its whole reply")
            self.incomplete = self.asking > 0
        else:
            self.check()
            self.open.set()
        self.done.wait(seconds)
        self.done.clear()
        self.open.clear()
        self.last = self.woken = time.monotonic()

    def check(self) -> None:
        """Ask the SuperLink now and then whether the current message's run goes on; RunNotRunningException if not."""
        if time.monotonic() - self.checked > ALIVE:
            try:
                self.get_run(self.run)
            except httpx.HTTPError as error:  # no reply is not a no
                logger.warning("the SuperLink does not say whether run %s goes on: %s", self.run, type(error).__name__)
            self.checked = time.monotonic()

    def acquire(self, request: AcquireTaskRequest, state: InMemoryNodeState) -> AcquireTaskResponse:
        """Reply to a worker when there is a task. It is the only one: what it had before and did not finish is lost."""
        with state.lock_task_store:
            for record in state.task_token_store.values():
                record.active_until = datetime.fromtimestamp(0, UTC)
        self.asking += 1
        try:
            if not self.open.wait(HOLD) or self.closed:
                return AcquireTaskResponse()
            self.open.clear()
            return self.stock_acquire(request, state)
        finally:
            self.asking -= 1

    def finish(self, *arguments: object) -> object:
        """End a task, and let the loop send the reply."""
        response = self.stock_finish(*arguments)
        self.done.set()
        return response

    def close(self) -> None:
        self.closed = True
        self.open.set()

    def register(self, **options: Any) -> None:
        """What the loop calls to end well at a signal. A second one, of a supervisor, does not interrupt the end."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # what Flower goes back to after the first
        register_signal_handlers(**options | {"exit_handlers": [self.close]})


def run_supernode(arguments: list[str], interval: Callable[[float], float]) -> None:
    """Run `flower-supernode` with `arguments` until it ends, and this process with it.

    Args:
        interval: how many seconds to wait before asking the SuperLink again, given the seconds since the last message.
    """
    # Here, because it takes seconds, and a SuperNode alone needs them.
    import flwr.supernode.start_client_internal as loop
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.servicer.runtime import runtime_handlers as handlers

    steps = loop._pull_and_store_message, loop._push_messages
    meeting = Rendezvous(interval, handlers.acquire_task, handlers.push_task_output, *steps)
    vars(handlers).update(acquire_task=meeting.acquire, push_task_output=meeting.finish)
    vars(loop).update(_pull_and_store_message=meeting.pull, _push_messages=meeting.push)
    vars(loop).update(time=types.SimpleNamespace(sleep=meeting.sleep), register_signal_handlers=meeting.register)
    sys.argv = ["flower-supernode", *arguments]
    try:
        flower_supernode()
    except Exception:
        logger.exception("the SuperNode's loop has failed")
    logger.error("the SuperNode's loop has ended")  # its server's thread would keep the process
    os._exit(1)
