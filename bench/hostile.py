"""Does a service survive hostile callers? Malformed and hostile calls of every rpc over one connection, with an engine at work beside them.

Exits 1 if a call uncovered a defect (INTERNAL with an incident, UNKNOWN), if the engine or the corpus beside them changed, or if the
service's memory, open files, threads or shared memory went on growing.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench import service as measured
from bench.footprint import Footprint
from bench.hostile_calls import HostileCall, HostileCalls
from bench.machine import parser, report
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

IN_FLIGHT = 64
"""Calls at a time."""
GROWTH = Footprint(private_mib=48, shm_mib=64, shm_files=32, files=32, threads=16, children=0)
"""Most that the service may grow after the first fifth of the calls: namespaces and attachments come and go."""
CALL_TIMEOUT_S = 30.0
_CLIENT_WRITES_TOO_LATE = "Internal error from Core"
"""What gRPC's client makes of a stream that the service ended while the client was still sending."""
_KNOWN_ATTACHMENTS = 64
"""Attachments that are ended before the service is measured; it allows fewer at a time."""
ENGINE_EVERY = 200
"""Calls between two of the engine beside them."""
FLAGS = (
    *("--quota-tokens", "16384", "--recent-tokens", "4096", "--live-tokens", "4096", "--max-namespaces", "16"),
    *("--max-attachments", "16", "--max-rows", "64", "--max-length", "4096", "--max-batch", "64", "--lease-ms", "5000"),
    *("--visible-timeout-ms", "200", "--max-message-bytes", "262144", "--log-level", "error", "--log-format", "json"),
)
SENTINEL = list(range(100, 140))
"""What nothing hostile may change: the only document of a namespace that no hostile call names."""
EXACT = pb.DraftParameters(policy=pb.POLICY_TREE)
"""Of these drafts it is known what they must be; those of the other rule grow longer as it learns."""


@dataclass(slots=True)
class Outcome:
    """What came of the calls.

    Attributes:
        codes: Answers by status code; OK included.
        defects: Messages of answers that should not exist.
        wrong: What the engine beside them found wrong.
    """

    calls: int = 0
    seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    defects: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: Footprint | None = None
    after: Footprint | None = None

    @property
    def failures(self) -> list[str]:
        """Why the service did not survive; empty if it did."""
        assert self.before is not None
        assert self.after is not None
        found = [f"{count} times {defect}" for defect, count in self.defects.items()] + self.wrong
        return found + self.after.growth(self.before, GROWTH)


async def send(channel: aio.Channel, call: HostileCall) -> tuple[str, str, list[bytes]]:
    """Makes one call; its status code's name, its message, and the first answers."""
    answers: list[bytes] = []
    kind = f"{'stream' if call.client_streams else 'unary'}_{'stream' if call.server_streams else 'unary'}"
    multicallable: Any = getattr(channel, kind)(call.path)
    made = multicallable(_messages(call) if call.client_streams else call.messages[0], timeout=CALL_TIMEOUT_S)
    try:
        if call.server_streams:
            async for answer in made:
                answers.append(answer)
                if call.path.endswith("/Watch") or len(answers) == 8:
                    made.cancel()
                    break
        else:
            answers.append(await made)
    except aio.AioRpcError as error:
        return error.code().name, error.details() or "", answers
    except asyncio.CancelledError:
        if not made.cancelled():
            raise
    return "OK", "", answers


async def _messages(call: HostileCall) -> AsyncIterator[bytes]:
    for message in call.messages:
        yield message


