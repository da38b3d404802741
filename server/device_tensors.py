"""The tensors that a HANDLE engine shares on a GPU: what it declares is checked against what the driver says before any kernel sees it.

Nothing here launches or copies; the driver is an argument, so that all of it can be tested without a GPU.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftd.drafter.errors import InvalidArgument
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.tensors import DRAFT_INFO_FIELDS, check_form

HANDLE_BYTES = 64
_ALIGNMENT = 16
"""What kernels are compiled for."""
_MAX_BUFFER_ROWS = 65_536
WRITTEN = ("draft_tokens", "draft_probabilities", "draft_info", "draft_stamp")
"""Tensors that the service writes; it reads the others."""


class DriverRefusal(Exception):
    """The driver does not do what was asked, for a reason that may lie with who asked."""


class Driver(Protocol):
    """What is asked of the CUDA driver. Each call raises DriverRefusal where it says no."""

    def open(self, handle: bytes) -> int:
        """Maps another process's allocation by its IPC handle; its address. Once more for each time that it is opened, until closed."""

    def address_range(self, address: int) -> tuple[int, int]:
        """Address and size in bytes of the allocation that an address lies in."""

    def device_of(self, address: int) -> int:
        """The device that an address lies on."""

    def close(self, address: int) -> None:
        """Takes back one `open`."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and where it lies: address of its first element, size in bytes, extents."""

    name: str
    address: int
    byte_size: int
    shape: tuple[int, ...]

    def overlaps(self, other: "Placed") -> bool:
        """They have a byte in common."""
        return self.address < other.address + other.byte_size and other.address < self.address + self.byte_size

    @property
    def written(self) -> bool:
        """The service writes it."""
        return self.name in WRITTEN


@dataclass(slots=True)
class Claims:
    """The tensors of all attachments of one device, by attachment: none may be written that is another's too. Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _placed: dict[int, Sequence[Placed]] = field(default_factory=dict)
    _next: int = 0

    def claim(self, tensors: Sequence[Placed]) -> int:
        """Notes an attachment's tensors; a name to `release` them by.

        Raises:
            InvalidArgument: One that is written, by this or another attachment, overlaps one of another attachment.
        """
        with self._lock:
            for others in self._placed.values():
                for tensor in tensors:
                    if any(tensor.overlaps(other) and (tensor.written or other.written) for other in others):
                        raise InvalidArgument(
                            f"tensors.{tensor.name}.handle: the tensor overlaps one of another attachment", f"tensors.{tensor.name}.handle"
                        )
            self._next += 1
            self._placed[self._next] = tensors
            return self._next

    def release(self, name: int) -> None:
        """Forgets an attachment's tensors."""
        with self._lock:
            self._placed.pop(name, None)


class OpenedTensors:
    """An engine's tensors, opened.

    Attributes:
        placed: By name; see EngineTensors in the .proto file.
    """

    def __init__(self, placed: dict[str, Placed], bases: Sequence[int], driver: Driver, claims: Claims, claim: int) -> None:
        self.placed = placed
        self._bases = bases
        self._driver = driver
        self._claims = claims
        self._claim = claim

    @staticmethod
    def open(
        message: pb.EngineTensors, *, max_rows: int, max_length: int, k: int, uuid: str, device: int, driver: Driver, claims: Claims
    ) -> "OpenedTensors":
        """Checks and opens an engine's tensors.

        Args:
            uuid, device: The service's GPU: UUID, and number to the driver.

        Raises:
            InvalidArgument: Something is not as it must be, or not as the driver says it is; names the field and the limit.
        """
        if message.device_uuid != uuid:
            raise InvalidArgument(f"tensors.device_uuid must be {uuid}, the GPU of the service's index", "tensors.device_uuid")
        shapes = _check_forms(message, max_rows, max_length, k)
        bases: dict[bytes, tuple[int, int]] = {}
        try:
            placed = {name: _place(getattr(message, name), name, shape, device, driver, bases) for name, shape in shapes.items()}
            _check_disjoint(list(placed.values()))
            claim = claims.claim(list(placed.values()))
        except BaseException:
            for base, _ in bases.values():
                driver.close(base)
            raise
        return OpenedTensors(placed, [base for base, _ in bases.values()], driver, claims, claim)

    def close(self) -> None:
        """Unmaps them. Nothing may be using them."""
        self.forget()
        for base in self._bases:
            self._driver.close(base)

    def forget(self) -> None:
        """Lets others use the memory, and leaves it mapped, since something of this process may still be using it."""
        self._claims.release(self._claim)


