"""Where an index lies in device memory: one int32 arena for all arrays, in front of them a header a namespace with the versions in force.

A version's descriptor holds resolved offsets into the arena, so that a kernel reads the version, then the descriptor, and is ready.
"""

from __future__ import annotations

DEVICE_LAYOUT_VERSION = 5

# The arena begins with control words (int64) and the namespaces' headers.
DEVICE_CONTROL_WORDS = 64
DEVICE_EPOCH = 0
"""Counts publications over all namespaces; what readers pin."""

PIN_WORDS = 64
"""int64 words that one reader writes."""
PIN_EPOCH = 0
"""Epoch that the reader is drafting from, 0 while it is not drafting."""
PIN_MAPPED = 1
"""1 while there is a control block to read the epoch from; the reader's own."""
PIN_ROWS = 8
"""Rows of the batch that are done; the reader's own."""

SEGMENTS = 3
"""main, recent, live; the same order everywhere, from the oldest to the most recent."""

ALIGNMENT = 32
"""Arrays start at multiples of so many elements: 128 bytes."""

# Words of a namespace's header (int64).
DEVICE_HEADER_WORDS = 192
DEVICE_VERSION = 0
"""The version in force, from 1; 0 while the namespace has none. Its descriptor is `version % DEVICE_DESCRIPTORS`."""
DEVICE_RECLAIMED = 8
"""Versions up to this one may be overwritten at any time; what was read from them does not count."""
DEVICE_CALIBRATION = 16
"""Offset of the calibration in force in the arena, elements, which are float32; 0 if there is none."""
DEVICE_DESCRIPTORS_START = 64

DEVICE_DESCRIPTORS = 4
DEVICE_DESCRIPTOR_WORDS = 32
DD_VERSION = 0
DD_RING_START = 1
"""Position of the oldest committed text, from which recency is counted."""
DD_RING = 2
DD_BUCKET_RULE = 3
"""In the lowest 8 bits: by how many a token is shifted to its bucket; above: how many buckets there are."""
BUCKET_SHIFT_BITS = 8
DD_SEGMENTS = 4
"""First word of the segments' records."""
DD_SEGMENT_WORDS = 4
DD_SIGNS = 16
"""Offset of each segment's signs in the arena, elements; 0 if there are none."""
DS_SUFFIXES = 0
"""Offset of the suffix array in the arena, elements; positions count from the segment's text."""
DS_LENGTH = 1
DS_BUCKETS = 2
"""Offset of the first-token table."""
DS_TEXT = 3

SIGN_STRIDE = 32
"""Every so many-th suffix has a sign, its first tokens in one int64: a search reads suffixes and text in its last steps only."""
SIGN_TOKENS = 3
SIGN_BITS = 21

MAX_RING = 1 << 29
"""Largest ring, in tokens: segment and age of an occurrence share 31 bits."""

# What the first launch of a draft leaves for the second in each row's record (int64): the descriptor's words, and these.
ROW_RECORD_WORDS = 32
RECORD_LENGTH = 24
"""Tokens of the row."""
RECORD_TOKENS = 25
"""Offset of the row's tokens in the buffer, elements."""
RECORD_HEADER = 26
"""Offset of the namespace's header, in words from the first one."""
TORN = -1
"""Version of a draft whose index was overwritten meanwhile; nothing is drafted then."""

# A hit of local matching: where it ends, and how far it matches, in one int32.
HIT_LENGTH_BITS = 6
MAX_ROW_TOKENS = 1 << (31 - HIT_LENGTH_BITS)

LOCUS_LENGTHS = 65
"""Suffix lengths for which a row's loci are kept; entries 0 and 64 stay empty."""
