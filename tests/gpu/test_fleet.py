"""One service with a copy of the index on each of two GPUs: engines draft on theirs what those of the other have committed."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.device_count() < 2:
    pytest.skip("there are not two CUDA GPUs", allow_module_level=True)

from bench import service as measured  # noqa: E402
from draftd.client.device import DeviceSession  # noqa: E402
from draftd.drafter.params import DraftParams  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2 as pb  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2_grpc  # noqa: E402
from draftd.server.replay.service import PrivateService  # noqa: E402

FLAGS = (
    *("--device", "cuda:0,cuda:1", "--quota-tokens", "65536", "--recent-tokens", "8192", "--live-tokens", "8192"),
    *("--device-memory", "64", "--policy", "tree", "--log-level", "warning"),
)
VOCAB = 1000


class _Engine:
    def __init__(self, service: PrivateService, gpu: int) -> None:
        device = torch.device("cuda", gpu)
        self.tokens = torch.zeros((1, 256), dtype=torch.int32, device=device)
        self.lengths = torch.zeros(1, dtype=torch.int32, device=device)
        self.order = torch.zeros(1, dtype=torch.int32, device=device)
        self.session = DeviceSession(
            service.endpoint, engine=f"on-{gpu}", vocab_size=VOCAB, tokens=self.tokens, lengths=self.lengths, max_batch=1, strict=True,
            params=DraftParams(k=8, max_depth=24, policy="tree", use_local=False),
        )  # fmt: skip
        assert self.session.wait_attached(60), self.session.trouble

    def commit(self, text: list[int], name: str) -> None:
        self.session.start(0, text[:4], name)
        self.session.committed(0, text[4:])
        self.session.finish(0)

    def draft(self, context: list[int]) -> list[int]:
        self.tokens[0, : len(context)] = torch.tensor(context, dtype=torch.int32)
        self.lengths[0] = len(context)
        drafts = self.session.propose(self.order).numpy()
        return [int(token) for token in drafts.tokens[0, : drafts.counts[0]]]


def test_each_gpu_drafts_what_the_other_committed() -> None:
    with PrivateService(FLAGS, http=False) as service:
        engines = [_Engine(service, gpu) for gpu in (0, 1)]
        try:
            for of, to in ((0, 1), (1, 0)):
                text = [(37 * i + 11 * of) % VOCAB for i in range(60)]
                with torch.cuda.device(of):
                    engines[of].commit(text, f"of-{of}")
                with torch.cuda.device(to):
                    engines[to].session.start(0, text[20:26], f"asks-{to}")
                    deadline = time.monotonic() + 10
                    while engines[to].draft(text[20:26]) != text[26:34] and time.monotonic() < deadline:
                        time.sleep(0.01)
                    assert engines[to].draft(text[20:26]) == text[26:34]
                    engines[to].session.finish(0, discard=True)
        finally:
            for engine in engines:
                engine.session.close()


def test_service_drafts_as_each_engine_does_for_callers_without_a_gpu() -> None:
    with PrivateService(FLAGS, http=False) as service:
        engine = _Engine(service, 1)
        text = [(41 * i) % VOCAB for i in range(60)]
        with torch.cuda.device(1):
            engine.commit(text, "text")
            assert engine.session.wait_visible(10)
            engine.session.start(0, text[20:26], "asks")
            mapped = engine.draft(text[20:26])
        with measured.channel(service.endpoint) as opened:
            parameters = pb.DraftParameters(k=8, max_depth=24, use_local=False, policy=pb.POLICY_TREE)
            request = pb.ProposeRequest(rows=[pb.Row(tokens=text[20:26])], parameters=parameters)
            answer = draftd_pb2_grpc.DrafterServiceStub(opened).Propose(request, timeout=30)
        assert list(answer.drafts[0].tokens) == mapped == text[26:34]
        engine.session.close()
