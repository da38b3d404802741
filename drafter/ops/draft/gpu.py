"""The draft rule `tree` on the GPU, the second of two launches: chains of all suffix lengths and sources, and the best of them.

PROGRAMS programs of one warp share a row: the first two follow all suffix lengths with few occurrences, in the corpus and in the row, the
others the groups of lengths with the same occurrences, where there are more. The last to finish writes the row's draft.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import LOCUS_LENGTHS, RECORD_LENGTH, RECORD_TOKENS, ROW_RECORD_WORDS, TORN
from draftd.drafter.device_layout import SEGMENTS as SEGMENT_COUNT
from draftd.drafter.ops.draft.gpu_few import few_chains, few_in_corpus
from draftd.drafter.ops.draft.gpu_group import group_chain
from draftd.drafter.ops.draft.gpu_local import LENGTH_BITS, LENGTH_MASK, gather_hits
from draftd.drafter.ops.draft.gpu_pins import is_torn, unpin
from draftd.drafter.ops.warp import LANES, begin_after_previous, bit_count

_LOCUS_LENGTHS = tl.constexpr(LOCUS_LENGTHS)
_SEGMENTS = tl.constexpr(SEGMENT_COUNT)
_RECORD_WORDS = tl.constexpr(ROW_RECORD_WORDS)
_RECORD_LENGTH = tl.constexpr(RECORD_LENGTH)
_RECORD_TOKENS = tl.constexpr(RECORD_TOKENS)
_TORN = tl.constexpr(TORN)
_ENDLESS = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_LOCAL_BIT = tl.constexpr(16)


@triton.jit
def _key(score: tensor, is_local: tensor, length: tensor) -> tensor:
    """Orders chains: by score, given as its bits; own tokens first; longer match first."""
    return (score.to(tl.int64) << 32) | ((is_local << _LOCAL_BIT) | length)


@triton.jit
def _best(drafted: tensor, score: tensor, is_local: tensor, length: tensor) -> tensor:
    """The key of the best of some chains; 0 if nothing was drafted."""
    bits = tl.where(drafted > 0, score.to(tl.int32, bitcast=True), 0)
    most = tl.max(bits, axis=0)
    longest = tl.max(tl.where((bits == most) & (drafted > 0), length, 0), axis=0)
    return tl.where(most > 0, _key(most, is_local, longest), 0)


@triton.jit
def _at_least(condition: tensor, LENGTHS: tl.constexpr) -> tensor:
    """For how many lengths from each one on the condition holds; int32 [LENGTHS]."""
    if LENGTHS <= LANES:
        length = tl.arange(0, LENGTHS)
        # A set of lengths, whose lowest bits are shifted out.
        held = tl.sum(tl.where(condition, 1 << length, 0), axis=0).to(tl.uint32, bitcast=True)
        return bit_count((held >> length.to(tl.uint32)).to(tl.int32, bitcast=True))
    else:  # noqa: RET505 (decided when compiled)
        return tl.cumsum(condition.to(tl.int32), axis=0, reverse=True)


@triton.jit
def _at(values: tensor, where: tensor) -> tensor:
    """The value, not below zero, where the condition holds for one element."""
    return tl.max(tl.where(where, values, 0), axis=0)


@triton.jit(do_not_specialize=["hit_room", "max_depth", "k"])
def draft_chains(
    arena: tensor, headers: tensor, pins: tensor, tokens: tensor, records: tensor, loci: tensor, hits: tensor, hit_room: tensor,
    hit_counts: tensor, histograms: tensor, best_keys: tensor, finished: tensor,
    chain_tokens: tensor, chain_probs: tensor, chain_words: tensor, scratch: tensor, caps: tensor, max_depth: tensor, k: tensor,
    min_prob: tensor,
    out_tokens: tensor, out_probs: tensor, out_counts: tensor, out_source: tensor, out_match: tensor, out_occurrences: tensor,
    out_version: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, PINNED: tl.constexpr, LENGTHS: tl.constexpr, K: tl.constexpr,
    PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
) -> None:  # fmt: skip
    """One launch: programs (row of the batch, share of its chains). Leaves the workspace as it must be before the next match_rows.

    Args:
        arena, headers, pins, tokens: as in match_rows; records ... histograms: what it left.
        best_keys: int64 [batch], zeros; finished: int32 [batch], zeros.
        chain_tokens: int32 [batch, 2, LENGTHS, K]; chain_probs: float32 alike; chain_words: int32 [batch, 2, LENGTHS, 2];
            scratch: int32 [batch, PROGRAMS, ROOM + 2 * K]; workspace.
        caps: int32 [64]; most tokens that a match of each length may give.
        out_tokens: int32 [batch, k], -1 beyond the draft; out_probs: float32 [batch, k]; out_version: int64 [batch]; the others:
            int32 [batch]. A draft of a version that was overwritten meanwhile is empty, and its version is TORN, if PINNED.
        PROGRAMS: At least 3. SLOTS: occurrences that a program holds, 32 to 256. BLOCK: hits that a program reads at once; ROOM: hits
            that it may keep.
    """
    begin_after_previous()
    b = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    words = records + b * _RECORD_WORDS
    length = tl.arange(0, LENGTHS)
    kth = tl.arange(0, K)
    version = tl.load(words)
    n = tl.load(words + _RECORD_LENGTH).to(tl.int32)
    row = tokens + tl.load(words + _RECORD_TOKENS)
    cap = tl.load(caps + length)
    row_hits = hits + b * 2 * hit_room
    found = tl.load(hit_counts + b * 2)
    found_long = tl.load(hit_counts + b * 2 + 1)
    best_key = best_keys + b
    my_scratch = scratch + (b * PROGRAMS + program) * (ROOM + 2 * K)
    row_loci = loci + b * (_SEGMENTS * _LOCUS_LENGTHS * 2)
    local_size = tl.zeros_like(length)
    local_next = local_size
    corpus_size = local_size
    corpus_next = local_size
    longest = tl.minimum(max_depth, n) - 1
    valid = (length >= 1) & (length <= longest)
    cap = tl.where(valid, cap, 0)
    if USE_LOCAL:
        histogram = tl.load(histograms + b * 64 + length)
        local_size = tl.where(valid, tl.cumsum(histogram, axis=0, reverse=True), 0)
        local_next = local_size - histogram
    if USE_CORPUS:
        indexed = valid & (version > 0)
        longer = indexed & (length < longest)
        for segment in tl.static_range(3):
            locus = row_loci + segment * (_LOCUS_LENGTHS * 2) + length * 2
            low, end, low_next, end_next = tl.load(locus), tl.load(locus + 1), tl.load(locus + 2), tl.load(locus + 3)
            corpus_size += tl.where(indexed, end - low, 0)
            corpus_next += tl.where(longer, end_next - low_next, 0)
    # A group is the lengths that have the same occurrences; its longest one stands for it. Longer ones go first, the row before the corpus.
    local_top = (local_size > LANES) & (local_next != local_size)
    corpus_top = (corpus_size > LANES) & (corpus_next != corpus_size)
    order = _at_least(local_top, LENGTHS) + _at_least(corpus_top, LENGTHS)
    groups = tl.max(order, axis=0)
    programs = 2 + tl.minimum(groups, PROGRAMS - 2)
    if program < programs:
        step: tl.constexpr = PROGRAMS - 2
        first = program - 2
        if program < 2:
            first = groups
            sizes = tl.where(program == 1, local_size, corpus_size)
            few = (sizes > 0) & (sizes <= LANES) & (cap > 0)
            shortest = tl.min(tl.where(few, length, LENGTHS), axis=0)
            if shortest < LENGTHS:
                base = arena
                places = tl.arange(0, LANES).to(tl.int64)
                age = tl.arange(0, LANES)
                matched = age
                stop = tl.full([], _ENDLESS, tl.int64)
                if (program == 1) & USE_LOCAL:
                    few_hits = row_hits + tl.where(shortest > 1, hit_room, 0)
                    some = tl.where(shortest > 1, found_long, found)
                    if some > LANES:
                        some = gather_hits(few_hits, some, shortest, row, n, my_scratch, ROOM, BLOCK)
                        few_hits = my_scratch
                    hit = tl.load(few_hits + tl.arange(0, LANES), mask=tl.arange(0, LANES) < some, other=0)
                    base = row
                    stop = n.to(tl.int64)
                    age = hit >> LENGTH_BITS
                    places = (age + 1).to(tl.int64)
                    matched = hit & LENGTH_MASK
                else:
                    places, age, matched = few_in_corpus(arena, words, row_loci + shortest * 2, row, n, longest, shortest)
                place = (b * 2 + program) * LENGTHS
                drafted, score, missing = few_chains(
                    base, places, stop, age, matched, sizes, program, cap, min_prob, chain_tokens + place * K, chain_probs + place * K,
                    LENGTHS, K,
                )  # fmt: skip
                tl.store(chain_words + (place + length) * 2, drafted, mask=drafted > 0)
                tl.store(chain_words + (place + length) * 2 + 1, sizes + program, mask=drafted > 0)
                tl.debug_barrier()
                tl.atomic_max(best_key, _best(drafted, score, program, length), sem="relaxed")
                # Lengths of which some occurrences are in an earlier piece of a document are followed by themselves.
                corpus_top = missing & (corpus_next != corpus_size)
                local_top = length < 0
                if tl.max(corpus_top.to(tl.int32), axis=0) > 0:
                    order = _at_least(corpus_top, LENGTHS)
                    first = groups * 0
                    groups = tl.max(order, axis=0)
        for rank in range(first, groups, tl.where(program < 2, 1, step)):
            # Of one length with both, the row's group goes first.
            local_chosen = local_top & (order - corpus_top.to(tl.int32) == rank + 1)
            corpus_chosen = corpus_top & (order == rank + 1)
            is_local = tl.max(local_chosen.to(tl.int32), axis=0)
            size = _at(tl.where(is_local == 1, local_size, corpus_size), tl.where(is_local == 1, local_chosen, corpus_chosen))
            members = valid & (tl.where(is_local == 1, local_size, corpus_size) == size)
            todo = tl.where(size > 0, 1, 0)
            for _ in range(tl.sum(members.to(tl.int32), axis=0)):
                if todo > 0:
                    todo = todo * 0
                    group_cap = tl.max(tl.where(members, cap, 0), axis=0)
                    bound = _key(group_cap.to(tl.float32).to(tl.int32, bitcast=True), is_local, _at(length, members))
                    if (group_cap > 0) & (bound > tl.load(best_key, volatile=True)):
                        # Followed as the member that may give most: suffixes are sorted as deep as that needs.
                        chosen = _at(length, members & (cap == group_cap))
                        chain, probs, drafted, score, tied = group_chain(
                            arena, words, row_loci + chosen * 2, row, n, row_hits + tl.where(chosen > 1, hit_room, 0),
                            tl.where(chosen > 1, found_long, found), is_local, chosen, size, members, cap, min_prob,
                            best_key, my_scratch, USE_LOCAL, USE_CORPUS, LENGTHS, K, SLOTS, BLOCK, ROOM,
                        )  # fmt: skip
                        # What recency decided may be another for other members: their occurrences can be in other pieces of a document.
                        todo = tied
                        drafted = tl.where((tied == 0) | (length == chosen), drafted, 0)
                        key = _best(drafted, score, is_local, length)
                        if key > tl.load(best_key, volatile=True):
                            winner = (key & 0xFFFF).to(tl.int32)
                            place = (b * 2 + is_local) * LENGTHS + winner
                            tl.store(chain_tokens + place * K + kth, chain)
                            tl.store(chain_probs + place * K + kth, probs)
                            tl.store(chain_words + place * 2, _at(drafted, length == winner))
                            tl.store(chain_words + place * 2 + 1, size + is_local)
                            tl.debug_barrier()
                            tl.atomic_max(best_key, key, sem="relaxed")
                        members = members & (length != chosen)
        tl.debug_barrier()
        if tl.atomic_add(finished + b, 1) == programs - 1:
            key = tl.load(best_key, volatile=True)
            if PINNED:
                torn = is_torn(headers, words, version)
                key = tl.where(torn, 0, key)
                version = tl.where(torn, _TORN, version)
            some = key > 0
            match = (key & 0xFFFF).to(tl.int32)
            is_local = (key >> _LOCAL_BIT).to(tl.int32) & 1
            place = (b * 2 + is_local) * LENGTHS + match
            count = tl.where(some, tl.load(chain_words + place * 2, cache_modifier=".cg"), 0)
            occurrences = tl.where(some, tl.load(chain_words + place * 2 + 1, cache_modifier=".cg"), 0)
            chain = tl.load(chain_tokens + place * K + kth, cache_modifier=".cg")
            probs = tl.load(chain_probs + place * K + kth, cache_modifier=".cg")
            wanted = kth < k
            tl.store(out_tokens + b * k + kth, tl.where(kth < count, chain, -1), mask=wanted)
            tl.store(out_probs + b * k + kth, tl.where(kth < count, probs, 0.0), mask=wanted)
            tl.store(out_counts + b, count)
            tl.store(out_source + b, tl.where(some, 2 - is_local, 0))
            tl.store(out_match + b, match)
            tl.store(out_occurrences + b, occurrences)
            tl.store(out_version + b, version)
            tl.store(best_key, tl.zeros_like(version))
            tl.store(finished + b, 0)
            tl.store(words, tl.zeros_like(version))
            tl.store(hit_counts + b * 2, 0)
            tl.store(hit_counts + b * 2 + 1, 0)
            bins = tl.arange(0, 64)
            tl.store(histograms + b * 64 + bins, tl.zeros_like(bins))
            if PINNED:
                unpin(pins)
