"""Whatever a message does to the worker on its pipe, the worker replies to the next message."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedbilevel.core.errors import CheckpointError
from fedbilevel.flower import versions
from fedbilevel.flower.launch import private, supernode
from refusals import refuses


def app(message, context):
    """Echo, unless the message's name asks for a fault."""
    if message.name == "raises":
        raise ValueError("no")
    return None if message.name == "none" else SimpleNamespace(name=message.name, metadata=None)


def served(names, apps, monkeypatch):
    """Run a worker, and return the name of its reply and the text of the failure for each message."""

    def opened(request):
        name = request[0].decode()
        message = SimpleNamespace(metadata=SimpleNamespace(message_type=f"query.{name}"), name=name)
        return message, "context", "run", SimpleNamespace(hash_str="hash")

    def error_reply(message, error):
        return SimpleNamespace(name=f"{message.name}: {type(error).__name__}")

    monkeypatch.setattr(private, "opened", opened)
    monkeypatch.setattr(private, "error_reply", error_reply)
    monkeypatch.setattr(private, "answer", lambda reply, context, failure: [reply.name.encode(), failure.encode()])
    ours, theirs = Pipe()
    left = threading.Event()
    thread = threading.Thread(target=private.work, args=(theirs, apps, left.set))
    thread.start()
    assert private.receive(ours) == []
    found = []
    for name in names:
        private.send(ours, [name.encode()])
        answered, failure = private.receive(ours)
        found.append((answered.decode(), failure.decode()))
    ours.close()  # as if the SuperNode had ended
    thread.join(10)
    assert not thread.is_alive()
    assert left.wait(10)
    return found


def test_an_exception_and_a_missing_reply_become_error_replies_and_the_worker_goes_on(monkeypatch):
    apps = private.InstalledApps(lambda run, fab: (app, Path("/nowhere")))
    found = served(["a", "raises", "none", "b"], apps, monkeypatch)
    assert [name for name, _ in found] == ["a", "raises: ValueError", "none: TypeError", "b"]
    assert [bool(failure) for _, failure in found] == [False, True, True, False]
    assert "NoneType for a 'query.none' message" in found[2][1]


def test_an_app_is_loaded_once_also_after_it_could_not_be_loaded(monkeypatch):
    loads = []

    def load(run, fab):
        loads.append(1)
        if len(loads) == 1:
            raise ImportError("not yet")
        return app, Path("/nowhere")

    found = served(["a", "b", "c"], private.InstalledApps(load), monkeypatch)
    assert [name for name, _ in found] == ["a: ImportError", "b", "c"]
    assert len(loads) == 2


FULL = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: 'study.toml'"


@pytest.mark.parametrize(
    "full",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "study.toml"), shutil.Error([("a", "study.toml", FULL)])],
    ids=["a file", "a folder"],
)
def test_an_app_that_was_installed_only_in_part_is_installed_again(full, tmp_path, monkeypatch, caplog, capsys):
    """If an installation fails because the disk is full, nothing of the app stays, so that the next attempt succeeds.

    Flower takes an app for installed as soon as its folder exists. The log has one line about the failure, with the
    folder and the reason, and the server learns the reason. A second line names the folder of the complete app, and no
    line the folder in which it was made.
    """
    room = []

    def install(fab_file, install_dir, skip_prompt):
        print(f"Successfully installed app to {install_dir}.")  # as Flower does
        made = install_dir / "apps" / "us.app.1.0.0.01234567"
        made.mkdir(parents=True)
        (made / "pyproject.toml").touch()
        if not room:
            raise full
        (made / "study.toml").touch()
        return made

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setattr(private, "install_from_fab", install)
    monkeypatch.setattr(private, "get_load_client_app_fn", lambda **_: lambda *_: app)
    run = SimpleNamespace(fab_id="us/app", fab_version="1.0.0")
    fab = SimpleNamespace(hash_str="0123456789", content=b"")

    def apps(*_):
        room.extend([1] * bool(caplog.records))
        return private.load(run, fab)[0]

    caplog.set_level(logging.INFO, "fedbilevel")
    found = served(["a", "b"], apps, monkeypatch)
    assert [name for name, _ in found] == ["a: CheckpointError", "b"]
    record, installed = caplog.records
    assert capsys.readouterr().out == ""
    place = tmp_path / "apps" / "us.app.1.0.0.01234567"
    assert record.getMessage().endswith(f"write {place}: No space left on device; free space on the disk of FLWR_HOME")
    assert record.exc_info is None
    assert installed.getMessage().endswith(str(place))
    assert sorted(path.name for path in place.iterdir()) == ["pyproject.toml", "study.toml"]
    assert [path.name for path in tmp_path.iterdir()] == ["apps"]


