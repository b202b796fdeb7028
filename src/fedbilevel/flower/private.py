"""Everything that is used of Flower without Flower promising it. No other module imports such a name.

Tried with the versions of `versions.TESTED`; `supernode` starts Flower's own command where another one is installed.

`Node` is what a worker asks of its SuperNode: the calls that `flwr-clientapp` makes for one message, over one
connection that stays. `run_supernode` is the command `flower-supernode`, with its three fixed sleeps gone:

- a worker's question for a task is answered when there is one (instead of every second);
- a reply leaves when the worker has finished (instead of up to half a second later);
- the SuperLink is asked often after a message and seldom in quiet times (instead of every three seconds).
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import flwr.supernode.start_client_internal as supernode_loop
from flwr.app import Context, Error, Message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_project_dir
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, AcquireTaskResponse, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.cli import flower_supernode
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output
from flwr.supernode.servicer.runtime import runtime_handlers

HOLD = 5.0  # seconds that a worker's question for a task stays open
PATIENCE = 3  # times as long as the SuperLink took for its answer is waited at least: many nodes must not drown it
BACKOFF = 0.02  # seconds before an object that is still being uploaded is asked for again, first time
LONGEST_PULL = 7200.0  # seconds that one message's objects are waited for; Flower's own figure


class TaskToken:
    """Adds the current task's token to every request of a connection; none between tasks."""

    def __init__(self) -> None:
        self.current: RuntimeTokenHttpInterceptor | None = None

    def intercept(self, context, call_next):  # type: ignore[no-untyped-def]
        """Pass the request on, with the token."""
        current = self.current
        return call_next(context) if current is None else current.intercept(context, call_next)


class Node:
    """A worker's door to its SuperNode. One task at a time; only `beat` may be called from another thread.

    A request that fails raises (httpx.HTTPError); nothing is retried for ever, so that a worker does not outlive its
    SuperNode.
    """

    def __init__(self, address: str, root_certificates: Path | None) -> None:
        self.token = TaskToken()
        self.client = RuntimeHttpClient.from_server_address(
            server_address=address,
            insecure=root_certificates is None,
            root_certificates=None if root_certificates is None else root_certificates.read_bytes(),
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), self.token],
        )

    def acquire(self) -> bool:
        """Ask for a task; whether there is one. Returns after at most HOLD seconds where the SuperNode is ours."""
        self.token.current = None
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP], agentapp_fab_hashes=[])
        response = self.client.AcquireTask(request)
        if not (response.HasField("task") and response.token):
            return False
        self.token.current = RuntimeTokenHttpInterceptor(response.token)
        return True

    def pull(self) -> tuple[Message, Context, Run, Fab]:
        """What the task is: the message, the client's context, the run and its app."""
        return pull_task_input(self.client)

    def push(self, reply: Message, context: Context) -> None:
        """Deliver the reply to the SuperNode."""
        push_message(self.client, reply, context)

    def finish(self, context: Context | None, failure: str) -> None:
        """End the task: the context is kept for the client's next message; "" means that nothing failed."""
        push_task_output(self.client, context, SubStatus.FAILED if failure else SubStatus.COMPLETED, failure)

    def beat(self) -> bool:
        """Say that the task is still being worked on; False when nobody waits for it any more."""
        return bool(self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success)

    def close(self) -> None:
        """Close the connection."""
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


def quick_pulls(longest: float = LONGEST_PULL) -> None:
    """Ask for an object that is still on its way again after 0.02 s, then twice that, … (Flower: 1 s), and give up the
    message whose objects have not come within `longest` seconds: it holds everyone who waits."""
    defaults = inflatable_utils.pull_objects.__kwdefaults__
    assert defaults is not None
    defaults |= {"initial_backoff": BACKOFF, "max_time": longest}


class Meeting:
    """Where the SuperNode's loop and its one worker wait for each other, instead of asking again and again.

    The loop sleeps in three places: 3 s when the SuperLink had no message, 0.5 s while a message is being worked on,
    0.5 s while the content of a reply is not complete. `sleep` takes their place. `acquire` and `finish` take the place
    of the handlers of the worker's requests.
    """

    def __init__(self, interval: Callable[[float], float], acquire: Callable, finish: Callable) -> None:
        self.interval, self.stock_acquire, self.stock_finish = interval, acquire, finish
        self.open = threading.Event()  # the message is complete: the worker may take its task
        self.done = threading.Event()  # the worker has finished it
        self.asking = 0
        self.last = self.woken = time.monotonic()  # the last message; the end of the last sleep
        self.incomplete = False

    def sleep(self, seconds: float) -> None:
        """What the loop calls instead of time.sleep."""
        if seconds >= 1:
            now = time.monotonic()
            time.sleep(max(self.interval(now - self.last), PATIENCE * (now - self.woken)))
            self.woken = time.monotonic()
            return
        caller = inspect.currentframe().f_back.f_code.co_name  # type: ignore[union-attr]
        if caller == "yield_object_contents":
            if self.incomplete and self.asking:  # the worker wants the next task: the rest will never come
                raise TimeoutError("the worker did not deliver its whole reply")
            self.incomplete = self.asking > 0
        else:
            self.open.set()
        self.done.wait(seconds)
        self.done.clear()
        self.open.clear()
        self.last = self.woken = time.monotonic()

    def acquire(self, request: AcquireTaskRequest, state: InMemoryNodeState) -> AcquireTaskResponse:
        """Answer a worker when there is a task. It is the only one: what it had before and did not finish is lost."""
        with state.lock_task_store:
            for record in state.task_token_store.values():
                record.active_until = datetime.fromtimestamp(0, UTC)
        self.asking += 1
        try:
            if not self.open.wait(HOLD):
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


def run_supernode(arguments: list[str], interval: Callable[[float], float]) -> None:
    """Run `flower-supernode` with `arguments` until it ends.

    Args:
        interval: how many seconds to wait before asking the SuperLink again, given the seconds since the last message.
    """
    meeting = Meeting(interval, runtime_handlers.acquire_task, runtime_handlers.push_task_output)
    vars(runtime_handlers).update(acquire_task=meeting.acquire, push_task_output=meeting.finish)
    vars(supernode_loop).update(time=types.SimpleNamespace(sleep=meeting.sleep))
    quick_pulls()
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
