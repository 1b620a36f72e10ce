"""Fused MoE with low-bit weights: the result of fused_experts.py, with products as in quantized_matmul.py.

Three kernels after the sorting: gate and up of all choices, gated_mul, down.
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.gated_mul import SILU, GatedActivation, launch_gated_mul
from engine.kernels.moe.expert_tiles import Tiles, launch_sort_into_tiles, rows_of_tiles
from engine.kernels.moe.fused_experts import ExpertBiases
from engine.kernels.quant.code_panels import CodePanels
from engine.kernels.quant.quantized_matmul import launch_expert_product, most_rows_of_experts

# T tokens, C choices per token, E hidden_size, X experts, I features of one expert


def launch_coded_experts(
    x_TE: Tensor,
    gate_up: CodePanels,
    down: CodePanels,
    chosen_TC: Tensor,
    tiles: Tiles | None = None,
    *,
    activation: GatedActivation = SILU,
    biases: ExpertBiases | None = None,
    input_weights_TC: Tensor | None = None,
) -> Tensor:
    """Return the unweighted output of every chosen expert: (T, C, E) of x's dtype.

    gate_up: X experts, (2 I, E) each, gate rows first, or (I, E) without gates. down: (E, I) each. chosen: (T, C)
    int64, each below X. tiles: these choices sorted, if available. Others: see launch_fused_experts.
    """
    assert biases is None or input_weights_TC is None
    gate_up_X2I, down_XE = biases or (None, None)
    num_choices, num_experts = chosen_TC.numel(), len(down.words)
    if not num_choices:
        return x_TE.new_empty(*chosen_TC.shape, x_TE.shape[1])
    # Both products share the tiles.
    most = min(most_rows_of_experts(panels, x_TE.device) for panels in (gate_up, down))
    # The router's tiles may have more rows if tokens choose most of the experts.
    if tiles is None or tiles.rows > most:
        rows = rows_of_tiles(num_choices, num_experts, most=most)
        tiles = launch_sort_into_tiles(chosen_TC, num_experts=num_experts, rows=rows)
    choice_P, expert_B = tiles
    gate_up_N2I = launch_expert_product(
        x_TE.contiguous(),
        gate_up,
        choice_P,
        expert_B,
        num_choices,
        of_each=chosen_TC.shape[1],
        bias_XO=gate_up_X2I,
    )
    if input_weights_TC is not None:
        gate_up_N2I *= input_weights_TC.view(-1, 1)
    features_NI = launch_gated_mul(gate_up_N2I, activation)
    out_NE = launch_expert_product(features_NI, down, choice_P, expert_B, num_choices, of_each=1, bias_XO=down_XE)
    return out_NE.view(*chosen_TC.shape, x_TE.shape[1])
