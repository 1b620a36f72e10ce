"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): rotates the pair (x[i], x[i + F]) by its angle.

out[i] = x[i] cos - x[i + F] sin          out[i + F] = x[i + F] cos + x[i] sin          out[2F + j] = x[2F + j]
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl

# T tokens, H heads, D head_dim, F half of the rotated part


def rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotate heads. x: (T, H, D), dense in D, may be a view; cos and sin (T, 1, F) of the same dtype.

    Returns (T, H, D). On a GPU products and sum are rounded once instead of one by one.
    """
    return launch_rotate(x_THD, cos_T1F, sin_T1F) if x_THD.is_cuda else reference_rotate(x_THD, cos_T1F, sin_T1F)


def reference_rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    half = cos_T1F.shape[-1]
    first_THF, second_THF, rest = torch.split(x_THD, [half, half, x_THD.shape[-1] - 2 * half], dim=-1)
    turned = first_THF * cos_T1F - second_THF * sin_T1F, second_THF * cos_T1F + first_THF * sin_T1F
    return torch.cat((*turned, rest), dim=-1)


def launch_rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    (num_tokens, num_heads, dim), half = x_THD.shape, cos_T1F.shape[-1]
    assert x_THD.stride(-1) == 1
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    block_h = power_of_2(num_heads)
    _rotate[(num_tokens,)](
        x_THD,
        cos_T1F.contiguous(),
        sin_T1F.contiguous(),
        out_THD,
        x_THD.stride(0),
        x_THD.stride(1),
        H=num_heads,
        D=dim,
        F=half,
        BLOCK_H=block_h,
        BLOCK_F=power_of_2(half or 1),
        BLOCK_R=power_of_2(dim - 2 * half or 1),
        # A token's heads are in registers.
        num_warps=max(1, min(16, block_h * power_of_2(dim) // 1024)),
    )
    return out_THD


@jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One program: all heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    h, f = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_F)
    is_f = f < F
    mask = (h < H) & is_f[None, :]
    c = tl.load(cos + token * F + f, mask=is_f, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * F + f, mask=is_f, other=0.0).to(tl.float32)[None, :]
    source = x + token * token_stride + h * head_stride + f[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + F, mask=mask, other=0.0).to(tl.float32)
    target = out + (token * H + h) * D + f[None, :]
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), mask=mask)
    tl.store(target + F, (second * c + first * s).to(out.dtype.element_ty), mask=mask)
    if 2 * F < D:
        r = 2 * F + tl.arange(0, BLOCK_R)[None, :]
        mask = (h < H) & (r < D)
        rest = tl.load(x + token * token_stride + h * head_stride + r, mask=mask, other=0.0)
        tl.store(out + (token * H + h) * D + r, rest, mask=mask)
