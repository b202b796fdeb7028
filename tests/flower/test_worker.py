"""The worker against a SuperNode made of lists: whatever one message does, the next one is answered."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.flower import versions
from fedbilevel.flower.launch import supernode, worker


class Fake:
    """A SuperNode with messages 0, 1, … for apps; notes what comes back. Out of reach when all are answered."""

    def __init__(self, messages: list[Any], push_errors: int = 0, pull_error: Exception | None = None) -> None:
        self.messages, self.push_errors, self.pull_error = list(messages), push_errors, pull_error
        self.replies: list[Any] = []
        self.finished: list[tuple[Any, str]] = []
        self.beats = 0

    def acquire(self) -> bool:
        if not self.messages:
            raise ConnectionError("gone")
        return True

    def pull(self) -> tuple[Any, Any, Any, Any]:
        name = self.messages.pop(0)
        if self.pull_error and name == "unreadable":
            raise self.pull_error
        message = SimpleNamespace(metadata=SimpleNamespace(message_type=f"query.{name}"), name=name)
        return message, "context", "run", SimpleNamespace(hash_str="hash")

    def push(self, reply: Any, context: Any) -> None:
        assert context == "context"
        if self.push_errors:
            self.push_errors -= 1
            raise RuntimeError("the push session was replaced")
        self.replies.append(reply.name)

    def finish(self, context: Any, failure: str) -> None:
        self.finished.append((context, failure))

    def beat(self) -> bool:
        self.beats += 1
        return True


def app(message: Any, context: Any) -> Any:
    """Echo, unless the message's name asks for a fault."""
    if message.name == "raises":
        raise ValueError("no")
    return None if message.name == "none" else SimpleNamespace(name=message.name, metadata=None)


def error_reply(message: Any, error: Exception) -> Any:
    return SimpleNamespace(name=f"{message.name}: {type(error).__name__}", metadata=None)


def serve(node: Fake, load: Callable | None = None) -> None:
    apps = worker.InstalledApps(load or (lambda run, fab: (app, Path("/nowhere"))))
    worker.serve(node, apps, error_reply, patience=0.3)


def test_an_exception_and_a_missing_reply_become_error_replies_and_the_worker_goes_on() -> None:
    node = Fake(["a", "raises", "none", "b"])
    serve(node)
    assert node.replies == ["a", "raises: ValueError", "none: TypeError", "b"]
    assert [bool(failure) for _, failure in node.finished] == [False, True, True, False]
    assert "NoneType for a 'query.none' message" in node.finished[2][1]


def test_a_reply_that_is_refused_is_pushed_again_and_in_the_end_reported() -> None:
    node = Fake(["a", "b"], push_errors=worker.PUSHES - 1)
    serve(node)
    assert node.replies == ["a", "b"]
    assert node.finished == [("context", "")] * 2
    node = Fake(["a", "b"], push_errors=worker.PUSHES)
    serve(node)
    assert node.replies == ["b"]
    assert "could not be delivered" in node.finished[0][1]


def test_a_task_that_cannot_be_pulled_has_no_reply_but_an_end() -> None:
    node = Fake(["unreadable", "a"], pull_error=OSError("cut"))
    serve(node)
    assert node.replies == ["a"]
    assert [context for context, _ in node.finished] == [None, "context"]


def test_an_app_is_loaded_once_also_after_it_could_not_be_loaded() -> None:
    loads: list[int] = []

    def load(run: Any, fab: Any) -> tuple[Callable, Path]:
        loads.append(1)
        if len(loads) == 1:
            raise ImportError("not yet")
        return app, Path("/nowhere")

    node = Fake(["a", "b", "c"])
    serve(node, load)
    assert node.replies == ["a: ImportError", "b", "c"]
    assert len(loads) == 2


def test_another_version_of_an_app_takes_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "an_app_of_the_test.py").write_text(f"VERSION = {version}")

    def load(run: Any, fab: Any) -> tuple[Callable, Path]:
        directory = tmp_path / fab.hash_str
        sys.path.insert(0, str(directory))
        import an_app_of_the_test  # type: ignore[import-not-found]

        return lambda: an_app_of_the_test.VERSION, directory

    apps = worker.InstalledApps(load)
    got = [apps("run", SimpleNamespace(hash_str=version))() for version in ("1", "1", "2", "1")]
    assert got == [1, 1, 2, 1]


def test_the_heart_beats_during_a_task_only_and_a_task_given_up_is_told() -> None:
    node, told = Fake([]), threading.Event()
    heart = worker.Heartbeat(node, told.set, interval=0.01)
    assert not told.wait(0.1)
    assert node.beats == 0
    heart.set(True)
    while node.beats < 2:
        told.wait(0.01)
    assert not told.is_set()
    node.beat = lambda: False  # type: ignore[method-assign]
    assert told.wait(10)
    node.beat = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    told.clear()
    assert not told.wait(0.1)  # no answer is not a no
    heart.set(False)


def test_a_task_that_takes_longer_than_the_patience_does_not_end_the_worker() -> None:
    def slow(message: Any, context: Any) -> Any:
        time.sleep(0.5)
        return app(message, context)

    node = Fake(["a", "b"])
    serve(node, lambda run, fab: (slow, Path("/nowhere")))  # patience: 0.3 s
    assert node.replies == ["a", "b"]


