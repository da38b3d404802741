"""What an engine uses: one `Drafter` a process, called from its decode thread.

It never raises in the decode loop and never waits longer than its bound, unless it is strict. It drafts nothing itself: transports do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftd.client.acceptance import PendingDrafts
from draftd.client.config import ClientConfig, TransportName, default_endpoint, default_shm_root
from draftd.client.connection import Connection
from draftd.client.credentials import Credentials
from draftd.client.failopen import FailOpen, FailOpenLog
from draftd.client.load import Load
from draftd.client.rows import Parked, Request, RowTable
from draftd.client.transports import Transport
from draftd.client.transports.handle import EngineTensors
from draftd.client.transports.mapped import DeviceLink
from draftd.client.wire import as_sent
from draftd.drafter.drafts import Drafts
from draftd.drafter.errors import DraftdError, FailedPrecondition, InvalidArgument
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import propose_local
from draftd.drafter.stats import EngineStats

T = TypeVar("T")

_POLL_S = 0.002
_FEW_ROWS = 6
"""So many rows take less time one by one."""


class Drafter:
    """Drafts for the rows of one engine.

    The engine gives each request one of its rows, in [0, max_rows). Every step it calls `propose` for its rows, verifies the drafts, and
    calls `append` with what it committed; `finish` ends a request. A wrong call (a row that does not exist, a token outside the
    vocabulary) raises when `strict`; else it is counted as `refused`. After a wrong `start` or `append` the row gets no drafts until
    the next `start`, since the engine holds other tokens than the drafter.

    Args:
        endpoint: gRPC target of the service, such as `unix:/run/draftd.sock`; None takes DRAFTD_ENDPOINT or the default socket.
        engine: Name of the engine, unique on the service.
        vocab_size: Tokens are in [0, vocab_size).
        k: Most tokens of a draft, in [1, 64]; the width of every `Drafts`.
        max_rows: Most requests at a time.
        max_length: Longest row, prompt and output together, in tokens.
        namespace: What the engine's rows draft from and are kept in.
        extra_namespaces: Further namespaces that `start` may name.
        transport: `mapped`, `handle`, `inline`, or `auto`: mapped where that works, else inline.
        timeout_ms: Longest wait for the service in a call of the decode thread, in milliseconds.
        params: How to draft; None takes the service's defaults.
        tokenizer_fingerprint: Identifies the tokenizer; a namespace refuses another than its first.
        strict: Raise `FailOpen` and `DraftdError` instead of failing open; for tests.
        credentials: TLS and the token; None takes the DRAFTD_CLIENT_* variables.
        device, device_uuid: For DeviceSession, which drafts on the GPU of that UUID.
        stats: Where to count, beside what is counted there already; None: in memory of its own.

    Raises:
        InvalidArgument: An argument is outside its range. A service that is not there is not an error.
        OSError: `handle` is asked for and shared memory cannot be had.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        engine: str,
        vocab_size: int,
        k: int = 16,
        max_rows: int,
        max_length: int,
        namespace: str = "default",
        extra_namespaces: Sequence[str] = (),
        transport: TransportName = "auto",
        timeout_ms: float = 2.0,
        params: DraftParams | None = None,
        tokenizer_fingerprint: str = "",
        strict: bool = False,
        credentials: Credentials | None = None,
        device: DeviceLink | None = None,
        device_uuid: str = "",
        stats: EngineStats | None = None,
    ) -> None:
        self._config = ClientConfig(
            endpoint=endpoint or default_endpoint(),
            engine=engine,
            vocab_size=vocab_size,
            k=k,
            max_rows=max_rows,
            max_length=max_length,
            namespace=namespace,
            extra_namespaces=tuple(extra_namespaces),
            transport=transport,
            timeout_ms=timeout_ms,
            params=params,
            tokenizer_fingerprint=tokenizer_fingerprint,
            strict=strict,
            credentials=Credentials.from_environment() if credentials is None else credentials,
            device_uuid=device_uuid,
        )
        tensors = EngineTensors(default_shm_root(), max_rows, max_length, k) if transport == "handle" else None
        tokens = tensors.tokens if tensors else np.empty((max_rows, max_length), np.int32)
        lengths = tensors.lengths if tensors else np.zeros(max_rows, np.int32)
        self._table = RowTable(tokens, lengths, vocab_size)
        self._stats = stats or EngineStats()
        self._pending = PendingDrafts(self._table, self._stats, k, late=device is not None)
        self._log = FailOpenLog(engine, self._stats)
        self._load = Load()
        self._last_step = (0, 0)
        self._closed = False
        self._connection = Connection(self._config, self._table, tensors, self._stats, self._log, device)

    # -- what an engine calls ------------------------------------------------------------------------------------------------

    def start(
        self,
        row: int,
        tokens: ArrayLike,
        document_id: str | None = None,
        namespace: str | None = None,
        private: bool = False,
        *,
        prompt_length: int | None = None,
        group: str = "",
    ) -> None:
        """Begins a request, or goes on with one that was preempted.

        A request that is in the row already is finished first. A document id that is in flight, here or after `preempt`, moves to this
        row and goes on; the tokens must then begin with what it held.

        Args:
            row: The engine's row, in [0, max_rows).
            tokens: Integers [n]; all tokens that the request holds: the prompt, and whatever was generated before.
            document_id: The request's id, 1 to 128 bytes; None makes one.
            namespace: One of the attachment's namespaces; None is its own.
            private: Draft from the request's own tokens only, in this process; the service never sees it.
            prompt_length: Leading tokens that are the prompt and are never kept; None: all of them.
            group: A label of at most 128 bytes that requests have in common which sample one prompt: they draft from one another's outputs
                too. Empty: none. A request that was preempted stays in its group. Without effect on private requests, over `handle`, on a
                GPU and by the rule `tree`.
        """
        self._guard(lambda: self._start(row, tokens, document_id or uuid.uuid4().hex, namespace, private, prompt_length, group), None)

    def propose(self, rows: ArrayLike, params: DraftParams | None = None) -> Drafts:
        """Drafts for some rows; empty for those, or all, that nothing can be drafted for.

        Args:
            rows: Integers [n]; distinct rows with requests.
            params: How to draft this time; None takes the drafter's.

        Returns:
            Drafts [n, k], in the order of `rows`.
        """
        started = time.perf_counter_ns()
        n = np.shape(rows)[0] if np.ndim(rows) == 1 else 0
        drafts = self._guard(lambda: self._propose(rows, params), None)
        if drafts is None:
            drafts = Drafts.empty(n, self._config.k)
        self._stats.count_proposal(n, (time.perf_counter_ns() - started) / 1000)
        self._connection.report()
        return drafts

    def append(self, row: int, tokens: ArrayLike) -> None:
        """Adds what the engine committed to a row.

        Args:
            row: A row with a request.
            tokens: Integers [n]: accepted draft tokens and the model's own.
        """
        self._guard(lambda: self._append(row, tokens), None)

    def append_rows(self, rows: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        """Adds what the engine committed to several rows, in much less time than one by one.

        Args:
            rows: int64 [n]; distinct rows with requests.
            tokens: int32 [n, w].
            counts: int64 [n], in [0, w]; how many of each row's tokens were committed.
        """
        self._guard(lambda: self._append_rows(rows, tokens, counts), None)

    def finish(self, row: int, discard: bool = False, *, length: int | None = None) -> None:
        """Ends a row's request; its output is kept for others to draft from, or forgotten if `discard`.

        Args:
            length: Tokens that count, prompt included, where the row holds some past the request's end; None: all.
        """
        self._guard(lambda: self._end(row, discard, length), None)

    def preempt(self, row: int) -> None:
        """Takes a request from its row without ending it; `start` with its document id brings it back. At most max_rows wait."""
        self._guard(lambda: self._preempt(row), None)

    def observe(self, rows: NDArray[np.int64], drafts: Drafts) -> None:
        """Notes drafts that were made elsewhere for what the rows, int64 [n], hold now; their acceptance is counted as for others."""
        self._pending.settle(rows)
        self._pending.remember(rows, drafts)
        self._stats.count_proposal(len(rows), 0.0)
        self._connection.report()

    def refuse(self, error: DraftdError) -> None:
        """Counts a wrong call that was not made here, or raises it."""

        def fail() -> None:
            raise error

        self._guard(fail, None)

    def set_costs(self, slot: float, step: float) -> None:
        """Tells what it costs to verify one token, and a step beside that, in one unit: from now on tau follows from the batch size.

        Where a `propose` is given its own parameters their tau counts.

        Raises:
            InvalidArgument: A cost is negative, or both are 0.
        """
        self._load.tell(slot, step)

    def observe_step(self, seconds: float) -> None:
        """Tells how long the model took for the rows of the last `propose` and their drafts; after a few steps tau follows from that."""
        if self._last_step[0]:
            self._load.observe(*self._last_step, seconds)

    def detach(self) -> None:
        """Ends the attachment; what was committed is delivered if the service answers in time. The drafter then only fails open."""
        if not self._closed:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    # -- what an operator or a test asks ------------------------------------------------------------------------------------------

    @property
    def stats(self) -> EngineStats:
        """What was counted since the drafter was made: a copy."""
        return self._stats.snapshot()

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self._config.engine

    @property
    def config(self) -> ClientConfig:
        """What the drafter was made with."""
        return self._config

    @property
    def attached(self) -> bool:
        """The service answered the last call of the session."""
        return self._connection.session.alive

    @property
    def trouble(self) -> tuple[str, str]:
        """Fail-open reason and detail of the session's last failure."""
        return self._connection.session.trouble

    @property
    def transport(self) -> str:
        """The transport in use: `mapped`, `handle`, `inline`, or `none` before the first attachment."""
        transport = self._connection.session.transport
        return transport.name if transport else "none"

    @property
    def attachments(self) -> int:
        """Attachments so far."""
        return self._connection.session.attachments

    @property
    def fallback(self) -> str:
        """Why the engine does not map, where it would; empty if it does."""
        return self._connection.session.fallback

    @property
    def fallbacks(self) -> int:
        """Attachments so far that do not map, where the engine would."""
        return self._connection.session.fallbacks

    def wait_attached(self, timeout_s: float) -> bool:
        """Waits until the service has answered; not for the decode loop."""
        return wait_until(lambda: self._connection.session.alive, timeout_s)

    def wait_visible(self, timeout_s: float) -> bool:
        """Waits until all that was appended can be drafted from, by every engine of the namespace; not for the decode loop."""
        deadline = time.monotonic() + timeout_s
        return not self._closed and wait_until(lambda: self._connection.is_visible(max(0.001, deadline - time.monotonic())), timeout_s)

    # -- behind the guard --------------------------------------------------------------------------------------------------------

    def _guard(self, action: Callable[[], T], otherwise: T) -> T:
        """Runs a call of the decode thread: what goes wrong is raised if the drafter is strict, else counted."""
        try:
            return action()
        except FailOpen as error:
            failure: Exception = error
            reason = error.reason
        except (DraftdError, ValueError, TypeError, OverflowError) as error:
            reason, failure = "refused", error
        except Exception as error:  # noqa: BLE001 -- whatever it is, the engine goes on decoding; it is counted and logged
            reason, failure = "internal", error
        self._log.failed(reason, str(failure) or type(failure).__name__)
        if self._config.strict:
            raise failure
        return otherwise

    def _start(
        self, row: int, tokens: ArrayLike, document_id: str, namespace: str | None, private: bool, prompt_length: int | None, group: str
    ) -> None:
        table = self._table
        self._connection.adopt()
        row = table.check_row(row)
        held = table.requests[row]
        if held is not None and held.document_id != document_id:
            self._finish(row, False)
        elsewhere = table.row_of(document_id)
        if elsewhere is not None:
            self._preempt(elsewhere)
        checked = table.check_tokens(tokens)
        parked = table.parked.get(document_id)
        if parked is not None:
            table.check_length(len(checked))
            if not np.array_equal(parked.tokens, checked[: len(parked.tokens)]):
                self._end_parked(document_id)
                raise FailedPrecondition(f"tokens do not begin with the {len(parked.tokens)} that {document_id!r} held", "tokens")
            with table.lock:
                del table.parked[document_id]
            table.put(row, parked.request, checked)
            self._connection.append(parked.request, checked[len(parked.tokens) :])
            return
        name = self._config.namespace if namespace is None else namespace
        if name not in self._config.namespaces:
            raise InvalidArgument(f"namespace is {name!r}; the attachment's are {', '.join(self._config.namespaces)}", "namespace")
        length = len(checked) if prompt_length is None else prompt_length
        request = Request(document_id, name, private, length, group)
        table.check_request(request, checked)
        table.put(row, request, checked)
        if request.shared:
            self._connection.start(request, table.row_tokens(row))

    def _propose(self, rows: ArrayLike, params: DraftParams | None) -> Drafts:
        transport = self._connection.adopt()
        given = np.asarray(rows)
        if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
            raise InvalidArgument("rows must be a list of integers", "rows")
        n, k = len(given), self._config.k
        shared, local, wrong = self._sort(given.tolist())
        wanted = self._params(transport, params)
        tau = self._load.tau(n) if params is None and wanted.policy == "calibrated" else None
        if tau is not None:
            wanted = as_sent(replace(wanted, tau=tau))
        rows64 = given.astype(np.int64)
        self._pending.settle(rows64[shared + local])
        drafts = Drafts.empty(n, k) if len(shared) < n else None
        if local and drafts and self._connection.session.prepared:
            lengths = self._table.lengths.astype(np.int64)
            drafts.put(np.array(local), propose_local(self._table.tokens, lengths, rows64[local].astype(np.int32), wanted))
        try:
            if shared:
                part = self._connection.propose(rows64[shared], wanted)
                if drafts is None and part.tokens.shape[1] == k:
                    drafts = part
                else:
                    drafts = drafts or Drafts.empty(n, k)
                    drafts.put(np.array(shared), part)
        except FailOpen as error:
            self._failed(error.reason, str(error))
        drafts = drafts or Drafts.empty(n, k)
        if wrong:
            self._failed("refused", f"rows has {wrong[0]}, which is no row with a request, or is there twice")
        self._last_step = (n, int(drafts.counts.sum()))
        good = shared + local
        if len(good) == n:
            self._pending.remember(rows64, drafts)
        elif good:
            self._pending.remember(rows64[good], drafts.take(np.array(good)))
        return drafts

    def _failed(self, reason: str, detail: str) -> None:
        if self._config.strict:
            raise FailOpen(reason, detail)
        self._log.failed(reason, detail)

    def _sort(self, rows: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Places of rows to ask the service for, places of rows to draft for from their own tokens, and wrong rows."""
        shared: list[int] = []
        local: list[int] = []
        wrong: list[int] = []
        seen: set[int] = set()
        requests, lengths, max_rows = self._table.requests, self._table.lengths, self._table.max_rows
        for place, row in enumerate(rows):
            request = requests[row] if 0 <= row < max_rows and row not in seen else None
            if request is None:
                wrong.append(row)
                continue
            seen.add(row)
            if lengths[row]:
                (shared if request.shared else local).append(place)
        return shared, local, wrong

    def _params(self, transport: Transport | None, params: DraftParams | None) -> DraftParams:
        if params is not None:
            if params.k > self._config.k:
                raise InvalidArgument(f"params.k is {params.k}; it must be at most k = {self._config.k}", "params.k")
            return as_sent(params)
        if transport is not None:
            return transport.link.defaults
        return as_sent(self._config.params or DraftParams(k=self._config.k))

    def _append(self, row: int, tokens: ArrayLike) -> None:
        table = self._table
        self._connection.adopt()
        request = table.started(row)
        try:
            checked = table.check_tokens(tokens)
            table.check_length(int(table.lengths[row]) + len(checked))
        except InvalidArgument:
            # Its tokens would no longer be what the engine holds: keep what was right, and draft no more for it.
            self._finish(row, False)
            raise
        table.extend(row, checked)
        self._stats.committed_tokens[0] += len(checked)
        self._connection.append(request, checked)

    def _append_rows(self, rows: NDArray[np.int64], tokens: NDArray[np.int32], counts: NDArray[np.int64]) -> None:
        table = self._table
        counts = np.asarray(counts, np.int64)
        if not len(rows) == len(tokens) == len(counts):
            raise InvalidArgument(f"rows, tokens and counts have {len(rows)}, {len(tokens)} and {len(counts)} rows", "rows")
        if len(rows) <= _FEW_ROWS or not table.fits(rows, tokens, counts):
            # One by one, the wrong ones are found and the right ones are not lost.
            for row, given, count in zip(rows.tolist(), tokens, counts.tolist(), strict=True):
                self.append(row, given[:count])
            return
        self._connection.adopt()
        table.extend_rows(rows, tokens, counts)
        self._stats.committed_tokens[0] += int(counts.sum())
        self._connection.append_rows([request for row in rows.tolist() if (request := table.requests[row])], tokens, counts)

    def _end(self, row: int, discard: bool, length: int | None) -> None:
        request = self._table.started(row)
        held = self._table.row_tokens(row)
        if discard or length is None or length >= len(held):
            self._finish(row, discard)
            return
        # Others may have drafted from what is past the end while it was in flight; what is kept is clean.
        kept = held[:length].copy()
        self._pending.end(row, length)
        self._finish(row, True)
        if length > request.prompt_length:
            self._start(row, kept, request.document_id, request.namespace, request.private, request.prompt_length, request.group)
            self._finish(row, False)

    def _finish(self, row: int, discard: bool) -> None:
        self._connection.adopt()
        request = self._table.started(row)
        self._pending.end(row)
        self._connection.end(request, self._table.row_tokens(row), discard)
        self._table.clear(row)
        self._connection.report()

    def _preempt(self, row: int) -> None:
        self._connection.adopt()
        request = self._table.started(row)
        self._pending.end(row)
        while len(self._table.parked) >= self._table.max_rows:
            self._end_parked(next(iter(self._table.parked)))
        parked = Parked(request, self._table.row_tokens(row).copy())
        with self._table.lock:
            self._table.parked[request.document_id] = parked
        self._table.clear(row)

    def _end_parked(self, document_id: str) -> None:
        with self._table.lock:
            parked = self._table.parked.pop(document_id)
        self._connection.end(parked.request, parked.tokens, False)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Polls until the condition holds; False after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
