"""Make temporary credentials for trials and tests: a certificate authority, the server's certificate and clients' keys.

A real federation should get its certificate from a real authority. Every site should make its own key by `ssh-keygen -t
ecdsa -b 384`, and only the public half should leave the site.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import require
from fedbilevel.flower.versions import require_flower

DAYS = 30  # the days for which the server's certificate is valid


@dataclass(frozen=True)
class Credentials:
    """The paths of a federation's credentials.

    `ca` and the `.pub` files are public; `key` and `clients` are private (mode 0600). The authority's own key is not
    stored, so that no further certificate can be signed with it.
    """

    ca: Path
    certificate: Path
    key: Path
    clients: tuple[Path, ...]

    def public(self, client: int) -> Path:
        """Return the path of the public half of a client's key, for `flwr supernode register`."""
        return self.clients[client].with_suffix(".pub")


def make(directory: Path, clients: int, names: Sequence[str] = ("localhost", "127.0.0.1")) -> Credentials:
    """Write credentials to `directory`: ca.crt, server.pem, server.key, client-0, client-0.pub, …; return their paths.

    Args:
        directory: the folder to write to; it is created if it is missing.
        clients: the number of clients. Each gets a NIST P-384 key in the format of OpenSSH, which Flower requires.
        names: the host names and addresses of the server.

    Raises:
        ConfigurationError: one of the files exists, or an argument is wrong. In both cases nothing is written.
        OSError: the directory cannot be written to.
    """
    require_flower()  # `cryptography` and `trustme` are installed with Flower
    require(clients >= 0, "clients", clients, "at least 0")
    require(len(names) > 0, "names", names, "at least one host name or address")
    found = Credentials(
        directory / "ca.crt",
        directory / "server.pem",
        directory / "server.key",
        tuple(directory / f"client-{k}" for k in range(clients)),
    )
    files = [found.ca, found.certificate, found.key, *found.clients, *map(found.public, range(clients))]
    if existing := [file.name for file in files if file.exists()]:
        raise ConfigurationError(
            f"{', '.join(existing)} would be overwritten; choose another directory", where=str(directory)
        )
    import trustme

    authority = trustme.CA(path_length=0)
    try:
        server = authority.issue_cert(*names, not_after=datetime.now(UTC) + timedelta(days=DAYS))
    except ValueError as error:
        message = f"a server cannot have one of the names {', '.join(names)}: {error}"
        allowed = "names that a certificate can have"
        raise ConfigurationError(path="names", got=[*names], allowed=allowed, message=message) from error
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(found.ca, authority.cert_pem.bytes())
    write(found.certificate, server.cert_chain_pems[0].bytes())
    write(found.key, server.private_key_pem.bytes(), private=True)
    for client in range(clients):
        private, public = client_key()
        write(found.clients[client], private, private=True)
        write(found.public(client), public)
    return found


def write(path: Path, content: bytes, private: bool = False) -> None:
    """Write a new file. Other users can never read a private file, not even while it is being written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def client_key() -> tuple[bytes, bytes]:
    """Return a new (private, public) key of a client, in the format of OpenSSH."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())  # the kind of key that Flower uses
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"
