"""Formats that `cluster quantize` writes, and the rounding of a matrix to one of them. FORMATS has a row for each.

    fp8           weight e4m3, weight_scale_inv fp32 per block of 128 x 128
    fp8_dynamic   weight e4m3, weight_scale fp32 per output
    int8          weight int8, weight_scale fp32 per output
    int4          weight_packed int32 (O, I / 8), weight_scale in the model's dtype per group, weight_shape
    int4_asym     int4 with weight_zero_point int32 (O / 8, G)
    nvfp4         weight_packed uint8 (O, I / 2), weight_scale e4m3 per 16 inputs, weight_global_scale (1) that divides
    mxfp4         weight_packed uint8 (O, I / 2), weight_scale uint8 per 32 inputs: b for 2^(b - 127)

Codes lie in order from the low end of a word or byte. All but fp8 are schemes of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.quant.row_quantization import MOST
from engine.weights.quantized_weight import E2M1_LEVELS, pack_4_bits

# O outputs, I inputs, G groups of inputs, S inputs of a group, B columns of a block

_FP8_MOST = MOST[torch.float8_e4m3fn]
_FP8_BLOCK = 128
_E8M0_BIAS = 127
# Smallest scale of an all-zero group in fp32, bf16 and E8M0.
_LEAST_SCALE = 2.0**-120
_LEAST_E4M3 = 2.0**-9
_E2M1_MAGNITUDES = torch.tensor(E2M1_LEVELS[:8])
_E2M1_BORDERS = (_E2M1_MAGNITUDES[1:] + _E2M1_MAGNITUDES[:-1]) / 2
# Scales are tried for these shares of a group's largest magnitude; larger weights are clipped.
_CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

# Tensors by suffix of the name.
Parts = dict[str, Tensor]

# Columns rounded before their corrections are applied to later columns.
_BLOCK = 128
# Added to gram's diagonal, relative to its mean, for directions with few observations.
_DAMPING = 0.01


@dataclass(frozen=True)
class Coded:
    """Rounded matrix, fp32: weight = (number - zero) * scale. Scales: the stored ones divided by the global scale."""

    numbers_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    # Inputs of a group; the last one may have fewer.
    group: int

    def weight(self) -> Tensor:
        """Return the weights that readers of the checkpoint get, (O, I)."""
        zeros_OI = 0.0 if self.zeros_OG is None else self._per_input(self.zeros_OG)
        return (self.numbers_OI - zeros_OI) * self._per_input(self.scales_OG)

    def _per_input(self, values_OG: Tensor) -> Tensor:
        return values_OG.repeat_interleave(self.group, 1)[:, : self.numbers_OI.shape[1]]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Scales and codes of one matrix in a format. dtype: the model's."""

    format: WrittenFormat
    # Inputs per scale.
    group: int
    dtype: torch.dtype
    # Divides the stored scales; None if the format has none.
    global_scale: Tensor | None = None

    def choose(self, weight_GOS: Tensor, importance_S: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the scale and zero per group and output (G, O, 1) with the least error, weighted by input."""
        clips = self.format.clips
        scales_GO1, zeros_GO1 = self._for(weight_GOS, clips[0])
        if len(clips) == 1:
            return scales_GO1, zeros_GO1
        least_GO1 = self._error(weight_GOS, scales_GO1, zeros_GO1, importance_S)
        for clip in clips[1:]:
            others_GO1, other_zeros_GO1 = self._for(weight_GOS, clip)
            error_GO1 = self._error(weight_GOS, others_GO1, other_zeros_GO1, importance_S)
            is_less_GO1 = error_GO1 < least_GO1
            least_GO1 = least_GO1.minimum(error_GO1)
            scales_GO1 = others_GO1.where(is_less_GO1, scales_GO1)
            if zeros_GO1 is not None and other_zeros_GO1 is not None:
                zeros_GO1 = other_zeros_GO1.where(is_less_GO1, zeros_GO1)
        return scales_GO1, zeros_GO1

    def round(self, weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Return the nearest numbers of the format's codes."""
        scaled = weight / scales
        return self.format.nearest(scaled if zeros is None else scaled + zeros)

    def _error(self, weight: Tensor, scales: Tensor, zeros: Tensor | None, importance_S: Tensor) -> Tensor:
        numbers = self.round(weight, scales, zeros)
        rounded = (numbers if zeros is None else numbers - zeros) * scales
        return (rounded - weight).square_() @ importance_S.unsqueeze(1)

    def _for(self, weight_GOS: Tensor, clip: float) -> tuple[Tensor, Tensor | None]:
        """Return scales and zeros for a share of the largest magnitudes."""
        form = self.format
        if form.is_symmetric:
            most_GO1 = weight_GOS.abs().amax(-1, keepdim=True)
            if form.rows > 1:
                num_outputs = most_GO1.shape[1]
                tiles = torch.unflatten(pad(most_GO1, (0, 0, 0, -num_outputs % form.rows)), 1, (-1, form.rows))
                most_GO1 = tiles.amax(2).repeat_interleave(form.rows, 1)[:, :num_outputs]
            return form.store(most_GO1 * (clip / form.most), self), None
        low_GO1 = weight_GOS.amin(-1, keepdim=True).clamp(max=0) * clip
        high_GO1 = weight_GOS.amax(-1, keepdim=True).clamp(min=0) * clip
        scales_GO1 = form.store((high_GO1 - low_GO1) / form.most, self)
        return scales_GO1, (-low_GO1 / scales_GO1).round().clamp(0, form.most)


def _as_fp32(scales: Tensor, scheme: Scheme) -> Tensor:
    return scales.clamp_min(_LEAST_SCALE)


def _as_model(scales: Tensor, scheme: Scheme) -> Tensor:
    stored = scales.to(scheme.dtype).float()
    return stored.where(stored > 0, torch.finfo(scheme.dtype).tiny)


def _as_e4m3(scales: Tensor, scheme: Scheme) -> Tensor:
    assert scheme.global_scale is not None
    # Compensation may raise weights above the global maximum, and e4m3 has no infinity.
    stored = (scales * scheme.global_scale).clamp(_LEAST_E4M3, _FP8_MOST).to(torch.float8_e4m3fn)
    return stored.float() / scheme.global_scale


def _as_e8m0(scales: Tensor, scheme: Scheme) -> Tensor:
    return scales.clamp_min(_LEAST_SCALE).log2().ceil().exp2()


def _nearest_int(least: int, most: int) -> Callable[[Tensor], Tensor]:
    return lambda scaled: scaled.round().clamp(least, most)


def _nearest_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn).float()


