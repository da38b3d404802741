"""Users of NATS that prove who they are by a key: the keys, and the signed claims that a server believes."""

from __future__ import annotations

import base64
import json
import os
import time
from typing import Any

import nkeys

OPERATOR, ACCOUNT, USER = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER


def seed(kind: int) -> str:
    """The seed of a key that nobody has."""
    return bytes(nkeys.encode_seed(os.urandom(32), prefix=kind)).decode()


def public(secret: str) -> str:
    """The public key of a seed."""
    return bytes(nkeys.from_seed(bytearray(secret.encode())).public_key).decode()


def jwt(issuer: str, subject: str, name: str, kind: str, **claims: Any) -> str:
    """A claim about `subject`, a public key, signed with the seed of its issuer."""
    body = {
        "iat": int(time.time()),
        "iss": public(issuer),
        "sub": subject,
        "name": name,
        "jti": name,
        "nats": {"type": kind, "version": 2} | claims,
    }
    parts = [_encoded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)]
    signature = nkeys.from_seed(bytearray(issuer.encode())).sign(".".join(parts).encode())
    return ".".join([*parts, _encoded(signature)])


def creds(token: str, secret: str) -> str:
    """A .creds file."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"*** keep it to yourself ***\n\n-----BEGIN USER NKEY SEED-----\n{secret}\n------END USER NKEY SEED------\n"
    )


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
