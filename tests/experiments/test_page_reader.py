"""Does `fedbilevel watch URL` show the page of another process in a terminal, and refuse answers of other servers?"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fedbilevel.core.errors import ConfigurationError, ExchangeError
from fedbilevel.experiments import page_reader, window_server
from fedbilevel.experiments.page_reader import PageReader
from fedbilevel.experiments.snapshot import MetricTrace, Snapshot, snapshots
from fedbilevel.experiments.snapshot_json import from_json, to_json
from fedbilevel.experiments.tables import Cell, Column, Table, text_column
from fedbilevel.experiments.window import sparkline
from fedbilevel.experiments.window_server import WindowServer
from fedbilevel.wording import without_secrets
from refusals import refuses

SEEN = Snapshot(
    "a run",
    "running",
    done=3,
    whole=20,
    amount="3 of 20 rounds",
    facts={"replied": "1 of 2"},
    traces=[MetricTrace("loss", [4.0, math.nan, 1.0])],
    tables=[Table("absent", [text_column("client", ["1"]), Column("round", [Cell("7")], 2)])],
    notes=["a note"],
)


@contextmanager
def page(snapshot: Snapshot, host: str = "127.0.0.1") -> Iterator[WindowServer]:
    """Serve a page with the snapshot, and yield its server."""
    with WindowServer(host, 0) as server:
        server.publish([snapshot])
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def foreign(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Start another server, which gives this answer to each request, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format, *args) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/?token=hidden3"
        server.shutdown()


def sends(content: bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return a function that sends a fixed answer."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def test_a_terminal_shows_what_the_page_shows(run) -> None:
    with page(SEEN) as server:
        code, shown, said = run("watch", server.url)
    assert (code, said) == (0, "")
    for part in (
        "a run",
        "running",
        "3 of 20 rounds",
        "1 of 2",
        "loss",
        "█×▁",
        "1 not finite",
        "absent",
        "7",
        "a note",
    ):
        assert part in shown


def test_a_snapshot_arrives_as_it_was_sent() -> None:
    got = from_json(to_json(SEEN).encode())
    assert got.traces[0].values == pytest.approx(SEEN.traces[0].values, nan_ok=True)
    assert got.tables == SEEN.tables
    for name in ("title", "state", "why", "done", "whole", "amount", "facts", "notes", "error"):
        assert getattr(got, name) == getattr(SEEN, name)


def test_an_address_without_a_slash_at_its_end_is_that_of_the_page() -> None:
    with page(SEEN) as server:
        assert PageReader(server.url.rstrip("/")).snapshot().title == "a run"


def test_the_exit_code_is_that_of_the_run(run) -> None:
    with page(Snapshot("a run", "failed", "too few replied", error=ExchangeError("too few replied"))) as server:
        code, shown, _ = run("watch", server.url, "--once")
    assert code == 5
    assert "too few replied" in shown


def test_the_seed_of_a_run_under_privacy_does_not_arrive() -> None:
    columns = [text_column("run", ["lr-1\nseed-31415"])]
    private = Snapshot("runs/seed-31415", "running", facts={"best": "seed 31415"}, tables=[Table("", columns)])
    assert "31415" in to_json(private)
    hidden = Snapshot(**{**vars(private), "is_private": True})
    assert "31415" not in to_json(hidden)
    assert from_json(to_json(hidden).encode()).title == "runs/seed-***"


def test_the_page_of_another_machine_needs_its_token(run) -> None:
    """A page that other machines can reach needs its token, and refuses names that are not those of its machine."""
    with page(SEEN, "0.0.0.0") as server:
        place = f"http://127.0.0.1:{server.server_address[1]}/"
        assert PageReader(f"{place}?token={server.token}").snapshot().title == "a run"
        for wrong in ("", "?token=secret1"):
            code, _, said = run("watch", place + wrong)
            assert code == 2
            assert "its token is missing or wrong" in said
            assert "secret1" not in said
        server.names = set()
        place = f"http://localhost:{server.server_address[1]}/?token={server.token}"
        with refuses("", fact="machine of this name", where=without_secrets(place)):
            PageReader(place).snapshot()


def test_changes_are_shown_and_a_page_that_ends_is_noted() -> None:
    with page(SEEN) as server:
        found = snapshots(PageReader(server.url).snapshot, sleep=lambda seconds: None)
        assert next(found).amount == "3 of 20 rounds"
        server.publish([Snapshot("a run", "running", amount="4 of 20 rounds")])
        assert next(found).amount == "4 of 20 rounds"
    lost = next(found)
    assert lost.amount == "4 of 20 rounds"
    assert "not up to date" in lost.notes[0]
    assert "does not answer (Connection refused)" in lost.notes[0]


def test_a_place_where_nothing_answers_is_refused(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, said = run("watch", f"http://127.0.0.1:{port}/?token=secret1")
    assert code == 2
    assert "cannot be watched: it does not answer (Connection refused)" in said
    assert "secret1" not in said


@pytest.mark.parametrize(
    "url",
    ["ftp://127.0.0.1/", "http://", "http://me:secret1@host/", "http://127.0.0.1:70000/", "http://[/", "file:///etc/passwd",
     "://x"],
)  # fmt: skip
def test_an_address_that_is_no_page_is_refused(url, run) -> None:
    code, _, said = run("watch", url)
    assert code == 2
    assert "it must be the address of a page, such as http://127.0.0.1:8080/" in said
    assert "secret1" not in said


def test_a_page_is_not_served_again(run) -> None:
    code, _, said = run("watch", "http://127.0.0.1:1/", "--serve")
    assert code == 2
    assert "--serve" in said


def cannot_watch(place: str, fact: str) -> AbstractContextManager[pytest.ExceptionInfo]:
    """Expect that a page cannot be watched; the message begins with its address, without the token."""
    return refuses("", fact=fact, where=without_secrets(place))


def test_a_redirect_is_not_followed() -> None:
    asked: list[str] = []

    def note(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)

    with foreign(note) as elsewhere, foreign(sends(b"", 302, Location=elsewhere)) as place, cannot_watch(place, "302"):
        PageReader(place).snapshot()
    assert asked == []


def test_a_proxy_of_the_environment_gets_no_token(monkeypatch) -> None:
    asked: list[str] = []
    with foreign(lambda handler: asked.append(handler.path)) as proxy, page(SEEN) as server:
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("no_proxy", raising=False)
        assert PageReader(server.url).snapshot().title == "a run"
    assert asked == []


GOOD = json.loads(to_json(SEEN))
EXTENT = [1.0, 1.0, 100.0, 0]


@pytest.mark.parametrize(
    "content",
    [
        b"<html>",
        b"[]",
        b"\xff",
        b"{}",
        *(
            json.dumps({**GOOD, **change}).encode()
            for change in (
                {"state": "odd"}, {"done": math.nan}, {"whole": math.inf}, {"done": "3"}, {"notes": [1]},
                {"facts": [["a"]]}, {"traces": [["loss", ["1"], EXTENT]]}, {"traces": [["loss", [10**400], EXTENT]]},
                {"traces": [["loss", [1.0], [1.0, 1.0, 1.0]]]}, {"traces": [["loss", [-1.0], EXTENT]]},
                {"tables": [["t", [["client", True]], []]]}, {"error": "OSError"}, {"title": None},
            )
        ),
    ],
)  # fmt: skip
def test_an_answer_that_is_no_snapshot_is_refused(content) -> None:
    with foreign(sends(content)) as place, cannot_watch(place, page_reader.NO_PAGE) as error:
        PageReader(place).snapshot()
    assert "hidden3" not in str(error.value)


@pytest.mark.parametrize("levels", [600, 900, 5000])
def test_an_answer_that_is_nested_too_deeply_is_refused(levels) -> None:
    """Notes that are nested lists are refused in a sentence, at any depth.

    The versions of Python differ in the depth that they read: notes that are read are refused as no list of texts.
    """
    content = b'{"notes": ' + b"[" * levels + b"]" * levels + b"}"
    said = "are nested too deeply" if levels > 1000 else r"are nested too deeply|notes is \[\["
    with foreign(sends(content)) as place, pytest.raises(ConfigurationError, match=said):
        PageReader(place).snapshot()


@pytest.mark.parametrize(
    "change",
    [{"traces": [["loss", [], EXTENT]]}, {"traces": [["loss", [math.nan, 5.0], [math.inf, 1.0, 100.0, -3]]]},
     {"tables": [["t", [["a", True, 0], ["b", False, None]], [["1", "2"], ["3"]]]]},
     {"tables": [["t", [], []]]}, {"done": math.inf}, {"title": "\x1b[31m"}],
)  # fmt: skip
def test_odd_snapshots_are_shown_without_an_error(change, run) -> None:
    with foreign(sends(json.dumps({**GOOD, **change}).encode())) as place:
        code, shown, _ = run("watch", place)
    assert code == 0
    assert "\x1b" not in shown


def test_long_traces_are_thinned_before_they_are_sent() -> None:
    long = MetricTrace("loss", [math.sin(n) for n in range(100_000)])
    sent = to_json(Snapshot("a run", "running", traces=[long] * 8))
    assert len(sent) < 10_000
    (got, *_) = from_json(sent.encode()).traces
    assert (sparkline(got), got.last, got.span) == (sparkline(long), long.last, long.span)


def test_an_answer_that_is_too_long_is_said_to_be_so(monkeypatch) -> None:
    monkeypatch.setattr(page_reader, "LONGEST", 1000)
    with foreign(sends(b" " * 10**6)) as place, pytest.raises(ConfigurationError) as error:
        PageReader(place).snapshot()
    assert "its answer is too long for a terminal: it has more than 1,000 bytes" in str(error.value)
    assert page_reader.NO_PAGE not in str(error.value)


def test_a_silent_page_is_waited_for_some_seconds(monkeypatch) -> None:
    monkeypatch.setattr(page_reader, "PATIENCE", 0.05)
    with foreign(lambda handler: time.sleep(0.2)) as place, cannot_watch(place, "timed out"):
        PageReader(place).snapshot()


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" "),
    ],
    ids=["interim answers", "a header", "the size of a chunk", "the content"],
)
def test_an_answer_that_arrives_byte_by_byte_is_bounded_in_time(first, again, monkeypatch) -> None:
    monkeypatch.setattr(page_reader, "WHOLE", 0.1)

    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(first)
        with suppress(OSError):  # the reader has closed the connection
            while True:
                handler.wfile.write(again)
                time.sleep(0.01)

    with foreign(drips) as place, cannot_watch(place, "part of its answer"):
        PageReader(place).snapshot()


def test_a_page_with_as_many_readers_as_it_allows_is_tried_again_later(monkeypatch) -> None:
    monkeypatch.setattr(window_server, "CONNECTIONS", 0)
    with page(SEEN) as server, cannot_watch(server.url, "as many readers as it allows"):
        PageReader(server.url).snapshot()


@pytest.mark.parametrize("token", ["…", "two secret1", "two\tsecret1", "two\nsecret1", "\x1bsecret1"])
@pytest.mark.parametrize("more", [[], ["--serve"]])
def test_a_token_that_was_not_copied_whole_is_refused_and_not_shown(token, more, run) -> None:
    code, _, said = run("watch", f"http://127.0.0.1:1/?token={token}", *more)
    assert code == 2
    assert "an address of ASCII characters without blanks: copy the whole address" in " ".join(said.split())
    assert "secret1" not in said


def test_what_does_not_speak_http_is_refused() -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")

    with foreign(answer) as place, cannot_watch(place, "SSH-2.0-OpenSSH"):
        PageReader(place).snapshot()