def _nearest_e2m1(scaled: Tensor) -> Tensor:
    return _E2M1_MAGNITUDES[torch.bucketize(scaled.abs(), _E2M1_BORDERS)].copysign(scaled)


def _plain_parts(dtype: torch.dtype, scale: str) -> Callable[[Coded, Scheme], Parts]:
    """scale: suffix of the scales' name."""
    return lambda coded, scheme: {"weight": coded.numbers_OI.to(dtype), scale: coded.scales_OG[:: scheme.format.rows]}


def _int4_parts(coded: Coded, scheme: Scheme) -> Parts:
    parts = {
        "weight_packed": _words(coded.numbers_OI + (8 if coded.zeros_OG is None else 0)),
        "weight_scale": coded.scales_OG.to(scheme.dtype),
        "weight_shape": torch.tensor(coded.numbers_OI.shape),
    }
    if coded.zeros_OG is not None:
        parts["weight_zero_point"] = _words(coded.zeros_OG.T).T
    return parts


def _nvfp4_parts(coded: Coded, scheme: Scheme) -> Parts:
    assert scheme.global_scale is not None
    scales_OG = (coded.scales_OG * scheme.global_scale).to(torch.float8_e4m3fn)
    packed = pack_4_bits(_e2m1_codes(coded.numbers_OI))
    return {"weight_packed": packed, "weight_scale": scales_OG, "weight_global_scale": scheme.global_scale}


def _mxfp4_parts(coded: Coded, scheme: Scheme) -> Parts:
    exponents_OG = coded.scales_OG.log2().round() + _E8M0_BIAS
    return {"weight_packed": pack_4_bits(_e2m1_codes(coded.numbers_OI)), "weight_scale": exponents_OG.to(torch.uint8)}


def _e2m1_codes(numbers: Tensor) -> Tensor:
    return torch.bucketize(numbers.abs(), _E2M1_BORDERS) + 8 * numbers.signbit()


