"""Names that Flower does not promise to keep: each name that the library uses exists and has the expected parameters.

A version of Flower for which a test here fails must not be in `versions.TESTED`.
"""

import ast
import hashlib
import importlib
import inspect
import logging
import re
import signal
import sys
import warnings
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import click
import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import generate_key_pairs
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal as loop
from flwr.supernode.nodestate import NodeStateFactory

import fedbilevel.flower
from fedbilevel.errors import DataWarning
from fedbilevel.flower import versions
from fedbilevel.flower.launch import private

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation"}
ROOM = Path(fedbilevel.flower.__file__).parent


def imports(file):
    """Return (module, name) for all imports from Flower in a file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "flwr"}


# The names


PRIVATE = ("launch/connection.py", "launch/private.py", "versions.py")


def test_three_files_import_what_flower_does_not_promise():
    files = {
        str(file.relative_to(ROOM))
        for file in ROOM.rglob("*.py")
        for module, _ in imports(file)
        if module not in PUBLIC
    }
    assert files == set(PRIVATE)


@pytest.mark.parametrize(("module", "name"), sorted(set().union(*(imports(ROOM / file) for file in PRIVATE))))
def test_a_name_is_there(module, name):
    """Each name that the three files import from Flower exists."""
    there = importlib.import_module(module)
    assert not name or hasattr(there, name) or importlib.import_module(f"{module}.{name}")


COMMAND = importlib.import_module("flwr.supernode.cli.flower_supernode")
STATE = "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState"
STEPS = "flwr.supernode.start_client_internal"
SIGNATURES = {
    "flwr.cli.install:install_from_fab": "fab_file install_dir skip_prompt",
    "flwr.clientapp.utils:get_load_client_app_fn": "default_app_ref app_path multi_app",
    "flwr.common.config:get_project_dir": "fab_id fab_version fab_hash",
    "flwr.supercore.exit:register_signal_handlers": "event_type exit_message grpc_servers exit_handlers",
    "flwr.supercore.inflatable.inflatable_utils:pull_objects": "object_ids pull_object_fn max_time initial_backoff",
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents": "object_id object_contents",
    f"{STEPS}:_init_connection": " ".join(private.CONNECTION),
    f"{STEPS}:_pull_and_store_message": "state object_store node_config receive get_run get_fab pull_object "
    "confirm_message_received trusted_entities",
    f"{STEPS}:_push_messages": "state object_store send push_object",
    f"{STEPS}:start_client_internal": "state_factory node_config trusted_entities " + " ".join(private.CONNECTION),
    "flwr.supernode.cli:flower_supernode": "",
    f"{STATE}.get_messages_legacy": "self run_ids is_reply",
    f"{STATE}.get_tasks": "self run_ids statuses",
    f"{STATE}.finish_task": "self task_id sub_status details",
    f"{STATE}.delete_messages": "self message_ids",
    f"{STATE}.store_message": "self message",
    "flwr.supercore.object_store:ObjectStore.preregister": "self run_id object_tree",
    "flwr.supercore.object_store:ObjectStore.put": "self object_id object_content",
    "flwr.supercore.object_store:ObjectStore.clear": "self",
}
"""Functions that private.py calls, replaces or is called as, with the parameters that it uses."""


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_function_takes_what_it_is_given(place):
    """A function of Flower has the parameters that private.py uses, and requires no others."""
    module, _, path = place.partition(":")
    function = importlib.import_module(module)
    for name in path.split("."):
        function = getattr(function, name)
    known, told = inspect.signature(function).parameters, SIGNATURES[place].split()
    assert [name for name in told if name not in known] == []
    required = [name for name, one in known.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if not path.startswith("start_"):
        assert [name for name in required if name not in told] == []


def test_the_command_calls_the_loop_that_is_replaced_with_its_parts_by_name():
    """Flower's command calls the loop, which private.py replaces, in one place, and all arguments have names."""
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(COMMAND))) if isinstance(n, ast.Call)]
    (call,) = [call for call in calls if ast.unparse(call.func) == "start_client_internal"]
    assert (len(call.args), all(word.arg for word in call.keywords)) == (0, True)


def test_fields_that_are_read_or_written_are_there():
    state = NodeStateFactory(objectstore_factory=ObjectStoreFactory()).state()
    assert hasattr(state, "msg_store")
    assert {"max_time", "initial_backoff"} <= set(inflatable_utils.pull_objects.__kwdefaults__ or {})
    versions.be_server()
    assert (TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id) == (1, 1, 0)


