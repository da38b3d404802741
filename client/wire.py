"""Between the core's types and the API's messages, for the engine's side; parameters for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftd.drafter.drafts import Drafts, chains
from draftd.drafter.layout import ArraySpec, BlockSpec
from draftd.drafter.params import DraftParams
from draftd.proto.draftd.v1 import draftd_pb2 as pb

_DTYPES = {
    pb.DATA_TYPE_INT32: "int32",
    pb.DATA_TYPE_INT64: "int64",
    pb.DATA_TYPE_FLOAT32: "float32",
    pb.DATA_TYPE_UINT8: "uint8",
}


def block_spec(message: pb.BlockMap) -> BlockSpec:
    """The block that a message describes; ValueError if it has an element type that is not known."""
    arrays = []
    for array in message.arrays:
        if array.data_type not in _DTYPES:
            raise ValueError(f"array {array.name} has data type {array.data_type}, which this client does not know")
        arrays.append(ArraySpec(array.name, array.offset, _DTYPES[array.data_type], tuple(array.shape)))
    return BlockSpec(message.handle, message.byte_size, message.layout_version, tuple(arrays))


def as_sent(params: DraftParams) -> DraftParams:
    """Parameters with the precision that they have in a message, so that every transport drafts alike."""
    return replace(
        params,
        spec_factor=float(np.float32(params.spec_factor)),
        spec_offset=float(np.float32(params.spec_offset)),
        min_token_prob=float(np.float32(params.min_token_prob)),
        tau=float(np.float32(params.tau)),
    )


def parameters_message(params: DraftParams) -> pb.DraftParameters:
    """Parameters as a message, every field given."""
    return pb.DraftParameters(
        k=params.k,
        max_depth=params.max_depth,
        spec_factor=params.spec_factor,
        spec_offset=params.spec_offset,
        min_token_prob=params.min_token_prob,
        use_local=params.use_local,
        use_corpus=params.use_corpus,
        policy=pb.POLICY_TREE if params.policy == "tree" else pb.POLICY_CALIBRATED,
        tau=params.tau,
        branches=params.branches,
    )


def parameters(message: pb.DraftParameters, k: int) -> DraftParams:
    """The service's defaults as parameters, with drafts of at most `k` tokens."""
    given = {field.name: getattr(message, field.name) for field, _ in message.ListFields()}
    given.setdefault("use_local", True)
    given.setdefault("use_corpus", True)
    given["k"] = min(k, given.get("k", k))
    # A service that does not say drafts by the rule that there was before there were two.
    given["policy"] = "calibrated" if given.get("policy") == pb.POLICY_CALIBRATED else "tree"
    return DraftParams(**given)


def pack(tokens: NDArray[np.int32]) -> bytes:
    """Tokens as little-endian int32 bytes."""
    return tokens.astype("<i4", copy=False).tobytes()


def unpack_drafts(messages: Sequence[pb.Draft], places: NDArray[np.int64], drafts: Drafts) -> None:
    """Fills rows `places`, int64 [n], of `drafts` [rows, k] from n packed drafts.

    Raises:
        ValueError: There are not n drafts, one has more than k tokens, or its fields do not fit together.
    """
    if len(messages) != len(places):
        raise ValueError(f"{len(messages)} drafts for {len(places)} rows")
    for i, message in zip(places.tolist(), messages, strict=True):
        tokens = np.frombuffer(message.packed_tokens, "<i4")
        count = len(tokens)
        if count > drafts.tokens.shape[1] or len(message.probabilities) != count:
            raise ValueError(f"draft {i} has {count} tokens and {len(message.probabilities)} probabilities")
        drafts.tokens[i, :count] = tokens
        drafts.probabilities[i, :count] = message.probabilities
        drafts.counts[i] = count
        drafts.source[i] = message.source
        drafts.match_length[i] = message.match_length
        drafts.occurrences[i] = message.occurrences
        if message.parents:
            parents = np.array(message.parents, np.int32)
            if len(parents) != count or not ((parents >= -1) & (parents < np.arange(count))).all():
                raise ValueError(f"draft {i} is no tree")
            if drafts.parents is None:
                drafts.parents = chains(*drafts.tokens.shape)
            drafts.parents[i, :count] = parents


def row_versions(namespaces: Sequence[str], versions: Sequence[int]) -> NDArray[np.int64]:
    """Index version of each row, int64 [n], from one version for each distinct namespace in order of first use; 0 where it is not told."""
    distinct = list(dict.fromkeys(namespaces))
    known = dict(zip(distinct, versions, strict=True)) if len(distinct) == len(versions) else {}
    return np.array([known.get(name, 0) for name in namespaces], np.int64)
