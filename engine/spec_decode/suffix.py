"""What followed the last tokens wherever they stood before: in the request, and in answers to others like it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence
from engine.spec_decode.corpus import Answer, Corpus, Scope
from engine.spec_decode.histories import Histories
from engine.spec_decode.proposer import NOTHING, NUM_KINDS, Proposal, ProposedBranch
from engine.spec_decode.token_index import MOST_MATCH

_NEARLY = 4  # tokens: a place that agrees with so many fewer than the best one is not heard
_MOST_CERTAIN = 0.75  # of the votes: below that, a token is of another kind
_LEAST = 0.3
_MOST_BRANCHES = 2

assert NUM_KINDS >= 2 * MOST_MATCH


class Suffix:
    """Implements Proposer, after SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975): places vote for the next token,
    each with as many votes as tokens agree there, and those that voted for another one are not heard any more. Where
    some did, the first two times, they are heard in a branch. Its kinds: with how many tokens the best place agrees up
    to the one in question, and whether most votes were for it."""

    def __init__(self, histories: Histories, corpus: Corpus) -> None:
        self._histories = histories
        self._corpus = corpus

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return [self._propose(sequence, max_tokens) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        request = sequence.request
        answer = tuple(sequence.tokens[request.num_prompt_tokens :])
        if len(answer) > 2:
            self._corpus.add(Answer(Scope.of(request), answer))

    def _propose(self, sequence: Sequence, max_tokens: int) -> Proposal:
        index = self._histories.of(sequence)
        places = [
            (match.num_tokens, index.tokens[match.next : match.next + max_tokens]) for match in index.matches_of_end()
        ]
        places += self._corpus.continuations(Scope.of(sequence.request), sequence.tokens, max_tokens)
        if not places:
            return NOTHING
        best = max(num_tokens for num_tokens, _ in places)
        places = [place for place in places if place[0] + _NEARLY > best]
        tokens, kinds, others = _follow(places, best, 0, max_tokens)
        branches: list[ProposedBranch] = []
        for place, token, kind, heard in others[:_MOST_BRANCHES]:
            then = _follow(heard, best, place + 1, max_tokens)
            branches.append(ProposedBranch(place, [token, *then[0]], [kind, *then[1]]))
        return Proposal(tokens, kinds, branches)


_Place = tuple[int, list[int]]  # how many tokens agree, and what followed


def _follow(
    places: list[_Place], best: int, start: int, max_tokens: int
) -> tuple[list[int], list[int], list[tuple[int, int, int, list[_Place]]]]:
    """The token that has most votes, as long as one has enough, and its kind; and where another one has some: what it
    is, its kind, and who was for it."""
    tokens: list[int] = []
    kinds: list[int] = []
    others: list[tuple[int, int, int, list[_Place]]] = []
    for i in range(start, max_tokens):
        if len(places) == 1:  # mostly: it goes on as it did
            tokens += places[0][1][i:max_tokens]
            kinds += [min(best + place, MOST_MATCH) - 1 for place in range(i, start + len(tokens))]
            break
        votes: dict[int, int] = {}
        for num_tokens, followed in places:
            if i < len(followed):
                votes[followed[i]] = votes.get(followed[i], 0) + num_tokens
        if not votes:
            break
        # Mostly there is one.
        token, *second = heapq.nlargest(2, votes, key=votes.__getitem__) if len(votes) > 1 else votes
        total, kind = sum(votes.values()), min(best + i, MOST_MATCH) - 1
        share = votes[token] / total
        if share < _LEAST:
            break
        for other in second:
            is_weak = votes[other] / total < _LEAST
            heard = [place for place in places if i < len(place[1]) and place[1][i] == other]
            others.append((i, other, kind + MOST_MATCH * is_weak, heard))
            places = [place for place in places if len(place[1]) <= i or place[1][i] == token]
        tokens.append(token)
        kinds.append(kind + (MOST_MATCH if share < _MOST_CERTAIN else 0))
    return tokens, kinds, others
