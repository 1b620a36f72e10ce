"""Decoder layer with attention over keys and values: all families but those with latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.shape import LayerConfig, ModelConfig
from engine.attention.heads import Heads
from engine.attention.layer_attention import LayerAttention
from engine.kernels.attention.rotary import rotate
from engine.kv.layout import head_range
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.experts import MLP, read_mlp
from engine.model.norms import ProjectionNorm, mlp_norms, read_norm
from engine.model.per_layer_embeddings import PerLayerInput
from engine.weights.checkpoint import Shape, expected_matrices

# T tokens of the step, H query heads and K kv heads of this rank, D head_dim, N = H + 2 K


@dataclass(frozen=True)
class DecoderLayer:
    """Layer x + attention(norm(x)), then x + mlp(norm(x)), split in two halves around the attention."""

    index: int
    num_q_heads: int
    head_dim: int
    attention: LayerAttention
    # None: the families without norms before their parts.
    input_norm: RMSNorm | None
    # Rows: queries, keys, values; queries only in a layer that reads another one's keys and values. With gates, each
    # query head is followed by its own.
    qkv: Linear
    has_gates: bool
    # Norms over all heads together.
    qk_norm: ProjectionNorm | None
    values_are_keys: bool
    output: RowParallelLinear
    # Norm of the attention's output.
    output_norm: RMSNorm | None
    residual_scale: float
    mlp_norm: RMSNorm | None
    mlp: MLP | None
    scales_queries: bool
    # Addition of the layer's embedding, and a factor of its output (1,): Gemma 4.
    per_layer_input: PerLayerInput | None
    scale: Tensor | None

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, index: int) -> DecoderLayer:
        prefix, layer = f"model.layers.{index}", config.layers[index]
        attention, dim = f"{prefix}.self_attn", layer.head_dim
        q_first, q_end = reader.parallel.span(config.num_q_heads)
        kv_first, kv_end = head_range(layer.num_kv_heads, rank=reader.parallel.rank, num_ranks=reader.parallel.size)
        q_rows, kv_rows = (q_first * dim, q_end * dim), (kv_first * dim, kv_end * dim)
        wide = 1 + config.has_attention_gate
        rows = {f"{attention}.q_proj": (wide * q_rows[0], wide * q_rows[1])} | {
            f"{attention}.{name}": kv_rows for name in _kv_names(layer)
        }
        before = mlp_norms(config).before if layer.has_mlp else ""
        return cls(
            index=index,
            num_q_heads=q_end - q_first,
            head_dim=dim,
            attention=_read_attention(reader, config, index, (q_first, q_end)),
            input_norm=read_norm(reader, config, f"{prefix}.input_layernorm") if config.has_pre_norms else None,
            qkv=reader.linear(rows, has_bias=config.has_qkv_bias),
            has_gates=config.has_attention_gate,
            qk_norm=ProjectionNorm.read(reader, config, attention, q_rows, kv_rows)
            if config.qk_norm == "projection"
            else None,
            values_are_keys=layer.values_are_keys,
            output=reader.row_parallel(f"{attention}.o_proj", q_rows, has_bias=config.has_output_bias),
            output_norm=read_norm(reader, config, f"{prefix}.post_attention_layernorm")
            if config.has_post_norms
            else None,
            residual_scale=config.residual_scale,
            mlp_norm=read_norm(reader, config, f"{prefix}.{before}") if before else None,
            mlp=read_mlp(reader, config, index) if layer.has_mlp else None,
            scales_queries=layer.scales_queries,
            per_layer_input=PerLayerInput.read(reader, config, index) if config.per_layer_dim else None,
            scale=reader.tensor(f"{prefix}.layer_scalar") if config.has_layer_scales else None,
        )

    def store(self, x: Residual, heads: Heads) -> Tensor:
        """Write the tokens' keys and values to the pool. Returns the queries (T, H, D), and behind them their gates."""
        heads_TND = self._heads(x)
        if self.has_gates:
            # Queries and gates alternate.
            pairs_TND, kv_TND = heads_TND.tensor_split((2 * self.num_q_heads,), dim=1)
            q_THD = heads.store(self.attention, torch.cat((pairs_TND[:, ::2], kv_TND), dim=1))
            return torch.cat((q_THD, pairs_TND[:, 1::2]), dim=1)
        if self.values_are_keys:
            heads_TND = torch.cat((heads_TND, heads_TND[:, self.num_q_heads :]), dim=1)
        return heads.store(self.attention, heads_TND)

    def keep(self, x: Residual, pool: KVPool, slots_T: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> None:
        """Write keys and values only. The layer must not share them, derive values from keys, or norm values."""
        heads_TND, num_queries = self._heads(x), (1 + self.has_gates) * self.num_q_heads
        k_TKD, v_TKD = heads_TND[:, num_queries:].chunk(2, dim=1)
        k_TKD = k_TKD if self.attention.k_norm is None else self.attention.k_norm(k_TKD)
        pool.write(self.attention.layer, slots_T, rotate(k_TKD, cos_T1F, sin_T1F), v_TKD)

    def finish(self, x: Residual, q_THD: Tensor, heads: Heads) -> None:
        attended_THD = heads.attend(self.attention, q_THD[:, : self.num_q_heads])
        if self.has_gates:
            attended_THD = attended_THD * q_THD[:, self.num_q_heads :].sigmoid()
        x.add_product(self.output, attended_THD.flatten(1), after=self.output_norm, scale=self.residual_scale)
        if self.mlp is not None:
            self.mlp(x, norm=self.mlp_norm)

    @property
    def written(self) -> int | None:
        """Layer of the pool that this layer writes; None if it reads another one's keys and values."""
        return self.attention.layer if self.attention.stores else None

    def end(self, x: Residual, per_layer_TP: Tensor | None) -> None:
        """Add the layer's embedding, and scale its output."""
        if self.per_layer_input is not None and per_layer_TP is not None:
            self.per_layer_input(x, per_layer_TP)
        if self.scale is not None:
            x.scale(self.scale)

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        return is_plain(self.qkv, self.output) and (self.mlp is None or self.mlp.is_fixed)

    @property
    def is_usual(self) -> bool:
        """True if a compiled program can compute all parts of the layer."""
        extras = self.qk_norm, self.per_layer_input, self.scale
        has_norms = self.input_norm is not None and self.mlp_norm is not None
        has_usual_heads = not (self.values_are_keys or self.scales_queries)
        return has_norms and has_usual_heads and self.residual_scale == 1 and all(part is None for part in extras)

    def _heads(self, x: Residual) -> Tensor:
        """Project the tokens: queries, then keys, then values (T, N, D), not yet rotated."""
        rows_TO = x.into(self.qkv, norm=self.input_norm)
        if self.qk_norm is not None:
            rows_TO = self.qk_norm(rows_TO)
        return torch.unflatten(rows_TO, -1, (-1, self.head_dim))


def expected_tensors(config: ModelConfig, index: int) -> Mapping[str, Shape]:
    """Return names and shapes of one layer's tensors, without its MLP."""
    hidden, layer = config.hidden_size, config.layers[index]
    dim, prefix = layer.head_dim, f"model.layers.{index}"
    sizes = {"q_proj": config.num_q_heads * dim * (1 + config.has_attention_gate)} | {
        name: layer.num_kv_heads * dim for name in _kv_names(layer)
    }
    norms: dict[str, Shape] = {name: (hidden,) for name in mlp_norms(config) if name and layer.has_mlp}
    if config.has_pre_norms:
        norms["input_layernorm"] = (hidden,)
    if config.has_post_norms:
        norms["post_attention_layernorm"] = (hidden,)
    if config.qk_norm in ("head", "projection"):
        for name in ("q_proj", "k_proj"):
            if name in sizes:
                norms[f"self_attn.{name[0]}_norm"] = (dim if config.qk_norm == "head" else sizes[name],)
    tensors = {f"{prefix}.{name}.weight": shape for name, shape in norms.items()}
    matrices = {name: ((size, hidden), config.has_qkv_bias) for name, size in sizes.items()}
    matrices["o_proj"] = ((hidden, config.num_q_heads * dim), config.has_output_bias)
    tensors |= expected_matrices(f"{prefix}.self_attn", matrices)
    if config.has_layer_scales:
        tensors[f"{prefix}.layer_scalar"] = (1,)
    if config.has_sinks:
        tensors[f"{prefix}.self_attn.sinks"] = (config.num_q_heads,)
    return tensors


def _kv_names(layer: LayerConfig) -> tuple[str, ...]:
    if layer.kv_layer is not None:
        return ()
    return ("k_proj",) if layer.values_are_keys else ("k_proj", "v_proj")


def _read_attention(reader: ShardReader, config: ModelConfig, index: int, heads: tuple[int, int]) -> LayerAttention:
    layer, attention = config.layers[index], f"model.layers.{index}.self_attn"
    norms: list[RMSNorm | None] = [None, None]
    ones_D = torch.ones(layer.head_dim, device=reader.device)
    v_norm = RMSNorm(ones_D, config.rms_norm_eps) if config.has_value_norm and layer.kv_layer is None else None
    if config.qk_norm == "head":
        norms = [
            read_norm(reader, config, f"{attention}.{name}_norm") if name == "q" or layer.kv_layer is None else None
            for name in "qk"
        ]
    elif config.qk_norm == "plain" and layer.has_qk_norm:
        norms = [RMSNorm(ones_D, config.rms_norm_eps)] * 2
    sinks_H = None
    if config.has_sinks:
        sinks_H = reader.checkpoint.read(f"{attention}.sinks", rows=heads).float().to(reader.device)
    return LayerAttention(
        layer=config.pool_layer(index),
        stores=layer.kv_layer is None,
        scale=config.attention_scale(index),
        window=layer.window,
        chunk=layer.chunk,
        soft_cap=config.score_soft_cap,
        sinks_H=sinks_H,
        rope=len(config.ropes) if layer.rope is None else layer.rope,
        q_norm=norms[0],
        k_norm=norms[1],
        v_norm=v_norm,
    )
