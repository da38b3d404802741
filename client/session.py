"""Keeps an engine attached: one background thread that attaches, extends the lease, and attaches anew after whatever ended it.

It waits at most a second between tries. It opens transports but never uses one: the decode thread takes over each new one by itself.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

import grpc
import numpy as np

from draftd.client import wire
from draftd.client.abilities import explain
from draftd.client.channel import open_channel, socket_path
from draftd.client.config import ClientConfig, default_shm_root
from draftd.client.credentials import check_socket
from draftd.client.failopen import reason_of
from draftd.client.transports import Link, Transport
from draftd.drafter.errors import DraftdError
from draftd.drafter.layout import LAYOUT_VERSION
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import propose_local
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc

_log = logging.getLogger("draftd.client")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_ATTACH_TIMEOUT_S = 10.0
_HEARTBEAT_S = 1.0
_DETACH_TIMEOUT_S = 2.0
_MAX_REASON_BYTES = 512
_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),
)
_WANTED = {
    "auto": pb.TRANSPORT_UNSPECIFIED,
    "mapped": pb.TRANSPORT_MAPPED,
    "handle": pb.TRANSPORT_HANDLE,
    "inline": pb.TRANSPORT_INLINE,
}


class OpenTransport(Protocol):
    """Makes the transport of a new attachment, or raises OSError or ValueError; called from the session's thread."""

    def __call__(self, link: Link, response: pb.AttachResponse) -> Transport: ...


