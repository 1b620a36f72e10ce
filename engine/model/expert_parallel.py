"""Expert parallelism: each rank holds whole experts; tokens are exchanged with all-to-all.

Experts are not chosen equally often, and a step waits for its busiest rank. So several ranks hold the busiest experts
and share their tokens; the other experts are distributed by load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.moe.expert_router import RoutedTokens
from engine.kernels.moe.expert_sum import ExpertSum
from engine.model.expert_bank import Bank
from engine.runner.parallel import TensorParallel

logger = logging.getLogger(__name__)

# T tokens, E hidden_size, X experts, C experts per token, N choices of this rank's tokens, M choices received,
# P maximum copies of an expert

# Steps between two placements of a layer's experts. Layers are staggered, never two in a step.
STEPS_BETWEEN_PLANS = 1000
# Minimum ratio of the busiest rank's load now to its load under the new plan.
_WORTH_MOVING = 1.1

Placement = list[list[int]]  # per rank, the experts that it holds, in the order of its places


class Experts(Protocol):
    """All experts of one layer, distributed over the ranks of a replica."""

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor | ExpertSum:
        """Return each token's weighted sum over its chosen experts, (T, E), on every rank, or a deferred sum.

        Every rank passes the same arguments.
        """
        ...


class SpreadExperts:
    """Implements Experts with expert parallelism.

    1  each rank takes its share of the tokens          3  experts compute what they received and send it back
    2  and sends them to the ranks of their experts     4  each rank sums for its tokens; all ranks gather the result

    With redundant slots the most used experts are held by several ranks. Periodically, in the same step on every rank,
    the ranks sum their counts, and experts are placed again if that makes the busiest rank less busy.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Bank],
        num_experts: int,
        parallel: TensorParallel,
        *,
        redundant: int = 0,
        turn: int = 0,
        weighs_inputs: bool = False,
    ) -> None:
        """read: builds a bank of the given experts. turn: steps by which this layer's planning is delayed.

        weighs_inputs: True if the weights multiply the experts' inputs (Llama 4).
        """
        self._read = read
        self._parallel = parallel
        self._redundant = redundant
        self._weighs_inputs = weighs_inputs
        self._step = -turn
        self._counts_X = torch.zeros(num_experts, dtype=torch.int64)
        # By expert; see _place.
        self._copies_X = self._rank_XP = self._place_XP = torch.empty(0)
        self._place(plan_experts([1] * num_experts, ranks=parallel.size, redundant=redundant))

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor:
        parallel, (first, end) = self._parallel, self._parallel.span(len(x_TE))
        chosen_TC, weights_TC = choices.chosen_TC[first:end], choices.weights_TC[first:end]
        if self._redundant:
            self._count_and_plan(chosen_TC)
        rank_N, place_N = self._locate(chosen_TC.flatten())
        order_N = rank_N.argsort(stable=True)

        to_each = rank_N.bincount(minlength=parallel.size)
        one_each = [1] * parallel.size
        from_each = parallel.all_to_all(to_each, one_each, one_each)
        counts = to_each.tolist(), from_each.tolist()
        x_NE = x_TE[first:end][order_N // chosen_TC.shape[1]]
        if self._weighs_inputs:
            x_NE = (x_NE * weights_TC.view(-1, 1)[order_N]).to(x_TE.dtype)
            weights_TC = torch.ones_like(weights_TC)
        come_ME = parallel.all_to_all(x_NE, *counts)
        place_M = parallel.all_to_all(place_N[order_N], *counts)
        out_ME = self._bank(come_ME, place_M.unsqueeze(1)).squeeze(1)

        out_NE = x_TE.new_empty(len(order_N), x_TE.shape[1])
        out_NE[order_N] = parallel.all_to_all(out_ME, *reversed(counts))
        # Sum in the router's order, wherever the experts were computed.
        own_TE = ExpertSum(out_NE.view(*chosen_TC.shape, x_TE.shape[1]), weights_TC).total()
        return parallel.all_gather(own_TE.T, len(x_TE)).T.contiguous()

    def _locate(self, expert_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each choice a rank that holds the expert and its place there; copies alternate."""
        if self._rank_XP.device != expert_N.device:
            self._rank_XP, self._place_XP, self._copies_X = (
                table.to(expert_N.device) for table in (self._rank_XP, self._place_XP, self._copies_X)
            )
        copy_N = torch.arange(len(expert_N), device=expert_N.device) % self._copies_X[expert_N]
        return self._rank_XP[expert_N, copy_N], self._place_XP[expert_N, copy_N]

    def _place(self, placement: Placement) -> None:
        self._placement = placement
        self._bank = self._read(placement[self._parallel.rank])
        held_by: list[list[tuple[int, int]]] = [[] for _ in self._counts_X]
        for rank, experts in enumerate(placement):
            for place, expert in enumerate(experts):
                held_by[expert].append((rank, place))
        self._copies_X = torch.tensor([len(held) for held in held_by])
        most = int(self._copies_X.max())
        tables = torch.tensor([(held * most)[:most] for held in held_by])
        self._rank_XP, self._place_XP = tables.unbind(-1)

    def _count_and_plan(self, chosen_TC: Tensor) -> None:
        """Count choices, and periodically place the experts by the counts of all ranks."""
        self._counts_X = self._counts_X.to(chosen_TC.device)
        flat_N = chosen_TC.flatten()
        self._counts_X.scatter_add_(0, flat_N, torch.ones_like(flat_N))
        self._step += 1
        if self._step < STEPS_BETWEEN_PLANS:
            return
        self._step = 0
        counts = self._parallel.all_reduce(self._counts_X).tolist()
        self._counts_X.zero_()
        plan = plan_experts(counts, ranks=self._parallel.size, redundant=self._redundant)
        before, after = busiest(self._placement, counts), busiest(plan, counts)
        if before > _WORTH_MOVING * after:
            logger.info("placed experts again busiest_before=%.2f busiest_after=%.2f", before, after)
            self._place(plan)


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
    # Place the most copied experts first, while every rank has room for them; then by load.
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
