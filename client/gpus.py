"""What the CUDA driver says of this machine's GPUs: whether their memory can be shared with another process, and how.

It tries what can be tried in one process, with two megabytes that it gives back. It needs cuda-bindings, which PyTorch for CUDA brings.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftd.client.abilities import Finding

_ATTRIBUTES = {
    "compute mode": 20,
    "major": 75,
    "minor": 76,
    "virtual memory": 102,
    "file descriptors": 103,
    "64-bit memory operations": 122,
    "wait value": 123,
    "MPS": 133,
}
"""Numbers of CUdevice_attribute, which keep their meaning while their names change with the release of CUDA."""
_EXCLUSIVE, _PROHIBITED = 3, 2
_DEVICE_MAP = 0x2
_NON_BLOCKING = 0x1
_TRIED_WORD = 0x5EED
_TRIED_BYTES = 2**21
_NAME_BYTES = 256


class DriverError(Exception):
    """A call of the driver failed; the message names the call and the error."""


def load_driver() -> Any:
    """The module `cuda.bindings.driver`; None where it is not installed."""
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None


def mapped(device: str) -> str:
    """The ability to map an index in the memory of `device`, `cuda:N`."""
    return f"mapped on {device}"


def handle(device: str) -> str:
    """The ability to share an engine's tensors in the memory of `device`, `cuda:N`."""
    return f"handle on {device}"


def gpus(driver: Any) -> tuple[list[str], list[Finding]]:
    """The GPUs of this machine, as `cuda:N`, and what was found: of the driver, and of each.

    Args:
        driver: See load_driver.
    """
    if driver is None:
        return [], [
            Finding("CUDA driver", None, "cuda-bindings is not installed, so nothing can be said of GPUs: pip install cuda-bindings")
        ]
    try:
        _call(driver, "cuInit", 0)
        version, count = _call(driver, "cuDriverGetVersion"), _call(driver, "cuDeviceGetCount")
    except DriverError as error:
        return [], [Finding("CUDA driver", None, f"there is none, or no GPU: {error}")]
    devices = [f"cuda:{ordinal}" for ordinal in range(count)]
    findings = [
        Finding("CUDA driver", True, f"CUDA {version // 1000}.{version % 1000 // 10}, {count} GPUs"),
        _kernels(devices),
        _mps_daemon(),
    ]
    for ordinal, device in enumerate(devices):
        try:
            findings += _of_device(driver, ordinal, device)
        except DriverError as error:
            findings.append(Finding(device, False, str(error), (mapped(device), handle(device))))
    return devices, findings


def _of_device(driver: Any, ordinal: int, device: str) -> list[Finding]:
    number = _call(driver, "cuDeviceGet", ordinal)
    name = bytes(_call(driver, "cuDeviceGetName", _NAME_BYTES, number)).split(b"\0", 1)[0].decode(errors="replace")
    uuid = bytes(_call(driver, "cuDeviceGetUuid", number).bytes).hex()
    has = {what: _attribute(driver, attribute, number) for what, attribute in _ATTRIBUTES.items()}
    both = (mapped(device), handle(device))
    findings = [Finding(device, None, f"{name}, compute capability {has['major']}.{has['minor']}, UUID {uuid}")]
    if has["compute mode"] in (_EXCLUSIVE, _PROHIBITED):
        text = "lets one process in at a time: nvidia-smi -c DEFAULT, or MPS" if has["compute mode"] == _EXCLUSIVE else "lets nobody in"
        alone = has["compute mode"] == _EXCLUSIVE and has["MPS"] == 1
        findings.append(Finding(f"{device} compute mode", alone, "exclusive, through MPS" if alone else text, both))
    if "MIG " in name or os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        findings.append(Finding(f"{device} MIG", None, "an instance: service and engines must be on the same one"))
    if has["MPS"]:
        text = "its processes share one context: a client killed with work pending takes the others down with it"
        findings.append(Finding(f"{device} MPS", None, text))
    with _context(driver, number):
        return [*findings, _memory(driver, ordinal, device, has), _tensors(driver, device), _words(driver, device, has)]


def _memory(driver: Any, ordinal: int, device: str, has: dict[str, int | None]) -> Finding:
    """Whether another process can map device memory by file descriptor, as engines map the index."""
    name = f"{device} memory"
    missing = [what for what in ("virtual memory", "file descriptors") if not has[what]]
    try:
        if missing:
            raise DriverError(f"the driver does not have {' and '.join(missing)}")
        _try_descriptor(driver, ordinal)
    except DriverError as error:
        return Finding(name, False, f"cannot go to other processes by file descriptor: {error}", (mapped(device),))
    return Finding(name, True, "goes to other processes by file descriptor, and can be mapped read-only", (mapped(device),))


def _tensors(driver: Any, device: str) -> Finding:
    """Whether a tensor of an engine's can be opened by another process, by classic IPC."""
    name = f"{device} tensors"
    try:
        with _allocation(driver, _TRIED_BYTES) as pointer:
            _call(driver, "cuIpcGetMemHandle", pointer)
    except DriverError as error:
        return Finding(name, False, f"have no handle for other processes: {error}", (handle(device),))
    return Finding(name, True, "have handles for other processes of the same PID namespace (classic IPC)", (handle(device),))


