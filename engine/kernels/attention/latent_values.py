"""Last step of absorbed attention: combines partial sums of latents and expands them to the heads' values.

    out[r, h] = V_h round(sum_p 2^(m_p - m) part_p / sum_p 2^(m_p - m) l_p)      round: to the activations' dtype

A program combines a few rows of one head and multiplies them with the head's matrix. With few rows several programs
split a head's features, and each combines the parts for itself.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.kernels.attention.decode_attention import whole_of_parts
from engine.kernels.attention.kv_splits import Splits
from engine.kernels.language import cdiv, jit, power_of_2, tl

# R rows, H query heads of this rank, C latent_dim, W value_dim, P parts

# Rows per program: the height of a matrix operand.
_MOST_ROWS = 16
_BLOCK_W, _BLOCK_P = 32, 8


def launch_latent_values(
    part_PHC: Tensor, largest_PH: Tensor, total_PH: Tensor, splits: Splits, value_HWC: Tensor, out_RHW: Tensor
) -> None:
    """Combine and expand the partial results of `splits`. value: contiguous. out: dense in W, rows in splits' order."""
    num_rows, num_heads, value_dim = out_RHW.shape
    latent_dim = value_HWC.shape[2]
    assert value_HWC.is_contiguous() and out_RHW.stride(-1) == 1
    rows, features = _share(num_rows, num_heads, value_dim, out_RHW.device)
    _latent_values[(cdiv(num_rows, rows), num_heads, cdiv(value_dim, features))](
        part_PHC,
        largest_PH,
        total_PH,
        splits.starts_R,
        value_HWC,
        out_RHW,
        num_rows,
        rows,
        features,
        out_RHW.stride(0),
        out_RHW.stride(1),
        H=num_heads,
        C=latent_dim,
        W=value_dim,
        BLOCK_M=_MOST_ROWS,
        BLOCK_P=_BLOCK_P,
        BLOCK_C=max(16, power_of_2(latent_dim)),
        BLOCK_W=_BLOCK_W,
        num_warps=4,
        num_stages=2,
    )


def _share(num_rows: int, num_heads: int, value_dim: int, device: torch.device) -> tuple[int, int]:
    """Return rows and features per program, such that every multiprocessor gets a program if possible.

    On a CPU both are split, so that tests cover it.
    """
    if device.type != "cuda":
        return 2, _BLOCK_W
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    features = value_dim if num_rows * num_heads >= processors else _BLOCK_W
    rows = _MOST_ROWS
    while rows > 1 and cdiv(num_rows, rows) * num_heads * cdiv(value_dim, features) < processors:
        rows //= 2
    return rows, features


@partial(jit, do_not_specialize=["num_rows", "rows", "features"])
def _latent_values(
    part: tl.tensor,
    largest: tl.tensor,
    total: tl.tensor,
    starts: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    rows: tl.tensor,
    features: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    H: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """One program: `features` of one head's values, for `rows` rows."""
    head, first = tl.program_id(1), tl.program_id(0) * rows
    count = tl.minimum(rows, num_rows - first)
    m, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_M, BLOCK_C], out.dtype.element_ty)
    for i in range(count):
        whole = whole_of_parts(part, largest, total, starts, first + i, head, None, c, num_rows, H, C, BLOCK_P)
        sums = tl.where((m == i)[:, None], whole.to(out.dtype.element_ty)[None, :], sums)
    place = out + (first + m).to(tl.int64)[:, None] * out_row_stride + head * out_head_stride
    begin = tl.program_id(2) * features
    for start in range(begin, tl.minimum(begin + features, W), BLOCK_W):
        w = start + tl.arange(0, BLOCK_W)
        value = tl.load(
            values + (head * W + w)[None, :] * C + c[:, None], mask=(w < W)[None, :] & (c < C)[:, None], other=0.0
        )
        result = tl.dot(sums, value, input_precision="ieee").to(out.dtype.element_ty)
        tl.store(place + w[None, :], result, mask=(m < count)[:, None] & (w < W)[None, :])
