"""What is private to Flower: each name that is used is there and takes what it is given; and what is made of them.

A Flower that fails here is none for `versions.TESTED`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedbilevel.flower

flwr = pytest.importorskip("flwr")
httpx = pytest.importorskip("httpx")

from flwr.app import Message, RecordDict  # noqa: E402
from flwr.supercore.inflatable import inflatable_utils  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.object_store import ObjectStoreFactory  # noqa: E402
from flwr.supercore.run import Run, RunNotRunningException  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.supernode import start_client_internal as loop  # noqa: E402
from flwr.supernode.nodestate import NodeStateFactory  # noqa: E402
from flwr.supernode.servicer.runtime import runtime_handlers  # noqa: E402

from fedbilevel.flower import versions  # noqa: E402
from fedbilevel.flower.launch import private  # noqa: E402

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
ROOM = Path(fedbilevel.flower.__file__).parent


def imports(file: Path) -> set[tuple[str, str]]:
    """(module, name) of all that a file imports of Flower."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "flwr"}


# The names


def test_two_files_import_what_flower_does_not_promise() -> None:
    files = {
        str(file.relative_to(ROOM))
        for file in ROOM.rglob("*.py")
        for module, _ in imports(file)
        if module not in PUBLIC
    }
    assert files == {"launch/private.py", "versions.py"}


@pytest.mark.parametrize(
    ("module", "name"), sorted(imports(ROOM / "launch/private.py") | imports(ROOM / "versions.py"))
)
def test_a_name_is_there(module: str, name: str) -> None:
    there = importlib.import_module(module)
    assert not name or hasattr(there, name) or importlib.import_module(f"{module}.{name}")


