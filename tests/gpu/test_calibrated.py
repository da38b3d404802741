"""The compiled kernels of the rule `calibrated`: every state of a draft is the oracle's, and drafts of real text are nearly the CPU's."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from bench import workload  # noqa: E402
from draftd.drafter import policy  # noqa: E402
from draftd.drafter.device import DeviceDrafts  # noqa: E402
from draftd.drafter.device_calibrated import DeviceCalibrated, DeviceLessons  # noqa: E402
from draftd.drafter.ops.calibrated import oracle  # noqa: E402
from draftd.drafter.ops.calibrated.cpu_mixer import VOTE_CELLS, VOTE_COUNT, VOTE_TOKENS  # noqa: E402
from draftd.drafter.ops.calibrated.gpu_levels import HELD  # noqa: E402
from draftd.drafter.ops.calibrated.oracle import Corpus, Document  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from tests.drafter.calibrated import draft, lay_out  # noqa: E402
from tests.drafter.test_calibrated import scene  # noqa: E402
from tests.gpu.calibrated_cases import Rows, check_draft, on_device, propose  # noqa: E402


@pytest.mark.parametrize("seed", range(24))
def test_every_state_is_the_oracles(seed: int) -> None:
    vocab = (40, 300, 2000)[seed % 3]
    documents, rows, calibration, recent_from, live_from = scene(seed, 12, vocab, 60)
    rows = [row for row in rows if len(row) > 24 and max(Counter(row).values()) <= HELD]
    while max(Counter(t for d in documents for t in d.tokens).values()) > HELD:
        documents.pop()
    params = DraftParams(k=12, tau=(0.0, 0.2)[seed // 2 % 2], use_local=seed % 7 != 3, use_corpus=seed % 7 != 5)
    index = on_device(documents, recent_from, live_from, vocab, "cuda")
    corpus = Corpus(documents)
    lesson = propose(index, rows, calibration, params)
    for r, row in enumerate(rows):
        check_draft(lesson, r, row, corpus, calibration, params)


def test_a_frequent_suffix_is_sampled() -> None:
    rng = np.random.default_rng(0)
    followers = rng.choice([11, 12, 13, 14], 900, p=[0.55, 0.3, 0.1, 0.05]).tolist()
    index = on_device([Document([], [1, f, 5]) for f in followers], 500, 800, 20, "cuda")
    lesson = propose(index, [[7, 1]], policy.blank_calibration(), DraftParams(k=2, tau=0.0, use_local=False))
    ints = lesson.ints[0, 0]
    votes = dict(zip(ints[VOTE_TOKENS:][: ints[VOTE_COUNT]].tolist(), ints[VOTE_CELLS:][: ints[VOTE_COUNT]].tolist(), strict=True))
    wanted = [oracle.vote(1, 0, 0, 11, followers.count(11), 900, kind).fine for kind in (0, 1)]
    assert votes[11] in wanted
    assert lesson.drafts.occurrences[0] == 900


def test_drafts_of_answers_are_nearly_the_cpus() -> None:
    """Real text, where suffixes are too frequent to follow all of their occurrences: few drafts begin otherwise."""
    work = workload.make(200_000, 96)
    documents = [Document([], d.tolist()) for d in work.documents]
    cut = len(documents)
    params = DraftParams(k=16)
    calibration = policy.shipped_prior()
    contexts = [c.tolist() for c in work.contexts]
    expected = draft(lay_out(documents, cut - 30, cut - 8, workload.VOCABULARY), calibration, contexts, k=16, tau=params.tau)
    got = propose(on_device(documents, cut - 30, cut - 8, workload.VOCABULARY, "cuda"), contexts, calibration, params).drafts
    assert (got.tokens[:, 0] == expected.tokens[:, 0]).mean() > 0.95
    agreed = np.cumprod((got.tokens == expected.tokens) & (expected.tokens >= 0), axis=1).sum()
    assert agreed > 0.9 * expected.counts.sum()
    same = (got.tokens[:, 0] == expected.tokens[:, 0]) & (expected.counts > 0)
    assert np.abs(got.probabilities[:, 0] - expected.survival[:, 0])[same].mean() < 0.02


def test_captured_graph_reads_what_is_in_force() -> None:
    documents, rows, calibration, _, _ = scene(1, 8, 300, 60)
    rows = [row for row in rows if len(row) > 24]
    index = on_device(documents, 3, 6, 300, "cuda")
    params = DraftParams(k=8, tau=0.0)
    buffer = Rows.of(rows, "cuda")
    table = torch.from_numpy(calibration.copy()).cuda()
    drafter = DeviceCalibrated(
        index.arena, index.headers, max_batch=len(rows), max_row_tokens=buffer.tokens.shape[1], params=params,
        searches=64, doubt=1.0, search_tokens=0, prior=table,
    )  # fmt: skip
    out, lessons = DeviceDrafts.empty(len(rows), params.k, "cuda"), DeviceLessons.empty(len(rows), params.k, "cuda")

    def call() -> None:
        drafter.propose(buffer.tokens, buffer.lengths, buffer.order, buffer.namespaces, out, lessons)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
        index.publish(index.current)
    graph.replay()
    assert (out.numpy().version == index.current.number).all()
    changed = calibration[::-1].copy()
    changed[:] = policy.blank_calibration()
    table.copy_(torch.from_numpy(changed))
    graph.replay()
    lesson = lessons.numpy(out.numpy())
    for r, row in enumerate(rows):
        check_draft(lesson, r, row, Corpus(documents), changed, params)