def test_the_heart_rests_before_a_task_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beat for a task that is finished is answered as one for a task given up, which ends the worker."""
    events: list[Any] = []
    monkeypatch.setattr(worker, "Heartbeat", lambda *_: SimpleNamespace(set=events.append))
    node = Fake(["a", "raises"])
    node.finish = lambda *_: events.append("finish")  # type: ignore[method-assign]
    serve(node)
    assert events == [True, False, "finish"] * 2


def test_the_interval_grows_with_the_quiet_time_between_its_bounds() -> None:
    assert supernode.interval(0.0, 0.05, 2.0) == 0.05
    assert supernode.interval(10.0, 0.05, 2.0) == 1.0
    assert supernode.interval(1000.0, 0.05, 2.0) == 2.0


def test_a_version_that_was_not_tried_gets_the_stock_supernode(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ["--superlink", "h:1", "--insecure", "--port", "9100", "--fastest", "0.1"]
    commands = supernode.processes(arguments, "1.41.3")
    assert list(commands) == ["supernode", "worker"]
    assert commands["worker"][-2:] == ["--address", "127.0.0.1:9100"]
    assert commands["supernode"][2:6] == ["fedbilevel.flower.launch.supernode", "serve", "0.1", "2.0"]
    assert commands["supernode"][-2:] == ["--isolation", "process"]
    assert not caplog.records
    stock = supernode.processes(arguments, "1.50.0")
    assert list(stock) == ["supernode"]
    assert Path(stock["supernode"][0]).name == "flower-supernode"
    assert stock["supernode"][1:] == ["--superlink", "h:1", "--insecure", "--host", "127.0.0.1", "--port", "9100"]
    assert "1.50.0 was not tried" in caplog.text


def test_without_flower_the_message_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(ConfigurationError, match=r'in a clone of the repository, pip install "\.\[flower\]"'):
        versions.require_flower()


def test_what_is_started_sends_no_news_and_keeps_compiled_programs() -> None:
    env = supernode.environment({"FLWR_HOME": "/data/client", "PATH": "/bin"})
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert env["JAX_COMPILATION_CACHE_DIR"] == "/data/client/jax-compilation-cache"
    assert supernode.environment({"JAX_COMPILATION_CACHE_DIR": "/mine"})["JAX_COMPILATION_CACHE_DIR"] == "/mine"


def test_an_upload_that_is_never_complete_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower's own call does by default is bounded."""
    from flwr.supercore.inflatable import inflatable_utils

    def missing(object_id: str) -> bytes:
        raise inflatable_utils.ObjectUnavailableError(object_id)

    defaults = dict(inflatable_utils.pull_objects.__kwdefaults__)
    monkeypatch.setattr(inflatable_utils.pull_objects, "__kwdefaults__", defaults)
    versions.quick_pulls(0.1)
    began = time.monotonic()
    with pytest.raises(inflatable_utils.ObjectPullError):
        inflatable_utils.pull_objects(["0" * 64], missing)
    assert 0.1 <= time.monotonic() - began < 5.0  # tries after 0.02, 0.06 and 0.14 s; the rest is a slow machine's


def test_the_server_learns_only_the_kind_of_a_clients_error() -> None:
    from flwr.app import Message, RecordDict

    from fedbilevel.flower.launch import private
    from fedbilevel.flower.launch.in_process import InProcess

    InProcess(None, 0)  # type: ignore[arg-type]  # Flower's messages want to know of which task they are
    message = Message(RecordDict(), 1, "query.fedbilevel")
    reply = private.error_reply(message, FileNotFoundError("/home/ward-7/patients.csv"))
    assert (reply.error.code, reply.error.reason) == (2, "FileNotFoundError")


def test_worker_and_loop_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    from fedbilevel.flower.launch import private

    monkeypatch.setattr(private, "HOLD", 0.1)
    record = SimpleNamespace(active_until=datetime.now(UTC))
    state: Any = SimpleNamespace(lock_task_store=threading.Lock(), task_token_store={7: record})
    meeting = private.Rendezvous(lambda quiet: 0.0, lambda *_: "task", lambda *_: "finished", print, print)
    assert meeting.acquire("request", state) != "task"  # no message is complete: the question ends empty
    assert record.active_until.year == 1970  # what the worker had before is given up
    monkeypatch.setattr(private, "HOLD", 30.0)
    got: list[Any] = []

    def request() -> None:
        got.extend([meeting.acquire("request", state), meeting.finish()])

    worker_thread = threading.Thread(target=request)
    worker_thread.start()
    meeting.sleep(0.5)
    worker_thread.join(30)
    assert got == ["task", "finished"]


def test_a_reply_that_never_becomes_complete_does_not_hold_the_node() -> None:
    pytest.importorskip("flwr")
    from fedbilevel.flower.launch import private

    meeting = private.Rendezvous(lambda quiet: 0.0, *[lambda *_: None] * 4)

    def yield_object_contents() -> None:  # the name of the function that waits for content
        meeting.sleep(0.01)

    yield_object_contents()
    meeting.asking = 1
    yield_object_contents()
    with pytest.raises(TimeoutError, match="whole reply"):
        yield_object_contents()


def test_a_pinned_app_answers_whatever_app_a_run_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_app_of_the_site.py").write_text("def app(message, context):\n    return message\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    apps = worker.pinned("own_app_of_the_site:app")
    fake = Fake(["a", "b"])
    worker.serve(fake, apps, error_reply, patience=0.3)
    assert fake.replies == ["a", "b"]
    for reference in ("own_app_of_the_site", "own_app_of_the_site:none", "no_such_module_here:app", ":app"):
        with pytest.raises(ConfigurationError, match="--app"):
            worker.pinned(reference)
    with pytest.raises(ConfigurationError, match="name of a ClientApp"):
        worker.pinned("own_app_of_the_site:number")


def test_a_pinned_app_is_never_given_up_for_the_stock_supernode() -> None:
    for version in versions.TESTED:
        assert supernode.processes(["--app", "a:b"], version)["worker"][-2:] == ["--app", "a:b"]
    with pytest.raises(ConfigurationError, match="would run any app"):
        supernode.processes(["--app", "a:b"], "9.9")
