"""Recurrence of a matrix per head: gated delta rule (arXiv:2412.06464) and Mamba-2 (arXiv:2405.21060).

    S_t = exp(g_t) S_t-1 + k_t u_t^T              S: key features, value features
    o_t = S_t^T q_t

    gated delta rule    u_t = beta_t (v_t - exp(g_t) S_t-1^T k_t), q and k of unit length, q / sqrt(key_dim)
                        g_t = -rate softplus(a_t + dt_bias), beta_t = sigmoid(b_t)
    Mamba-2             u_t = dt_t x_t, k = B, q = C; adds skip x_t to the output
                        g_t = -rate dt_t, dt_t = softplus(dt_t + dt_bias) within limits

A chunk of tokens is computed by products. With the sums G_t of g up to t, and decays D_ij = exp(G_i - G_j), its u solve

    (I + beta_i D_ij k_i^T k_j, j < i) u = beta_i (v_i - exp(G_i) S^T k_i)          arXiv:2406.06484
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.language import cdiv, power_of_2
from engine.kernels.recurrent.recurrence_chunks import advance_chunks, advance_runs, invert_chunks
from engine.kernels.recurrent.state_slots import MAX_RUN, StateSlots

# T tokens, S sequences, N slots, H heads, K key features, V value features, C channels of a row, B tokens of a chunk

_CHUNK = 64
# Columns of a state per program, so that it fits the registers.
_COLUMNS = 32
_CHUNK_WARPS = 8
# Added to the sums of squares of queries and keys, as in transformers.
_EPS = 1e-6


@dataclass(frozen=True)
class LinearRecurrence:
    """Widths and parameters of one layer's recurrence. Head h uses key head h // (num_heads / num_key_heads).

    An input row has queries, keys and values with the delta rule, and x, B and C with Mamba-2.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    # exp(A_log), fp32.
    rate_H: Tensor
    # fp32
    dt_bias_H: Tensor
    is_delta: bool = True
    # fp32, of Mamba-2.
    skip_H: Tensor | None = None
    min_dt: float = 0.0
    max_dt: float = inf

    @property
    def offsets(self) -> tuple[int, int, int]:
        """Return the first channels of queries, keys and values."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return (0, keys, 2 * keys) if self.is_delta else (values + keys, values, 0)


class _Inputs(NamedTuple):
    """Inputs in fp32, per head."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    # fp64, since sums of it are subtracted.
    g_TH: Tensor
    # 1 with Mamba-2.
    beta_TH: Tensor

    def of(self, rows: Tensor | slice) -> _Inputs:
        return _Inputs(*(part[rows] for part in self))


def reference_linear_recurrence(
    rows_TC: Tensor,
    dt_TH: Tensor,
    beta_TH: Tensor | None,
    recurrence: LinearRecurrence,
    states_NHKV: Tensor,
    slots: StateSlots,
) -> Tensor:
    """Advance the states of packed sequences. Returns the outputs (T, H, V) in the dtype of the rows.

    rows: bf16, fp16 or fp32, dense in C. dt (a of the delta rule) and beta (its b): before activation, dense in H.
    states: fp32, dense within a slot; written in place. Cutting a sequence changes rounding only.
    """
    inputs = _inputs(rows_TC, dt_TH, beta_TH, recurrence)
    starts, write = slots.query_starts_S1.tolist(), slots.write_T.tolist()
    first_HKV = torch.where((slots.read_S < 0).view(-1, 1, 1, 1), 0.0, states_NHKV[slots.read_S])
    out_THV = torch.zeros_like(inputs.v_THV)
    lengths = slots.query_starts_S1.diff()
    short_S = torch.nonzero((lengths > 0) & (lengths <= MAX_RUN)).flatten()
    if len(short_S):
        _run(inputs, recurrence, first_HKV[short_S], states_NHKV, slots, short_S, out_THV)
    for sequence in torch.nonzero(lengths > MAX_RUN).flatten().tolist():
        state_HKV, start = first_HKV[sequence], starts[sequence]
        while start < starts[sequence + 1]:
            end = min(start + _CHUNK, starts[sequence + 1])
            end = next((token + 1 for token in range(start, end) if write[token] >= 0), end)
            out_THV[start:end], state_HKV = _chunk(inputs.of(slice(start, end)), recurrence, state_HKV)
            if write[end - 1] >= 0:
                states_NHKV[write[end - 1]] = state_HKV
            start = end
    if recurrence.skip_H is not None:
        x_THV = _heads(rows_TC, recurrence.offsets[2], recurrence.num_heads, recurrence.value_dim)
        out_THV += recurrence.skip_H.unsqueeze(-1) * x_THV
    return out_THV.to(rows_TC.dtype)


