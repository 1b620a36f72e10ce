"""Acceptance rates of branches follow their outcomes."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance import AcceptanceTracker, RatedProposal
from engine.spec_decode.proposer import Proposal, ProposedBranch
from tests.engine.spec_decode.proposers import sequence_of


def _tracker(*methods: str) -> AcceptanceTracker:
    return AcceptanceTracker(methods, (), max_tokens=8, vocab_size=50)


def _best(tracker: AcceptanceTracker, sequence: Sequence) -> RatedProposal:
    proposal = tracker.best(sequence)
    assert proposal
    return proposal


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_branch_chance_equals_its_acceptance_rate(share: float) -> None:
    """Without any draft; the chances of alternatives add up to at most 1."""
    generator, tracker, sequence = random.Random(1), _tracker("one"), sequence_of([1, 2])
    for _ in range(400):
        tracker.learn([sequence])
        tracker.note("one", sequence, Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7], [5, 5])]))
        sequence.tokens.append(6 if generator.random() < share else 3)
    tracker.learn([sequence])
    tracker.note("one", sequence, Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7], [5, 5])]))
    guess = _best(tracker, sequence)
    (branch,) = guess.branches
    assert branch.chances[0] == pytest.approx(share, abs=0.07) and branch.chances[1] < branch.chances[0]
    assert guess.chances[0] + branch.chances[0] <= 1.0


def test_branch_behind_wrong_token_teaches_nothing() -> None:
    tracker, sequence = _tracker("one"), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5], [ProposedBranch(1, [6], [5])])

    def believed() -> float:
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
        guess = _best(tracker, sequence)
        return guess.branches[0].chances[0] / guess.chances[0]

    before = believed()
    for _ in range(50):
        sequence.tokens += [9, 6]
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
    assert believed() >= before
    for _ in range(50):
        sequence.tokens += [3, 9]
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
    assert believed() < before / 2


def test_invalid_branches_are_dropped() -> None:
    tracker, sequence = _tracker("one"), sequence_of([1, 2])
    places = [
        ProposedBranch(-1, [6], [5]),
        ProposedBranch(2, [6], [5]),
        ProposedBranch(0, [3, 6], [5, 5]),  # equal to the draft
        ProposedBranch(0, [50], [5]),
        ProposedBranch(0, [], []),
        ProposedBranch(1, [7, 50, 8], [5, 5, 5]),
    ]
    tracker.note("one", sequence, Proposal([3, 4], [5, 5], places))
    assert [(one.place, list(one.tokens)) for one in _best(tracker, sequence).branches] == [(1, [7])]


def test_sequence_factor_applies_to_branches() -> None:
    tracker, known, other = _tracker("one"), sequence_of([1, 2]), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7, 8], [5, 5, 5])])
    for _ in range(200):
        for sequence, tokens in ((known, [3, 4]), (other, [9, 9])):
            tracker.learn([sequence])
            tracker.note("one", sequence, proposal)
            sequence.tokens += tokens
    shares = []
    for sequence in (known, other):
        tracker.learn([sequence])
        tracker.note("one", sequence, proposal)
        (branch,) = _best(tracker, sequence).branches
        shares.append(branch.chances[1] / branch.chances[0])
    assert shares[1] < shares[0] / 4
