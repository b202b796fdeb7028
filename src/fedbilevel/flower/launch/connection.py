"""Check a site before it starts: read its node configuration as Flower does, and try to reach its SuperLink.

If the SuperLink is not reached, the report says whether address, TLS, clock or key is the reason; Flower's log does not
distinguish these reasons. The trial is Flower's own request to activate a node, but with an interval between heartbeats
that the SuperLink refuses. The SuperLink checks the key first and then refuses the interval, so the trial finds a wrong
key and changes nothing at the SuperLink.
"""

from __future__ import annotations

import re
import ssl
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import click
import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.common.config import parse_config_args
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import MAX_TIMESTAMP_DIFF_SECONDS, MIN_TIMESTAMP_DIFF_SECONDS
from flwr.supercore.error.base import ApiErrorCode
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import in_a_line, printable, read_bytes, require

REFUSED = 0.0  # an interval between heartbeats, in seconds, that the SuperLink refuses


def read_node_config(text: str) -> dict[str, Any]:
    """Return a node configuration from "NAME=VALUE …", read as `flower-supernode --node-config` does.

    Raises:
        ConfigurationError: Flower cannot read it.
    """
    try:
        return parse_config_args([text])
    except (ValueError, OSError, click.ClickException) as error:
        text = f"--node-config cannot be read; texts need quotes, as in site='north': {in_a_line(error, 400)}"
        raise ConfigurationError(text) from error


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a site's private key from a file.

    Raises:
        ConfigurationError: the file has no private key, or a key of another kind than ECDSA.
    """
    try:
        key = load_ssh_private_key(read_bytes(path), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"it has no private key: {in_a_line(error)}", where=str(path)) from error
    fits = isinstance(key, ec.EllipticCurvePrivateKey)
    require(fits, f"the key in {path}", type(key).__name__, "an ECDSA key: ssh-keygen -t ecdsa -b 384")
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def why_unreached(address: str, authority: bytes | None = None, key: ec.EllipticCurvePrivateKey | None = None) -> str:
    """Try to reach the SuperLink as a site would; return why this fails, or "".

    Args:
        address: the SuperLink's address, host:port.
        authority: the certificates, in PEM, of the authority that has signed the SuperLink's certificate; None: connect
            without TLS.
        key: the site's private key; None: the trial does not find out whether a key is registered.
    """
    private = generate_key_pairs()[0] if key is None else key
    public = private.public_key()
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=REFUSED)
    signed = [NodeAuthHttpInterceptor(private, public)]
    try:
        with FleetHttpClient.from_server_address(address, authority is None, authority, signed) as client:
            client.ActivateNode(asked)
    except httpx.HTTPStatusError as error:
        return why_refused(error.response, key is not None)
    except ValueError:  # the answer is not a message of Flower
        return f"the server at {address} is not a SuperLink"
    except (httpx.TransportError, httpx.InvalidURL, ssl.SSLError, UnicodeDecodeError) as error:
        return why_no_answer(error, address, authority is not None)
    return ""


def why_refused(response: httpx.Response, keyed: bool) -> str:
    """Return why the SuperLink refused the trial, such as a wrong clock or an unknown key.

    The result is "" if only the interval between heartbeats was refused. An unknown key also gives "" if the trial did
    not use the site's key (`keyed` is False).
    """
    code = re.search(r'"code": ?(\d+)', response.text)
    if code is None:
        why = why_untimely(response) if response.status_code == httpx.codes.UNAUTHORIZED else ""
        return why or f"the server at {response.url.netloc.decode()} is not a SuperLink (HTTP {response.status_code})"
    if int(code[1]) == ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL:
        return ""
    if int(code[1]) != ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
        return f"the SuperLink refuses the site: {printable(response.text)}"
    return (
        "the key is not registered; the operator registers it by flwr supernode register KEY.pub CONNECTION"
        if keyed
        else ""
    )


def why_untimely(response: httpx.Response) -> str:
    """Return how wrong this machine's clock is, if this is so much that Flower refuses its signatures; otherwise ""."""
    try:
        there = parsedate_to_datetime(response.headers["date"]).timestamp()  # in whole seconds
    except (KeyError, ValueError):
        return ""
    ahead, most_ahead, most_behind = time.time() - there, -MIN_TIMESTAMP_DIFF_SECONDS, MAX_TIMESTAMP_DIFF_SECONDS
    if 1 - most_behind < ahead < most_ahead:
        return ""
    way, allowed = "ahead of" if ahead > 0 else "behind", f"{most_ahead} s ahead and {most_behind} s behind"
    return f"this machine's clock is {abs(ahead):.0f} s {way} the SuperLink's, which allows {allowed}: set it by NTP"


def why_no_answer(error: Exception, address: str, tls: bool) -> str:
    """Return why a request got no answer over HTTP."""
    said = in_a_line(error)
    if isinstance(error, UnicodeDecodeError) or "does not contain a certificate" in said:
        return "the file of --root-certificates has no certificate in PEM"
    if "certificate verify failed" in said:
        why = said.partition("certificate verify failed: ")[2] or said
        return (
            f"the SuperLink's certificate is not valid: {why}; check its host names, its dates (and the clock), "
            "and its authority"
        )
    if not tls and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"{address} does not accept plain HTTP; if it has TLS, pass --root-certificates instead of --insecure"
    if isinstance(error, httpx.ConnectError) and "SSL" in said:
        return f"{address} does not accept TLS ({said}): it may have been started with --insecure"
    return f"{address} does not answer: {said}"
