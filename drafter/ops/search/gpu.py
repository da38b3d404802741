"""The first of two launches of a GPU draft: the loci of all suffix lengths in every segment, and the matches in the row itself.

Every program of a launch does one piece of one row: a group of suffix lengths in one segment, or a part of the row. A search probes
PROBES places of its range at once, for both ends of the locus: few dependent loads instead of few loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor

from draftd.drafter.device_layout import (
    BUCKET_SHIFT_BITS,
    DD_BUCKET_RULE,
    DD_SEGMENT_WORDS,
    DD_SEGMENTS,
    DD_SIGNS,
    DEVICE_DESCRIPTOR_WORDS,
    DEVICE_DESCRIPTORS,
    DEVICE_DESCRIPTORS_START,
    DEVICE_HEADER_WORDS,
    DEVICE_VERSION,
    DS_BUCKETS,
    DS_LENGTH,
    DS_SUFFIXES,
    DS_TEXT,
    LOCUS_LENGTHS,
    RECORD_HEADER,
    RECORD_LENGTH,
    RECORD_TOKENS,
    ROW_RECORD_WORDS,
    SIGN_BITS,
    SIGN_STRIDE,
    SIGN_TOKENS,
)
from draftd.drafter.device_layout import SEGMENTS as SEGMENT_COUNT
from draftd.drafter.ops.draft.gpu_pins import pin
from draftd.drafter.ops.local.gpu import local_matches
from draftd.drafter.ops.merge.gpu_signs import sign_part
from draftd.drafter.ops.warp import begin_after_previous

_HEADER_WORDS = tl.constexpr(DEVICE_HEADER_WORDS)
_VERSION = tl.constexpr(DEVICE_VERSION)
_DESCRIPTORS_START = tl.constexpr(DEVICE_DESCRIPTORS_START)
_DESCRIPTORS = tl.constexpr(DEVICE_DESCRIPTORS)
_DESCRIPTOR_WORDS = tl.constexpr(DEVICE_DESCRIPTOR_WORDS)
_BUCKET_RULE = tl.constexpr(DD_BUCKET_RULE)
_SHIFT_BITS = tl.constexpr(BUCKET_SHIFT_BITS)
_SHIFT_MASK = tl.constexpr((1 << BUCKET_SHIFT_BITS) - 1)
_SEGMENTS_START = tl.constexpr(DD_SEGMENTS)
_SIGNS = tl.constexpr(DD_SIGNS)
_SIGN_BITS = tl.constexpr(SIGN_BITS)
_SIGN_TOKENS = tl.constexpr(SIGN_TOKENS)
_SIGN_STRIDE = tl.constexpr(SIGN_STRIDE)
_NO_SIGN_PART = tl.constexpr((1 << SIGN_BITS) - 1)
_NO_SIGN_PARTS = tl.constexpr((1 << 2 * SIGN_BITS) - 1)
_SEGMENT_WORDS = tl.constexpr(DD_SEGMENT_WORDS)
_SUFFIXES = tl.constexpr(DS_SUFFIXES)
_LENGTH = tl.constexpr(DS_LENGTH)
_BUCKETS = tl.constexpr(DS_BUCKETS)
_TEXT = tl.constexpr(DS_TEXT)
_LOCUS_LENGTHS = tl.constexpr(LOCUS_LENGTHS)
_SEGMENTS = tl.constexpr(SEGMENT_COUNT)
_RECORD_WORDS = tl.constexpr(ROW_RECORD_WORDS)
_RECORD_LENGTH = tl.constexpr(RECORD_LENGTH)
_RECORD_TOKENS = tl.constexpr(RECORD_TOKENS)
_RECORD_HEADER = tl.constexpr(RECORD_HEADER)


@triton.jit
def descriptor(headers: tensor, namespace: tensor, version: tensor) -> tensor:
    """Pointer to the words of a namespace's version."""
    slot = version % _DESCRIPTORS
    return headers + namespace.to(tl.int64) * _HEADER_WORDS + _DESCRIPTORS_START + slot * _DESCRIPTOR_WORDS


@triton.jit
def rounds_of(size: tensor, PROBES: tl.constexpr) -> tensor:
    """Rounds that a search of at most `size` places takes. (A while loop over tensors would do without; Triton cannot compile it.)"""
    rounds = size * 0
    while size > 0:
        size = size // (PROBES + 1)
        rounds += 1
    return rounds


