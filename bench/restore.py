"""How fast does a corpus come back after a kill? Start to ready with a store of some size, what of it is restoring, and what it costs.

The service is killed with SIGKILL once all is on disk, and started again; kernels are in the cache. Exits 1 if any size takes more than
10 seconds from the process's start until it drafts from the restored corpus.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from pathlib import Path

from bench import service
from bench.machine import parser, report
from bench.workload import VOCABULARY, make
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

LIMIT_S = 10.0
_QUOTA = 16_777_216


def drafts(endpoint: str, context: list[int]) -> int:
    """Tokens that the service drafts from its corpus alone."""
    request = pb.ProposeRequest(rows=[pb.Row(tokens=context)], parameters=pb.DraftParameters(use_local=False))
    with service.channel(endpoint) as opened:
        return len(draftd_pb2_grpc.DrafterServiceStub(opened).Propose(request, timeout=10).drafts[0].tokens)


def main() -> int:
    """Prints the table; 1 if a size takes too long."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 4_000_000], help="sizes of the corpus")
    given = arguments.parse_args()
    rows: list[tuple[object, ...]] = []
    worst = 0.0
    for tokens in given.tokens:
        documents = make(tokens, 1).documents
        with (
            tempfile.TemporaryDirectory(prefix="draftd-bench-") as data,
            PrivateService(["--data-dir", data, "--quota-tokens", str(_QUOTA)]) as running,
        ):
            started = time.perf_counter()
            service.fill(running.endpoint, documents)
            with service.channel(running.endpoint) as opened:
                last = pb.IngestDocument(document_id="last", packed_tokens=documents[0].tobytes(), complete=True)
                request = pb.IngestRequest(documents=[last], vocab_size=VOCABULARY, wait_durable=True)
                draftd_pb2_grpc.DrafterServiceStub(opened).Ingest(request, timeout=60)
            fill_s = time.perf_counter() - started
            running.kill()
            size = sum(file.stat().st_size for file in Path(data).iterdir())
            started = time.perf_counter()
            running.start()
            drafted = drafts(running.endpoint, documents[-1][:8].tolist())
            serve_s = time.perf_counter() - started
            restored = re.search(r"\(([\d,]+) documents, ([\d,]+) tokens restored in ([\d.]+) s\)", running.log())
            if not restored or not drafted:
                raise SystemExit("the corpus did not come back")
            held = int(restored[2].replace(",", ""))
            rows.append((held, int(restored[1].replace(",", "")), fill_s, size / held, float(restored[3]), serve_s))
            worst = max(worst, serve_s)
    columns = ("tokens", "documents", "filling over gRPC, s", "bytes on disk a token", "restoring, s", "start to first draft, s")
    report("A service with a store is killed and started again", columns, rows, given.json)
    return int(worst > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