STATE = "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState"
CLIENT = "flwr.supercore.runtime:RuntimeHttpClient"
SIGNATURES = {
    "flwr.cli.install:install_from_fab": "fab_file skip_prompt",
    "flwr.clientapp.utils:get_load_client_app_fn": "default_app_ref app_path multi_app",
    "flwr.common.config:get_project_dir": "fab_id fab_version fab_hash",
    "flwr.supercore.exit:register_signal_handlers": "event_type exit_message grpc_servers exit_handlers",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects": "object_ids pull_object_fn max_time initial_backoff",
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor.intercept": "self context call_next",
    f"{CLIENT}.from_server_address": "server_address insecure root_certificates interceptors",
    f"{CLIENT}.AcquireTask": "self request",
    f"{CLIENT}.SendTaskHeartbeat": "self request",
    f"{CLIENT}.PullMessages": "self request",
    "flwr.supernode.runtime.run_clientapp:pull_task_input": "client",
    "flwr.supernode.runtime.run_clientapp:push_message": "client message context",
    "flwr.supernode.runtime.run_clientapp:push_task_output": "client context sub_status details",
    "flwr.supernode.servicer.runtime.runtime_handlers:acquire_task": "request state",
    "flwr.supernode.servicer.runtime.runtime_handlers:push_task_output": "request state task",
    "flwr.supernode.start_client_internal:_pull_and_store_message": "state object_store receive get_run pull_object",
    "flwr.supernode.start_client_internal:_push_messages": "state object_store send push_object",
    "flwr.supernode.start_client_internal:register_signal_handlers": "event_type exit_message",
    "flwr.supernode.cli:flower_supernode": "",
    f"{STATE}.get_tasks": "self statuses",
    f"{STATE}.finish_task": "self task_id sub_status details",
    f"{STATE}.delete_messages": "self message_ids",
    "flwr.supercore.object_store:ObjectStore.delete": "self object_id",
}
"""What private.py calls, puts itself in the place of, or is called as: the parameters that it knows of."""


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_function_takes_what_it_is_given(place: str) -> None:
    module, _, path = place.partition(":")
    function: Any = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name)
    known, told = inspect.signature(function).parameters, SIGNATURES[place].split()
    assert [name for name in told if name not in known] == []
    required = [name for name, one in known.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if not path.startswith("_"):  # those are called by Flower, with what they need
        assert [name for name in required if name not in told] == []


def test_the_loop_sleeps_where_it_did_and_passes_its_parts_by_name() -> None:
    """What `Rendezvous.sleep` tells from the seconds and from the function, and what `pull` and `push` are given."""
    source = inspect.getsource(loop)
    sleeps = [line.strip() for line in source.splitlines() if "time.sleep(" in line]
    assert sleeps == ["time.sleep(3)", "time.sleep(0.5)", "time.sleep(0.5)"]
    assert "def yield_object_contents(" in inspect.getsource(loop._push_messages)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    steps = [call for call in calls if ast.unparse(call.func) in ("_pull_and_store_message", "_push_messages")]
    assert [(len(call.args), all(word.arg for word in call.keywords)) for call in steps] == [(0, True)] * 2


def test_fields_that_are_read_or_written_are_there() -> None:
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    for name in ("lock_task_store", "task_token_store", "lock_msg_store", "msg_store"):
        assert hasattr(state, name), name
    assert {"max_time", "initial_backoff"} <= set(inflatable_utils.pull_objects.__kwdefaults__ or {})
    versions.be_server()
    identity = TaskIdentity
    assert (identity.task_id, identity.run_id, identity.node_id) == (1, 1, 0)
    token = importlib.import_module("flwr.supercore.corestate.in_memory_corestate").TokenRecord
    assert "active_until" in inspect.signature(token).parameters


# What is made of them: a SuperNode's loop, with Flower's own steps and state, and a SuperLink made of functions

OLD, NEW = 11, 22  # runs


class Link:
    """A SuperLink: messages of runs, some of which are over; of some it never has the objects."""

    def __init__(self) -> None:
        versions.be_server()
        factory = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=factory).state()
        self.store = factory.store()
        self.state.set_node_id(5)
        for run in (OLD, NEW):
            known = Run.create_empty(run)
            known.series_id = run
            self.state.store_run(known)
        self.queue: list[Any] = []
        self.objects: dict[str, bytes] = {}
        self.over: set[int] = set()
        self.complete = True

    def message(self, run: int) -> Any:
        message = Message(RecordDict(), 5, "query.fedbilevel", ttl=0.05)
        message.metadata.__dict__["_run_id"] = run
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects |= {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
        return message

    def pull_object(self, run: int, number: str) -> bytes:
        if run in self.over:
            raise RunNotRunningException
        if not self.complete:
            raise inflatable_utils.ObjectUnavailableError(number)
        return self.objects[number]

    def get_run(self, run: int) -> None:
        if run in self.over:
            raise RunNotRunningException

    def parts(self) -> dict[str, Any]:
        """What the loop passes to its first step."""
        queue = self.queue
        return {
            "state": self.state, "object_store": self.store, "node_config": {}, "trusted_entities": None,
            "receive": lambda: (queue[0], get_object_tree(queue.pop(0))) if queue else None,
            "get_run": self.get_run, "get_fab": None, "pull_object": self.pull_object,
            "confirm_message_received": lambda run, number: None,
        }  # fmt: skip


def meeting() -> private.Rendezvous:
    steps = loop._pull_and_store_message, loop._push_messages
    return private.Rendezvous(
        lambda quiet: 0.0, runtime_handlers.acquire_task, runtime_handlers.push_task_output, *steps
    )


REQUEST = private.AcquireTaskRequest(supported_task_types=[private.TaskType.CLIENT_APP])


def test_a_worker_gets_the_task_of_the_run_that_goes_on() -> None:
    """A run ends while its message is received: its task, which Flower leaves, is older than the next one."""
    link, met = Link(), meeting()
    link.queue, link.over = [link.message(OLD)], {OLD}
    assert met.pull(**link.parts()) is None
    link.queue = [link.message(NEW)]
    assert met.pull(**link.parts()) == NEW
    met.open.set()
    assert met.acquire(REQUEST, link.state).task.run_id == NEW
    assert [task.run_id for task in link.state.get_tasks(statuses=private.OPEN)] == [NEW]
    assert {entry.message.metadata.run_id for entry in link.state.msg_store.values()} == {NEW}


def test_a_message_whose_objects_never_come_is_given_up_when_it_is_worthless() -> None:
    link, met = Link(), meeting()
    link.queue, link.complete = [link.message(NEW)], False
    before = dict(inflatable_utils.pull_objects.__kwdefaults__ or {})
    try:
        assert met.pull(**link.parts()) is None
        assert (inflatable_utils.pull_objects.__kwdefaults__ or {})["max_time"] == 0.05  # its time to live
        versions.quick_pulls(1e9)
        assert (inflatable_utils.pull_objects.__kwdefaults__ or {})["max_time"] == versions.LONGEST_PULL
    finally:
        inflatable_utils.pull_objects.__kwdefaults__ = before  # type: ignore[assignment]
    assert link.state.get_tasks(statuses=private.OPEN) == []
    assert len(link.store) == 0


def test_a_worker_that_computes_for_a_run_that_is_over_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "ALIVE", 0.0)
    link, met = Link(), meeting()
    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=met.sleep))
    link.queue = [link.message(NEW)]
    assert met.pull(**link.parts()) == NEW
    met.open.set()
    token = met.acquire(REQUEST, link.state).token
    assert link.state.activate_task(link.state.get_task_by_token(token).task_id)
    link.over = {NEW}
    met.push(state=link.state, object_store=link.store, send=None, push_object=None)  # waits for no answer
    assert link.state.get_task_by_token(token) is None  # what a beat is told: see below


