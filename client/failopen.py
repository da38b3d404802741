"""Failing open: a decode loop goes on without drafts, and somebody can see that it did and why.

Every call without drafts is counted by reason; the log gets one line when the state changes, and no more than one every ten seconds.
"""

from __future__ import annotations

import logging
import time

import grpc

from draftd.drafter.stats import EngineStats

_log = logging.getLogger("draftd.client")
_QUIET_S = 10.0

_REASON_OF_CODE = {
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.CANCELLED: "unavailable",
}
_RATE_LIMIT = "rate limit: "


class FailOpen(Exception):
    """A call that has to be answered without drafts.

    Attributes:
        reason: One of `FAIL_OPEN_REASONS`.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def reason_of(error: grpc.RpcError) -> tuple[str, str]:
    """The fail-open reason of a failed RPC, and what the service said."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else None) or ""
    reason = _REASON_OF_CODE.get(code, "refused")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and details.startswith(_RATE_LIMIT):
        # Nothing is wrong with what was sent: it has to come later.
        reason = "timeout"
    if code == grpc.StatusCode.NOT_FOUND and "attachment_id" in details:
        reason = "unattached"
    return reason, f"{code.name}: {details}" if details else code.name


class FailOpenLog:
    """Counts calls without drafts and logs changes of state. Used from the decode thread only."""

    def __init__(self, engine: str, stats: EngineStats) -> None:
        self._engine = engine
        self._stats = stats
        self._reason = ""
        self._logged_reason = ""
        self._logged_at = -_QUIET_S
        self._unlogged = 0

    def failed(self, reason: str, detail: str) -> None:
        """Counts one call that was answered without drafts, or with fewer than it should."""
        self._stats.count_fail_open(reason)
        self._unlogged += 1
        self._reason = reason
        if reason != self._logged_reason and self._may_log():
            _log.warning("engine %s drafts without the service (%s): %s; %d calls", self._engine, reason, detail, self._unlogged)
            self._logged(reason)

    def worked(self) -> None:
        """Notes a call that was answered with drafts."""
        if not self._logged_reason and not self._reason:
            return
        self._reason = ""
        if self._logged_reason and self._may_log():
            _log.warning("engine %s drafts with the service again; %d calls went without", self._engine, self._unlogged)
            self._logged("")

    def _may_log(self) -> bool:
        return time.monotonic() - self._logged_at >= _QUIET_S

    def _logged(self, reason: str) -> None:
        self._logged_reason = reason
        self._logged_at = time.monotonic()
        self._unlogged = 0
