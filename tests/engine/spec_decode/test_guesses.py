"""What may come instead of a draft's tokens is believed as often as it has come."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.sequence import Sequence
from engine.spec_decode.acceptance import Acceptance
from engine.spec_decode.ensemble import ENSEMBLE, together
from engine.spec_decode.guess import Guess, GuessedBranch
from engine.spec_decode.guesses import Guesses
from engine.spec_decode.proposer import Proposal, ProposedBranch
from tests.engine.spec_decode.proposers import sequence_of

_HALF = [0.5] * 48


def _guesses(*methods: str) -> Guesses:
    return Guesses(methods, (), max_tokens=8, vocab_size=50)


def _best(guesses: Guesses, sequence: Sequence) -> Guess:
    guess = guesses.best(sequence)[1]
    assert guess
    return guess


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_second_token_is_believed_as_often_as_it_is_right(share: float) -> None:
    """Nothing needs to be drafted for that; and of all that may come next one comes."""
    generator, guesses, sequence = random.Random(1), _guesses("one"), sequence_of([1, 2])
    for _ in range(400):
        guesses.learn([sequence])
        guesses.note("one", sequence, Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7], [5, 5])]))
        sequence.tokens.append(6 if generator.random() < share else 3)
    guesses.learn([sequence])
    guesses.note("one", sequence, Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7], [5, 5])]))
    guess = _best(guesses, sequence)
    (branch,) = guess.branches
    assert branch.chances[0] == pytest.approx(share, abs=0.07) and branch.chances[1] < branch.chances[0]
    assert guess.chances[0] + branch.chances[0] <= 1.0


def test_behind_what_was_wrong_nothing_is_learnt_of_a_branch() -> None:
    guesses, sequence = _guesses("one"), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5], [ProposedBranch(1, [6], [5])])

    def believed() -> float:
        guesses.learn([sequence])
        guesses.note("one", sequence, proposal)
        guess = _best(guesses, sequence)
        return guess.branches[0].chances[0] / guess.chances[0]

    before = believed()
    for _ in range(50):
        sequence.tokens += [9, 6]
        guesses.learn([sequence])
        guesses.note("one", sequence, proposal)
    assert believed() >= before
    for _ in range(50):
        sequence.tokens += [3, 9]
        guesses.learn([sequence])
        guesses.note("one", sequence, proposal)
    assert believed() < before / 2


def test_what_no_branch_can_be_is_left_out() -> None:
    guesses, sequence = _guesses("one"), sequence_of([1, 2])
    places = [
        ProposedBranch(-1, [6], [5]),
        ProposedBranch(2, [6], [5]),
        ProposedBranch(0, [3, 6], [5, 5]),  # the draft itself
        ProposedBranch(0, [50], [5]),
        ProposedBranch(0, [], []),
        ProposedBranch(1, [7, 50, 8], [5, 5, 5]),
    ]
    guesses.note("one", sequence, Proposal([3, 4], [5, 5], places))
    assert [(one.place, list(one.tokens)) for one in _best(guesses, sequence).branches] == [(1, [7])]


def test_who_says_another_token_goes_on_in_a_branch() -> None:
    sure = Guess(2, [3, 4, 5], [0] * 3, [0.8, 0.6, 0.5])
    other = Guess(2, [3, 7, 8], [0] * 3, [0.6, 0.3, 0.15])
    guess = together([sure, other], Acceptance(_HALF))
    assert list(guess.tokens) == [3, 4, 5] and guess.chances == pytest.approx(sure.chances)
    (branch,) = guess.branches
    assert (branch.place, list(branch.tokens), branch.kind) == (1, [7, 8], 24)
    # Behind 3, which comes 0.8 times: 4 comes 0.75 times, so 7 comes 0.25 times at most; then 8 half of the times.
    assert branch.chances == pytest.approx([0.2, 0.1])
    same = together([sure, Guess(2, (3, 4, 5), [0] * 3, [0.5, 0.45, 0.3])], Acceptance(_HALF))
    assert list(same.tokens) == [3, 4, 5] and same.chances == pytest.approx([0.8, 0.72, 0.6]) and not same.branches


def test_who_says_the_same_branches_all_the_same() -> None:
    one = Guess(2, [3, 4], [0, 0], [0.5, 0.4], [GuessedBranch(0, [9, 1], 0, [0.2, 0.1])])
    guess = together([one, Guess(2, [3, 4], [0, 0], [0.4, 0.3])], Acceptance(_HALF))
    assert [(branch.place, list(branch.tokens)) for branch in guess.branches] == [(0, [9, 1])]


def test_branches_of_all_who_agree_so_far_are_there_once_each() -> None:
    one = Guess(2, [3, 4], [0, 0], [0.5, 0.4], [GuessedBranch(0, [9, 1], 0, [0.2, 0.1])])
    other = Guess(2, [9, 2], [0, 0], [0.25, 0.2], [GuessedBranch(0, [3], 0, [0.1]), GuessedBranch(1, [8], 0, [0.1])])
    guess = together([one, other], Acceptance([0.1] * 48))
    assert [(branch.place, list(branch.tokens)) for branch in guess.branches] == [(0, [9, 1])]


def test_where_several_have_guessed_nothing_branches_that_does_not_branch_together() -> None:
    """Together they branch in the first places alone."""
    guesses, sequence = _guesses("one", "two"), sequence_of([1, 2])
    for place, num_branches in ((0, 1), (5, 0)):
        branch = ProposedBranch(place, [9], [5])
        guesses.note("one", sequence, Proposal([3, 4, 5, 6, 7, 8], [15] * 6, [branch]))
        guesses.note("two", sequence, Proposal([3], [0]))
        method, guess = guesses.best(sequence)
        assert method == "one" and guess and len(guess.branches) == num_branches


def test_a_method_that_is_right_where_another_is_not_is_learnt_to_be_so() -> None:
    """As a rule the first is right, one time of four the second."""
    generator, guesses, sequence = random.Random(2), _guesses("one", "two"), sequence_of([1, 2])
    for _ in range(600):
        guesses.learn([sequence])
        guesses.note("one", sequence, Proposal([3], [5]))
        guesses.note("two", sequence, Proposal([7], [5]))
        guesses.best(sequence)
        sequence.tokens.append(7 if generator.random() < 0.25 else 3)
    guesses.learn([sequence])
    guesses.note("one", sequence, Proposal([3], [5]))
    guesses.note("two", sequence, Proposal([7], [5]))
    method, guess = guesses.best(sequence)
    assert method == "one" != ENSEMBLE and guess
    (branch,) = guess.branches
    assert branch.chances[0] == pytest.approx(0.25, abs=0.12)


def test_the_most_promising_of_several_guesses_is_believed_as_often_as_it_is_right() -> None:
    """Of three methods that are right a quarter of the time, with chances above and below at random, the one that says
    most is chosen each time, and right a quarter of the time still. Believed as it says: 0.37."""
    methods = ("one", "two", "three")
    generator, guesses, sequence = random.Random(1), _guesses(*methods), sequence_of([1, 2])
    believed = []
    for _ in range(600):
        guesses.learn([sequence])
        for method in methods:
            guesses.note(method, sequence, Proposal([generator.randrange(3, 7)], [generator.randrange(48)], []))
        believed.append(_best(guesses, sequence).chances[0])
        sequence.tokens.append(generator.randrange(3, 7))
    assert sum(believed[200:]) / 400 == pytest.approx(0.25, abs=0.05)


def test_what_is_said_after_somebody_has_asked_counts_too() -> None:
    guesses, sequence = _guesses("one", "two", "three"), sequence_of([1, 2])
    for method, tokens in (("one", [3]), ("two", [4])):
        guesses.note(method, sequence, Proposal(tokens, [0] * len(tokens), []))
    assert len(_best(guesses, sequence).tokens) == 1
    guesses.note("three", sequence, Proposal([5, 6], [15, 15], []))
    assert list(_best(guesses, sequence).tokens) == [5, 6]


def test_where_a_request_is_not_guessed_its_branches_are_believed_less() -> None:
    guesses, known, other = _guesses("one"), sequence_of([1, 2]), sequence_of([1, 2])
    proposal = Proposal([3, 4], [5, 5], [ProposedBranch(0, [6, 7, 8], [5, 5, 5])])
    for _ in range(200):
        for sequence, tokens in ((known, [3, 4]), (other, [9, 9])):
            guesses.learn([sequence])
            guesses.note("one", sequence, proposal)
            sequence.tokens += tokens
    shares = []
    for sequence in (known, other):
        guesses.learn([sequence])
        guesses.note("one", sequence, proposal)
        (branch,) = _best(guesses, sequence).branches
        shares.append(branch.chances[1] / branch.chances[0])
    assert shares[1] < shares[0] / 4
