"""A DeviceSession whose GPU is Triton's interpreter: memory of this process stands in for what a service hands out."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu uses it", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from draftd.client.device import session as module  # noqa: E402
from draftd.client.device.memory import Received  # noqa: E402
from draftd.client.device.session import DeviceSession  # noqa: E402
from draftd.client.frames import Frames  # noqa: E402
from draftd.client.helper import Helper  # noqa: E402
from draftd.client.helper_process import HelperProcess  # noqa: E402
from draftd.drafter import policy  # noqa: E402
from draftd.drafter.corpus import Corpus  # noqa: E402
from draftd.drafter.corpus_config import CorpusConfig  # noqa: E402
from draftd.drafter.cuda_memory import CudaError  # noqa: E402
from draftd.drafter.device import DeviceDrafts  # noqa: E402
from draftd.drafter.device_indexes import DeviceIndexes  # noqa: E402
from draftd.drafter.device_layout import DEVICE_CONTROL_WORDS, DEVICE_HEADER_WORDS, PIN_EPOCH, PIN_MAPPED, PIN_WORDS  # noqa: E402
from draftd.drafter.errors import InvalidArgument  # noqa: E402
from draftd.drafter.lessons import Learned  # noqa: E402
from draftd.drafter.params import DraftParams, Policy  # noqa: E402
from draftd.proto.draftd.v1 import draftd_pb2 as pb  # noqa: E402

CONFIG = CorpusConfig(quota_tokens=256, depth=16, recent_tokens=64, live_tokens=64, max_namespaces=2, device_memory_bytes=2**20)
TEXT = [7 * i % 50 for i in range(50)]


class Memory:
    """Stands in for MappedMemory: what it maps is a copy.

    Attributes:
        source: The memory that a service has handed out. meanwhile: Called while nothing is mapped.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.meanwhile: Callable[[], object] = lambda: None
        self.pins = torch.zeros(PIN_WORDS, dtype=torch.int64)
        self.words, self.headers, self.control = self._index()
        self.empty = self._index()

    def _index(self) -> tuple[Any, Any, Any]:
        words = torch.zeros_like(self.source)
        head = words[: 2 * (DEVICE_CONTROL_WORDS + CONFIG.max_namespaces * DEVICE_HEADER_WORDS)].view(torch.int64)
        return words, head[DEVICE_CONTROL_WORDS:].view(-1, DEVICE_HEADER_WORDS), head[:DEVICE_CONTROL_WORDS]

    def receive(self, _: pb.DeviceMap) -> Received:
        return Received({"default": 0}, [])

    def replace(self, _: object) -> None:
        # Whoever reads this reads nonsense.
        self.words.fill_(0x5A5A5A5A)
        self.meanwhile()
        self.words.copy_(self.source)


class InThread(HelperProcess):
    """A helper in a thread of this process.

    Attributes:
        helper: It.
    """

    helper: Helper

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._socket = ours
        logger = logging.getLogger("draftd")
        own = list(logger.handlers)
        self.helper = Helper(theirs, self._block, self._greet(), Frames())
        # Here it would forward what it has forwarded.
        logger.handlers = own

        def run() -> None:
            self.helper.run(os.getppid())
            theirs.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        process = SimpleNamespace(pid=0, poll=lambda: None if thread.is_alive() else 0, wait=lambda _: thread.join(), kill=lambda: None)
        self._process = cast("subprocess.Popen[bytes]", process)
        return ours


@pytest.fixture
def corpus() -> Iterator[tuple[Corpus, DeviceIndexes]]:
    indexes = DeviceIndexes(CONFIG, "cpu")
    corpus = Corpus(CONFIG, indexes=indexes)
    corpus.ensure_namespace("default", 100)
    corpus.ingest("default", "text", 0, np.array(TEXT, np.int32), True)
    corpus.refresh()
    yield corpus, indexes
    corpus.close()


class Engine:
    """Three rows of an engine."""

    def __init__(self, policy: Policy, k: int = 4) -> None:
        self.tokens = torch.zeros((3, 64), dtype=torch.int32)
        self.lengths = torch.zeros(3, dtype=torch.int32)
        self.session = DeviceSession(
            "unix:/tmp/nobody.sock", engine="here", vocab_size=100, tokens=self.tokens, lengths=self.lengths, max_batch=3,
            params=DraftParams(k=k, policy=policy, max_depth=16, tau=0.0),
        )  # fmt: skip

    def start(self, row: int, tokens: list[int], private: bool = False) -> None:
        self.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.lengths[row] = len(tokens)
        self.session.start(row, tokens, private=private)

    def draft(self) -> list[list[int]]:
        drafts = self.session.propose(torch.arange(3, dtype=torch.int32)).numpy()
        return [drafts.row(row) for row in range(3)]