def _words(driver: Any, device: str, has: dict[str, int | None]) -> Finding:
    """Whether the GPU's streams write into memory that processes share in /dev/shm, by which they tell each other how far they are."""
    name = f"{device} stream words"
    waits = [what for what in ("64-bit memory operations", "wait value") if has[what]]
    place = Path("/dev/shm")
    try:
        with tempfile.TemporaryFile(dir=place if place.is_dir() else None) as file:
            os.ftruncate(file.fileno(), mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
                _try_write(driver, _address(page))
                written = int.from_bytes(page[:4], sys.byteorder)
    except (DriverError, OSError) as error:
        return Finding(name, False, f"shared memory cannot be registered and written by a stream: {error}", (handle(device),))
    if written != _TRIED_WORD:
        return Finding(name, False, "what a stream wrote into shared memory did not arrive", (handle(device),))
    also = f"; it has {' and '.join(waits)}" if waits else ""
    return Finding(name, True, f"a stream writes into shared memory (cuMemHostRegister, cuStreamWriteValue32){also}", (handle(device),))


def _try_write(driver: Any, address: int) -> None:
    """Has a stream write a word into a page of host memory, and waits for that; DriverError where it fails."""
    with contextlib.ExitStack() as undo:
        _call(driver, "cuMemHostRegister", address, mmap.PAGESIZE, _DEVICE_MAP)
        undo.callback(_call, driver, "cuMemHostUnregister", address)
        on_device = _call(driver, "cuMemHostGetDevicePointer", address, 0)
        stream = _call(driver, "cuStreamCreate", _NON_BLOCKING)
        undo.callback(_call, driver, "cuStreamDestroy", stream)
        _call(driver, "cuStreamWriteValue32", stream, on_device, _TRIED_WORD, 0)
        _call(driver, "cuStreamSynchronize", stream)


def _try_descriptor(driver: Any, ordinal: int) -> None:
    """Exports two megabytes, takes them in as another process would, and maps them read-only; DriverError where that fails."""
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.requestedHandleTypes = kind
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    size = _call(driver, "cuMemGetAllocationGranularity", wanted, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
    readable = driver.CUmemAccessDesc()
    readable.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    readable.location.id = ordinal
    readable.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    with contextlib.ExitStack() as undo:
        own = _call(driver, "cuMemCreate", size, wanted, 0)
        undo.callback(_call, driver, "cuMemRelease", own)
        descriptor = int(_call(driver, "cuMemExportToShareableHandle", own, kind, 0))
        undo.callback(os.close, descriptor)
        taken = _call(driver, "cuMemImportFromShareableHandle", descriptor, kind)
        undo.callback(_call, driver, "cuMemRelease", taken)
        address = _call(driver, "cuMemAddressReserve", size, 0, 0, 0)
        undo.callback(_call, driver, "cuMemAddressFree", address, size)
        _call(driver, "cuMemMap", address, size, 0, taken, 0)
        undo.callback(_call, driver, "cuMemUnmap", address, size)
        _call(driver, "cuMemSetAccess", address, size, [readable], 1)


@contextlib.contextmanager
def _context(driver: Any, number: Any) -> Iterator[None]:
    """The primary context, current in this thread."""
    context = _call(driver, "cuDevicePrimaryCtxRetain", number)
    try:
        _call(driver, "cuCtxPushCurrent", context)
        try:
            yield
        finally:
            _call(driver, "cuCtxPopCurrent")
    finally:
        _call(driver, "cuDevicePrimaryCtxRelease", number)


@contextlib.contextmanager
def _allocation(driver: Any, size: int) -> Iterator[Any]:
    pointer = _call(driver, "cuMemAlloc", size)
    try:
        yield pointer
    finally:
        _call(driver, "cuMemFree", pointer)


def _kernels(devices: list[str]) -> Finding:
    """Whether this process could run the kernels that draft on a GPU."""
    versions = {name: _version(name) for name in ("torch", "triton")}
    text = ", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items())
    return Finding("kernels", all(versions.values()), text, tuple(map(mapped, devices)))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mps_daemon() -> Finding:
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    there = (pipes / "control").exists()
    return Finding("MPS", None, f"a control daemon has its pipes in {pipes}" if there else "no control daemon to be seen")


def _address(block: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def _attribute(driver: Any, attribute: int, number: Any) -> int | None:
    """An attribute of a device; None where the driver or its bindings do not know it."""
    try:
        return int(_call(driver, "cuDeviceGetAttribute", driver.CUdevice_attribute(attribute), number))
    except (DriverError, ValueError):
        return None


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """What a function of the driver answers beside its status; DriverError where that is not success."""
    try:
        status, *answer = getattr(driver, name)(*arguments)
    except (AttributeError, RuntimeError) as error:
        # The bindings find out only now that the driver, or this function of it, is not there.
        raise DriverError(f"{name}: {error}") from None
    if int(status):
        raise DriverError(f"{name}: {getattr(status, 'name', status)}")
    return answer[0] if answer else None
