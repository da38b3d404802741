"""An engine's row block beside the corpus that polls it, for tests of both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.params import DraftParams
from draftd.drafter.records import RowContext
from draftd.drafter.rows import RowBlock
from tests.drafter.bench import ints

PARAMS = DraftParams(k=8, max_depth=16, use_local=False, policy="tree")


@dataclass
class Engine:
    """An engine's block beside the corpus that polls it; `corpus.refresh` runs when the test says."""

    corpus: Corpus
    rows: RowBlock = field(init=False)

    def __post_init__(self) -> None:
        self.rows = RowBlock.open(self.corpus.rows.attach("engine", 2, 64, ["one", "two"]))

    def start(
        self, slot: int, document_id: str, prompt: list[int], output: Sequence[int] = (), namespace: int = 0, private: bool = False
    ) -> None:
        self.rows.start(slot, document_id, ints([*prompt, *output]), len(prompt), namespace, private)

    def held(self, namespace: str = "one") -> dict[str, list[int]]:
        """Committed documents."""
        return {d.document_id: d.tokens.tolist() for d in self.corpus.documents(namespace)}

    def drafted(self, row: list[int], namespace: str = "one") -> list[int]:
        """What follows `row` in the corpus."""
        return self.corpus.propose([RowContext(ints([99, *row]), namespace, False)], PARAMS).row(0)

    @property
    def errors(self) -> int:
        return self.corpus.rows.errors("engine")

    @staticmethod
    def beside_a_corpus() -> Engine:
        """An engine of two rows beside a corpus with the namespaces `one` and `two`, refreshed when the test says."""
        corpus = Corpus(CorpusConfig(depth=16, quota_tokens=4096, recent_tokens=512, live_tokens=512))
        corpus.ensure_namespace("one", 100)
        corpus.ensure_namespace("two", 100)
        return Engine(corpus)
