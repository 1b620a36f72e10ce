"""References of the attention kernels in torch, with the arguments and results of the launchers of these names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.best_positions import best_positions
from engine.kernels.attention.dense_prefill import WHOLE, Slice
from engine.kernels.attention.index_scores import finite_scores, index_keys
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.attention.kv_write import reference_write_kv, write_rows
from engine.kernels.attention.queries import QueryGroups, QueryTiles
from engine.kernels.attention.rotary import reference_rotate
from engine.kernels.attention.store_heads import HeadNorms
from engine.kernels.language import cdiv
from engine.kernels.quant.row_quantization import as_bytes, dequantize_rows
from engine.kernels.rms_norm import reference_rms_norm

# Shape suffixes: as in the kernels' files.


def reference_decode_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    query_groups: QueryGroups,
    rule: AttentionRule,
    splits: Splits,
    out_THD: Tensor,
) -> None:
    groups = query_groups
    rows = [*zip(groups.firsts_U.tolist(), groups.counts_U.tolist(), groups.contexts_U.tolist(), strict=True)]
    for token, seat in zip(groups.tokens_N.tolist(), groups.seats_N.tolist(), strict=True):
        row, query = divmod(seat, groups.most)
        first, count, context = rows[row]
        if not context:
            out_THD[token] = 0
            continue
        assert token == first + query
        kv_2KLD = _gather_row(codes_B2KSD, scales_B2KS, groups.tables_UB[row], context - (count - 1 - query))
        out_THD[token] = reference_row(q_THD[token].unsqueeze(0), kv_2KLD, rule)[0]


def reference_prefill_attention(
    q_THD: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    *,
    tiles: QueryTiles,
    tables_RB: Tensor,
    contexts_R: Tensor,
    rule: AttentionRule,
    out_THD: Tensor,
) -> None:
    rows = zip(tiles.begins_R.tolist(), tiles.lengths_R.tolist(), tables_RB, contexts_R.tolist(), strict=True)
    for begin, length, table, context in rows:
        kv_2KLD = _gather_row(codes_B2KSD, scales_B2KS, table, context)
        queries = slice(begin, begin + length)
        out_THD[queries] = reference_row(q_THD[queries], kv_2KLD, rule).to(out_THD.dtype)


def reference_row(q_QHD: Tensor, kv_2KLD: Tensor, rule: AttentionRule) -> Tensor:
    """Compute attention of the last Q positions of a row over its L keys, in fp32: (Q, H, D)."""
    num_queries, num_heads, dim = q_QHD.shape
    k_KLD, v_KLD = kv_2KLD
    length = k_KLD.shape[1]
    q_QKGD = q_QHD.float().view(num_queries, k_KLD.shape[0], -1, dim)
    scores_QKGL = torch.einsum("qkgd,kld->qkgl", q_QKGD, k_KLD) * rule.scale
    if rule.soft_cap is not None:
        scores_QKGL = (scores_QKGL / rule.soft_cap).tanh() * rule.soft_cap
    positions_Q1 = torch.arange(length - num_queries, length, device=q_QHD.device).unsqueeze(-1)
    keys_L = torch.arange(length, device=q_QHD.device)
    is_hidden_QL = keys_L > positions_Q1
    if rule.window is not None:
        is_hidden_QL |= keys_L <= positions_Q1 - rule.window
    elif rule.chunk is not None:
        is_hidden_QL |= keys_L < positions_Q1 // rule.chunk * rule.chunk
    scores_QKGL = scores_QKGL.masked_fill(is_hidden_QL[:, None, None], -torch.inf)
    if rule.sinks_H is not None:
        sinks_QKG1 = rule.sinks_H.view(1, *scores_QKGL.shape[1:3], 1).expand(num_queries, -1, -1, -1)
        scores_QKGL = torch.cat((scores_QKGL, sinks_QKG1), dim=-1)
    weights_QKGL = scores_QKGL.softmax(-1)[..., :length]
    return torch.einsum("qkgl,kld->qkgd", weights_QKGL, v_KLD).reshape(num_queries, num_heads, dim)


def _gather_row(codes_B2KSD: Tensor, scales_B2KS: Tensor | None, table: Tensor, length: int) -> Tensor:
    """Return keys and values of one block table: (2, K, L, D) fp32."""
    table = table[: -(-length // codes_B2KSD.shape[3])].long()
    if scales_B2KS is None:
        kv_B2KSD = codes_B2KSD[table].float()
    else:
        codes = as_bytes(codes_B2KSD)[table].view(codes_B2KSD.dtype)
        kv_B2KSD = dequantize_rows(codes, scales_B2KS[table], torch.float32)
    return kv_B2KSD.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]


def reference_dense_prefill_attention(
    q_THD: Tensor,
    k_LKN: Tensor,
    shared_LP: Tensor | None,
    v_LKW: Tensor,
    *,
    tiles: QueryTiles,
    firsts_R: Tensor,
    contexts_R: Tensor,
    rule: AttentionRule,
    out_THW: Tensor,
    part: Slice = WHOLE,
) -> None:
    rows = (tiles.begins_R, tiles.lengths_R, firsts_R, contexts_R)
    group = q_THD.shape[1] // k_LKN.shape[1]
    for begin, length, first, context in zip(*(numbers.tolist() for numbers in rows), strict=True):
        low, high = min(part.begin, context), min(part.end, context)
        queries, keys = slice(begin, begin + length), slice(first, first + high - low)
        k_LHD = k_LKN[keys].float().repeat_interleave(group, 1)
        if shared_LP is not None:
            k_LHD = torch.cat((k_LHD, shared_LP[keys].float().unsqueeze(1).expand(-1, k_LHD.shape[1], -1)), dim=-1)
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[queries].float(), k_LHD) * rule.scale
        if rule.soft_cap is not None:
            scores_HQL = (scores_HQL / rule.soft_cap).tanh() * rule.soft_cap
        positions_Q1 = torch.arange(context - length, context, device=q_THD.device).unsqueeze(-1)
        is_hidden_QL = torch.arange(low, high, device=q_THD.device) > positions_Q1
        scores_HQL = scores_HQL.masked_fill(is_hidden_QL, -torch.inf)
        v_LHW = v_LKW[keys].float().repeat_interleave(group, 1)
        _merge(scores_HQL, v_LHW, rule.sinks_H, queries, out_THW, part)


def _merge(
    scores_HQL: Tensor, v_LHW: Tensor, sinks_H: Tensor | None, queries: slice, out_THW: Tensor, part: Slice
) -> None:
    out_QHW = torch.zeros(scores_HQL.shape[1], *v_LHW.shape[1:], device=v_LHW.device)
    largest_HQ = scores_HQL.new_full(scores_HQL.shape[:2], -torch.inf)
    total_HQ = torch.zeros_like(largest_HQ)
    if part.carry is not None and part.begin:
        out_QHW, largest_HQ = part.carry.out_THW[queries], part.carry.largest_TH[queries].T
        total_HQ = part.carry.total_TH[queries].T
    elif sinks_H is not None:
        largest_HQ, total_HQ = sinks_H.unsqueeze(-1).expand_as(largest_HQ), torch.ones_like(total_HQ)
    if scores_HQL.shape[2]:
        grown_HQ = torch.maximum(largest_HQ, scores_HQL.amax(-1))
        weights_HQL = (scores_HQL - grown_HQ.unsqueeze(-1)).exp()
        fade_HQ = (largest_HQ - grown_HQ).exp()
        out_QHW = out_QHW * fade_HQ.T.unsqueeze(-1) + torch.einsum("hql,lhw->qhw", weights_HQL, v_LHW)
        largest_HQ, total_HQ = grown_HQ, total_HQ * fade_HQ + weights_HQL.sum(-1)
    if part.is_last:
        out_THW[queries] = (out_QHW / total_HQ.T.unsqueeze(-1)).to(out_THW.dtype)
    else:
        assert part.carry is not None
        part.carry.out_THW[queries], part.carry.largest_TH[queries] = out_QHW, largest_HQ.T
        part.carry.total_TH[queries] = total_HQ.T


def reference_gather_rows(
    codes_B2KSD: Tensor, scales_B2KS: Tensor | None, blocks_N: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kv_N2KSD = as_bytes(codes_B2KSD)[blocks_N.long()].view(codes_B2KSD.dtype)
    if scales_B2KS is not None:
        kv_N2KSD = dequantize_rows(kv_N2KSD, scales_B2KS[blocks_N.long()], dtype)
    k_LKD, v_LKD = kv_N2KSD.to(dtype).permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()
    return k_LKD, v_LKD


def reference_store_heads(
    heads_TND: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B2KSD: Tensor,
    scales_B2KS: Tensor | None,
    slots_T: Tensor,
    norms: HeadNorms,
) -> Tensor:
    num_kv = codes_B2KSD.shape[2]
    q_THD, k_TKD, v_TKD = heads_TND.tensor_split((-2 * num_kv, -num_kv), dim=1)
    q_THD, k_TKD, v_TKD = (
        x if weight is None else reference_rms_norm(x, weight, norms.eps)
        for x, weight in zip((q_THD, k_TKD, v_TKD), norms[:3], strict=True)
    )
    reference_write_kv(codes_B2KSD, scales_B2KS, slots_T, reference_rotate(k_TKD, cos_T1F, sin_T1F), v_TKD)
    return reference_rotate(q_THD, cos_T1F, sin_T1F)


def reference_latent_decode_attention(
    q_RHD: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    value_HWC: Tensor,
    *,
    scale: float,
    tables_RB: Tensor,
    contexts_R: Tensor,
    splits: Splits,
) -> Tensor:
    latent_dim = value_HWC.shape[2]
    latents_RHC = q_RHD.new_empty(*q_RHD.shape[:2], latent_dim)
    for row, (table, context) in enumerate(zip(tables_RB, contexts_R.tolist(), strict=True)):
        blocks = table[: cdiv(context, codes_B11SD.shape[3])].long()
        if scales_B11S is None:
            rows_B11SD = codes_B11SD[blocks].float()
        else:
            codes = as_bytes(codes_B11SD)[blocks].view(codes_B11SD.dtype)
            exact = (codes.shape[-1] - latent_dim) // 2
            rows_B11SD = dequantize_rows(codes, scales_B11S[blocks], torch.float32, exact=exact)
        rows_LD = rows_B11SD.flatten(0, 3)[:context, : q_RHD.shape[-1]]
        weights_HL = (q_RHD[row].float() @ rows_LD.T * scale).softmax(dim=-1)
        latents_RHC[row] = weights_HL @ rows_LD[:, :latent_dim]
    return torch.einsum("rhc,hwc->rhw", latents_RHC, value_HWC)


def reference_store_latents(
    q_THQ: Tensor,
    row_TD: Tensor,
    norm_C: Tensor,
    eps: float,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    slots_T: Tensor,
    *,
    is_interleaved: bool,
    out_THN: Tensor,
) -> None:
    rope_dim = 2 * cos_T1F.shape[-1]

    def turned(x_THP: Tensor) -> Tensor:
        if is_interleaved:
            x_THP = torch.unflatten(x_THP, -1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return reference_rotate(x_THP, cos_T1F, sin_T1F)

    out_THN[..., -rope_dim:] = turned(q_THQ[..., -rope_dim:])
    out_THN[..., :-rope_dim] = q_THQ[..., -out_THN.shape[-1] : -rope_dim]
    latent_dim = len(norm_C)
    latent_TC, key_TP, index_TX = row_TD.tensor_split((latent_dim, latent_dim + rope_dim), dim=-1)
    latent_TC = reference_rms_norm(latent_TC, norm_C, eps)
    kept_TD = torch.cat((latent_TC, turned(key_TP.unsqueeze(1)).squeeze(1), index_TX), dim=-1)
    is_stored_T = slots_T >= 0
    write_rows(codes_B11SD, scales_B11S, slots_T[is_stored_T], kept_TD[is_stored_T, None, None])


def reference_absorb_queries(q_THQ: Tensor, *stored: Any, is_interleaved: bool) -> Tensor:
    *of_rows, key_HNC = stored
    nope_dim, latent_dim = key_HNC.shape[1:]
    rope_dim = q_THQ.shape[-1] - nope_dim
    out_THD = q_THQ.new_empty(*q_THQ.shape[:2], latent_dim + rope_dim)
    reference_store_latents(q_THQ, *of_rows, is_interleaved=is_interleaved, out_THN=out_THD[..., latent_dim:])
    out_THD[..., :latent_dim] = torch.einsum("thn,hnc->thc", q_THQ[..., :nope_dim], key_HNC)
    return out_THD


def reference_index_scores(
    q_QGI: Tensor,
    weights_QG: Tensor,
    codes_B11SD: Tensor,
    scales_B11S: Tensor | None,
    *,
    tile: int,
    tables_RB: Tensor,
    contexts_R: Tensor,
    splits: Splits,
    scores_QL: Tensor,
) -> None:
    keys_BSI = index_keys(codes_B11SD, scales_B11S, q_QGI.shape[2])[:, 0, 0]
    for query, (q_GI, weights_G) in enumerate(zip(q_QGI, weights_QG, strict=True)):
        context = int(contexts_R[query // tile])
        blocks = tables_RB[query // tile, : cdiv(context, keys_BSI.shape[1])].long()
        keys_LI = keys_BSI[blocks].flatten(0, 1)[:context].float()
        scores_QL[query, :context] = finite_scores(weights_G @ (q_GI.float() @ keys_LI.T).relu_())


def reference_best_slots(
    scores_QL: Tensor, contexts_Q: Tensor, tables_RB: Tensor, *, tile: int, block_size: int, top_k: int
) -> Tensor:
    scores_QL = scores_QL[:, : tables_RB.shape[1] * block_size]
    scores_QL = scores_QL.masked_fill(contexts_Q[:, None] <= top_k, 0)
    positions_QU = best_positions(scores_QL, contexts_Q, top_k)
    rows_Q = torch.arange(len(scores_QL), device=scores_QL.device) // tile
    blocks_QU = tables_RB[rows_Q].long().gather(1, positions_QU // block_size)
    slots_QU = scores_QL.new_full((len(scores_QL), top_k), -1, dtype=torch.int32)
    slots_QU[:, : positions_QU.shape[1]] = blocks_QU * block_size + positions_QU % block_size
    return slots_QU
