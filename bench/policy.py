"""What does the rule `calibrated` gain? Its tokens/step at arctic-inference's drafted/step on recorded sessions, over a sweep of tau.

In one process, by the protocol of bench/quality.py: 16 sessions at a time, all drafts of a step before any commit of it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench import peers
from bench.machine import parser, report
from bench.quality import CONCURRENCY, DEPTH, FACTORS, PROBABILITY, K
from bench.workload import traces
from draftd.drafter import policy
from draftd.drafter.corpus import Corpus
from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.documents import LEAD_TOKENS
from draftd.drafter.drafts import Drafts
from draftd.drafter.groups import NO_GROUPS, Groups
from draftd.drafter.keeper import KeptNamespace
from draftd.drafter.params import DraftParams
from draftd.drafter.records import Decile, RowContext
from draftd.server.replay.trace import Session, load_trace, vocab_size_of

TREE_DRAFTED = (5.0, 8.0)
"""Tokens drafted a step at which trees are shown."""
LARGE_TOKENS = 50_000
"""Output tokens of a trace from which on predictions must be right."""
MOST_OFF = 0.03
"""Largest difference of predicted and observed acceptance in a decile of a large trace."""
TAUS = (0.3, 0.2, 0.14, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01)
TREE_TAUS = (0.12, 0.09, 0.065, 0.05, 0.038, 0.028)
_NAMESPACE = "replay"


@dataclass
class Outcome:
    """What a replay came to.

    Attributes:
        propose_us: CPU time of drafting, microseconds in all.
        deciles: Of each decile of predicted survival: drafted tokens, mean prediction, share accepted.
        calibration: What had been learned at the end, as draftd.drafter.calibration writes it.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    propose_us: float = 0.0
    deciles: tuple[Decile, ...] = ()
    calibration: bytes = b""

    @property
    def tokens_per_step(self) -> float:
        """Tokens a request commits in a step."""
        return self.tokens / self.steps

    @property
    def drafted_per_step(self) -> float:
        """Tokens drafted for a request in a step."""
        return self.drafted / self.steps


class _Request:
    """A session's text, and how much of it is there already."""

    def __init__(self, number: int, session: Session) -> None:
        self.number, self.turns, self.group = number, session.turns, session.group
        self.text = np.concatenate([part for turn in session.turns for part in (turn.input, turn.output)]).astype(np.int32)
        self.turn = -1
        self.length = self.start = self.end = 0
        self.lead = self.text[:0]

    def next_turn(self) -> bool:
        """Goes to the next turn that has an output; False at the end of the session."""
        while self.turn + 1 < len(self.turns):
            self.turn += 1
            turn = self.turns[self.turn]
            self.start = self.end + len(turn.input)
            self.end = self.start + len(turn.output)
            self.length = self.start
            self.lead = self.text[max(0, self.start - LEAD_TOKENS) : self.start]
            if self.start < self.end:
                return True
        return False