def _check_forms(message: pb.EngineTensors, max_rows: int, max_length: int, k: int) -> dict[str, tuple[int, ...]]:
    """Checks what can be checked without the driver; the shapes by name."""
    buffer = tuple(message.tokens.shape)
    if message.HasField("tokens") and (len(buffer) != 2 or not 1 <= buffer[0] <= _MAX_BUFFER_ROWS or buffer[1] < max_length):
        raise InvalidArgument(
            f"tensors.tokens.shape is {list(buffer)}; it must be [rows, columns] with 1 to {_MAX_BUFFER_ROWS} rows and at least "
            f"max_length={max_length} columns",
            "tensors.tokens.shape",
        )
    expected: dict[str, tuple[int, tuple[int, ...]]] = {
        "tokens": (pb.DATA_TYPE_INT32, buffer),
        "lengths": (pb.DATA_TYPE_INT32, buffer[:1]),
        "row_indices": (pb.DATA_TYPE_INT32, (max_rows,)),
        "draft_tokens": (pb.DATA_TYPE_INT32, (max_rows, k)),
        "draft_probabilities": (pb.DATA_TYPE_FLOAT32, (max_rows, k)),
        "draft_info": (pb.DATA_TYPE_INT32, (DRAFT_INFO_FIELDS, max_rows)),
        "draft_stamp": (pb.DATA_TYPE_INT32, (1,)),
    }
    for name, (data_type, shape) in expected.items():
        if not message.HasField(name):
            raise InvalidArgument(f"tensors.{name} is missing; HANDLE on a GPU needs it", f"tensors.{name}")
        tensor: pb.Tensor = getattr(message, name)
        check_form(tensor, name, data_type, shape)
        if tensor.offset % _ALIGNMENT:
            raise InvalidArgument(
                f"tensors.{name}.offset is {tensor.offset}; on a GPU it must be a multiple of {_ALIGNMENT}", f"tensors.{name}.offset"
            )
    return {name: shape for name, (_, shape) in expected.items()}


def _place(
    tensor: pb.Tensor, name: str, shape: tuple[int, ...], device: int, driver: Driver, bases: dict[bytes, tuple[int, int]]
) -> Placed:
    """Opens a tensor's allocation, or finds it among those that are open, and checks that the tensor lies in it."""
    at = f"tensors.{name}"
    try:
        handle = bytes.fromhex(tensor.handle)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise InvalidArgument(f"{at}.handle must be {2 * HANDLE_BYTES} hexadecimal digits, a CUDA IPC handle", f"{at}.handle")
    if handle not in bases:
        bases[handle] = _open(handle, at, device, driver)
    base, size = bases[handle]
    if tensor.allocation_bytes != size:
        raise InvalidArgument(
            f"{at}.allocation_bytes is {tensor.allocation_bytes}; the allocation has {size} bytes", f"{at}.allocation_bytes"
        )
    byte_size = 4
    for extent in shape:
        byte_size *= extent
    if tensor.offset + byte_size > size:
        raise InvalidArgument(f"{at}: offset and shape need {tensor.offset + byte_size} bytes; the allocation has {size}", f"{at}.offset")
    return Placed(name, base + tensor.offset, byte_size, shape)


def _open(handle: bytes, at: str, device: int, driver: Driver) -> tuple[int, int]:
    """Opens an allocation; its address and size."""
    refused = InvalidArgument(f"{at}.handle names no allocation that another process of this host shares", f"{at}.handle")
    try:
        base = driver.open(handle)
    except DriverRefusal:
        raise refused from None
    try:
        start, size = driver.address_range(base)
        on = driver.device_of(base)
    except DriverRefusal:
        driver.close(base)
        raise refused from None
    if start != base:
        driver.close(base)
        raise refused
    if on != device:
        driver.close(base)
        raise InvalidArgument(f"{at}.handle: the allocation is not on the GPU of the service's index", f"{at}.handle")
    return base, size


def _check_disjoint(tensors: Sequence[Placed]) -> None:
    for i, tensor in enumerate(tensors):
        for other in tensors[:i]:
            if tensor.overlaps(other) and (tensor.written or other.written):
                raise InvalidArgument(
                    f"tensors.{tensor.name} overlaps tensors.{other.name}; what the service writes may overlap nothing",
                    f"tensors.{tensor.name}",
                )
