"""Between protobuf messages and the core's arrays, parameters and block specs.

Packed tokens are the fast path: one numpy view, no loop over tokens. Nothing here looks at the state of the service.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import Drafts
from draftd.drafter.errors import InvalidArgument
from draftd.drafter.explain import Explanation
from draftd.drafter.layout import BlockSpec
from draftd.drafter.params import DraftParams, Policy
from draftd.drafter.records import NamespaceInfo
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.server.replicate.counts import ReplicationState
from draftd.server.store.store import Store

_INT32 = np.dtype("<i4")
_DATA_TYPES = {
    "int32": pb.DATA_TYPE_INT32,
    "int64": pb.DATA_TYPE_INT64,
    "float32": pb.DATA_TYPE_FLOAT32,
    "uint8": pb.DATA_TYPE_UINT8,
}
_POLICIES: dict[int, Policy] = {pb.POLICY_CALIBRATED: "calibrated", pb.POLICY_TREE: "tree"}


class TokenCarrier(Protocol):
    """A message with tokens as a list or packed: Row, IngestDocument, HarvestRow, ExplainRequest."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def packed_tokens(self) -> bytes: ...


def tokens_of(message: TokenCarrier, field: str) -> NDArray[np.int32]:
    """The tokens of a message, int32 [n]; a read-only view of the message when they are packed.

    Raises:
        InvalidArgument: Both forms are given, or the packed form is not a whole number of int32.
    """
    packed = message.packed_tokens
    if packed:
        if len(packed) % 4:
            raise InvalidArgument(f"{field}.packed_tokens has {len(packed)} bytes; it must be a multiple of 4", f"{field}.packed_tokens")
        if message.tokens:
            raise InvalidArgument(f"{field}: give tokens or packed_tokens, not both", f"{field}.tokens")
        return np.frombuffer(packed, _INT32)
    return np.array(message.tokens, np.int32)


def lead_of(document: pb.IngestDocument, field: str) -> NDArray[np.int32]:
    """What stood before a document, int32 [n].

    Raises:
        InvalidArgument: It is not a whole number of int32.
    """
    if len(document.packed_lead) % 4:
        raise InvalidArgument(
            f"{field}.packed_lead has {len(document.packed_lead)} bytes; it must be a multiple of 4", f"{field}.packed_lead"
        )
    return np.frombuffer(document.packed_lead, _INT32)


def check_vocabulary(tokens: NDArray[np.int32], vocab_size: int, field: str) -> None:
    """Raises InvalidArgument naming the first token that is negative or not below `vocab_size`."""
    if len(tokens) and int(tokens.view(np.uint32).max()) >= vocab_size:
        at = int(np.argmax(tokens.view(np.uint32) >= vocab_size))
        raise InvalidArgument(
            f"{field}.tokens[{at}] is {int(tokens[at])}; it must be in [0, {vocab_size}), the vocabulary", f"{field}.tokens"
        )


def check_batch_vocabulary(rows: Sequence[NDArray[np.int32]], vocab_size: int) -> None:
    """check_vocabulary for all rows of a request at once."""
    if int(np.concatenate(rows).view(np.uint32).max(initial=0)) >= vocab_size:
        for i, tokens in enumerate(rows):
            check_vocabulary(tokens, vocab_size, f"rows[{i}]")


def params_of(message: pb.DraftParameters, defaults: DraftParams, max_k: int, limit_name: str, depth: int) -> DraftParams:
    """Parameters of a request; what is left out takes `defaults`, with k cut to `max_k`, which is `limit_name` to the caller.

    Raises:
        InvalidArgument: A value is outside its range, k is above `max_k`, or max_depth above the index `depth`.
    """
    given = {descriptor.name: value for descriptor, value in message.ListFields()}
    if not given and defaults.k <= max_k:
        return defaults
    k = given.get("k")
    if k is None:
        given["k"] = min(defaults.k, max_k)
    elif not 1 <= k <= max_k:
        raise InvalidArgument(f"parameters.k is {k}; it must be in [1, {max_k}], {limit_name}", "parameters.k")
    if given.get("max_depth", 2) > depth:
        raise InvalidArgument(
            f"parameters.max_depth is {given['max_depth']}; it must be in [2, {depth}], the index depth", "parameters.max_depth"
        )
    return DraftParams(
        k=given["k"],
        max_depth=given.get("max_depth", defaults.max_depth),
        spec_factor=given.get("spec_factor", defaults.spec_factor),
        spec_offset=given.get("spec_offset", defaults.spec_offset),
        min_token_prob=given.get("min_token_prob", defaults.min_token_prob),
        use_local=given.get("use_local", defaults.use_local),
        use_corpus=given.get("use_corpus", defaults.use_corpus),
        policy=_POLICIES.get(given.get("policy", pb.POLICY_UNSPECIFIED), defaults.policy),
        tau=given.get("tau", defaults.tau),
        branches=given.get("branches", defaults.branches),
    )


