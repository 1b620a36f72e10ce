"""The decoder of the Llama and Qwen families: Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen2.5, Qwen3; and with experts
in the place of MLPs (experts.py) Mixtral and Qwen3-MoE.

They differ in their configs only: biases, a norm on queries and keys, sliding windows, rotary scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model_config import ModelConfig
from engine.batch import Batch
from engine.cpu.heads import CompiledHeads
from engine.cpu.layers import CompiledLayers
from engine.cpu.matrix import PackedMatrix
from engine.heads import Heads, TorchHeads
from engine.kernels.heads import KernelHeads
from engine.kv_layout import KVLayout
from engine.kv_pool import KVPool
from engine.layers import GatedSiLU, Linear, RMSNorm, RowParallelLinear
from engine.model import experts
from engine.model.experts import SparseMLP
from engine.rotary import Rotary
from engine.shards import ShardReader
from engine.weights import Shape, check_tensors

# T tokens of the step, R rows whose logits are wanted, E hidden_size, H query heads and K kv heads of this rank,
# D head_dim, N = H + 2 K, V vocabulary

OnLayer = Callable[[int], None]


class DenseDecoder:
    """One rank's share of a model, and the forward pass."""

    def __init__(self, config: ModelConfig, reader: ShardReader, layout: KVLayout, *, on_read: OnLayer) -> None:
        """Reads the weights; `on_read` is told each layer that is there. Raises SpecError if they do not fit."""
        optional = frozenset({"lm_head.weight"} if config.tie_embeddings else ())
        check_tensors(reader.checkpoint.shapes, expected_tensors(config), optional=optional)
        self._config = config
        self._parallel = reader.parallel
        self._kernels = reader.kernels
        self._embedding = reader.embedding("model.embed_tokens", config.vocab_size)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(DecoderLayer.read(reader, config, layout, index))
            on_read(index)
        self._norm = reader.norm("model.norm", config.rms_norm_eps)
        if config.tie_embeddings:
            self._head = Linear(reader.matrix(self._embedding.weight_VO))
        else:
            self._head = reader.linear({"lm_head": reader.parallel.span(config.vocab_size)})
        self._rotary = Rotary(config, reader.device)
        packed = [
            layer.mlp for layer in self._layers if isinstance(layer.mlp, GatedMLP) and _is_packed(layer, layer.mlp)
        ]
        self._packed_mlps = packed if self._parallel.size == 1 and len(packed) == len(self._layers) else []
        self._compiled: CompiledLayers | None = None

    def __call__(self, batch: Batch, pool: KVPool, on_layer: OnLayer | None) -> Tensor:
        """Compute a step. Its KV is in the pool afterwards; `on_layer` is told each layer whose KV is.

        Returns the logits (R, V) in fp32, on every rank.
        """
        device = pool.device
        x_TE = self._embedding(torch.from_numpy(batch.token_ids).to(device))
        angles_T1F = self._rotary(torch.from_numpy(batch.positions).to(device), x_TE.dtype)
        if compiled := self._compiled_for(pool):
            x_TE = compiled(x_TE, batch, *angles_T1F, on_layer)
        else:
            x_TE = self._layer_by_layer(x_TE, self._heads(batch, pool, *angles_T1F), on_layer)
        wanted_RE = x_TE[torch.from_numpy(batch.logits_rows).to(device)]
        return self._parallel.all_gather(self._head(wanted_RE, before=self._norm), self._config.vocab_size).float()

    def _layer_by_layer(self, x_TE: Tensor, heads: Heads, on_layer: OnLayer | None) -> Tensor:
        for layer, window in zip(self._layers, self._config.sliding_windows, strict=True):
            heads_TND = layer.project(x_TE)
            q_THD = heads.store(layer.index, heads_TND, q_norm=layer.q_norm, k_norm=layer.k_norm)
            if on_layer is not None:
                on_layer(layer.index)
            x_TE = layer.finish(x_TE, heads.attend(layer.index, q_THD, window=window))
        return x_TE

    def _compiled_for(self, pool: KVPool) -> CompiledLayers | None:
        """All layers at once, where nothing lies between their calls that is not a CPU kernel."""
        if self._compiled is None and self._kernels is not None and self._packed_mlps:
            windows = self._config.sliding_windows
            self._compiled = CompiledLayers(self._kernels, self._layers, self._packed_mlps, windows, pool)
        return self._compiled

    def _heads(self, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> Heads:
        if self._kernels is not None:
            return CompiledHeads(self._kernels, batch, pool, cos_T1F, sin_T1F)
        if pool.device.type == "cuda":
            return KernelHeads(batch, pool, cos_T1F, sin_T1F)
        return TorchHeads(batch, pool, cos_T1F, sin_T1F, self._config.sliding_windows)


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); in two halves, between which the attention is computed."""

    index: int
    head_dim: int
    input_norm: RMSNorm
    qkv: Linear  # rows: queries, keys, values
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    output: RowParallelLinear
    mlp_norm: RMSNorm
    mlp: GatedMLP | SparseMLP

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
            input_norm=reader.norm(f"{prefix}.input_layernorm", eps),
            qkv=reader.linear(
                {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows},
                has_bias=config.has_qkv_bias,
            ),
            q_norm=reader.norm(f"{attention}.q_norm", eps) if config.has_qk_norm else None,
            k_norm=reader.norm(f"{attention}.k_norm", eps) if config.has_qk_norm else None,
            output=reader.row_parallel(f"{attention}.o_proj", q_rows, has_bias=config.has_output_bias),
            mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm", eps),
            mlp=(SparseMLP if config.is_sparse(index) else GatedMLP).read(reader, config, index),
        )

    def project(self, x_TE: Tensor) -> Tensor:
        """Queries, keys and values as they leave the projection: (T, N, D)."""
        return self.qkv(x_TE, before=self.input_norm).view(len(x_TE), -1, self.head_dim)

    def finish(self, x_TE: Tensor, attended_THD: Tensor) -> Tensor:
        x_TE = self.output(attended_THD.flatten(1), residual_TO=x_TE)
        return self.mlp(x_TE, norm=self.mlp_norm)


def _is_packed(layer: DecoderLayer, mlp: GatedMLP) -> bool:
    return all(isinstance(part.matrix, PackedMatrix) for part in (layer.qkv, layer.output, mlp.gate_up, mlp.down))


@dataclass(frozen=True)
class GatedMLP:
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    gate_up: Linear  # rows: gate, up
    down: RowParallelLinear

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, layer: int) -> GatedMLP:
        name, features = f"model.layers.{layer}.mlp", reader.parallel.span(config.intermediate_size)
        return cls(
            reader.linear({f"{name}.gate_proj": features, f"{name}.up_proj": features}, has_bias=config.has_mlp_bias),
            reader.row_parallel(f"{name}.down_proj", features, has_bias=config.has_mlp_bias),
        )

    def __call__(self, x_TE: Tensor, *, norm: RMSNorm) -> Tensor:
        return self.down(self.gate_up(x_TE, before=norm), before=GatedSiLU(), residual_TO=x_TE)


def expected_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """The name and shape of every tensor of the checkpoint."""
    hidden, mlp, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_q_heads * dim, config.num_kv_heads * dim
    attention = {  # of one layer: shape, and whether there is a bias
        "self_attn.q_proj": ((q_size, hidden), config.has_qkv_bias),
        "self_attn.k_proj": ((kv_size, hidden), config.has_qkv_bias),
        "self_attn.v_proj": ((kv_size, hidden), config.has_qkv_bias),
        "self_attn.o_proj": ((hidden, q_size), config.has_output_bias),
    }
    dense_mlp = {
        "mlp.gate_proj": ((mlp, hidden), config.has_mlp_bias),
        "mlp.up_proj": ((mlp, hidden), config.has_mlp_bias),
        "mlp.down_proj": ((hidden, mlp), config.has_mlp_bias),
    }
    norms: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    tensors: dict[str, Shape] = {}
    for index in range(config.num_layers):
        prefix, is_sparse = f"model.layers.{index}", config.is_sparse(index)
        tensors |= {f"{prefix}.{name}": shape for name, shape in norms.items()}
        for name, (shape, has_bias) in (attention if is_sparse else attention | dense_mlp).items():
            tensors[f"{prefix}.{name}.weight"] = shape
            if has_bias:
                tensors[f"{prefix}.{name}.bias"] = shape[:1]
        if is_sparse:
            tensors |= experts.expected_tensors(config, index)
    tensors |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors
