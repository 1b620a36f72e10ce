"""Placement of experts on ranks, with copies of popular ones, for balanced load. Pure.

Experts are not chosen equally often, and a step waits for its busiest rank. So several ranks hold the busiest experts
and share their tokens; the other experts are distributed by load.
"""

from __future__ import annotations

from collections.abc import Sequence

Placement = list[list[int]]  # per rank, the experts that it holds, in the order of its places


def plan_experts(counts: Sequence[float], *, ranks: int, redundant: int = 0) -> Placement:
    """Place every expert once, and `redundant` further copies; each rank gets an equal share of the places.

    counts: how often each expert was chosen. No rank holds an expert twice. Equal counts give equal placements.
    """
    num_places = len(counts) + redundant
    assert ranks <= len(counts) and num_places <= ranks * len(counts)
    copies = _copies(counts, ranks=ranks, redundant=redundant)
    room = [num_places * (rank + 1) // ranks - num_places * rank // ranks for rank in range(ranks)]
    load = [0.0] * ranks
    placement: Placement = [[] for _ in range(ranks)]
    # The most copied first, while there is room for them everywhere; then by weight.
    for expert in sorted(range(len(counts)), key=lambda x: (-copies[x], -counts[x], x)):
        share = counts[expert] / copies[expert]
        free = [rank for rank in range(ranks) if room[rank]]
        if copies[expert] > 1:
            free.sort(key=lambda rank: (-room[rank], load[rank]))
        else:
            free.sort(key=lambda rank: (load[rank], -room[rank]))
        for rank in free[: copies[expert]]:
            placement[rank].append(expert)
            room[rank] -= 1
            load[rank] += share
    return [sorted(experts) for experts in placement]


def busiest(placement: Placement, counts: Sequence[float]) -> float:
    """Return the load of the busiest rank relative to the mean; 1 is best."""
    copies = [sum(expert in experts for experts in placement) for expert in range(len(counts))]
    loads = [sum(counts[expert] / copies[expert] for expert in experts) for experts in placement]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _copies(counts: Sequence[float], *, ranks: int, redundant: int) -> list[int]:
    """Return the copies of each expert; each further one goes to the expert with the highest load per copy."""
    copies = [1] * len(counts)
    for _ in range(redundant):
        able = [expert for expert in range(len(counts)) if copies[expert] < ranks]
        most = max(able, key=lambda expert: (counts[expert] / copies[expert], -copies[expert], -expert))
        copies[most] += 1
    return copies
