"""What do two vLLM replicas gain that share a draftd? Tokens a second of real vLLM and a small real model on one GPU, greedy, 256 tokens.

One draftd; replicas A and B draft from it; two more have no speculation and vLLM's own `ngram_gpu`. Needs vLLM 0.33, a GPU and a model.
Exits 1 where B gains less than it must on what only A has served, loses more than it may on what nobody has, an output differs where
numbers do not depend on the batch, the two counts of accepted tokens differ by more than 1 %, or a kill is noticed by somebody else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from bench.machine import parser, report
from bench.prompts import prompts, templates
from bench.service import channel
from bench.vllm_table import ADAPTIVE, ADAPTIVE_TREE, COLD, NGRAM, NONE, SERVED, TREE, TWICE, Table
from bench.vllm_worker import COUNTERS
from draftd.client.config import MAX_EXTRA_NAMESPACES
from draftd.client.wire import pack
from draftd.drafter.documents import LEAD_TOKENS
from draftd.proto.draftd.v1 import draftd_pb2 as pb
from draftd.proto.draftd.v1 import draftd_pb2_grpc
from draftd.server.replay.service import PrivateService

PROMPTS = {1: 6, 16: 32, 64: 88}
"""Prompts of a run, by batch size; those of a round are all different."""
LEARNED_FROM = 48
"""Prompts that a round begins with, for a namespace to be in use when it is measured."""
VARIANTS = {"tree": (TREE, "tree", False), "adaptive": (ADAPTIVE, "calibrated", True), "adaptive-tree": (ADAPTIVE_TREE, "tree", True)}
"""Replicas that stand in B's place: what the table calls them, their rule, and whether they verify adaptively."""
COUNTS_APART = 0.01
VISIBLE_S = 0.5
ATTACH_S = 120.0
EXACT_PROMPTS, EXACT_BATCH = 24, 8


class Replica:
    """A vLLM process, and its pipe of answers.

    Args:
        name: Its name in the logs; settings: see bench.vllm_worker; environment: on top of this process's own.
        logs: Folder of its log.
    """

    def __init__(self, name: str, settings: dict[str, Any], environment: dict[str, str], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        read, write = os.pipe()
        self._answers = os.fdopen(read)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.vllm_worker", json.dumps(settings | {"answers_fd": write})],
                stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=(write,), env={**os.environ, **environment},
            )  # fmt: skip
        os.close(write)

    def answer(self) -> dict[str, Any]:
        """Waits for its next answer.

        Raises:
            RuntimeError: It has ended.
        """
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended: {' | '.join(self.log.read_text(errors='replace').splitlines()[-5:])}")
        given: dict[str, Any] = json.loads(line)
        return given

    def ask(self, texts: list[str], batch: int, namespace: str = "", most: int = 256, gaps: bool = False) -> None:
        """Sends prompts to answer."""
        extra = {"draftd_namespace": namespace} if namespace else {}
        command = {"prompts": texts, "batch": batch, "max_tokens": most, "extra_args": extra, "gaps": gaps}
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def run(self, texts: list[str], batch: int, **more: Any) -> dict[str, Any]:
        """Sends prompts and waits for the outputs."""
        self.ask(texts, batch, **more)
        return self.answer()

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        self._process.kill()
        self._process.wait()


