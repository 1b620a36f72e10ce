"""References of the kernels for low-bit products and experts in torch, with the launchers' arguments and results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.gated_mul import SILU, GatedActivation, gated_mul
from engine.kernels.moe.expert_tiles import Tiles, most_tiles
from engine.kernels.moe.fused_experts import ExpertBiases
from engine.kernels.quant.code_panels import RUN, CodePanels, center_of
from engine.kernels.quant.code_words import INT8
from engine.kernels.quant.int8_matmul import DEPTH
from engine.kernels.quant.row_quantization import MOST

# Shape suffixes: as in the kernels' files.


def reference_coded_product(
    x_TI: Tensor,
    panels: CodePanels,
    counters: Tensor | None = None,
    *,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    out_TO: Tensor | None = None,
) -> Tensor:
    product_TO = F.linear(x_TI, numbers_of(panels).to(x_TI.dtype), bias_O)
    product_TO = product_TO if residual_TO is None else residual_TO + product_TO
    return product_TO if out_TO is None else out_TO.copy_(product_TO)


def reference_int8_product(
    x_TI: Tensor,
    codes_OI: Tensor,
    scales_O: Tensor,
    counters: Tensor,
    *,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
) -> Tensor:
    codes_TI, scales_T = reference_quantize_inputs(x_TI)
    whole_TO = codes_TI.double() @ codes_OI.double().T  # exact
    product_TO = whole_TO.float() * scales_T.unsqueeze(1) * scales_O
    if bias_O is not None:
        product_TO += bias_O
    return product_TO.to(x_TI.dtype) if residual_TO is None else residual_TO + product_TO.to(x_TI.dtype)


def reference_quantize_inputs(x_TI: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    wide_TI = x_TI.float()
    scales_T = wide_TI.abs().amax(dim=1).clamp_min(1e-30) / MOST[dtype]
    codes_TI = F.pad(wide_TI / scales_T.unsqueeze(1), (0, -x_TI.shape[1] % DEPTH))
    return (codes_TI if dtype.is_floating_point else codes_TI.round()).to(dtype), scales_T


def reference_fused_experts(
    x_TE: Tensor,
    gate_up_X2IE: Tensor,
    down_XEI: Tensor,
    chosen_TC: Tensor,
    tiles: Tiles | None = None,
    *,
    activation: GatedActivation = SILU,
    biases: ExpertBiases | None = None,
    input_weights_TC: Tensor | None = None,
) -> Tensor:
    gate_up_X2I, down_XE = biases or (None, None)
    out_TCE = x_TE.new_empty(*chosen_TC.shape, x_TE.shape[1])
    for expert in sorted(set(chosen_TC.flatten().tolist())):
        token, choice = (chosen_TC == expert).nonzero(as_tuple=True)
        x_NE = x_TE[token]
        if input_weights_TC is not None:
            x_NE = (x_NE * input_weights_TC[token, choice].unsqueeze(-1)).to(x_TE.dtype)
        gate_up_N2I = F.linear(x_NE, gate_up_X2IE[expert], None if gate_up_X2I is None else gate_up_X2I[expert])
        bias_E = None if down_XE is None else down_XE[expert]
        out_TCE[token, choice] = F.linear(gated_mul(gate_up_N2I, activation), down_XEI[expert], bias_E)
    return out_TCE


def reference_coded_experts(
    x_TE: Tensor, gate_up: CodePanels, down: CodePanels, chosen_TC: Tensor, tiles: Tiles | None = None, **more: Any
) -> Tensor:
    """Compute with the dequantized matrices. more: keywords of reference_fused_experts."""
    matrices = [[numbers_of(panels.expert(i)) for i in range(len(panels.words))] for panels in (gate_up, down)]
    gate_up_X2IE, down_XEI = (torch.stack(each).to(x_TE.dtype) for each in matrices)
    return reference_fused_experts(x_TE, gate_up_X2IE, down_XEI, chosen_TC, **more)


def reference_sort_into_tiles(chosen_TC: Tensor, *, num_experts: int, rows: int) -> Tiles:
    flat_N = chosen_TC.flatten()
    num_choices, device = len(flat_N), chosen_TC.device
    order_N = flat_N.argsort(stable=True)
    counts_X = flat_N.bincount(minlength=num_experts)
    tiles_X = (counts_X + rows - 1) // rows
    shift_X = (tiles_X.cumsum(0) - tiles_X) * rows - (counts_X.cumsum(0) - counts_X)
    place_N = torch.arange(num_choices, device=device) + shift_X[flat_N[order_N]]
    num_tiles = most_tiles(num_choices, num_experts, rows)
    choice_P = torch.full((num_tiles * rows,), num_choices, dtype=torch.int32, device=device)
    choice_P[place_N] = order_N.to(torch.int32)
    tile_B = torch.arange(num_tiles, device=device)
    return Tiles(choice_P, torch.searchsorted(tiles_X.cumsum(0), tile_B, right=True).to(torch.int32))


def numbers_of(panels: CodePanels) -> Tensor:
    """Dequantize one matrix: (O, I) fp32."""
    numbers_OI = _codes(panels)
    num_outputs, num_inputs = panels.shape
    if panels.scales is not None:
        scales_OG = _by_output(panels.scales) * _of_runs(panels, panels.supers)
        if panels.leasts is None:
            numbers_OI = numbers_OI * scales_OG.repeat_interleave(panels.group, dim=1)
        else:
            leasts_OG = _by_output(panels.leasts)
            if panels.super_leasts is not None:
                leasts_OG = -(leasts_OG * _of_runs(panels, panels.super_leasts))
            elif panels.leasts.dtype == torch.uint8:
                leasts_OG = -(leasts_OG * scales_OG)
            whole_OI = numbers_OI + center_of(panels.kind)
            scales_OI, leasts_OI = (each.repeat_interleave(panels.group, dim=1) for each in (scales_OG, leasts_OG))
            numbers_OI = whole_OI * scales_OI + leasts_OI
    if panels.factors is not None:
        numbers_OI = numbers_OI * _by_output(panels.factors)
    return numbers_OI[:num_outputs, :num_inputs]


def _of_runs(panels: CodePanels, supers: Tensor | None) -> Tensor | float:
    """Return the numbers (O, G) that multiply those of the groups."""
    return 1.0 if supers is None else _by_output(supers).repeat_interleave(RUN // panels.group, dim=1)


def _codes(panels: CodePanels) -> Tensor:
    """Unpack codes to fp32, padding included; unsigned codes are centered."""
    words = panels.words.to(torch.int32)
    if panels.num_positions == 2:
        bytes_PU64Kj = panels.words.unsqueeze(-1).view(torch.uint8)
        dtype = torch.int8 if panels.kind == INT8 else torch.float8_e4m3fn
        return _in_order(bytes_PU64Kj.view(dtype).float().transpose(-1, -2))
    codes = torch.stack([words >> 4 * p & 15 for p in range(4)], dim=-2)
    if panels.levels is not None:
        return _in_order(torch.tensor(panels.levels, device=codes.device)[codes])
    if panels.high is not None:
        bits = panels.kind - 4
        # (P, units of words, 64, K)
        high = panels.high.to(torch.int32).flatten(1, 2)
        upper = [[high >> (4 * u + p) * bits & (1 << bits) - 1 for p in range(4)] for u in range(4 // bits)]
        of_unit = torch.stack([torch.stack(part, dim=-2) for part in upper], dim=2)
        codes = codes | of_unit.flatten(1, 2) << 4
    return _in_order(codes.float() - center_of(panels.kind))


def _in_order(codes_PU64jK: Tensor) -> Tensor:
    return codes_PU64jK.transpose(1, 2).flatten(2).flatten(0, 1)


def _by_output(values: Tensor) -> Tensor:
    """Arrange (P, G, 64) or (P, spans, 64, B) as (O, G) fp32."""
    return values.float().transpose(1, 2).flatten(0, 1).flatten(1)
