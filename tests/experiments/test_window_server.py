"""Who may read the page of `fedbilevel watch --serve`, what may the page do, and is it kept up to date?"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from fedbilevel import cli, experiments
from fedbilevel.experiments import window_server
from fedbilevel.experiments.snapshot import MetricTrace, Snapshot
from fedbilevel.experiments.tables import Table, text_column
from fedbilevel.experiments.window import on_page
from fedbilevel.experiments.window_server import WindowServer
from refusals import refuses

EVIL = "<script>alert(1)</script>\"'&\n$title"
HOSTILE = Snapshot(
    EVIL,
    "running",
    EVIL,
    done=1,
    whole=2,
    amount=EVIL,
    facts={EVIL: EVIL},
    traces=[MetricTrace(EVIL, [1.0, float("nan"), 2.0])],
    tables=[Table(EVIL, [text_column(EVIL, [EVIL, EVIL]), text_column(EVIL, [EVIL, EVIL])], [EVIL])],
    notes=[EVIL],
)


@pytest.fixture
def server() -> Iterator[WindowServer]:
    yield from started("127.0.0.1")


@pytest.fixture
def guarded() -> Iterator[WindowServer]:
    """Yield a server that other machines can reach, and that therefore has a token."""
    yield from started("0.0.0.0")


def started(host: str) -> Iterator[WindowServer]:
    """Start a server with the page of a run that has not begun, and yield it."""
    with WindowServer(host, 0) as server:
        server.publish([Snapshot("a run", "waiting")])
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield server
        server.shutdown()


def asked(server: WindowServer, path: str = "/", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_script_alone(server) -> None:
    answer = asked(server)
    page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert answer.status == 200
    assert "a run" in page
    assert re.findall(r"https?://|@import|url\(| src=| href=", page) == []
    (nonce,) = set(re.findall(r'nonce="([^"]+)"', page))
    assert len(nonce) > 20
    assert page.count("<script") == page.count("<style") == 1
    assert f"default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert nonce not in asked(server).read().decode()  # each page has its own nonce
    headers = {name: answer.headers[name] for name in window_server.HEADERS}
    assert headers == window_server.HEADERS
    assert answer.headers["Server"] == "fedbilevel"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_but_get_is_answered(server, method) -> None:
    answer = asked(server, method=method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/spec.toml", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/x"])
def test_no_path_leads_to_a_file(server, path) -> None:
    answer = asked(server, path)
    assert (answer.status, answer.read()) == (404, b"404 Not Found\n")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "[::1", "a@b"])
def test_a_name_of_elsewhere_is_refused(server, guarded, host) -> None:
    """A request for a host name that is not of this machine is refused, with a token or without.

    Otherwise a website could read the page by making its own name lead to this machine.
    """
    assert asked(server, Host=host).status == 421
    assert asked(server, "/events", Host=host).status == asked(server, "/snapshot", Host=host).status == 421
    assert asked(guarded, f"/?token={guarded.token}", Host=host).status == 421


def test_the_refusal_of_a_name_says_which_are_allowed_but_not_where_a_token_is_needed(server, guarded) -> None:
    """The refusal of a host name lists the allowed names, except on a server that needs a token."""
    hidden = asked(guarded, Host="evil.example").read().decode()
    assert "the name in the address that the command printed" in hidden
    assert "localhost" not in hidden
    lines = asked(server, Host="evil.example\x07").read().decode().splitlines()
    assert lines[0] == "421 Misdirected Request"
    assert lines[1].startswith(
        "The address has the host 'evil.example�'. Open the page with an IP address of this machine"
    )
    assert {"127.0.0.1", "localhost", socket.gethostname().lower()} <= set(re.findall(r"[\w.-]*\w", lines[1]))


@pytest.mark.parametrize(
    ("full", "shown"),
    [("Server.example.org", "Server.example.org"), ("localhost", "server"), ("localhost.localdomain", "server"),
     ("1.0.ip6.arpa", "server")],
)  # fmt: skip
def test_the_page_at_every_address_is_printed_with_the_name_of_the_machine(full, shown, monkeypatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: full)
    monkeypatch.setattr(socket, "gethostname", lambda: "server")
    for server in started("0.0.0.0"):
        assert server.url == f"http://{shown}:{server.server_address[1]}/?token={server.token}"
        assert asked(server, f"/?token={server.token}", Host=shown).status == 200


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80", "192.168.1.7:80", socket.gethostname()])
def test_addresses_and_names_of_this_machine_are_answered(server, host) -> None:
    assert asked(server, Host=host).status == 200


def test_others_need_the_token(guarded) -> None:
    token = guarded.token
    assert len(token) >= 32
    assert guarded.url.endswith(f"/?token={token}")
    for path in ("/", "/events", "/snapshot", "/x"):
        for given in ("", "?token=", f"?token={token[:-1]}", f"?token={token}x", "?token=%ff", f"?other={token}"):
            assert asked(guarded, path + given).status == 403
    assert asked(guarded, f"/?token={token}").status == 200


def test_this_machine_needs_no_token(server) -> None:
    assert server.token == ""
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
    assert asked(server, "/?token=x").status == 200


def test_nothing_is_logged(guarded, capfd) -> None:
    for token in (guarded.token, "wrong"):
        asked(guarded, f"/?token={token}").read()
    asked(guarded, f"/?token={guarded.token}", method="BREW").read()
    with socket.create_connection(("127.0.0.1", guarded.server_address[1])) as broken:
        broken.sendall(f"GET /?token={guarded.token} nonsense\r\n\r\n".encode())
        assert broken.recv(1000)
    with socket.create_connection(("127.0.0.1", guarded.server_address[1])) as broken:
        broken.sendall(b"GET http://[/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert b" 400 " in broken.recv(1000)
    assert capfd.readouterr() == ("", "")


class Elements(HTMLParser):
    """The names of the elements and attributes of a page, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data) -> None:
        self.texts.append(data)


