"""Replays of the rule `calibrated` in process: what it gains, and how soon it forgets what is no longer so."""

from __future__ import annotations

import numpy as np

from bench.policy import Outcome, Replay, at_drafted
from bench.workload import SAMPLES
from draftd.drafter import policy
from draftd.drafter.params import DraftParams
from draftd.server.replay.trace import Session, Turn, load_trace, vocab_size_of

PARAMS = DraftParams(k=16, tau=0.1)


def gsm8k(sessions: int) -> list[Session]:
    return load_trace(str(SAMPLES / "gsm8k.jsonl.gz"), sessions)


def test_it_drafts_better_than_the_suffix_trees_rule() -> None:
    """More tokens a step at the same number of drafted tokens."""
    sessions = gsm8k(150)
    tree = Replay(sessions, DraftParams(k=16, max_depth=24, spec_factor=1.0, policy="tree")).run()
    chains = [Replay(sessions, DraftParams(k=16, tau=tau)).run() for tau in (0.2, 0.1, 0.06)]
    assert at_drafted(chains, tree.drafted_per_step) > 1.02 * tree.tokens_per_step
    trees = [Replay(sessions, DraftParams(k=16, tau=tau, branches=3)).run() for tau in (0.2, 0.12, 0.08)]
    drafted = trees[1].drafted_per_step
    assert trees[1].tokens_per_step > at_drafted([*chains, Replay(sessions, DraftParams(k=16, tau=0.03)).run()], drafted)


def test_groups_gain_tokens_at_the_same_number_drafted() -> None:
    """More than 1 % on solutions of one problem, of which most come while others of it are written."""
    sessions = gsm8k(300)
    alone = [Replay(sessions, DraftParams(k=16, tau=tau)).run() for tau in (0.14, 0.1, 0.07)]
    grouped = Replay(sessions, PARAMS, groups=True).run()
    assert grouped.tokens_per_step > 1.01 * at_drafted(alone, grouped.drafted_per_step)


def test_predictions_are_what_happens() -> None:
    outcome = Replay(gsm8k(300), PARAMS).run()
    for decile in outcome.deciles:
        # Within three times what chance does to so many tokens, and the bound that large traces are held to.
        noise = 3 * 0.5 / np.sqrt(max(1, decile.drafted))
        assert abs(decile.accepted - decile.predicted) < 0.03 + noise


def test_a_namespace_whose_acceptance_collapses_recovers_within_2000_tokens() -> None:
    """New weights answer in other words: old documents and what was learned of them must not be worse than nothing."""
    sessions = gsm8k(225)
    words = np.random.default_rng(0).permutation(vocab_size_of(sessions)).astype(np.int32)
    old, new = sessions[:200], [Session(s.id, tuple(Turn(t.input, words[t.output]) for t in s.turns)) for s in sessions[200:]]
    before, both, fresh = (Replay(part, PARAMS).run() for part in (old, [*old, *new], new))
    after = Outcome(both.steps - before.steps, both.tokens - before.tokens, both.drafted - before.drafted)
    assert 1500 < after.tokens < 2500
    assert after.tokens_per_step > 0.97 * fresh.tokens_per_step
    assert after.drafted_per_step < 1.3 * fresh.drafted_per_step


def test_a_prior_is_worth_few_trials() -> None:
    calibration = policy.blank_calibration()
    calibration[0:4] = (30, 40, 1, 1)
    calibration[policy.WEIGHTS_AT] = 3
    prior = policy.as_prior(calibration)
    assert prior[0:4].tolist() == [1.5, policy.PRIOR_TRIALS, 1, 1]
    assert prior[policy.WEIGHTS_AT] == 2
    assert np.isfinite(policy.shipped_prior()).all()
    assert policy.shipped_prior()[1 : policy.WEIGHTS_AT : 2].max() <= policy.PRIOR_TRIALS
