"""Prompt lookup: propose the tokens that once followed the last ones, in the request or in finished answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import NamedTuple
from weakref import WeakKeyDictionary

from core.types.request import SequenceRequest
from engine.scheduler.sequence import Sequence
from engine.spec_decode.proposer import NO_PROPOSAL, NUM_KINDS, Proposal

MAX_MATCH = 16  # tokens; a longer match predicts no better
_MAX_PLACES = 16  # earlier places per lookup, the latest first
_MATCH_SLACK = 4  # tokens; a match shorter than the best one by this many has no vote
_CERTAIN = 0.75  # share of the votes below which a token is of another kind
_MIN_SHARE = 0.3  # share of the votes below which nothing is proposed

MAX_CORPUS_TOKENS = 1 << 17  # of all scopes; a token takes about 200 bytes
MAX_SCOPE_TOKENS = 1 << 16
_END = (1 << 31) - 1  # separates answers; no model has this token

assert NUM_KINDS >= 2 * MAX_MATCH


class Match(NamedTuple):
    """Earlier place that ends with the tokens that were looked up."""

    num_tokens: int  # of the match, 2 to MAX_MATCH
    next: int  # position of the token that followed


_Place = tuple[int, list[int]]  # length of the match, tokens that followed


class TokenIndex:
    """Hash chains of token pairs over a growing list, as in DEFLATE (RFC 1951, section 4)."""

    def __init__(self, tokens: list[int]) -> None:
        """tokens: kept by reference; the caller may only append to it."""
        self.tokens = tokens
        self._last: dict[int, int] = {}  # pair -> its last end
        self._before: list[int] = []  # position -> previous end of the pair that ends here, or -1

    def update(self) -> None:
        """Index the tokens appended since the last call."""
        tokens, last, before = self.tokens, self._last, self._before
        if not before and tokens:
            before.append(-1)
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 1] << 32 | tokens[end]
            before.append(last.get(pair, -1))
            last[pair] = end

    def matches_of_end(self) -> list[Match]:
        """Return earlier places that end like the list itself, the latest first."""
        self.update()
        return self._follow(self._before[-1], self.tokens) if self._before else []

    def matches(self, tokens: Seq[int]) -> list[Match]:
        """Return places that end like these tokens, the latest first."""
        self.update()
        return self._follow(self._last.get(tokens[-2] << 32 | tokens[-1], -1), tokens) if len(tokens) > 1 else []

    def _follow(self, end: int, wanted: Seq[int]) -> list[Match]:
        tokens, found = self.tokens, list[Match]()
        while end > 0 and len(found) < _MAX_PLACES:
            if end + 1 < len(tokens):
                limit, length = min(MAX_MATCH, end + 1, len(wanted)), 2
                while length < limit and tokens[end - length] == wanted[-1 - length]:
                    length += 1
                found.append(Match(length, end + 1))
            end = self._before[end]
        return found


class Scope(NamedTuple):
    """Owner of answers. Drafts never cross scopes: the speed of an answer would reveal the text of other answers."""

    tenant: str
    salt: str
    adapter: str

    @classmethod
    def of(cls, request: SequenceRequest) -> Scope:
        return cls(request.tenant, request.salt, request.adapter)


class Corpus:
    """Answers finished on this replica, bounded. Owned by the step thread.

    A scope has two halves: when the newer one is full, the older one is dropped, which makes eviction cheap. Beyond
    the total bound, the least recently used scope is dropped.
    """

    def __init__(self, max_tokens: int = MAX_CORPUS_TOKENS, max_scope_tokens: int = MAX_SCOPE_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._max_half = max_scope_tokens // 2
        self._halves: OrderedDict[Scope, list[TokenIndex]] = OrderedDict()  # newest half last, latest scope last
        self.num_tokens = 0

    def add(self, scope: Scope, answer: Seq[int]) -> None:
        tokens = answer[-self._max_half :]
        halves = self._halves.setdefault(scope, [])
        self._halves.move_to_end(scope)
        if not halves or len(halves[-1].tokens) + len(tokens) >= self._max_half:
            halves.append(TokenIndex([]))
            if len(halves) > 2:
                self.num_tokens -= len(halves.pop(0).tokens)
        halves[-1].tokens += (*tokens, _END)
        halves[-1].update()
        self.num_tokens += len(tokens) + 1
        while self.num_tokens > self._max_tokens and len(self._halves) > 1:
            _, dropped = self._halves.popitem(last=False)
            self.num_tokens -= sum(len(half.tokens) for half in dropped)

    def clear(self) -> None:
        self._halves.clear()
        self.num_tokens = 0

    def continuations(self, scope: Scope, tokens: Seq[int], max_tokens: int) -> list[_Place]:
        """Return (length of the match, tokens that followed) for answers that contain the last of these tokens."""
        halves = self._halves.get(scope)
        if halves is None:
            return []
        self._halves.move_to_end(scope)
        found = list[_Place]()
        for half in reversed(halves):
            for match in half.matches(tokens):
                followed = half.tokens[match.next : match.next + max_tokens]
                if _END in followed:
                    followed = followed[: followed.index(_END)]
                if followed:
                    found.append((match.num_tokens, followed))
        return found


class Suffix:
    """Proposer after SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975).

    Earlier places vote for the next token with the length of their match; places that voted for another token drop
    out. Kinds: match length up to the token, plus MAX_MATCH where the vote was not clear. Without a corpus this is
    prompt lookup (Saxena 2023), the method `ngram`.
    """

    def __init__(self, corpus: Corpus | None = None) -> None:
        """corpus: None to look only at the request itself."""
        self._corpus = corpus
        self._indexes: WeakKeyDictionary[Sequence, tuple[TokenIndex, Scope]] = WeakKeyDictionary()

    def propose(self, sequences: Seq[Sequence], max_tokens: int) -> list[Proposal]:
        return [self._propose(sequence, max_tokens) for sequence in sequences]

    def finished(self, sequence: Sequence) -> None:
        answer = sequence.tokens[sequence.request.num_prompt_tokens :]
        if self._corpus is not None and len(answer) > 2:
            self._corpus.add(Scope.of(sequence.request), answer)

    def _propose(self, sequence: Sequence, max_tokens: int) -> Proposal:
        known = self._indexes.get(sequence)
        if known is None:
            known = self._indexes[sequence] = TokenIndex(sequence.tokens), Scope.of(sequence.request)
        index, scope = known
        places = [
            (match.num_tokens, index.tokens[match.next : match.next + max_tokens]) for match in index.matches_of_end()
        ]
        if self._corpus is not None:
            places += self._corpus.continuations(scope, sequence.tokens, max_tokens)
        if not places:
            return NO_PROPOSAL
        best, _ = max(places)
        places = [place for place in places if place[0] + _MATCH_SLACK > best]
        return _vote(places, best, max_tokens)


def _vote(places: list[_Place], best: int, max_tokens: int) -> Proposal:
    """Return the tokens with most votes, and their kinds."""
    tokens: list[int] = []
    kinds: list[int] = []
    for i in range(max_tokens):
        if len(places) == 1:  # the common case: copy the rest
            tokens += places[0][1][i:max_tokens]
            kinds += [min(best + place, MAX_MATCH) - 1 for place in range(i, len(tokens))]
            break
        votes: dict[int, int] = {}
        for num_tokens, followed in places:
            if i < len(followed):
                votes[followed[i]] = votes.get(followed[i], 0) + num_tokens
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        share = votes[token] / sum(votes.values())
        if share < _MIN_SHARE:
            break
        if len(votes) > 1:
            places = [place for place in places if len(place[1]) <= i or place[1][i] == token]
        tokens.append(token)
        kinds.append(min(best + i, MAX_MATCH) - 1 + (MAX_MATCH if share < _CERTAIN else 0))
    return Proposal(tokens, kinds)
