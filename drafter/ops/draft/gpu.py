"""The draft rule `tree` on the GPU, the second of two launches: chains of all suffix lengths and sources, and the best of them.

Suffix lengths with the same occurrences share one chain. PROGRAMS programs of one warp a row take the chains in turn, longest match
first, and skip those that cannot beat the best found so far by any of them; the last to finish writes the row's draft.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import DD_RING, DD_RING_START, HIT_LENGTH_BITS
from draftd.drafter.ops.draft.gpu_corpus import best_child, recency
from draftd.drafter.ops.draft.gpu_few import few_chains
from draftd.drafter.ops.draft.gpu_local import best_local_child, gather_hits
from draftd.drafter.ops.search.gpu import (
    _LOCUS_LENGTHS,
    _SEGMENT_WORDS,
    _SEGMENTS,
    _SEGMENTS_START,
    _SUFFIXES,
    _TEXT,
    descriptor,
)
from draftd.drafter.ops.warp import LANES

_RING_START = tl.constexpr(DD_RING_START)
_RING = tl.constexpr(DD_RING)
_LENGTH_BITS = tl.constexpr(HIT_LENGTH_BITS)
_LENGTH_MASK = tl.constexpr((1 << HIT_LENGTH_BITS) - 1)
_BACK = tl.constexpr(4)
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _floor(best_key: tensor, score: tensor, left: tensor, min_prob: tensor) -> tensor:
    """The survival probability that the next token must have if a chain with `left` more tokens is still to win; rounded down."""
    best_score = (tl.load(best_key, volatile=True) >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.maximum(min_prob, (best_score - score) / left.to(tl.float32) * 0.9999)


@triton.jit
def _places(words: tensor, arena: tensor, low: tensor, high: tensor, length: tensor) -> tensor:
    """The first 32 occurrences of a locus of `length` tokens: where in the arena they go on, which there are, how recent they are, and
    their positions in their text.

    Args:
        low, high: int32 [4]; the locus in each segment.
    """
    lane = tl.arange(0, LANES)
    segment = tl.arange(0, 4)
    at = lane.to(tl.int64) * 0
    text = at
    which = lane * 0
    first = tl.sum(lane * 0, axis=0)
    for s in tl.static_range(3):
        record = words + _SEGMENTS_START + s * _SEGMENT_WORDS
        begin = tl.sum(tl.where(segment == s, low, 0), axis=0)
        size = tl.sum(tl.where(segment == s, high - low, 0), axis=0)
        mine = (lane >= first) & (lane < first + size)
        at = tl.where(mine, tl.load(record + _SUFFIXES) + begin - first + lane, at)
        text = tl.where(mine, tl.load(record + _TEXT) + length, text)
        which = tl.where(mine, s, which)
        first += size
    some = lane < first
    position = tl.load(arena + at, mask=some, other=0)
    age = recency(which, position, tl.load(words + _RING_START).to(tl.int32), tl.load(words + _RING).to(tl.int32))
    return text + position, some, tl.where(some, age, -2), position


@triton.jit
def _ends(arena: tensor, words: tensor, low: tensor, high: tensor) -> tensor:
    """The first and the last occurrence of a locus in each segment: pointers to their texts, positions, and which of 32 lanes hold one."""
    lane = tl.arange(0, LANES)
    segment = tl.arange(0, 4)
    suffixes = lane.to(tl.int64) * 0
    text = suffixes
    is_end = lane < 0
    for s in tl.static_range(3):
        record = words + _SEGMENTS_START + s * _SEGMENT_WORDS
        begin = tl.sum(tl.where(segment == s, low, 0), axis=0)
        end = tl.sum(tl.where(segment == s, high, 0), axis=0)
        here = (lane // 2 == s) & (begin < end)
        suffixes = tl.where(here, tl.load(record + _SUFFIXES) + tl.where(lane % 2 == 0, begin, end - 1), suffixes)
        text = tl.where(here, tl.load(record + _TEXT), text)
        is_end = is_end | here
    return arena + text, tl.load(arena + suffixes, mask=is_end, other=0), is_end


@triton.jit
def _key(score: tensor, is_local: tensor, length: tensor) -> tensor:
    """Orders chains: by score, own tokens first, longer match first."""
    return (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ((is_local << 16) | length)


@triton.jit
def _offer(best_key: tensor, words: tensor, drafted: tensor, score: tensor, occurrences: tensor, is_local: tensor, length: tensor) -> None:
    """Enters the best of the chains of all lengths of one source; words: int32 pointer [LENGTHS, 2]; out."""
    tl.store(words + length * 2, drafted, mask=drafted > 0)
    tl.store(words + length * 2 + 1, occurrences, mask=drafted > 0)
    key = tl.max(tl.where(drafted > 0, _key(score, is_local, length), 0), axis=0)
    tl.debug_barrier()
    tl.atomic_max(best_key, key)


@triton.jit
def _few_corpus_chains(
    arena: tensor, words: tensor, loci: tensor, row: tensor, n: tensor, longest: tensor, sizes: tensor, cap: tensor, min_prob: tensor,
    tokens: tensor, probs: tensor, LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """The chains of all suffix lengths with at most 32 occurrences in the corpus.

    Args:
        words: int64 pointer to the version's descriptor; loci: int32 pointer [3, LOCUS_LENGTHS, 2] of the row.
        sizes, cap: int32 [LENGTHS]; occurrences of each length, and most tokens.
        tokens: int32 pointer, probs: float32 pointer [LENGTHS, K]; out.

    Returns:
        drafted, score [LENGTHS], and which lengths are left out: occurrences of a longer suffix are in an earlier piece of its document.
    """
    length = tl.arange(0, LENGTHS)
    few = (sizes > 0) & (sizes <= LANES)
    shortest = tl.min(tl.where(few, length, LENGTHS), axis=0)
    segment = tl.arange(0, 4)
    locus = loci + (segment * _LOCUS_LENGTHS + shortest) * 2
    low = tl.load(locus, mask=segment < _SEGMENTS, other=0)
    high = tl.load(locus + 1, mask=segment < _SEGMENTS, other=0)
    places, some, age, position = _places(words, arena, low, high, shortest)
    some = some & (shortest < LENGTHS)
    # How far each occurrence matches backwards; a piece begins after a separator.
    matched = tl.where(some, shortest, 0)
    limit = longest - shortest
    looking = some
    any_looking = tl.max(some.to(tl.int32), axis=0)
    before = arena + (places - shortest - 1)
    wanted = row + n - shortest - 1
    for first in range(0, limit, _BACK):
        if any_looking > 0:
            for i in tl.static_range(_BACK):
                back = first + i
                # Not masked with `looking`: these loads need not wait for one another.
                seen = some & (position > back) & (back < limit)
                token = tl.load(wanted - back, mask=back < limit, other=-2)
                looking = looking & (tl.load(before - back, mask=seen, other=-1) == token)
                matched += looking.to(tl.int32)
            any_looking = tl.max(looking.to(tl.int32), axis=0)
    none = tl.zeros_like(length)
    drafted, score, _ties, missing = few_chains(
        arena, places, 0x7FFFFFFFFFFFFFFF, age, matched, sizes, cap, min_prob, shortest * 0, sizes, none.to(tl.float32) + 1.0,
        none.to(tl.float32), none, few & (cap > 0), tokens, probs, LENGTHS, K,
    )  # fmt: skip
    return drafted, score, missing


@triton.jit
def _few_local_chains(
    row: tensor, n: tensor, hits: tensor, found: tensor, sizes: tensor, cap: tensor, min_prob: tensor,
    tokens: tensor, probs: tensor, scratch: tensor, LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """The chains of all suffix lengths with at most 32 earlier occurrences in the row; see _few_corpus_chains."""
    length = tl.arange(0, LENGTHS)
    lane = tl.arange(0, LANES)
    few = (sizes > 0) & (sizes <= LANES)
    shortest = tl.min(tl.where(few, length, LENGTHS), axis=0)
    hit = tl.load(hits + lane, mask=(lane < found) & (shortest < LENGTHS), other=-1)
    if (found > LANES) & (shortest < LENGTHS):
        hit = gather_hits(hits, found, shortest, row, n, tl.zeros_like(tl.arange(0, K)), found * 0, scratch, K)
    end = hit >> _LENGTH_BITS
    matched = tl.where(hit >= 0, hit & _LENGTH_MASK, 0)
    none = tl.zeros_like(length)
    drafted, score, _ties, _missing = few_chains(
        row, (end + 1).to(tl.int64), n, end, matched, sizes, cap, min_prob, found * 0, sizes + 1, none.to(tl.float32) + 1.0,
        none.to(tl.float32), none, few & (cap > 0), tokens, probs, LENGTHS, K,
    )  # fmt: skip
    return drafted, score


@triton.jit
def _many_corpus_chains(
    arena: tensor, words: tensor, loci: tensor, chosen: tensor, members: tensor, cap: tensor, min_prob: tensor, best_key: tensor,
    tokens: tensor, probs: tensor, LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """The chains of the suffix lengths `members`, which have the same occurrences in the corpus, followed as those of `chosen`.

    Returns:
        drafted, score [LENGTHS], and 1 if recency has decided between tokens of equal count.
    """
    length = tl.arange(0, LENGTHS)
    segment = tl.arange(0, 4)
    real = segment < _SEGMENTS
    record = words + _SEGMENTS_START + segment * _SEGMENT_WORDS
    suffixes = tl.load(record + _SUFFIXES, mask=real, other=0)
    texts = tl.load(record + _TEXT, mask=real, other=0)
    ring_start = tl.load(words + _RING_START).to(tl.int32)
    ring = tl.load(words + _RING).to(tl.int32)
    locus = loci + (segment * _LOCUS_LENGTHS + chosen) * 2
    low = tl.load(locus, mask=real, other=0)
    high = tl.load(locus + 1, mask=real, other=0)
    total = tl.sum(high - low, axis=0)
    going = members & (cap > 0)
    most_cap = tl.max(tl.where(going, cap, 0), axis=0)
    drafted = tl.zeros_like(length)
    score = drafted.to(tl.float32)
    prob = tl.full([], 1.0, tl.float32)
    tied = total * 0
    steps = total * 0
    # The first and the last occurrence in each segment: while they go on alike, all between them do, since they are sorted.
    text, position, is_end = _ends(arena, words, low, high)
    for step in range(most_cap):
        if total > LANES:
            following = tl.load(text + position + chosen + step, mask=is_end, other=-1)
            token = tl.max(tl.where(is_end, following, -1), axis=0)
            if (token >= 0) & (tl.min(tl.where(is_end, following, _NO_TOKEN), axis=0) == token):
                going = going & (cap > step)
                tl.store(tokens + length * K + step, token, mask=going)
                tl.store(probs + length * K + step, prob, mask=going)
                score += tl.where(going, prob, 0.0)
                drafted += going.to(tl.int32)
                steps = step + 1
            else:
                floor = _floor(best_key, tl.max(score, axis=0), most_cap - step, min_prob)
                best, most, best_low, best_high, was_tie = best_child(
                    arena, suffixes, texts, low, high, chosen + step, prob, floor, ring_start, ring
                )
                survival = prob * tl.div_rn(most.to(tl.float32), total.to(tl.float32))
                if (most == 0) | (survival < floor):
                    total = total * 0
                else:
                    going = going & (cap > step)
                    tl.store(tokens + length * K + step, best, mask=going)
                    tl.store(probs + length * K + step, survival, mask=going)
                    score += tl.where(going, survival, 0.0)
                    drafted += going.to(tl.int32)
                    prob = survival
                    total = most
                    low = best_low
                    high = best_high
                    tied = tl.maximum(tied, was_tie)
                    steps = step + 1
                    text, position, is_end = _ends(arena, words, low, high)
    if (total > 0) & (steps < most_cap):
        places, some, age, position = _places(words, arena, low, high, chosen)
        drafted, score, ties, _missing = few_chains(
            arena, places, 0x7FFFFFFFFFFFFFFF, age, tl.where(some, LENGTHS, 0), tl.zeros_like(length) + total, cap, min_prob, steps,
            tl.zeros_like(length) + total,
            tl.zeros_like(score) + prob, score, drafted, going & (cap > steps), tokens, probs, LENGTHS, K,
        )  # fmt: skip
        tied = tl.maximum(tied, tl.max(ties, axis=0))
    return drafted, score, tied


@triton.jit
def _many_local_chains(
    row: tensor, n: tensor, hits: tensor, found: tensor, chosen: tensor, count: tensor, members: tensor, cap: tensor, min_prob: tensor,
    best_key: tensor, tokens: tensor, probs: tensor, scratch: tensor, LENGTHS: tl.constexpr, K: tl.constexpr,
) -> tensor:  # fmt: skip
    """The chains of the suffix lengths `members`, which have the same `count` earlier occurrences in the row; see _many_corpus_chains."""
    length = tl.arange(0, LENGTHS)
    slot = tl.arange(0, K)
    going = members & (cap > 0)
    most_cap = tl.max(tl.where(going, cap, 0), axis=0)
    chain = tl.zeros_like(slot) - 1
    drafted = tl.zeros_like(length)
    score = drafted.to(tl.float32)
    prob = tl.full([], 1.0, tl.float32)
    alive = count
    total = count + 1
    steps = count * 0
    for step in range(most_cap):
        if alive > LANES:
            floor = _floor(best_key, tl.max(score, axis=0), most_cap - step, min_prob)
            best, most = best_local_child(hits, found, chosen, row, n, chain, steps, alive, total, prob, floor, K)
            survival = prob * tl.div_rn(most.to(tl.float32), total.to(tl.float32))
            if (most == 0) | (survival < floor):
                alive = alive * 0
            else:
                going = going & (cap > step)
                tl.store(tokens + length * K + step, best, mask=going)
                tl.store(probs + length * K + step, survival, mask=going)
                score += tl.where(going, survival, 0.0)
                drafted += going.to(tl.int32)
                chain = tl.where(slot == step, best, chain)
                prob = survival
                alive = most
                total = most
                steps = step + 1
    if (alive > 0) & (steps < most_cap):
        hit = gather_hits(hits, found, chosen, row, n, chain, steps, scratch, K)
        end = hit >> _LENGTH_BITS
        drafted, score, _ties, _missing = few_chains(
            row, (end + 1).to(tl.int64), n, end, tl.where(hit >= 0, LENGTHS, 0), tl.zeros_like(length) + alive, cap, min_prob, steps,
            tl.zeros_like(length) + total,
            tl.zeros_like(score) + prob, score, drafted, going & (cap > steps), tokens, probs, LENGTHS, K,
        )  # fmt: skip
    return drafted, score


@triton.jit
def draft_chains(
    arena: tensor, headers: tensor, tokens: tensor, row_stride: tensor, lengths: tensor, rows: tensor, namespaces: tensor,
    snapshot: tensor, loci: tensor, hits: tensor, hit_stride: tensor, hit_counts: tensor, histograms: tensor, best_keys: tensor,
    finished: tensor,
    chain_tokens: tensor, chain_probs: tensor, chain_words: tensor, scratch: tensor, caps: tensor, max_depth: tensor, k: tensor,
    min_prob: tensor,
    out_tokens: tensor, out_probs: tensor, out_counts: tensor, out_source: tensor, out_match: tensor, out_occurrences: tensor,
    out_version: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, LENGTHS: tl.constexpr, K: tl.constexpr, PROGRAMS: tl.constexpr,
) -> None:  # fmt: skip
    """One launch: programs (row of the batch, share of its chains). Leaves the workspace as it must be before the next match_rows.

    Args:
        tokens ... histograms: as in match_rows.
        best_keys: int64 [batch], zeros; finished: int32 [batch], zeros.
        chain_tokens: int32 [batch, 2, LENGTHS, K]; chain_probs: float32 alike; chain_words: int32 [batch, 2, LENGTHS, 2];
            scratch: int32 [batch, PROGRAMS, 32]; workspace.
        caps: int32 [64]; most tokens that a match of each length may give.
        out_tokens: int32 [batch, k], -1 beyond the draft; out_probs: float32 [batch, k]; out_version: int64 [batch]; the others:
            int32 [batch].
    """
    b = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    r = tl.load(rows + b).to(tl.int64)
    n = tl.load(lengths + r).to(tl.int32)
    row = tokens + r * row_stride
    longest = tl.minimum(max_depth, n) - 1
    length = tl.arange(0, LENGTHS)
    valid = (length >= 1) & (length <= longest)
    cap = tl.load(caps + length, mask=valid, other=0)
    row_loci = loci + b * (_SEGMENTS * _LOCUS_LENGTHS * 2)
    row_hits = hits + b * hit_stride
    best_key = best_keys + b
    slot = tl.arange(0, K)
    my_scratch = scratch + (b * PROGRAMS + program) * LANES
    version = tl.full([], 0, tl.int64)
    local_size = tl.zeros_like(length)
    local_next = tl.zeros_like(length)
    corpus_size = tl.zeros_like(length)
    corpus_next = tl.zeros_like(length)
    words = headers
    if USE_LOCAL:
        histogram = tl.load(histograms + b * 64 + length)
        local_size = tl.where(valid, tl.cumsum(histogram, axis=0, reverse=True), 0)
        local_next = local_size - histogram
    if USE_CORPUS:
        namespace = tl.load(namespaces + r)
        if namespace >= 0:
            version = tl.load(snapshot + b)
            words = descriptor(headers, namespace, version)
        indexed = valid & (version > 0)
        longer = indexed & (length < longest)
        for s in tl.static_range(3):
            locus = row_loci + (s * _LOCUS_LENGTHS + length) * 2
            corpus_size += tl.load(locus + 1, mask=indexed, other=0) - tl.load(locus, mask=indexed, other=0)
            corpus_next += tl.load(locus + 3, mask=longer, other=0) - tl.load(locus + 2, mask=longer, other=0)
    # First the lengths with few occurrences, all at once: program 0 those in the corpus, program 1 those in the row.
    left_out = length < 0
    if USE_CORPUS:  # noqa: SIM102 (decided when compiled)
        if (program == 0) & (version > 0):
            place = b * 2 * LENGTHS
            drafted, score, left_out = _few_corpus_chains(
                arena, words, row_loci, row, n, longest, corpus_size, cap, min_prob,
                chain_tokens + place * K, chain_probs + place * K, LENGTHS, K,
            )  # fmt: skip
            _offer(best_key, chain_words + place * 2, drafted, score, corpus_size, 0, length)
    if USE_LOCAL:  # noqa: SIM102 (decided when compiled)
        if (program == 1) & (longest > 0):
            place = (b * 2 + 1) * LENGTHS
            found = tl.load(hit_counts + b)
            drafted, score = _few_local_chains(
                row, n, row_hits, found, local_size, cap, min_prob, chain_tokens + place * K, chain_probs + place * K, my_scratch,
                LENGTHS, K,
            )  # fmt: skip
            _offer(best_key, chain_words + place * 2, drafted, score, local_size + 1, 1, length)
    # Then the others. A group is the lengths that have the same occurrences; its longest one stands for it.
    local_top = (local_size > LANES) & (local_next != local_size)
    corpus_top = (corpus_size > LANES) & (corpus_next != corpus_size)
    local_rank = tl.where(local_top, 2 * tl.cumsum(local_top.to(tl.int32), axis=0, reverse=True) - 1, 0)
    corpus_rank = tl.where(corpus_top, 2 * tl.cumsum(corpus_top.to(tl.int32), axis=0, reverse=True), 0)
    chains = tl.maximum(tl.max(local_rank, axis=0), tl.max(corpus_rank, axis=0))
    first = (program + PROGRAMS - 2) % PROGRAMS
    step = tl.full([], PROGRAMS, tl.int32)
    if tl.max(left_out.to(tl.int32), axis=0) > 0:
        # Program 0 takes these too; a few of its ranks are then others' as well.
        left_top = left_out & (corpus_next != corpus_size)
        chains = (chains // 2) * 2 + 2
        corpus_rank = tl.where(left_top, chains + 2 * tl.cumsum(left_top.to(tl.int32), axis=0, reverse=True), corpus_rank)
        chains = tl.max(corpus_rank, axis=0)
        first = first * 0
        step = step * 0 + 1
    for rank in range(first + 1, chains + 1, step):
        is_local = rank % 2
        size = tl.sum(tl.where(local_rank == rank, local_size, 0) + tl.where(corpus_rank == rank, corpus_size, 0), axis=0)
        members = valid & (tl.where(is_local == 1, local_size, corpus_size) == size)
        todo = (size > 0).to(tl.int32)
        for _ in range(tl.sum(members.to(tl.int32), axis=0)):
            if todo > 0:
                todo = todo * 0
                group_cap = tl.max(tl.where(members, cap, 0), axis=0)
                top = tl.max(tl.where(members, length, 0), axis=0)
                bound = _key(group_cap.to(tl.float32), is_local, top)
                if (group_cap > 0) & (bound > tl.load(best_key, volatile=True)):
                    # Followed as the member that may give most: suffixes are sorted as deep as that needs.
                    chosen = tl.max(tl.where(members & (cap == group_cap), length, 0), axis=0)
                    place = (b * 2 + is_local) * LENGTHS
                    chains_of = chain_tokens + place * K
                    probs_of = chain_probs + place * K
                    drafted = tl.zeros_like(length)
                    score = drafted.to(tl.float32)
                    if (is_local == 1) & USE_LOCAL:
                        found = tl.load(hit_counts + b)
                        drafted, score = _many_local_chains(
                            row, n, row_hits, found, chosen, size, members, cap, min_prob, best_key, chains_of, probs_of, my_scratch,
                            LENGTHS, K,
                        )  # fmt: skip
                    else:
                        drafted, score, todo = _many_corpus_chains(
                            arena, words, row_loci, chosen, members, cap, min_prob, best_key, chains_of, probs_of, LENGTHS, K
                        )
                    # What recency decided may be another for other members: their occurrences can be in other pieces of a document.
                    drafted = tl.where((todo == 0) | (length == chosen), drafted, 0)
                    _offer(best_key, chain_words + place * 2, drafted, score, tl.zeros_like(length) + size + is_local, is_local, length)
                    members = members & (length != chosen)
    tl.debug_barrier()
    if tl.atomic_add(finished + b, 1) == PROGRAMS - 1:
        key = tl.atomic_max(best_key, tl.zeros_like(version))
        some = key > 0
        match = (key & 0xFFFF).to(tl.int32)
        place = (b * 2 + ((key >> 16) & 1)) * LENGTHS + match
        count = tl.load(chain_words + place * 2, mask=some, other=0, cache_modifier=".cg")
        wanted = slot < k
        chain = tl.load(chain_tokens + place * K + slot, mask=slot < count, other=-1, cache_modifier=".cg")
        probs = tl.load(chain_probs + place * K + slot, mask=slot < count, other=0.0, cache_modifier=".cg")
        tl.store(out_tokens + b * k + slot, chain, mask=wanted)
        tl.store(out_probs + b * k + slot, probs, mask=wanted)
        tl.store(out_counts + b, count)
        tl.store(out_source + b, tl.where(some, 2 - ((key >> 16) & 1).to(tl.int32), 0))
        tl.store(out_match + b, match)
        tl.store(out_occurrences + b, tl.load(chain_words + place * 2 + 1, mask=some, other=0, cache_modifier=".cg"))
        tl.store(out_version + b, version)
        tl.store(best_key, tl.zeros_like(version))
        tl.store(finished + b, 0)
        tl.store(snapshot + b, tl.zeros_like(version))
        tl.store(hit_counts + b, 0)
        bins = tl.arange(0, 64)
        tl.store(histograms + b * 64 + bins, tl.zeros_like(bins))
