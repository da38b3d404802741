"""Sorting and merging on the GPU in Triton's interpreter, at tiny sizes: what the oracle gives, without a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
# Read when triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="triton is not installed")

from draftd.drafter.ops.merge import gpu as merge_gpu  # noqa: E402
from draftd.drafter.ops.merge import oracle as merge_oracle  # noqa: E402
from draftd.drafter.ops.sort import gpu as sort_gpu  # noqa: E402
from draftd.drafter.ops.sort import oracle as sort_oracle  # noqa: E402
from tests.drafter.texts import MAX_TOKEN, corpora, flat  # noqa: E402

DEPTHS = st.one_of(st.integers(1, 8), st.just(64))
FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles and blocks so small that tiny texts have several of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sort_gpu, "_LOG_TILE", 2)
        patch.setattr(sort_gpu, "_MANY", 1)
        patch.setattr(merge_gpu, "_GROUP", 8)
        patch.setattr(merge_gpu, "_BLOCK", 16)
        yield


def _ints(values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@FEW
@given(texts=corpora(max_documents=4), depth=DEPTHS, data=st.data())
def test_positions_in_the_order_of_the_oracle(texts: list[list[int]], depth: int, data: st.DataObject) -> None:
    text, positions = flat(texts, depth)
    chosen = data.draw(st.permutations(positions)) if data.draw(st.booleans()) else positions
    chosen = chosen[: data.draw(st.integers(0, len(chosen)))] if data.draw(st.booleans()) else chosen
    vocab = max((t for document in texts for t in document), default=0) + 1 if data.draw(st.booleans()) else MAX_TOKEN + 1
    expected = sort_oracle.sort_suffixes(text, chosen, depth)
    assert sort_gpu.sort_positions(_ints(text), _ints(chosen), depth, vocab).tolist() == expected


@FEW
@given(texts=corpora(max_documents=4), depth=DEPTHS, before=st.integers(0, 9), known=st.booleans())
@example(texts=[[0] * 24], depth=5, before=0, known=True)
@example(texts=[[*range(11)], [5], [*range(11)], [4]], depth=64, before=0, known=True)
@example(texts=[[7, 7, 7, 7, 2], [7, 7, 7, 7, 3]], depth=8, before=2, known=True)
@example(texts=[[4, 3, 1, 2], [1, 2], [3, 1, 2]], depth=64, before=1, known=False)
def test_whole_texts_in_the_order_of_the_oracle(texts: list[list[int]], depth: int, before: int, known: bool) -> None:
    text, positions = flat(texts, depth)
    length = len(text) - depth - 1
    expected = sort_oracle.sort_suffixes(text, positions, depth)
    assert sort_gpu.sort_text(_ints(text), length, depth, len(positions) if known else None).tolist() == expected
    # The last separator may be left out.
    assert sort_gpu.sort_text(_ints(text), max(0, length - 1), depth).tolist() == expected
    # In a longer text, not all of them, and the last not at a document's end.
    chosen = [p + before for p in positions[: len(positions) - before % 3 : 1 + before % 2]]
    text = [*range(before - 1), -1, *text] if before else text
    span = (chosen[0], chosen[-1] + 1) if chosen else None
    assert sort_gpu.sort_positions(_ints(text), _ints(chosen), depth, span=span).tolist() == sort_oracle.sort_suffixes(text, chosen, depth)


@FEW
@given(texts=corpora(max_documents=4), depth=DEPTHS, narrow=st.booleans(), data=st.data())
def test_merge_is_the_oracle(texts: list[list[int]], depth: int, narrow: bool, data: st.DataObject) -> None:
    """The evicted stretch may wrap around the ring's end."""
    text, positions = flat(texts, depth)
    ring = len(text)
    start = data.draw(st.integers(0, ring - 1))
    length = data.draw(st.integers(0, ring)) if data.draw(st.booleans()) else 0
    evicted = {p for p in range(ring) if (p - start) % ring < length}
    is_new = data.draw(st.lists(st.booleans(), min_size=len(positions), max_size=len(positions)))
    new = sort_oracle.sort_suffixes(text, [p for p, n in zip(positions, is_new, strict=True) if n and p not in evicted], depth)
    old = sort_oracle.sort_suffixes(text, [p for p in positions if p not in new], depth)
    buckets, shift = None, 0
    if narrow:
        shift = 14
        buckets = torch.zeros((MAX_TOKEN >> shift) + 2, dtype=torch.int32)
        merge_gpu.fill_buckets(_ints(text), _ints(old), shift, buckets)
        assert buckets.tolist() == [sum(text[p] >> shift < b for p in old) for b in range(len(buckets) - 1)] + [len(old)]
    expected = merge_oracle.merge(text, old, new, evicted, depth)
    out = _ints([-7] * (len(expected) + 1))
    merge_gpu.merge(
        _ints(text), _ints(old), _ints(new), out,
        depth=depth, buckets=buckets, shift=shift, evict_start=start, evict_length=length, ring=ring,
    )  # fmt: skip
    assert out.tolist() == [*expected, -7]
