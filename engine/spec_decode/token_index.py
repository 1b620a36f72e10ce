"""Tokens that grow at their end, and where in them a pair of tokens has occurred before."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

MOST_MATCH = 16  # tokens: what is more says nothing more
_MOST_LOOKS = 16  # at earlier places, the latest first


class Match(NamedTuple):
    """An earlier place whose last tokens are those that were asked for."""

    num_tokens: int  # so many of them: 2 to MOST_MATCH
    next: int  # position of the token that followed


class TokenIndex:
    """Chains of equal pairs, as compressors keep them (RFC 1951, section 4): a token more is one look into a table, and
    a match is found in as many looks as chains are followed, whatever the length."""

    def __init__(self, tokens: list[int]) -> None:
        """tokens: somebody else's, who appends to them and does nothing else."""
        self.tokens = tokens
        self._last: dict[int, int] = {}  # pair -> where it ends, the last time
        self._before: list[int] = []  # by position: where the pair that ends here has ended before; -1: nowhere

    def note(self) -> None:
        """The tokens that have come since the last call."""
        tokens, last, before = self.tokens, self._last, self._before
        if not before and tokens:
            before.append(-1)
        for end in range(len(before), len(tokens)):
            pair = tokens[end - 1] << 32 | tokens[end]
            before.append(last.get(pair, -1))
            last[pair] = end

    def matches_of_end(self) -> list[Match]:
        """Earlier places that end as the tokens themselves do. The latest first."""
        self.note()
        return self._follow(self._before[-1], self.tokens) if self._before else []

    def matches(self, tokens: Seq[int]) -> list[Match]:
        """Places that end as these other tokens do. The latest first."""
        self.note()
        return self._follow(self._last.get(tokens[-2] << 32 | tokens[-1], -1), tokens) if len(tokens) > 1 else []

    def _follow(self, end: int, wanted: Seq[int]) -> list[Match]:
        tokens, found = self.tokens, list[Match]()
        while end > 0 and len(found) < _MOST_LOOKS:
            if end + 1 < len(tokens):
                most, length = min(MOST_MATCH, end + 1, len(wanted)), 2
                while length < most and tokens[end - length] == wanted[-1 - length]:
                    length += 1
                found.append(Match(length, end + 1))
            end = self._before[end]
        return found
