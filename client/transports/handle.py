"""HANDLE: the service drafts on tensors that the engine shares; one RPC a step carries row indices only.

On a CPU the tensors are files in shared memory, which this engine maps and the service reads and writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from draftd.client.courier import Courier
from draftd.client.failopen import FailOpen
from draftd.client.rows import Request, RowTable
from draftd.client.transports import Link, inline
from draftd.client.wire import row_versions
from draftd.drafter.drafts import Drafts
from draftd.drafter.shm import SharedBlock, ShmDir, private_directory
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_INFO_FIELDS = 4
_DATA_TYPES = {"int32": pb.DATA_TYPE_INT32, "float32": pb.DATA_TYPE_FLOAT32}


class EngineTensors:
    """The tensors of an engine, in a directory of its own below the service's; a later engine removes it if this one is killed.

    Attributes:
        tokens: int32 [max_rows, max_length].
        lengths: int32 [max_rows].
        draft_tokens: int32 [max_rows, k]; the service writes it.
        draft_probabilities: float32 [max_rows, k]; the service writes it.
        draft_info: int32 [max_rows, 4]; the service writes token count, source, match length and occurrences.
        message: What the service is told of them.

    Raises:
        OSError: The files cannot be made.
    """

    def __init__(self, shm_root: Path, max_rows: int, max_length: int, k: int) -> None:
        self._directory = ShmDir.create(private_directory(shm_root) / "engines")
        self.message = pb.EngineTensors()
        self.tokens = cast(NDArray[np.int32], self._create("tokens", "int32", (max_rows, max_length)))
        self.lengths = cast(NDArray[np.int32], self._create("lengths", "int32", (max_rows,)))
        self.draft_tokens = cast(NDArray[np.int32], self._create("draft_tokens", "int32", (max_rows, k)))
        self.draft_probabilities = cast(NDArray[np.float32], self._create("draft_probabilities", "float32", (max_rows, k)))
        self.draft_info = cast(NDArray[np.int32], self._create("draft_info", "int32", (max_rows, _INFO_FIELDS)))

    def _create(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
        path = str(self._directory.path / name)
        block = SharedBlock.create(path, 4 * int(np.prod(shape)))
        getattr(self.message, name).CopyFrom(pb.Tensor(handle=path, data_type=_DATA_TYPES[dtype], shape=shape))
        return block.buf.view(dtype).reshape(shape)

    def close(self) -> None:
        """Removes the files; arrays stay valid."""
        self._directory.close()


class HandleTransport(inline.InlineTransport):
    """Drafting by RPC on shared tensors; the table's rows are the tensors themselves."""

    def __init__(self, link: Link, table: RowTable, courier: Courier, timeout_s: float, tensors: EngineTensors) -> None:
        super().__init__(link, table, courier, timeout_s)
        self._tensors = tensors

    @property
    def name(self) -> Literal["handle"]:
        """Which transport it is."""
        return "handle"

    def _describe(self, message: pb.ProposeRequest, request: Request, row: int, length: int) -> bool:
        message.rows.add(
            row_index=row,
            document_id=request.kept_as,
            offset=request.row_held,
            prompt_length=request.kept_from,
            namespace=request.namespace,
        )
        return True

    def _read(self, response: pb.ProposeResponse, drafts: Drafts, places: NDArray[np.int64], namespaces: list[str]) -> None:
        n, k = len(places), drafts.tokens.shape[1]
        info = self._tensors.draft_info[:n]
        if (info[:, 0] < 0).any() or (info[:, 0] > k).any():
            raise FailOpen("internal", "the service wrote a token count that does not fit")
        drafts.tokens[places] = self._tensors.draft_tokens[:n, :k]
        drafts.probabilities[places] = self._tensors.draft_probabilities[:n, :k]
        for column, field in enumerate((drafts.counts, drafts.source, drafts.match_length, drafts.occurrences)):
            field[places] = info[:, column]
        drafts.version[places] = row_versions(namespaces, list(response.versions))
