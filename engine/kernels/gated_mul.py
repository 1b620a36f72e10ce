"""Activations of MLPs, gated (Shazeer 2020, arXiv:2002.05202) or not (So et al. 2021, arXiv:2109.08668).

    silu                gate sigmoid(gate) up
    gelu                gate (1 + erf(gate / sqrt(2))) / 2 up
    gelu_pytorch_tanh   gate sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3)) up
    swigluoai           gate sigmoid(alpha gate) (up + 1), gate at most limit, up within +-limit (gpt-oss)
    relu2               max(up, 0)^2, without a gate (Nemotron-H)

The gate is the first half of the features and up the second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import Activation
from engine.kernels.language import cdiv, jit, tl

# T rows, I features of gate and of up

Kind = Literal["silu", "gelu", "gelu_pytorch_tanh", "swigluoai", "relu2"]

_BLOCK = 1024


@dataclass(frozen=True)
class GatedActivation:
    """Activation of an MLP. alpha, limit: parameters of swigluoai."""

    kind: Kind
    alpha: float = 1.0
    limit: float = math.inf

    @classmethod
    def of(cls, activation: Activation) -> GatedActivation:
        """Return the activation that a model's config names."""
        return cls(activation.kind, activation.alpha, activation.limit)

    @property
    def num_inputs(self) -> int:
        """Numbers per feature that it reads: gate and up, or up alone."""
        return 1 if self.kind == "relu2" else 2

    def __call__(self, gate_up_T2I: Tensor) -> Tensor:
        return gated_mul(gate_up_T2I, self)


SILU = GatedActivation("silu")


def gated_mul(gate_up_T2I: Tensor, activation: GatedActivation = SILU) -> Tensor:
    """Compute the activation. gate_up: (T, 2 I), or (T, I) without a gate. Returns (T, I)."""
    compute = launch_gated_mul if gate_up_T2I.is_cuda else reference_gated_mul
    return compute(gate_up_T2I, activation)


def reference_gated_mul(gate_up_T2I: Tensor, activation: GatedActivation = SILU) -> Tensor:
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1) if activation.num_inputs == 2 else (gate_up_T2I, gate_up_T2I)
    match activation.kind:
        case "silu":
            return F.silu(gate_TI) * up_TI
        case "gelu":
            return F.gelu(gate_TI) * up_TI
        case "gelu_pytorch_tanh":
            return F.gelu(gate_TI, approximate="tanh") * up_TI
        case "swigluoai":
            gate_TI = gate_TI.clamp(max=activation.limit)
            up_TI = up_TI.clamp(-activation.limit, activation.limit)
            return gate_TI * torch.sigmoid(gate_TI * activation.alpha) * (up_TI + 1)
        case "relu2":
            return F.relu(up_TI).square()


def launch_gated_mul(gate_up_T2I: Tensor, activation: GatedActivation = SILU) -> Tensor:
    gate_up_T2I = gate_up_T2I.contiguous()
    num_rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // activation.num_inputs
    out_TI = torch.empty(num_rows, width, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    _gated_mul[(num_rows, cdiv(width, _BLOCK))](
        gate_up_T2I,
        out_TI,
        width,
        activation.alpha,
        activation.limit,
        KIND=activation.kind,
        BLOCK=_BLOCK,
    )
    return out_TI


@jit
def gated(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Compute the activation in fp32. gate: not read by relu2."""
    if KIND == "relu2":
        # Unlike maximum, this keeps NaN.
        return tl.where(up < 0.0, 0.0, up) * up
    if KIND == "gelu":
        return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    x = gate
    if KIND == "gelu_pytorch_tanh":
        x = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    if KIND == "swigluoai":
        # Unlike minimum and maximum, these keep NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        x = alpha * gate
    if KIND != "silu":
        # The cube may be large; this bound keeps exp finite.
        x = tl.where(x < -80.0, -80.0, x)
    return gate / (1.0 + tl.exp(-x)) * up


@jit
def _gated_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: BLOCK features of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    gate_up += row * width * (1 if KIND == "relu2" else 2)
    gate = tl.load(gate_up + i, mask=mask, other=0.0).to(tl.float32)
    up = gate if KIND == "relu2" else tl.load(gate_up + width + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, gated(gate, up, alpha, limit, KIND).to(out.dtype.element_ty), mask=mask)
