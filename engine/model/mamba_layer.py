"""Mamba-2 mixer of Nemotron-H: Dao and Gu 2024, arXiv:2405.21060."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.recurrent import MambaShape
from engine.kernels.recurrent.gated_norm import weighted
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots
from engine.kv.layout import head_range
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.recurrent_ops import RecurrentOps
from engine.runner.parallel import TensorParallel
from engine.weights.checkpoint import Shape, Span

# T tokens, I features of x and z, C channels of the convolution (x, B, C), W its width, H heads, P head_dim, G groups
# of this rank, D features of a group


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
    ops: RecurrentOps

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
            ops=RecurrentOps(reader.kernels),
        )

    def __call__(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        y_TGD, z_TGD = (torch.unflatten(part, -1, self.weight_GD.shape) for part in (y_TI, z_TI))
        if self.weight_GD.shape[1] == self.width:
            return self.ops.norm(y_TGD, z_TGD, self.weight_GD, self.eps, gates_first=True).flatten(1)
        gated_TGD = y_TGD.float() * F.silu(z_TGD.float())
        squares_TG = gated_TGD.new_zeros(len(y_TI), self.num_groups)
        squares_TG[:, self.first : self.first + 1] = gated_TGD.square().sum(-1)
        mean_T1 = self.parallel.all_reduce(squares_TG)[:, self.first : self.first + 1] / self.width
        return weighted(gated_TGD, mean_T1.unsqueeze(-1), self.weight_GD, self.eps, y_TI.dtype).flatten(1)


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
    ops: RecurrentOps

    @classmethod
    def read(cls, reader: ShardReader, shape: MambaShape, name: str) -> Mamba:
        """name: prefix of the tensors, such as model.layers.0.mixer."""
        shape.check_ranks(reader.parallel.size)
        heads = reader.parallel.span(shape.num_heads)
        features = heads[0] * shape.head_dim, heads[1] * shape.head_dim
        groups = head_range(shape.num_groups, rank=reader.parallel.rank, num_ranks=reader.parallel.size)
        conv, size = _conv_spans(shape, features, groups), shape.num_heads * shape.head_dim
        last = size + shape.conv_channels()
        rows = [features, *_moved(conv, size), *_moved([heads], last)]
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
            ops=RecurrentOps(reader.kernels),
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        """Add the output, times `scale`, to the stream, and advance the states."""
        num_heads, channels = self.recurrence.num_heads, self.conv_WC.shape[1]
        rows_TO = x.into(self.projection, norm=norm)
        z_TI, xbc_TC, dt_TH = rows_TO.tensor_split((-channels - num_heads, -num_heads), dim=-1)
        xbc_TC = self.ops.conv(xbc_TC, self.conv_WC, self.conv_bias_C, states, slots, activates=True)
        y_THP = self.ops.recur(xbc_TC, dt_TH, None, self.recurrence, states, slots)
        x.add_product(self.output, self.norm(y_THP.flatten(1), z_TI), scale=scale)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return is_plain(self.projection, self.output)


def expected_tensors(shape: MambaShape, name: str) -> Mapping[str, Shape]:
    """Return the tensors of one layer's mixer."""
    hidden, heads = shape.hidden_size, shape.num_heads
    size, channels = heads * shape.head_dim, shape.conv_channels()
    tensors: dict[str, Shape] = {
        "in_proj.weight": (size + channels + heads, hidden),
        "conv1d.weight": (channels, 1, shape.conv_width),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (size,),
        "out_proj.weight": (hidden, size),
    }
    if shape.has_conv_bias:
        tensors["conv1d.bias"] = (channels,)
    if shape.has_bias:
        tensors |= {"in_proj.bias": (size + channels + heads,), "out_proj.bias": (hidden,)}
    return {f"{name}.{tensor}": sizes for tensor, sizes in tensors.items()}


def _conv_spans(shape: MambaShape, features: Span, groups: Span) -> list[Span]:
    """Return a rank's rows of x, B and C."""
    size, states = shape.num_heads * shape.head_dim, shape.num_groups * shape.state_dim
    first, end = groups[0] * shape.state_dim, groups[1] * shape.state_dim
    return [features, (size + first, size + end), (size + states + first, size + states + end)]


def _moved(spans: list[Span], by: int) -> list[Span]:
    return [(start + by, end + by) for start, end in spans]
