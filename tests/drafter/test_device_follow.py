"""Headers that follow a namespace: what drafts from it must never draft from another that got its header."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.corpus import Corpus  # noqa: E402
from draftd.drafter.corpus_config import CorpusConfig  # noqa: E402
from draftd.drafter.device_indexes import DeviceIndexes  # noqa: E402


def test_followers_have_the_header_of_their_namespace_and_no_other() -> None:
    config = CorpusConfig(quota_tokens=1024, recent_tokens=256, live_tokens=256, device_memory_bytes=8 << 20, max_namespaces=2)
    indexes = DeviceIndexes(config, "cpu")
    corpus = Corpus(config, indexes=indexes)
    mine, other_vocabulary, gone = (torch.full((3,), 7, dtype=torch.int32) for _ in range(3))
    indexes.follow("mine", 100, mine)
    indexes.follow("mine", 99, other_vocabulary)
    indexes.follow("mine", 100, gone)
    assert mine.tolist() == [-1] * 3
    corpus.ensure_namespace("first", 100)
    corpus.ensure_namespace("mine", 100)
    assert mine.tolist() == gone.tolist() == [1] * 3
    assert other_vocabulary.tolist() == [-1] * 3
    indexes.unfollow(gone)
    corpus.drop_namespace("mine")
    assert mine.tolist() == [-1] * 3
    assert gone.tolist() == [1] * 3
    corpus.ensure_namespace("stranger", 100)
    assert mine.tolist() == [-1] * 3
    corpus.drop_namespace("first")
    corpus.ensure_namespace("mine", 100)
    assert mine.tolist() == [0] * 3
    corpus.close()
