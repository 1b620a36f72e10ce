"""Mixers of recurrent layers: Gated DeltaNet, Mamba-2 and the gated short convolution. Ranks share heads or channels.

    DeltaNet   Qwen3-Next, Qwen3.5: Yang et al. 2024, arXiv:2412.06464
    Mamba      Nemotron-H, Granite 4: Dao and Gu 2024, arXiv:2405.21060
    ShortConv  LFM2

Each adds its output, times `scale`, to the stream, and advances the states of its layer. Kernels of the CPU, of a GPU,
or torch compute the operations; see engine.kernels.recurrent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.recurrent import DeltaNetShape, MambaShape, ShortConvShape
from engine.cpu import recurrent as cpu
from engine.cpu.library import Kernels
from engine.kernels.recurrent.causal_conv import launch_causal_conv, reference_causal_conv
from engine.kernels.recurrent.gated_norm import launch_gated_rms_norm, reference_gated_rms_norm, weighted
from engine.kernels.recurrent.linear_recurrence import (
    LinearRecurrence,
    launch_linear_recurrence,
    reference_linear_recurrence,
)
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots
from engine.kv.layout import head_range
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Shape, Span, expected_matrices

# T tokens, C channels of the convolution, W its width, H value heads, V features of a head's values, I features of all
# heads, G groups of this rank, D features of a group


@dataclass(frozen=True)
class DeltaNet:
    """Mixer x + out_proj(norm(delta_rule(silu(conv(q, k, v)))) * silu(z)). Ranks share the key heads."""

    # Rows: queries, keys, values, gate z.
    qkvz: Linear
    # Rows: b of all heads, then a.
    ba: Linear
    conv_WC: Tensor
    recurrence: LinearRecurrence
    norm_1V: Tensor
    norm_eps: float
    output: RowParallelLinear
    kernels: Kernels | None

    @classmethod
    def read(cls, reader: ShardReader, shape: DeltaNetShape, name: str) -> DeltaNet:
        """name: prefix of the tensors, such as model.layers.0.linear_attn."""
        shape.check_ranks(reader.parallel.size)
        key_heads, heads = (reader.parallel.span(count) for count in (shape.num_key_heads, shape.num_value_heads))
        conv_CW = reader.parameter(f"{name}.conv1d.weight", *_delta_conv_spans(shape, key_heads, heads)).flatten(1)
        qkvz, ba = _projections(shape, name, key_heads, heads)
        return cls(
            qkvz=reader.linear(qkvz),
            ba=reader.linear(ba),
            conv_WC=conv_CW.T.contiguous(),
            recurrence=LinearRecurrence(
                num_key_heads=key_heads[1] - key_heads[0],
                num_heads=heads[1] - heads[0],
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                rate_H=reader.parameter(f"{name}.A_log", heads).exp(),
                dt_bias_H=reader.parameter(f"{name}.dt_bias", heads),
            ),
            norm_1V=reader.tensor(f"{name}.norm.weight").float().unsqueeze(0),
            norm_eps=shape.norm_eps,
            output=reader.row_parallel(f"{name}.out_proj", _rows(heads, shape.value_dim)),
            kernels=reader.kernels,
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        x_TE = x.normed(norm)
        qkv_TC, z_TV = self.qkvz(x_TE).tensor_split((self.conv_WC.shape[1],), dim=-1)
        b_TH, a_TH = self.ba(x_TE).chunk(2, dim=-1)
        qkv_TC = _conv(self.kernels, qkv_TC, self.conv_WC, None, states, slots)
        out_THV = _recur(self.kernels, qkv_TC, a_TH, b_TH, self.recurrence, states, slots)
        normed_THV = _gated_norm(
            self.kernels, out_THV, z_TV.view(out_THV.shape), self.norm_1V, self.norm_eps, gates_first=False
        )
        x.add_product(self.output, normed_THV.flatten(1), scale=scale)

    @property
    def is_fixed(self) -> bool:
        return is_plain(self.qkvz, self.ba, self.output)

    @staticmethod
    def expected_tensors(shape: DeltaNetShape, name: str) -> Mapping[str, Shape]:
        """Return the tensors of one layer's DeltaNet."""
        hidden, heads = shape.hidden_size, shape.num_value_heads
        values, channels = heads * shape.value_dim, shape.conv_channels()
        tensors: dict[str, Shape] = {
            "conv1d.weight": (channels, 1, shape.conv_width),
            "A_log": (heads,),
            "dt_bias": (heads,),
            "norm.weight": (shape.value_dim,),
            "out_proj.weight": (hidden, values),
        }
        rows = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * heads}
        if not shape.is_fused:
            rows = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        tensors |= {f"{projection}.weight": (count, hidden) for projection, count in rows.items()}
        return {f"{name}.{tensor}": sizes for tensor, sizes in tensors.items()}