@triton.jit
def _compared(suffix: tensor, pattern: tensor, open_: tensor, left: tensor, ahead: tl.constexpr) -> tensor:
    """What is `ahead` tokens on in a suffix and in the pattern, and whether the pattern goes so far."""
    wanted = open_ & (ahead < left)
    return tl.load(suffix + ahead, mask=wanted, other=0), tl.load(pattern + ahead, mask=wanted, other=0), wanted


@triton.jit
def _decided(order: tensor, same: tensor, x: tensor, y: tensor, wanted: tensor) -> tensor:
    """The order after one more token, see search_group, and how many tokens are the same."""
    order = tl.where(order == 2, tl.where(wanted == 0, 0, tl.where(x == y, 2, tl.where(x < y, -1, 1))), order)
    return order, same + (order == 2).to(tl.int32)


@triton.jit
def sign_range(pattern: tensor, length: tensor, some: tensor) -> tensor:
    """The least and the largest sign of suffixes that begin with patterns, and whether no other token looks like theirs in a sign.

    Args:
        pattern: int32 pointers to the first tokens; length: int32; some: Whether the pattern counts.
    """
    t0 = tl.load(pattern, mask=some, other=0)
    t1 = tl.load(pattern + 1, mask=some & (length > 1), other=0)
    t2 = tl.load(pattern + 2, mask=some & (length > 2), other=0)
    prefix = (sign_part(t0) << (2 * _SIGN_BITS)) | tl.where(length > 1, sign_part(t1) << _SIGN_BITS, 0)
    from_ = prefix | tl.where(length > 2, sign_part(t2), 0)
    open_parts = tl.where(length > 2, 0, tl.where(length > 1, _NO_SIGN_PART, _NO_SIGN_PARTS)).to(tl.int64)
    # Tokens that no text has may look like others in a sign.
    known = (t0 >= 0) & (t1 >= 0) & (t2 >= 0) & (t0 < _NO_SIGN_PART - 1) & (t1 < _NO_SIGN_PART - 1) & (t2 < _NO_SIGN_PART - 1)
    return from_, from_ | open_parts, known