# A SuperNode's loop that uses these names, with Flower's own steps and state, and functions in place of a SuperLink

OLD, NEW = 11, 22  # runs
NOTHING = hashlib.sha256(b"").hexdigest()
FAB = private.Fab(NOTHING, b"", {})


class Over(BaseException):
    """Ends the loop when there are no more messages."""


class Link:
    """Takes the place of a SuperLink. Runs may be over, and the objects of messages may be missing."""

    def __init__(self):
        versions.be_server()
        factory = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(objectstore_factory=factory).state(), factory.store()
        self.state.set_node_id(5)
        for run in (OLD, NEW):
            known = Run.create_empty(run)
            known.series_id, known.fab_hash = run, NOTHING
            self.state.store_run(known)
            self.state.set_run_series_context(run, Context(run, 5, {}, RecordDict(), {}))
        self.state.store_fab(FAB)
        self.queue, self.objects, self.over, self.complete, self.sent = [], {}, set(), True, []

    def asks(self, *runs):
        """Queue a message of each run, and return the ids of all messages in the queue."""
        for run in runs:
            message = Message(RecordDict(), 5, "query.fedbilevel", ttl=0.05)
            message.metadata.__dict__["_run_id"] = run
            message.metadata.__dict__["_message_id"] = message.object_id
            self.objects |= {number: part.deflate() for number, part in get_all_nested_objects(message).items()}
            self.queue.append(message)
        return [message.metadata.message_id for message in self.queue]

    def receive(self):
        return (self.queue[0], get_object_tree(self.queue.pop(0))) if self.queue else None

    def send(self, message, tree, seconds):
        self.sent.append(message)
        return set(), "session"

    def get_run(self, run):
        if run in self.over:
            raise RunNotRunningException

    def pull_object(self, run, number):
        if run in self.over:
            raise RunNotRunningException
        if not self.complete:
            raise inflatable_utils.ObjectUnavailableError(number)
        return self.objects[number]

    @contextmanager
    def connection(self, **given):
        nothing = lambda *_: None  # noqa: E731
        yield (5, self.receive, self.send, self.get_run, lambda fab, run: FAB, self.pull_object, nothing, nothing)

    def interval(self, quiet):
        if not self.queue:
            raise Over
        return 0.0


@pytest.fixture
def link(monkeypatch):
    """Let the loop connect to a `Link`, and restore the handlers of signals afterwards."""
    link = Link()
    monkeypatch.setattr(private, "register_signal_handlers", lambda **_: None)
    monkeypatch.setattr(loop, "_init_connection", link.connection)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield link
    for number, handler in before.items():
        signal.signal(number, handler)


def play(link, do=lambda goes_on: None):
    """Run the loop until it has no more messages.

    Args:
        link: the SuperLink.
        do: what the worker does with each message before it replies.

    Returns:
        The runs of the messages that reached the worker, and the replies that were sent.
    """
    runs = []

    class Answering:
        def reply(self, request, goes_on):
            message, context, run, _ = private.opened(request)
            runs.append(run.run_id)
            do(goes_on)
            return private.answer(Message(RecordDict(), reply_to=message), context, "")

        def stop(self):
            pass

    factory = SimpleNamespace(state=lambda: link.state, objectstore_factory=SimpleNamespace(store=lambda: link.store))
    given = dict.fromkeys(private.CONNECTION) | {"node_config": {}, "trusted_entities": None, "state_factory": factory}
    with pytest.raises(Over):
        private.serve(loop, Answering(), link.interval, **given)
    return runs, link.sent


def test_a_message_is_replied_to_and_nothing_of_it_is_left(link):
    asked = link.asks(OLD, NEW)
    runs, sent = play(link)
    assert [message.metadata.reply_to_message_id for message in sent] == asked
    assert runs == [OLD, NEW]
    assert (len(link.store), len(link.state.msg_store)) == (0, 0)
    assert link.state.get_tasks(statuses=["pending", "starting", "running"]) == []


