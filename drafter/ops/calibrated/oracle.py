"""The draft rule `calibrated`, plainly: n-gram counts in dictionaries, one function for each step of the rule.

What every backend must answer: tokens and counts exactly, probabilities to rounding. Suffixes that occur often are counted exactly here;
a kernel may sample them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftd.drafter import policy
from draftd.drafter.policy import LENGTHS


class Document(NamedTuple):
    """A document of the corpus: what is known to stand before it (context of its first tokens, never a prediction), and its tokens."""

    lead: Sequence[int]
    tokens: Sequence[int]


@dataclass(slots=True)
class Followers:
    """What followed a suffix: how often each token, and which came last."""

    counts: Counter[int] = field(default_factory=Counter)
    order: dict[int, int] = field(default_factory=dict)
    seen: int = 0

    def add(self, token: int) -> None:
        """Notes a follower; occurrences come from the oldest to the latest."""
        self.counts[token] += 1
        self.seen += 1
        self.order[token] = self.seen

    @property
    def latest(self) -> int:
        """The follower of the latest occurrence."""
        return max(self.order, key=self.order.__getitem__)

    @property
    def most_frequent(self) -> int:
        """The most frequent follower; of equals the one that came last."""
        return max(self.counts, key=lambda token: (self.counts[token], self.order[token]))


class Vote(NamedTuple):
    """A follower that a source proposes at a level: its cells and its first guess."""

    token: int
    source: int
    fine: int
    coarse: int
    guess: float


class Candidate(NamedTuple):
    """A token that may be next, its probability and the features that gave it."""

    token: int
    probability: float
    features: tuple[float, ...]


@dataclass(slots=True)
class State:
    """One position of a draft: what was voted for, what is kept, and which weights mixed it."""

    votes: list[Vote]
    candidates: list[Candidate]
    weights: int


@dataclass(slots=True)
class Node:
    """A drafted token: the place of the token before it (-1 for the first), and the probability that all up to it are right."""

    token: int
    parent: int
    survival: float


@dataclass(slots=True)
class OracleDraft:
    """A draft, and the states that were looked at: before any token (0) and after drafted token i (i + 1)."""

    nodes: list[Node]
    states: dict[int, State]


class Corpus:
    """n-gram counts of documents, from the oldest to the most recent."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._followers: dict[tuple[int, ...], Followers] = {}
        for lead, tokens in documents:
            text = [*lead, *tokens]
            # The first token has no context of the document's own, so nothing predicts it.
            for at in range(len(lead) + 1, len(text)):
                for length in LENGTHS:
                    if length <= at:
                        self._followers.setdefault(tuple(text[at - length : at]), Followers()).add(text[at])

    def followers(self, text: Sequence[int]) -> list[Followers]:
        """Followers of the last LENGTHS[k] tokens, for every level k up to the last that has any."""
        return _levels(text, self._followers)


def own_followers(text: Sequence[int]) -> list[Followers]:
    """The same, of earlier occurrences in the text itself."""
    table: dict[tuple[int, ...], Followers] = {}
    for length in LENGTHS:
        suffix = tuple(text[-length:])
        for at in range(length, len(text)):
            if tuple(text[at - length : at]) == suffix:
                table.setdefault(suffix, Followers()).add(text[at])
    return _levels(text, table)


def group_followers(text: Sequence[int], outputs: Sequence[Sequence[int]]) -> list[Followers]:
    """The same, of occurrences in what the others of the request's group have generated; outputs come from the oldest to the newest.

    The last GROUP_TOKENS tokens of all outputs count; nothing matches across two of them.
    """
    counted: list[Sequence[int]] = []
    left = policy.GROUP_TOKENS
    for output in reversed(outputs):
        counted.append(output[max(0, len(output) - left) :])
        left -= len(counted[-1])
    table: dict[tuple[int, ...], Followers] = {}
    for output in reversed(counted):
        for at in range(1, len(output)):
            for length in LENGTHS:
                if length <= at and tuple(output[at - length : at]) == tuple(text[-length:]):
                    table.setdefault(tuple(text[-length:]), Followers()).add(output[at])
    return _levels(text, table)


