"""Reading zstd streams that may be cut off."""

from __future__ import annotations

import io
from typing import BinaryIO

import zstandard

_READ_BYTES = 8192
"""Small, since what a few bytes unpack to can be large."""


def open_zstd(packed: BinaryIO) -> io.BufferedReader:
    """What a stream of zstd frames holds; closing it closes `packed`.

    Reading raises EOFError where the stream ends within a frame, as gzip does, and zstandard.ZstdError where it is no zstd.
    """
    return io.BufferedReader(_Frames(packed))


class _Frames(io.RawIOBase):
    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._unpacked and self._feed():
            pass
        size = min(len(buffer), len(self._unpacked))
        buffer[:size], self._unpacked = self._unpacked[:size], self._unpacked[size:]
        return size

    def _feed(self) -> bool:
        """Unpacks some more; False at the end."""
        data = self._frame.unused_data
        if self._frame.eof:
            self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
        data = data or self._packed.read(_READ_BYTES)
        if not data:
            if self._begun:
                raise EOFError("compressed file ended before the end of its last frame")
            return False
        self._unpacked, self._begun = memoryview(self._frame.decompress(data)), True
        return True

    def close(self) -> None:
        self._packed.close()
        super().close()
