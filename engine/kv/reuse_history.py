"""How soon blocks of one kind are asked for again, learnt from what has happened to their like.

Ages are sorted into bins that widen geometrically. For each kind we count how many blocks were used again at an age,
and how many reached it without: the hazard of a bin is their quotient, drawn towards a prior while there is little to
go by. What a block of some age is worth keeping is its Gittins index, the best bargain of uses per block-second that
holding it for any further while can bring:

    index(a) = max over h of   P(used within h | age a) / E[seconds held, at most h | age a]

Gittins 1979; for caches see Beckmann et al., LHD, NSDI 2018.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

NUM_BINS = 40
_FIRST_S = 2.0  # width of the first bin
_GROWTH = 1.19  # the last bin begins at about half an hour
_EDGES_S = [_FIRST_S * _GROWTH**k for k in range(NUM_BINS)]
_WIDTHS_S = [_EDGES_S[0], *(after - before for before, after in itertools.pairwise(_EDGES_S))]
_PRIOR_HAZARD = 0.01  # per bin: a constant in widening bins is a hazard that falls as 1 / age
_PRIOR_WEIGHT = 60.0  # blocks' worth of experience


def bin_of(age_s: float) -> int:
    if age_s < _FIRST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(math.log(age_s / _FIRST_S) / math.log(_GROWTH)))


class ReuseHistory:
    """The experience with each of `num_kinds` kinds of blocks.

    `prior` says how much likelier than average each kind is to be used again, as long as nothing is known of it.
    """

    def __init__(self, prior: Iterable[float]) -> None:
        self._prior = list(prior)
        self._used = [[0.0] * NUM_BINS for _ in self._prior]
        self._lost = [[0.0] * NUM_BINS for _ in self._prior]  # out of sight at that age, without having been used
        self._index = [_gittins(self._hazards(kind, [0.0] * NUM_BINS)) for kind in range(len(self._prior))]

    def used(self, kind: int, age_s: float) -> None:
        """A block of this kind was asked for again at this age."""
        self._used[kind][bin_of(age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        """We shall not know what becomes of this block: up to this age nobody has asked for it."""
        self._lost[kind][bin_of(age_s)] += 1

    def index(self, kind: int, age_s: float) -> float:
        """Uses per second of holding such a block, at best."""
        return self._index[kind][bin_of(age_s)]

    def learn(self, waiting: Iterable[tuple[int, float]], *, keep: float) -> None:
        """Work out the indices anew. `waiting` are (kind, age) of those still watched; `keep` of the past counts on."""
        censored = [list(lost) for lost in self._lost]
        for kind, age_s in waiting:
            censored[kind][bin_of(age_s)] += 1
        self._index = [_gittins(self._hazards(kind, censored[kind])) for kind in range(len(self._prior))]
        for counts in (*self._used, *self._lost):
            counts[:] = [count * keep for count in counts]

    def _hazards(self, kind: int, censored: list[float]) -> list[float]:
        """Kaplan and Meier's estimate: of those that reached a bin, the share that was used in it."""
        hazards = [0.0] * NUM_BINS
        at_risk = 0.0
        for k in reversed(range(NUM_BINS)):
            used = self._used[kind][k]
            at_risk += used + censored[k]
            prior = _PRIOR_HAZARD * self._prior[kind]
            hazards[k] = (used + prior * _PRIOR_WEIGHT) / (at_risk - censored[k] / 2 + _PRIOR_WEIGHT)
        return hazards


def _gittins(hazards: list[float]) -> list[float]:
    index = []
    for start in range(NUM_BINS):
        waiting, held_s, used, best = 1.0, 0.0, 0.0, 0.0
        for hazard, width_s in zip(hazards[start:], _WIDTHS_S[start:], strict=True):
            held_s += waiting * width_s * (1 - hazard / 2)
            used += waiting * hazard
            waiting *= 1 - hazard
            best = max(best, used / held_s)
        index.append(best)
    return index
