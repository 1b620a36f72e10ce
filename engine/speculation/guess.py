"""What a method has said of a row, and what is believed of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
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