def _words(codes: Tensor) -> Tensor:
    """Pack 4-bit codes (N, M) as (N, M / 8) int32, from the low end."""
    packed = pack_4_bits(pad(codes, (0, -codes.shape[1] % 8)))
    return packed.flatten().view(torch.int32).view(len(codes), -1)


# Returns `quantization_config` for a group size and ignored modules.
_Config = Callable[[int, Sequence[str]], dict[str, Any]]


def _fp8_config(group: int, ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_FP8_BLOCK, _FP8_BLOCK],
        "modules_to_not_convert": list(ignore),
    }


def _scheme_config(layout: str, *, rounds_inputs: bool = False, **weights: Any) -> _Config:
    """Return a builder of compressed-tensors' settings. rounds_inputs: engines may round activations per token."""

    def config(group: int, ignore: Sequence[str]) -> dict[str, Any]:
        settings = {"symmetric": True, "dynamic": False, "strategy": "group" if group else "channel"}
        settings |= {"group_size": group or None} | weights
        inputs = {**weights, "symmetric": True, "dynamic": True, "strategy": "token"} if rounds_inputs else None
        scheme = {"targets": ["Linear"], "format": layout, "weights": settings, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "ignore": list(ignore),
            "config_groups": {"group_0": scheme},
        }

    return config


@dataclass(frozen=True, kw_only=True)
class WrittenFormat:
    """Row of FORMATS."""

    bits: int
    # Largest number of the codes.
    most: float
    nearest: Callable[[Tensor], Tensor]
    store: Callable[[Tensor, Scheme], Tensor]
    parts: Callable[[Coded, Scheme], Parts]
    config: _Config
    # Inputs and outputs per scale. group 0: whole rows.
    group: int = 0
    rows: int = 1
    has_group_option: bool = False
    is_symmetric: bool = True
    clips: tuple[float, ...] = (1.0,)
    # True: matrices that engines fuse share one global scale.
    has_global_scale: bool = False
    # True: calibration also scales channels (channel_scales.py).
    scales_channels: bool = True

    def scheme(self, most: Tensor, *, group: int, dtype: torch.dtype) -> Scheme:
        """Return the scheme of matrices with magnitudes up to `most`, which share its global scale if there is one."""
        # The largest group then has the largest e4m3 scale.
        divisor = _FP8_MOST * self.most / most.float().clamp_min(_LEAST_SCALE)
        return Scheme(
            format=self, group=group, dtype=dtype, global_scale=divisor.view(1) if self.has_global_scale else None
        )


_FP8 = WrittenFormat(
    bits=8,
    most=_FP8_MOST,
    nearest=_nearest_e4m3,
    store=_as_fp32,
    parts=_plain_parts(torch.float8_e4m3fn, "weight_scale"),
    config=_scheme_config("float-quantized", num_bits=8, type="float", rounds_inputs=True),
    scales_channels=False,
)
_INT4 = WrittenFormat(
    bits=4,
    most=7,
    nearest=_nearest_int(-8, 7),
    store=_as_model,
    parts=_int4_parts,
    config=_scheme_config("pack-quantized", num_bits=4, type="int"),
    group=128,
    has_group_option=True,
    clips=_CLIPS,
)
_NVFP4 = WrittenFormat(
    bits=4,
    most=6,
    nearest=_nearest_e2m1,
    store=_as_e4m3,
    parts=_nvfp4_parts,
    config=_scheme_config(
        "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", scale_dtype="torch.float8_e4m3fn"
    ),
    group=16,
    clips=_CLIPS,
    has_global_scale=True,
)

FORMATS = {
    "fp8": replace(
        _FP8,
        parts=_plain_parts(torch.float8_e4m3fn, "weight_scale_inv"),
        config=_fp8_config,
        group=_FP8_BLOCK,
        rows=_FP8_BLOCK,
    ),
    "fp8_dynamic": _FP8,
    "int8": replace(
        _FP8,
        most=127,
        nearest=_nearest_int(-127, 127),
        parts=_plain_parts(torch.int8, "weight_scale"),
        config=_scheme_config("int-quantized", num_bits=8, type="int", rounds_inputs=True),
    ),
    "int4": _INT4,
    "int4_asym": replace(
        _INT4,
        most=15,
        nearest=_nearest_int(0, 15),
        is_symmetric=False,
        config=_scheme_config("pack-quantized", num_bits=4, type="int", symmetric=False),
    ),
    "nvfp4": _NVFP4,
    "mxfp4": replace(
        _NVFP4,
        store=_as_e8m0,
        parts=_mxfp4_parts,
        config=_scheme_config("mxfp4-pack-quantized", num_bits=4, type="float", scale_dtype="torch.uint8"),
        group=32,
        clips=(1.0, 0.5),
        has_global_scale=False,
    ),
}


