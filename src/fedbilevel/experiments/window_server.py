"""Serve the web page of `fedbilevel watch`: a single file, and a stream of events that keeps it up to date.

The page, the stream, and the content of the page as JSON, for terminals, are at three paths. The server answers only
GET requests for these paths, and no part of a request reaches the file system. The number of connections is bounded. At
127.0.0.1, every user of this machine may read the page; at another address, a request needs a token. A request is
refused if its header Host is neither an IP address nor a name of this machine. This prevents DNS rebinding, an attack
in which another website lets its own name point to this machine, so that the website's script can read the page.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedbilevel import __version__
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.experiments.snapshot import Snapshot
from fedbilevel.experiments.snapshot_json import to_json
from fedbilevel.experiments.tables import visible
from fedbilevel.experiments.window import on_page
from fedbilevel.wording import in_a_line, printable

LOOPBACK = "127.0.0.1"
CONNECTIONS = 100  # the largest number of open connections; further ones are closed without an answer
STREAMS = 50  # the largest number of pages that are kept up to date at the same time
ALIVE = 15.0  # after this many seconds without news, a stream sends a comment, to find out whether the page is closed
PATIENCE = 30.0  # the longest wait for a request, or for an answer to be read, in seconds
POLICY = (
    "default-src 'none'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class WindowServer(ThreadingHTTPServer):
    """A server of a page with the last published snapshot.

    Args:
        host: an address or a name of this machine. It must not be empty, since this would mean every address of this
            machine.
        port: the port; 0: any free port.

    Attributes:
        token: the text that every request must contain; "" at a loopback address, where no token is needed.

    Raises:
        ConfigurationError: the host is empty, or the port cannot be opened.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        require(bool(host.strip()), "--host", host, f"an address or a name of this machine; left out, it is {LOOPBACK}")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), WindowRequest)
        except OSError as error:
            text = f"{host}:{port} cannot be opened: {error.strerror or error}"
            raise ConfigurationError(text, where="--serve") from error
        address = ipaddress.ip_address(self.socket.getsockname()[0])
        own = "localhost" if address.is_loopback else name_of_machine()
        self.host = own if address.is_unspecified else host
        self.names = {self.host.lower(), "localhost", socket.gethostname().lower(), own.lower()}
        self.token = "" if address.is_loopback else secrets.token_urlsafe(24)
        self.template = Template((resources.files("fedbilevel.experiments") / "window.html").read_text("utf-8"))
        self.news, self.version, self.snapshot, self.content = threading.Condition(), 0, Snapshot("", "waiting"), ""
        self.connections, self.streams = threading.BoundedSemaphore(CONNECTIONS), threading.BoundedSemaphore(STREAMS)

    @property
    def url(self) -> str:
        """Return the address of the page, with the token.

        If the host means every address, the name of this machine is used.
        """
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def publish(self, snapshots: Iterable[Snapshot]) -> None:
        """Publish the snapshots that an iterable yields, one after the other."""
        for snapshot in snapshots:
            shown, content = drawn(snapshot)
            if content != self.content:
                with self.news:
                    self.snapshot, self.content, self.version = shown, content, self.version + 1
                    self.news.notify_all()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own, or close it if too many connections are open."""
        if not self.connections.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started
            self.connections.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors of this program, but not the errors that arise when a browser closes its connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def name_of_machine() -> str:
    """Return the name by which other machines most likely find this machine, with its domain if the domain is known."""
    name = socket.getfqdn()
    of_itself = name.lower().startswith(("localhost", "ip6-")) or name.endswith(".arpa") or not name
    return socket.gethostname() if of_itself else name


def drawn(snapshot: Snapshot) -> tuple[Snapshot, str]:
    """Return a snapshot with its HTML.

    If the snapshot cannot be drawn, return a snapshot that says so instead.
    """
    try:
        return snapshot, on_page(snapshot)
    except Exception as error:  # noqa: BLE001 - an error of one page must not stop the server
        note = f"this state cannot be shown ({type(error).__name__}: {in_a_line(error)})"
        instead = Snapshot(snapshot.title, snapshot.state, notes=[note], is_private=snapshot.is_private)
        return instead, on_page(instead)


class WindowRequest(BaseHTTPRequestHandler):
    """The answer to a request, by the rules in the docstring of the module."""

    server: WindowServer
    timeout = PATIENCE

    def do_GET(self) -> None:
        try:
            place = urlsplit(self.path)
        except ValueError:
            self.refuse(HTTPStatus.BAD_REQUEST)
            return
        given = parse_qs(place.query).get("token", [""])[0]
        if not self.has_allowed_host():
            self.refuse(HTTPStatus.MISDIRECTED_REQUEST, self.why_misdirected())
        elif not hmac.compare_digest(given.encode(), self.server.token.encode()) and self.server.token:
            self.refuse(HTTPStatus.FORBIDDEN)
        elif place.path == "/":
            self.send_page()
        elif place.path == "/events":
            self.send_events()
        elif place.path == "/snapshot":
            self.begin(HTTPStatus.OK, "application/json")
            self.wfile.write(to_json(self.server.snapshot).encode())
        else:
            self.refuse(HTTPStatus.NOT_FOUND)

    def do_POST(self) -> None:
        self.refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = do_POST

    def has_allowed_host(self) -> bool:
        """Return whether the header Host is an IP address or a name of this machine.

        The browser puts the name from the address bar into this header. A name that is not a name of this machine is
        refused, even if it resolves to this machine's address.
        """
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            return host in self.server.names or bool(ipaddress.ip_address(host))
        except ValueError:
            return False

    def why_misdirected(self) -> str:
        """Return which hosts are allowed in the address of the page.

        The names of this machine are included only if no token is needed. Otherwise a foreign website could learn the
        names, since the token has not been checked at this point.
        """
        names = "the name in the address that the command printed"
        if not self.server.token:
            names = " or ".join(sorted(self.server.names))
        asked = printable(self.headers.get("Host", ""))
        return (
            f"The address has the host {asked!r}. Open the page with an IP address of this machine, or with {names}.\n"
        )

    def refuse(self, status: HTTPStatus, why: str = "") -> None:
        headers = {"Allow": "GET"} if status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        self.begin(status, "text/plain; charset=utf-8", headers)
        if self.command != "HEAD":
            self.wfile.write(f"{status.value} {status.phrase}\n{why}".encode())

    def send_page(self) -> None:
        server, nonce = self.server, secrets.token_urlsafe(16)
        with server.news:
            title, content = visible(server.snapshot.title), server.content
            parts = {"title": title, "content": content, "version": __version__, "nonce": nonce}
        self.begin(HTTPStatus.OK, "text/html; charset=utf-8", {"Content-Security-Policy": POLICY.format(nonce)})
        self.wfile.write(server.template.substitute(parts).encode())

    def send_events(self) -> None:
        """Send the content of the page each time it changes, until the page is closed."""
        server, shown = self.server, 0
        if not server.streams.acquire(blocking=False):
            return self.refuse(HTTPStatus.SERVICE_UNAVAILABLE)
        try:
            self.begin(HTTPStatus.OK, "text/event-stream; charset=utf-8")
            while True:
                with server.news:
                    if server.version == shown:
                        server.news.wait(ALIVE)
                    content = server.content if server.version > shown else None
                    shown = server.version
                lines = [":"] if content is None else [f"data: {line}" for line in content.splitlines()]
                self.wfile.write("\n".join([*lines, "\n"]).encode())
        finally:
            server.streams.release()

    def begin(self, status: HTTPStatus, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "fedbilevel"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, since the line of a request contains the token."""
