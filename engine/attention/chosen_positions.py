"""Choice of the positions that sparse attention attends to: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.

    score_tj = sum over g of weight_tg relu(q_tg . key_j)      t query, j position up to its own, g index head

A query attends to the `top_k` positions with the largest scores; ties go to the first. Index keys are the last numbers
of latent rows. Sequences of at most `top_k` positions are attended to as a whole, without scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from core.model.shape import IndexConfig
from engine.kernels.attention.best_positions import best_positions
from engine.kernels.attention.index_scores import finite_scores
from engine.kernels.language import cdiv
from engine.kv.pool import KVPool

# T tokens of the step, Q queries of one part of it, R rows, B blocks, L keys, G index heads, I numbers of an index key,
# U chosen positions

# Products of queries and keys that are held at a time, in fp32.
PRODUCTS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Seekers:
    """Queries that choose positions: one per row, or all queries of one row."""

    # Tokens of the step.
    tokens_Q: Tensor
    # Positions that each query sees, its own included.
    contexts_Q: Tensor
    # Block tables; R = Q or R = 1.
    tables_RB: Tensor
    # Upper bound of the contexts, on the host.
    longest: int


@dataclass(frozen=True)
class ChosenPositions:
    """Positions that the queries of one part of a step attend to."""

    tokens_Q: Tensor
    # In order.
    positions_QU: Tensor
    # Places in the pool: block id * S + offset.
    slots_QU: Tensor
    # True for positions in the query's context, which may have fewer than U.
    is_seen_QU: Tensor

    def mask(self, num_keys: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of all keys, (Q, num_keys): 0 for chosen ones, -inf for others."""
        device = self.positions_QU.device
        mask_QL = torch.full((len(self.positions_QU), num_keys), -torch.inf, dtype=dtype, device=device)
        return mask_QL.scatter_(1, self.positions_QU, self.mask_of_chosen(dtype))

    def mask_of_chosen(self, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of the chosen keys, (Q, U): 0, or -inf for those outside of the query's context."""
        mask_QU = torch.zeros(self.is_seen_QU.shape, dtype=dtype, device=self.is_seen_QU.device)
        return mask_QU.masked_fill_(~self.is_seen_QU, -torch.inf)


@dataclass(frozen=True)
class IndexedTokens:
    """Outputs of one layer's indexer for the tokens of a step."""

    index: IndexConfig
    q_TGI: Tensor
    key_TI: Tensor
    # fp32, including the scale of the scores.
    weights_TG: Tensor

    def choose(self, pool: KVPool, layer: int, seekers: Seekers) -> ChosenPositions | None:
        """Choose positions by the index keys in the pool; None if every query attends to all positions that it sees."""
        if seekers.longest <= self.index.top_k:
            return None
        block_size = pool.layout.block_size
        tables_RB = seekers.tables_RB[:, : cdiv(seekers.longest, block_size)].long()
        num_at_once = max(1, PRODUCTS_AT_ONCE // (self.index.num_heads * tables_RB.shape[1] * block_size))
        parts = []
        for tokens_Q, contexts_Q, rows_RB in zip(
            torch.split(seekers.tokens_Q, num_at_once),
            torch.split(seekers.contexts_Q, num_at_once),
            repeat(tables_RB) if len(tables_RB) == 1 else torch.split(tables_RB, num_at_once),
            strict=False,
        ):
            keys_RLI = pool.read_tails(layer, rows_RB, self.index.head_dim)
            scores_QL = _scores(self.q_TGI[tokens_Q], self.weights_TG[tokens_Q], keys_RLI)
            parts.append(best_positions(finite_scores(scores_QL), contexts_Q, self.index.top_k))
        positions_QU = torch.cat(parts)
        blocks_QU = tables_RB.expand(len(positions_QU), -1).gather(1, positions_QU // block_size)
        return ChosenPositions(
            tokens_Q=seekers.tokens_Q,
            positions_QU=positions_QU,
            slots_QU=blocks_QU * block_size + positions_QU % block_size,
            is_seen_QU=positions_QU < seekers.contexts_Q[:, None],
        )


def _scores(q_QGI: Tensor, weights_QG: Tensor, keys_RLI: Tensor) -> Tensor:
    """Return the scores (Q, L) in fp32. keys: R = Q, or R = 1 for queries of one row."""
    keys_RIL = keys_RLI.float().transpose(1, 2)
    products_QGL = q_QGI.float() @ (keys_RIL[0] if len(keys_RIL) == 1 else keys_RIL)
    return (weights_QG.unsqueeze(1) @ products_QGL.relu_()).squeeze(1)
