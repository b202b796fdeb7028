"""The credentials of a trial federation certify its server and clients, are private, and overwrite nothing.

Further tests check what a site is told if it does not reach its SuperLink.
"""

import contextlib
import re
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from flwr.supercore.date import now
from flwr.supernode import node_auth_http_interceptor

from fedbilevel.flower.launch import connection, credentials
from fedbilevel.flower.launch.connection import private_key, why_unreached
from fedbilevel.flower.launch.processes import Federation
from refusals import refuses


def test_private_files_are_their_owners_alone(tmp_path):
    made = credentials.make(tmp_path / "new", clients=2)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
    private = {"server.key", "client-0", "client-1"}
    assert {name for name, mode in modes.items() if mode == 0o600} == private
    assert modes.keys() - private == {"ca.crt", "server.pem", "client-0.pub", "client-1.pub"}
    assert made.public(1) == tmp_path / "new" / "client-1.pub"
    for path in (tmp_path / "new").iterdir():
        assert (b"PRIVATE" in path.read_bytes()) == (path.name in private)


def test_nothing_is_overwritten(tmp_path):
    credentials.make(tmp_path, clients=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with refuses("", fact="client-0, client-0.pub would be overwritten", where=str(tmp_path)):
        credentials.make(tmp_path, clients=2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", "a b", "a..b", "-a", "a" * 64, "host:9092", "a\0"])
def test_what_no_certificate_can_name_is_refused_and_nothing_written(tmp_path, name):
    with refuses("names", ["localhost", name]):
        credentials.make(tmp_path / "new", clients=1, names=["localhost", name])
    assert not (tmp_path / "new").exists()


def test_a_clients_halves_belong_together_and_no_two_clients_share_a_key(tmp_path):
    """The private and the public file of a client have the same key, and each client has another key."""

    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    made = credentials.make(tmp_path, clients=3)
    numbers = []
    for client, path in enumerate(made.clients):
        public = load_ssh_public_key(made.public(client).read_bytes())
        assert load_ssh_private_key(path.read_bytes(), None).public_key() == public
        assert public.curve.name == "secp384r1"  # NIST P-384, which Flower requires
        numbers.append(public.public_numbers())
    assert len(set(numbers)) == 3


def handshake(made, trust, name):
    """Make a TLS connection over a pair of sockets; the client trusts the authority `trust` and expects `name`."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(trust))
    server.load_cert_chain(made.certificate, made.key)
    ours, theirs = socket.socketpair()

    def serve():
        with contextlib.suppress(ssl.SSLError, OSError), theirs:  # if the client refuses, it raises the error
            server.wrap_socket(theirs, server_side=True).close()

    with ours, ThreadPoolExecutor() as pool:
        pool.submit(serve)
        client.wrap_socket(ours, server_hostname=name).close()


def test_the_server_is_believed_under_its_names_only_and_by_its_authority_only(tmp_path):
    made = credentials.make(tmp_path / "a", clients=0, names=["example.org", "127.0.0.1", "::1"])
    other = credentials.make(tmp_path / "b", clients=0)
    for name in ("example.org", "127.0.0.1", "::1"):
        handshake(made, made.ca, name)
    for trust, name in [(made.ca, "example.com"), (made.ca, "127.0.0.2"), (other.ca, "example.org")]:
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(made, trust, name)


def test_a_certificate_that_has_expired_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(credentials, "DAYS", -1)
    made = credentials.make(tmp_path, clients=0)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as pool:

        def serve():
            with contextlib.suppress(ssl.SSLError, OSError), listening.accept()[0] as taken:
                context.wrap_socket(taken, server_side=True).close()

        pool.submit(serve)
        said = why(f"127.0.0.1:{listening.getsockname()[1]}", made.ca)
    assert said.startswith("the SuperLink's certificate is not valid: certificate has expired")


@pytest.mark.parametrize("wrong", [{"clients": -1}, {"clients": 1, "names": []}])
def test_wrong_arguments_are_named(tmp_path, wrong):
    with refuses(*list(wrong.items())[-1]):
        credentials.make(tmp_path, **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def federation(tmp_path):
    """A federation whose SuperLink runs and knows the first of two keys, without SuperNodes."""
    trial = Federation(tmp_path / "trial", clients=1)
    for name in ("logs", "operator"):
        (trial.directory / name).mkdir(parents=True)
    trial.credentials = credentials.make(trial.directory / "credentials", clients=2)
    kind = trial.persistent, trial.database
    trial.commands = trial.commands_of(trial.credentials, trial.port, trial.node_ports, trial.node_configs, *kind)
    trust = f'address = "{trial.address}"\nroot-certificates = "{trial.credentials.ca}"\n'
    (trial.directory / "operator" / "config.toml").write_text(f"[superlink.federation]\n{trust}")
    try:
        trial.restart_superlink()
        trial.register(0)
        yield trial
    finally:
        trial.stop()


def why(address, certificates=None, key=None):
    """Return why a SuperLink is not reached; certificates and key are read from their files."""
    return why_unreached(address, certificates and certificates.read_bytes(), key and private_key(key))


@pytest.mark.parametrize("status", [200, 404])
def test_a_server_that_is_no_superlink_is_told_from_one(status, tmp_path):
    """A web server that is not a SuperLink is reported as such, whatever its status is."""

    class Web(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_):
            pass

    key = credentials.make(tmp_path, clients=1).clients[0]
    with HTTPServer(("127.0.0.1", 0), Web) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        for given in (None, key):
            assert "is not a SuperLink" in why(f"127.0.0.1:{server.server_port}", None, given)
        server.shutdown()


@pytest.mark.slow
def test_a_site_hears_why_it_does_not_reach_its_superlink(federation, tmp_path, monkeypatch):
    """A site is told whether its key, its certificates, the address or its clock is wrong.

    Flower allows clocks that are up to 5 s ahead and 305 s behind. So a clock that is 10 s ahead or 600 s behind is
    reported, and one that is 200 s behind is not.
    """
    address, made = federation.address, federation.credentials
    (one, other), stranger = made.clients, credentials.make(tmp_path / "other", clients=0).ca
    assert why(address, made.ca, one) == ""
    assert why(address, made.ca) == ""
    assert "the key is not registered" in why(address, made.ca, other)
    assert "if it has TLS, pass --root-certificates" in why(address, None, one)
    assert "certificate is not valid: unable to get local issuer" in why(address, stranger, one)
    assert "has no certificate in PEM" in why(address, one, one)
    assert "does not answer" in why("127.0.0.1:1", made.ca, one)
    assert "does not answer" in why("host:port", made.ca, one)
    with refuses("", fact="no private key", where=str(made.ca)):
        why(address, made.ca, made.ca)
    for ahead, off in {10: "1[0-5] s ahead of", -200: "", -600: "(59|60)[0-9] s behind"}.items():
        with monkeypatch.context() as patch:
            shift = timedelta(seconds=ahead)
            patch.setattr(node_auth_http_interceptor, "now", lambda shift=shift: now() + shift)
            patch.setattr(connection.time, "time", lambda shift=shift: (datetime.now(UTC) + shift).timestamp())
            for key in (one, other, None):
                said = why(address, made.ca, key)
                if off:
                    assert re.search(rf"clock is {off} the SuperLink's, which allows 5 s ahead and 305 s behind", said)
                else:
                    assert ("the key is not registered" in said) == (key is other)
    assert federation.online() == 0  # the requests have changed nothing at the SuperLink


@pytest.mark.parametrize(("status", "headers", "text", "said"), [
    (401, {"date": "Thu, 01 Jan 1970 00:00:00 GMT"}, "{}", "ahead of the SuperLink's"),
    (401, {"date": "yesterday"}, "{}", r"is not a SuperLink \(HTTP 401\)"),  # from a proxy
    (401, {}, "{}", r"is not a SuperLink \(HTTP 401\)"),
    (503, {}, '{"code": 1005, "detail": "not \x1b[2J ready"}', "refuses the site: .* \"not �\\[2J ready\""),
])  # fmt: skip
def test_only_a_refused_key_is_called_unregistered(status, headers, text, said):
    response = httpx.Response(status, headers=headers, text=text, request=httpx.Request("POST", "https://host:1"))
    assert re.search(said, connection.why_refused(response, keyed=True))
