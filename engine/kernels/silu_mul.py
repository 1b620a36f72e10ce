"""SwiGLU activation, silu(gate) * up with silu(x) = x / (1 + exp(-x)): Shazeer 2020, arXiv:2002.05202."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.language import cdiv, jit, tl

# T rows, I features of gate and of up

_BLOCK = 1024


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """Compute silu(gate) * up. gate_up: (T, 2 I), the gate in the first half, up in the second. Returns (T, I)."""
    return launch_silu_mul(gate_up_T2I) if gate_up_T2I.is_cuda else reference_silu_mul(gate_up_T2I)


def reference_silu_mul(gate_up_T2I: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


def launch_silu_mul(gate_up_T2I: Tensor) -> Tensor:
    gate_up_T2I = gate_up_T2I.contiguous()
    num_rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = torch.empty(num_rows, width, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    _silu_mul[(num_rows, cdiv(width, _BLOCK))](gate_up_T2I, out_TI, width, BLOCK=_BLOCK)
    return out_TI


@jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """One program: BLOCK features of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