class Fleet:
    """The service and the replicas.

    Args:
        given: The command line.
        logs: Folder of all logs.
    """

    def __init__(self, given: Any, logs: Path) -> None:
        self.given, self.logs = given, logs
        rounds = range(1 if given.rules_only else given.rounds)
        shared = [f"{name}-{number}" for name in ("B", *(VARIANTS if given.policies else ())) for number in rounds]
        cold = [f"cold-{batch}-{number}" for batch in given.batch for number in range(given.rounds)]
        self.namespaces = shared if given.rules_only else [*shared, "exact-cold", "exact-served", "kills", *cold]
        if len(self.namespaces) > MAX_EXTRA_NAMESPACES:
            raise SystemExit(
                f"--rounds {given.rounds} needs {len(self.namespaces)} namespaces; an engine has at most {MAX_EXTRA_NAMESPACES}"
            )
        self.service = PrivateService(["--device", given.device, "--device-memory", "4096", "--quota-tokens", str(1 << 18)])
        self.replicas: dict[str, Replica] = {}

    def start(self, name: str, method: str, shared: bool, invariant: bool = False) -> Replica:
        """Starts a replica without waiting for it."""
        policy, adaptive = self._rule_of(name)
        settings = {"model": self.given.model, "k": self.given.k, "batches": self.given.batch, "method": method}
        settings |= {"adaptive": adaptive and shared, "cudagraph_mode": self.given.cudagraph_mode}
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "PYTHONUNBUFFERED": "1"}
        environment["VLLM_USE_BREAKABLE_CUDAGRAPH"] = str(int("PIECEWISE" in self.given.cudagraph_mode))
        if shared:
            environment |= {
                "VLLM_PLUGINS": "draftd", "DRAFTD_ENDPOINT": self.service.endpoint, "DRAFTD_VLLM_ENGINE": name,
                "DRAFTD_VLLM_NAMESPACE": "warm", "DRAFTD_VLLM_NAMESPACES": self._namespaces_of(name), "DRAFTD_VLLM_ATTACH_S": "120",
                "DRAFTD_VLLM_GRAPHS": str(int(not self.given.no_graphs)), "DRAFTD_VLLM_POLICY": policy,
            }  # fmt: skip
        if invariant:
            environment["VLLM_BATCH_INVARIANT"] = "1"
        self.replicas[name] = Replica(name, settings, environment, self.logs)
        return self.replicas[name]

    def verifies_adaptively(self, name: str) -> bool:
        """Whether vLLM trims this replica's drafts."""
        return self._rule_of(name)[1]

    def _rule_of(self, name: str) -> tuple[str, bool]:
        _, policy, adaptive = VARIANTS.get(name, ("", "calibrated", self.given.adaptive))
        return policy, adaptive

    def _namespaces_of(self, name: str) -> str:
        """All namespaces, separated by commas; a replica's own come first, since an engine teaches its first few only."""
        return ",".join(sorted(self.namespaces, key=lambda namespace: not namespace.startswith(f"{name}-")))

    def count(self, metric: str) -> float:
        """Sum of a metric of the service over its labels; 0 while the service is away."""
        try:
            with urllib.request.urlopen(f"{self.service.http_url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return sum(sample.value for family in text_string_to_metric_families(text) for sample in family.samples if sample.name == metric)

    def ingest(self, namespace: str, run: str, answer: dict[str, Any]) -> None:
        """Adds the outputs of a run, each behind the end of its prompt, to a namespace; returns when all can be drafted from."""
        request = pb.IngestRequest(namespace=namespace, wait_visible=True)
        for i, (tokens, lead) in enumerate(zip(answer["outputs"], answer["prompts"], strict=True)):
            packed_lead = pack(np.array(lead[-LEAD_TOKENS:], np.int32))
            request.documents.add(document_id=f"{run}-{i}", tokens=tokens, packed_lead=packed_lead, complete=True)
        with channel(self.service.endpoint) as opened:
            draftd_pb2_grpc.DrafterServiceStub(opened).Ingest(request, timeout=60)

    def wait_attached(self, engines: int) -> float:
        """Seconds until the service has so many attachments; RuntimeError if it takes too long."""
        began = time.monotonic()
        while self.count("draftd_attachments") < engines:
            if time.monotonic() - began > ATTACH_S:
                raise RuntimeError(f"the service has not got {engines} attachments within {ATTACH_S:g} s")
            time.sleep(0.1)
        return time.monotonic() - began

    def close(self) -> None:
        """Ends all that it started."""
        for replica in self.replicas.values():
            replica.kill()
        self.service.stop()


def warm_up(fleet: Fleet) -> None:
    """Lets every replica see every batch size once."""
    for replica in fleet.replicas.values():
        for batch in fleet.given.batch:
            replica.ask(prompts(batch + 2, 0), batch, namespace="warm" if replica.name in ("A", "B", *VARIANTS) else "", most=48)
    for replica in fleet.replicas.values():
        for _ in fleet.given.batch:
            replica.answer()


def compare_rules(fleet: Fleet, table: Table) -> list[str]:
    """Fills the table with what depends on the rule only: what A answers goes into a namespace of each replica, then they answer the same,
    in turns and each after a pause in which the service is done with the one before."""
    warm_up(fleet)
    given, replicas = fleet.given, fleet.replicas
    kinds = {"B": SERVED, **{name: kind for name, (kind, _, _) in VARIANTS.items()}}
    learned_from = templates(LEARNED_FROM, 5_000)
    plain = replicas["A"].run(learned_from, max(given.batch), namespace="warm")
    for name in kinds:
        fleet.ingest(f"{name}-0", "learned-from", plain)
        replicas[name].run(learned_from, max(given.batch), namespace=f"{name}-0")
    first = 1000
    for number in range(given.rounds):
        # Each comes first as often as last.
        turn = number % len(kinds)
        order = [*list(kinds)[turn:], *list(kinds)[:turn]]
        for batch in given.batch:
            texts = prompts(PROMPTS.get(batch, 2 * batch), first)
            first += len(texts)
            plain = replicas["A"].run(texts, max(given.batch), namespace="warm")
            for name in kinds:
                fleet.ingest(f"{name}-0", f"{number}-{batch}", plain)
            for name in order:
                time.sleep(VISIBLE_S)
                table.add(kinds[name], batch, replicas[name].run(texts, batch, namespace=f"{name}-0"), plain["outputs"])
        print(f"round {number} done", file=sys.stderr, flush=True)
    return []


def measure(fleet: Fleet, table: Table) -> list[str]:
    """Fills the table; answers what the counts of accepted tokens said."""
    warm_up(fleet)
    given, replicas = fleet.given, fleet.replicas
    apart: list[tuple[float, float]] = []
    first = 1000
    variants = VARIANTS if given.policies else {}
    for number in range(given.rounds):
        for name in ("B", *variants):
            texts = templates(LEARNED_FROM, 5_000 + LEARNED_FROM * number)
            for who in ("A", name):
                replicas[who].run(texts, max(given.batch), namespace=f"{name}-{number}")
                time.sleep(VISIBLE_S)
        for batch in given.batch:
            texts = prompts(PROMPTS.get(batch, 2 * batch), first)
            first += len(texts)
            cold, served = f"cold-{batch}-{number}", f"B-{number}"
            plain = replicas["none"].run(texts, batch)
            table.add(NONE, batch, plain, plain["outputs"])
            table.add(NGRAM, batch, replicas["ngram"].run(texts, batch), plain["outputs"])
            table.add(COLD, batch, replicas["B"].run(texts, batch, namespace=cold), plain["outputs"])
            replicas["A"].run(texts, batch, namespace=served)
            time.sleep(VISIBLE_S)
            before = fleet.count("draftd_num_accepted_tokens_total")
            answer = replicas["B"].run(texts, batch, namespace=served)
            time.sleep(VISIBLE_S)
            apart.append((answer["counters"][COUNTERS[2]], fleet.count("draftd_num_accepted_tokens_total") - before))
            table.add(SERVED, batch, answer, plain["outputs"])
            table.add(TWICE, batch, replicas["B"].run(texts, batch, namespace=served), plain["outputs"])
            for name, (kind, _, _) in variants.items():
                replicas["A"].run(texts, batch, namespace=f"{name}-{number}")
                time.sleep(VISIBLE_S)
                table.add(kind, batch, replicas[name].run(texts, batch, namespace=f"{name}-{number}"), plain["outputs"])
            print(f"round {number} batch {batch} done", file=sys.stderr, flush=True)
    theirs, ours = (sum(column) for column in zip(*apart, strict=True))
    note = f"accepted tokens, {SERVED}: {theirs:.0f} by vLLM, {ours:.0f} by draftd"
    return [note, *([f"MISSED: {note}"] if abs(ours - theirs) > COUNTS_APART * theirs else [])]


def check_exact(fleet: Fleet) -> list[str]:
    """Compares outputs where a number does not depend on the batch it is computed in."""
    texts = prompts(EXACT_PROMPTS, 500)
    plain = fleet.replicas["none-exact"].run(texts, EXACT_BATCH, gaps=True)
    notes = []
    for namespace in ("exact-cold", "exact-served"):
        outputs = fleet.replicas["B-exact"].run(texts, EXACT_BATCH, namespace=namespace)["outputs"]
        apart = [_first_difference(a, b) for a, b in zip(plain["outputs"], outputs, strict=True)]
        gaps = [plain["gaps"][i][min(at, len(plain["gaps"][i]) - 1)] for i, at in enumerate(apart) if at is not None]
        note = f"batch-invariant outputs, {namespace}: {len(texts) - len(gaps)} of {len(texts)} are those without speculation"
        if gaps:
            note = f"MISSED: {note}; the two likeliest tokens were {max(gaps):.3f} apart in log probability at most where they part"
        notes.append(note)
        fleet.replicas["B-exact"].run(texts, EXACT_BATCH, namespace="exact-served")
        time.sleep(VISIBLE_S)
    return notes


def check_kills(fleet: Fleet) -> list[str]:
    """Kills and restarts the service, then replica A, while B answers."""
    texts = prompts(96, 5000)
    b = fleet.replicas["B"]
    engines = sum(name in fleet.replicas for name in ("A", "B", "B-exact", *VARIANTS))
    calm = b.run(texts, 16, namespace="kills")["outputs"]
    b.ask(texts, 16, namespace="kills")
    time.sleep(0.1)
    fleet.service.kill()
    killed = b.answer()["outputs"]
    b.ask(texts, 16, namespace="kills")
    fleet.service.start()
    back = b.answer()["outputs"]
    attached_s = fleet.wait_attached(engines)
    fleet.replicas["A"].run(texts, 16, namespace="kills")
    time.sleep(VISIBLE_S)
    again = b.run(texts, 16, namespace="kills")
    drafts, _, accepted = (again["counters"][name] for name in COUNTERS)
    lengths = [[len(output) for output in outputs] for outputs in (calm, killed, back)]
    notes = [
        f"draftd killed: B answered {len(killed)} requests, and {len(back)} while it started; attached again {attached_s:.1f} s after"
        f" it was ready; then {1 + accepted / max(drafts, 1):.1f} tokens a step",
        f"the same lengths of outputs as without the kill: {_share(lengths[0], lengths[1]):.0%}, {_share(lengths[0], lengths[2]):.0%}",
    ]
    b.ask(texts, 16, namespace="kills")
    time.sleep(0.1)
    fleet.replicas["A"].kill()
    notes.append(f"replica A killed: B answered {len(b.answer()['outputs'])} requests")
    began = time.monotonic()
    fleet.start("A", "ngram_gpu", True).answer()
    fleet.wait_attached(engines)
    notes.append(f"replica A was back and attached after {time.monotonic() - began:.0f} s")
    return notes


def _costs(verify_ms: dict[str, float]) -> str:
    return ", ".join(f"{tokens} tokens {ms:.2f}" for tokens, ms in verify_ms.items())


def _first_difference(a: list[int], b: list[int]) -> int | None:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _share(a: Iterable[int], b: Iterable[int]) -> float:
    pairs = list(zip(a, b, strict=True))
    return sum(x == y for x, y in pairs) / len(pairs)


def main() -> int:
    """Prints the table; 1 if something misses what it must reach."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="name or folder of a small chat model")
    arguments.add_argument("--k", type=int, default=16, help="num_speculative_tokens")
    arguments.add_argument("--batch", type=int, action="append", default=[], help="batch size; default: 1, 16 and 64")
    arguments.add_argument("--rounds", type=int, default=3, help="runs of each cell, whose median counts")
    arguments.add_argument("--device", default="cuda", help="the service's")
    arguments.add_argument("--cudagraph-mode", default="FULL_AND_PIECEWISE", help="vLLM's; FULL_DECODE_ONLY: no graphs of prefills")
    arguments.add_argument("--no-graphs", action="store_true", help="launch each of draftd's kernels: DRAFTD_VLLM_GRAPHS=0")
    arguments.add_argument("--adaptive", action="store_true", help="adaptive verification where draftd drafts")
    arguments.add_argument("--policies", action="store_true", help="compare the rules too, with adaptive verification and without")
    arguments.add_argument("--rules-only", action="store_true", help="compare the rules and nothing else; 30 rounds say more than 3")
    arguments.add_argument("--no-exact", action="store_true", help="do not compare outputs in batch-invariant mode")
    arguments.add_argument("--no-kills", action="store_true", help="kill nothing")
    arguments.add_argument("--logs", type=Path, metavar="DIR", help="where the replicas' logs go; default: a temporary folder")
    given = arguments.parse_args()
    given.batch = given.batch or [1, 16, 64]
    if given.rules_only:
        given.policies = given.no_exact = given.no_kills = True
    logs = given.logs or Path(tempfile.mkdtemp(prefix="draftd-vllm-"))
    logs.mkdir(parents=True, exist_ok=True)
    fleet, table = Fleet(given, logs), Table(rules_only=given.rules_only)
    try:
        return _run(fleet, table)
    finally:
        (logs / "draftd.log").write_text(fleet.service.log())
        fleet.close()


def _run(fleet: Fleet, table: Table) -> int:
    given = fleet.given
    began = time.monotonic()
    if not given.rules_only:
        fleet.start("none", "none", False)
        fleet.start("ngram", "ngram_gpu", False)
    if not given.no_exact:
        fleet.start("none-exact", "none", False, invariant=True)
    fleet.service.spawn()
    shared = ["A", "B", *([] if given.no_exact else ["B-exact"]), *(VARIANTS if given.policies else ())]
    trimming = [name for name in shared if fleet.verifies_adaptively(name)]
    for name in shared:
        if name not in trimming:
            fleet.start(name, "ngram_gpu", True, invariant=name == "B-exact")
    fleet.service.wait_ready()
    about = {name: replica.answer() for name, replica in fleet.replicas.items()}
    for name in trimming:
        # vLLM measures what a step costs while it starts, and trims drafts by that: nobody else may use the GPU then.
        about[name] = fleet.start(name, "ngram_gpu", True, invariant=name == "B-exact").answer()
    started_s = time.monotonic() - began
    fleet.wait_attached(len(shared))
    notes = [f"all replicas ready after {started_s:.0f} s; Model Runner V2: {about['B']['v2']}, asynchronous: {about['B']['asynchronous']}"]
    notes += [f"{name}: a step of {_costs(about[name]['verify_ms'])} ms by vLLM's own measurement" for name in trimming]
    print("\n".join(notes), file=sys.stderr, flush=True)
    parts: list[Callable[[], list[str]]] = [lambda: (compare_rules if given.rules_only else measure)(fleet, table)]
    if not given.no_exact:
        parts.append(lambda: check_exact(fleet))
    if not given.no_kills:
        parts.append(lambda: check_kills(fleet))
    for part in parts:
        try:
            notes += part()
        except (RuntimeError, OSError) as error:
            # What has been measured until then is reported all the same.
            notes.append(f"MISSED: {error}")
            break
        print("\n".join(notes), file=sys.stderr, flush=True)
    missed = [*table.missed(), *(note for note in notes if note.startswith("MISSED"))]
    columns = ("drafts", "batch", "tokens/s", "spread", "x none", "x ngram_gpu", "tokens a step", "ms a step", "as without")
    title = f"Two vLLM replicas and one draftd: {Path(given.model).name}, k = {given.k}, greedy, 256 tokens"
    report(title, columns, table.rows(), given.json, [*notes, *table.rules(), *(f"missed: {what}" for what in table.missed())])
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
