"""Where the client of HANDLE on a GPU puts what it shares; the rest needs a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftd.client.device_handle import DeviceHandle, HandleDrafts, Places  # noqa: E402
from draftd.drafter.errors import InvalidArgument  # noqa: E402


@given(max_batch=st.integers(1, 40), k=st.integers(1, 64))
def test_what_is_shared_is_aligned_and_apart(max_batch: int, k: int) -> None:
    places = Places.of(max_batch, k)
    starts = [places.row_indices, places.draft_tokens, places.draft_probabilities, places.draft_info, places.draft_stamp, places.size]
    sizes = [max_batch, max_batch * k, max_batch * k, 4 * max_batch, 1]
    assert all(start % 4 == 0 for start in starts)
    assert all(starts[i] + size <= starts[i + 1] for i, size in enumerate(sizes))


@given(max_batch=st.integers(1, 9), k=st.integers(1, 9))
def test_drafts_are_read_where_the_service_writes_them(max_batch: int, k: int) -> None:
    places = Places.of(max_batch, k)
    shared = torch.arange(places.size, dtype=torch.int32)
    drafts = HandleDrafts.of(shared[places.draft_tokens : places.draft_stamp], max_batch, k)
    assert drafts.tokens[0, 0] == places.draft_tokens
    assert drafts.tokens.is_contiguous()
    assert drafts.probabilities.view(torch.int32)[max_batch - 1, k - 1] == places.draft_probabilities + max_batch * k - 1
    columns = [drafts.counts, drafts.source, drafts.match_length, drafts.occurrences]
    assert [column[0].item() for column in columns] == [places.draft_info + i * max_batch for i in range(4)]
    assert [column.shape[0] for column in drafts.first(1)] == [1] * 6


@pytest.mark.parametrize(
    ("tokens", "lengths", "field"),
    [
        (torch.zeros((2, 8), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), "tokens"),
        (torch.zeros((2, 8), dtype=torch.int64), torch.zeros(2, dtype=torch.int32), "tokens"),
        (torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), "tokens"),
    ],
)
def test_tensors_that_cannot_be_shared_are_refused(tokens: object, lengths: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        DeviceHandle("unix:/nowhere", engine="e", vocab_size=9, tokens=tokens, lengths=lengths, max_batch=2)
    assert raised.value.field == field
