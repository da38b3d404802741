"""Messages between a DeviceSession and its helper process, over a socket that nobody else has: a length, then a pickled tuple."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")


def encode(message: tuple[Any, ...]) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Finds messages in what a socket has brought, in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        """The messages that are whole with these bytes."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._data)[0]
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            # Both ends are this program, on a socket pair without a name.
            yield pickle.loads(body)