def _delta_conv_spans(shape: DeltaNetShape, key_heads: Span, heads: Span) -> list[Span]:
    """Return a rank's rows among all queries, keys and values."""
    keys = shape.num_key_heads * shape.key_dim
    queries_and_keys = [_rows(key_heads, shape.key_dim, after=part * keys) for part in range(2)]
    return [*queries_and_keys, _rows(heads, shape.value_dim, after=2 * keys)]


def _projections(
    shape: DeltaNetShape, name: str, key_heads: Span, heads: Span
) -> tuple[dict[str, Span | Sequence[Span]], dict[str, Span | Sequence[Span]]]:
    """Return a rank's rows for queries, keys, values and z, and for b and a."""
    if not shape.is_fused:
        qkv, z = _delta_conv_spans(shape, key_heads, heads), _rows(heads, shape.value_dim)
        return {f"{name}.in_proj_qkv": qkv, f"{name}.in_proj_z": z}, {f"{name}.in_proj_{part}": heads for part in "ba"}
    num_values = shape.num_value_heads // shape.num_key_heads
    width = num_values * shape.value_dim
    qkvz = _by_key_head(key_heads, (shape.key_dim, shape.key_dim, width, width))
    return {f"{name}.in_proj_qkvz": qkvz}, {f"{name}.in_proj_ba": _by_key_head(key_heads, (num_values,) * 2)}


def _by_key_head(key_heads: Span, sizes: Sequence[int]) -> list[Span]:
    """Return the rows of some key heads, sorted by part. The checkpoint sorts by head. sizes: rows of each part."""
    spans = []
    for part, size in enumerate(sizes):
        firsts = (head * sum(sizes) + sum(sizes[:part]) for head in range(*key_heads))
        spans += [(first, first + size) for first in firsts]
    return spans


