"""What is said of GPUs, held against drivers that do not exist: those that can share memory in one way, in another, or not at all."""

import ctypes
import os
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from draftd.client.abilities import Finding, reasons_against
from draftd.client.gpus import gpus, handle, mapped


class Status(IntEnum):
    """CUresult."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_SUPPORTED = 801


class FakeDriver:
    """A driver of `count` GPUs; `attributes` by number, `failing` calls that fail. It counts what is not given back."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READ=1)

    writes = True

    def __init__(
        self, count: int = 1, name: str = "NVIDIA H200", failing: tuple[str, ...] = (), attributes: dict[int, int] | None = None
    ) -> None:
        self._count = count
        self._name = name
        self._failing = failing
        self._attributes = {20: 0, 75: 9, 76: 0, 102: 1, 103: 1, 122: 1, 123: 1, 133: 0}
        self._attributes |= attributes or {}
        self.held: list[str] = []
        self.access: list[Any] = []

    CUmemAllocationProp = CUmemAccessDesc = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))

    def CUdevice_attribute(self, number: int) -> int:
        if number not in self._attributes:
            raise ValueError(f"{number} is not a valid CUdevice_attribute")
        return number

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name in self._failing:
                return (Status.CUDA_ERROR_NOT_SUPPORTED, None)
            return self._answer(name, arguments)

        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        taken = {
            "cuMemCreate": "memory",
            "cuMemImportFromShareableHandle": "memory",
            "cuMemAddressReserve": "range",
            "cuMemMap": "map",
            "cuMemAlloc": "allocation",
            "cuStreamCreate": "stream",
            "cuDevicePrimaryCtxRetain": "context",
            "cuCtxPushCurrent": "current",
            "cuMemHostRegister": "registered",
        }
        given = {
            "cuMemRelease": "memory",
            "cuMemAddressFree": "range",
            "cuMemUnmap": "map",
            "cuMemFree": "allocation",
            "cuStreamDestroy": "stream",
            "cuDevicePrimaryCtxRelease": "context",
            "cuCtxPopCurrent": "current",
            "cuMemHostUnregister": "registered",
        }
        if name in taken:
            self.held.append(taken[name])
        if name in given:
            self.held.remove(given[name])
        if name == "cuMemHostGetDevicePointer":
            return Status.CUDA_SUCCESS, arguments[0]
        if name == "cuStreamWriteValue32" and self.writes:
            ctypes.c_uint32.from_address(arguments[1]).value = arguments[2]
        if name == "cuMemSetAccess":
            self.access.append(arguments[2][0].flags)
        answers: dict[str, Any] = {
            "cuDriverGetVersion": 13000,
            "cuDeviceGetCount": self._count,
            "cuDeviceGet": arguments[0] if arguments else 0,
            "cuDeviceGetName": self._name.encode().ljust(64, b"\0").ljust(256, b" "),
            "cuDeviceGetUuid": SimpleNamespace(bytes=bytes(range(16))),
            "cuMemGetAllocationGranularity": 2**21,
        }
        if name == "cuDeviceGetAttribute":
            return Status.CUDA_SUCCESS, self._attributes[arguments[0]]
        if name == "cuMemExportToShareableHandle":
            descriptor = os.open(os.devnull, os.O_RDONLY)
            self.exported = descriptor
            return Status.CUDA_SUCCESS, descriptor
        return Status.CUDA_SUCCESS, answers.get(name, 1)


@pytest.fixture(autouse=True)
def _no_real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nonexistent")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def _text(findings: list[Finding], name: str) -> str:
    (found,) = [finding.text for finding in findings if finding.name == name]
    return found


def test_without_bindings_nothing_is_said_of_gpus() -> None:
    devices, (finding,) = gpus(None)
    assert (devices, finding.ok) == ([], None)
    assert "cuda-bindings is not installed" in finding.text


def test_without_a_driver_there_is_no_gpu() -> None:
    def absent(_: int) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    devices, (finding,) = gpus(SimpleNamespace(cuInit=absent))
    assert (devices, "libcuda.so.1" in finding.text) == ([], True)
    assert gpus(FakeDriver(failing=("cuInit",)))[0] == []