@pytest.fixture(params=get_args(Policy))
def engine(request: pytest.FixtureRequest, corpus: tuple[Corpus, DeviceIndexes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    stream = SimpleNamespace(synchronize=lambda: None)
    for name, stands_in in {
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "Stream": lambda _: stream,
        "current_stream": lambda _: stream,
        "synchronize": lambda _: None,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    monkeypatch.setattr(module, "MappedMemory", lambda _: Memory(corpus[1].memory.words))
    monkeypatch.setattr(module, "HelperProcess", InThread)
    engine = Engine(request.param)
    yield engine
    engine.session.close()


def test_rows_draft_from_their_own_tokens_until_an_index_is_mapped(engine: Engine) -> None:
    own = [90, 91, 92, 93, 94, 90, 91]
    engine.start(0, own)
    engine.start(1, TEXT[10:15])
    engine.start(2, TEXT[10:15], private=True)
    assert engine.draft() == [[92, 93, 94, 90], [], []]
    seen: list[list[list[int]]] = []
    memory = cast(Memory, engine.session.memory)
    memory.meanwhile = lambda: seen.append(engine.draft())
    engine.session.remap(pb.DeviceMap())
    assert seen == [[[92, 93, 94, 90], [], []]], "while others are mapped, drafts come from the rows' own tokens"
    assert engine.draft() == [[92, 93, 94, 90], TEXT[15:19], []]
    assert (memory.pins[PIN_MAPPED], memory.pins[PIN_EPOCH]) == (1, 0), "a draft that is done pins nothing"
    engine.session.finish(1)
    engine.start(1, TEXT[20:25])
    assert engine.draft()[1] == TEXT[25:29]


def test_mapping_that_fails_leaves_rows_their_own_tokens(engine: Engine) -> None:
    engine.start(0, TEXT[10:15])
    engine.session.remap(pb.DeviceMap())
    assert engine.draft()[0] == TEXT[15:19]
    memory = cast(Memory, engine.session.memory)

    def fail() -> None:
        memory.words.zero_()
        raise RuntimeError("the stream is capturing")

    memory.meanwhile = fail
    with pytest.raises(OSError, match="the stream is capturing"):
        engine.session.remap(pb.DeviceMap())
    assert engine.draft()[0] == []
    memory.meanwhile = lambda: None
    engine.session.remap(pb.DeviceMap())
    assert engine.draft()[0] == TEXT[15:19]


def test_wrong_calls_are_counted_and_reach_nobody(engine: Engine) -> None:
    engine.session.remap(pb.DeviceMap())
    ragged: Any = [[1], [1, 2]]
    no_row: Any = None

    class Broken:
        def __array__(self, *_: object, **__: object) -> Any:
            raise RuntimeError("no array")

    odd: Any = Broken()
    two: Any = np.zeros(2)
    calls: list[Callable[[], object]] = [
        lambda: engine.session.start(0, odd),
        lambda: engine.session.start(0, [1, 2], odd),
        lambda: engine.session.start(0, [1, 2], two),
        lambda: engine.session.start(0, [1, 2], namespace=[]),  # type: ignore[arg-type]
        lambda: engine.session.start(0, [1, 2], prompt_length=odd),
        lambda: engine.session.start(odd, [1, 2]),
        lambda: engine.session.start(True, [1, 2]),
        lambda: engine.session.preempt(True),
        lambda: engine.session.finish(0, odd),
        lambda: engine.session.committed(0, [odd]),
        lambda: engine.session.start(0, ragged),
        lambda: engine.session.start(9, [1, 2]),
        lambda: engine.session.start(no_row, [1, 2]),
        lambda: engine.session.committed(0, ragged),
        lambda: engine.session.finish(-1),
        lambda: engine.session.preempt(2),
    ]
    for number, call in enumerate(calls):
        call()
        deadline = time.monotonic() + 20
        while engine.session.stats.fail_opens.sum() <= number and time.monotonic() < deadline:
            time.sleep(0.005)
        assert engine.session.stats.fail_opens.tolist() == [0, 0, number + 1, 0, 0, 0, 0], "refused"
    engine.start(1, TEXT[10:15])
    assert engine.draft()[1] == TEXT[15:19]
    assert engine.session.helper_restarts == 0
    rows = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="rows has 4 rows; at most 3"):
        engine.session.collect(rows, DeviceDrafts.empty(4, 4, "cpu"))


def test_wrong_arguments_are_refused() -> None:
    tokens, lengths = torch.zeros((2, 8), dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def make(tokens: Any = tokens, lengths: Any = lengths, params: DraftParams | None = None) -> DeviceSession:
        return DeviceSession("unix:/x", engine="e", vocab_size=10, tokens=tokens, lengths=lengths, max_batch=2, params=params)

    wrong: list[tuple[str, Callable[[], DeviceSession]]] = [
        ("tokens", lambda: make(tokens=tokens.long())),
        ("tokens", lambda: make(tokens=tokens.t())),
        ("lengths", lambda: make(lengths=lengths[:1])),
        ("lengths", lambda: make(lengths=lengths.float())),
        ("params.branches", lambda: make(params=DraftParams(branches=2))),
    ]
    for field, call in wrong:
        with pytest.raises(InvalidArgument, match=field):
            call()
    with pytest.raises(CudaError, match="cpu is no GPU"):
        make()


def test_what_drafts_teach_goes_to_the_namespace_of_their_row(engine: Engine) -> None:
    learned = {"default": Learned.in_process()}
    engine.session.remap(pb.DeviceMap())
    cast(InThread, engine.session._helper).helper.learn_into(learned)
    for row, private in ((0, False), (1, True)):
        engine.start(row, TEXT[:10], private=private)
    rows = torch.arange(3, dtype=torch.int32)
    for length in (10, 13, 16):
        engine.lengths[:2] = length
        engine.tokens[:2, :length] = torch.tensor(TEXT[:length], dtype=torch.int32)
        engine.session.collect(rows, engine.session.propose(rows))
    deadline = time.monotonic() + 60
    while engine.session.stats.drafted.sum() < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.session.stats.drafted.sum() == 4, "a draft is counted when the one after it is settled"
    taken = learned["default"].take()
    if engine.session.params.policy == "tree":
        assert taken is None
    else:
        assert taken is not None
        assert taken[policy.DECILES_AT : policy.BRIER_AT].sum() > 0
