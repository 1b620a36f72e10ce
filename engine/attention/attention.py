"""Paged attention in torch, for batches that mix prompts and single tokens.

Used where neither the CPU kernels nor Triton apply, and for long rows on CPUs where it is faster. The blocks of each
sequence are gathered and passed to scaled_dot_product_attention. A plan is made once per step and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Ints
from engine.kv.basis import change_basis
from engine.kv.pool import KVPool

# T tokens of the step, R rows (sequences), Q queries of one row, H query heads, K kv heads, G = H / K, D head_dim,
# B blocks, L = B * block_size keys

# Keys per gather, all rows together. Bounds the memory of a step beside the pool.
_MAX_GATHERED = 1 << 16
# Maximum ratio of gathered to needed keys.
_MAX_PADDING = 2.0
# Queries scored at a time where torch has no fused attention.
_SCORED_AT_ONCE = 256


@dataclass(frozen=True)
class PromptQueries:
    """One row with several queries."""

    # Its queries are tokens [first, end) of the step.
    first: int
    end: int
    runs_2RKB: Tensor
    # None: causal from position 0; keys are cut to L = Q.
    mask_QL: Tensor | None
    # Number of the L keys that belong to the row.
    most_keys: int

    def gather(self, pool: KVPool, layer: int, dtype: torch.dtype) -> Tensor:
        """Gather the row's keys and values; see KVPool.gather. Keys beyond the row's own are zeroed.

        A previous owner of the block may have left NaN there, which masking does not remove.
        """
        kv_2RKLD = pool.gather(layer, self.runs_2RKB, dtype)
        kv_2RKLD[..., self.most_keys :, :] = 0
        return kv_2RKLD


@dataclass(frozen=True)
class Singles:
    """Rows of one query each, with contexts of similar length."""

    tokens_R: Tensor
    runs_2RKB: Tensor
    mask_R11L: Tensor
    # Number of keys of the shortest row, and of the longest one.
    fewest_keys: int
    most_keys: int

    def gather(self, pool: KVPool, layer: int, dtype: torch.dtype) -> Tensor:
        """Gather keys and values of the rows, zeroed beyond each row's own."""
        kv_2RKLD = pool.gather(layer, self.runs_2RKB, dtype)
        is_hidden_R1N1 = self.mask_R11L[..., self.fewest_keys :].isneginf().transpose(-1, -2)
        kv_2RKLD[..., self.fewest_keys :, :].masked_fill_(is_hidden_R1N1, 0)
        return kv_2RKLD


@dataclass(frozen=True)
class AttentionPlan:
    """Blocks and keys that each row of a batch attends to, for one window or chunk (or neither) and number of heads."""

    prompts: list[PromptQueries]
    singles: list[Singles]


class AttentionPlans:
    """Plans of one step, made when a layer first needs them."""

    def __init__(self, batch: Batch, pool: KVPool, *, dtype: torch.dtype, rows: Sequence[int] | None = None) -> None:
        """dtype: dtype of the queries. rows: plan only these rows, each with any number of queries."""
        self._batch = batch
        self._pool = pool
        self._dtype = dtype
        self._rows = rows
        # By window, chunk and number of KV heads.
        self._plans: dict[tuple[int | None, int | None, int], AttentionPlan] = {}

    def of(self, attention: LayerAttention) -> AttentionPlan:
        key = attention.window, attention.chunk, self._pool.layout.heads[attention.layer].num_heads
        if key not in self._plans:
            self._plans[key] = self._plan(attention)
        return self._plans[key]

    def _plan(self, attention: LayerAttention) -> AttentionPlan:
        planner = _Planner(self._batch, self._pool, attention, self._dtype)
        if self._rows is not None:
            return AttentionPlan([planner.prompt(row) for row in self._rows], [])
        single = self._batch.query_lens == 1
        return AttentionPlan(
            prompts=[planner.prompt(row) for row in np.flatnonzero(~single).tolist()],
            singles=[planner.singles(rows) for rows in planner.similar(np.flatnonzero(single))],
        )


