"""HANDLE on a GPU, with real processes: drafts as over INLINE, forged handles, and either side killed while the other waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from bench import service as measured  # noqa: E402
from draftd.client.device_handle import DeviceHandle, FinishedRow, HandleDrafts  # noqa: E402
from draftd.client.wire import parameters_message  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2 as pb  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2_grpc  # noqa: E402
from draftd.server.replay.service import PrivateService  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--device", "cuda", "--quota-tokens", "262144", "--recent-tokens", "16384", "--live-tokens", "16384", "--device-memory", "256"),
    *("--policy", "tree", "--lease-ms", "3000", "--log-level", "warning"),
)
VOCAB, ROWS, LENGTH, BATCH = 1000, 12, 256, 8
PARAMS = DraftParams(k=8, max_depth=24, policy="tree")
_MS = 1_700_000
"""Cycles of the GPU in about a millisecond."""

Stub = draftd_pb2_grpc.DrafterServiceStub


def _stub(service: PrivateService) -> Any:
    return Stub(grpc.insecure_channel(service.endpoint))


def _fill(service: PrivateService) -> list[list[int]]:
    """Commits documents of few tokens, which have much in common."""
    rng = np.random.default_rng(5)
    documents = [(rng.zipf(1.6, 120) % 40).tolist() for _ in range(60)]
    sent = [pb.IngestDocument(document_id=f"d{i}", tokens=document, complete=True) for i, document in enumerate(documents)]
    _stub(service).Ingest(pb.IngestRequest(documents=sent, vocab_size=VOCAB, wait_visible=True), wait_for_ready=True, timeout=60)
    return documents


@pytest.fixture(scope="module")
def service() -> Iterator[PrivateService]:
    with PrivateService(FLAGS, http=False) as running:
        _fill(running)
        yield running


class _Engine:
    """An engine in this process, with random rows."""

    def __init__(
        self, service: PrivateService, name: str, timeout_ms: float = 1000.0, rows: int = ROWS, length: int = LENGTH,
        params: DraftParams = PARAMS,
    ) -> None:  # fmt: skip
        self.params = params
        rng = np.random.default_rng(len(name))
        self.host = (rng.zipf(1.6, (rows, length)) % 40).astype(np.int32)
        self.tokens = torch.from_numpy(self.host).cuda()
        self.lengths = torch.from_numpy(rng.integers(20, 200, rows).astype(np.int32)).cuda()
        self.handle = DeviceHandle(
            service.endpoint, engine=name, vocab_size=VOCAB, tokens=self.tokens, lengths=self.lengths, k=8, max_batch=BATCH,
            params=params, timeout_ms=timeout_ms,
        )  # fmt: skip
        _wait(lambda: self.handle.attached, lambda: str(self.handle.trouble))

    def rows(self, *rows: int) -> Any:
        return torch.tensor(rows, device="cuda")

    def inline(self, service: PrivateService, rows: list[int]) -> list[pb.Draft]:
        """What the service answers for the rows as they are."""
        tokens, lengths = self.tokens.cpu().numpy(), self.lengths.cpu().numpy()
        sent = [pb.Row(tokens=tokens[row, : lengths[row]].tolist()) for row in rows]
        request = pb.ProposeRequest(rows=sent, parameters=parameters_message(self.params))
        return list(_stub(service).Propose(request, wait_for_ready=True, timeout=60).drafts)


def _wait(condition: Callable[[], bool], what: Callable[[], str] = str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what()}"
        time.sleep(0.01)


def _passes(timeout_s: float = 20.0) -> float:
    """Waits until the current stream has done what it was given, and answers the seconds; never for ever."""
    done = torch.cuda.current_stream().record_event()
    started = time.monotonic()
    _wait(done.query, lambda: "the stream is stuck", timeout_s)
    return time.monotonic() - started


def _check(drafts: HandleDrafts, expected: list[pb.Draft]) -> int:
    """Compares bit for bit; answers how many tokens were drafted."""
    got = [column.cpu().numpy() for column in drafts]
    for i, draft in enumerate(expected):
        count = int(got[2][i])
        assert got[0][i, :count].tolist() == list(draft.tokens)
        assert got[0][i, count:].tolist() == [-1] * (8 - count)
        assert got[1][i, :count].tolist() == list(draft.probabilities)
        assert (got[3][i], got[4][i], got[5][i]) == (draft.source, draft.match_length, draft.occurrences)
    return int(got[2].sum())


@pytest.mark.parametrize("params", [PARAMS, DraftParams(k=8, tau=0.02)], ids=["tree", "calibrated"])
def test_drafts_equal_inline(service: PrivateService, params: DraftParams) -> None:
    engine = _Engine(service, f"equal-{params.policy}", params=params)
    drafted = 0
    for rows in ([3], [1, 2, 5], [0, 4, 7, 8, 9], list(range(3, 11))):
        drafts = engine.handle.propose(engine.rows(*rows))
        _passes()
        drafted += _check(drafts, engine.inline(service, rows))
    assert drafted > 20
    assert engine.handle.given_up == 0
    drafts = engine.handle.propose(engine.rows(2, -1, 500, 2))
    _passes()
    assert drafts.counts.tolist()[1:3] == [0, 0]
    assert drafts.tokens[0].tolist() == drafts.tokens[3].tolist()
    engine.handle.close()


def test_each_step_is_drafted_from_what_the_stream_wrote_before(service: PrivateService) -> None:
    """Steps follow one another without the host waiting for any of them."""
    engine = _Engine(service, "steps")
    rows = engine.rows(*range(BATCH))
    kept, states = [], []
    for step in range(60):
        torch.cuda._sleep(_MS)
        engine.lengths[:BATCH] = 20 + 3 * step % 170
        engine.tokens[:BATCH, step] = step % 7
        drafts = engine.handle.propose(rows)
        kept.append(HandleDrafts(*(column.clone() for column in drafts)))
        states.append((engine.tokens.clone(), engine.lengths.clone()))
        if step % 2:
            # At most a step ahead, as engines are.
            _passes()
    _passes()
    for drafts, (tokens, lengths) in zip(kept[::7], states[::7], strict=True):
        engine.tokens.copy_(tokens)
        engine.lengths.copy_(lengths)
        _check(drafts, engine.inline(service, list(range(BATCH))))
    assert engine.handle.given_up == 0
    engine.handle.close()


def _attach(service: PrivateService, tensors: pb.EngineTensors, name: str = "forger") -> tuple[str, str]:
    request = pb.AttachRequest(
        engine=name, vocab_size=VOCAB, k=8, max_rows=BATCH, max_length=LENGTH, transport=pb.TRANSPORT_HANDLE, tensors=tensors
    )
    try:
        _stub(service).Attach(request)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _on_tokens(message: pb.EngineTensors) -> None:
    message.draft_tokens.handle, message.draft_tokens.offset = message.tokens.handle, message.tokens.offset
    message.draft_tokens.allocation_bytes = message.tokens.allocation_bytes


def _behind_the_end(message: pb.EngineTensors) -> None:
    message.draft_info.offset = message.draft_info.allocation_bytes


def _twice_as_large(message: pb.EngineTensors) -> None:
    message.tokens.allocation_bytes *= 2


def _elsewhere(message: pb.EngineTensors) -> None:
    message.device_uuid = "0" * 32


def _repeated(message: pb.EngineTensors) -> None:
    """As another attachment has them."""


_CHANGES: dict[str, Callable[[pb.EngineTensors], None]] = {
    change.__name__: change for change in (_on_tokens, _behind_the_end, _twice_as_large, _elsewhere, _repeated)
}


def _forgeries(good: pb.EngineTensors, stale: str) -> Iterator[tuple[str, pb.EngineTensors]]:
    rng = np.random.default_rng(3)
    handle = bytes.fromhex(good.tokens.handle)
    handles = {"stale": stale, "zeros": "00" * 64} | {f"random {i}": rng.bytes(64).hex() for i in range(20)}
    for i in range(64):
        handles[f"byte {i}"] = (handle[:i] + bytes([handle[i] ^ 0x41]) + handle[i + 1 :]).hex()
    for name, forged in handles.items():
        message = pb.EngineTensors()
        message.CopyFrom(good)
        message.tokens.handle = forged
        yield name, message
    for name, change in _CHANGES.items():
        message = pb.EngineTensors()
        message.CopyFrom(good)
        change(message)
        yield name, message


_DIES = """
import torch, ctypes
from draftd.drafter import cuda_memory
t = torch.zeros(1 << 22, dtype=torch.int32, device="cuda")
print(ctypes.string_at(cuda_memory.call("cuIpcGetMemHandle", t.data_ptr()).getPtr(), 64).hex())
"""


def test_forged_handles_cost_their_sender_an_error(service: PrivateService) -> None:
    stale = subprocess.run([sys.executable, "-c", _DIES], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    engine = _Engine(service, "honest")
    good = engine.handle._session._tensors
    assert good is not None
    for name, message in _forgeries(good, stale):
        code, details = _attach(service, message)
        assert code == "INVALID_ARGUMENT", (name, code, details)
        assert details.startswith("tensors."), (name, details)
        assert "CUDA_ERROR" not in details
    drafts = engine.handle.propose(engine.rows(1, 2))
    _passes()
    assert _check(drafts, engine.inline(service, [1, 2])) > 0
    engine.handle.close()


def test_engine_that_frees_its_tensors_harms_nobody(service: PrivateService) -> None:
    # So many that they have an allocation of their own, which is freed with them.
    frees, other = _Engine(service, "frees", rows=512, length=16384), _Engine(service, "other")
    frees.tokens.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    drafts = frees.handle.propose(frees.rows(1))
    _passes()
    assert drafts.counts.shape == (1,)
    drafts = other.handle.propose(other.rows(4))
    _passes()
    _check(drafts, other.inline(service, [4]))
    frees.handle.close()
    other.handle.close()


def test_harvest_reads_a_row_before_it_is_used_anew(service: PrivateService) -> None:
    engine = _Engine(service, "harvest")
    text = torch.arange(500, 560, dtype=torch.int32, device="cuda")
    torch.cuda._sleep(100 * _MS)
    engine.tokens[6, :60] = text
    answer = engine.handle.harvest([FinishedRow(6, "harvested", 60, 20)], wait_visible=True)
    _wait(answer.done)
    engine.tokens[6].fill_(1)
    assert [(r.kept_tokens, r.committed) for r in answer.result().results] == [(40, True)]
    engine.tokens[7, :5] = text[29:34]
    engine.lengths[7] = 5
    drafts = engine.handle.propose(engine.rows(7))
    _passes()
    assert drafts.tokens[0].tolist() == list(range(534, 542))
    engine.handle.close()


def _child(service: PrivateService, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.handle_engine", service.endpoint, name]
    child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "attached\n"
    return child


def test_engine_killed_with_work_pending_harms_nobody(service: PrivateService) -> None:
    engine, child = _Engine(service, "survivor"), _child(service, "victim")
    assert child.stdin is not None
    assert child.stdout is not None
    print(file=child.stdin, flush=True)
    assert child.stdout.readline() == "pending\n"
    time.sleep(0.1)
    child.kill()
    child.wait(20)
    for _ in range(30):
        drafts = engine.handle.propose(engine.rows(1, 5))
        _passes()
        _check(drafts, engine.inline(service, [1, 5]))
    # The name is free again when the lease has ended, and so is what the service had mapped.
    again = _child(service, "victim")
    again.kill()
    again.wait(20)
    assert engine.handle.given_up == 0
    engine.handle.close()


def _waits_in_vain(engine: _Engine, act: Callable[[], None]) -> None:
    """A step during which `act` keeps the service from drafting, after it has said that it will: the stream goes on without drafts."""
    before = engine.handle.given_up
    # A copy from the host would wait for the stream.
    rows = engine.rows(3)
    torch.cuda._sleep(300 * _MS)
    drafts = engine.handle.propose(rows)
    time.sleep(0.05)
    act()
    assert _passes() < 5
    assert (drafts.counts.tolist(), drafts.tokens.unique().tolist()) == ([0], [-1])
    assert engine.handle.given_up == before + 1


def _drafts_again(engine: _Engine, service: PrivateService) -> None:
    _wait(lambda: engine.handle.attached)
    drafts = engine.handle.propose(engine.rows(3))
    _passes()
    assert _check(drafts, engine.inline(service, [3])) > 0


def test_engine_goes_on_when_the_service_is_stopped_or_killed_while_it_waits() -> None:
    own = PrivateService(FLAGS, http=False)
    own.start()
    try:
        _fill(own)
        engine = _Engine(own, "goes-on", timeout_ms=50)
        _drafts_again(engine, own)
        _waits_in_vain(engine, lambda: own.signal(signal.SIGSTOP))
        own.signal(signal.SIGCONT)
        time.sleep(0.2)
        _drafts_again(engine, own)
        _waits_in_vain(engine, own.kill)
        _wait(lambda: not engine.handle.attached)
        assert engine.handle.propose(engine.rows(3)).counts.tolist() == [0]
        own.spawn()
        own.wait_ready()
        _fill(own)
        _drafts_again(engine, own)
        engine.handle.close()
    finally:
        own.stop()


def test_memory_after_many_attachments_is_that_after_the_first(service: PrivateService) -> None:
    used = []
    for i in range(12):
        engine = _Engine(service, f"again-{i}")
        engine.handle.propose(engine.rows(1))
        _passes()
        engine.handle.close()
        del engine
        torch.cuda.empty_cache()
        used.append([measured.device_mib(pid) for pid in (measured.process_id(service.endpoint), os.getpid())])
    assert all(0 < last <= second + 4 for last, second in zip(used[-1], used[1], strict=True)), used
