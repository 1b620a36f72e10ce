"""Weighted sum of a token's expert outputs: sum_c weight_c out_c in fp32, in the router's order.

sum = round(((w_0 out_0 + w_1 out_1) + w_2 out_2) + ...)          round: to the activations' dtype
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.language import jit, power_of_2, tl

# T tokens, C experts per token, E hidden_size


@dataclass(frozen=True)
class ExpertSum:
    """Deferred weighted sum, computed here or by the kernel that reads it (rms_norm.py)."""

    out_TCE: Tensor  # contiguous
    weights_TC: Tensor  # fp32, contiguous

    def total(self) -> Tensor:
        """Compute the sum (T, E) in the outputs' dtype."""
        sum_up = launch_sum_experts if self.out_TCE.is_cuda else reference_sum_experts
        return sum_up(self.out_TCE, self.weights_TC)


def reference_sum_experts(out_TCE: Tensor, weights_TC: Tensor) -> Tensor:
    return (out_TCE.float() * weights_TC.unsqueeze(-1)).sum(dim=1).to(out_TCE.dtype)


def launch_sum_experts(out_TCE: Tensor, weights_TC: Tensor) -> Tensor:
    assert out_TCE.is_contiguous() and weights_TC.is_contiguous()
    num_tokens, num_choices, hidden = out_TCE.shape
    total_TE = out_TCE.new_empty(num_tokens, hidden)
    if num_tokens:
        _sum_experts[(num_tokens,)](out_TCE, weights_TC, total_TE, hidden, C=num_choices, BLOCK=power_of_2(hidden))
    return total_TE


@jit
def sum_of_experts(
    out: tl.tensor, weights: tl.tensor, token: tl.tensor, i: tl.tensor, num_features: tl.tensor, C: tl.constexpr
) -> tl.tensor:
    """Return features `i` of a token's rounded sum, 0 past the last. For use inside other kernels."""
    total = tl.zeros(i.shape, tl.float32)
    for c in tl.static_range(C):
        weight = tl.load(weights + token * C + c)
        value = tl.load(out + (token * C + c) * num_features + i, mask=i < num_features, other=0.0)
        total += weight * value.to(tl.float32)
    return total.to(out.dtype.element_ty)


@jit
def _sum_experts(
    out: tl.tensor,
    weights: tl.tensor,
    total: tl.tensor,
    num_features: tl.tensor,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one token."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = sum_of_experts(out, weights, token, i, num_features, C)
    tl.store(total + token * num_features + i, value, mask=i < num_features)
