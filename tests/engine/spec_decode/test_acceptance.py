"""Acceptance rates follow outcomes, and invalid proposals are cut."""

from __future__ import annotations

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance import AcceptanceRate, AcceptanceTracker, RatedProposal, SequenceFactor
from engine.spec_decode.proposer import Proposal
from tests.engine.spec_decode.proposers import sequence_of


def _tracker(*methods: str) -> AcceptanceTracker:
    return AcceptanceTracker(methods, max_tokens=8, vocab_size=50)


def _best(tracker: AcceptanceTracker, sequence: Sequence) -> RatedProposal:
    proposal = tracker.best(sequence)
    assert proposal
    return proposal


def test_sequence_factor_applies_to_its_sequence() -> None:
    tracker, known, other = _tracker("one"), sequence_of([1, 2]), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5])
    for _ in range(200):
        for sequence, tokens in ((known, [3, 4]), (other, [9, 9])):
            tracker.learn([sequence])
            tracker.note("one", sequence, proposal)
            sequence.tokens += tokens
    for sequence in (known, other):
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
    assert _best(tracker, other).chances[0] < _best(tracker, known).chances[0] / 4


def test_proposal_is_cut_before_invalid_token() -> None:
    tracker, sequence = _tracker("one"), sequence_of([1, 2])
    for tokens, valid in (([3, 50, 8], [3]), ([3, -1], [3]), ([4] * 20, [4] * 8)):
        tracker.note("one", sequence, Proposal(tokens, [5] * len(tokens)))
        assert list(_best(tracker, sequence).tokens) == valid


def test_acceptance_rate_follows_outcomes() -> None:
    acceptance = AcceptanceRate()
    for _ in range(300):
        acceptance.observe([3, 4], 1)  # the first is right, the second is not
        acceptance.observe([5], 1)
    assert acceptance.rates[3] > 0.95 and acceptance.rates[5] > 0.95 and acceptance.rates[4] < 0.05
    for _ in range(600):
        acceptance.observe([3], 0)
    assert acceptance.rates[3] < 0.15, "old outcomes must be forgotten"


def test_sequence_factor_follows_outcomes() -> None:
    better, worse = SequenceFactor(), SequenceFactor()
    assert better.value == 1.0
    for _ in range(20):
        better.observe(0.5, 1)
        worse.observe(0.5, 0)
    assert worse.value < 0.2 and better.value > 1.1
    for _ in range(20):
        worse.observe(0.05, 1)
    assert worse.value > 1.1, "the factor must follow a change"
