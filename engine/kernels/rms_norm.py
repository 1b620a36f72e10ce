"""RMSNorm fused with the preceding additions to the residual stream: Zhang and Sennrich 2019, arXiv:1910.07467.

norm(x) = round(x / sqrt(mean(x^2) + eps)) * weight          round: to the activations' dtype, as transformers does

With weights in fp32, as for Gemma, only the result is rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl
from engine.kernels.moe.expert_sum import ExpertSum, sum_of_experts

# E features; the dimensions before it are rows


def rms_norm(x_E: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Norm x: (..., E), dense in E. Computed in fp32; returns (..., E) in x's dtype."""
    return launch_rms_norm(x_E, weight_E, eps) if x_E.is_cuda else reference_rms_norm(x_E, weight_E, eps)


def add_rms_norm(
    x_E: Tensor, update_E: Tensor | None, weight_E: Tensor, eps: float, *, experts: ExpertSum | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x + experts) + update, each sum rounded to x's dtype, and its norm; both (..., E), read and written once.

    update: None if only experts are added. experts: one sum per row of x; x is then (T, E).
    """
    add = launch_add_rms_norm if x_E.is_cuda else reference_add_rms_norm
    return add(x_E, update_E, weight_E, eps, experts=experts)


def reference_rms_norm(x_E: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    normed_E = F.rms_norm(x_E.float(), (x_E.shape[-1],), eps=eps)
    if weight_E.dtype != torch.float32:
        normed_E = normed_E.to(x_E.dtype)
    return (weight_E * normed_E).to(x_E.dtype)


def reference_add_rms_norm(
    x_E: Tensor, update_E: Tensor | None, weight_E: Tensor, eps: float, *, experts: ExpertSum | None = None
) -> tuple[Tensor, Tensor]:
    total_E = x_E if experts is None else x_E + experts.total()
    total_E = total_E if update_E is None else total_E + update_E
    return total_E, reference_rms_norm(total_E, weight_E, eps)


def launch_rms_norm(x_E: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Launch the kernel. Rows may be strided, as the query heads of a fused projection: x is (N, E) or (T, H, E)."""
    num_features, out_E = x_E.shape[-1], torch.empty(x_E.shape, dtype=x_E.dtype, device=x_E.device)
    assert x_E.stride(-1) == 1 and x_E.dim() in (2, 3)
    heads, head_stride = (x_E.shape[1], x_E.stride(1)) if x_E.dim() == 3 else (1, 0)
    _rms_norm[(x_E.numel() // num_features,)](
        x_E,
        weight_E,
        out_E,
        heads,
        x_E.stride(0),
        head_stride,
        num_features,
        eps,
        BLOCK=power_of_2(num_features),
        num_warps=_num_warps(num_features),
    )
    return out_E


def launch_add_rms_norm(
    x_E: Tensor, update_E: Tensor | None, weight_E: Tensor, eps: float, *, experts: ExpertSum | None = None
) -> tuple[Tensor, Tensor]:
    assert x_E.is_contiguous() and (update_E is None or update_E.is_contiguous())
    num_features, total_E, out_E = x_E.shape[-1], torch.empty_like(x_E), torch.empty_like(x_E)
    _add_rms_norm[(x_E.numel() // num_features,)](
        x_E,
        None if experts is None else experts.out_TCE,
        None if experts is None else experts.weights_TC,
        update_E,
        weight_E,
        total_E,
        out_E,
        num_features,
        eps,
        C=0 if experts is None else experts.out_TCE.shape[1],
        BLOCK=power_of_2(num_features),
        num_warps=_num_warps(num_features),
    )
    return total_E, out_E


def _num_warps(num_features: int) -> int:
    """Return the warps for 16 numbers per thread; one warp for heads, so that a multiprocessor holds more programs."""
    return max(1, min(16, power_of_2(num_features) // 512))


@jit
def normed(
    value: tl.tensor, weight: tl.tensor, num_features: tl.tensor, eps: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Norm a fp32 row; row and weights are zero past the last feature. Returns `dtype`."""
    result = value * (1.0 / tl.sqrt(tl.sum(value * value, axis=0) / num_features + eps))
    if weight.dtype != tl.float32:
        result = result.to(dtype).to(tl.float32)
    return (result * weight.to(tl.float32)).to(dtype)


@jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    num_features: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    source = row // heads * token_stride + row % heads * head_stride
    i = tl.arange(0, BLOCK)
    mask = i < num_features
    value = tl.load(x + source + i, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + row * num_features + i, normed(value, w, num_features, eps, out.dtype.element_ty), mask=mask)


@jit
def _add_rms_norm(
    x: tl.tensor,
    experts: tl.tensor,
    expert_weights: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    num_features: tl.tensor,
    eps: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < num_features
    dtype = out.dtype.element_ty
    place = row * num_features + i
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if C > 0:
        expert_sum = sum_of_experts(experts, expert_weights, row, i, num_features, C)
        value = (value + expert_sum.to(tl.float32)).to(dtype).to(tl.float32)
    if update is not None:
        value = (value + tl.load(update + place, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(total + place, value.to(dtype), mask=mask)
    w = tl.load(weight + i, mask=mask, other=0.0)
    tl.store(out + place, normed(value, w, num_features, eps, dtype), mask=mask)