def add_drafts(response: pb.ProposeResponse, drafts: Drafts, packed: bool) -> None:
    """Adds one Draft a row."""
    add = response.drafts.add
    width = 4 * drafts.tokens.shape[1]
    data = drafts.tokens.astype("<i4", copy=False).tobytes()
    tokens = drafts.tokens.tolist()
    probabilities = drafts.probabilities.tolist()
    sources = drafts.source.tolist()
    lengths = drafts.match_length.tolist()
    occurrences = drafts.occurrences.tolist()
    parents = [] if drafts.parents is None else drafts.parents.tolist()
    for i, count in enumerate(drafts.counts.tolist()):
        if not count:
            add()
        elif packed:
            add(
                packed_tokens=data[i * width : i * width + 4 * count],
                probabilities=probabilities[i][:count],
                source=sources[i],
                match_length=lengths[i],
                occurrences=occurrences[i],
                parents=parents[i][:count] if parents else None,
            )
        else:
            add(
                tokens=tokens[i][:count],
                probabilities=probabilities[i][:count],
                source=sources[i],
                match_length=lengths[i],
                occurrences=occurrences[i],
                parents=parents[i][:count] if parents else None,
            )


def block_message(spec: BlockSpec) -> pb.BlockMap:
    """A block of shared memory as a message."""
    return pb.BlockMap(
        handle=spec.handle,
        byte_size=spec.byte_size,
        layout_version=spec.layout_version,
        arrays=[
            pb.ArrayMap(name=array.name, offset=array.offset, data_type=_DATA_TYPES[array.dtype], shape=array.shape)
            for array in spec.arrays
        ],
    )


def namespace_message(info: NamespaceInfo, attachments: int, asleep: bool = False) -> pb.Namespace:
    """A namespace as a message."""
    return pb.Namespace(
        name=info.name,
        vocab_size=info.vocab_size,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        tokens=info.tokens,
        quota_tokens=info.quota_tokens,
        documents=info.documents,
        open_documents=info.open_documents,
        evicted_tokens=info.evicted_tokens,
        generation=info.generation,
        version=info.version,
        segments=pb.Segments(main=info.main, recent=info.recent, live=info.live),
        bytes=info.bytes,
        attachments=attachments,
        asleep=asleep,
        calibration=_calibration(info),
    )


def _calibration(info: NamespaceInfo) -> pb.Calibration | None:
    if not any(d.drafted for d in info.deciles):
        return None
    deciles = [pb.Decile(drafted=d.drafted, predicted=d.predicted, accepted=d.accepted) for d in info.deciles]
    return pb.Calibration(deciles=deciles, brier_score=info.brier_score)


def store_message(store: Store) -> pb.Store:
    """State of the store as a message."""
    return pb.Store(
        bytes=store.database.size_bytes(),
        pending_documents=store.backlog.waiting,
        lag_ms=round(1000 * store.lag_s()),
        failure=store.failure,
        restored_documents=store.counts.restored_documents,
        restored_tokens=store.counts.restored_tokens,
        damaged_documents=store.counts.damaged_documents,
    )


def replication_message(state: ReplicationState) -> pb.Replication:
    """State of replication as a message."""
    counts = state.counts
    return pb.Replication(
        stream=state.stream,
        node=state.node,
        connected=state.connected,
        failure=state.failure,
        warning=state.warning,
        lag_messages=state.lag_messages,
        outbox_documents=state.outbox_documents,
        outbox_age_ms=round(1000 * state.outbox_age_s),
        published_documents=counts.published_documents,
        consumed_documents=counts.consumed_documents,
        duplicate_documents=counts.duplicates.total(),
        refused_messages=counts.refused.total(),
    )


def explain_message(explanation: Explanation, info: NamespaceInfo) -> pb.ExplainResponse:
    """An explanation as a message."""
    drafted = pb.ProposeResponse()
    add_drafts(drafted, explanation.drafts, packed=False)
    return pb.ExplainResponse(
        matches=[
            pb.SuffixMatch(
                source=cast(pb.Source, match.source),
                length=match.length,
                occurrences=match.occurrences,
                next_tokens=[pb.NextToken(token=token, count=count) for token, count in match.next_tokens],
                distinct_next_tokens=match.distinct_next_tokens,
                documents=[
                    pb.DocumentMatch(document_id=document_id, position=position, generation=generation)
                    for document_id, position, generation in match.documents
                ],
                draft=match.draft,
                score=match.score,
            )
            for match in explanation.matches
        ],
        draft=drafted.drafts[0],
        version=explanation.version,
        candidates=[
            pb.Candidate(token=token, probability=p) for of in explanation.drafts.lessons for token, p in of.lesson.candidates(0, 0)
        ],
        calibration=_calibration(info),
    )