def _levels(text: Sequence[int], table: dict[tuple[int, ...], Followers]) -> list[Followers]:
    found = []
    for length in LENGTHS:
        followers = table.get(tuple(text[-length:])) if length <= len(text) else None
        if followers is None:
            break
        found.append(followers)
    return found


def bucket(value: float, bounds: Sequence[float]) -> int:
    """How many of the upper bounds are below the value."""
    return sum(value > bound for bound in bounds)


def vote(source: int, level: int, top: int, token: int, count: int, seen: int, kind: int) -> Vote:
    """The vote for a token that followed `count` of `seen` occurrences at a level of which `top` is the longest there is."""
    gap = min(top - level, policy.GAPS - 1)
    share = count / seen
    shares = policy.SHARE_BUCKETS - 1 if count == seen else sum(share >= bound for bound in policy.SHARE_BOUNDS)
    counts = bucket(seen, policy.COUNT_BOUNDS)
    fine = source
    for value, size in (
        (level, policy.LEVELS),
        (gap, policy.GAPS),
        (counts, policy.COUNT_BUCKETS),
        (shares, policy.SHARE_BUCKETS),
        (kind, policy.KINDS),
    ):
        fine = fine * size + value
    coarse = source
    for value, size in (
        (policy.LENGTH_BUCKETS[level], policy.LENGTH_BUCKET_COUNT),
        (gap, policy.GAPS),
        (shares, policy.SHARE_BUCKETS),
        (kind, policy.KINDS),
    ):
        coarse = coarse * size + value
    guess = count / (seen + 1) * LENGTHS[level] / (LENGTHS[level] + 1)
    return Vote(token, source, fine, coarse, max(guess, policy.LATEST_FLOOR) if kind == 2 else guess)


def votes_of(source: int, levels: Sequence[Followers]) -> list[Vote]:
    """The most frequent follower at each of the longest levels, and the latest one where that is another."""
    votes = []
    for level, followers in list(enumerate(levels))[-policy.TOP_LEVELS :]:
        most, latest = followers.most_frequent, followers.latest
        kinds = [(most, 0)] if most == latest else [(most, 1), (latest, 2)]
        for token, kind in kinds:
            votes.append(vote(source, level, len(levels) - 1, token, followers.counts[token], followers.seen, kind))
    return votes


def clip(probability: float) -> float:
    """The probability within what a draft may believe."""
    return min(max(probability, policy.LEAST_PROBABLE), policy.MOST_PROBABLE)


def logit(probability: float) -> float:
    """ln(p / (1 - p))."""
    return math.log(probability / (1 - probability))


def estimate(calibration: NDArray[np.float32], voted: Vote) -> float:
    """How often votes like this one were right: the coarse cell smooths the first guess, the fine cell the coarse one."""
    hits, trials = (float(x) for x in calibration[policy.COARSE_AT + 2 * voted.coarse :][:2])
    coarse = (hits + policy.COARSE_WEIGHT * voted.guess) / (trials + policy.COARSE_WEIGHT)
    hits, trials = (float(x) for x in calibration[policy.FINE_AT + 2 * voted.fine :][:2])
    return clip((hits + policy.FINE_WEIGHT * coarse) / (trials + policy.FINE_WEIGHT))


class Estimates(NamedTuple):
    """A voted token: its best estimate, the best one of the other sources (0 if none voted for it), and the sum of all."""

    token: int
    first: float
    second: float
    total: float


def rank(calibration: NDArray[np.float32], votes: Sequence[Vote]) -> list[Estimates]:
    """The voted tokens, best first."""
    best: dict[int, list[float]] = {}
    total: dict[int, float] = {}
    for voted in votes:
        q = estimate(calibration, voted)
        of = best.setdefault(voted.token, [0.0] * policy.SOURCES)
        of[voted.source] = max(of[voted.source], q)
        total[voted.token] = total.get(voted.token, 0.0) + q
    estimates = [Estimates(token, max(of), sorted(of)[-2], total[token]) for token, of in best.items()]
    return sorted(estimates, key=lambda e: (-e.first, -e.total))


