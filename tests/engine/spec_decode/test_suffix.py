"""Look-up proposers: their contract, and their matches."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.spec_decode.proposer import NUM_KINDS, Proposer
from engine.spec_decode.suffix import MAX_MATCH, Corpus, Scope, Suffix, TokenIndex
from tests.engine.spec_decode.proposers import OURS, propose, sequence_of

_TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
_SCOPE = Scope("", "", "")


@pytest.mark.parametrize("make", OURS.values(), ids=OURS)
class TestConformance:
    def test_proposals_are_valid_and_deterministic(self, make: Callable[[], Proposer]) -> None:
        proposer, again = make(), make()
        generator = random.Random(0)
        for length in range(1, 60):
            sequence = sequence_of([generator.randrange(4) for _ in range(length)])
            for most in (1, 3, 8):
                before = list(sequence.tokens)
                proposal = propose(proposer, sequence, most)
                assert sequence.tokens == before and not sequence.blocks
                assert len(proposal.tokens) == len(proposal.kinds) <= most
                assert set(proposal.tokens) <= set(before)
                assert all(0 <= kind < NUM_KINDS for kind in proposal.kinds)
                assert propose(again, sequence, most) == proposal

    def test_no_proposal_without_earlier_match(self, make: Callable[[], Proposer]) -> None:
        assert not propose(make(), sequence_of(range(40)), 8).tokens
        assert not propose(make(), sequence_of([3]), 8).tokens

    def test_proposal_follows_earlier_match_as_sequence_grows(self, make: Callable[[], Proposer]) -> None:
        proposer, sequence = make(), sequence_of([*_TEXT, 1, 2, *_TEXT[:3]])
        assert list(propose(proposer, sequence, 5).tokens) == _TEXT[3:8]
        kinds = propose(proposer, sequence, 2).kinds
        sequence.tokens += _TEXT[3:5]
        assert list(propose(proposer, sequence, 3).tokens) == _TEXT[5:8]
        assert propose(proposer, sequence, 2).kinds[0] > kinds[0], "a longer match must have a higher kind"
        sequence.tokens += [77, 78]
        assert not propose(proposer, sequence, 3).tokens

    def test_finished_sequences_can_be_deleted(self, make: Callable[[], Proposer]) -> None:
        proposer = make()
        for number in range(3):
            sequence = sequence_of([*_TEXT, number], num_prompt_tokens=2)
            propose(proposer, sequence, 4)
            proposer.finished(sequence)
        assert propose(proposer, sequence_of([40, 41]), 4).tokens in ((), [])


def test_longer_match_outvotes_shorter_one() -> None:
    tokens = [1, 2, 3, 50, 9, 2, 3, 60, 8, 7, 1, 2, 3]
    assert list(propose(Suffix(), sequence_of(tokens), 1).tokens) == [50]


def test_ngram_is_suffix_without_finished_answers() -> None:
    ngram, suffix = Suffix(), Suffix(Corpus())
    finished = sequence_of([*range(20), *_TEXT], num_prompt_tokens=20)
    for proposer in (ngram, suffix):
        proposer.finished(finished)
    assert not propose(ngram, sequence_of([40, 5, 6]), 3).tokens
    assert list(propose(suffix, sequence_of([40, 5, 6]), 3).tokens) == [7, 8, 9]


def test_matches_equal_linear_search() -> None:
    generator = random.Random(1)
    tokens: list[int] = []
    index = TokenIndex(tokens)
    for _ in range(300):
        tokens.append(generator.randrange(3))
        expected = []
        for end in range(len(tokens) - 2, 0, -1):
            length = 0
            while length <= end and length < MAX_MATCH and tokens[end - length] == tokens[-1 - length]:
                length += 1
            if length >= 2:
                expected.append((length, end + 1))
        assert index.matches_of_end() == expected[:16]


def test_majority_decides_and_split_votes_propose_nothing() -> None:
    suffix = Suffix(Corpus())
    tokens = [1, 2, 3, 4, 8, 1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2]
    assert list(propose(suffix, sequence_of(tokens), 3).tokens) == [3, 4, 9]
    many = [token for other in range(20, 25) for token in (1, 2, other)]
    assert not propose(suffix, sequence_of([*many, 1, 2]), 3).tokens


def test_corpus_does_not_cross_tenant_and_salt() -> None:
    suffix = Suffix(Corpus())
    suffix.finished(sequence_of([*range(20), *_TEXT], num_prompt_tokens=20, tenant="acme", salt="s"))
    assert list(propose(suffix, sequence_of([40, 5, 6], tenant="acme", salt="s"), 3).tokens) == [7, 8, 9]
    for tenant, salt in (("", ""), ("acme", ""), ("", "s"), ("other", "s")):
        assert not propose(suffix, sequence_of([40, 5, 6], tenant=tenant, salt=salt), 3).tokens
    # The prompt is not an answer.
    assert not propose(suffix, sequence_of([40, 15, 16], tenant="acme", salt="s"), 3).tokens


def test_drafts_stop_at_end_of_answer() -> None:
    corpus = Corpus()
    corpus.add(_SCOPE, (1, 2, 3))
    corpus.add(_SCOPE, (4, 5, 6))
    assert corpus.continuations(_SCOPE, [1, 2], 8) == [(2, [3])]
    assert corpus.continuations(_SCOPE, [2, 3], 8) == []
    assert corpus.continuations(_SCOPE, [3, 4], 8) == []


def test_corpus_is_bounded_per_scope_and_in_total() -> None:
    corpus = Corpus(max_tokens=400, max_scope_tokens=100)
    for number in range(200):
        corpus.add(_SCOPE, tuple(range(number, number + 9)))
        assert corpus.num_tokens <= 100
    assert corpus.continuations(_SCOPE, [200, 201], 1) == [(2, [202])] * 6
    assert not corpus.continuations(_SCOPE, [50, 51], 1)
    for number in range(30):
        corpus.add(Scope(f"tenant {number}", "", ""), tuple(range(49)))
        assert corpus.num_tokens <= 400
    assert not corpus.continuations(_SCOPE, [200, 201], 1), "the least recently used scope must be dropped first"
    corpus.add(_SCOPE, tuple(range(5000)))
    assert corpus.num_tokens <= 400 and corpus.continuations(_SCOPE, [4990, 4991], 1)
    corpus.clear()
    assert not corpus.num_tokens and not corpus.continuations(_SCOPE, [4990, 4991], 1)
