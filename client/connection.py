"""The decode thread's side of the attachment: it takes over each new transport, and tells a new service of requests in flight.

The session makes transports, the courier carries what has missed them; this decides which one a request goes to.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from draftd.client.channel import socket_path
from draftd.client.config import ClientConfig
from draftd.client.courier import Courier
from draftd.client.failopen import FailOpen, FailOpenLog
from draftd.client.rows import Request, RowTable
from draftd.client.session import Session
from draftd.client.transports import Link, Transport
from draftd.client.transports.handle import EngineTensors, HandleTransport
from draftd.client.transports.inline import InlineTransport
from draftd.client.transports.mapped import DeviceLink, MappedTransport
from draftd.drafter.drafts import Drafts
from draftd.drafter.params import DraftParams
from draftd.drafter.stats import EngineStats
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_FLUSH_AT_CLOSE_S = 2.0


class Connection:
    """What one engine has with the service, whichever run of it.

    Attributes:
        session: Keeps the engine attached.
    """

    def __init__(
        self,
        config: ClientConfig,
        table: RowTable,
        tensors: EngineTensors | None,
        stats: EngineStats,
        log: FailOpenLog,
        device: DeviceLink | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._table = table
        self._tensors = tensors
        self._stats = stats
        self._log = log
        self._courier = Courier(table)
        self._transport: Transport | None = None
        self._untold: deque[Request] = deque()
        # Counts that a service has seen in an earlier row block, and that it has seen up to now.
        self._reported = stats.words.copy()
        self._seen = stats.words.copy()
        self._closed = False
        self.session = Session(config, tensors.message if tensors else None, self._open_transport)

    def adopt(self) -> Transport | None:
        """The transport to use; a new attachment takes the place of the old one."""
        transport = self.session.transport
        if transport is not self._transport and transport is not None:
            if self._transport is not None:
                self._transport.close()
            self._courier.attach(transport.link, uploads=transport.name == "inline")
            self._transport = transport
            self._reported = self._seen.copy()
            self._untold = deque(request for request, _ in self._table.shared())
        return self._transport

    def propose(self, rows: NDArray[np.int64], params: DraftParams) -> Drafts:
        """Drafts for rows with shared requests, int64 [n]; see Transport.propose.

        Raises:
            FailOpen: There are none.
        """
        transport = self._transport
        if self._closed:
            raise FailOpen("unattached", "the drafter is detached")
        if transport is None or not (self.session.alive or transport.name == "mapped"):
            raise FailOpen(*self.session.trouble)
        self._tell(time.monotonic() + self._config.timeout_ms / 2000)
        try:
            drafts = transport.propose(rows, params)
        except FailOpen as error:
            if error.reason != "timeout":
                self.session.check()
            raise
        if self.session.alive:
            self._log.worked()
        else:
            # A mapped index without its writer still drafts, but nothing new comes into it.
            self._log.failed(*self.session.trouble)
        return drafts

    def start(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Tells the service of a shared request with `tokens`, int32 [n]; without one, the next will be told."""
        if self._transport is not None and not self._transport.start(request, tokens) and not self.session.alive:
            self._log.failed("rows_full", "no free slot, and no service to send its tokens to")

    def append(self, request: Request, tokens: NDArray[np.int32]) -> None:
        """Tells the service what the engine committed."""
        if self._transport is not None and request.shared and len(tokens):
            self._transport.append(request, tokens)

    def append_rows(self, requests: list[Request], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Tells the service what the engine committed to several requests: tokens int32 [n, w], of which counts[i] count, int64 [n]."""
        if isinstance(self._transport, MappedTransport):
            shared = np.array([request.shared for request in requests]) & (counts > 0)
            if shared.any():
                self._transport.append_rows([requests[i] for i in np.flatnonzero(shared)], tokens[shared], counts[shared])
            return
        for request, given, count in zip(requests, tokens, counts.tolist(), strict=True):
            self.append(request, given[:count])

    def end(self, request: Request, tokens: NDArray[np.int32], discard: bool) -> None:
        """Ends a request with `tokens`, int32 [n], all that it holds."""
        if request.given_up:
            self._stats.lost_tokens[0] += max(0, len(tokens) - request.document_held)
        elif request.shared and self._transport is not None:
            self._transport.finish(request, tokens, discard)
        elif request.shared:
            self._courier.finish(request, tokens, discard)

    def report(self) -> None:
        """Shows a service that maps the engine's counts what was counted since the attachment began."""
        self._stats.lost_tokens[0] += self._courier.take_lost()
        if isinstance(self._transport, MappedTransport) and self.session.alive:
            np.subtract(self._stats.words, self._reported, out=self._transport.block.stats.words)
            np.copyto(self._seen, self._stats.words)

    def is_visible(self, timeout_s: float) -> bool:
        """Sends all that there is, and answers whether others can draft from all of it."""
        transport = self.adopt()
        self._tell(float("inf"))
        return transport is not None and self._courier.flush(timeout_s, wait_visible=True) and transport.is_visible()

    def close(self) -> None:
        """Ends the attachment; what was committed is delivered if the service answers in time, else it counts as lost."""
        self._closed = True
        if self.session.alive:
            self.adopt()
            self._courier.flush(_FLUSH_AT_CLOSE_S, wait_visible=False)
            self.report()
        self.session.close()
        self._courier.close()
        self._stats.lost_tokens[0] += self._courier.take_lost()
        if self._tensors is not None:
            self._tensors.close()

    def _tell(self, deadline: float) -> None:
        """Tells a new service of requests that it has not heard of, until `deadline` on the monotonic clock; the rest waits."""
        if self._untold:
            tokens_of = dict(self._table.shared())
            while self._untold and time.monotonic() < deadline:
                request = self._untold.popleft()
                if request in tokens_of:
                    self.start(request, tokens_of[request])

    def _open_transport(self, link: Link, response: pb.AttachResponse) -> Transport:
        """Makes the transport that the service chose; called from the session's thread."""
        timeout_s = self._config.timeout_ms / 1000
        if response.transport == pb.TRANSPORT_MAPPED:
            if socket_path(self._config.endpoint) is None:
                # It would have this process map, and write to, whatever file it names.
                raise ValueError("a service of another host wants a file to be mapped")
            mapped = MappedTransport(link, response, self._table, self._courier, self._config.namespaces, self._device)
            mapped.warm_up(link.defaults)
            return mapped
        if response.transport == pb.TRANSPORT_HANDLE and self._tensors is not None:
            return HandleTransport(link, self._table, self._courier, timeout_s, self._tensors)
        if response.transport == pb.TRANSPORT_INLINE:
            return InlineTransport(link, self._table, self._courier, timeout_s)
        raise ValueError(f"the service chose transport {response.transport}, which was not offered")