def _heads(rows_TC: Tensor, offset: int, num_heads: int, width: int) -> Tensor:
    return torch.unflatten(rows_TC[:, offset : offset + num_heads * width].float(), -1, (num_heads, width))


def _inputs(rows_TC: Tensor, dt_TH: Tensor, beta_TH: Tensor | None, recurrence: LinearRecurrence) -> _Inputs:
    queries, keys, values = recurrence.offsets
    q_THK = _heads(rows_TC, queries, recurrence.num_key_heads, recurrence.key_dim)
    k_THK = _heads(rows_TC, keys, recurrence.num_key_heads, recurrence.key_dim)
    v_THV = _heads(rows_TC, values, recurrence.num_heads, recurrence.value_dim)
    dt_TH = F.softplus(dt_TH.float() + recurrence.dt_bias_H)
    if recurrence.is_delta:
        assert beta_TH is not None
        q_THK, k_THK = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (q_THK, k_THK))
        q_THK, beta_TH = q_THK * recurrence.key_dim**-0.5, torch.sigmoid(beta_TH).float()
    else:
        dt_TH = dt_TH.clamp(recurrence.min_dt, recurrence.max_dt)
        v_THV, beta_TH = v_THV * dt_TH.unsqueeze(-1), torch.ones_like(dt_TH)
    heads_per_key = recurrence.num_heads // recurrence.num_key_heads
    q_THK, k_THK = (x.repeat_interleave(heads_per_key, dim=1) for x in (q_THK, k_THK))
    return _Inputs(q_THK, k_THK, v_THV, (-recurrence.rate_H * dt_TH).double(), beta_TH)


def _run(
    inputs: _Inputs,
    recurrence: LinearRecurrence,
    state_SHKV: Tensor,
    states_NHKV: Tensor,
    slots: StateSlots,
    sequences_S: Tensor,
    out_THV: Tensor,
) -> None:
    """Advance short sequences together, token by token."""
    starts_S, ends_S = slots.query_starts_S1[sequences_S], slots.query_starts_S1[sequences_S + 1]
    for token in range(MAX_RUN):
        is_left_S = starts_S + token < ends_S
        starts_S, ends_S, state_SHKV = starts_S[is_left_S], ends_S[is_left_S], state_SHKV[is_left_S]
        rows_S = starts_S + token
        if not len(rows_S):
            return
        q_SHK, k_SHK, v_SHV, g_SH, beta_SH = inputs.of(rows_S)
        state_SHKV = state_SHKV * g_SH.exp().float()[..., None, None]
        if recurrence.is_delta:
            known_SHV = torch.einsum("shkv,shk->shv", state_SHKV, k_SHK)
            v_SHV = (v_SHV - known_SHV) * beta_SH.unsqueeze(-1)
        state_SHKV = state_SHKV + k_SHK.unsqueeze(-1) * v_SHV.unsqueeze(-2)
        out_THV[rows_S] = torch.einsum("shkv,shk->shv", state_SHKV, q_SHK)
        write_S = slots.write_T[rows_S]
        states_NHKV[write_S[write_S >= 0]] = state_SHKV[write_S >= 0]


