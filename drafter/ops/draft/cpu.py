"""The draft rule `tree` on the CPU, for a batch of rows of one namespace.

Suffix lengths are taken in the order of the longest draft they may give, and the search ends when no other one can score higher; of what
ends it early nothing changes the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from draftd.drafter.ops.intrinsics import int32_pointer
from draftd.drafter.ops.kernel import kernel
from draftd.drafter.ops.local.cpu import FEW_HITS, count_followers, known_chain, local_chain, matches
from draftd.drafter.ops.search.cpu import child, locus, run_end, run_start

_SEGMENTS = 3
_RECENT_SCAN = 32
"""Occurrences up to which a tie between next tokens looks for the most recent one."""


@kernel
def draft_limits(k: int, max_depth: int, spec_factor: float, spec_offset: float, caps: Any, order: Any) -> int:
    """Fills caps[L], the most tokens a match of L tokens may give, and `order`, the lengths by falling cap, longer first.

    Args:
        caps: int32 [max_depth]; out.
        order: int32 [max_depth]; out.

    Returns:
        How many lengths may give a draft.
    """
    for length in range(1, max_depth):
        cap = int(np.float64(np.float32(length) * np.float32(spec_factor) + np.float32(spec_offset)) + 1e-6)
        caps[length] = max(0, min(k, min(cap, max_depth - length)))
    count = 0
    for cap in range(k, 0, -1):
        for length in range(max_depth - 1, 0, -1):
            if caps[length] == cap:
                order[count] = length
                count += 1
    return count


@kernel
def _latest(main: Any, recent: Any, live: Any, lows: Any, highs: Any, ring_start: int, ring: int) -> Any:
    """How recent the most recent occurrence in three intervals is; comparable over intervals of one index."""
    latest = np.int64(-1)
    if lows[2] < highs[2]:
        for i in range(lows[2], highs[2]):
            latest = max(latest, np.int64(live[i]))
        return latest + (np.int64(2) << 40)
    segment = 1 if lows[1] < highs[1] else 0
    array = recent if segment == 1 else main
    for i in range(lows[segment], highs[segment]):
        age = array[i] - ring_start
        if age < 0:
            age += ring
        latest = max(latest, np.int64(age))
    return latest + (np.int64(segment) << 40)


@kernel
def best_child(
    text: Any, main: Any, recent: Any, live_text: Any, live: Any, ring_start: int, ring: int,
    lows: Any, highs: Any, offset: int, min_share: Any, scratch: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The most frequent continuation of a locus, if its share of all occurrences is at least `min_share`.

    A next token with that share has it in some segment too, where its run (continuations are sorted) is long enough that evenly spaced
    samples cannot miss it; runs are then measured exactly. Of equal counts up to 32 the most recent occurrence wins, of larger ones
    the smaller token.

    Args:
        lows, highs: int64 [3]; the locus in main, recent and live.
        offset: Tokens of the locus.
        scratch: int64 [4, 3]; out: rows 0 and 1 hold the continuation's locus.

    Returns:
        The token and its count; (-1, 0) if there is none.
    """
    best, best_count = -1, np.int64(0)
    best_latest = np.int64(-2)
    for segment in range(_SEGMENTS):
        low, high = lows[segment], highs[segment]
        if low == high:
            continue
        array = main if segment == 0 else (recent if segment == 1 else live)
        words = live_text if segment == 2 else text
        others = highs[0] - lows[0] + highs[1] - lows[1] + highs[2] - lows[2] - (high - low)
        stride = max(1, int(np.float64(min_share) * (high - low) * 0.999))
        at = low
        while at < high:
            token = words[array[at] + offset]
            end = run_end(words, array, at, high, offset, token)
            if end == at:
                end = at + 1
            first = at if stride == 1 else run_start(words, array, low, at, offset, token)
            at = end + stride - 1
            if token < 0 or token == best or end - first + others < best_count:
                continue
            count = np.int64(0)
            for other in range(_SEGMENTS):
                if other == segment:
                    a, b = first, end
                elif lows[other] == highs[other]:
                    a, b = lows[other], lows[other]
                elif other == 2:
                    a, b = child(live_text, live, lows[2], highs[2], offset, token)
                else:
                    a, b = child(text, main if other == 0 else recent, lows[other], highs[other], offset, token)
                scratch[2, other], scratch[3, other] = a, b
                count += b - a
            better = count > best_count
            latest = np.int64(-2)
            if count == best_count and best >= 0:
                if count <= _RECENT_SCAN:
                    latest = _latest(main, recent, live, scratch[2], scratch[3], ring_start, ring)
                    if best_latest == -2:
                        best_latest = _latest(main, recent, live, scratch[0], scratch[1], ring_start, ring)
                    better = latest > best_latest
                else:
                    better = token < best
            if better:
                best, best_count, best_latest = token, count, latest
                scratch[0, :] = scratch[2, :]
                scratch[1, :] = scratch[3, :]
    return best, best_count