def blend(token: int, sources: Sequence[Sequence[Followers]]) -> float:
    """The token's share at the two longest levels, counts of all sources together, the longer one escaping to the shorter.

    The escape is PPM's method C (Moffat 1990): as many as there are distinct followers.
    """
    longest = max(map(len, sources)) - 1
    probability = policy.ESCAPE_FLOOR
    for level in (longest - 1, longest):
        there = [levels[level] for levels in sources if 0 <= level < len(levels)]
        if there:
            count, seen = sum(f.counts[token] for f in there), sum(f.seen for f in there)
            distinct = sum(len(f.counts) for f in there)
            probability = (count + distinct * probability) / (seen + distinct)
    return clip(probability)


def look(
    calibration: NDArray[np.float32], text: Sequence[int], corpus: Corpus | None, use_local: bool, group: Sequence[Sequence[int]] = ()
) -> State:
    """What may come after a text; `group` as propose has it."""
    sources = [
        own_followers(text) if use_local else [],
        corpus.followers(text) if corpus is not None else [],
        group_followers(text, group),
    ]
    votes = [v for source, levels in enumerate(sources) for v in votes_of(source, levels)]
    ranked = rank(calibration, votes)[: policy.CANDIDATES]
    longest = max(map(len, sources)) - 1
    weights = policy.LENGTH_BUCKETS[longest] if longest >= 0 else 0
    mixer = calibration[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.CANDIDATES, policy.WEIGHT_WORDS)[weights]
    candidates = []
    for place, (token, first, second, total) in enumerate(ranked):
        rival = max((other.first for other in ranked if other.token != token), default=0.0)
        features = (
            logit(first),
            logit(second) + 2 if second > 0 else 0.0,
            logit(rival) + 2 if rival > 0 else 0.0,
            1.0,
            float(second > 0),
            float(rival > 0),
            logit(min(max(total / (1 + total), policy.SUM_LEAST), policy.SUM_MOST)),
            logit(blend(token, sources)),
        )
        score = sum(float(w) * f for w, f in zip(mixer[place], features, strict=False))
        candidates.append(Candidate(token, clip(1 / (1 + math.exp(-score))), features))
    return State(votes, candidates, weights)


def by_probability(state: State) -> list[Candidate]:
    """The candidates, the likeliest first."""
    return sorted(state.candidates, key=lambda c: -c.probability)


def knots(probability: float, order: int, survival: float) -> list[tuple[int, float, float]]:
    """The two cells between which a probability is refined: place, weight, and the probability of the knot itself.

    Args:
        order: The candidate's place among those of its state by probability.
        survival: Of the tokens drafted before; 1 if there are none.
    """
    if order > 0:
        context = policy.SURVIVAL_BUCKETS + order - 1
    else:
        context = 0 if survival >= 1 else 1 + sum(survival >= bound for bound in policy.SURVIVAL_BOUNDS)
    middle = (policy.KNOTS - 1) / 2
    at = min(max(logit(probability) / policy.KNOT_SPACING + middle, 0), policy.KNOTS - 1.001)
    low = int(at)
    return [
        (policy.REFINED_AT + 2 * (context * policy.KNOTS + knot), weight, 1 / (1 + math.exp((middle - knot) * policy.KNOT_SPACING)))
        for knot, weight in ((low, 1 - (at - low)), (low + 1, at - low))
    ]


def refine(calibration: NDArray[np.float32], probability: float, order: int, survival: float) -> float:
    """What a mixed probability has turned out to be in such a place: an adaptive probability map, as context mixing compressors have."""
    refined = 0.0
    for at, weight, own in knots(probability, order, survival):
        hits, trials = float(calibration[at]), float(calibration[at + 1])
        refined += weight * (hits + policy.REFINED_WEIGHT * own) / (trials + policy.REFINED_WEIGHT)
    return clip(refined)


