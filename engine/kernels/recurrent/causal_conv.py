"""Depthwise causal convolution of packed sequences, whose last inputs are the state.

y_t = act(bias + sum over j of weight_j x_(t - W + 1 + j)), per channel; act is silu or nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.language import cdiv, jit, power_of_2, tl
from engine.kernels.recurrent.state_slots import StateSlots

# T tokens, S sequences, N slots, C channels, W width of the convolution, L = W - 1 inputs kept

# Tokens and channels of one program.
_MOST_TOKENS, _CHANNELS = 32, 64


def reference_causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states_NLC: Tensor,
    slots: StateSlots,
    *,
    activates: bool = True,
) -> Tensor:
    """Convolve, and apply silu if `activates`. Returns (T, C) in x's dtype, computed in fp32 and rounded once.

    x: dense in C. weight, bias: fp32, dense. states: the last inputs, oldest first, in x's dtype, dense within a slot;
    written in place.
    """
    starts_S1, kept = slots.query_starts_S1, len(weight_WC) - 1
    num_tokens = len(x_TC)
    first_SLC = torch.where((slots.read_S < 0).view(-1, 1, 1), 0, states_NLC[slots.read_S])
    # Inputs of all sequences, each after its kept ones; those of sequence s move by (s + 1) * kept places.
    sequence_T = torch.bucketize(torch.arange(num_tokens, device=x_TC.device), starts_S1[1:], right=True)
    place_T = torch.arange(num_tokens, device=x_TC.device) + (sequence_T + 1) * kept
    first_S = starts_S1[:-1] + torch.arange(len(first_SLC), device=x_TC.device) * kept
    inputs = x_TC.new_empty(num_tokens + kept * len(first_SLC), x_TC.shape[1])
    inputs[place_T] = x_TC
    inputs[first_S.unsqueeze(-1) + torch.arange(kept, device=x_TC.device)] = first_SLC
    out_TC = inputs[place_T].float() * weight_WC[-1]
    for back in range(1, kept + 1):
        out_TC += inputs[place_T - back].float() * weight_WC[kept - back]
    if bias_C is not None:
        out_TC += bias_C
    is_kept_T = slots.write_T >= 0
    last = torch.arange(1 - kept, 1, device=x_TC.device)
    states_NLC[slots.write_T[is_kept_T]] = inputs[place_T[is_kept_T].unsqueeze(-1) + last]
    return (F.silu(out_TC) if activates else out_TC).to(x_TC.dtype)


def launch_causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states_NLC: Tensor,
    slots: StateSlots,
    *,
    activates: bool = True,
) -> Tensor:
    """Launch one kernel, and a second one for the states if a sequence may need several programs."""
    assert x_TC.stride(1) == 1 and states_NLC[:1].is_contiguous() and weight_WC.is_contiguous()
    num_sequences, num_channels = len(slots.read_S), x_TC.shape[1]
    out_TC = x_TC.new_empty(x_TC.shape)
    block_t = power_of_2(max(1, min(slots.max_query_len, _MOST_TOKENS)))
    num_blocks, num_parts = cdiv(slots.max_query_len, block_t), cdiv(num_channels, _CHANNELS)
    places = states_NLC, slots.query_starts_S1, slots.read_S, slots.write_T
    numbers = x_TC.stride(0), states_NLC.stride(0), num_channels
    blocks = {"W": len(weight_WC), "BLOCK_L": power_of_2(len(weight_WC) - 1), "BLOCK_T": block_t, "BLOCK_C": _CHANNELS}
    _convolve[(max(1, num_blocks), num_sequences, num_parts)](
        x_TC,
        weight_WC,
        bias_C,
        out_TC,
        *places,
        *numbers,
        ACTIVATES=activates,
        KEEPS=num_blocks <= 1,
        **blocks,
    )
    if num_blocks > 1:
        _keep_inputs[(num_sequences, num_parts)](x_TC, *places, *numbers, **blocks)
    return out_TC


@jit
def _keep(
    x: tl.tensor,
    old: tl.tensor,
    states: tl.tensor,
    writes: tl.tensor,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.tensor,
    c: tl.tensor,
    W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    """Write the states after BLOCK_T tokens from `begin` on. All inputs are read before a state is written."""
    token, row = begin + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_L)
    write = tl.load(writes + token, mask=token < end, other=-1)
    if tl.max(write, axis=0) >= 0:
        source = token[:, None, None] - (W - 2) + row[None, :, None]
        mask = (write >= 0)[:, None, None] & (row < W - 1)[None, :, None] & (c < channels)[None, None, :]
        is_new = source >= first
        columns = c[None, None, :]
        new = tl.load(x + source * x_stride + columns, mask=mask & is_new, other=0.0)
        place = (source - first + W - 1) * channels + columns
        kept = tl.load(old + place, mask=mask & (source < first) & (source >= oldest), other=0.0)
        tl.debug_barrier()
        target = states + write[:, None, None] * slot_stride + row[None, :, None] * channels + columns
        tl.store(target, tl.where(is_new, new, kept), mask=mask)


@jit
def _convolve(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.tensor,
    W: tl.constexpr,
    ACTIVATES: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program: BLOCK_T tokens of a sequence and BLOCK_C channels. KEEPS: write the states, too."""
    sequence, c = tl.program_id(1), tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    begin = first + tl.program_id(0) * BLOCK_T
    if begin >= end:
        return
    read = tl.load(reads + sequence)
    old = states + read * slot_stride
    # First input that is not zero.
    oldest = tl.where(read >= 0, first - (W - 1), first)
    token = begin + tl.arange(0, BLOCK_T)
    mask = (token < end)[:, None] & (c < channels)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if bias is not None:
        total += tl.load(bias + c, mask=c < channels, other=0.0)[None, :]
    for j in tl.static_range(W):
        source = token[:, None] - (W - 1) + j
        is_new = source >= first
        new = tl.load(x + source * x_stride + c[None, :], mask=mask & is_new, other=0.0)
        place = (source - first + W - 1) * channels + c[None, :]
        kept = tl.load(old + place, mask=mask & (source < first) & (source >= oldest), other=0.0)
        factor = tl.load(weight + j * channels + c, mask=c < channels, other=0.0)
        total += factor[None, :] * tl.where(is_new, new, kept).to(tl.float32)
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token[:, None] * channels + c[None, :], total.to(out.dtype.element_ty), mask=mask)
    if KEEPS:
        tl.debug_barrier()
        _keep(
            x, old, states, writes, first, begin, end, oldest, x_stride, slot_stride, channels, c, W, BLOCK_L, BLOCK_T
        )  # fmt: skip


@jit
def _keep_inputs(
    x: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    x_stride: tl.tensor,
    slot_stride: tl.tensor,
    channels: tl.tensor,
    W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
) -> None:
    """One program: the states of one sequence and BLOCK_C channels."""
    sequence, c = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    read = tl.load(reads + sequence)
    old = states + read * slot_stride
    # First input that is not zero.
    oldest = tl.where(read >= 0, first - (W - 1), first)
    for begin in range(first, end, BLOCK_T):
        _keep(
            x, old, states, writes, first, begin, end, oldest, x_stride, slot_stride, channels, c, W, BLOCK_L, BLOCK_T
        )  # fmt: skip
