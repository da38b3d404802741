"""How drafts are asked for, one module a transport, behind one small interface.

A transport belongs to one attachment; a new attachment brings a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from draftd.client.rows import Request
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc


@dataclass(frozen=True, slots=True)
class Link:
    """A live attachment.

    Attributes:
        attachment_id: Its name in calls.
        instance: The run of the service.
        lease_s: Its lease, in seconds.
        defaults: The service's default parameters, with the attachment's k.
        stub: Calls the service.
    """

    attachment_id: str
    instance: str
    lease_s: float
    defaults: DraftParams
    stub: draftd_pb2_grpc.DrafterServiceStub


class Transport(Protocol):
    """Drafting for the rows of a table. Called from the decode thread, except where it says otherwise."""

    link: Link

    @property
    def name(self) -> Literal["mapped", "handle", "inline"]:
        """Which one it is."""

    def start(self, request: Request, tokens: NDArray[np.int32]) -> bool:
        """A shared request begins, or is told to a new service; `tokens` int32 [n] is all that it holds. False if no slot was free."""

    def append(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """The engine committed `tokens`, int32 [n]; the table has them already."""

    def finish(self, request: Request, tokens: NDArray[np.int32], discard: bool) -> None:
        """A request ends with `tokens`, int32 [n], all that it holds."""

    def propose(self, rows: NDArray[np.int64], params: DraftParams) -> Drafts:
        """Drafts for rows of the table, int64 [n], each with a shared request of at least one token: [n, params.k].

        Raises:
            FailOpen: There are no drafts for this batch.
        """

    def is_visible(self) -> bool:
        """Everything that reached the service without a call can be drafted from by others."""

    def heartbeat(self, response: pb.HeartbeatResponse) -> None:
        """The lease was extended. Called from the session's thread."""

    def orphaned(self) -> None:
        """The service is gone and will not take what it has not taken yet. Called from the session's thread."""

    def close(self) -> None:
        """Gives back what the attachment holds; requests that the service had not taken go to the courier."""
