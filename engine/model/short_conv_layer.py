"""Gated short convolution of LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from core.model.recurrent import ShortConvShape
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.recurrent_ops import RecurrentOps
from engine.weights.checkpoint import Shape

# T tokens, C channels of this rank, W width of the convolution


@dataclass(frozen=True)
class ShortConv:
    """Mixer x + out_proj(C * conv(B * x)). Ranks share the channels."""

    # Rows: B, C, x.
    projection: Linear
    conv_WC: Tensor
    conv_bias_C: Tensor | None
    output: RowParallelLinear
    ops: RecurrentOps

    @classmethod
    def read(cls, reader: ShardReader, shape: ShortConvShape, name: str) -> ShortConv:
        """name: prefix of the tensors, such as model.layers.0.conv."""
        shape.check_ranks(reader.parallel.size)
        first, end = channels = reader.parallel.span(shape.hidden_size)
        rows = [(first + part * shape.hidden_size, end + part * shape.hidden_size) for part in range(3)]
        conv_CW = reader.parameter(f"{name}.conv.weight", channels).flatten(1)
        return cls(
            projection=reader.linear({f"{name}.in_proj": rows}, has_bias=shape.has_bias),
            conv_WC=conv_CW.T.contiguous(),
            conv_bias_C=reader.parameter(f"{name}.conv.bias", channels) if shape.has_bias else None,
            output=reader.row_parallel(f"{name}.out_proj", channels, has_bias=shape.has_bias),
            ops=RecurrentOps(reader.kernels),
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        """Add the output, times `scale`, to the stream, and advance the states."""
        before_TC, after_TC, x_TC = x.into(self.projection, norm=norm).chunk(3, dim=-1)
        x_TC = self.ops.conv(before_TC * x_TC, self.conv_WC, self.conv_bias_C, states, slots, activates=False)
        x.add_product(self.output, after_TC * x_TC, scale=scale)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return is_plain(self.projection, self.output)


def expected_tensors(shape: ShortConvShape, name: str) -> Mapping[str, Shape]:
    """Return the tensors of one layer's convolution."""
    hidden = shape.hidden_size
    tensors: dict[str, Shape] = {
        "in_proj.weight": (3 * hidden, hidden),
        "conv.weight": (hidden, 1, shape.conv_width),
        "out_proj.weight": (hidden, hidden),
    }
    if shape.has_bias:
        tensors |= {"in_proj.bias": (3 * hidden,), "conv.bias": (hidden,), "out_proj.bias": (hidden,)}
    return {f"{name}.{tensor}": sizes for tensor, sizes in tensors.items()}
