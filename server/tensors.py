"""The tensors that a HANDLE engine shares with a service on a CPU: files in shared memory, read and written by system calls.

They are never mapped: an engine that truncates its file gets an error on its own call instead of a bus error in the service.
"""

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import Drafts
from draftd.drafter.errors import FailedPrecondition, InvalidArgument
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_LARGEST = 2**63 - 1
_MAX_HANDLE_BYTES = 512
_MAX_DIMENSIONS = 8
DRAFT_INFO_FIELDS = 4


@dataclass(frozen=True, slots=True)
class TensorFile:
    """One open tensor: `fd` and where its elements lie, in bytes."""

    name: str
    fd: int
    offset: int
    row_bytes: int

    def read(self, row: int, start: int, count: int) -> NDArray[np.int32]:
        """int32 [count] from column `start` of `row`; FailedPrecondition if the file has become too short."""
        out = np.empty(count, np.int32)
        if count and os.preadv(self.fd, [out.data], self.offset + row * self.row_bytes + 4 * start) != 4 * count:
            raise FailedPrecondition(f"tensors.{self.name}: the file has become shorter than the tensor", f"tensors.{self.name}")
        return out

    def write(self, rows: NDArray[np.generic]) -> None:
        """Writes [n, columns] over the first n rows; FailedPrecondition if the file has become too short or is full."""
        data = np.ascontiguousarray(rows)
        end = self.offset + data.nbytes
        try:
            written = os.pwrite(self.fd, data.data, self.offset) if os.fstat(self.fd).st_size >= end else 0
        except OSError:
            written = 0
        if written != data.nbytes:
            raise FailedPrecondition(f"tensors.{self.name}: the file has become shorter than the tensor", f"tensors.{self.name}")


class EngineTensors:
    """The five tensors of one HANDLE attachment.

    tokens int32 [max_rows, max_length], lengths int32 [max_rows], draft_tokens int32 [max_rows, k], draft_probabilities float32
    [max_rows, k], draft_info int32 [max_rows, 4].
    """

    def __init__(self, files: dict[str, TensorFile], max_rows: int, max_length: int, k: int) -> None:
        self._files = files
        self._max_rows = max_rows
        self._max_length = max_length
        self._k = k

    @staticmethod
    def open(message: pb.EngineTensors, root: Path, reserved: Path, max_rows: int, max_length: int, k: int) -> "EngineTensors":
        """Validates and opens an engine's tensors below `root`, except below `reserved`, which is the service's own.

        Raises:
            InvalidArgument: A handle, type, shape, offset or file size is not as the attachment declares it.
        """
        expected = {
            "tokens": (pb.DATA_TYPE_INT32, (max_rows, max_length)),
            "lengths": (pb.DATA_TYPE_INT32, (max_rows,)),
            "draft_tokens": (pb.DATA_TYPE_INT32, (max_rows, k)),
            "draft_probabilities": (pb.DATA_TYPE_FLOAT32, (max_rows, k)),
            "draft_info": (pb.DATA_TYPE_INT32, (max_rows, DRAFT_INFO_FIELDS)),
        }
        files: dict[str, TensorFile] = {}
        try:
            for name, (data_type, shape) in expected.items():
                if not message.HasField(name):
                    raise InvalidArgument(f"tensors.{name} is missing; HANDLE needs it", f"tensors.{name}")
                tensor: pb.Tensor = getattr(message, name)
                check_form(tensor, name, data_type, shape)
                files[name] = _open(tensor, name, shape, root, reserved, writable=name.startswith("draft_"))
        except (InvalidArgument, OSError):
            _close(files)
            raise
        return EngineTensors(files, max_rows, max_length, k)

    def close(self) -> None:
        """Closes the files."""
        _close(self._files)
        self._files = {}

    def row(self, index: int, offset: int, name: str) -> NDArray[np.int32]:
        """Tokens of row `index` from `offset` on, int32 [n].

        Raises:
            InvalidArgument: The index or the offset is out of range; `name` is the row's name in the request.
            FailedPrecondition: The engine's length or file does not fit its tensor.
        """
        if not 0 <= index < self._max_rows:
            raise InvalidArgument(f"{name}.row_index is {index}; it must be in [0, {self._max_rows}), max_rows", f"{name}.row_index")
        length = int(self._files["lengths"].read(0, index, 1)[0])
        if not 0 <= length <= self._max_length:
            raise FailedPrecondition(
                f"{name}: tensors.lengths[{index}] is {length}; it must be in [0, {self._max_length}], max_length", "tensors.lengths"
            )
        if not 0 <= offset <= length:
            raise InvalidArgument(f"{name}.offset is {offset}; it must be in [0, {length}], the row's length", f"{name}.offset")
        return self._files["tokens"].read(index, offset, length - offset)

    def write(self, drafts: Drafts) -> None:
        """Writes n drafts to the first n rows of the draft tensors, padded with -1 and 0 to the attachment's k."""
        n, k = drafts.tokens.shape
        tokens = np.full((n, self._k), -1, np.int32)
        tokens[:, :k] = drafts.tokens
        probabilities = np.zeros((n, self._k), np.float32)
        probabilities[:, :k] = drafts.probabilities
        self._files["draft_tokens"].write(tokens)
        self._files["draft_probabilities"].write(probabilities)
        self._files["draft_info"].write(np.stack([drafts.counts, drafts.source, drafts.match_length, drafts.occurrences], axis=1))


