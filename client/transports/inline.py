"""INLINE and HANDLE: the service drafts, one RPC a step; they differ in how tokens get there and drafts come back.

Inline sends the tokens that the service does not hold yet and reads drafts from the answer.
"""

from __future__ import annotations

from typing import Literal

import grpc
import numpy as np
from numpy.typing import NDArray

from draftd.client import wire
from draftd.client.courier import UPLOAD_TOKENS, Courier
from draftd.client.failopen import FailOpen, reason_of
from draftd.client.rows import Request, RowTable
from draftd.client.transports import Link
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_MAX_REFUSALS = 2


class InlineTransport:
    """Drafting by RPC with tokens in the message.

    Args:
        timeout_s: Longest wait of one call, in seconds.
    """

    def __init__(self, link: Link, table: RowTable, courier: Courier, timeout_s: float) -> None:
        self.link = link
        self._table = table
        self._courier = courier
        self._timeout_s = timeout_s

    @property
    def name(self) -> Literal["inline", "handle"]:
        """Which transport it is."""
        return "inline"

    def start(self, request: Request, tokens: NDArray[np.int32]) -> bool:
        """The next propose tells the service; long rows are sent ahead of it."""
        self._courier.note()
        return True

    def append(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """The next propose carries the tokens, or the courier if there is none soon."""
        self._courier.note()

    def finish(self, request: Request, tokens: NDArray[np.int32], discard: bool) -> None:
        """Leaves the rest to the courier."""
        self._courier.finish(request, tokens, discard)

    def propose(self, rows: NDArray[np.int64], params: DraftParams) -> Drafts:
        """Drafts for rows of the table; see Transport. Rows that are being sent ahead, or that the service has no
        room for yet, get none."""
        drafts = Drafts.empty(len(rows), params.k)
        requests: list[Request] = []
        lengths: list[int] = []
        places: list[int] = []
        message = pb.ProposeRequest(attachment_id=self.link.attachment_id, parameters=wire.parameters_message(params), packed=True)
        room: int | None = None
        for place, row in enumerate(rows.tolist()):
            request = self._table.requests[row]
            assert request is not None
            length = int(self._table.lengths[row])
            if not request.row_held:
                room = self._room() if room is None else room
                room -= 1
                if room < 0:
                    continue
            if not self._describe(message, request, row, length):
                continue
            requests.append(request)
            lengths.append(length)
            places.append(place)
        if not requests:
            return drafts
        try:
            response = self.link.stub.Propose(message, timeout=self._timeout_s)
        except grpc.RpcError as error:
            reason, details = reason_of(error)
            if reason == "refused":
                self._refused(requests, details)
            raise FailOpen(reason, details) from error
        for request, length in zip(requests, lengths, strict=True):
            request.row_held = length
            request.document_held = max(request.document_held, length)
            request.refusals = 0
        self._read(response, drafts, np.array(places), [request.namespace for request in requests])
        return drafts

    def _room(self) -> int:
        """New rows that the service has room for: it holds twice max_rows, and ended ones until the courier has told it."""
        held = sum(1 for request, _ in self._table.shared() if request.row_held)
        return 2 * self._table.max_rows - held - self._courier.rows_held()

    def _describe(self, message: pb.ProposeRequest, request: Request, row: int, length: int) -> bool:
        """Adds a row to the request; False if it is too long to be sent from the decode thread."""
        if length - request.row_held > UPLOAD_TOKENS:
            return False
        message.rows.add(
            packed_tokens=wire.pack(self._table.tokens[row, request.row_held : length]),
            document_id=request.kept_as,
            offset=request.row_held,
            prompt_length=request.kept_from,
            namespace=request.namespace,
            group=request.group,
        )
        return True

    def _read(self, response: pb.ProposeResponse, drafts: Drafts, places: NDArray[np.int64], namespaces: list[str]) -> None:
        """Fills the drafts at `places` from an answer."""
        try:
            wire.unpack_drafts(response.drafts, places, drafts)
        except ValueError as error:
            raise FailOpen("internal", f"answer that does not fit: {error}") from error
        drafts.version[places] = wire.row_versions(namespaces, list(response.versions))

    def _refused(self, requests: list[Request], details: str) -> None:
        """Sends rows whole next time, and one that was named as a further document; one that is named again is given up."""
        named = [r for i, r in enumerate(requests) if f"rows[{i}]" in details or repr(r.kept_as) in details]
        for request in requests:
            request.row_held = 0
        for request in named:
            request.refusals += 1
            if request.refusals >= _MAX_REFUSALS:
                request.given_up = True
            else:
                request.reopen()

    def is_visible(self) -> bool:
        """The courier knows; nothing gets there without a call."""
        return True

    def heartbeat(self, response: pb.HeartbeatResponse) -> None:
        """Nothing to do."""

    def orphaned(self) -> None:
        """Nothing to do: the table has all tokens."""

    def close(self) -> None:
        """Nothing to give back."""