def test_a_gpu_that_can_do_all_maps_by_descriptor_and_gives_everything_back() -> None:
    driver = FakeDriver(count=2)
    devices, findings = gpus(driver)
    assert devices == ["cuda:0", "cuda:1"]
    assert _text(findings, "CUDA driver") == "CUDA 13.0, 2 GPUs"
    assert _text(findings, "cuda:1").startswith("NVIDIA H200, compute capability 9.0, UUID 000102")
    assert "by file descriptor, and can be mapped read-only" in _text(findings, "cuda:0 memory")
    assert driver.access == [1, 1]
    assert not any(reasons_against(ability, findings) for device in devices for ability in (mapped(device), handle(device)))
    assert driver.held == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(driver.exported)


@pytest.mark.parametrize("attribute", [102, 103])
def test_without_descriptors_nothing_is_mapped(attribute: int) -> None:
    driver = FakeDriver(attributes={attribute: 0})
    _, findings = gpus(driver)
    assert "by file descriptor: the driver does not have" in reasons_against(mapped("cuda:0"), findings)[0]
    assert not reasons_against(handle("cuda:0"), findings)
    assert driver.access == []


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cuMemSetAccess", "cuMemMap"]
)
def test_what_the_driver_promises_and_does_not_do_is_found_by_trying(call: str) -> None:
    driver = FakeDriver(failing=(call,))
    _, findings = gpus(driver)
    assert f"by file descriptor: {call}: CUDA_ERROR_NOT_SUPPORTED" in reasons_against(mapped("cuda:0"), findings)[0]
    assert driver.held == []


@pytest.mark.parametrize(
    "call",
    ["cuMemAlloc", "cuIpcGetMemHandle", "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuStreamWriteValue32", "cuStreamSynchronize"],
)
def test_what_handle_needs_is_tried_too(call: str) -> None:
    driver = FakeDriver(failing=(call,))
    _, findings = gpus(driver)
    assert f"{call}: CUDA_ERROR_NOT_SUPPORTED" in reasons_against(handle("cuda:0"), findings)[0]
    assert not reasons_against(mapped("cuda:0"), findings)
    assert driver.held == []


def test_a_word_that_does_not_arrive_is_none() -> None:
    driver = FakeDriver()
    driver.writes = False
    assert "did not arrive" in reasons_against(handle("cuda:0"), gpus(driver)[1])[0]


def test_without_kernels_nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftd.client.gpus._version", lambda package: "" if package == "triton" else "2.13")
    _, findings = gpus(FakeDriver())
    assert reasons_against(mapped("cuda:0"), findings) == ["kernels: torch 2.13, triton is not installed"]
    assert not reasons_against(handle("cuda:0"), findings)


def test_an_exclusive_gpu_lets_no_second_process_in_but_through_mps() -> None:
    _, findings = gpus(FakeDriver(attributes={20: 3}))
    assert "nvidia-smi -c DEFAULT" in reasons_against(mapped("cuda:0"), findings)[0]
    _, findings = gpus(FakeDriver(attributes={20: 3, 133: 1}))
    assert not reasons_against(mapped("cuda:0"), findings)
    assert "takes the others down" in _text(findings, "cuda:0 MPS")
    _, findings = gpus(FakeDriver(attributes={20: 2}))
    assert reasons_against(handle("cuda:0"), findings)


def test_an_instance_of_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, findings = gpus(FakeDriver(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb"))
    assert "same one" in _text(findings, "cuda:0 MIG")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-41b3359c")
    assert _text(gpus(FakeDriver())[1], "cuda:0 MIG")


def test_a_gpu_that_fails_is_not_the_end_of_the_others() -> None:
    driver = FakeDriver(count=2, failing=("cuDevicePrimaryCtxRetain",))
    devices, findings = gpus(driver)
    assert len(devices) == 2
    assert all("cuDevicePrimaryCtxRetain" in reasons_against(mapped(device), findings)[0] for device in devices)


def test_an_old_release_of_the_bindings_knows_fewer_attributes() -> None:
    driver = FakeDriver()
    del driver._attributes[133], driver._attributes[122]
    _, findings = gpus(driver)
    assert _text(findings, "cuda:0 stream words").endswith("it has wait value")
    assert not reasons_against(handle("cuda:0"), findings)