class Bystander:
    """An engine whose request goes on, and a corpus that stays what it is, whatever others send."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=[("grpc.default_authority", "localhost")])
        self._stub: draftd_pb2_grpc.DrafterServiceStub = draftd_pb2_grpc.DrafterServiceStub(self._channel)
        packed = np.array(SENTINEL, "<i4").tobytes()
        document = pb.IngestDocument(document_id="sentinel", packed_tokens=packed, complete=True)
        self._stub.Ingest(pb.IngestRequest(namespace="sentinel", documents=[document], vocab_size=1000, wait_visible=True), timeout=60)
        attach = pb.AttachRequest(
            engine="bystander",
            namespace="sentinel",
            vocab_size=1000,
            k=8,
            max_rows=2,
            max_length=256,
            transport=pb.TRANSPORT_INLINE,
        )
        self._attachment = self._stub.Attach(attach, timeout=60).attachment_id
        self._steps = 0

    def step(self) -> str:
        """One step of the engine; what is wrong with its draft, or "" if nothing is."""
        length = 5 + self._steps % 20
        request = pb.Row(
            document_id=f"row-{self._steps // 20}",
            tokens=SENTINEL[:length] if length == 5 else SENTINEL[length - 1 : length],
            offset=0 if length == 5 else length - 1,
            prompt_length=5 if length == 5 else 0,
        )
        try:
            answer = self._stub.Propose(pb.ProposeRequest(attachment_id=self._attachment, rows=[request], parameters=EXACT), timeout=30)
            if length == 24:
                row = pb.HarvestRow(document_id=request.document_id, discard=True)
                self._stub.Harvest(pb.HarvestRequest(attachment_id=self._attachment, rows=[row]), timeout=30)
        except grpc.RpcError as error:
            return f"step {self._steps} of the engine was refused: {error.code().name}: {error.details()}"
        self._steps += 1
        drafted = list(answer.drafts[0].tokens)
        return "" if drafted == SENTINEL[length : length + 8] else f"step {self._steps} of the engine got {drafted}"

    def detach(self, attachments: list[str]) -> None:
        """Ends other attachments, of which some have ended already."""
        for attachment in attachments:
            try:
                self._stub.Detach(pb.DetachRequest(attachment_id=attachment), timeout=30)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise

    def close(self) -> str:
        """Looks at health a last time; what is wrong, or ""."""
        state = health_pb2_grpc.HealthStub(self._channel).Check(health_pb2.HealthCheckRequest(), timeout=30).status
        self._channel.close()
        return "" if state == health_pb2.HealthCheckResponse.SERVING else "health is not SERVING"


async def _attack(endpoint: str, calls: HostileCalls, outcome: Outcome, most: int, until: float) -> None:
    """Sends calls, IN_FLIGHT at a time, until there are `most` more or the monotonic clock says `until`."""
    end = outcome.calls + most

    async def sender(channel: aio.Channel) -> None:
        while outcome.calls < end and time.monotonic() < until:
            outcome.calls += 1
            call = next(calls)
            code, message, answers = await send(channel, call)
            outcome.codes[code] += 1
            if (code in ("UNKNOWN", "INTERNAL") and message != _CLIENT_WRITES_TOO_LATE) or len(message) > 2000:
                outcome.defects[f"{call.path} {code}: {message[:200]}"] += 1
            if call.path.endswith("/Attach") and answers:
                calls.attachments.append(pb.AttachResponse.FromString(answers[0]).attachment_id)
                del calls.attachments[:-_KNOWN_ATTACHMENTS]

    async with aio.insecure_channel(endpoint, options=[("grpc.default_authority", "localhost")]) as channel:
        await asyncio.gather(*(sender(channel) for _ in range(IN_FLIGHT)))


def attack(calls: int, seconds: float, seed: int) -> Outcome:
    """Makes up to `calls` calls in up to `seconds`, and measures the service after a fifth of them and at the end."""
    outcome = Outcome()
    shm = Path(tempfile.mkdtemp(prefix="draftd-hostile-", dir="/dev/shm"))
    try:
        with PrivateService([*FLAGS, "--shm-root", str(shm)]) as running:
            bystander = Bystander(running.endpoint)
            pid = measured.process_id(running.endpoint)
            supply = HostileCalls(seed, handles=[str(shm), str(shm / "none")])
            started = time.monotonic()
            for share, name in ((0.2, "before"), (1.0, "after")):
                until = started + share * seconds
                while outcome.calls < share * calls and time.monotonic() < until:
                    asyncio.run(_attack(running.endpoint, supply, outcome, ENGINE_EVERY, until))
                    if wrong := bystander.step():
                        outcome.wrong.append(wrong)
                        break
                bystander.detach(supply.attachments)
                # A refresh takes what they left.
                time.sleep(1.0)
                setattr(outcome, name, Footprint.of(pid, shm))
            outcome.seconds = time.monotonic() - started
            if wrong := bystander.close():
                outcome.wrong.append(wrong)
            errors = [line for line in running.log().splitlines() if '"level": "error"' in line]
            if errors:
                outcome.wrong.append(f"{len(errors)} errors in the log; the last: {errors[-1][-3000:]}")
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    return outcome


def main() -> int:
    """Prints the table; 1 if the service did not survive."""
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=int, default=1_000_000, help="most calls (default 1,000,000)")
    arguments.add_argument("--seconds", type=float, default=3600.0, help="longest time (default 3600)")
    arguments.add_argument("--seed", type=int, default=0, help="the same seed makes the same calls (default 0)")
    given = arguments.parse_args()
    outcome = attack(given.calls, given.seconds, given.seed)
    assert outcome.before is not None
    assert outcome.after is not None
    columns = ("calls", "calls/s", *(c for name in Footprint.__slots__ for c in (name, "then")), "survived")
    pairs = [getattr(f, name) for name in Footprint.__slots__ for f in (outcome.before, outcome.after)]
    failures = outcome.failures
    rows = [(outcome.calls, outcome.calls / outcome.seconds, *pairs, not failures)]
    notes = ["answers: " + ", ".join(f"{code} {count:,}" for code, count in outcome.codes.most_common()), *failures]
    report(f"Hostile calls of every rpc over one connection, {IN_FLIGHT} at a time", columns, rows, given.json, notes)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