def paged_attention(q_THD: Tensor, pool: KVPool, attention: LayerAttention, plan: AttentionPlan) -> Tensor:
    """Compute the attention of every query; see LayerAttention.

    The batch's keys and values are already in the pool. q_THD: (T, H, D), H a multiple of the pool's KV heads.
    Returns (T, H, D) in the queries' dtype; rows outside the plan are undefined.
    """
    num_tokens, num_heads, dim = q_THD.shape
    layer = attention.layer
    num_kv_heads = pool.layout.heads[layer].num_heads
    q_TKGD = q_THD.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, dim)
    out_TKGD = torch.empty_like(q_TKGD)
    sinks_KG = None if attention.sinks_H is None else attention.sinks_H.view(num_kv_heads, -1)
    rule = ScoreRule(attention.scale, attention.soft_cap, sinks_KG)
    for prompt in plan.prompts:
        k_1KLD, v_1KLD = prompt.gather(pool, layer, q_THD.dtype)
        out_TKGD[prompt.first : prompt.end] = attend_prompt(
            q_TKGD[prompt.first : prompt.end], k_1KLD[0], v_1KLD[0], prompt.mask_QL, rule
        )
    for singles in plan.singles:
        k_RKLD, v_RKLD = singles.gather(pool, layer, q_THD.dtype)
        # Put the G queries that share a KV head in the place of query positions, so that no key is read twice.
        q_RKGD = q_TKGD[singles.tokens_R]
        mask_RKGL = singles.mask_R11L.expand(*q_RKGD.shape[:-1], -1)
        out_TKGD[singles.tokens_R] = _attend(q_RKGD, k_RKLD, v_RKLD, mask_RKGL, rule)
    out_THD = out_TKGD.view(num_tokens, num_heads, dim)
    return out_THD if attention.basis is None else change_basis(out_THD, attention.basis.outputs)


@dataclass(frozen=True)
class ScoreRule:
    """Rule that turns products of queries and keys into weights; see LayerAttention."""

    scale: float
    soft_cap: float | None = None
    sinks_KG: Tensor | None = None


def attend_prompt(q_QKGD: Tensor, k_KLD: Tensor, v_KLD: Tensor, mask_QL: Tensor | None, rule: ScoreRule) -> Tensor:
    """Attend one row's queries to its keys. Returns (Q, K, G, D of the values); G heads share keys without a copy.

    mask: see PromptQueries.
    """
    num_queries, _, group, _ = q_QKGD.shape
    if mask_QL is None:
        k_KLD, v_KLD = k_KLD[:, :num_queries], v_KLD[:, :num_queries]
    q_KGQD = q_QKGD.permute(1, 2, 0, 3)
    k_KGLD, v_KGLD = (x_KLD.unsqueeze(1).expand(-1, group, -1, -1) for x_KLD in (k_KLD, v_KLD))
    sinks_KG1 = None if rule.sinks_KG is None else rule.sinks_KG.unsqueeze(-1)
    return _attend(q_KGQD, k_KGLD, v_KGLD, mask_QL, replace(rule, sinks_KG=sinks_KG1)).permute(2, 0, 1, 3)


def _attend(q_QD: Tensor, k_LD: Tensor, v_LD: Tensor, mask_QL: Tensor | None, rule: ScoreRule) -> Tensor:
    """Attend queries to keys, over any leading dimensions. mask None: causal, with Q = L. rule.sinks: one per query."""
    if rule.soft_cap is None and rule.sinks_KG is None:
        return F.scaled_dot_product_attention(
            q_QD, k_LD, v_LD, attn_mask=mask_QL, is_causal=mask_QL is None, scale=rule.scale
        )
    num_queries, num_keys = q_QD.shape[-2], k_LD.shape[-2]
    if mask_QL is None:
        mask_QL = torch.full((num_queries, num_keys), -torch.inf, device=q_QD.device).triu_(1)
    mask_QL = mask_QL.expand(*q_QD.shape[:-1], num_keys)
    out_QD = q_QD.new_empty(*q_QD.shape[:-1], v_LD.shape[-1])
    for start in range(0, num_queries, _SCORED_AT_ONCE):
        some = slice(start, start + _SCORED_AT_ONCE)
        scores_QL = (q_QD[..., some, :] @ k_LD.transpose(-1, -2)).float() * rule.scale
        if rule.soft_cap is not None:
            scores_QL = torch.tanh(scores_QL / rule.soft_cap) * rule.soft_cap
        scores_QL = scores_QL + mask_QL[..., some, :]
        if rule.sinks_KG is not None:
            sinks_Q1 = rule.sinks_KG.expand(q_QD.shape[:-1])[..., some, None]
            scores_QL = torch.cat((scores_QL, sinks_Q1), dim=-1)
        out_QD[..., some, :] = scores_QL.softmax(-1)[..., :num_keys].to(v_LD.dtype) @ v_LD
    return out_QD