@pytest.mark.parametrize("reached", [[NEW], [OLD, NEW]], ids=["while its message comes", "while the worker computes"])
def test_a_run_that_ends_is_not_replied_to(reached, link):
    """No reply is sent for a run that ends while its message arrives, or while the worker computes."""

    def ended(goes_on):
        link.over = {OLD}
        goes_on()

    link.asks(OLD, NEW)
    link.over = {OLD} - set(reached)
    runs, sent = play(link, ended)
    assert (runs, [message.metadata.run_id for message in sent]) == (reached, [NEW])


def test_a_superlink_that_gives_no_answer_ends_no_task_and_a_worker_that_has_gone_is_an_error(link):
    """A task continues if the SuperLink does not answer; if the worker has ended, the reply is Flower's error 8."""
    link.asks(OLD)
    link.get_run = Mock(side_effect=httpx.ReadTimeout("slow"))
    assert not play(link, lambda goes_on: goes_on())[1][0].has_error()
    link.asks(OLD)
    assert play(link, Mock(side_effect=EOFError))[1][-1].error.code == 8


def test_a_message_whose_objects_never_come_is_given_up_when_it_is_worthless(link, monkeypatch):
    """A message whose objects never arrive is given up after its time to live, or `LONGEST_PULL` if this is shorter."""
    defaults = dict(inflatable_utils.pull_objects.__kwdefaults__)
    monkeypatch.setattr(inflatable_utils.pull_objects, "__kwdefaults__", defaults)
    link.asks(NEW)
    link.complete = False
    assert play(link) == ([], [])
    assert defaults["max_time"] == 0.05  # the message's time to live
    versions.quick_pulls(1e9)
    assert defaults["max_time"] == versions.LONGEST_PULL
    assert len(link.store) == 0


def packed(content, kept):
    """Return a request to a worker, with a message and `kept` as the client's memory."""
    message = Message(content, 5, "query.fedbilevel", ttl=50.0)
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    return private.request_of(message.object_id, objects, Context(NEW, 5, {}, kept, {}), Run.create_empty(NEW), FAB)


APP = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
def app(message, context):
    if "die" in message.content:
        os.kill(os.getpid(), 9)
    context.state["c"] = ConfigRecord({"calls": context.state["c"]["calls"] + 1 if "c" in context.state else 1})
    return Message(RecordDict({"c": ConfigRecord({"pid": os.getpid()})}), reply_to=message)
