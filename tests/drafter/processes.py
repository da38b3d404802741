"""A writer that never pauses and readers in processes of their own, and how to tell afterwards what each version held.

Documents are made from their number, so that a version is described by a few numbers and nobody has to believe the index's text.
"""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.index import Version
from draftd.drafter.layout import BlockSpec
from draftd.drafter.ops.draft.oracle import Stretch
from draftd.drafter.params import DraftParams
from draftd.drafter.reader import IndexReader, TornRead
from draftd.drafter.rows import RowBlock
from tests.drafter.bench import ints

NAME = "shared"
VOCABULARY = 16
DEPTH = 16
CONFIG = CorpusConfig(depth=DEPTH, quota_tokens=1024, recent_tokens=192, live_tokens=512)
PARAMS = (
    DraftParams(k=8, max_depth=DEPTH, spec_factor=1.0, policy="tree"),
    DraftParams(k=12, max_depth=DEPTH, spec_factor=4.0, min_token_prob=0.2, use_local=False, policy="tree"),
)

Part = tuple[int, int, int, int]
"""A stretch: document number, first token, one past the last, indexed positions."""


@cache
def document(number: int) -> list[int]:
    """Document `number`: pieces of a few refrains with some tokens changed, 1 to 90 tokens long."""
    rng = random.Random(number)
    refrains = [[(7 * r + i * i) % VOCABULARY for i in range(30)] for r in range(5)]
    tokens: list[int] = []
    for _ in range(rng.randint(1, 3)):
        tokens += rng.choice(refrains)
    return [rng.randrange(VOCABULARY) if rng.random() < 0.08 else t for t in tokens][: rng.randint(1, 90)]


def stretches(parts: list[Part]) -> list[Stretch]:
    """The corpus that the parts describe."""
    return [Stretch(document(number)[start:stop], indexed) for number, start, stop, indexed in parts]


class Feeder:
    """Feeds a namespace of a corpus without a thread, and tells of each version what it holds before it is published."""

    def __init__(self, corpus: Corpus, tell: Callable[[int, list[Part]], None]) -> None:
        self._corpus = corpus
        corpus.ensure_namespace(NAME, VOCABULARY)
        space = corpus._namespaces[NAME]
        self.index, self.documents, self.segments = space.index, space.documents, space.segments
        self.last_document = 0
        self._random = random.Random(1)
        self._open: dict[int, int] = {}
        publish = self.index.publish

        def told(version: Version) -> Version:
            tell(self.index.current.number + 1, self._parts())
            return publish(version)

        self.index.publish = told  # type: ignore[method-assign]

    def _parts(self) -> list[Part]:
        placed = [p for p in self.documents.pieces if p.offset + p.indexed <= p.document.placed]
        parts = [(int(p.document.id), p.offset, p.offset + p.size - 1, p.indexed) for p in placed]
        pending = [d for d in self.documents.pending.values() if d.length > d.placed]
        return parts + [(int(d.id), d.placed, d.length, d.length - d.placed) for d in pending]

    def step(self) -> None:
        """Grows open documents, ends and begins some, unless much is waiting; then refreshes."""
        waiting = sum(d.length - d.placed + 1 for d in self.documents.pending.values())
        if waiting < CONFIG.live_tokens - 100:
            while len(self._open) < 4:
                self.last_document += 1
                self._open[self.last_document] = 0
            for number, at in list(self._open.items()):
                text = document(number)
                more = text[at : at + self._random.randint(0, 12)]
                ended = at + len(more) == len(text)
                self._corpus.ingest(NAME, str(number), at, ints(more), ended)
                self._open[number] = at + len(more)
                if ended:
                    del self._open[number]
        self._corpus.refresh()
        assert self.segments.live_overflows == 0
        assert self._corpus.refresh_errors == 0


class Record(NamedTuple):
    """A draft: the version it came from, the row, which parameters, and what was answered."""

    version: int
    row: list[int]
    params: int
    tokens: list[int]
    probabilities: list[float]
    source: int
    match_length: int
    occurrences: int


def read(
    control: BlockSpec, index: BlockSpec, rows: BlockSpec, seed: int, last: Any, stop: Event, ready: Event, out: str, wanted: int
) -> None:
    """A reader: drafts without pause until `stop` is set, and writes what it noted to `out` as (records, drafts, torn reads).

    Args:
        last: Shared number of the newest document.
        wanted: About how many drafts to note; they are spread over the whole time.
    """
    rng = random.Random(seed)
    block = RowBlock.open(rows)
    reader = IndexReader.open(control, {NAME: index}, block)
    slots = np.arange(4, dtype=np.int32)
    records: list[Record] = []
    drafts = torn = 0
    begun = 0.0
    while not stop.is_set():
        contexts = []
        for slot in slots.tolist():
            text = document(max(1, last.value - rng.randrange(40)))
            end = rng.randint(0, len(text))
            contexts.append((document(rng.randrange(50)) + text[:end])[-rng.randint(1, 40) :])
            block.start(slot, f"row-{slot}", ints(contexts[-1]), 0, 0, private=True)
        which = rng.randrange(len(PARAMS))
        try:
            got = reader.propose(slots, None, PARAMS[which])
        except TornRead:
            torn += 1
            continue
        if not begun:
            begun = time.monotonic()
            ready.set()
        drafts += len(slots)
        if len(records) < wanted * (time.monotonic() - begun) / 30:
            i = rng.randrange(len(slots))
            answer = (got.row(i), got.probabilities[i, : got.counts[i]].tolist())
            where = (int(got.source[i]), int(got.match_length[i]), int(got.occurrences[i]))
            records.append(Record(int(got.version[i]), contexts[i], which, *answer, *where))
    Path(out).write_bytes(pickle.dumps((records, drafts, torn)))


def write(specs: Connection, told: Connection, last: Any) -> None:
    """A writer that runs until it is killed: sends the specs of its blocks, then of each version what it holds."""
    corpus = Corpus(CONFIG)
    feeder = Feeder(corpus, lambda number, parts: told.send((number, parts)))
    specs.send((corpus.control_spec(), corpus.index_spec(NAME), corpus.rows.attach("reader", 4, 64, [NAME])))
    while True:
        feeder.step()
        last.value = feeder.last_document
