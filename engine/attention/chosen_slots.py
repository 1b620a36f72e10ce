"""Choice of the positions that sparse attention attends to, by kernels: see chosen_positions.py.

Attention reads the chosen rows where they are: to the kernel, the pool has blocks of one position, and the chosen slots
are the block tables. Shapes and launches depend only on numbers that the host knows, so steps can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.chosen_positions import IndexedTokens, Seekers
from engine.attention.latent_heads import Expansion
from engine.kernels.attention.best_positions import launch_best_slots
from engine.kernels.attention.index_scores import RESIDENT, TILE_QUERIES, launch_index_scores
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.latent_attention import launch_latent_decode_attention, splits_of_latents
from engine.kernels.language import cdiv
from engine.kv.pool import KVPool

# T tokens of the step, Q queries of one part of it, R tiles of queries, H query heads of this rank, J numbers of an
# absorbed query, W value_dim, U chosen positions

# Scores, or partial results of attention, of the queries that are computed together.
PART_BYTES = 1 << 28
_ALIGNED = 16


@dataclass
class ChoosingQueries:
    """Part of a step's queries, with the positions that they chose."""

    # Indices into T; a slice if all rows of the step have one query.
    tokens_Q: Tensor | slice
    _contexts_Q: Tensor
    _tables_RB: Tensor
    _tile: int
    # Number of keys scored for each tile; 0 if its queries see at most top_k.
    _scored_R: Tensor
    _scoring: Splits
    # Columns of the scores.
    _width: int
    # Positions that each query attends to.
    _counts_Q: Tensor
    _attending: Splits
    # Slots that the last layer with an indexer chose.
    _slots_QU: Tensor | None = None

    @classmethod
    def of(cls, seekers: Seekers, *, are_all: bool, top_k: int, expansion: Expansion) -> Iterator[ChoosingQueries]:
        """Yield the queries, as many at a time as PART_BYTES permit. are_all: True if they are all of the step."""
        num_heads, _, latent_dim = expansion.value_HWC.shape
        tile = 1 if len(seekers.tables_RB) == len(seekers.tokens_Q) else TILE_QUERIES
        width = cdiv(seekers.longest, _ALIGNED) * _ALIGNED
        at_once = max(1, PART_BYTES // (4 * max(width, num_heads * latent_dim)) // tile) * tile
        for first in range(0, len(seekers.tokens_Q), at_once):
            part = slice(first, first + at_once)
            contexts_Q, tables_RB = seekers.contexts_Q[part], seekers.tables_RB
            contexts_R = contexts_Q
            if tile == 1:
                tables_RB = tables_RB[part]
            else:
                # Contexts of the tiles' last queries.
                num_tiles = cdiv(len(contexts_Q), tile)
                contexts_R = torch.cat((contexts_Q[tile - 1 :: tile], contexts_Q[-1:]))[:num_tiles]
            scored_R = torch.where(contexts_R > top_k, contexts_R, 0)
            counts_Q = contexts_Q.clamp_max(top_k)
            yield cls(
                tokens_Q=part if are_all else seekers.tokens_Q[part],
                _contexts_Q=contexts_Q,
                _tables_RB=tables_RB.expand(len(contexts_R), -1),
                _tile=tile,
                _scored_R=scored_R,
                _scoring=Splits.of(scored_R, num_heads=1, longest=seekers.longest, resident=RESIDENT),
                _width=width,
                _counts_Q=counts_Q,
                _attending=splits_of_latents(counts_Q, num_heads=num_heads, longest=top_k),
            )

    def __len__(self) -> int:
        return len(self._contexts_Q)

    def choose(self, indexed: IndexedTokens, pool: KVPool, layer: int) -> None:
        """Choose positions by the index keys in the pool, for this layer and the next ones without an indexer."""
        scores_QL = torch.empty(len(self), self._width, dtype=torch.float32, device=pool.device)
        launch_index_scores(
            indexed.q_TGI[self.tokens_Q],
            indexed.weights_TG[self.tokens_Q],
            *pool.layer(layer),
            tile=self._tile,
            tables_RB=self._tables_RB,
            contexts_R=self._scored_R,
            splits=self._scoring,
            scores_QL=scores_QL,
        )
        self._slots_QU = launch_best_slots(
            scores_QL,
            self._contexts_Q,
            self._tables_RB,
            tile=self._tile,
            block_size=pool.layout.block_size,
            top_k=indexed.index.top_k,
        )

    def attend(self, absorbed_QHJ: Tensor, pool: KVPool, layer: int, expansion: Expansion, *, scale: float) -> Tensor:
        """Attend to the chosen positions: (Q, H, W)."""
        assert self._slots_QU is not None, "no layer has chosen positions"
        codes, scales = pool.layer(layer)
        return launch_latent_decode_attention(
            absorbed_QHJ,
            codes.view(-1, 1, 1, 1, codes.shape[-1]),
            None if scales is None else scales.view(-1, 1, 1, 1),
            expansion.value_HWC,
            scale=scale,
            tables_RB=self._slots_QU,
            contexts_R=self._counts_Q,
            splits=self._attending,
        )