class Replay:
    """Replays sessions on a corpus in this process.

    Args:
        calibration: What it starts with, as Outcome has it; empty: what every namespace starts with.
        groups: Sessions of one prompt are a group.
    """

    def __init__(self, sessions: Sequence[Session], params: DraftParams, calibration: bytes = b"", groups: bool = False) -> None:
        self._waiting = [_Request(i, s) for i, s in reversed(list(enumerate(sessions)))]
        self._params, self._start = params, calibration
        self._vocab = vocab_size_of(list(sessions))
        self._groups = Groups() if groups else None
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Replays all sessions."""
        with tempfile.TemporaryDirectory(prefix="draftd-bench-", dir="/dev/shm") as root:
            corpus = Corpus(CorpusConfig(shm_root=Path(root)))
            try:
                corpus.restore(KeptNamespace(1, _NAMESPACE, self._vocab, "", 0, 0, self._start), [])
                active: list[_Request] = []
                while self._waiting or active:
                    while self._waiting and len(active) < CONCURRENCY:
                        request = self._waiting.pop()
                        if self._next_turn(request):
                            active.append(request)
                    drafts = self._draft(corpus, active)
                    active = [request for i, request in enumerate(active) if self._commit(corpus, request, drafts, i)]
                    corpus.refresh()
                self.outcome.deciles = corpus.namespace(_NAMESPACE).deciles
                self.outcome.calibration = corpus.put_to_sleep(_NAMESPACE)[0].calibration
            finally:
                corpus.close()
        return self.outcome

    def _next_turn(self, request: _Request) -> bool:
        if not request.next_turn():
            return False
        if self._groups is not None and request.group:
            self._groups.start(request, _NAMESPACE, request.group, request.text[:0])
        return True

    def _draft(self, corpus: Corpus, active: Sequence[_Request]) -> Drafts:
        contexts = [RowContext(r.text[: r.length], _NAMESPACE, False) for r in active]
        started = time.thread_time()
        groups = self._groups.texts(active) if self._groups is not None else NO_GROUPS
        drafts = corpus.draft_checked(contexts, self._params, groups)
        self.outcome.propose_us += 1e6 * (time.thread_time() - started)
        return drafts

    def _commit(self, corpus: Corpus, request: _Request, drafts: Drafts, i: int) -> bool:
        """Verifies a draft as a greedy model would and commits; False when the session has ended."""
        outcome = self.outcome
        count = int(drafts.counts[i])
        tokens = drafts.tokens[i, :count]
        parents = np.arange(-1, count - 1) if drafts.parents is None else drafts.parents[i, :count]
        accepted, place = 0, -1
        most = request.end - request.length - 1
        while accepted < most:
            following = np.flatnonzero((parents == place) & (tokens == request.text[request.length + accepted]))
            if not len(following):
                break
            place = int(following[0])
            accepted += 1
        committed = request.text[request.length : request.length + accepted + 1]
        for lessons in drafts.lessons:
            lessons.lesson.learn(lessons.places[i : i + 1], committed[None], np.array([len(committed)]))
        request.length += accepted + 1
        ended = request.length == request.end
        if self._groups is not None:
            self._groups.append(request, committed)
            if ended:
                self._groups.finish(request, discard=False)
        offset = request.length - request.start - len(committed)
        corpus.ingest(_NAMESPACE, f"{request.number}/{request.turn}", offset, committed, ended, lead=request.lead)
        outcome.steps += 1
        outcome.tokens += len(committed)
        outcome.drafted += count
        outcome.accepted += accepted
        return not ended or self._next_turn(request)


def at_drafted(curve: Sequence[Outcome], drafted: float) -> float:
    """tokens/step where the curve drafts that much, between its points in a straight line; its end beyond."""
    points = sorted((o.drafted_per_step, o.tokens_per_step) for o in curve)
    return float(np.interp(drafted, [p[0] for p in points], [p[1] for p in points]))


def _with_groups(curve: Sequence[Outcome], drafted: float) -> tuple[float | None, float | None]:
    """tokens/step where the curve drafts that much, and what a request costs in its middle, µs; None without groups."""
    if not curve:
        return None, None
    middle = curve[len(curve) // 2]
    return at_drafted(curve, drafted), middle.propose_us / middle.steps


def main() -> int:
    """Prints the table; 1 if it has no more tokens/step than the peer somewhere, or predicts wrongly on a large trace."""
    arguments = parser(__doc__)
    arguments.add_argument("--traces", type=Path, metavar="DIR", help="folder of *.jsonl.gz; default: the samples")
    arguments.add_argument("--only", action="append", default=[], metavar="NAME", help="only traces of this name")
    arguments.add_argument("--blank", action="store_true", help="start without what was learned on other traces")
    arguments.add_argument("--groups", action="store_true", help="also with the traces' groups: sessions of one prompt")
    given = arguments.parse_args()
    start = policy.blank_calibration().tobytes() if given.blank else b""
    rows: list[tuple[object, ...]] = []
    missed = []
    for trace in traces(given.traces):
        name = trace.name.removesuffix(".jsonl.gz")
        if given.only and name not in given.only:
            continue
        sessions = load_trace(str(trace))
        chains = [Replay(sessions, DraftParams(k=K, tau=tau), start).run() for tau in TAUS]
        middle = chains[len(TAUS) // 2]
        off = max(abs(accepted - predicted) for drafted, predicted, accepted in middle.deciles)
        if middle.tokens >= LARGE_TOKENS and off > MOST_OFF:
            missed.append(f"{name}: predictions")
        cost = middle.propose_us / middle.steps
        grouped = [Replay(sessions, DraftParams(k=K, tau=tau), start, groups=True).run() for tau in TAUS] if given.groups else []
        for factor in FACTORS:
            peer = peers.arctic("replay", trace, K, DEPTH, factor, PROBABILITY, CONCURRENCY)
            if peer is None:
                continue
            ours, theirs = at_drafted(chains, peer["drafted_per_step"]), peer["tokens_per_step"]
            drafted = peer["drafted_per_step"]
            rows.append((f"{name}, factor {factor:g}", drafted, ours, theirs, ours / theirs, off, cost, *_with_groups(grouped, drafted)))
            if ours <= theirs:
                missed.append(f"{name} at factor {factor:g}")
        trees = [Replay(sessions, DraftParams(k=K, tau=tau, branches=policy.CANDIDATES), start).run() for tau in TREE_TAUS]
        cost = trees[-1].propose_us / trees[-1].steps
        for drafted in TREE_DRAFTED:
            rows.append((f"{name}, trees", drafted, at_drafted(trees, drafted), None, None, None, cost, None, None))
    columns = (
        "trace", "drafted/step", "tokens/step", "arctic tokens/step", "of arctic", "largest decile error", "µs a request",
        "tokens/step with groups", "µs a request with groups",
    )  # fmt: skip
    notes = [f"missed: {', '.join(missed)}"] if missed else []
    if peers.arctic_python() is None:
        notes.append(peers.MISSING)
    report(f"Rule calibrated, k {K}, {CONCURRENCY} sessions at a time, tau swept", columns, rows, given.json, notes)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
