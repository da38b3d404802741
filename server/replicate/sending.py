"""From the outbox into the stream: a batch at a time, each acknowledged by JetStream before the next is taken."""

import asyncio
from collections.abc import Iterator

import numpy as np
from nats.errors import MaxPayloadError
from nats.js import JetStreamContext
from nats.js.api import PubAck
from nats.js.errors import APIError
from numpy.typing import NDArray

from draftd.drafter.corpus import Corpus
from draftd.drafter.keeper import KeptNamespace
from draftd.server.replicate.counts import AT_STREAM, ReplicationCounts
from draftd.server.replicate.message import Message, Origin, packed
from draftd.server.replicate.outbox import Batch, Outbox
from draftd.server.replicate.settings import ReplicationSettings
from draftd.server.store.codec import Codec

_BATCH_DOCUMENTS = 64
_GROUP = 8
"""Documents that are packed at a time; calls that wait for the event loop come between."""
_POLL_S = 0.02
_ACK_S = 10.0
_MESSAGE_TOO_LARGE = 10054
"""JetStream's error for a message larger than the stream takes."""


class Sender:
    """Publishes what the outbox has."""

    def __init__(self, settings: ReplicationSettings, origin: Origin, corpus: Corpus, outbox: Outbox, counts: ReplicationCounts) -> None:
        self._settings = settings
        self._origin = origin
        self._corpus = corpus
        self._outbox = outbox
        self._counts = counts
        self._codec = Codec()

    async def run(self, js: JetStreamContext) -> None:
        """Publishes for as long as the connection does; what it could not publish stays in the outbox.

        Raises:
            nats.errors.Error, TimeoutError: JetStream refuses, or does not answer.
        """
        while True:
            batch = self._outbox.take(_BATCH_DOCUMENTS)
            if not batch:
                await asyncio.sleep(_POLL_S)
                continue
            try:
                await self._publish(js, batch)
            except BaseException:
                self._outbox.put_back()
                raise
            self._outbox.sent()

    async def _publish(self, js: JetStreamContext, batch: Batch) -> None:
        acks: list[asyncio.Future[PubAck]] = []
        documents = bytes_ = 0
        for i, message in enumerate(self._messages(batch)):
            subject, headers, body = packed(self._settings.stream, message, self._codec)
            try:
                acks.append(await js.publish_async(subject, body, headers=headers))
            except MaxPayloadError:
                self._counts.too_large += 1
            else:
                documents += message.tokens is not None
                bytes_ += len(body)
            if i % _GROUP == _GROUP - 1:
                await asyncio.sleep(0)
        async with asyncio.timeout(_ACK_S):
            answers = await asyncio.gather(*acks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, APIError) and answer.err_code == _MESSAGE_TOO_LARGE:
                self._counts.too_large += 1
                documents -= 1
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.duplicate:
                self._counts.duplicates[AT_STREAM] += 1
                documents -= 1
        self._counts.published_documents += documents
        self._counts.published_bytes += bytes_

    def _messages(self, batch: Batch) -> Iterator[Message]:
        for told in batch.generations.values():
            yield Message(self._origin, told.name, told.vocab_size, told.fingerprint, told.generation, evict_before=told.evict_before)
        waiting = list(batch.documents.values())
        for first in range(0, len(waiting), _GROUP):
            group = waiting[first : first + _GROUP]
            for key in {item.namespace for item in group}:
                documents = [item.document for item in group if item.namespace == key]
                kept = self._corpus.kept(key)
                if kept is None:
                    self._outbox.never_sent += len(documents)
                elif self._settings.wants(kept.name):
                    for document, tokens in zip(documents, self._corpus.read_committed(kept.name, key, documents), strict=True):
                        if tokens is None:
                            self._outbox.never_sent += 1
                        else:
                            yield self._message(kept, document.id, document.generation, tokens)

    def _message(self, kept: KeptNamespace, document_id: str, generation: int, tokens: NDArray[np.int32]) -> Message:
        return Message(self._origin, kept.name, kept.vocab_size, kept.fingerprint, generation, document_id, tokens)
