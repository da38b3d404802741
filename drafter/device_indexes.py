"""The indexes of a corpus on one GPU, and drafting from them for rows that are on the host: the service's own RPCs.

An engine with tokens on the device uses DeviceDrafter, with nothing on the host in between.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from draftd.drafter import compiling
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.cuda_memory import CudaError, device_uuid
from draftd.drafter.device import DeviceDrafts
from draftd.drafter.device_index import DeviceIndex, DeviceShape
from draftd.drafter.device_matching import LONG_ROW_TOKENS
from draftd.drafter.device_memory import DeviceMemory, Exported
from draftd.drafter.device_rules import DeviceRule
from draftd.drafter.drafts import Drafts, RowLessons
from draftd.drafter.errors import FailedPrecondition, InvalidArgument
from draftd.drafter.groups import NO_GROUPS, GroupTexts
from draftd.drafter.index import IndexArrays
from draftd.drafter.layout import BlockSpec
from draftd.drafter.lessons import Learned
from draftd.drafter.ops.sort.gpu import SCRATCH_BYTES
from draftd.drafter.params import MAX_K, DraftParams, Policy

_MAX_DRAFTERS = 16
"""Workspaces that are kept: one a batch size, row length and parameters."""
_MAX_CALL_TOKENS = 1 << 24
"""Elements of a token buffer on the device; more rows are drafted for in several calls."""
_MIN_WIDTH = 256


@dataclass(slots=True)
class _Workspace:
    """A drafter with its input on both sides and its output: tokens int32 [n, width]; words int32 [3, n], lengths, rows, namespaces."""

    drafter: DeviceRule
    host_tokens: torch.Tensor
    host_words: torch.Tensor
    tokens: torch.Tensor
    words: torch.Tensor
    out: DeviceDrafts


@dataclass(frozen=True, slots=True)
class SharedIndexes:
    """What an engine maps: the header of each namespace that is there, and pieces of memory, the head of the arena among them."""

    headers: dict[str, int]
    pieces: list[Exported]


class DeviceIndexes:
    """Indexes in device memory that is allocated at once; see Indexes.

    Args:
        device: A CUDA device; "cpu" for Triton's interpreter.

    Raises:
        ResourceExhausted: The device has not that much free memory.
        InvalidArgument: There is no such device, or not one namespace fits the memory.
    """

    def __init__(self, config: CorpusConfig, device: str) -> None:
        self._config = config
        self.memory = DeviceMemory(config.device_memory_bytes, config.max_namespaces, _checked(device))
        shape = self._shape(2**17, config.quota_tokens)
        if 4 * shape.elements > config.device_memory_bytes:
            raise InvalidArgument(
                f"device_memory is {config.device_memory_bytes >> 20} MiB; one namespace of quota_tokens={config.quota_tokens} needs "
                f"{-(-4 * shape.elements // 2**20)}",
                "device_memory",
            )
        self._indexes: dict[str, DeviceIndex] = {}
        self._learned: dict[str, Learned] = {}
        self._lock = Lock()
        self._followers: list[tuple[str, int, torch.Tensor]] = []
        self._workspaces: OrderedDict[tuple[int, int, DraftParams], _Workspace] = OrderedDict()

    def _shape(self, vocab_size: int, quota_tokens: int) -> DeviceShape:
        config = self._config
        return DeviceShape(quota_tokens, min(config.recent_tokens, quota_tokens), config.live_tokens, vocab_size, config.depth)

    def make(self, vocab_size: int, quota_tokens: int) -> DeviceIndex:
        """See Indexes."""
        return DeviceIndex(self._shape(vocab_size, quota_tokens), memory=self.memory)

    def add(self, name: str, index: IndexArrays, learned: Learned) -> None:
        """See Indexes."""
        assert isinstance(index, DeviceIndex)
        with self._lock:
            self._indexes[name] = index
            self._learned[name] = learned
            self._tell_followers(name)

    def remove(self, name: str) -> None:
        """See Indexes."""
        with self._lock:
            self._indexes.pop(name, None)
            self._learned.pop(name, None)
            self._tell_followers(name)

    def spec(self, index: IndexArrays) -> BlockSpec:
        """See Indexes."""
        raise FailedPrecondition(f"the index is on {self.memory.device}: it cannot be mapped by host processes", "transport")

    @property
    def uuid(self) -> str:
        """The GPU's UUID; see device_uuid."""
        return device_uuid(self.memory.device)

    def share(self, reader: str, names: Sequence[str], pin: int) -> SharedIndexes:
        """Exports the indexes of namespaces to a reader, which is waited for from then on; see DeviceReaders.add for `pin`.

        Raises:
            InvalidArgument, ResourceExhausted: See DeviceReaders.add.
            CudaError: The driver does not export.
        """
        self.memory.readers.add(reader, pin)
        with self._lock:
            there = {name: self._indexes[name] for name in names if name in self._indexes}
            pieces = self.memory.export_head()
            try:
                for index in there.values():
                    pieces += self.memory.export(*index.stretch)
            except CudaError:
                for piece in pieces:
                    os.close(piece.fd)
                raise
        return SharedIndexes({name: index.slot for name, index in there.items()}, pieces)

    def unshare(self, reader: str) -> None:
        """The reader is gone: nothing waits for it any more."""
        self.memory.readers.remove(reader)

    def follow(self, name: str, vocab_size: int, headers: torch.Tensor) -> None:
        """Keeps int32 [n] filled with a namespace's header, -1 while there is none with that vocabulary; see DeviceDrafter.propose."""
        with self._lock:
            self._followers.append((name, vocab_size, headers))
            self._tell_followers(name)

    def unfollow(self, headers: torch.Tensor) -> None:
        """Ends `follow`."""
        with self._lock:
            self._followers = [follower for follower in self._followers if follower[2] is not headers]

    def _tell_followers(self, name: str) -> None:
        index = self._indexes.get(name)
        told = [(vocab_size, headers) for followed, vocab_size, headers in self._followers if followed == name]
        if told:
            with self.memory.stream("draft"):
                for vocab_size, headers in told:
                    headers.fill_(index.slot if index is not None and index.shape.vocab_size == vocab_size else -1)
            self.memory.wait("draft")

    def handle(self, index: IndexArrays) -> str:
        """See Indexes."""
        assert isinstance(index, DeviceIndex)
        return index.handle

    def draft(self, rows: Sequence[NDArray[np.int32]], names: Sequence[str], params: DraftParams, groups: GroupTexts = NO_GROUPS) -> Drafts:
        """See Indexes."""
        drafts = Drafts.unset(len(rows), params.k)
        width = max(_MIN_WIDTH, 1 << (max(map(len, rows), default=1) - 1).bit_length())
        most = max(1, _MAX_CALL_TOKENS // width)
        with self._lock:
            for at in range(0, len(rows), most):
                part = self._draft(rows[at : at + most], names[at : at + most], width, params)
                drafts.put(slice(at, at + most), part)
        return drafts

    def _draft(self, rows: Sequence[NDArray[np.int32]], names: Sequence[str], width: int, params: DraftParams) -> Drafts:
        n = len(rows)
        slots = [index.slot if (index := self._indexes.get(name)) else -1 for name in names]
        # A workspace is filled with zeros on the stream that uses it.
        with self.memory.stream("draft"):
            work = self._workspace(1 << (n - 1).bit_length(), width, params)
            tokens, words = work.host_tokens.numpy(), work.host_words.numpy()
            for i, row in enumerate(rows):
                tokens[i, : len(row)] = row
            words[0, :n] = [len(row) for row in rows]
            words[2, :n] = slots
            # The batch is filled up with empty rows.
            words[0, n:] = 0
            words[2, n:] = -1
            work.tokens[:n].copy_(work.host_tokens[:n], non_blocking=True)
            work.words.copy_(work.host_words, non_blocking=True)
            with self.memory.launching():
                lengths, places, namespaces = work.words
                work.drafter.propose(work.tokens, lengths, places, namespaces, work.out)
            drafts = work.out.numpy()
            if work.drafter.lessons is None:
                return drafts.first(n)
            lesson = work.drafter.lessons.numpy(drafts)
        drafts = drafts.first(n)
        for name in set(names) & self._learned.keys():
            of_name = np.array([i for i, row_name in enumerate(names) if row_name == name])
            drafts.lessons.append(RowLessons(of_name, of_name, replace(lesson, learned=self._learned[name])))
        return drafts

    def _workspace(self, batch: int, width: int, params: DraftParams) -> _Workspace:
        key = (batch, width, params)
        work = self._workspaces.get(key)
        if work is None:
            memory = self.memory
            compiled_k = 16 if params.k <= 16 else MAX_K
            drafter = DeviceRule(
                memory.words, memory.headers, max_batch=batch, max_row_tokens=width, params=params, teaching=True, compiled_k=compiled_k,
                compiled_depth=self._config.depth,
            )  # fmt: skip
            host = {"dtype": torch.int32, "pin_memory": memory.on_gpu}
            work = _Workspace(
                drafter,
                torch.zeros((batch, width), **host),
                torch.zeros((3, batch), **host),
                torch.zeros((batch, width), dtype=torch.int32, device=memory.device),
                torch.zeros((3, batch), dtype=torch.int32, device=memory.device),
                DeviceDrafts.empty(batch, params.k, memory.device),
            )
            work.host_words[1] = torch.arange(batch, dtype=torch.int32)
            self._workspaces[key] = work
            if len(self._workspaces) > _MAX_DRAFTERS:
                self._workspaces.popitem(last=False)
        self._workspaces.move_to_end(key)
        return work

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """See Indexes. What is read is a copy."""
        yield

    def memory_use(self) -> str:
        """See Indexes."""
        config, memory = self._config, self.memory
        most = 4 * self._shape(2**17, config.quota_tokens).elements / 2**20
        free = f", {torch.cuda.mem_get_info(memory.device)[0] / 2**20:.0f} MiB left on it" if memory.on_gpu else ""
        return (
            f"{memory.byte_size / 2**20:.0f} MiB on {memory.device}{free}; {most:.0f} MiB a namespace ({config.quota_tokens:,} tokens), and"
            f" about {SCRATCH_BYTES * config.quota_tokens / 2**20:.0f} MiB while one is restored"
        )

    def device_bytes(self) -> dict[str, int]:
        """See Indexes."""
        memory = self.memory
        taken = torch.cuda.memory_reserved(memory.device) if memory.on_gpu else memory.byte_size
        free = memory.free_bytes
        return {"indexes": memory.byte_size - free, "free": free, "working": max(0, taken - memory.byte_size)}

    def warm_up(self, name: str, row: NDArray[np.int32]) -> None:
        """See Indexes. A kernel for each way in which a batch is spread, for the usual parameters; others are compiled when asked for."""
        batches = [[row]]
        if self.memory.on_gpu:
            batches += [[row] * 128, [row] * 256, [row] * 512, [np.tile(row, LONG_ROW_TOKENS // len(row) + 1)]]
        rules = [DraftParams(max_depth=self._config.depth, policy=policy) for policy in get_args(Policy)]
        cases = [(rows, params) for params in rules for rows in batches]
        compiling.warm_up(lambda case: self.draft(case[0], [name] * len(case[0]), case[1]), cases)


def _checked(name: str) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidArgument(f"device is {name}; PyTorch {torch.__version__} finds no CUDA GPU here", "device")
    device = torch.device(name if ":" in name else f"{name}:{torch.cuda.current_device()}")
    if device.index >= torch.cuda.device_count():
        raise InvalidArgument(f"device is {name}; there are {torch.cuda.device_count()} CUDA GPUs", "device")
    return device