@triton.jit
def signs_between(low: tensor, high: tensor) -> tensor:
    """The first sign of the suffixes [low, high), and behind the last one."""
    begin = (low + _SIGN_STRIDE - 1) // _SIGN_STRIDE
    return begin, tl.maximum(begin, (high + _SIGN_STRIDE - 1) // _SIGN_STRIDE)


@triton.jit
def places_of_signs(low: tensor, high: tensor, begin: tensor, end: tensor, first: tensor, beyond: tensor, exact: tensor) -> tensor:
    """Where the first suffix of a locus is, at least and at most, and where its end is, at least and at most.

    Args:
        low, high: Places of suffixes; begin, end: See signs_between; first, beyond: The first of these signs that is not below the
            pattern, and the first beyond it; exact: Whether all suffixes between them begin with it.
    """
    least = tl.where(first > begin, (first - 1) * _SIGN_STRIDE + 1, low)
    most = tl.where(beyond < end, beyond * _SIGN_STRIDE, high)
    first_most = tl.where(exact, tl.where(first < end, first * _SIGN_STRIDE, high), most)
    end_least = tl.where(exact, tl.where(beyond > begin, (beyond - 1) * _SIGN_STRIDE + 1, low), least)
    return least, first_most, end_least, most


@triton.jit
def search_signs(signs: tensor, pattern: tensor, length: tensor, low: tensor, high: tensor, PROBES: tl.constexpr) -> tensor:
    """Narrows [low, high], places of suffixes, by their signs.

    Args:
        signs: int64 pointer; pattern: int32 pointers [LENGTHS] to the first tokens; length, low, high: int32 [LENGTHS].

    Returns:
        See places_of_signs.
    """
    half: tl.constexpr = PROBES // 2
    from_, to, known = sign_range(pattern, length, high > low)
    begin, end = signs_between(low, high)
    first_low, first_high, last_low, last_high = begin, end, begin, end
    probe = tl.arange(0, PROBES)[None, :]
    side = probe // half
    nth = probe % half + 1
    wanted = tl.where(side == 0, from_[:, None], to[:, None])
    rounds = rounds_of(tl.max(end - begin, axis=0), half)
    for _ in range(rounds):
        first_spacing = (first_high - first_low) // (half + 1) + 1
        last_spacing = (last_high - last_low) // (half + 1) + 1
        at = tl.where(side == 0, first_low[:, None] + nth * first_spacing[:, None], last_low[:, None] + nth * last_spacing[:, None]) - 1
        inside = at < tl.where(side == 0, first_high[:, None], last_high[:, None])
        sign = tl.load(signs + at, mask=inside, other=0)
        before = inside & tl.where(side == 0, sign < wanted, sign <= wanted)
        counts = tl.sum(tl.where(before, tl.where(side == 0, 1, 1 << 16), 0), axis=1)
        of_first, of_last = counts & 0xFFFF, counts >> 16
        first_high = tl.minimum(first_high, first_low + (of_first + 1) * first_spacing - 1)
        first_low = first_low + of_first * first_spacing
        last_high = tl.minimum(last_high, last_low + (of_last + 1) * last_spacing - 1)
        last_low = last_low + of_last * last_spacing
    return places_of_signs(low, high, begin, end, first_low, last_low, known & (length <= _SIGN_TOKENS))


@triton.jit
def search_group(
    suffixes: tensor, text: tensor, buckets: tensor, rule: tensor, signs: tensor, signed: tensor, row: tensor, n: tensor,
    longest: tensor, group: tensor, loci: tensor,
    LENGTHS: tl.constexpr, PROBES: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the loci of the suffix lengths group * LENGTHS + 1 ... (group + 1) * LENGTHS in one segment.

    All PROBES of a length look for both ends of its locus, until one of them is inside: from then on a half looks for each end.

    Args:
        suffixes, text, buckets: int32 pointers to the segment's arrays; rule: int64; see DD_BUCKET_RULE.
        signs: int64 pointer, if signed is not 0.
        loci: int32 pointer [LOCUS_LENGTHS, 2]; out: first suffix and end of each length; equal if there is none.
    """
    half: tl.constexpr = PROBES // 2
    i = tl.arange(0, LENGTHS)
    length = group * LENGTHS + 1 + i
    active = length <= longest
    start = n - length
    shift = rule.to(tl.int32) & _SHIFT_MASK
    bucket = tl.load(row + start, mask=active, other=-1) >> shift
    # A token that cannot be in the index has no bucket: the row is the engine's, who may have written anything.
    known = (bucket >= 0) & (bucket < (rule >> _SHIFT_BITS).to(tl.int32))
    # The first suffix is in [low, first_high], the end in [end_low, high].
    low = tl.load(buckets + bucket, mask=known, other=0)
    high = tl.load(buckets + bucket + 1, mask=known, other=0)
    whole = (length == 1) & (shift == 0)
    first_high = tl.where(whole, low, high)
    end_low = tl.where(whole, high, low)
    if signed != 0:
        found = search_signs(signs, row + start, length, low, tl.where(whole, low, high), PROBES)
        low, first_high = tl.where(whole, low, found[0]), tl.where(whole, first_high, found[1])
        end_low, high = tl.where(whole, end_low, found[2]), tl.where(whole, high, found[3])
    # How many tokens the suffixes just outside the range share with the pattern: all inside share the smaller number.
    low_shared = tl.zeros_like(low) + tl.where(shift == 0, 1, 0)
    high_shared = low_shared
    probe = tl.arange(0, PROBES)[None, :]
    side = probe // half
    pattern = row + start[:, None]
    rounds = rounds_of(tl.max(tl.maximum(first_high - low, high - end_low), axis=0), half)
    open_places = rounds
    for _ in range(rounds):
        if open_places > 0:
            is_split = (end_low > low) | (high > first_high)
            parts = tl.where(is_split, half + 1, PROBES + 1)
            end = tl.where(is_split, first_high, high)
            # Spacing of the probes, rounded up, so that all places are probed if there are no more than that.
            spacing = (end - low) // parts + 1
            end_begin = tl.where(is_split, end_low, low)
            end_spacing = (high - end_begin) // parts + 1
            split = is_split[:, None]
            for_end = split & (side == 1)
            nth = tl.where(split, probe % half, probe) + 1
            at = tl.where(for_end, end_begin[:, None] + nth * end_spacing[:, None], low[:, None] + nth * spacing[:, None]) - 1
            inside = at < tl.where(for_end, high[:, None], end[:, None])
            position = tl.load(suffixes + at, mask=inside, other=0)
            # From here on, where the suffix and the pattern go on after what they share.
            same = tl.zeros_like(at) + tl.minimum(low_shared, high_shared)[:, None]
            wanted = inside & (same < length[:, None])
            x = tl.load(text + position + same, mask=wanted, other=0)
            y = tl.load(pattern + same, mask=wanted, other=0)
            # -1, 0, 1: the suffix is below, begins with, is above the pattern; 2: not known yet.
            order = tl.where(wanted, tl.where(x == y, 2, tl.where(x < y, -1, 1)), 0)
            same += (order == 2).to(tl.int32)
            undecided = tl.max(tl.max(order, axis=1), axis=0)
            while undecided == 2:
                open_ = order == 2
                x0, y0, w0 = _compared(text + position + same, pattern + same, open_, length[:, None] - same, 0)
                x1, y1, w1 = _compared(text + position + same, pattern + same, open_, length[:, None] - same, 1)
                x2, y2, w2 = _compared(text + position + same, pattern + same, open_, length[:, None] - same, 2)
                x3, y3, w3 = _compared(text + position + same, pattern + same, open_, length[:, None] - same, 3)
                order, same = _decided(order, same, x0, y0, w0)
                order, same = _decided(order, same, x1, y1, w1)
                order, same = _decided(order, same, x2, y2, w2)
                order, same = _decided(order, same, x3, y3, w3)
                undecided = tl.max(tl.max(order, axis=1), axis=0)
            below = inside & (order < 0)
            up_to = inside & (order <= 0)
            # How many probes are below the first suffix of the locus, and how many are not beyond its end.
            counts = tl.where(below & (for_end == 0), 1, 0) + tl.where(up_to & ((split == 0) | for_end), 1 << 16, 0)
            counts = tl.sum(counts, axis=1)
            before_first = counts & 0xFFFF
            before_end = counts >> 16
            low_shared = tl.maximum(low_shared, tl.max(tl.where(below, same, 0), axis=1))
            high_shared = tl.maximum(high_shared, tl.max(tl.where(inside & (order > 0), same, 0), axis=1))
            first_high = tl.minimum(end, low + (before_first + 1) * spacing - 1)
            low = tl.where(before_first > 0, low + before_first * spacing, low)
            high = tl.minimum(high, end_begin + (before_end + 1) * end_spacing - 1)
            end_low = tl.where(before_end > 0, end_begin + before_end * end_spacing, end_begin)
            open_places = tl.max(tl.maximum(first_high - low, high - end_low), axis=0)
    tl.store(loci + length * 2, tl.where(active, low, 0), mask=length < _LOCUS_LENGTHS)
    tl.store(loci + length * 2 + 1, tl.where(active, high, 0), mask=length < _LOCUS_LENGTHS)


@triton.jit(do_not_specialize=["row_stride", "row_count", "row_room", "namespace_count", "hit_room", "max_depth", "parts", "groups"])
def match_rows(
    arena: tensor, headers: tensor, namespace_count: tensor, control: tensor, pins: tensor,
    tokens: tensor, row_stride: tensor, row_count: tensor, row_room: tensor, lengths: tensor, rows: tensor, namespaces: tensor,
    records: tensor, loci: tensor, hits: tensor, hit_room: tensor, hit_counts: tensor, histograms: tensor, max_depth: tensor, parts: tensor,
    groups: tensor,
    USE_LOCAL: tl.constexpr, USE_CORPUS: tl.constexpr, PINNED: tl.constexpr,
    LENGTHS: tl.constexpr, PROBES: tl.constexpr, BLOCK: tl.constexpr, BACK: tl.constexpr,
) -> None:  # fmt: skip
    """One launch: program (row of the batch, task). `parts` tasks match locally, the others search.

    Args:
        arena, headers: see draftd.drafter.device_layout; headers int64 [namespaces, DEVICE_HEADER_WORDS].
        control: int64 [DEVICE_CONTROL_WORDS]; pins: int64 [PIN_WORDS], the reader's own; used if PINNED. Nothing of arena, headers and
            control is read while no row has a namespace and PIN_MAPPED is 0.
        tokens: int32 [row_count, row_stride]; row_room: most tokens of a row; lengths: int32 or int64 [row_count].
        rows: int32 or int64 [batch]; one outside the buffer is an empty row, and a length outside it counts as the nearest inside.
        namespaces: int32 [row_count]; one that there is not drafts from the row's own tokens only.
        records: int64 [batch, ROW_RECORD_WORDS], the first word zero; out: the version that all programs of a row read, and its words.
        loci: int32 [batch, 3, LOCUS_LENGTHS, 2]; out.
        hits: int32 [batch, 2, hit_room]; hit_counts: int32 [batch, 2], zeros; histograms: int32 [batch, 64], zeros; out; see
            local_matches.
        groups: groups of LENGTHS suffix lengths.
    """
    begin_after_previous()
    b = tl.program_id(0)
    task = tl.program_id(1)
    r = tl.load(rows + b).to(tl.int64)
    there = (r >= 0) & (r < row_count)
    r = tl.where(there, r, 0)
    n = tl.load(lengths + r)
    n = tl.where(there, tl.minimum(tl.maximum(n, 0), row_room), 0).to(tl.int32)
    row = tokens + r * row_stride
    longest = tl.minimum(max_depth, n) - 1
    record = records + b.to(tl.int64) * _RECORD_WORDS
    if PINNED:  # noqa: SIM102 (decided when compiled)
        if (b == 0) & (task == 0):
            pin(control, pins)
    if task == 0:
        tl.store(record + _RECORD_LENGTH, n.to(tl.int64))
        tl.store(record + _RECORD_TOKENS, r * row_stride)
    # The longest first: main, the row, then recent and live.
    part_of_row = task
    if USE_CORPUS:
        part_of_row = task - groups
    if USE_CORPUS & ((part_of_row < 0) | (part_of_row >= parts)):
        search = tl.where(part_of_row < 0, task, task - parts)
        namespace = tl.load(namespaces + r)
        if (namespace >= 0) & (namespace < namespace_count) & (longest > 0):
            version = tl.load(headers + namespace.to(tl.int64) * _HEADER_WORDS + _VERSION)
            segment = search // groups
            words = descriptor(headers, namespace, version)
            part = words + _SEGMENTS_START + segment * _SEGMENT_WORDS
            rule = tl.load(words + _BUCKET_RULE)
            suffixes = tl.load(part + _SUFFIXES)
            size = tl.load(part + _LENGTH)
            buckets = tl.load(part + _BUCKETS)
            text = tl.load(part + _TEXT)
            # The row's first program to come here decides; the words are on their way meanwhile.
            seen = tl.atomic_cas(record, tl.zeros_like(version), version, sem="relaxed")
            if (seen != 0) & (seen != version):
                version = seen
                words = descriptor(headers, namespace, version)
                part = words + _SEGMENTS_START + segment * _SEGMENT_WORDS
                rule = tl.load(words + _BUCKET_RULE)
                suffixes = tl.load(part + _SUFFIXES)
                size = tl.load(part + _LENGTH)
                buckets = tl.load(part + _BUCKETS)
                text = tl.load(part + _TEXT)
            if task == 0:
                word = tl.arange(0, _DESCRIPTOR_WORDS)
                tl.store(record + word, tl.load(words + word), mask=(word > 0) & (word < _RECORD_LENGTH))
                tl.store(record + _RECORD_HEADER, namespace.to(tl.int64) * _HEADER_WORDS)
            out = loci + (b.to(tl.int64) * _SEGMENTS + segment) * (_LOCUS_LENGTHS * 2)
            searched = tl.where((size > 0) & (version > 0), longest, 0)
            signs = tl.load(words + _SIGNS + segment)
            search_group(
                arena + suffixes,
                arena + text,
                arena + buckets,
                rule,
                (arena + signs).to(tl.pointer_type(tl.int64)),
                signs,
                row,
                n,
                searched,
                search % groups,
                out,
                LENGTHS,
                PROBES,
            )
    elif USE_LOCAL:  # noqa: SIM102 (decided when compiled)
        if longest > 0:
            local_matches(
                row, n, longest, part_of_row, hits + b.to(tl.int64) * 2 * hit_room, hit_room, hit_counts + b * 2,
                histograms + b * 64,
                parts, BLOCK, BACK,
            )  # fmt: skip
