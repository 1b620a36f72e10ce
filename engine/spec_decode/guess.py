"""What a method has said of a row, and what is believed of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import eq
from typing import NamedTuple


class GuessedBranch(NamedTuple):
    """What may follow instead of a guess's tokens, from one of them on."""

    place: int
    tokens: Seq[int]
    kind: int  # of the first; below 0: its own method learns from it
    chances: Seq[float]  # of each, that it and those before it are right, in the guess and here


@dataclass(eq=False, slots=True)
class Guess:
    """Of a row: until the row's own tokens have shown how much of it was right."""

    start: int  # position of its first token
    tokens: Seq[int]
    kinds: Seq[int]
    chances: Seq[float]  # of each, that it and those before it are right
    branches: Seq[GuessedBranch] = ()

    def shares(self, num_tokens: int | None = None) -> list[float]:
        """Of each, or of the first so many, the chance that it is right if all before it are."""
        before, found = 1.0, list[float]()
        for chance in self.chances[:num_tokens]:
            found.append(chance / before if before else 0.0)
            before = chance
        return found

    def with_chances(self, chances: Seq[float]) -> Guess:
        """The same, believed otherwise."""
        return Guess(self.start, self.tokens, self.kinds, chances, self.branches)

    def says_what(self, other: Guess) -> bool:
        """Whether both have the same tokens, but for branches."""
        return len(self.tokens) == len(other.tokens) and all(map(eq, self.tokens, other.tokens))

    def outcome(self, tokens: Seq[int]) -> tuple[int, int]:
        """How many of its tokens are right, and how many can be judged, where a row has these: one more, or all."""
        known = tokens[self.start : self.start + len(self.tokens)]
        num_right = next((i for i, token in enumerate(known) if token != self.tokens[i]), len(known))
        return num_right, min(num_right + 1, len(known))