"""


def test_a_real_worker_stays_and_one_that_dies_is_started_again(tmp_path, monkeypatch):
    (tmp_path / "an_app_on_a_pipe.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    versions.be_server()
    piped, kept, pids = private.PipedWorker("an_app_on_a_pipe:app"), RecordDict(), []

    def ask(content):
        _, tree, state, failure, *contents = piped.reply(packed(content, kept), lambda: None)
        assert failure == b""
        kept.update(private.context_from_proto(private.ContextProto.FromString(state)).state)
        root = private.ObjectTree.FromString(tree).object_id
        reply = private.inflate_object_from_contents(root, private.by_name(contents))
        return int(reply.content["c"]["pid"])

    try:
        pids = [ask(RecordDict()), ask(RecordDict())]
        with pytest.raises((EOFError, OSError)):
            ask(RecordDict({"die": ConfigRecord({"x": 1})}))
        pids.append(ask(RecordDict()))
    finally:
        piped.stop()
    assert pids[0] == pids[1] != pids[2]
    assert kept["c"]["calls"] == 3
    assert not Path(f"/proc/{pids[2]}").exists()


def test_the_pipe_unpickles_nothing():
    """Nothing that a worker sends over its pipe is unpickled.

    A worker runs an app, which is the server's code, and must not run code in the process that has the client's key.
    """

    class Code:
        def __reduce__(self):
            return print, ("this was run",)

    ours, theirs = Pipe()
    theirs.send(Code())
    with pytest.raises(OSError, match="bad message length"):
        private.receive(ours)


def test_a_worker_ends_with_its_supernode_whatever_it_computes(tmp_path, monkeypatch):
    """A worker ends with its SuperNode, even in the middle of a computation.

    Otherwise it could overwrite the client's state that the next SuperNode's worker has written.
    """
    begun = tmp_path / "begun"
    lines = f"import os, time\ndef app(message, context):\n    open({str(begun)!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "an_app_that_lasts.py").write_text(lines + "    time.sleep(600)")
    monkeypatch.chdir(tmp_path)
    versions.be_server()
    lasting = private.PipedWorker("an_app_that_lasts:app")
    pipe = lasting.start()
    private.send(pipe, packed(RecordDict(), RecordDict()))
    while not begun.exists():
        assert lasting.process is not None
        assert lasting.process.poll() is None
    pipe.close()  # as the end of the SuperNode's process does
    assert lasting.process.wait(30) == 0


def test_an_app_that_is_not_there_is_told_at_the_start(capfd, monkeypatch):
    with pytest.raises(SystemExit, match="2"):
        private.run_supernode(["--insecure"], lambda quiet: 0.0, "no_such_module_here:app")
    assert "--app no_such_module_here:app cannot be loaded" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 1),
        (RuntimeError("the SuperLink says 500"), 1),
        (click.ClickException("configuration of invalid format"), 2),
        (FileNotFoundError("no such key"), 2),
    ],
)
def test_a_loop_that_has_ended_ends_the_process(error, status, monkeypatch, caplog):
    """When the loop of a SuperNode ends, its process ends: with status 2 if it was called wrongly, otherwise with 1.

    Flower logs an error of the loop and returns, and a thread that serves its API would keep the process alive. The
    supervisor does not start a process again that has ended with status 2.
    """
    monkeypatch.setattr(COMMAND, "start_client_internal", COMMAND.start_client_internal)  # so that it is put back
    monkeypatch.setattr(sys, "argv", [])
    seen = []

    def command():
        seen.append(COMMAND.start_client_internal.__module__)
        if error:
            raise error

    command.__module__ = COMMAND.__name__
    monkeypatch.setattr("flwr.supernode.cli.flower_supernode", command)
    monkeypatch.setattr(private.os, "_exit", sys.exit)
    monkeypatch.setattr(private.PipedWorker, "start", lambda self: None)
    with pytest.raises(SystemExit, match=str(status)):
        private.run_supernode(["--insecure"], lambda quiet: 0.0)
    assert [record.exc_info is None for record in caplog.records] == [status == 2] * (error is not None)
    assert seen == ["fedbilevel.flower.launch.private"]
    assert sys.argv == ["flower-supernode", "--insecure"]


def refused():
    """End as Flower's connection does if the SuperLink has refused it."""
    try:
        raise httpx.HTTPStatusError("412", request=None, response=httpx.Response(412))
    except httpx.HTTPStatusError:
        sys.exit(1)


def unanswered():
    raise ConnectionError


@pytest.mark.parametrize(("tried", "reached", "said"), [
    (unanswered, False, "the SuperLink is not reached yet: 127.0.0.1:1 does not answer"),
    (refused, True, "regards another SuperNode with this key as online. .* accepted after at most 60 s"),
    (refused, False, ""),  # for a reason that is already in the log
    (sys.exit, True, ""),  # stopped by the operator
])  # fmt: skip
def test_a_site_that_is_not_connected_says_why(tried, reached, said, monkeypatch, caplog):
    """A site that is not connected logs the reason, while Flower logs only that an attempt has failed."""
    monkeypatch.setattr(private.signal, "signal", lambda *_: None)
    monkeypatch.setattr(private, "register_signal_handlers", lambda **_: None)
    if reached or not said:
        monkeypatch.setattr(private, "why_unreached", lambda *_: "" if reached else "its key is not registered")
    given = dict.fromkeys(private.CONNECTION) | {"server_address": "127.0.0.1:1", "state_factory": Mock()}
    given["authentication_keys"] = generate_key_pairs()
    with pytest.raises((ConnectionError, SystemExit)):
        private.serve(SimpleNamespace(_init_connection=lambda **_: tried()), Mock(), lambda quiet: 0.0, **given)
    assert re.search(said, caplog.text)
    assert ("another SuperNode" in caplog.text) == ("another" in said)


def test_a_warning_of_ours_is_one_line_of_the_log(monkeypatch, caplog):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    private.log_warnings()
    try:
        with warnings.catch_warnings(action="always"):
            logging.captureWarnings(False)
            logging.captureWarnings(True)  # within the block, which restores what pytest has set
            warnings.warn(DataWarning("the table has no column 'ward'"), stacklevel=1)
            warnings.warn("another", stacklevel=1)
    finally:
        logging.captureWarnings(False)
    first, second = (record.getMessage() for record in caplog.records if record.name == "py.warnings")
    assert first == "the table has no column 'ward'"
    assert second.startswith(f"{__file__}:")
    assert "UserWarning: another" in second
