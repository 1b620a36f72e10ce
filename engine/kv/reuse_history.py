"""Reuse statistics of cached blocks, by kind and age.

Ages are sorted into geometrically widening bins. For each kind we count the blocks that were reused at an age and those
that reached it without reuse. The hazard of a bin is their quotient, shrunk towards a prior while data is scarce. The
value of keeping a block of some age is its Gittins index: the best rate of uses per block-second over any holding time:

    index(a) = max over h of   P(used within h | age a) / E[seconds held, at most h | age a]

Gittins 1979; for caches see Beckmann et al., LHD, NSDI 2018.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

NUM_BINS = 40
# Width of the first bin, in seconds.
_FIRST_S = 2.0
# The last bin begins at about half an hour.
_GROWTH = 1.19
_EDGES_S = [_FIRST_S * _GROWTH**k for k in range(NUM_BINS)]
_WIDTHS_S = [_EDGES_S[0], *(after - before for before, after in itertools.pairwise(_EDGES_S))]
# Per bin. A constant hazard in widening bins is a hazard that falls as 1 / age.
_PRIOR_HAZARD = 0.01
# Weight of the prior, in blocks.
_PRIOR_WEIGHT = 60.0


def bin_of(age_s: float) -> int:
    if age_s < _FIRST_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(math.log(age_s / _FIRST_S) / math.log(_GROWTH)))


class ReuseHistory:
    """Reuse counts of blocks, by kind.

    `prior` is the likelihood of reuse of each kind relative to the average, before any observation.
    """

    def __init__(self, prior: Iterable[float]) -> None:
        self._prior = list(prior)
        self._used = [[0.0] * NUM_BINS for _ in self._prior]
        # Censored: dropped from observation at that age without reuse.
        self._lost = [[0.0] * NUM_BINS for _ in self._prior]
        self._index = [_gittins(self._hazards(kind, [0.0] * NUM_BINS)) for kind in range(len(self._prior))]

    def used(self, kind: int, age_s: float) -> None:
        """Count a reuse of a block of this kind at this age."""
        self._used[kind][bin_of(age_s)] += 1

    def lost(self, kind: int, age_s: float) -> None:
        """Count a block that left observation at this age without reuse (censored)."""
        self._lost[kind][bin_of(age_s)] += 1

    def index(self, kind: int, age_s: float) -> float:
        """Return the Gittins index of such a block, in uses per second held."""
        return self._index[kind][bin_of(age_s)]

    def learn(self, waiting: Iterable[tuple[int, float]], *, keep: float) -> None:
        """Recompute the indices. `waiting`: (kind, age) of blocks still observed; `keep`: share of past counts kept."""
        censored = [list(lost) for lost in self._lost]
        for kind, age_s in waiting:
            censored[kind][bin_of(age_s)] += 1
        self._index = [_gittins(self._hazards(kind, censored[kind])) for kind in range(len(self._prior))]
        for counts in (*self._used, *self._lost):
            counts[:] = [count * keep for count in counts]

    def _hazards(self, kind: int, censored: list[float]) -> list[float]:
        """Return the Kaplan-Meier estimate: the share of the blocks reaching a bin that is reused in it."""
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