class Session:
    """An engine's attachment over time.

    Attributes:
        transport: That of the newest attachment; None before the first.
        alive: The service answered the last call.
        trouble: Fail-open reason and detail of the last failure; ("unattached", ...) before the first try has ended.
        prepared: Rows can be drafted for from their own tokens.
        attachments: Attachments so far.
        fallback: Why the newest attachment does not map, where the engine would; empty if it does.
        fallbacks: Attachments so far that had such a reason.
    """

    def __init__(self, config: ClientConfig, tensors: pb.EngineTensors | None, open_transport: OpenTransport) -> None:
        self.transport: Transport | None = None
        self.alive = False
        self.trouble = ("unattached", "the service has not answered yet")
        self.prepared = False
        self.attachments = 0
        self.fallback = ""
        self.fallbacks = 0
        self._config = config
        self._tensors = tensors
        self._open_transport = open_transport
        self._unmapped_reason = ""
        self._attachment_id = ""
        # One is made anew when a file of the credentials changes; the decode thread may still be using those before.
        self._channels: list[grpc.Channel] = []
        self._stamp: object = None
        self._stub: draftd_pb2_grpc.DrafterServiceStub
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="draftd-session", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Has the session look at once whether the service is still there."""
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Detaches if the service answers, and ends the thread. What an unclosed session leaves ends with its lease."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_ATTACH_TIMEOUT_S + _DETACH_TIMEOUT_S)
        self._detach()
        for channel in self._channels:
            channel.close()
        self.alive = False

    def _run(self) -> None:
        if not self._config.device_uuid:
            # Compiles the kernel, so that no step waits for it.
            propose_local(np.zeros((1, 2), np.int32), np.full(1, 2, np.int64), np.zeros(1, np.int32), DraftParams())
            self.prepared = True
        pause = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                self._connect()
            except (OSError, DraftdError) as error:
                self.trouble = ("refused", str(error))
                self._stop.wait(_LONGEST_PAUSE_S)
                continue
            try:
                lease_s = self._attach()
            except grpc.RpcError as error:
                self.trouble = reason_of(error)
            except (OSError, ValueError, DraftdError) as error:
                self.trouble = ("refused", f"{self._config.transport} does not work here: {error}")
                if self._config.transport == "auto":
                    self._unmapped_reason = self._why_not_mapped(error)
            else:
                pause = _FIRST_PAUSE_S
                self._keep(lease_s)
                # What stood in the way may be gone, as when the service has been put into another container.
                self._unmapped_reason = ""
                continue
            self._stop.wait(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    def _connect(self) -> None:
        """Makes sure that there is a channel with the credentials as their files are now.

        Raises:
            PermissionError: The socket is not to be trusted.
            InvalidArgument: A file cannot be used.
        """
        config = self._config
        stamp = config.credentials.stamp()
        path = socket_path(config.endpoint)
        if self._channels and stamp == self._stamp:
            if path is not None:
                check_socket(path, config.credentials.socket_owner)
            return
        channel = open_channel(config.endpoint, config.credentials, _CHANNEL_OPTIONS)
        self._channels.append(channel)
        self._stub = draftd_pb2_grpc.DrafterServiceStub(channel)
        self._stamp = stamp

    def _attach(self) -> float:
        """Attaches and opens the transport; the lease in seconds."""
        if self._attachment_id:
            self._detach()
        config = self._config
        wanted = pb.TRANSPORT_INLINE if self._unmapped_reason else _WANTED[config.transport]
        request = pb.AttachRequest(
            engine=config.engine,
            namespace=config.namespace,
            extra_namespaces=config.namespaces[1:],
            tokenizer_fingerprint=config.tokenizer_fingerprint,
            vocab_size=config.vocab_size,
            k=config.k,
            max_rows=config.max_rows,
            max_length=config.max_length,
            transport=wanted,
            layout_version=LAYOUT_VERSION,
            device_uuid=config.device_uuid,
            unmapped_reason=self._unmapped_reason,
        )
        if self._tensors is not None:
            request.tensors.CopyFrom(self._tensors)
        response = self._stub.Attach(request, timeout=_ATTACH_TIMEOUT_S)
        self._attachment_id = response.attachment_id
        link = Link(
            response.attachment_id,
            response.instance,
            response.lease_ms / 1000,
            wire.as_sent(config.params or wire.parameters(response.defaults, config.k)),
            self._stub,
        )
        transport = self._open_transport(link, response)
        self._wake.clear()
        self.transport, self.alive = transport, True
        self.attachments += 1
        self._note_fallback(transport.name, response.fallback_reason)
        return link.lease_s

    def _note_fallback(self, transport: str, reason: str) -> None:
        self.fallback = reason
        if not reason:
            _log.info("engine %s is attached, %s", self._config.engine, transport)
            return
        self.fallbacks += 1
        # Engines of other hosts never map; on this host somebody expects it.
        level = logging.INFO if socket_path(self._config.endpoint) is None else logging.WARNING
        _log.log(level, "engine %s is attached, %s, and does not map: %s", self._config.engine, transport, reason)

    def _why_not_mapped(self, error: Exception) -> str:
        """What stands in the way, as far as the service may be told: in as many bytes as it takes."""
        reason = explain(error, self._config.endpoint, self._config.credentials.socket_owner, default_shm_root())
        return reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")

    def _keep(self, lease_s: float) -> None:
        """Extends the lease until the attachment has ended, or the service is gone."""
        request = pb.HeartbeatRequest(attachment_id=self._attachment_id)
        transport = self.transport
        assert transport is not None
        while True:
            self._wake.wait(min(_HEARTBEAT_S, lease_s / 3))
            if self._stop.is_set():
                return
            self._wake.clear()
            try:
                response = self._stub.Heartbeat(request, timeout=min(_HEARTBEAT_S, lease_s / 3))
                transport.heartbeat(response)
            except grpc.RpcError as error:
                self.alive = False
                self.trouble = reason_of(error)
                if self.trouble[0] != "timeout":
                    transport.orphaned()
                    return
                self._stop.wait(_FIRST_PAUSE_S)
            except (OSError, ValueError) as error:
                # An index that cannot be mapped any more: attach anew, to be told of those that can.
                self.trouble = ("refused", str(error))
                return
            else:
                self.alive = True

    def _detach(self) -> None:
        """Ends the last attachment, which would keep the engine's name taken; until that is done, or the service knows it no more."""
        if self._attachment_id:
            try:
                self._stub.Detach(pb.DetachRequest(attachment_id=self._attachment_id), timeout=_DETACH_TIMEOUT_S)
            except grpc.RpcError as error:
                self.trouble = reason_of(error)
                if self.trouble[0] not in ("unattached", "refused"):
                    return
            self._attachment_id = ""