class _Planner:
    """Builder of the parts of one plan."""

    def __init__(self, batch: Batch, pool: KVPool, attention: LayerAttention, dtype: torch.dtype) -> None:
        window, chunk = attention.window, attention.chunk
        self._batch = batch
        self._pool = pool
        self._layer = attention.layer
        self._window = window
        self._chunk = chunk
        self._dtype = dtype
        self._starts = batch.context_lens - batch.query_lens
        self._ends = np.cumsum(batch.query_lens)
        # Blocks [low, high) of a row's table hold everything that its queries attend to.
        block_size = pool.layout.block_size
        lowest_key = np.zeros_like(self._starts)
        if window is not None:
            lowest_key = np.maximum(0, self._starts - window + 1)
        elif chunk is not None:
            lowest_key = self._starts // chunk * chunk
        self._low = lowest_key // block_size
        self._high = -(-batch.context_lens // block_size)

    def prompt(self, row: int) -> PromptQueries:
        first, end = int(self._ends[row] - self._batch.query_lens[row]), int(self._ends[row])
        low, high = int(self._low[row]), int(self._high[row])
        runs_2RKB = self._pool.runs(self._layer, self._batch.block_tables[row : row + 1, low:high])
        num_keys = int(self._batch.context_lens[row]) - low * self._pool.layout.block_size
        if self._starts[row] == 0 and min(self._window or num_keys, self._chunk or num_keys) >= end - first:
            return PromptQueries(first, end, runs_2RKB, None, num_keys)
        mask_1QL = self._mask(self._batch.positions[None, first:end], self._low[[row]], high - low)
        return PromptQueries(first, end, runs_2RKB, mask_1QL[0], num_keys)

    def singles(self, rows: Ints) -> Singles:
        low, high = self._low[rows], self._high[rows]
        width = int((high - low).max())
        # Pad shorter rows with their own last block, at positions that the mask hides.
        columns = np.minimum(low[:, None] + np.arange(width), high[:, None] - 1)
        tokens = self._ends[rows] - 1
        mask_R1L = self._mask(self._batch.positions[tokens, None], low, width)
        num_keys = self._batch.context_lens[rows] - low * self._pool.layout.block_size
        return Singles(
            tokens_R=torch.from_numpy(tokens).to(self._pool.device),
            runs_2RKB=self._pool.runs(self._layer, self._batch.block_tables[rows[:, None], columns]),
            mask_R11L=mask_R1L.unsqueeze(1),
            fewest_keys=int(num_keys.min()),
            most_keys=int(num_keys.max()),
        )

    def _mask(self, positions_RQ: Ints, low_R: Ints, width: int) -> Tensor:
        """Return the additive mask: 0 for visible keys, -inf for others. Keys start at block `low` of each row."""
        device, block_size = self._pool.device, self._pool.layout.block_size
        queries_RQ1 = torch.from_numpy(positions_RQ).to(device).unsqueeze(-1)
        first_R11 = torch.from_numpy(low_R * block_size).to(device).view(-1, 1, 1)
        keys_R1L = first_R11 + torch.arange(width * block_size, device=device)
        is_hidden_RQL = keys_R1L > queries_RQ1
        if self._window is not None:
            is_hidden_RQL |= keys_R1L <= queries_RQ1 - self._window
        elif self._chunk is not None:
            is_hidden_RQL |= keys_R1L < queries_RQ1 // self._chunk * self._chunk
        return torch.zeros(is_hidden_RQL.shape, dtype=self._dtype, device=device).masked_fill_(
            is_hidden_RQL, -torch.inf
        )

    def similar(self, rows: Ints) -> Iterator[Ints]:
        """Split rows into groups in which padding to the longest costs little."""
        widths = (self._high - self._low)[rows]
        order = np.argsort(widths, kind="stable")
        rows, widths = rows[order], widths[order]
        begin, needed = 0, 0
        for end, width in enumerate(widths):
            gathered = int(width) * (end + 1 - begin)
            too_many = gathered * self._pool.layout.block_size > _MAX_GATHERED
            if end > begin and (too_many or gathered > _MAX_PADDING * (needed + width)):
                yield rows[begin:end]
                begin, needed = end, 0
            needed += int(width)
        if len(rows):
            yield rows[begin:]
