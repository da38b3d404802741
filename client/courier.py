"""Carries to the service, off the decode path, what no call of the decode thread has carried: one background thread and its queue.

That is: tokens of requests in flight that waited too long for a propose, prompts too long to send from the decode thread, and requests
that have finished. What cannot be delivered waits for the next attachment, up to a limit, and is counted as lost beyond it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from draftd.client import wire
from draftd.client.failopen import reason_of
from draftd.client.rows import Request, RowTable
from draftd.client.transports import Link
from draftd.drafter.documents import LEAD_TOKENS
from draftd.proto.draftd.v1 import draftd_pb2 as pb

UPLOAD_TOKENS = 16_384
"""A row with more tokens to send than this is sent ahead by the courier, so that it does not hold up a step."""

_PATIENCE_S = 0.005
_RETRY_S = 0.1
_RPC_TIMEOUT_S = 5.0
_BACKLOG_TOKENS = 4_000_000
_BATCH_TOKENS = 500_000
_BATCH_DOCUMENTS = 64
_MAX_REFUSALS = 2

_Send = Callable[[], object]


@dataclass(slots=True, eq=False)
class Parcel:
    """Something to send of one request: tokens int32 [n] from position `start` of its row on.

    Attributes:
        ended: It is all that is left of a finished request.
        discard: The finished request is to be forgotten.
    """

    request: Request
    start: int
    tokens: NDArray[np.int32]
    ended: bool = False
    discard: bool = False

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def undelivered(self) -> int:
        """Output tokens that have not reached the corpus."""
        return 0 if self.discard else max(0, self.end - self.request.document_held)

    def after(self, position: int) -> NDArray[np.int32]:
        """The tokens from a position of the row on."""
        return self.tokens[max(0, position - self.start) :]


class Courier:
    """The background sender of one engine.

    `note`, `knows`, `finish`, `take_lost`, `flush`, `attach` and `close` are for the decode thread.
    """

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._uploads = False
        self._link: Link | None = None
        self._finished: deque[Parcel] = deque()
        self._backlog = 0
        self._lost = 0
        self._refusals = 0
        self._waited = False
        self._known: Request | None = None
        self._sending = threading.Lock()
        self._work = threading.Event()
        self._ended = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftd-courier", daemon=True)
        self._thread.start()

    def attach(self, link: Link, uploads: bool) -> None:
        """Uses another attachment from now on. Its service has closed what the last attachment left open, or never knew of it.

        Args:
            uploads: Send long rows ahead, since propose carries their tokens.
        """
        with self._table.lock:
            same_service = self._link is not None and self._link.instance == link.instance
            for request in [*(r for r, _ in self._table.shared()), *(p.request for p in self._finished)]:
                if same_service:
                    request.refusals = 0
                    request.reopen()
                else:
                    request.forget()
            self._link = link
            self._uploads = uploads
            self._known = None
        self._ended.set()
        self._work.set()

    def note(self) -> None:
        """Tokens were committed that no slot publishes."""
        if not self._work.is_set():
            self._work.set()

    def knows(self, request: Request) -> None:
        """The service learns of a request without being called."""
        self._known = request

    def finish(self, request: Request, tokens: NDArray[np.int32], discard: bool) -> None:
        """A request has ended with `tokens`, int32 [n], all that its row holds; they are copied."""
        with self._table.lock:
            self._finished.append(Parcel(request, 0, tokens.copy(), True, discard))
            self._backlog += len(tokens)
            while self._backlog > _BACKLOG_TOKENS and len(self._finished) > 1:
                self._lost += self._drop(self._finished[0])
        self._ended.set()
        self._work.set()

    def rows_held(self) -> int:
        """Rows of ended requests that the service still holds."""
        return sum(1 for parcel in list(self._finished) if parcel.request.row_held)

    def take_lost(self) -> int:
        """Output tokens that were given up since the last call."""
        if not self._lost:
            return 0
        with self._table.lock:
            lost, self._lost = self._lost, 0
        return lost

    def flush(self, timeout_s: float, wait_visible: bool) -> bool:
        """Sends all that there is from the caller's thread; True if it all arrived (and can be drafted from)."""
        deadline = time.monotonic() + timeout_s
        if not self._sending.acquire(timeout=timeout_s):
            return False
        try:
            link = self._link
            return link is not None and self._send_all(link, wait_visible, deadline, None)
        finally:
            self._sending.release()

    def close(self) -> None:
        """Stops the thread; what is left in the queue counts as lost."""
        self._stop.set()
        self._ended.set()
        self._work.set()
        self._thread.join(_RPC_TIMEOUT_S)
        with self._table.lock:
            while self._finished:
                self._lost += self._drop(self._finished[0])

    def _run(self) -> None:
        while not self._stop.is_set():
            self._work.wait()
            self._work.clear()
            with self._table.lock:
                waiting = {request: len(tokens) for request, tokens in self._table.shared() if not request.published}
            # A propose that follows a commit at once carries its tokens; only what it left behind is sent from here. The end of a
            # request is not waited with: the service holds its row until then.
            if self._ended.wait(_PATIENCE_S):
                waiting = {}
                self._work.set()
            self._ended.clear()
            link = self._link
            if link is None or self._stop.is_set():
                continue
            with self._sending:
                delivered = self._send_all(link, False, time.monotonic() + _RPC_TIMEOUT_S, waiting)
            if not delivered:
                self._stop.wait(_RETRY_S)
                self._ended.set()
                self._work.set()

    def _send_all(self, link: Link, wait: bool, deadline: float, waiting: dict[Request, int] | None) -> bool:
        """Sends what there is; of requests in flight only what is in `waiting`, if that is given. True if it all arrived."""
        refusals = self._refusals
        try:
            if self._uploads:
                self._upload(link, deadline)
            self._waited = False
            self._send_in_flight(link, wait, deadline, waiting)
            self._send_finished(link, wait, deadline)
            if wait and not self._waited and self._known is not None:
                self._wait_for_refresh(link, self._known, deadline)
        except grpc.RpcError:
            return False
        return self._refusals == refusals

    def _wait_for_refresh(self, link: Link, known: Request, deadline: float) -> None:
        """Returns once all that the service has is visible: adds nothing to a document that it knows, and waits for that."""
        message = pb.IngestRequest(attachment_id=link.attachment_id, namespace=known.namespace, wait_visible=True)
        message.documents.add(document_id=known.kept_as)
        link.stub.Ingest(message, timeout=_left(deadline))

    def _upload(self, link: Link, deadline: float) -> None:
        """Gives the service rows that are too long for a propose on the decode path; asks for no draft."""
        with self._table.lock:
            long = [
                Parcel(request, request.row_held, tokens[request.row_held :].copy())
                for request, tokens in self._table.shared()
                if len(tokens) - request.row_held > UPLOAD_TOKENS
            ]
        for parcel in long:
            message = pb.ProposeRequest(attachment_id=link.attachment_id, packed=True)
            message.parameters.use_local = message.parameters.use_corpus = False
            request = parcel.request
            message.rows.add(
                packed_tokens=wire.pack(parcel.tokens),
                document_id=request.kept_as,
                offset=parcel.start,
                prompt_length=request.kept_from,
                namespace=request.namespace,
                group=request.group,
            )
            if self._call(lambda message=message: link.stub.Propose(message, timeout=_left(deadline)), [parcel]):  # type: ignore[misc]
                self._acknowledge(link, parcel, row=True)

    def _send_in_flight(self, link: Link, wait: bool, deadline: float, waiting: dict[Request, int] | None) -> None:
        by_namespace: dict[str, list[Parcel]] = {}
        with self._table.lock:
            for request, tokens in self._table.shared():
                known = request.visible if wait else request.document_held
                if request.published or len(tokens) <= known or (waiting is not None and request.document_held >= waiting.get(request, 0)):
                    continue
                start = min(request.document_held, len(tokens) - 1)
                by_namespace.setdefault(request.namespace, []).append(
                    Parcel(request, max(0, start - LEAD_TOKENS), tokens[max(0, start - LEAD_TOKENS) :].copy())
                )
        for parcels in by_namespace.values():
            self._send_batches(link, parcels, wait, deadline)

    def _send_finished(self, link: Link, wait: bool, deadline: float) -> None:
        with self._table.lock:
            finished = list(self._finished)
        harvests = [p for p in finished if p.request.row_held]
        while harvests:
            batch = harvests[: min(_BATCH_DOCUMENTS, self._table.max_rows)]
            del harvests[: len(batch)]
            self._harvest(link, batch, wait, deadline)
        by_namespace: dict[str, list[Parcel]] = {}
        for parcel in finished:
            if not parcel.request.row_held:
                by_namespace.setdefault(parcel.request.namespace, []).append(parcel)
        for parcels in by_namespace.values():
            self._send_batches(link, parcels, wait, deadline)

    def _send_batches(self, link: Link, parcels: list[Parcel], wait: bool, deadline: float) -> None:
        batch: list[Parcel] = []
        for parcel in parcels:
            if batch and (len(batch) == _BATCH_DOCUMENTS or sum(len(p.tokens) for p in batch) + len(parcel.tokens) > _BATCH_TOKENS):
                self._ingest(link, batch, wait, deadline)
                batch = []
            batch.append(parcel)
        if batch:
            self._ingest(link, batch, wait, deadline)

    def _ingest(self, link: Link, parcels: list[Parcel], wait: bool, deadline: float) -> None:
        """Sends output tokens of requests of one namespace, in flight or finished."""
        message = pb.IngestRequest(attachment_id=link.attachment_id, namespace=parcels[0].request.namespace, wait_visible=wait)
        sent = []
        for parcel in parcels:
            request = parcel.request
            start = max(parcel.start, min(request.document_held, parcel.end - 1), request.kept_from)
            if (start >= parcel.end and request.document_held == request.kept_from) or parcel.discard:
                # Nothing of it was ever sent, and there is nothing to send or to keep.
                self._acknowledge(link, parcel)
                continue
            tokens = wire.pack(parcel.after(start))
            lead = parcel.after(start - LEAD_TOKENS)[: start - max(parcel.start, start - LEAD_TOKENS)]
            message.documents.add(
                document_id=request.kept_as,
                offset=start - request.kept_from,
                packed_tokens=tokens,
                complete=parcel.ended,
                packed_lead=wire.pack(lead) if start == request.kept_from else b"",
            )
            sent.append(parcel)
        if sent and self._call(lambda: link.stub.Ingest(message, timeout=_left(deadline)), sent):
            self._waited |= wait
            for parcel in sent:
                self._acknowledge(link, parcel, visible=wait)
        elif len(sent) > 1:
            for parcel in sent:
                self._ingest(link, [parcel], wait, deadline)

    def _harvest(self, link: Link, parcels: list[Parcel], wait: bool, deadline: float) -> None:
        """Ends rows that the service holds."""
        message = pb.HarvestRequest(attachment_id=link.attachment_id, wait_visible=wait)
        for parcel in parcels:
            request = parcel.request
            offset = min(request.row_held, parcel.end)
            message.rows.add(
                document_id=request.kept_as, offset=offset, packed_tokens=wire.pack(parcel.after(offset)), discard=parcel.discard
            )
        if self._call(lambda: link.stub.Harvest(message, timeout=_left(deadline)), parcels):
            self._waited |= wait
            for parcel in parcels:
                self._acknowledge(link, parcel, visible=wait)
        elif len(parcels) > 1:
            for parcel in parcels:
                self._harvest(link, [parcel], wait, deadline)

    def _call(self, send: _Send, parcels: list[Parcel]) -> bool:
        """Sends; False if the service refused. What was refused alone is sent as a further document, and given up the second time.

        Raises:
            grpc.RpcError: The service did not answer, or the attachment has ended.
        """
        try:
            send()
        except grpc.RpcError as error:
            reason, _ = reason_of(error)
            if reason != "refused":
                raise
            if len(parcels) == 1:
                self._refused(parcels[0])
            return False
        return True

    def _refused(self, parcel: Parcel) -> None:
        request = parcel.request
        self._refusals += 1
        with self._table.lock:
            request.refusals += 1
            if request.refusals >= _MAX_REFUSALS:
                self._lost += self._drop(parcel) if parcel.ended else 0
                request.given_up = True
            else:
                request.reopen()
        self._work.set()

    def _acknowledge(self, link: Link, parcel: Parcel, *, visible: bool = False, row: bool = False) -> None:
        with self._table.lock:
            if self._link is not link:
                return
            request = parcel.request
            request.refusals = 0
            if row:
                request.row_held = max(request.row_held, parcel.end)
            request.document_held = max(request.document_held, parcel.end)
            if visible:
                request.visible = max(request.visible, parcel.end)
            if parcel.ended:
                self._drop(parcel)
            if parcel.end > request.kept_from and not parcel.discard:
                self._known = request

    def _drop(self, parcel: Parcel) -> int:
        """Takes a finished request from the queue; its output tokens that have not reached the corpus."""
        if parcel in self._finished:
            self._finished.remove(parcel)
            self._backlog -= len(parcel.tokens)
        return parcel.undelivered()


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
