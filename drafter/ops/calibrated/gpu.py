"""The draft rule `calibrated` on the GPU, the second of two launches: chains, position by position, by one warp a row.

What a draft follows is up to 32 occurrences in each source. They are sought anew only where those that are left match too little; so it
can miss short matches that begin within the draft. See docs/architecture.md for what else differs from the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    DEVICE_CALIBRATION,
    LOCUS_LENGTHS,
    RECORD_HEADER,
    RECORD_LENGTH,
    RECORD_TOKENS,
    ROW_RECORD_WORDS,
    TORN,
)
from draftd.drafter.device_layout import SEGMENTS as SEGMENT_COUNT
from draftd.drafter.ops.calibrated import gpu_levels as levels
from draftd.drafter.ops.calibrated.cpu_mixer import EVIDENCE_FLOATS, EVIDENCE_INTS, VOTE_COUNT
from draftd.drafter.ops.calibrated.gpu_levels import length_of, level_of
from draftd.drafter.ops.calibrated.gpu_mix import mix
from draftd.drafter.ops.calibrated.gpu_own import seed_own
from draftd.drafter.ops.calibrated.gpu_refine import knots_after, refine
from draftd.drafter.ops.calibrated.gpu_seed import seed_corpus, token_or_none
from draftd.drafter.ops.calibrated.gpu_tail import find_tail
from draftd.drafter.ops.draft.gpu_pins import is_torn, unpin
from draftd.drafter.ops.warp import begin_after_previous
from draftd.drafter.policy import REACH

_LOCUS_LENGTHS = tl.constexpr(LOCUS_LENGTHS)
_SEGMENTS = tl.constexpr(SEGMENT_COUNT)
_RECORD_WORDS = tl.constexpr(ROW_RECORD_WORDS)
_RECORD_LENGTH = tl.constexpr(RECORD_LENGTH)
_RECORD_TOKENS = tl.constexpr(RECORD_TOKENS)
_TORN = tl.constexpr(TORN)
_WORK_WORDS = tl.constexpr(levels.WORK_WORDS)
_TAIL_TOKENS = tl.constexpr(levels.TAIL_TOKENS)
_HELD = tl.constexpr(levels.HELD)
_HELD_MATCHED = tl.constexpr(levels.HELD_MATCHED)
_OWN_PLACES = tl.constexpr(levels.OWN_PLACES)
_OWN_MATCHED = tl.constexpr(levels.OWN_MATCHED)
_REACH = tl.constexpr(REACH)
_RECORD_HEADER = tl.constexpr(RECORD_HEADER)
_CALIBRATION = tl.constexpr(DEVICE_CALIBRATION)
_EVIDENCE_INTS = tl.constexpr(EVIDENCE_INTS)
_EVIDENCE_FLOATS = tl.constexpr(EVIDENCE_FLOATS)
_VOTE_COUNT = tl.constexpr(VOTE_COUNT)
_NONE = tl.constexpr(64)


@triton.jit
def _is_complete(matched: tensor, lowest: tensor, levels: tensor) -> tensor:
    """Whether the longest level and so many below it are complete, where all from the level `lowest` on are held."""
    return (matched > 0) & (tl.maximum(level_of(matched) - levels, 0) >= lowest)


@triton.jit(do_not_specialize=["hit_room", "k", "most_searches", "complete_levels", "search_tokens", "budget"])
def draft_calibrated(
    arena: tensor, headers: tensor, pins: tensor, tokens: tensor, records: tensor,
    loci: tensor, hits: tensor, hit_room: tensor, hit_counts: tensor, histograms: tensor, calibration: tensor,
    work: tensor, places: tensor,
    k: tensor, tau: tensor, most_searches: tensor, complete_levels: tensor, doubt: tensor, search_tokens: tensor, budget: tensor,
    out_tokens: tensor, out_survival: tensor, out_counts: tensor, out_source: tensor, out_match: tensor, out_occurrences: tensor,
    out_version: tensor, out_ints: tensor, out_floats: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, PINNED: tl.constexpr, EVIDENCE: tl.constexpr, K: tl.constexpr,
) -> None:  # fmt: skip
    """One launch: a program a row. Leaves the workspace as it must be before the next match_rows.

    Args:
        arena, headers, pins, tokens: As in match_rows; records ... histograms: what it left.
        calibration: float32 [CALIBRATION_WORDS]; for rows whose namespace has none in the arena.
        most_searches: How often a draft may look for what it follows, the first time included. complete_levels: It does so where the
            source that matches longest has not all occurrences of its longest level and so many below, and the next token would be right
            with a probability below `doubt`. budget: Most tokens of a draft, where each search after the first counts as search_tokens.
        work: int32 [batch, WORK_WORDS]; places: int64 [batch, HELD]; workspace.
        out_tokens: int32 [batch, k], -1 beyond the draft; out_survival: float32 [batch, k]; out_version: int64 [batch]; the others:
            int32 [batch]. A draft of a version that was overwritten meanwhile is empty, and its version is TORN, if PINNED.
        out_ints: int32 [batch, k + 1, EVIDENCE_INTS]; out_floats: float32 [batch, k + 1, EVIDENCE_FLOATS]; out, if EVIDENCE: as the CPU
            kernel fills them.
    """
    begin_after_previous()
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _HELD)
    kth = tl.arange(0, K)
    words = records + b * _RECORD_WORDS
    version = tl.load(words)
    n = tl.load(words + _RECORD_LENGTH).to(tl.int32)
    row = tokens + tl.load(words + _RECORD_TOKENS)
    header = headers + tl.load(words + _RECORD_HEADER, mask=version > 0, other=0)
    learned = tl.load(header + _CALIBRATION, mask=version > 0, other=0)
    table = tl.where(learned > 0, arena.to(tl.pointer_type(tl.float32)) + learned, calibration)
    row_loci = loci + b * (_SEGMENTS * _LOCUS_LENGTHS * 2)
    row_hits = hits + b * 2 * hit_room
    work = work + b * _WORK_WORDS
    places = places + b * _HELD
    ints = out_ints
    floats = out_floats
    if EVIDENCE:
        ints = out_ints + b * (k + 1) * _EVIDENCE_INTS
        floats = out_floats + b * (k + 1) * _EVIDENCE_FLOATS
    before = n - _TAIL_TOKENS + lane
    tl.store(work + lane, tl.load(row + before, mask=before >= 0, other=-2))
    tl.debug_barrier()

    step = n * 0
    survival = tl.full([], 1.0, tl.float32)
    source = step
    match = step
    occurrences = step
    own_place = tl.zeros_like(lane)
    own_matched = own_place
    own_x = own_place - 1
    own_least = step + _NONE
    held_place = own_place.to(tl.int64)
    held_matched = own_place
    held_x = own_place - 1
    held_least = step + _NONE
    held_weight = survival
    searches = step
    looked = step
    located = step
    doubted = n < 0
    going = (n > 0).to(tl.int32)
    while going > 0:
        end = work + _TAIL_TOKENS + step
        own_longest = tl.max(tl.where(own_x >= 0, own_matched, 0), axis=0)
        held_longest = tl.max(tl.where(held_x >= 0, held_matched, 0), axis=0)
        # What matches longer than a level is not all that matches it.
        own_lowest = level_of(own_least - 1) + 1
        held_lowest = level_of(held_least - 1) + 1
        corpus_top = level_of(held_longest)
        corpus_top = tl.where(corpus_top >= held_lowest, corpus_top, -1)
        # The source that matches longest decides.
        enough = _is_complete(held_longest, held_lowest, complete_levels)
        enough = enough | (_is_complete(own_longest, own_lowest, complete_levels) & (own_longest >= held_longest))
        incomplete = (enough == 0) & (searches < most_searches)
        searched = (incomplete & (doubted | ((own_longest == 0) & (held_longest == 0)))).to(tl.int32)
        if searched > 0:
            searches += 1
            if USE_CORPUS & (version > 0):
                if step > 0:
                    find_tail(arena, words, end, n + step, step - located, row_loci)
                    located = step
                    tl.debug_barrier()
                held_least, corpus_top, held_weight = seed_corpus(arena, words, row_loci, end, n + step, places, work)
                held_lowest = level_of(held_least - 1) + 1
            if USE_LOCAL:
                own_least = seed_own(row, n, end, step, row_hits, hit_room, hit_counts + b * 2, histograms + b * 64, work)
                own_lowest = level_of(own_least - 1) + 1
            tl.debug_barrier()
            if USE_CORPUS & (version > 0):
                held_place = tl.load(places + lane)
                held_matched = tl.load(work + _HELD_MATCHED + lane)
                held_x = token_or_none(tl.load(arena + held_place, mask=held_matched > 0, other=-1))
            if USE_LOCAL:
                own_place = tl.load(work + _OWN_PLACES + lane)
                own_matched = tl.load(work + _OWN_MATCHED + lane)
                there = tl.where(own_place < n, row + own_place, work + _TAIL_TOKENS + own_place - n)
                own_x = token_or_none(tl.load(there, mask=own_matched > 0, other=-1))
                own_longest = tl.max(tl.where(own_x >= 0, own_matched, 0), axis=0)
        # What follows the next token is on its way while that is decided.
        own_next = own_place + 1
        there = tl.where(own_next < n, row + own_next, work + _TAIL_TOKENS + own_next - n)
        own_ahead = tl.load(there, mask=(own_x >= 0) & (own_matched > 0) & (own_next < n + step), other=-1)
        held_ahead = tl.load(arena + held_place + 1, mask=(held_x >= 0) & (held_matched > 0), other=-1)

        own_top = level_of(own_longest)
        own_top = tl.where((searched > 0) | (own_top >= own_lowest), own_top, -1)
        refined_at, refined_next = knots_after(table, survival)
        token, probability, origin, seen = mix(
            table, own_x, own_matched, own_top, own_lowest, held_x, held_matched, corpus_top, held_lowest, held_weight, searched, work,
            ints + step * _EVIDENCE_INTS, floats + step * _EVIDENCE_FLOATS, EVIDENCE,
        )  # fmt: skip
        looked = step + 1
        if step == 0:
            source = origin + 1
            match = length_of(tl.where(origin == 1, corpus_top, own_top))
            occurrences = seen
        refined = refine(refined_at, refined_next, probability)
        after = survival * refined
        # Once more, with all that there is, before it is decided.
        doubted = incomplete & (searched == 0) & ((refined < doubt) | (token < 0))
        drafts = (token >= 0) & (after >= tau) & (doubted == 0)
        going = (drafts | doubted).to(tl.int32)
        if drafts:
            tl.store(out_tokens + b * k + step, token)
            tl.store(out_survival + b * k + step, after)
            tl.store(end, token)
            tl.debug_barrier()
            survival = after
            goes_on = (own_x == token) & (own_matched > 0)
            own_x = tl.where(goes_on, token_or_none(tl.where(own_next == n + step, token, own_ahead)), -1)
            own_matched = tl.where(goes_on, tl.minimum(own_matched + 1, _REACH), 0)
            own_place = own_next
            goes_on = (held_x == token) & (held_matched > 0)
            held_x = tl.where(goes_on, token_or_none(held_ahead), -1)
            held_matched = tl.where(goes_on, tl.minimum(held_matched + 1, _REACH), 0)
            held_place += 1
            own_least = tl.minimum(own_least + 1, _NONE)
            held_least = tl.minimum(held_least + 1, _NONE)
            step += 1
            going = (step < tl.minimum(k, budget - search_tokens * (searches - 1))).to(tl.int32)

    if PINNED:
        tl.debug_barrier()
        torn = is_torn(headers, words, version)
        step = tl.where(torn, 0, step)
        looked = tl.where(torn, 0, looked)
        version = tl.where(torn, _TORN, version)
    some = step > 0
    tl.store(out_tokens + b * k + kth, tl.zeros_like(kth) - 1, mask=(kth >= step) & (kth < k))
    tl.store(out_survival + b * k + kth, tl.zeros_like(kth).to(tl.float32), mask=(kth >= step) & (kth < k))
    tl.store(out_counts + b, step)
    tl.store(out_source + b, tl.where(some, source, 0))
    tl.store(out_match + b, tl.where(some, match, 0))
    tl.store(out_occurrences + b, tl.where(some, occurrences, 0))
    tl.store(out_version + b, version)
    if EVIDENCE:
        tl.store(ints + kth * _EVIDENCE_INTS + _VOTE_COUNT, tl.zeros_like(kth) - 1, mask=(kth >= looked) & (kth < k))
        tl.store(ints + k * _EVIDENCE_INTS + _VOTE_COUNT, -1)
    tl.store(words, tl.zeros_like(version))
    tl.store(hit_counts + b * 2, 0)
    tl.store(hit_counts + b * 2 + 1, 0)
    bins = tl.arange(0, 64)
    tl.store(histograms + b * 64 + bins, tl.zeros_like(bins))
    if PINNED:
        tl.debug_barrier()
        unpin(pins)
