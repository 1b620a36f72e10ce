"""RMS norm of groups of features, gated by silu: after the norm as in Gated DeltaNet, or before it as in Mamba-2.

norm first     round(x / rms(x)) * weight * silu(z)
gate first     round(y / rms(y)) * weight, y = x * silu(z)          round: to the dtype of x, as transformers does
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl

# T tokens, G groups, D features of a group


def reference_gated_rms_norm(
    x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    """Return the gated norm (T, G, D) in x's dtype. x: dense. z: dense in a token. weight: (1, D) or (G, D), fp32."""
    y_TGD, gate_TGD = x_TGD.float(), F.silu(z_TGD.float())
    if gates_first:
        y_TGD = y_TGD * gate_TGD
    normed_TGD = weighted(y_TGD, y_TGD.square().mean(-1, keepdim=True), weight_GD, eps, x_TGD.dtype)
    return normed_TGD if gates_first else (normed_TGD.float() * gate_TGD).to(x_TGD.dtype)


def weighted(y_TGD: Tensor, mean_TG1: Tensor, weight_GD: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Return y / sqrt(mean + eps), rounded, times weight, rounded. y: fp32."""
    normed_TGD = (y_TGD * torch.rsqrt(mean_TG1 + eps)).to(dtype)
    return (weight_GD * normed_TGD).to(dtype)


def launch_gated_rms_norm(x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, *, gates_first: bool) -> Tensor:
    assert x_TGD.is_contiguous() and z_TGD[:1].is_contiguous() and weight_GD.is_contiguous()
    num_tokens, num_groups, width = x_TGD.shape
    out_TGD = torch.empty_like(x_TGD)
    block = power_of_2(width)
    _gated_rms_norm[(num_tokens, num_groups)](
        x_TGD,
        z_TGD,
        weight_GD,
        out_TGD,
        z_TGD.stride(0),
        0 if len(weight_GD) == 1 else width,
        width,
        eps,
        GATES_FIRST=gates_first,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
    return out_TGD


@jit
def _gated_rms_norm(
    x: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    z_stride: tl.tensor,
    weight_stride: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    GATES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one group of one token."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < width
    dtype = out.dtype.element_ty
    place = (token * tl.num_programs(1) + group) * width + i
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + group * width + i, mask=mask, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if GATES_FIRST:
        y = y * gate
    y = (y * (1.0 / tl.sqrt(tl.sum(y * y, axis=0) / width + eps))).to(dtype).to(tl.float32)
    y = (y * tl.load(weight + group * weight_stride + i, mask=mask, other=0.0)).to(dtype)
    if not GATES_FIRST:
        y = (y.to(tl.float32) * gate).to(dtype)
    tl.store(out + place, y, mask=mask)
