"""From a message into the corpus: once, whoever published it and however often it is delivered.

It knows nothing of connections. The service's event loop is its only caller.
"""

import time
from collections.abc import Mapping

import structlog

from draftd.drafter.corpus import Corpus
from draftd.drafter.errors import DraftdError, FailedPrecondition, ResourceExhausted
from draftd.drafter.layout import MAX_DOCUMENT_ID_BYTES
from draftd.drafter.records import Comparison
from draftd.server.replicate.counts import AT_CORPUS, ReplicationCounts
from draftd.server.replicate.message import Message, Origin, Refused, origin_of, unpacked
from draftd.server.replicate.outbox import Outbox
from draftd.server.replicate.settings import ReplicationSettings
from draftd.server.store.codec import Codec
from draftd.server.store.sleep import CannotWake, Sleepers

log = structlog.get_logger()

DONE = 0.0
_IN_FLIGHT_AGAIN_S = 2.0
_IN_FLIGHT_DELIVERIES = 5
_ASLEEP_AGAIN_S = 5.0
_SAY_EVERY_S = 60.0


class Receiver:
    """Takes messages one after the other.

    Args:
        origin: Who this service is; what it published itself in this run is in its corpus already.
    """

    def __init__(
        self,
        settings: ReplicationSettings,
        origin: Origin,
        corpus: Corpus,
        outbox: Outbox,
        sleepers: Sleepers | None,
        counts: ReplicationCounts,
    ) -> None:
        self._settings = settings
        self._origin = origin
        self._corpus = corpus
        self._outbox = outbox
        self._sleepers = sleepers
        self._counts = counts
        self._codec = Codec()
        self._said: dict[str, tuple[float, int]] = {}

    async def take(self, subject: str, headers: Mapping[str, str] | None, body: bytes, deliveries: int) -> float:
        """Takes a message, and answers after how many seconds it wants it again; DONE if it does not.

        Args:
            deliveries: How often it was delivered, this time included.
        """
        try:
            if origin_of(headers) == self._origin:
                self._counts.own_messages += 1
                return DONE
            message = unpacked(self._settings.stream, subject, headers, body, self._settings.max_tokens, self._codec)
            if not self._settings.wants(message.namespace):
                return DONE
            self._counts.consumed_bytes += len(body)
            if self._sleepers:
                await self._sleepers.wake((message.namespace,))
            return self._put(message, deliveries)
        except CannotWake:
            return _ASLEEP_AGAIN_S
        except Refused as refused:
            self._refuse(refused, subject)
            return DONE

    def _put(self, message: Message, deliveries: int) -> float:
        try:
            self._corpus.ensure_namespace(message.namespace, message.vocab_size, message.fingerprint)
        except FailedPrecondition as error:
            raise Refused("tokenizer" if error.field == "tokenizer_fingerprint" else "vocabulary", str(error)) from None
        except (ResourceExhausted, OSError) as error:
            raise Refused("room", str(error)) from None
        if message.tokens is None:
            with self._outbox.receiving():
                self._corpus.raise_generation(message.namespace, message.generation, message.evict_before)
            return DONE
        held = self._corpus.compare(message.namespace, message.document_id, message.tokens)
        if held is Comparison.SAME:
            self._counts.duplicates[AT_CORPUS] += 1
            return DONE
        if held is Comparison.IN_FLIGHT and deliveries < _IN_FLIGHT_DELIVERIES:
            # Somebody sends the same request to several nodes: most likely the document will be the same.
            return _IN_FLIGHT_AGAIN_S
        self._add(message, renamed=held is not Comparison.ABSENT)
        return DONE

    def _add(self, message: Message, renamed: bool) -> None:
        assert message.tokens is not None
        document_id = longer_id(message.document_id, message.content_id()) if renamed else message.document_id
        if renamed and self._corpus.compare(message.namespace, document_id, message.tokens) is not Comparison.ABSENT:
            self._counts.duplicates[AT_CORPUS] += 1
            return
        with self._outbox.receiving():
            try:
                kept = self._corpus.add(message.namespace, document_id, message.tokens, message.generation)
            except DraftdError as error:
                raise Refused("malformed", str(error)) from None
        if not kept:
            raise Refused("generation", f"generation {message.generation} was given up")
        self._counts.consumed_documents += 1
        self._counts.consumed_tokens += kept
        self._counts.renamed += renamed

    def _refuse(self, refused: Refused, subject: str) -> None:
        """Counts, and logs the first of a reason and then one a minute: a peer that is wrong is wrong often."""
        self._counts.refused[refused.reason] += 1
        now = time.monotonic()
        said, count = self._said.get(refused.reason, (now - _SAY_EVERY_S, 0))
        if now - said < _SAY_EVERY_S:
            self._said[refused.reason] = (said, count + 1)
            return
        self._said[refused.reason] = (now, 0)
        log.warning("replicated_message_refused", reason=refused.reason, text=str(refused), subject=subject[:256], more_like_it=count)


def longer_id(document_id: str, content_id: str) -> str:
    """The id under which a document is taken whose own id another document has: the same on every node that has to do so."""
    room = MAX_DOCUMENT_ID_BYTES - len(content_id) - 1
    return f"{document_id.encode()[:room].decode(errors='ignore')}~{content_id}"
