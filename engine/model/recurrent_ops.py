"""Operations of recurrent layers, by the CPU kernels, by Triton's or by torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.cpu import recurrent as cpu
from engine.cpu.library import Kernels
from engine.kernels.recurrent.causal_conv import launch_causal_conv, reference_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm, reference_gated_rms_norm
from engine.kernels.recurrent.linear_recurrence import (
    LinearRecurrence,
    launch_linear_recurrence,
    reference_linear_recurrence,
)
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots

# T tokens, C channels, W width of the convolution, H heads, G groups, D features of a group


@dataclass(frozen=True)
class RecurrentOps:
    """Operations of recurrent layers. kernels: CPU kernels; None: Triton on a GPU, else torch."""

    kernels: Kernels | None

    def conv(
        self,
        x_TC: Tensor,
        weight_WC: Tensor,
        bias_C: Tensor | None,
        states: LayerStates,
        slots: StateSlots,
        *,
        activates: bool,
    ) -> Tensor:
        """See reference_causal_conv."""
        if self.kernels is not None and cpu.can_convolve(weight_WC):
            return cpu.causal_conv(self.kernels, x_TC, weight_WC, bias_C, states.conv_NLC, slots, activates=activates)
        convolve = launch_causal_conv if x_TC.is_cuda else reference_causal_conv
        return convolve(x_TC, weight_WC, bias_C, states.conv_NLC, slots, activates=activates)

    def recur(
        self,
        rows_TC: Tensor,
        dt_TH: Tensor,
        beta_TH: Tensor | None,
        recurrence: LinearRecurrence,
        states: LayerStates,
        slots: StateSlots,
    ) -> Tensor:
        """See reference_linear_recurrence."""
        inputs = rows_TC, dt_TH, beta_TH, recurrence, states.matrix_NHKV, slots
        if self.kernels is not None and cpu.can_recur(recurrence):
            return cpu.linear_recurrence(self.kernels, *inputs)
        return (launch_linear_recurrence if rows_TC.is_cuda else reference_linear_recurrence)(*inputs)

    def norm(self, x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        """See reference_gated_rms_norm."""
        if self.kernels is not None:
            return cpu.gated_rms_norm(self.kernels, x_TGD, z_TGD, weight_GD, eps, gates_first=gates_first)
        norm = launch_gated_rms_norm if x_TGD.is_cuda else reference_gated_rms_norm
        return norm(x_TGD, z_TGD, weight_GD, eps, gates_first=gates_first)