def test_another_version_of_an_app_takes_the_place_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "an_app_of_the_test.py").write_text(f"VERSION = {version}")

    def load(run, fab):
        directory = tmp_path / fab.hash_str
        sys.path.insert(0, str(directory))
        import an_app_of_the_test

        return lambda: an_app_of_the_test.VERSION, directory

    apps = private.InstalledApps(load)
    got = [apps("run", SimpleNamespace(hash_str=version))() for version in ("1", "1", "2", "1")]
    assert got == [1, 1, 2, 1]


def test_the_interval_grows_with_the_quiet_time_between_its_bounds():
    assert [supernode.interval(quiet) for quiet in (0.0, 10.0, 1000.0)] == [0.02, 1.0, 2.0]


def test_a_version_that_was_not_tried_gets_the_stock_supernode(caplog):
    arguments = ["--superlink", "h:1", "--insecure", "--port", "9100"]
    words = supernode.command(arguments, "1.41.3")
    assert words[2:] == ["fedbilevel.flower.launch.supernode", "serve", "", "", *arguments]
    assert not caplog.records
    stock = supernode.command(arguments, "1.50.0")
    assert Path(stock[0]).name == "flower-supernode"
    assert stock[1:] == arguments
    assert "1.50.0 was not tested" in caplog.text


def test_without_flower_the_message_says_what_installs_it(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: None)
    with refuses("", fact='pip install ".[flower]"'):
        versions.require_flower()


def test_what_is_started_sends_no_news_and_keeps_compiled_programs():
    env = supernode.environment({"FLWR_HOME": "/data/client", "PATH": "/bin"})
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert env["JAX_COMPILATION_CACHE_DIR"] == "/data/client/jax-compilation-cache"
    assert supernode.environment({"JAX_COMPILATION_CACHE_DIR": "/mine"})["JAX_COMPILATION_CACHE_DIR"] == "/mine"


def test_the_server_learns_only_the_kind_of_a_clients_error():
    from flwr.app import Message, RecordDict

    from fedbilevel.flower.launch import private
    from fedbilevel.flower.launch.in_process import InProcess

    InProcess(None, 0)  # gives this process the identity without which Flower makes no messages
    message = Message(RecordDict(), 1, "query.fedbilevel")
    reply = private.error_reply(message, FileNotFoundError("/home/ward-7/patients.csv"))
    assert (reply.error.code, reply.error.reason) == (2, "FileNotFoundError")
    full = CheckpointError("could not write /home/ward-7/x", errno=errno.ENOSPC)
    assert private.error_reply(message, full).error.reason == "CheckpointError: No space left on device"


def test_a_pinned_app_answers_whatever_app_a_run_brings(tmp_path, monkeypatch):
    (tmp_path / "own_app_of_the_site.py").write_text("def app(message, context):\n    return message\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    apps = private.pinned("own_app_of_the_site:app")
    assert [name for name, _ in served(["a", "b"], apps, monkeypatch)] == ["a", "b"]
    for reference in ("own_app_of_the_site", ":app", "own_app_of_the_site:number"):
        with refuses("--app", reference):
            private.pinned(reference)
    for reference in ("own_app_of_the_site:none", "no_such_module_here:app"):
        with refuses("--app", reference, "imported"):
            private.pinned(reference)


def test_a_pinned_app_is_never_given_up_for_the_stock_supernode():
    for version in versions.TESTED:
        assert "a:b" in supernode.command(["--app", "a:b"], version)
    with refuses("--app", "a:b", "9.9"):
        supernode.command(["--app", "a:b"], "9.9")


LOGGED = """
import logging, sys
from fedbilevel.flower.launch import private

private.begin_log(logging.WARNING, bool(sys.argv[1:]))
for level in ("debug", "info", "warning"):
    getattr(logging.getLogger("flwr"), level)("a line of the kind %s", level)
"""


@pytest.mark.parametrize(("options", "kinds"), [([], ["warning"]), (["all"], ["info", "warning"])])
def test_a_line_of_flower_is_in_the_log_once(options, kinds):
    """Flower's logger has a handler of its own, and the log of a site has one more."""
    done = subprocess.run([sys.executable, "-c", LOGGED, *options], capture_output=True, text=True, check=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "a line of the kind" in line]
    assert [line.rpartition(" ")[2] for line in lines] == kinds
