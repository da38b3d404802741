"""Hostile calls of every rpc, from the API's descriptors: bytes that are no message, messages with hostile values, and broken ones.

Many are right but for one value, so that they get past the first checks. The same seed gives the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_channelz.v1 import channelz_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from draftd.drafter.layout import LAYOUT_VERSION
from draftd.proto.draftd.v1 import draftd_pb2 as pb

VOCABULARY = 1000
_INT32 = (0, 1, -1, 2, 7, 64, 65, 255, VOCABULARY - 1, VOCABULARY, 4096, 65_536, 2**21 - 1, 2**21, 2**31 - 1, -(2**31))
_INT64 = (*_INT32, 2**31, 2**53, 2**63 - 1, -(2**63), 2**63 - 4)
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1000.0, 1000.1, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    *("", "default", "a", "a/b", "_warm_up", "_other", "*", "../../etc/passwd", "/dev/shm", "/proc/self/mem", "/dev/zero", "a\0b"),
    *(
        "a" * 128,
        "a" * 129,
        "ü" * 64,
        "\U0001f600" * 33,
        "{}",
        "%s%n",
        "${jndi:x}",
        "'; DROP TABLE documents; --",
        "\r\nx: y",
        "x" * 20_000,
    ),
)
_NAMES = tuple(f"hostile-{i}" for i in range(12))
_PRESENT = {
    "attachment_id": 0.7,
    "namespace": 0.5,
    "document_id": 0.6,
    "offset": 0.2,
    "discard": 0.2,
    "row_index": 0.05,
    "tensors": 0.1,
    "extra_namespaces": 0.3,
    "prompt_length": 0.5,
}
"""How often a field is there that other fields are at odds with."""
_USUAL = {"vocab_size": VOCABULARY, "max_rows": 4, "max_length": 512, "k": 8, "max_depth": 24, "layout_version": LAYOUT_VERSION}
_MALICE = (0.0, 0.02, 0.1, 0.5)
"""Share of a message's values that are wrong; one is drawn for each message."""
_OURS = 4
"""Calls of draftd's own services for each of the standard ones."""
_MOST_ITEMS = 6
_MANY_ITEMS = 3000
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class HostileCall:
    """One call: the method's path, whether each side streams, and the messages of the client."""

    path: str
    client_streams: bool
    server_streams: bool
    messages: tuple[bytes, ...]