@dataclass(frozen=True)
class Mamba:
    """Mixer x + out_proj(norm(state_space(silu(conv(x, B, C))) * silu(z))). Ranks share the groups of heads."""

    # Rows: gate z, x, B, C, dt.
    projection: Linear
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    recurrence: LinearRecurrence
    norm: GroupNorm
    output: RowParallelLinear
    kernels: Kernels | None

    @classmethod
    def read(cls, reader: ShardReader, shape: MambaShape, name: str) -> Mamba:
        """name: prefix of the tensors, such as model.layers.0.mixer."""
        shape.check_ranks(reader.parallel.size)
        heads = reader.parallel.span(shape.num_heads)
        features, size = _rows(heads, shape.head_dim), shape.num_heads * shape.head_dim
        groups = head_range(shape.num_groups, rank=reader.parallel.rank, num_ranks=reader.parallel.size)
        conv = _mamba_conv_spans(shape, heads, groups)
        moved = _mamba_conv_spans(shape, heads, groups, after=size)
        rows = [features, *moved, _rows(heads, 1, after=size + shape.conv_channels())]
        conv_CW = reader.parameter(f"{name}.conv1d.weight", *conv).flatten(1)
        return cls(
            projection=reader.linear({f"{name}.in_proj": rows}, has_bias=shape.has_bias),
            conv_WC=conv_CW.T.contiguous(),
            conv_bias_C=reader.parameter(f"{name}.conv1d.bias", *conv) if shape.has_conv_bias else None,
            recurrence=LinearRecurrence(
                num_key_heads=groups[1] - groups[0],
                num_heads=heads[1] - heads[0],
                key_dim=shape.state_dim,
                value_dim=shape.head_dim,
                rate_H=reader.parameter(f"{name}.A_log", heads).exp(),
                dt_bias_H=reader.parameter(f"{name}.dt_bias", heads),
                is_delta=False,
                skip_H=reader.parameter(f"{name}.D", heads),
                min_dt=shape.min_dt,
                max_dt=shape.max_dt,
            ),
            norm=GroupNorm.read(reader, shape, f"{name}.norm.weight", features=features, groups=groups),
            output=reader.row_parallel(f"{name}.out_proj", features, has_bias=shape.has_bias),
            kernels=reader.kernels,
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        num_heads, channels = self.recurrence.num_heads, self.conv_WC.shape[1]
        rows_TO = x.into(self.projection, norm=norm)
        z_TI, xbc_TC, dt_TH = rows_TO.tensor_split((-channels - num_heads, -num_heads), dim=-1)
        xbc_TC = _conv(self.kernels, xbc_TC, self.conv_WC, self.conv_bias_C, states, slots)
        y_THV = _recur(self.kernels, xbc_TC, dt_TH, None, self.recurrence, states, slots)
        x.add_product(self.output, self.norm(y_THV.flatten(1), z_TI), scale=scale)

    @property
    def is_fixed(self) -> bool:
        return is_plain(self.projection, self.output)

    @staticmethod
    def expected_tensors(shape: MambaShape, name: str) -> Mapping[str, Shape]:
        """Return the tensors of one layer's mixer."""
        hidden, heads, has_bias = shape.hidden_size, shape.num_heads, shape.has_bias
        size, channels = heads * shape.head_dim, shape.conv_channels()
        matrices: dict[str, tuple[Shape, bool]] = {
            "in_proj": ((size + channels + heads, hidden), has_bias),
            "conv1d": ((channels, 1, shape.conv_width), shape.has_conv_bias),
            "norm": ((size,), False),
            "out_proj": ((hidden, size), has_bias),
        }
        return expected_matrices(name, matrices) | {f"{name}.{part}": (heads,) for part in ("A_log", "D", "dt_bias")}


@dataclass(frozen=True)
class GroupNorm:
    """RMS norm of y * silu(z) per group of features. Ranks that share a group add their sums of squares."""

    weight_GD: Tensor
    eps: float
    # Groups of all ranks, and the first one of this rank.
    num_groups: int
    first: int
    # Features of a whole group.
    width: int
    parallel: TensorParallel
    kernels: Kernels | None

    @classmethod
    def read(cls, reader: ShardReader, shape: MambaShape, name: str, *, features: Span, groups: Span) -> GroupNorm:
        weight = reader.tensor(name, rows=features).float()
        return cls(
            weight_GD=weight.view(groups[1] - groups[0], -1),
            eps=shape.norm_eps,
            num_groups=shape.num_groups,
            first=groups[0],
            width=shape.num_heads * shape.head_dim // shape.num_groups,
            parallel=reader.parallel,
            kernels=reader.kernels,
        )

    def __call__(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        y_TGD, z_TGD = (torch.unflatten(part, -1, self.weight_GD.shape) for part in (y_TI, z_TI))
        if self.weight_GD.shape[1] == self.width:
            return _gated_norm(self.kernels, y_TGD, z_TGD, self.weight_GD, self.eps, gates_first=True).flatten(1)
        gated_TGD = y_TGD.float() * F.silu(z_TGD.float())
        squares_TG = gated_TGD.new_zeros(len(y_TI), self.num_groups)
        squares_TG[:, self.first : self.first + 1] = gated_TGD.square().sum(-1)
        mean_T1 = self.parallel.all_reduce(squares_TG)[:, self.first : self.first + 1] / self.width
        return weighted(gated_TGD, mean_T1.unsqueeze(-1), self.weight_GD, self.eps, y_TI.dtype).flatten(1)


def _mamba_conv_spans(shape: MambaShape, heads: Span, groups: Span, *, after: int = 0) -> list[Span]:
    """Return a rank's rows of x, B and C, shifted by `after` rows."""
    size, states = shape.num_heads * shape.head_dim, shape.num_groups * shape.state_dim
    firsts = after + size, after + size + states
    return [
        _rows(heads, shape.head_dim, after=after),
        *(_rows(groups, shape.state_dim, after=first) for first in firsts),
    ]


@dataclass(frozen=True)
class ShortConv:
    """Mixer x + out_proj(C * conv(B * x)). Ranks share the channels."""

    # Rows: B, C, x.
    projection: Linear
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    output: RowParallelLinear
    kernels: Kernels | None

    @classmethod
    def read(cls, reader: ShardReader, shape: ShortConvShape, name: str) -> ShortConv:
        """name: prefix of the tensors, such as model.layers.0.conv."""
        shape.check_ranks(reader.parallel.size)
        channels = reader.parallel.span(shape.hidden_size)
        rows = [_rows(channels, 1, after=part * shape.hidden_size) for part in range(3)]
        conv_CW = reader.parameter(f"{name}.conv.weight", channels).flatten(1)
        return cls(
            projection=reader.linear({f"{name}.in_proj": rows}, has_bias=shape.has_bias),
            conv_WC=conv_CW.T.contiguous(),
            conv_bias_C=reader.parameter(f"{name}.conv.bias", channels) if shape.has_bias else None,
            output=reader.row_parallel(f"{name}.out_proj", channels, has_bias=shape.has_bias),
            kernels=reader.kernels,
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        before_TC, after_TC, x_TC = x.into(self.projection, norm=norm).chunk(3, dim=-1)
        x_TC = _conv(self.kernels, before_TC * x_TC, self.conv_WC, self.conv_bias_C, states, slots, activates=False)
        x.add_product(self.output, after_TC * x_TC, scale=scale)

    @property
    def is_fixed(self) -> bool:
        return is_plain(self.projection, self.output)

    @staticmethod
    def expected_tensors(shape: ShortConvShape, name: str) -> Mapping[str, Shape]:
        """Return the tensors of one layer's convolution."""
        hidden, has_bias = shape.hidden_size, shape.has_bias
        matrices: dict[str, tuple[Shape, bool]] = {
            "in_proj": ((3 * hidden, hidden), has_bias),
            "conv": ((hidden, 1, shape.conv_width), has_bias),
            "out_proj": ((hidden, hidden), has_bias),
        }
        return expected_matrices(name, matrices)


def _rows(units: Span, size: int, *, after: int = 0) -> Span:
    """Return the rows of a range of units of `size` rows each, shifted by `after` rows."""
    return after + units[0] * size, after + units[1] * size


def _conv(
    kernels: Kernels | None,
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    states: LayerStates,
    slots: StateSlots,
    *,
    activates: bool = True,
) -> Tensor:
    if kernels is not None and cpu.can_convolve(weight_WC):
        return cpu.causal_conv(kernels, x_TC, weight_WC, bias_C, states.conv_NLC, slots, activates=activates)
    convolve = launch_causal_conv if x_TC.is_cuda else reference_causal_conv
    return convolve(x_TC, weight_WC, bias_C, states.conv_NLC, slots, activates=activates)


def _recur(
    kernels: Kernels | None,
    rows_TC: Tensor,
    dt_TH: Tensor,
    beta_TH: Tensor | None,
    recurrence: LinearRecurrence,
    states: LayerStates,
    slots: StateSlots,
) -> Tensor:
    inputs = rows_TC, dt_TH, beta_TH, recurrence, states.matrix_NHKV, slots
    if kernels is not None and cpu.can_recur(recurrence):
        return cpu.linear_recurrence(kernels, *inputs)
    return (launch_linear_recurrence if rows_TC.is_cuda else reference_linear_recurrence)(*inputs)


def _gated_norm(
    kernels: Kernels | None, x_TGD: Tensor, z_TGD: Tensor, weight_GD: Tensor, eps: float, *, gates_first: bool
) -> Tensor:
    if kernels is not None:
        return cpu.gated_rms_norm(kernels, x_TGD, z_TGD, weight_GD, eps, gates_first=gates_first)
    norm = launch_gated_rms_norm if x_TGD.is_cuda else reference_gated_rms_norm
    return norm(x_TGD, z_TGD, weight_GD, eps, gates_first=gates_first)