@kernel
def _corpus_chain(
    text: Any, main: Any, recent: Any, live_text: Any, live: Any, ring_start: int, ring: int,
    lows: Any, highs: Any, length: int, cap: int, min_prob: Any, scratch: Any, tokens: Any, probs: Any,
) -> tuple[int, Any]:  # fmt: skip
    """Follows the most frequent continuation of a locus of `length` tokens; `lows` and `highs` are destroyed."""
    prob = np.float32(1.0)
    score = np.float32(0.0)
    drafted = 0
    while drafted < cap:
        total = highs[0] - lows[0] + highs[1] - lows[1] + highs[2] - lows[2]
        if total == 0:
            break
        if total == 1:
            if lows[2] < highs[2]:
                words, at = live_text, live[lows[2]]
            elif lows[1] < highs[1]:
                words, at = text, recent[lows[1]]
            else:
                words, at = text, main[lows[0]]
            at += length + drafted
            while drafted < cap:
                token = words[at]
                if token < 0:
                    break
                tokens[drafted] = token
                probs[drafted] = prob
                score += prob
                drafted += 1
                at += 1
            break
        share = min_prob / prob
        token, count = best_child(
            text, main, recent, live_text, live, ring_start, ring, lows, highs, length + drafted, share, scratch
        )  # fmt: skip
        if count == 0:
            break
        prob = prob * (np.float32(count) / np.float32(total))
        if prob < min_prob:
            break
        tokens[drafted] = token
        probs[drafted] = prob
        score += prob
        drafted += 1
        lows[:] = scratch[0]
        highs[:] = scratch[1]
    return drafted, score


@kernel
def _locate(
    text: Any, main: Any, main_length: int, buckets: Any, shift: int, recent: Any, recent_length: int, live_text: Any, live: Any,
    live_length: int, row: Any, n: int, length: int, limits: Any, sizes: Any, lows: Any, highs: Any,
) -> int:  # fmt: skip
    """Finds the locus of row[n - length : n] in each segment, unless sizes[length] >= 0 says that it was found before.

    limits[2] is a length from which on `live` has none. Answers the size of the locus.
    """
    if sizes[length] >= 0:
        return sizes[length]
    start = n - length
    total = 0
    lows = lows[length]
    highs = highs[length]
    for segment in range(_SEGMENTS):
        lows[segment] = 0
        highs[segment] = 0
        if length >= limits[segment]:
            continue
        if segment == 0:
            bucket = row[start] >> shift
            if bucket < 0 or bucket + 1 >= len(buckets):
                a, b = 0, 0  # No token of this vocabulary.
            else:
                a, b = locus(text, main, buckets[bucket], min(buckets[bucket + 1], main_length), row, start, length)
        elif segment == 1:
            a, b = locus(text, recent, 0, recent_length, row, start, length)
        else:
            a, b = locus(live_text, live, 0, live_length, row, start, length)
        if a == b and segment == 2:
            # Only here: where a document goes on in another segment, its shorter suffixes may be there and its longer ones here.
            limits[segment] = length
        lows[segment] = a
        highs[segment] = b
        total += b - a
    sizes[length] = total
    return total


