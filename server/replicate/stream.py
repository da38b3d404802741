"""The stream and this node's consumer in it: made if missing, used as they are otherwise.

A node that begins anew reads only what can fit its quota, which is what is newest in the stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, RetentionPolicy, StreamConfig, StreamInfo, StreamState
from nats.js.errors import BadRequestError, NotFoundError

from draftd.drafter.errors import DraftdError
from draftd.server.replicate.message import Refused, namespace_of, subject_of
from draftd.server.replicate.settings import ReplicationSettings

log = structlog.get_logger()

DUPLICATE_WINDOW_S = 120.0
ACK_WAIT_S = 30.0
MAX_UNACKED = 4096
_CONSUMER_LIFE_S = 30 * 86_400.0
"""A consumer that nobody reads for this long, or for as long as the stream keeps messages, is removed by NATS."""
_MESSAGE_OVERHEAD_BYTES = 450
_BYTES_PER_TOKEN = 3.0
_MARGIN = 1.5
"""Together they count too many messages rather than too few; see docs/scaling.md for what is measured."""


class StreamUnusable(DraftdError):
    """The stream that is there cannot hold what this service publishes."""


async def open_stream(js: JetStreamContext, settings: ReplicationSettings) -> StreamInfo:
    """The stream, which is made if it is missing. One with other limits than this service would give it is used as it is, with a warning.

    Raises:
        StreamUnusable: It does not take the subjects of this service.
    """
    wanted = StreamConfig(
        name=settings.stream,
        description="documents that draftd services have committed",
        subjects=[f"{settings.stream}.*"],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_bytes=settings.max_bytes,
        max_age=settings.max_age_s or None,
        duplicate_window=min(DUPLICATE_WINDOW_S, settings.max_age_s or DUPLICATE_WINDOW_S),
        allow_direct=True,
    )
    try:
        info = await js.stream_info(settings.stream)
    except NotFoundError:
        try:
            info = await js.add_stream(wanted)
            log.info("stream_made", stream=settings.stream, max_bytes=settings.max_bytes, max_age_s=settings.max_age_s)
            return info
        except BadRequestError:
            # Another node has just made it, with limits of its own.
            info = await js.stream_info(settings.stream)
    found = info.config
    if not {f"{settings.stream}.*", f"{settings.stream}.>"} & set(found.subjects or ()):
        raise StreamUnusable(f"stream {settings.stream} exists and does not take the subject {settings.stream}.*", "replicate_stream")
    differing = {
        name: value
        for name, value, ours in (
            ("max_bytes", found.max_bytes, settings.max_bytes),
            ("max_age_s", found.max_age or 0, settings.max_age_s),
            ("discard", found.discard, "old"),
            ("retention", found.retention, "limits"),
        )
        if value != ours
    }
    if differing:
        log.warning("stream_has_other_limits", stream=settings.stream, **differing)
    return info


@dataclass(frozen=True, slots=True)
class Consumer:
    """This node's consumer: its name, and whether it went on from where it was."""

    name: str
    resumed: bool


async def open_consumer(
    js: JetStreamContext, settings: ReplicationSettings, run: str, resume: bool, quota_of: Callable[[str], int]
) -> Consumer:
    """This node's durable consumer. Without `resume` it begins anew: nothing of what it had read is in the corpus.

    Args:
        run: This run of the service, which the consumer's description then names.
        quota_of: Tokens that a namespace holds.
    """
    name = f"draftd-{settings.node}"
    config = ConsumerConfig(
        durable_name=name,
        description=run,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=MAX_UNACKED,
        filter_subjects=[subject_of(settings.stream, name) for name in settings.exact_namespaces()] or None,
        inactive_threshold=max(settings.max_age_s, 3600.0) if settings.max_age_s else _CONSUMER_LIFE_S,
    )
    try:
        there = await js.consumer_info(settings.stream, name)
    except NotFoundError:
        there = None
    if there is not None and resume:
        # What a consumer begins with cannot be changed, and is of no meaning any longer.
        began = {"deliver_policy": there.config.deliver_policy, "opt_start_seq": there.config.opt_start_seq}
        await js.add_consumer(settings.stream, config.evolve(**began))
        return Consumer(name, resumed=True)
    if there is not None:
        await js.delete_consumer(settings.stream, name)
    state = (await js.stream_info(settings.stream, subjects_filter=">")).state
    first = start_sequence(state, lambda subject: _quota(settings, subject, quota_of))
    await js.add_consumer(settings.stream, config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=max(first, 1)))
    log.info("replication_begins_anew", first=first, of=state.last_seq, messages=state.messages)
    return Consumer(name, resumed=False)


def _quota(settings: ReplicationSettings, subject: str, quota_of: Callable[[str], int]) -> int:
    try:
        namespace = namespace_of(settings.stream, subject)
    except Refused:
        return 0
    return quota_of(namespace) if settings.wants(namespace) else 0


def start_sequence(state: StreamState, quota_of: Callable[[str], int]) -> int:
    """The first message that a new node has to read for every namespace's quota to be filled, if their messages are mixed evenly.

    Args:
        state: The stream's, with the number of messages of each subject.
        quota_of: Tokens that the namespace of a subject holds; 0 if it is not wanted.
    """
    subjects: Mapping[str, int] = state.subjects or {}
    if not state.messages or not subjects:
        return state.first_seq
    tokens = max(1.0, (state.bytes / state.messages - _MESSAGE_OVERHEAD_BYTES) / _BYTES_PER_TOKEN)
    share = max(min(1.0, _MARGIN * quota_of(subject) / tokens / count) for subject, count in subjects.items())
    return state.last_seq + 1 - round(share * (state.last_seq + 1 - state.first_seq))