def _chunk(inputs: _Inputs, recurrence: LinearRecurrence, state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, H, V) of one sequence's chunk, and the state after it."""
    q_HBK, k_HBK, u_HBV = (part.transpose(0, 1) for part in inputs[:3])
    sums_HB = inputs.g_TH.T.cumsum(-1)
    future_BB = torch.ones(u_HBV.shape[1], u_HBV.shape[1], dtype=torch.bool, device=u_HBV.device).triu(1)
    between_HBB = sums_HB.unsqueeze(-1) - sums_HB.unsqueeze(-2)
    decays_HBB = between_HBB.masked_fill(future_BB, -inf).exp().float()
    past_HB1 = sums_HB.exp().float().unsqueeze(-1)
    rest_HB1 = (sums_HB[:, -1:] - sums_HB).exp().float().unsqueeze(-1)
    keys_HKB = k_HBK.transpose(1, 2)
    if recurrence.is_delta:
        beta_HB1 = inputs.beta_TH.T.unsqueeze(-1)
        system_HBB = k_HBK @ keys_HKB * decays_HBB * beta_HB1
        u_HBV = beta_HB1 * (u_HBV - past_HB1 * (k_HBK @ state_HKV))
        u_HBV = torch.linalg.solve_triangular(system_HBB, u_HBV, upper=False, unitriangular=True)
    out_HBV = past_HB1 * (q_HBK @ state_HKV) + (q_HBK @ keys_HKB * decays_HBB) @ u_HBV
    state_HKV = past_HB1[:, -1:] * state_HKV + keys_HKB @ (rest_HB1 * u_HBV)
    return out_HBV.transpose(0, 1), state_HKV


def launch_linear_recurrence(
    rows_TC: Tensor,
    dt_TH: Tensor,
    beta_TH: Tensor | None,
    recurrence: LinearRecurrence,
    states_NHKV: Tensor,
    slots: StateSlots,
) -> Tensor:
    """Launch a kernel for short sequences, and two for long ones if there may be any. Each skips the others' sequences.

    Products of long sequences round their operands to the dtype of the rows, as in FLA; sums and states stay fp32.
    """
    assert rows_TC.stride(1) == dt_TH.stride(1) == 1 and states_NHKV[:1].is_contiguous()
    assert states_NHKV.dtype == torch.float32 and (beta_TH is None or beta_TH.stride(1) == 1)
    heads = recurrence.num_heads
    out_THV = rows_TC.new_empty(len(rows_TC), heads, recurrence.value_dim)
    gates = rows_TC, dt_TH, dt_TH if beta_TH is None else beta_TH, recurrence.rate_H, recurrence.dt_bias_H
    places = out_THV, states_NHKV, slots.query_starts_S1, slots.read_S, slots.write_T
    strides = dt_TH.stride(0), gates[2].stride(0)
    numbers = (*strides, states_NHKV.stride(0), recurrence.min_dt, recurrence.max_dt)
    of_keys, widths = _constants(recurrence, rows_TC.stride(0))
    grid = len(slots.read_S), heads, cdiv(recurrence.value_dim, widths["BLOCK_V"])
    advance_runs[grid](*gates, recurrence.skip_H, *places, *numbers, **widths)
    if slots.max_query_len <= MAX_RUN:
        return out_THV
    options = {"B": _CHUNK, "PRECISION": "tf32x3", "num_warps": _CHUNK_WARPS}
    inverses_THB = rows_TC.new_empty(len(rows_TC) if recurrence.is_delta else 0, heads, _CHUNK)
    if recurrence.is_delta:
        chunks = cdiv(slots.max_query_len, _CHUNK), len(slots.read_S), heads
        invert_chunks[chunks](*gates, inverses_THB, slots.query_starts_S1, *strides, **of_keys, **options)
    advance_chunks[grid](*gates, recurrence.skip_H, inverses_THB, *places, *numbers, **widths, **options)
    return out_THV


def _constants(recurrence: LinearRecurrence, row_stride: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constants of `invert_chunks`, and those of the kernels that advance states."""
    queries, keys, values = recurrence.offsets
    of_keys = {
        "KEYS": keys,
        "K": recurrence.key_dim,
        "ROW": row_stride,
        "HEADS": recurrence.num_heads,
        "HEADS_PER_KEY": recurrence.num_heads // recurrence.num_key_heads,
        "MAX_RUN": MAX_RUN,
        "BLOCK_K": max(16, power_of_2(recurrence.key_dim)),
    }
    return of_keys, of_keys | {
        "QUERIES": queries,
        "VALUES": values,
        "V": recurrence.value_dim,
        "IS_DELTA": recurrence.is_delta,
        "BLOCK_V": min(_COLUMNS, max(16, power_of_2(recurrence.value_dim))),
    }