def round_matrix(weight_OI: Tensor, scheme: Scheme, gram_II: Tensor | None = None) -> Coded:
    """Round a matrix, group by group of inputs.

    gram: sum of x x^T over calibration inputs x. Without it, each number is rounded to nearest. With it, columns are
    rounded one after another, and each column's error is compensated in the remaining columns, as far as inputs
    correlate (Frantar et al. 2022, "GPTQ", arXiv:2210.17323).
    """
    num_inputs = weight_OI.shape[1]
    group = scheme.group or num_inputs
    if gram_II is not None:
        return _compensated(weight_OI.float().clone(), scheme, group, gram_II)
    whole_OI = pad(weight_OI.float(), (0, -num_inputs % group))
    weight_GOS = torch.unflatten(whole_OI, 1, (-1, group)).transpose(0, 1).contiguous()
    scales_GO1, zeros_GO1 = scheme.choose(weight_GOS, torch.ones(group))
    numbers_OI = scheme.round(weight_GOS, scales_GO1, zeros_GO1).transpose(0, 1).flatten(1)[:, :num_inputs]
    zeros_OG = None if zeros_GO1 is None else zeros_GO1.squeeze(2).T
    return Coded(numbers_OI, scales_GO1.squeeze(2).T, zeros_OG, group)


def _compensated(left_OI: Tensor, scheme: Scheme, group: int, gram_II: Tensor) -> Coded:
    """Round columns in order. A group's scale is chosen at its first column, and so fits the compensated weights."""
    num_outputs, num_inputs = left_OI.shape
    factor_II, importance_I = _factor(gram_II), gram_II.diagonal()
    numbers_OI = torch.empty_like(left_OI)
    # One of each per group so far; no zeros if codes are symmetric.
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    # A block holds whole groups, so all corrections of a group's columns precede the choice of its scale.
    block = _BLOCK if group >= num_inputs else -(-_BLOCK // group) * group
    for start in range(0, num_inputs, block):
        end = min(start + block, num_inputs)
        errors_OB = torch.empty(num_outputs, end - start)
        for i in range(start, end):
            if i % group == 0:
                part_GOS = left_OI[:, i : i + group].unsqueeze(0)
                scales_GO1, zeros_GO1 = scheme.choose(part_GOS, importance_I[i : i + group])
                scales += scales_GO1
                zeros += [] if zeros_GO1 is None else zeros_GO1
            scales_O1, zeros_O1 = scales[-1], zeros[-1] if zeros else None
            column_O1 = left_OI[:, i : i + 1]
            number_O1 = scheme.round(column_O1, scales_O1, zeros_O1)
            rounded_O1 = (number_O1 if zeros_O1 is None else number_O1 - zeros_O1) * scales_O1
            numbers_OI[:, i : i + 1] = number_O1
            errors_OB[:, i - start : i - start + 1] = error_O1 = (column_O1 - rounded_O1) / factor_II[i, i]
            left_OI[:, i + 1 : end].addmm_(error_O1, factor_II[i : i + 1, i + 1 : end], alpha=-1)
        left_OI[:, end:].addmm_(errors_OB, factor_II[start:end, end:], alpha=-1)
    return Coded(numbers_OI, torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None, group)


def _factor(gram_II: Tensor) -> Tensor:
    """Return upper triangular U with U^T U = gram^-1. Row i distributes column i's error."""
    wide_II = gram_II.double()
    # An empty gram falls back to plain rounding.
    damping = _DAMPING * float(wide_II.diagonal().mean()) or 1.0
    wide_II = wide_II + damping * torch.eye(len(wide_II), dtype=torch.float64)
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(wide_II))
    factor_II: Tensor = torch.linalg.cholesky(inverse_II, upper=True)
    return factor_II.float()
