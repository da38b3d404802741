"""What an engine tells its client once, checked when the client is made; everything later fails open instead.

It also knows where the service is by default. It does not connect to anything.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from draftd.client.channel import check_endpoint
from draftd.client.credentials import Credentials
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.params import MAX_K, MAX_VOCAB, DraftParams
from draftd.drafter.shm import default_root

TransportName = Literal["auto", "mapped", "handle", "inline"]

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
MAX_EXTRA_NAMESPACES = 64


def default_endpoint() -> str:
    """DRAFTD_ENDPOINT, else the service's default Unix socket as `unix:PATH`."""
    given = os.environ.get("DRAFTD_ENDPOINT")
    if given:
        return given
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"unix:{runtime}/draftd.sock" if runtime else f"unix:/tmp/draftd-{os.getuid()}/draftd.sock"


def default_shm_root() -> Path:
    """DRAFTD_SHM_ROOT, else the directory below which this user's services keep their blocks."""
    given = os.environ.get("DRAFTD_SHM_ROOT")
    return Path(given) if given else default_root()


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """An engine's side of an attachment.

    Attributes:
        endpoint: `unix:PATH`, a bare absolute path, or `host:port`.
        engine: Name of the engine, unique on the service.
        vocab_size: Tokens are in [0, vocab_size).
        k: Most tokens of a draft, in [1, 64]; the width of every `Drafts`.
        max_rows: Rows are in [0, max_rows).
        max_length: Longest row, prompt and output together, in tokens.
        namespace: Namespace of rows that name no other.
        extra_namespaces: Further namespaces that rows may name.
        transport: Wanted transport; `auto` maps where that works, else goes inline.
        timeout_ms: Longest time that a call from the decode thread may wait for the service, in milliseconds.
        params: How to draft; None takes the service's defaults.
        tokenizer_fingerprint: Identifies the tokenizer; empty: not checked.
        strict: Raise instead of failing open.
        credentials: TLS and the token.
        device_uuid: UUID of the GPU that the engine drafts on; empty: it drafts on the host.

    Raises:
        InvalidArgument: A value is outside its range.
    """

    endpoint: str
    engine: str
    vocab_size: int
    k: int
    max_rows: int
    max_length: int
    namespace: str
    extra_namespaces: tuple[str, ...]
    transport: TransportName
    timeout_ms: float
    params: DraftParams | None
    tokenizer_fingerprint: str
    strict: bool
    credentials: Credentials
    device_uuid: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.engine):
            raise InvalidArgument(f"engine is {self.engine!r}; it must be 1 to 128 letters, digits and . _ : / -", "engine")
        for name in (self.namespace, *self.extra_namespaces):
            if not _NAME.fullmatch(name):
                raise InvalidArgument(f"namespace is {name!r}; it must be 1 to 128 letters, digits and . _ : / -", "namespace")
        if len(self.extra_namespaces) > MAX_EXTRA_NAMESPACES:
            raise InvalidArgument(f"extra_namespaces has {len(self.extra_namespaces)} names; at most {MAX_EXTRA_NAMESPACES}")
        for field, value, high in (
            ("vocab_size", self.vocab_size, MAX_VOCAB),
            ("k", self.k, MAX_K),
            ("max_rows", self.max_rows, 2**16),
            ("max_length", self.max_length, 2**24),
            ("timeout_ms", self.timeout_ms, 60_000),
        ):
            if not 0 < value <= high:
                raise InvalidArgument(f"{field} is {value}; it must be above 0 and at most {high}", field)
        if self.transport not in ("auto", "mapped", "handle", "inline"):
            raise InvalidArgument(f"transport is {self.transport!r}; it must be auto, mapped, handle or inline", "transport")
        if self.params is not None and self.params.k > self.k:
            raise InvalidArgument(f"params.k is {self.params.k}; it must be at most k = {self.k}", "params.k")
        check_endpoint(self.endpoint, self.credentials)
        self.credentials.token()

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces of the attachment, its own first."""
        return (self.namespace, *(n for n in self.extra_namespaces if n != self.namespace))
