"""Log-sum-exp of logits: ln sum(exp(x)) of each row, in fp32. A row's result does not depend on other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.language import jit, tl

# N rows, V vocabulary

_BLOCK, _NUM_WARPS = 4096, 16


def launch_log_norms(logits_NV: Tensor) -> Tensor:
    """Return (N, 1) fp32, not finite where logits are not. logits_NV: fp32, dense in V."""
    num_rows, vocabulary = logits_NV.shape
    assert logits_NV.stride(1) == 1 and logits_NV.dtype is torch.float32
    norms_N1 = torch.empty(num_rows, 1, dtype=torch.float32, device=logits_NV.device)
    _log_norm[(num_rows,)](logits_NV, norms_N1, logits_NV.stride(0), vocabulary, BLOCK=_BLOCK, num_warps=_NUM_WARPS)
    return norms_N1


@jit
def _log_norm(
    logits: tl.tensor, norms: tl.tensor, row_stride: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        best = tl.maximum(best, tl.load(logits + begin + i, mask=begin + i < vocabulary, other=float("-inf")))
    most = tl.max(best, axis=0)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in range(0, vocabulary, BLOCK):
        is_there = begin + i < vocabulary
        x = tl.load(logits + begin + i, mask=is_there, other=0.0)
        # inf - inf is NaN, which makes the sum NaN as intended.
        total += tl.where(is_there, tl.exp(x - most), 0.0)
    tl.store(norms + row, most + tl.log(tl.sum(total, axis=0)))
