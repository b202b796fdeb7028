"""Throw-away credentials for a federation: a certificate authority, the server's certificate, a key per client.

For trials and tests. Who runs a federation that matters has certificates from elsewhere, and lets every site make its
own key (`ssh-keygen -t ecdsa -b 384`), of which only the public half leaves the site.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.flower.versions import require_flower

LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")  # of a host name, between its dots


@dataclass(frozen=True)
class Credentials:
    """Paths. `ca` and the `.pub` files may be handed on; `key` and `clients` are private (mode 0600).

    The authority's own key is not kept: nothing further can be certified.
    """

    ca: Path
    certificate: Path
    key: Path
    clients: tuple[Path, ...]

    def public(self, client: int) -> Path:
        """The public half of a client's key, for `flwr supernode register`."""
        return self.clients[client].with_suffix(".pub")


def make(
    directory: Path, clients: int, names: Sequence[str] = ("localhost", "127.0.0.1"), days: int = 30
) -> Credentials:
    """Write credentials to `directory`: ca.crt, server.pem, server.key, client-0, client-0.pub, …

    Args:
        clients: how many client keys (NIST P-384, OpenSSH format, as Flower wants them).
        names: host names and addresses under which the server is reached.
        days: how long the certificates are valid.

    Raises:
        ConfigurationError: one of the files exists, or an argument is wrong; nothing was written.
        OSError: the directory cannot be written to.
    """
    require_flower()  # which brings `cryptography`
    require(clients >= 0, "clients", clients, "at least 0")
    require(len(names) > 0, "names", names, "at least one host name or address")
    require(days >= 1, "days", days, "at least 1")
    found = Credentials(
        directory / "ca.crt",
        directory / "server.pem",
        directory / "server.key",
        tuple(directory / f"client-{k}" for k in range(clients)),
    )
    files = [found.ca, found.certificate, found.key, *found.clients, *map(found.public, range(clients))]
    if existing := [file.name for file in files if file.exists()]:
        raise ConfigurationError(f"{directory}: {', '.join(existing)} would be overwritten; choose another directory")
    authority, certificate, key = certify(names, timedelta(days=days))
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write(found.ca, authority)
    write(found.certificate, certificate)
    write(found.key, key, private=True)
    for client in range(clients):
        private, public = client_key()
        write(found.clients[client], private, private=True)
        write(found.public(client), public)
    return found


def write(path: Path, content: bytes, private: bool = False) -> None:
    """Write a new file; a private one is nobody else's to read at any moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def certify(names: Iterable[str], validity: timedelta) -> tuple[bytes, bytes, bytes]:
    """A new authority's certificate, a server certificate for `names` signed by it, and the server's key (PEM)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common)])

    def template(subject: str, public: ec.EllipticCurvePublicKey, authority: bool) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign"), False
        )
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("fedbilevel throw-away authority"))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))  # clocks differ
            .not_valid_after(now + validity)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=not authority,
                    key_cert_sign=authority,
                    encipher_only=False,
                    decipher_only=False,
                    **usage,
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
        )

    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    alternatives = x509.SubjectAlternativeName([general_name(name) for name in names])
    root = template("fedbilevel throw-away authority", authority_key.public_key(), True)
    server = template("fedbilevel server", server_key.public_key(), False).add_extension(alternatives, critical=False)
    pem = serialization.Encoding.PEM
    return (
        root.sign(authority_key, hashes.SHA384()).public_bytes(pem),
        server.sign(authority_key, hashes.SHA384()).public_bytes(pem),
        server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def general_name(name: str):  # type: ignore[no-untyped-def]
    """A host name or an address in the form that a certificate lists it in."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        fits = len(name) <= 253 and all(map(LABEL.fullmatch, name.removeprefix("*.").split(".")))
        require(fits, "a name of the server", name, "an address, or a host name of ASCII letters, digits, - and dots")
        return x509.DNSName(name)


def client_key() -> tuple[bytes, bytes]:
    """A client's (private, public) key in OpenSSH format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())  # as the certificates have, and Flower by itself
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"