@kernel
def draft_rows(
    addresses: Any, row_lengths: Any, use_corpus: Any, use_local: bool,
    text: Any, main: Any, main_length: int, buckets: Any, shift: int, recent: Any, recent_length: int, live_text: Any, live: Any,
    live_length: int, ring_start: int, ring: int,
    k: int, max_depth: int, spec_factor: float, spec_offset: float, min_token_prob: float, longest_row: int,
    out_tokens: Any, out_probs: Any, out_counts: Any, out_source: Any, out_match: Any, out_occurrences: Any,
) -> None:  # fmt: skip
    """Drafts for rows of one namespace.

    Args:
        addresses: int64 [n]; address of each row's int32 tokens.
        row_lengths: int64 [n]; tokens of each row.
        use_corpus: bool [n]; False drafts from the row's own tokens only.
        text, main, buckets, recent, live_text, live: The index's arrays (see draftd.drafter.layout), current copies.
        ring_start: Position of the oldest text; ring: size of the ring, tokens.
        longest_row: max(row_lengths).
        out_tokens: int32 [n, k], filled with -1; out_probs: float32 [n, k], zeros; the other outputs: int32 [n], zeros.
    """
    caps = np.zeros(max_depth, np.int32)
    order = np.zeros(max_depth, np.int32)
    lengths_to_try = draft_limits(k, max_depth, spec_factor, spec_offset, caps, order)
    min_prob = np.float32(min_token_prob)
    ends = np.empty(longest_row + 1, np.int32)
    sorted_ends = np.empty(longest_row + 1, np.int32)
    current = np.empty(longest_row + 1, np.int32)
    lengths = np.empty(longest_row + 1, np.int32)
    at_least = np.zeros(max_depth + 2, np.int64)
    table_size = 64
    while table_size < 2 * (longest_row + 1):
        table_size *= 2
    table = np.empty((1 if longest_row < FEW_HITS else table_size, 3), np.int64)
    tokens = np.empty(k, np.int32)
    probs = np.empty(k, np.float32)
    known_tokens = np.empty(k, np.int32)
    followers = np.empty((max_depth + 1, k + 2), np.int64)
    scratch = np.zeros((4, 3), np.int64)
    sizes = np.empty(max_depth, np.int64)
    lows = np.zeros((max_depth, 3), np.int64)
    highs = np.zeros((max_depth, 3), np.int64)
    limits = np.zeros(3, np.int64)

    for r in range(len(addresses)):
        n = row_lengths[r]
        if n == 0:
            continue
        row = carray(int32_pointer(addresses[r]), (n,))
        longest = min(max_depth, n) - 1
        best_score = np.float32(0.0)
        best_length = 0

        if use_local and n > 1:
            found = matches(row, n, longest, ends, lengths)
            # Sort by matching length, longest first: the occurrences of every suffix length are then a prefix.
            at_least[:] = 0
            for i in range(found):
                at_least[lengths[i]] += 1
            for length in range(longest - 1, 0, -1):
                at_least[length] += at_least[length + 1]
            if found > 0:
                for i in range(found):
                    length = lengths[i]
                    # at_least[length + 1] counts the longer ones; it is restored below.
                    at_least[length] -= 1
                    sorted_ends[at_least[length]] = ends[i]
                for i in range(found):
                    at_least[lengths[i]] += 1
            seen_size, seen_cap = np.int64(-1), -1
            known = 0
            for o in range(lengths_to_try):
                length = order[o]
                cap = caps[length]
                if cap < best_score or (cap == best_score and length < best_length):
                    break
                if length > longest or at_least[length] == 0:
                    continue
                size = at_least[length]
                if size == seen_size and cap <= seen_cap and length < best_length:
                    continue
                drafted, score = -1, np.float32(0.0)
                if known > 0:
                    drafted, score = known_chain(followers, length, cap, min_prob, known, probs)
                    tokens[: max(drafted, 0)] = known_tokens[: max(drafted, 0)]
                if drafted < 0:
                    drafted, score = local_chain(row, n, sorted_ends, size, cap, min_prob, current, table, tokens, probs)
                    if size > FEW_HITS and drafted > 0:
                        known = drafted
                        known_tokens[:drafted] = tokens[:drafted]
                        count_followers(row, n, ends, lengths, found, known_tokens, known, longest, followers)
                seen_size, seen_cap = size, cap
                if drafted > 0 and (score > best_score or (score == best_score and length > best_length)):
                    best_score = score
                    best_length = length
                    out_tokens[r, :] = -1
                    out_probs[r, :] = 0
                    out_tokens[r, :drafted] = tokens[:drafted]
                    out_probs[r, :drafted] = probs[:drafted]
                    out_counts[r] = drafted
                    out_source[r] = 1
                    out_match[r] = length
                    out_occurrences[r] = size + 1

        if not use_corpus[r]:
            continue
        # Own tokens go before the corpus: a corpus draft must score higher.
        floor = best_score
        best_length = 0
        lowest, highest = 0, longest
        limits[:] = longest + 1
        sizes[:] = -1
        last, same_from = 0, 0
        for o in range(lengths_to_try):
            length = order[o]
            cap = caps[length]
            if cap <= floor or cap < best_score or (cap == best_score and length < best_length):
                break
            if length > highest or same_from <= length < last:
                continue
            size = _locate(
                text, main, main_length, buckets, shift, recent, recent_length, live_text, live, live_length,
                row, n, length, limits, sizes, lows, highs,
            )  # fmt: skip
            if size == 0:
                # Nothing this long: halve down to the longest length that occurs.
                highest = length - 1
                while lowest < highest:
                    middle = (lowest + highest + 1) >> 1
                    size = _locate(
                        text, main, main_length, buckets, shift, recent, recent_length, live_text, live, live_length,
                        row, n, middle, limits, sizes, lows, highs,
                    )  # fmt: skip
                    if size > 0:
                        lowest = middle
                    else:
                        highest = middle - 1
                continue
            lowest = max(lowest, length)
            if length < last and size == sizes[last]:
                # It occurs where the longer suffix does and nowhere else: no better draft. How far down is that so?
                same_from, other = length, 0
                while same_from - other > 1:
                    middle = (same_from + other) >> 1
                    size = _locate(
                        text, main, main_length, buckets, shift, recent, recent_length, live_text, live, live_length,
                        row, n, middle, limits, sizes, lows, highs,
                    )  # fmt: skip
                    if size == sizes[last]:
                        same_from = middle
                    else:
                        other = middle
                continue
            last, same_from = length, length
            drafted, score = _corpus_chain(
                text, main, recent, live_text, live, ring_start, ring,
                lows[length], highs[length], length, cap, min_prob, scratch, tokens, probs,
            )  # fmt: skip
            if drafted > 0 and score > floor and (score > best_score or (score == best_score and length > best_length)):
                best_score = score
                best_length = length
                out_tokens[r, :] = -1
                out_probs[r, :] = 0
                out_tokens[r, :drafted] = tokens[:drafted]
                out_probs[r, :drafted] = probs[:drafted]
                out_counts[r] = drafted
                out_source[r] = 2
                out_match[r] = length
                out_occurrences[r] = size
