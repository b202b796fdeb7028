"""Clients' public keys, by which the server recognises them."""

from __future__ import annotations

from pathlib import Path

from fedbilevel.core.errors import ConfigurationError


def public_keys(directory: Path, clients: int) -> dict[int, bytes]:
    """Every client's public key, as `one_form` gives it, from the files client-0.pub, client-1.pub, … of a folder.

    Raises:
        ConfigurationError: a client's file is missing or holds no public key, or two clients have the same key.
    """
    found: dict[int, bytes] = {}
    for client in range(clients):
        path = directory / f"client-{client}.pub"
        try:
            key = one_form(path.read_bytes())
        except OSError as error:
            why = error.strerror or error
            raise ConfigurationError(f"client {client} of {clients} has no public key: {path}: {why}") from error
        if key is None:
            raise ConfigurationError(f"{path} holds no public key: it must be one that ssh-keygen or OpenSSL wrote")
        if key in found.values():
            other = next(one for one, theirs in found.items() if theirs == key)
            raise ConfigurationError(f"{path}: client {client} has the same key as client {other}")
        found[client] = key
    return found


def one_form(key: bytes) -> bytes | None:
    """A public key, in OpenSSH's form or PEM, as DER, so that equal keys are equal bytes; None where it is none."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    load = serialization.load_pem_public_key if b"-----BEGIN" in key[:64] else serialization.load_ssh_public_key
    try:
        known = load(key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return known.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