@dataclass(slots=True)
class HostileCalls:
    """An endless supply.

    Attributes:
        attachments: Ids that calls may name beside wrong ones; whoever makes the calls adds those that were answered.
        handles: Paths that tensors may name beside wrong ones.
    """

    seed: int
    attachments: list[str] = field(default_factory=list)
    handles: Sequence[str] = ()
    _random: random.Random = field(init=False)
    _methods: list[MethodDescriptor] = field(init=False)
    _malice: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        standard = [m for module in (health_pb2, reflection_pb2, channelz_pb2) for m in methods(module)]
        self._methods = methods(pb) * _OURS + standard

    def __next__(self) -> HostileCall:
        rng = self._random
        method = rng.choice(self._methods)
        count = rng.choice((0, 1, 1, 1, 2, 5)) if method.client_streaming else 1
        messages = tuple(self._payload(method) for _ in range(count))
        return HostileCall(path(method), method.client_streaming, method.server_streaming, messages)

    def __iter__(self) -> HostileCalls:
        return self

    def _payload(self, method: MethodDescriptor) -> bytes:
        rng = self._random
        kind = rng.random()
        if kind < 0.05:
            return rng.randbytes(rng.choice((0, 1, 7, 100, 3000)))
        self._malice = rng.choice(_MALICE)
        data = self.message(method.input_type).SerializeToString()
        return data if kind < 0.85 else self.broken(data)

    def broken(self, data: bytes) -> bytes:
        """A serialized message with a few of its bytes changed, cut, doubled, or with a length that lies."""
        rng = self._random
        out = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(5):
                case 0 if out:
                    out[at % len(out)] ^= 1 << rng.randrange(8)
                case 1:
                    del out[at:]
                case 2:
                    out[at:at] = out[: rng.randrange(len(out) + 1)]
                case 3:
                    out[at:at] = b"\xff" * rng.randint(1, 11)
                case _:
                    # A field that says it is 2 GiB long.
                    out[at:at] = bytes([rng.randrange(1, 16) << 3 | 2]) + b"\xff\xff\xff\xff\x07"
        return bytes(out[:200_000])

    def message(self, descriptor: Any, depth: int = 0) -> Message:
        """A message in which a share of the values is hostile, and of the fields is missing."""
        rng = self._random
        made: Any = GetMessageClass(descriptor)()
        # Of tokens and packed_tokens one is right.
        without = rng.choice(("tokens", "packed_tokens")) if not self._is_malicious() else ""
        for part in descriptor.fields:
            if part.name != without and not self._is_malicious() and rng.random() < _PRESENT.get(part.name, 1.0):
                self._fill(made, part, depth)
        return made  # type: ignore[no-any-return]

    def _is_malicious(self) -> bool:
        return self._random.random() < self._malice

    def _fill(self, made: Any, part: FieldDescriptor, depth: int) -> None:
        rng = self._random
        repeated = part.is_repeated
        if part.message_type is not None:
            if depth >= _DEEPEST:
                return
            if not repeated:
                getattr(made, part.name).CopyFrom(self.message(part.message_type, depth + 1))
            else:
                for _ in range(rng.randrange(0 if self._is_malicious() else 1, 4)):
                    getattr(made, part.name).append(self.message(part.message_type, depth + 1))
        elif not repeated:
            setattr(made, part.name, self._value(part))
        elif part.name == "tokens" and not self._is_malicious():
            getattr(made, part.name).extend(self._tokens())
        else:
            count = _MANY_ITEMS if self._is_malicious() and rng.random() < 0.02 else rng.randrange(_MOST_ITEMS)
            getattr(made, part.name).extend(self._value(part) for _ in range(count))

    def _tokens(self) -> list[int]:
        rng = self._random
        start = rng.randrange(VOCABULARY)
        return [(start + i) % VOCABULARY for i in range(rng.choice((1, 2, 3, 20, 70, 300)))]

    def _value(self, part: FieldDescriptor) -> Any:
        rng = self._random
        match part.type:
            case FieldDescriptor.TYPE_BOOL:
                # Waiting makes calls slow and finds nothing more.
                return rng.random() < (0.02 if part.name.startswith("wait_") else 0.5)
            case FieldDescriptor.TYPE_INT32:
                return self._number(part.name)
            case FieldDescriptor.TYPE_ENUM:
                return rng.choice((0, 1, 2, 3, 4, 9, -1)) if self._is_malicious() else rng.choice((0, 1, 3))
            case FieldDescriptor.TYPE_INT64:
                return rng.choice(_INT64) if self._is_malicious() else rng.randrange(3)
            case FieldDescriptor.TYPE_UINT64:
                return rng.choice((0, 1, 2**64 - 1))
            case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
                return rng.choice(_FLOATS) if self._is_malicious() else rng.choice((0.0, 0.1, 0.5, 1.0))
            case FieldDescriptor.TYPE_STRING:
                return self._text(part.name)
            case FieldDescriptor.TYPE_BYTES:
                if self._is_malicious():
                    return rng.randbytes(rng.choice((0, 1, 3, 4, 400)))
                return np.array(self._tokens(), "<i4").tobytes()
            case _:
                return 0

    def _number(self, name: str) -> int:
        rng = self._random
        if self._is_malicious():
            return rng.choice(_INT32)
        return _USUAL.get(name, rng.randrange(2))

    def _text(self, name: str) -> str:
        rng = self._random
        if self._is_malicious():
            return rng.choice(_TEXTS)
        if name == "attachment_id":
            return rng.choice(self.attachments[-12:]) if self.attachments else ""
        if name == "handle":
            return rng.choice(self.handles) if self.handles else "/dev/shm/none"
        if name in ("device_uuid", "tokenizer_fingerprint", "failure", "service"):
            return ""
        return rng.choice(_NAMES)


def methods(module: Any) -> list[MethodDescriptor]:
    """The methods of all services of a generated module."""
    return [method for service in module.DESCRIPTOR.services_by_name.values() for method in service.methods]


def path(method: MethodDescriptor) -> str:
    """The path of a method in HTTP/2."""
    return f"/{method.containing_service.full_name}/{method.name}"
