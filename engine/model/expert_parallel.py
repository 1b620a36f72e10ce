"""Expert parallelism: whole experts on each rank, and tokens that travel to them and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.moe.expert_router import RoutedTokens
from engine.kernels.moe.expert_sum import ExpertSum
from engine.model.expert_bank import Bank
from engine.runner.expert_placement import Placement, busiest, plan_experts
from engine.runner.parallel import TensorParallel

logger = logging.getLogger(__name__)

# T tokens, E hidden_size, X experts, C experts chosen for each token, N = choices of our tokens, M = choices that come
# to us, P copies of an expert at most

# The experts of each layer are placed anew so often; one layer after another, never two in a step.
STEPS_BETWEEN_PLANS = 1000
_WORTH_MOVING = 1.1  # by how much the busiest rank must have more to do than it would have


class Experts(Protocol):
    """All experts of one layer, shared by the ranks of a replica."""

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor | ExpertSum:
        """For each token the weighted sum of its chosen experts, (T, E), complete on every rank; or what will be that.

        Every rank gives the same arguments.
        """
        ...


class SpreadExperts:
    """Implements Experts.

    1  each rank takes its share of the tokens          3  experts compute what has come, and send it back
    2  and sends them to the ranks of their experts     4  each rank weighs and sums for its tokens, all get all of it

    With redundant places the experts that were chosen most are held by several ranks. Now and then, in the same step on
    every rank, what each has counted is summed, and experts are placed anew if that makes the busiest rank less busy.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Bank],
        num_experts: int,
        parallel: TensorParallel,
        *,
        redundant: int = 0,
        turn: int = 0,
    ) -> None:
        """read: makes a bank of these experts. turn: how many steps later than others to think of a new plan."""
        self._read = read
        self._parallel = parallel
        self._redundant = redundant
        self._step = -turn
        self._counts_X = torch.zeros(num_experts, dtype=torch.int64)
        self._copies_X = self._rank_XP = self._place_XP = torch.empty(0)  # of each expert; see _place
        self._place(plan_experts([1] * num_experts, ranks=parallel.size, redundant=redundant))

    def __call__(self, x_TE: Tensor, choices: RoutedTokens) -> Tensor:
        parallel, (first, end) = self._parallel, self._parallel.span(len(x_TE))
        chosen_TC, weights_TC = choices.chosen_TC[first:end], choices.weights_TC[first:end]
        if self._redundant:
            self._think(chosen_TC)
        rank_N, place_N = self._whereabouts(chosen_TC.flatten())
        order_N = rank_N.argsort(stable=True)

        to_each = rank_N.bincount(minlength=parallel.size)
        one_each = [1] * parallel.size
        from_each = parallel.all_to_all(to_each, one_each, one_each)
        counts = to_each.tolist(), from_each.tolist()
        come_ME = parallel.all_to_all(x_TE[first:end][order_N // chosen_TC.shape[1]], *counts)
        place_M = parallel.all_to_all(place_N[order_N], *counts)
        out_ME = self._bank(come_ME, place_M.unsqueeze(1)).squeeze(1)

        out_NE = x_TE.new_empty(len(order_N), x_TE.shape[1])
        out_NE[order_N] = parallel.all_to_all(out_ME, *reversed(counts))
        # In the order in which the router chose them, wherever they computed.
        own_TE = ExpertSum(out_NE.view(*chosen_TC.shape, x_TE.shape[1]), weights_TC).total()
        return parallel.all_gather(own_TE.T, len(x_TE)).T.contiguous()

    def _whereabouts(self, expert_N: Tensor) -> tuple[Tensor, Tensor]:
        """For each choice a rank that holds the expert, and the expert's place in its bank; copies take turns."""
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

    def _think(self, chosen_TC: Tensor) -> None:
        """Count, and when it is time, place the experts by what all ranks have counted since the last time."""
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
            logger.info("experts placed anew, busiest rank %.2f -> %.2f of its share", before, after)
            self._place(plan)