def test_texts_of_runs_are_escaped_wherever_they_stand(server) -> None:
    found = Elements(on_page(HOSTILE))
    assert found.tags & {"script", "img", "a"} == set()
    assert found.attributes <= {
        "aria-label",
        "class",
        "d",
        "max",
        "preserveaspectratio",
        "role",
        "scope",
        "value",
        "viewbox",
    }
    assert sum("<script>alert(1)</script>" in text for text in found.texts) > 10
    server.publish([HOSTILE])
    page = asked(server).read().decode()
    assert page.count("<script") == page.count("</script") == 1
    assert "$title" in page  # it is text, and not a place to fill in


def test_a_value_that_is_not_finite_is_drawn_as_a_gap() -> None:
    page = on_page(HOSTILE)
    assert "1 not finite" in page
    assert '<path d="M0.0,48.0M240.0,0.0"/><path class="gap" d="M120.0,0V48"/>' in page
    assert "<b>NaN</b>" in on_page(Snapshot("", "running", traces=[MetricTrace("loss", [float("nan")])]))


def events(answer: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the data of each event of a stream."""
    lines: list[str] = []
    while True:
        line = answer.readline().decode().removesuffix("\n")
        if line.startswith("data: "):
            lines.append(line[6:])
        elif lines:
            yield "\n".join(lines)
            lines = []


def test_a_page_is_told_what_has_changed(server) -> None:
    answer = asked(server, "/events")
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    news = events(answer)
    assert next(news) == on_page(Snapshot("a run", "waiting"))
    changed = Snapshot("a run", "running", facts={"round": "3"})
    server.publish([Snapshot("a run", "waiting"), changed])  # the first one is on the page already
    assert next(news) == on_page(changed)


def test_a_stream_without_news_says_that_it_is_alive(server, monkeypatch) -> None:
    monkeypatch.setattr(window_server, "ALIVE", 0.01)
    answer = asked(server, "/events")
    next(events(answer))
    assert [answer.readline() for _ in range(4)] == [b":\n", b"\n", b":\n", b"\n"]


def test_streams_are_bounded(server, monkeypatch) -> None:
    server.streams = threading.BoundedSemaphore(1)
    first = asked(server, "/events")
    assert first.status == 200
    assert asked(server, "/events").status == 503


def test_connections_are_bounded_and_a_closed_one_makes_room(server) -> None:
    server.connections = threading.BoundedSemaphore(1)
    idle = socket.create_connection(("127.0.0.1", server.server_address[1]))
    stop = time.monotonic() + 20
    while (served := answers(server)) and time.monotonic() < stop:  # until the idle one is accepted
        pass
    assert not served
    idle.close()
    while not answers(server):
        assert time.monotonic() < stop


def answers(server: WindowServer) -> bool:
    """Return whether a connection is answered, and not closed at once."""
    try:
        return asked(server).status == 200
    except (http.client.RemoteDisconnected, ConnectionError):
        return False


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_refused_since_it_would_mean_every_address(host, tmp_path, capsys) -> None:
    """An empty host is refused, because a socket takes it for all addresses of the machine."""
    with refuses("--host", host, "127.0.0.1"):
        WindowServer(host, 0)
    (tmp_path / "spec.toml").write_text(experiments.configure(task="quadratic").to_toml())
    assert cli.main(["watch", str(tmp_path), "--serve", "--host", host]) == 2
    assert "an address or a name of this machine; left out, it is 127.0.0.1" in capsys.readouterr().err


def test_a_state_that_cannot_be_drawn_does_not_end_the_server(server) -> None:
    bad = MetricTrace("loss", ["no number"])  # type: ignore[list-item]
    after = Snapshot("a run", "running", facts={"round": "3"})
    server.publish([Snapshot("a run", "running", traces=[bad])])
    assert "this state cannot be shown (TypeError: " in asked(server).read().decode()
    server.publish([after])
    assert on_page(after) in asked(server).read().decode()


def test_a_port_that_is_taken_is_refused(server) -> None:
    port = server.server_address[1]
    with refuses("", fact=f"127.0.0.1:{port} cannot be opened: Address already in use", where="--serve"):
        WindowServer("127.0.0.1", port)
    with refuses("", fact="no-such-host.invalid:0", where="--serve"):
        WindowServer("no-such-host.invalid", 0)
