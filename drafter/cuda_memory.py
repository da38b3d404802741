"""Device memory that other processes can map read-only, by CUDA's virtual memory management.

Physical memory and the addresses where it is seen are apart: a range of addresses is reserved once, and pieces of physical memory, which
travel between processes as file descriptors, are put into it and taken out again.
"""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    from cuda.bindings import driver  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # There is no CUDA here; whoever needs it asks `sharing_failure`.
    driver = None


_MPS_ENABLED = 133
"""Number of the attribute of a device whose contexts the Multi-Process Service shares."""


class CudaError(OSError):
    """A call of the CUDA driver failed; the message names the call and the driver's reason."""


def call(name: str, *arguments: Any) -> Any:
    """Calls the driver and answers what it answers: nothing, one value, or a tuple.

    Raises:
        CudaError: It failed, or there is no driver.
    """
    if driver is None:
        raise CudaError("cuda-bindings is not installed")
    try:
        status, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        raise CudaError(f"{name}: {error}") from None
    if status != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{name}: {driver.CUresult(status).name}")
    return values[0] if len(values) == 1 else tuple(values)


def sharing_failure(device: torch.device) -> str:
    """Why device memory cannot be shared with other processes; empty if it can."""
    if device.type != "cuda":
        return f"{device} is no GPU"
    if driver is None:
        return "cuda-bindings is not installed"
    try:
        torch.cuda.current_stream(device).synchronize()
        attribute = driver.CUdevice_attribute
        for need, what in (
            (attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"),
            (attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory handles as file descriptors"),
        ):
            if not call("cuDeviceGetAttribute", need, device.index or 0):
                return f"the driver has no {what} for {device}"
    except CudaError as error:
        return str(error)
    return ""


def device_uuid(device: torch.device) -> str:
    """The UUID of a GPU, as 32 hexadecimal digits; "" for what is no GPU."""
    return str(torch.cuda.get_device_properties(device).uuid).replace("-", "") if device.type == "cuda" else ""


def under_mps(device: torch.device) -> bool:
    """The GPU is shared by the Multi-Process Service, where a process that is killed with work pending takes every other one down."""
    return device.type == "cuda" and bool(call("cuDeviceGetAttribute", driver.CUdevice_attribute(_MPS_ENABLED), device.index or 0))


def device_failure(device: torch.device) -> str:
    """Why a GPU does nothing more for this process, such as after an access outside memory; empty if it does. Waits for nothing.

    The driver then answers every call with the same error: there is no way out but another process.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.default_stream(device).query()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def _properties(device: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    return properties


def granularity(device: int) -> int:
    """Bytes that sizes and offsets must be multiples of."""
    flag = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return int(call("cuMemGetAllocationGranularity", _properties(device), flag))


class Physical:
    """A piece of physical device memory.

    Attributes:
        byte_size: A multiple of the granularity.
    """

    def __init__(self, handle: Any, byte_size: int) -> None:
        self.handle, self.byte_size = handle, byte_size

    @staticmethod
    def create(device: int, byte_size: int) -> Physical:
        """Allocates it.

        Raises:
            CudaError: There is not as much.
        """
        return Physical(call("cuMemCreate", byte_size, _properties(device), 0), byte_size)

    @staticmethod
    def receive(fd: int, byte_size: int) -> Physical:
        """Takes what another process exported; the descriptor is closed.

        Raises:
            CudaError: It is no such thing, or another device's.
        """
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            return Physical(call("cuMemImportFromShareableHandle", fd, kind), byte_size)
        finally:
            os.close(fd)

    def export(self) -> int:
        """A file descriptor for another process; the caller closes it."""
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(call("cuMemExportToShareableHandle", self.handle, kind, 0))

    def release(self) -> None:
        """Gives it back; it lives on where it is mapped, here and elsewhere."""
        call("cuMemRelease", self.handle)


class AddressRange:
    """Reserved addresses of this process, into which physical memory is mapped.

    Args:
        device: The GPU's index.
        byte_size: A multiple of the granularity.
    """

    def __init__(self, device: int, byte_size: int) -> None:
        self.device, self.byte_size = device, byte_size
        self.address = int(call("cuMemAddressReserve", byte_size, 0, 0, 0))

    def map(self, offset: int, memory: Physical, *, writable: bool) -> None:
        """Maps memory at an offset where nothing is."""
        at = self.address + offset
        call("cuMemMap", at, memory.byte_size, 0, memory.handle, 0)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device
        flags = driver.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        try:
            call("cuMemSetAccess", at, memory.byte_size, [access], 1)
        except CudaError:
            call("cuMemUnmap", at, memory.byte_size)
            raise

    def unmap(self, offset: int, byte_size: int) -> None:
        """Takes out what was mapped there. Nothing may be using it."""
        call("cuMemUnmap", self.address + offset, byte_size)

    def tensor(self, offset: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A view of the addresses, int32 or int64 [elements]; its first element must be mapped."""
        view = _Pointer(self.address + offset, elements, "<i4" if dtype == torch.int32 else "<i8")
        return torch.as_tensor(view, device=torch.device("cuda", self.device))

    def close(self) -> None:
        """Gives the addresses back; nothing may be mapped there any more."""
        call("cuMemAddressFree", self.address, self.byte_size)


class _Pointer:
    """An address as PyTorch takes it."""

    def __init__(self, address: int, elements: int, kind: str) -> None:
        self.__cuda_array_interface__ = {"shape": (elements,), "typestr": kind, "data": (address, False), "version": 3, "strides": None}
