"""Angles of rotary position embeddings, and the methods that extend their range.

core/model/rope_settings.py reads the kinds; kernels/attention/rotary.py rotates.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.model.shape import RopeConfig

# T tokens, D rotated dimensions of a head, F = D / 2 frequencies, L positions of a table

# Positions added to a table at a time. Fixed chunks make all replicas compute identical values.
_AT_ONCE = 1024


class Rotary:
    """Cosines and sines of a step's positions. Parameters and rounding follow transformers' modeling_rope_utils."""

    def __init__(self, rope: RopeConfig, device: torch.device) -> None:
        self._rope = rope
        self._frequencies_F = _frequencies(rope).to(device)
        self._amplitude = _amplitude(rope)
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # cos and sin, each (L, F)

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (T, 1, F) of `dtype`, computed in fp32."""
        # On a CPU a table saves eight operations per step. On a GPU, growing one would synchronize with the device.
        angles = self._looked_up if positions_T.device.type == "cpu" else self._computed
        cos_TF, sin_TF = angles(positions_T, dtype)
        return cos_TF.unsqueeze(1), sin_TF.unsqueeze(1)

    def _looked_up(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        try:
            cos_LF, sin_LF = self._tables[dtype]
            return cos_LF.index_select(0, positions_T), sin_LF.index_select(0, positions_T)
        except (KeyError, IndexError):
            cos_LF, sin_LF = self._tables[dtype] = self._grown(int(positions_T.max()), dtype)
            return cos_LF.index_select(0, positions_T), sin_LF.index_select(0, positions_T)

    # Training reads the tables too, so they must not be inference tensors.
    @torch.inference_mode(False)
    def _grown(self, position: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return tables that include `position`; existing entries do not change."""
        tables = self._tables.get(dtype) or (torch.empty(0, self._rope.dim // 2, dtype=dtype),) * 2
        parts = [tables]
        for first in range(len(tables[0]), max(position + 1, 2 * len(tables[0])), _AT_ONCE):
            parts.append(self._computed(torch.arange(first, first + _AT_ONCE), dtype))
        cos_LF, sin_LF = (torch.cat(part) for part in zip(*parts, strict=True))
        return cos_LF, sin_LF

    def _computed(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = self._frequencies_F
        if self._rope.kind == "dynamic":
            frequencies = self._dynamic_frequencies(positions_T)
        angles_TF = positions_T.float().unsqueeze(-1) * frequencies
        cos_TF, sin_TF = angles_TF.cos() * self._amplitude, angles_TF.sin() * self._amplitude
        return cos_TF.to(dtype), sin_TF.to(dtype)

    def _dynamic_frequencies(self, positions_T: Tensor) -> Tensor:
        """Return the frequencies of dynamic NTK: beyond the trained range the base grows with the sequence length.

        The length is counted up to each token, as in token-by-token decoding. A token's KV thus does not depend on
        later tokens, and a cached prefix stays valid.
        """
        factor, dim, max_position = self._rope.factor, self._rope.dim, self._rope.max_position
        length_T = (positions_T + 1).clamp_min(max_position).float()
        growth_T = (factor * length_T / max_position - (factor - 1)) ** (dim / (dim - 2))
        exponents_F = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_T.device) / dim
        return 1.0 / (self._rope.theta * growth_T).unsqueeze(-1) ** exponents_F


def _frequencies(rope: RopeConfig) -> Tensor:
    """Return the angle per position of each pair of features: (F,) fp32."""
    frequencies_F = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim))
    match rope.kind:
        case "linear":
            return frequencies_F / rope.factor
        case "proportional":
            assert rope.num_rotated is not None
            frequencies_F[rope.num_rotated // 2 :] = 0
            return frequencies_F / rope.factor
        case "factors" | "longrope":
            return frequencies_F / torch.tensor(rope.long_factors if rope.is_long else rope.factors)
        case "llama3":
            return _llama3(frequencies_F, rope)
        case "yarn":
            return _yarn(frequencies_F, rope)
    return frequencies_F


def _llama3(frequencies_F: Tensor, scaling: RopeConfig) -> Tensor:
    """Stretch long waves by `factor`, keep short ones, and interpolate in between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # Turns in the trained range.
    turns_F = scaling.original_max_position * frequencies_F / (2 * math.pi)
    smooth_F = ((turns_F - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_F) * frequencies_F / scaling.factor + smooth_F * frequencies_F


def _yarn(frequencies_F: Tensor, scaling: RopeConfig) -> Tensor:
    """Interpolate NTK-by-parts: Peng et al. 2023, arXiv:2309.00071, section 3.2."""
    dim, theta = scaling.dim, scaling.theta

    def dimension(turns: float) -> float:
        """Return the dimension whose wave turns this many times in the trained range."""
        return dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if high == low else high
    stretched_F = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies_F / scaling.factor * stretched_F + frequencies_F * (1 - stretched_F)


def _amplitude(rope: RopeConfig) -> float:
    """Return the factor of cosines and sines. YaRN (section 3.4) and LongRoPE sharpen attention with it."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
