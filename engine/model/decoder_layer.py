"""Decoder layer of the Llama and Qwen families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.attention.heads import Heads
from engine.attention.layer_attention import LayerAttention
from engine.kv.layout import KVLayout
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.experts import SparseMLP
from engine.model.gated_mlp import GatedMLP
from engine.weights.checkpoint import Shape

# T tokens of the step, H query heads and K kv heads of this rank, D head_dim, N = H + 2 K


@dataclass(frozen=True)
class DecoderLayer:
    """Layer x + attention(norm(x)), then x + mlp(norm(x)), split in two halves around the attention."""

    index: int
    head_dim: int
    attention: LayerAttention
    input_norm: RMSNorm
    # Rows: queries, keys, values.
    qkv: Linear
    output: RowParallelLinear
    mlp_norm: RMSNorm
    mlp: GatedMLP | SparseMLP
    # Norm of the attention's output before it is added to the residual stream.
    output_norm: RMSNorm | None = None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layout: KVLayout, index: int) -> DecoderLayer:
        prefix, dim, eps = f"model.layers.{index}", config.head_dim, config.rms_norm_eps
        attention = f"{prefix}.self_attn"
        q_first, q_end = reader.parallel.span(config.num_q_heads)
        kv_first, kv_end = layout.head_range(reader.parallel.rank)
        q_rows, kv_rows = (q_first * dim, q_end * dim), (kv_first * dim, kv_end * dim)
        return cls(
            index=index,
            head_dim=dim,
            attention=LayerAttention(
                layer=index,
                scale=config.attention_scale,
                window=config.sliding_windows[index],
                q_norm=reader.norm(f"{attention}.q_norm", eps) if config.has_qk_norm else None,
                k_norm=reader.norm(f"{attention}.k_norm", eps) if config.has_qk_norm else None,
            ),
            input_norm=reader.norm(f"{prefix}.input_layernorm", eps),
            qkv=reader.linear(
                {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows},
                has_bias=config.has_qkv_bias,
            ),
            output=reader.row_parallel(f"{attention}.o_proj", q_rows, has_bias=config.has_output_bias),
            mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm", eps),
            mlp=(SparseMLP if config.is_sparse(index) else GatedMLP).read(reader, config, index),
        )

    def store(self, x: Residual, heads: Heads) -> Tensor:
        """Write the tokens' keys and values to the pool. Returns the queries (T, H, D)."""
        heads_TND = torch.unflatten(x.into(self.qkv, norm=self.input_norm), -1, (-1, self.head_dim))
        return heads.store(self.attention, heads_TND)

    def finish(self, x: Residual, q_THD: Tensor, heads: Heads) -> None:
        attended_THD = heads.attend(self.attention, q_THD)
        x.add_product(self.output, attended_THD.flatten(1), after=self.output_norm)
        self.mlp(x, norm=self.mlp_norm)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return is_plain(self.qkv, self.output) and self.mlp.is_fixed


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer, without its MLP."""
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_q_heads * dim, config.num_kv_heads * dim
    prefix = f"model.layers.{layer}"
    norms: dict[str, Shape] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    tensors = {f"{prefix}.{name}.weight": shape for name, shape in norms.items()}
    for name, shape, has_bias in (
        ("q_proj", (q_size, hidden), config.has_qkv_bias),
        ("k_proj", (kv_size, hidden), config.has_qkv_bias),
        ("v_proj", (kv_size, hidden), config.has_qkv_bias),
        ("o_proj", (hidden, q_size), config.has_output_bias),
    ):
        tensors[f"{prefix}.self_attn.{name}.weight"] = shape
        if has_bias:
            tensors[f"{prefix}.self_attn.{name}.bias"] = shape[:1]
    return tensors
