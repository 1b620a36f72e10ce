"""Functions of engine.kernels.recurrent with the CPU kernels, and their calls, for rows in bf16 or fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cpu.library import Kernels, Program
from engine.cpu.structs import ConvCall, GatedNormCall, Kind, RecurrenceCall, Step
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence
from engine.kernels.recurrent.state_slots import StateSlots

# T tokens, N slots, C channels, W width of the convolution, L = W - 1 inputs kept, H heads, K key features, V value
# features, G groups, D features of a group

# See causal_conv.h.
_MOST_WIDTH = 8


def can_recur(recurrence: LinearRecurrence) -> bool:
    """Return True if the kernels support these widths."""
    return recurrence.key_dim % 8 == 0 and recurrence.value_dim % 16 == 0


def can_convolve(weight_WC: Tensor) -> bool:
    return len(weight_WC) <= _MOST_WIDTH


def causal_conv(
    kernels: Kernels,
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states_NLC: Tensor,
    slots: StateSlots,
    *,
    activates: bool = True,
) -> Tensor:
    """Compute engine.kernels.recurrent.causal_conv.reference_causal_conv."""
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    _run(kernels, conv_call(x_TC, weight_WC, bias_C, states_NLC, out_TC, activates=activates), slots, len(x_TC))
    return out_TC


def conv_call(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states_NLC: Tensor,
    out_TC: Tensor,
    *,
    activates: bool = True,
    gates: tuple[Tensor, Tensor] | None = None,
) -> ConvCall:
    """Build the call of a convolution; see can_convolve.

    gates: with the strides of x; x is multiplied by the first in place, the result by the second.
    """
    assert can_convolve(weight_WC) and weight_WC.is_contiguous() and weight_WC.dtype == torch.float32
    assert x_TC.stride(1) == 1 and states_NLC[:1].is_contiguous() and states_NLC.dtype == x_TC.dtype
    assert gates is None or all(gate_TC.stride() == x_TC.stride() for gate_TC in gates)
    before, after = (None, None) if gates is None else (gate_TC.data_ptr() for gate_TC in gates)
    return ConvCall(
        kind=Kind.CONVOLVE,
        is_fp32=_is_fp32(x_TC),
        activates=activates,
        x=x_TC.data_ptr(),
        before=before,
        after=after,
        x_stride=x_TC.stride(0),
        out=out_TC.data_ptr(),
        channels=x_TC.shape[1],
        width=len(weight_WC),
        weight=weight_WC.data_ptr(),
        bias=None if bias_C is None else bias_C.data_ptr(),
        states=states_NLC.data_ptr(),
        state_stride=states_NLC.stride(0),
    )


def linear_recurrence(
    kernels: Kernels,
    rows_TC: Tensor,
    dt_TH: Tensor,
    beta_TH: Tensor | None,
    recurrence: LinearRecurrence,
    states_NHKV: Tensor,
    slots: StateSlots,
) -> Tensor:
    """Compute engine.kernels.recurrent.linear_recurrence.reference_linear_recurrence; see can_recur."""
    out_THV = torch.empty(len(rows_TC), recurrence.num_heads, recurrence.value_dim, dtype=rows_TC.dtype)
    _run(kernels, recurrence_call(rows_TC, dt_TH, beta_TH, recurrence, states_NHKV, out_THV), slots, len(rows_TC))
    return out_THV


def recurrence_call(
    rows_TC: Tensor,
    dt_TH: Tensor,
    beta_TH: Tensor | None,
    recurrence: LinearRecurrence,
    states_NHKV: Tensor,
    out_THV: Tensor,
) -> RecurrenceCall:
    """Build the call of a recurrence; see can_recur."""
    assert can_recur(recurrence) and states_NHKV.dtype == torch.float32 and states_NHKV[:1].is_contiguous()
    assert rows_TC.stride(1) == dt_TH.stride(1) == 1 and (beta_TH is None or beta_TH.stride(1) == 1)
    assert dt_TH.dtype == rows_TC.dtype and (beta_TH is None or beta_TH.dtype == rows_TC.dtype)
    queries, keys, values = recurrence.offsets
    return RecurrenceCall(
        kind=Kind.RECUR,
        is_fp32=_is_fp32(rows_TC),
        is_delta=recurrence.is_delta,
        rows=rows_TC.data_ptr(),
        row_stride=rows_TC.stride(0),
        dt=dt_TH.data_ptr(),
        dt_stride=dt_TH.stride(0),
        beta=None if beta_TH is None else beta_TH.data_ptr(),
        beta_stride=0 if beta_TH is None else beta_TH.stride(0),
        rates=recurrence.rate_H.data_ptr(),
        dt_bias=recurrence.dt_bias_H.data_ptr(),
        skips=None if recurrence.skip_H is None else recurrence.skip_H.data_ptr(),
        min_dt=recurrence.min_dt,
        max_dt=recurrence.max_dt,
        heads=recurrence.num_heads,
        key_heads=recurrence.num_key_heads,
        key_dim=recurrence.key_dim,
        value_dim=recurrence.value_dim,
        query_offset=queries,
        key_offset=keys,
        value_offset=values,
        out=out_THV.data_ptr(),
        states=states_NHKV.data_ptr(),
        state_stride=states_NHKV.stride(0),
    )


def gated_rms_norm(
    kernels: Kernels, x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Compute engine.kernels.recurrent.gated_norm.reference_gated_rms_norm."""
    out_TGD = torch.empty_like(x_TGD)
    call = gated_norm_call(x_TGD, z_TGD, weight_GD, eps, out_TGD, gates_first=gates_first)
    Program(kernels, [call]).run(Step(tokens=len(x_TGD)))
    return out_TGD


def gated_norm_call(
    x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, out_TGD: Tensor, *, gates_first: bool
) -> GatedNormCall:
    """Build the call of a gated norm. out_TGD: may be x_TGD."""
    assert x_TGD.is_contiguous() and z_TGD[:1].is_contiguous() and z_TGD.dtype == x_TGD.dtype
    assert weight_GD.is_contiguous() and weight_GD.dtype == torch.float32
    return GatedNormCall(
        kind=Kind.GATED_NORM,
        is_fp32=_is_fp32(x_TGD),
        gates_first=gates_first,
        shares_weight=len(weight_GD) == 1,
        eps=eps,
        x=x_TGD.data_ptr(),
        gate=z_TGD.data_ptr(),
        gate_stride=z_TGD.stride(0),
        weight=weight_GD.data_ptr(),
        groups=x_TGD.shape[1],
        dim=x_TGD.shape[2],
        out=out_TGD.data_ptr(),
    )


def _is_fp32(x: Tensor) -> bool:
    assert x.dtype in (torch.float32, torch.bfloat16)
    return x.dtype == torch.float32


def _run(kernels: Kernels, call: ConvCall | RecurrenceCall, slots: StateSlots, num_tokens: int) -> None:
    query_lens_S = slots.query_starts_S1.diff()
    step = Step(
        tokens=num_tokens,
        sequences=len(query_lens_S),
        query_lens=query_lens_S.data_ptr(),
        state_reads=slots.read_S.data_ptr(),
        state_writes=slots.write_T.data_ptr(),
    )
    Program(kernels, [call]).run(step)
