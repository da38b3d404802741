"""The two small launches around a draft: which rows of vLLM's batch to draft for, and the drafts as vLLM wants them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import tensor


@triton.jit(do_not_specialize=["batch", "padded"])
def pick_rows(
    slots: tensor, num_sampled: tensor, drafted_for: tensor, batch: tensor, padded: tensor, rows: tensor, row_slots: tensor,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the row to draft for of each place in the batch: -1 where nothing was sampled, as in a chunk of a prompt that is not its last.

    Args:
        slots: int64 [batch]; row of vLLM's request state of each request.
        num_sampled: int32 [batch]; tokens that this step sampled for it.
        drafted_for: int32 [rows]; 0 for rows that take no drafts.
        batch: Requests; padded: places to write, at least as many.
        rows: int32 [padded], written; row_slots: int32 [padded], written: the row of every request, 0 beyond them.
        BLOCK: Places of one program.
    """
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < batch
    slot = tl.load(slots + places, mask=inside, other=-1).to(tl.int32)
    sampled = tl.load(num_sampled + places, mask=inside, other=0)
    taken = tl.load(drafted_for + slot, mask=inside & (slot >= 0), other=0)
    tl.store(rows + places, tl.where((sampled > 0) & (taken != 0), slot, -1), mask=places < padded)
    tl.store(row_slots + places, tl.maximum(slot, 0), mask=places < padded)


@triton.jit
def spread_drafts(
    tokens: tensor, probabilities: tensor, counts: tensor, row_slots: tensor, last_sampled: tensor, vocab_size: tensor, drafts: tensor,
    confidences: tensor, K: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Writes a batch's drafts with every place filled, and what each token is worth given those before it.

    vLLM verifies K tokens of every request and looks each of them up, so an unused place takes the last sampled token, as with its own
    speculator; and it multiplies confidences itself, while draftd's probabilities are of a token and all before it.

    Args:
        tokens: int32 [batch, K]; probabilities: float32 [batch, K]; counts: int32 [batch]; see DeviceDrafts.
        row_slots: int32 [batch]; see `pick_rows`.
        last_sampled: int64 [rows]; vocab_size: tokens are below it.
        drafts: int64 [batch, K], written; confidences: float32 [batch, K], written: 0 for unused places.
        LANES: K or the next power of two.
    """
    place = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    at = place * K + lanes
    count = tl.minimum(tl.load(counts + place), K)
    used = lanes < count
    token = tl.load(tokens + at, mask=used, other=-1)
    survival = tl.load(probabilities + at, mask=used, other=0.0)
    before = tl.load(probabilities + at - 1, mask=used & (lanes > 0), other=1.0)
    last = tl.load(last_sampled + tl.load(row_slots + place))
    good = used & (token >= 0) & (token < vocab_size)
    worth = tl.where(good & (before > 0.0), tl.minimum(survival / tl.maximum(before, 1e-30), 1.0), 0.0)
    tl.store(drafts + at, tl.where(good, token.to(tl.int64), last), mask=lanes < K)
    tl.store(confidences + at, worth, mask=lanes < K)
