"""Tensors on a GPU, with a stand-in for the driver: whatever an engine declares wrongly is its own error, and nothing stays mapped."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftd.drafter.errors import InvalidArgument
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.device_tensors import HANDLE_BYTES, Claims, DriverRefusal, OpenedTensors, Placed

UUID = "0123456789abcdef" * 2
ROWS, LENGTH, K, BUFFER = 4, 64, 8, 6
SIZES = {
    "tokens": (BUFFER, LENGTH),
    "lengths": (BUFFER,),
    "row_indices": (ROWS,),
    "draft_tokens": (ROWS, K),
    "draft_probabilities": (ROWS, K),
    "draft_info": (4, ROWS),
    "draft_stamp": (1,),
}


@dataclass
class FakeDriver:
    """Allocations by handle: address, size and device; and how often each is open."""

    allocations: dict[bytes, tuple[int, int, int]]
    opened: Counter[int] = field(default_factory=Counter)

    def open(self, handle: bytes) -> int:
        if handle not in self.allocations:
            raise DriverRefusal("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE at 0xdead")
        address = self.allocations[handle][0]
        self.opened[address] += 1
        return address

    def _find(self, address: int) -> tuple[int, int, int]:
        found = [a for a in self.allocations.values() if a[0] <= address < a[0] + a[1]]
        if not found:
            raise DriverRefusal("cuMemGetAddressRange: CUDA_ERROR_INVALID_VALUE")
        return found[0]

    def address_range(self, address: int) -> tuple[int, int]:
        return self._find(address)[:2]

    def device_of(self, address: int) -> int:
        return self._find(address)[2]

    def close(self, address: int) -> None:
        assert self.opened[address] > 0
        self.opened[address] -= 1


def _handle(number: int) -> bytes:
    return bytes([number] * HANDLE_BYTES)


SIZE = 1 << 16


def _driver() -> FakeDriver:
    return FakeDriver({_handle(i): (0x1000_0000 * (i + 1), SIZE, 0) for i in range(3)} | {_handle(9): (0x9000_0000, SIZE, 1)})


def _message(**changes: dict[str, Any] | None) -> pb.EngineTensors:
    """All tensors in the first allocation, one behind the other; `changes` to fields of tensors, None leaves one out."""
    message = pb.EngineTensors(device_uuid=UUID)
    offset = 0
    for name, shape in SIZES.items():
        change = changes.get(name, {})
        if change is None:
            continue
        kind = pb.DATA_TYPE_FLOAT32 if name == "draft_probabilities" else pb.DATA_TYPE_INT32
        fields: dict[str, Any] = {
            "handle": _handle(0).hex(),
            "offset": offset,
            "data_type": kind,
            "shape": shape,
            "allocation_bytes": SIZE,
        } | change
        getattr(message, name).CopyFrom(pb.Tensor(**fields))
        count = 4
        for extent in shape:
            count *= extent
        offset += -(-count // 16) * 16
    return message


def _open(message: pb.EngineTensors, driver: FakeDriver, claims: Claims | None = None) -> OpenedTensors:
    limits = {"max_rows": ROWS, "max_length": LENGTH, "k": K}
    return OpenedTensors.open(message, **limits, uuid=UUID, device=0, driver=driver, claims=claims or Claims())


def test_opens_each_allocation_once_and_closes_it() -> None:
    driver = _driver()
    opened = _open(_message(lengths={"handle": _handle(1).hex(), "offset": 4096}), driver)
    assert driver.opened == {0x1000_0000: 1, 0x2000_0000: 1}
    assert opened.placed["tokens"] == Placed("tokens", 0x1000_0000, 4 * BUFFER * LENGTH, (BUFFER, LENGTH))
    assert opened.placed["lengths"].address == 0x2000_1000
    assert opened.placed["row_indices"].address == 0x1000_0000 + 4 * BUFFER * LENGTH + 32
    opened.close()
    assert not any(driver.opened.values())


WRONG: dict[str, tuple[dict[str, dict[str, Any] | None], str, str]] = {
    "missing": ({"draft_stamp": None}, "tensors.draft_stamp", "is missing"),
    "no hex": ({"lengths": {"handle": "x" * 128}}, "tensors.lengths.handle", "128 hexadecimal digits"),
    "truncated": ({"lengths": {"handle": _handle(0).hex()[:-2]}}, "tensors.lengths.handle", "128 hexadecimal digits"),
    "a path": ({"lengths": {"handle": "/dev/shm/lengths"}}, "tensors.lengths.handle", "128 hexadecimal digits"),
    "forged": ({"draft_info": {"handle": _handle(7).hex()}}, "tensors.draft_info.handle", "names no allocation"),
    "other gpu": ({"tokens": {"handle": _handle(9).hex()}}, "tensors.tokens.handle", "not on the GPU"),
    "size claimed": ({"tokens": {"allocation_bytes": SIZE + 1}}, "tensors.tokens.allocation_bytes", f"has {SIZE} bytes"),
    "too far": ({"draft_tokens": {"offset": SIZE - 16}}, "tensors.draft_tokens.offset", f"the allocation has {SIZE}"),
    "negative": ({"draft_tokens": {"offset": -16}}, "tensors.draft_tokens.offset", ">= 0"),
    "unaligned": ({"draft_tokens": {"offset": SIZE // 2 + 4}}, "tensors.draft_tokens.offset", "multiple of 16"),
    "overflow": ({"tokens": {"offset": 2**63 - 16}}, "tensors.tokens.shape", "overflows"),
    "huge": ({"tokens": {"shape": (2, 2**61)}}, "tensors.tokens.shape", "overflows"),
    "many rows": ({"tokens": {"shape": (65_537, LENGTH)}}, "tensors.tokens.shape", "1 to 65536 rows"),
    "short rows": ({"tokens": {"shape": (BUFFER, LENGTH - 1)}}, "tensors.tokens.shape", f"max_length={LENGTH}"),
    "no rows": ({"tokens": {"shape": (0, LENGTH)}}, "tensors.tokens.shape", "1 to 65536 rows"),
    "flat": ({"tokens": {"shape": (BUFFER * LENGTH,)}}, "tensors.tokens.shape", "[rows, columns]"),
    "dtype": ({"lengths": {"data_type": pb.DATA_TYPE_INT64}}, "tensors.lengths.data_type", "DATA_TYPE_INT32"),
    "shape": ({"draft_info": {"shape": (ROWS + 1, 4)}}, "tensors.draft_info.shape", f"[4, {ROWS}]"),
    "output on input": ({"draft_tokens": {"offset": 0}}, "tensors.draft_tokens", "overlaps tensors.tokens"),
    "output on output": ({"draft_info": {"offset": 32768}, "draft_tokens": {"offset": 32768}}, "tensors.draft_info", "overlaps"),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_the_field_and_leaves_nothing_open(case: str) -> None:
    changes, named, says = WRONG[case]
    driver = _driver()
    with pytest.raises(InvalidArgument) as raised:
        _open(_message(**changes), driver)
    assert raised.value.field == named
    assert says in str(raised.value)
    assert not any(driver.opened.values())


def test_wrong_uuid_opens_nothing() -> None:
    driver = _driver()
    message = _message()
    message.device_uuid = "f" * 32
    with pytest.raises(InvalidArgument, match=r"tensors.device_uuid must be") as raised:
        _open(message, driver)
    assert raised.value.field == "tensors.device_uuid"
    assert not driver.opened


def test_errors_tell_nothing_of_the_driver_nor_of_addresses() -> None:
    for changes, _, _ in WRONG.values():
        with pytest.raises(InvalidArgument) as raised:
            _open(_message(**changes), _driver())
        for internal in ("CUDA_ERROR", "cuIpc", "cuMem", "0x", str(0x1000_0000)):
            assert internal not in str(raised.value)


def test_allocation_that_begins_elsewhere_is_refused() -> None:
    class Shifted(FakeDriver):
        def address_range(self, address: int) -> tuple[int, int]:
            return address - 4096, SIZE + 4096

    driver = Shifted(_driver().allocations)
    with pytest.raises(InvalidArgument, match="names no allocation"):
        _open(_message(), driver)
    assert not any(driver.opened.values())


def test_same_memory_for_a_second_attachment_is_refused_until_the_first_ends() -> None:
    driver, claims = _driver(), Claims()
    first = _open(_message(), driver, claims)
    with pytest.raises(InvalidArgument, match="of another attachment"):
        _open(_message(), driver, claims)
    assert driver.opened[0x1000_0000] == 1
    first.close()
    _open(_message(), driver, claims).close()
    assert not any(driver.opened.values())


def test_two_attachments_may_read_the_same_tokens() -> None:
    driver, claims = _driver(), Claims()
    elsewhere: dict[str, dict[str, Any] | None] = {
        name: {"handle": _handle(1).hex()} for name in SIZES if name not in ("tokens", "lengths", "row_indices")
    }
    _open(_message(), driver, claims)
    _open(_message(**elsewhere), driver, claims)
    assert driver.opened == {0x1000_0000: 2, 0x2000_0000: 1}


def test_abandoned_tensors_stay_mapped_and_are_free_for_others() -> None:
    driver, claims = _driver(), Claims()
    _open(_message(), driver, claims).forget()
    assert driver.opened[0x1000_0000] == 1
    _open(_message(), driver, claims)


@given(data=st.data())
def test_what_is_accepted_lies_in_its_allocation_and_is_disjoint(data: st.DataObject) -> None:
    driver = _driver()
    offsets = st.integers(-1, 200).map(lambda n: 16 * n) | st.integers(-(2**63), 2**63 - 1)
    changes: dict[str, dict[str, Any] | None] = {
        name: {"offset": data.draw(offsets), "handle": _handle(data.draw(st.integers(0, 3))).hex()} for name in SIZES
    }
    try:
        opened = _open(_message(**changes), driver)
    except InvalidArgument:
        assert not any(driver.opened.values())
        return
    placed = list(opened.placed.values())
    for i, tensor in enumerate(placed):
        base, size = driver.address_range(tensor.address)
        assert base <= tensor.address
        assert tensor.address + tensor.byte_size <= base + size
        for other in placed[:i]:
            apart = tensor.address + tensor.byte_size <= other.address or other.address + other.byte_size <= tensor.address
            assert apart or not (tensor.written or other.written)
