"""Gated DeltaNet of Qwen3-Next and Qwen3.5: Yang et al. 2024, arXiv:2412.06464."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from core.model.recurrent import DeltaNetShape
from engine.kernels.recurrent.linear_recurrence import LinearRecurrence
from engine.kernels.recurrent.state_slots import LayerStates, StateSlots
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.recurrent_ops import RecurrentOps
from engine.weights.checkpoint import Shape, Span

# T tokens, C channels of the convolution (queries, keys, values), W its width, H value heads, V value features


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
    ops: RecurrentOps

    @classmethod
    def read(cls, reader: ShardReader, shape: DeltaNetShape, name: str) -> DeltaNet:
        """name: prefix of the tensors, such as model.layers.0.linear_attn."""
        shape.check_ranks(reader.parallel.size)
        key_heads, heads = (reader.parallel.span(count) for count in (shape.num_key_heads, shape.num_value_heads))
        values = heads[0] * shape.value_dim, heads[1] * shape.value_dim
        conv_CW = reader.parameter(f"{name}.conv1d.weight", *_conv_spans(shape, key_heads, heads)).flatten(1)
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
            output=reader.row_parallel(f"{name}.out_proj", values),
            ops=RecurrentOps(reader.kernels),
        )

    def __call__(
        self, x: Residual, states: LayerStates, slots: StateSlots, *, norm: RMSNorm | None, scale: float = 1.0
    ) -> None:
        """Add the output, times `scale`, to the stream, and advance the states."""
        x_TE = x.normed(norm)
        qkv_TC, z_TV = self.qkvz(x_TE).tensor_split((self.conv_WC.shape[1],), dim=-1)
        b_TH, a_TH = self.ba(x_TE).chunk(2, dim=-1)
        qkv_TC = self.ops.conv(qkv_TC, self.conv_WC, None, states, slots, activates=True)
        out_THV = self.ops.recur(qkv_TC, a_TH, b_TH, self.recurrence, states, slots)
        normed_THV = self.ops.norm(out_THV, z_TV.view(out_THV.shape), self.norm_1V, self.norm_eps, gates_first=False)
        x.add_product(self.output, normed_THV.flatten(1), scale=scale)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return is_plain(self.qkvz, self.ba, self.output)


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


def _conv_spans(shape: DeltaNetShape, key_heads: Span, heads: Span) -> list[Span]:
    """Return a rank's rows among all queries, keys and values."""
    keys = shape.num_key_heads * shape.key_dim
    spans = [
        (keys * part + key_heads[0] * shape.key_dim, keys * part + key_heads[1] * shape.key_dim) for part in (0, 1)
    ]
    return [*spans, (2 * keys + heads[0] * shape.value_dim, 2 * keys + heads[1] * shape.value_dim)]


def _projections(
    shape: DeltaNetShape, name: str, key_heads: Span, heads: Span
) -> tuple[dict[str, Span | Sequence[Span]], dict[str, Span | Sequence[Span]]]:
    """Return a rank's rows for queries, keys, values and z, and for b and a."""
    if not shape.is_fused:
        values = heads[0] * shape.value_dim, heads[1] * shape.value_dim
        conv = _conv_spans(shape, key_heads, heads)
        return {f"{name}.in_proj_qkv": conv, f"{name}.in_proj_z": values}, {
            f"{name}.in_proj_b": heads,
            f"{name}.in_proj_a": heads,
        }
    num_values = shape.num_value_heads // shape.num_key_heads
    width = num_values * shape.value_dim
    qkvz = _by_key_head(key_heads, (shape.key_dim, shape.key_dim, width, width))
    ba = _by_key_head(key_heads, (num_values, num_values))
    return {f"{name}.in_proj_qkvz": qkvz}, {f"{name}.in_proj_ba": ba}


def _by_key_head(key_heads: Span, sizes: Sequence[int]) -> list[Span]:
    """Return the rows of some key heads, sorted by part. The checkpoint sorts by head. sizes: rows of each part."""
    spans = []
    for part, size in enumerate(sizes):
        firsts = (head * sum(sizes) + sum(sizes[:part]) for head in range(*key_heads))
        spans += [(first, first + size) for first in firsts]
    return spans
