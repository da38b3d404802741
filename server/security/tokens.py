"""The token file: who may do what, read again when it changes. It holds hashes of tokens, never a token.

A token has 256 random bits, so one SHA-256 of it is enough, and nobody can guess one however fast he tries.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftd.server.security.files import FileRefused, Stamp, read_private, stamp
from draftd.server.security.principal import Principal, Quotas, Right
from draftd.server.security.rates import Rates

TOKEN_PREFIX = "draftd_"
MAX_TOKENS = 1024
MAX_FILE_BYTES = 2**20
_MAX_TOKEN_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_BEARER = "bearer "


class TokenEntry(BaseModel):
    """One table `[tokens.NAME]` of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    rights: list[Right] = Field(min_length=1)
    namespaces: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=256)
    requests_per_s: float | None = Field(None, ge=0, le=1e9, allow_inf_nan=False)
    tokens_per_s: float | None = Field(None, ge=0, le=1e12, allow_inf_nan=False)
    max_attachments: int | None = Field(None, ge=0, le=4096)
    max_namespaces: int | None = Field(None, ge=0, le=4096)


def new_token() -> str:
    """A token that nobody has."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What the file holds of a token: the SHA-256 of its text, in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse(data: bytes) -> dict[str, TokenEntry]:
    """The entries of a file by name.

    Raises:
        FileRefused: It is not what a token file must be; the message names the entry and the field.
    """
    try:
        content = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FileRefused(str(error)) from None
    listed = content.get("tokens", {})
    unknown = sorted(set(content) - {"tokens"})
    if unknown or not isinstance(listed, dict):
        raise FileRefused(f"unknown table {unknown[0]!r}" if unknown else "tokens must be a table of tables")
    if len(listed) > MAX_TOKENS:
        raise FileRefused(f"{len(listed)} tokens; at most {MAX_TOKENS}")
    entries = {name: _entry(name, fields) for name, fields in listed.items()}
    if len({entry.sha256 for entry in entries.values()}) != len(entries):
        raise FileRefused("two entries have the same sha256; each needs a token of its own")
    return entries


def _entry(name: str, fields: Any) -> TokenEntry:
    if not _NAME.fullmatch(name):
        raise FileRefused(f"token {name[:128]!r}: a name has 1 to 128 characters of letters, digits and . _ : / -")
    try:
        return TokenEntry.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise FileRefused(f"token {name!r}: {place}: {first['msg']}") from None


class Tokens:
    """The principals of a token file. The service's event loop is its only caller.

    Args:
        requests_per_s: Limit of principals whose entry sets none; 0 is none.
        tokens_per_s: The same for corpus tokens.
        quotas: Quotas of principals whose entry sets none.
    """

    def __init__(self, path: Path, requests_per_s: float, tokens_per_s: float, quotas: Quotas | None = None) -> None:
        """Reads the file; FileRefused if it cannot be used."""
        self.path = path
        self._defaults = (requests_per_s, tokens_per_s)
        self._quotas = quotas or Quotas()
        self._stamp: Stamp = ()
        self._principals: dict[bytes, Principal] = {}
        self.reload()

    @property
    def changed(self) -> bool:
        """The file is not the one that was read last."""
        return stamp([self.path]) != self._stamp

    def reload(self) -> None:
        """Reads the file again.

        Raises:
            FileRefused: It cannot be used; what was read before stays in force.
        """
        self._stamp = stamp([self.path])
        data = read_private(self.path, MAX_FILE_BYTES)
        try:
            entries = parse(data)
        except FileRefused as error:
            raise FileRefused(f"{self.path}: {error}") from None
        known = {principal.name: principal.rates for principal in self._principals.values()}
        principals = [self._principal(name, entry, known.get(name)) for name, entry in entries.items()]
        # In place: principals of open streams look themselves up in it.
        self._principals.clear()
        self._principals.update((principal.token_hash, principal) for principal in principals)

    def _principal(self, name: str, entry: TokenEntry, known: Rates | None) -> Principal:
        given = (entry.requests_per_s, entry.tokens_per_s)
        rates = Rates.of(*(default if own is None else own for own, default in zip(given, self._defaults, strict=True)))
        if known is not None and known.same_as(rates):
            # What is used up stays used up: a reload is no refill.
            rates = known
        own, default = (entry.max_attachments, entry.max_namespaces), (self._quotas.attachments, self._quotas.namespaces)
        quotas = Quotas(*(limit if said is None else said for said, limit in zip(own, default, strict=True)))
        scope = frozenset(entry.rights), tuple(entry.namespaces)
        return Principal(name, *scope, rates, bytes.fromhex(entry.sha256), self._principals, quotas)

    def authenticate(self, authorization: str | bytes | None) -> Principal | None:
        """The principal of an `authorization` header, `Bearer TOKEN`; None if it has no valid token.

        It compares with every entry whichever fits, and compares hashes: its time tells nothing of any token.
        """
        token = bearer_token(authorization)
        digest = hashlib.sha256(token).digest()
        found = None
        for known, principal in self._principals.items():
            if hmac.compare_digest(known, digest):
                found = principal
        return found if token else None


def bearer_token(authorization: str | bytes | None) -> bytes:
    """The token of an `authorization` header; empty if there is none, or it is no bearer token."""
    text = authorization.encode("latin-1", "replace") if isinstance(authorization, str) else authorization or b""
    if len(text) > _MAX_TOKEN_BYTES or text[: len(_BEARER)].lower() != _BEARER.encode():
        return b""
    return text[len(_BEARER) :].strip()