def test_a_superlink_that_gives_no_answer_ends_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "ALIVE", 0.0)
    met, asked = meeting(), []

    def get_run(run: int) -> None:
        asked.append(run)
        raise httpx.ReadTimeout("slow")

    met.get_run, met.run = get_run, NEW
    met.sleep(0.001)
    assert asked == [NEW]


@pytest.mark.parametrize(("status", "wanted"), [(401, False), (503, None)])
def test_a_beat_for_a_task_that_was_given_up_is_a_no(status: int, wanted: bool | None) -> None:
    """The SuperNode does not know the task's token any more; other errors say nothing about the task."""
    node = private.SuperNodeConnection("127.0.0.1:1", None)

    def refuse(request: Any) -> None:
        given = httpx.Request("POST", "http://here")
        raise httpx.HTTPStatusError("no", request=given, response=httpx.Response(status, request=given))

    node.client.SendTaskHeartbeat = refuse  # type: ignore[method-assign, assignment]
    if wanted is None:
        with pytest.raises(httpx.HTTPStatusError):
            node.beat()
    else:
        assert node.beat() is wanted
    node.close()


def test_a_slow_superlink_is_left_in_peace_but_not_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times as long as its answer took, at most the 3 s that Flower sleeps; longer if the interval says so."""
    now, slept = [0.0], []
    monkeypatch.setattr(private, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    met = meeting()
    for took in (0.1, 0.5, 100.0):
        now[0] = met.woken + took
        met.sleep(3)
    met.interval = lambda quiet: 7.0
    met.sleep(3)
    assert slept == pytest.approx([0.3, 1.5, 3.0, 7.0])


def test_a_question_for_a_task_does_not_hold_up_a_stop() -> None:
    met = meeting()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(met.acquire(REQUEST, Link().state)))
    asking.start()
    while not met.asking:
        time.sleep(0.01)
    met.close()
    asking.join(10)
    assert [response.HasField("task") for response in answers] == [False]


@pytest.mark.parametrize("error", [None, RuntimeError("the SuperLink says 500")])
def test_a_loop_that_has_ended_ends_the_process(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower logs an error of the loop and returns; the thread that serves the worker would keep the process."""
    ours = {
        runtime_handlers: {"acquire_task": "acquire", "push_task_output": "finish"},
        loop: {"_pull_and_store_message": "pull", "_push_messages": "push", "register_signal_handlers": "register"},
    }
    for module, names in ours.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    monkeypatch.setattr(loop, "time", loop.time)
    monkeypatch.setattr(sys, "argv", [])
    seen: dict[str, str] = {}

    def flower_supernode() -> None:
        seen.update({name: getattr(module, name).__name__ for module, names in ours.items() for name in names})
        seen["sleep"] = loop.time.sleep.__qualname__
        if error:
            raise error

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", flower_supernode)
    monkeypatch.setattr(private.os, "_exit", leave)
    with pytest.raises(SystemExit, match="1"):
        private.run_supernode(["--insecure"], lambda quiet: 0.0)
    assert seen == {**ours[runtime_handlers], **ours[loop], "sleep": "Rendezvous.sleep"}
    assert sys.argv == ["flower-supernode", "--insecure"]


def test_a_second_signal_does_not_interrupt_the_end() -> None:
    """A supervisor passes on the Ctrl-C that the terminal sent to all."""
    program = """
import os, signal, time
from flwr.supercore.telemetry import EventType
from fedbilevel.flower.launch import private
def close():
    os.kill(os.getpid(), signal.SIGTERM)
    print("closed", flush=True)
meeting = private.Rendezvous(lambda quiet: 0.0, print, print, print, print)
meeting.close = close
meeting.register(event_type=EventType.RUN_SUPERNODE_LEAVE, exit_message="stopped", grpc_servers=[])
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""
    env = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "race condition" not in done.stderr