def propose(
    calibration: NDArray[np.float32],
    row: Sequence[int],
    corpus: Corpus | None,
    *,
    nodes: int,
    tau: float,
    branches: int = 1,
    use_local: bool = True,
    group: Sequence[Sequence[int]] = (),
) -> OracleDraft:
    """The draft for a row: tokens in the order of their survival, as long as that is at least `tau`.

    Args:
        calibration: float32 [CALIBRATION_WORDS].
        nodes: Most tokens.
        branches: Most tokens that may follow one: 1 makes a chain.
        group: What the others of the row's group have generated, from the oldest to the newest.
    """
    draft = OracleDraft([], {})
    waiting: list[tuple[float, int, int, int]] = []
    made = 0

    def look_after(place: int, survival: float) -> None:
        nonlocal made
        path: list[int] = []
        at = place
        while at >= 0:
            path.append(draft.nodes[at].token)
            at = draft.nodes[at].parent
        state = look(calibration, [*row, *reversed(path)], corpus, use_local, group)
        draft.states[place + 1] = state
        for order, candidate in enumerate(by_probability(state)[:branches]):
            refined = refine(calibration, candidate.probability, order, survival)
            heapq.heappush(waiting, (-survival * refined, made, place, candidate.token))
            made += 1

    if row:
        look_after(-1, 1.0)
    while waiting and len(draft.nodes) < nodes:
        survival, _, parent, token = heapq.heappop(waiting)
        if -survival < tau:
            break
        draft.nodes.append(Node(token, parent, -survival))
        if len(draft.nodes) < nodes:
            look_after(len(draft.nodes) - 1, -survival)
    return draft


def learn(calibration: NDArray[np.float32], drafts: Sequence[tuple[OracleDraft, Sequence[int]]]) -> NDArray[np.float32]:
    """What drafts teach once it is known what came: to be added to a calibration, float32 [CALIBRATION_WORDS].

    Args:
        drafts: Each draft and the tokens that the engine committed next.
    """
    delta = np.zeros(policy.CALIBRATION_WORDS, np.float64)
    weights = delta[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.CANDIDATES, policy.WEIGHT_WORDS)
    for draft, truth in drafts:
        place = -1
        for token in truth:
            state = draft.states.get(place + 1)
            if state is None:
                break
            for voted in state.votes:
                for at in (policy.FINE_AT + 2 * voted.fine, policy.COARSE_AT + 2 * voted.coarse):
                    delta[at] += voted.token == token
                    delta[at + 1] += 1
            for rank, candidate in enumerate(state.candidates):
                error = (candidate.token == token) - candidate.probability
                weights[state.weights, rank] += (*(policy.RATE * error * f for f in candidate.features), 1)
            survival = draft.nodes[place].survival if place >= 0 else 1.0
            for order, candidate in enumerate(by_probability(state)):
                for at, weight, _ in knots(candidate.probability, order, survival):
                    delta[at : at + 2] += (weight * (candidate.token == token), weight)
            following = [i for i, n in enumerate(draft.nodes) if n.parent == place and n.token == token]
            if not following:
                break
            place = following[0]
        _score(delta, draft, truth)
    return delta.astype(np.float32)


def _score(delta: NDArray[np.float64], draft: OracleDraft, truth: Sequence[int]) -> None:
    """Notes predicted survival against what happened, of every drafted token of which that is known."""
    outcomes: list[bool | None] = []
    depths: list[int] = []
    for node in draft.nodes:
        depth = depths[node.parent] + 1 if node.parent >= 0 else 1
        outcome = outcomes[node.parent] if node.parent >= 0 else True
        if outcome:
            outcome = truth[depth - 1] == node.token if depth <= len(truth) else None
        outcomes.append(outcome)
        depths.append(depth)
        if outcome is not None:
            decile = min(int(node.survival * policy.DECILES), policy.DECILES - 1)
            delta[policy.DECILES_AT + 3 * decile :][:3] += (1, node.survival, outcome)
            delta[policy.BRIER_AT] += (node.survival - outcome) ** 2


def take_in(calibration: NDArray[np.float32], delta: NDArray[np.float32]) -> None:
    """Adds what was learned; cells with many trials are halved, steps of many states count as those of MOST_STATES."""
    learned = delta.copy()
    weights = learned[policy.WEIGHTS_AT : policy.DECILES_AT].reshape(-1, policy.WEIGHT_WORDS)
    weights *= np.minimum(1, policy.MOST_STATES / np.maximum(weights[:, -1:], 1))
    weights[:, -1] = 0
    calibration += learned
    for first, last, limit in (
        (policy.FINE_AT, policy.COARSE_AT, policy.FINE_LIMIT),
        (policy.COARSE_AT, policy.REFINED_AT, policy.COARSE_LIMIT),
        (policy.REFINED_AT, policy.WEIGHTS_AT, policy.REFINED_LIMIT),
    ):
        cells = calibration[first:last].reshape(-1, 2)
        cells[cells[:, 1] > limit] *= 0.5