def check_form(tensor: pb.Tensor, name: str, data_type: int, shape: Sequence[int]) -> None:
    """Checks what can be checked without the file."""
    field = f"tensors.{name}"
    extents = list(tensor.shape)
    if len(extents) > _MAX_DIMENSIONS or any(extent < 1 for extent in extents):
        raise InvalidArgument(f"{field}.shape: extents must be >= 1, in at most {_MAX_DIMENSIONS} dimensions", f"{field}.shape")
    byte_size = 4
    for extent in extents:
        byte_size *= extent
    if byte_size > _LARGEST or tensor.offset > _LARGEST - byte_size:
        raise InvalidArgument(f"{field}.shape: offset + product of extents x 4 bytes overflows 2^63 - 1", f"{field}.shape")
    if tensor.offset < 0 or tensor.offset % 4:
        raise InvalidArgument(f"{field}.offset is {tensor.offset}; it must be >= 0 and a multiple of 4", f"{field}.offset")
    if tensor.data_type != data_type:
        wanted = pb.DataType.Name(pb.DataType.ValueType(data_type))
        raise InvalidArgument(f"{field}.data_type must be {wanted}", f"{field}.data_type")
    if extents != list(shape):
        raise InvalidArgument(f"{field}.shape is {extents}; the attachment needs {list(shape)}", f"{field}.shape")


def _open(tensor: pb.Tensor, name: str, shape: Sequence[int], root: Path, reserved: Path, *, writable: bool) -> TensorFile:
    field = f"tensors.{name}.handle"
    outside = InvalidArgument(f"{field} must be a regular file of the service's user below its shared-memory directory", field)
    if not tensor.handle or len(tensor.handle.encode()) > _MAX_HANDLE_BYTES or "\0" in tensor.handle:
        raise InvalidArgument(f"{field} must be a path of 1 to {_MAX_HANDLE_BYTES} bytes", field)
    path = Path(os.path.realpath(tensor.handle))
    if not path.is_relative_to(os.path.realpath(root)) or path.is_relative_to(os.path.realpath(reserved)):
        raise outside
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise outside from None
    info = os.fstat(fd)
    row_bytes = 4 * (shape[1] if len(shape) > 1 else shape[0])
    needed = tensor.offset + 4 * int(np.prod(shape, dtype=np.int64))
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
        os.close(fd)
        raise outside
    if info.st_size < needed:
        os.close(fd)
        raise InvalidArgument(f"{field} has {info.st_size} bytes; offset and shape need {needed}", field)
    return TensorFile(name, fd, tensor.offset, row_bytes)


def _close(files: dict[str, TensorFile]) -> None:
    for file in files.values():
        os.close(file.fd)
