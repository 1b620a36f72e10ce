"""The decoder of the Llama and Qwen families: Llama 2 and 3, Mistral, SmolLM2, Qwen2, Qwen2.5, Qwen3; and with experts
in the place of MLPs (experts.py) Mixtral, Qwen2-MoE, Qwen3-MoE; and with layers of another kind (latent.py) DeepSeek-V2
and V3.

The families differ in their configs only: biases, a norm on queries and keys, sliding windows, rotary scaling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cluster.model.shape import ModelConfig
from engine.attention.cpu_heads import CompiledHeads
from engine.attention.heads import Heads, TorchHeads
from engine.attention.latent_heads import LatentHeads, Turn
from engine.attention.rotary import Rotary
from engine.attention.triton_heads import KernelHeads
from engine.attention.triton_latent_heads import KernelLatentHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.packed_matrix import PackedMatrix
from engine.layers.shards import ShardReader
from engine.model import experts, gated_mlp, latent
from engine.model.cpu_program import CompiledLayers
from engine.model.experts import SparseMLP
from engine.model.gated_mlp import GatedMLP
from engine.model.latent import LatentLayer
from engine.weights.checkpoint import Shape, check_tensors

# T tokens of the step, R rows whose logits are wanted, E hidden_size, H query heads and K kv heads of this rank,
# D head_dim, N = H + 2 K, V vocabulary

OnLayer = Callable[[int], None]


class DenseDecoder:
    """One rank's share of a model, and the forward pass."""

    def __init__(self, config: ModelConfig, reader: ShardReader, layout: KVLayout, *, on_read: OnLayer) -> None:
        """Reads the weights; `on_read` is told each layer that is there. Raises SpecError if they do not fit."""
        found = reader.checkpoint.shapes
        check_tensors(found, expected_tensors(config), optional=_optional_tensors(config, found))
        self._config = config
        self._parallel = reader.parallel
        self._kernels = reader.kernels
        self._embedding = reader.embedding("model.embed_tokens", config.vocab_size)
        self._layers: list[DecoderLayer | LatentLayer] = []
        for index in range(config.num_layers):
            self._layers.append(
                LatentLayer.read(reader, config, index)
                if config.latent
                else DecoderLayer.read(reader, config, layout, index)
            )
            on_read(index)
        self._norm = reader.norm("model.norm", config.rms_norm_eps)
        if config.tie_embeddings:
            self._head = Linear(reader.matrix(self._embedding.weight_VO))
        else:
            self._head = reader.linear({"lm_head": reader.parallel.span(config.vocab_size)})
        self._rotary = Rotary(config, reader.device)
        self._compiled: CompiledLayers | None = None

    def __call__(self, batch: Batch, pool: KVPool, on_layer: OnLayer | None) -> Tensor:
        """Compute a step. Its KV is in the pool afterwards; `on_layer` is told each layer whose KV is.

        Returns the logits (R, V) in fp32, on every rank.
        """
        device = pool.device
        if device.type == "cuda":
            return self.compute(DeviceBatch.of(batch, device), pool, on_layer)
        x_TE = self._embedding(torch.from_numpy(batch.token_ids).to(device))
        angles_T1F = self._rotary(torch.from_numpy(batch.positions).to(device), x_TE.dtype)
        if compiled := self._compiled_for(pool):
            x_TE = compiled(x_TE, batch, *angles_T1F, on_layer)
        else:
            x_TE = self._pass(x_TE, self._heads(batch, pool, *angles_T1F), on_layer)
        return self._logits(x_TE[torch.from_numpy(batch.logits_rows).to(device)])

    def compute(self, batch: DeviceBatch, pool: KVPool, on_layer: OnLayer | None = None) -> Tensor:
        """The same of a batch that is on the device, by the GPU's kernels (on a CPU: their references).

        Where `hindrance` knows of none, nothing here waits for the device, or depends on a number that is there.
        """
        x_TE = self._embedding(batch.token_ids_T)
        angles_T1F = self._rotary(batch.positions_T, x_TE.dtype)
        heads: KernelHeads | KernelLatentHeads
        if latent := self._config.latent:
            turn = Turn(*angles_T1F, latent.is_interleaved)
            heads = KernelLatentHeads(batch, pool, turn, scale=self._config.attention_scale)
        else:
            heads = KernelHeads(batch, pool, *angles_T1F)
        x_TE = self._pass(x_TE, heads, on_layer)
        return self._logits(x_TE if batch.logits_rows is None else x_TE.index_select(0, batch.logits_rows))

    @property
    def hindrance(self) -> str | None:
        """Why `compute` cannot be recorded and launched again as it was; None where it can."""
        if self._parallel.size > 1:
            return "the ranks of a gang meet in every layer"
        if not is_plain(self._head) or not all(layer.is_fixed for layer in self._layers):
            return "its matrices stay quantised, or its experts are called one by one"
        return None

    def _pass(self, x_TE: Tensor, heads: Any, on_layer: OnLayer | None) -> Tensor:
        """Through all layers."""
        for layer in self._layers:
            q_THD = layer.store(x_TE, heads)
            if on_layer is not None:
                on_layer(layer.index)
            x_TE = layer.finish(x_TE, q_THD, heads)
        return x_TE

    def _logits(self, wanted_RE: Tensor) -> Tensor:
        return self._parallel.all_gather(self._head(wanted_RE, before=self._norm), self._config.vocab_size).float()

    def _compiled_for(self, pool: KVPool) -> CompiledLayers | None:
        """All layers at once, where nothing lies between their calls that is not a CPU kernel."""
        if self._compiled is None and self._kernels is not None and self._parallel.size == 1:
            if all(_is_packed(layer) for layer in self._layers):
                self._compiled = CompiledLayers(self._kernels, self._layers, pool)
        return self._compiled

    def _heads(self, batch: Batch, pool: KVPool, cos_T1F: Tensor, sin_T1F: Tensor) -> Any:
        """Of the kind that this model's layers use, where `compute` does not make them."""
        if self._config.latent:
            turn = Turn(cos_T1F, sin_T1F, self._config.latent.is_interleaved)
            return LatentHeads(batch, pool, turn, scale=self._config.attention_scale)
        if self._kernels is not None:
            return CompiledHeads(self._kernels, batch, pool, cos_T1F, sin_T1F)
        return TorchHeads(batch, pool, cos_T1F, sin_T1F, self._config.sliding_windows)


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); in two halves, between which the attention is computed."""

    index: int
    head_dim: int
    window: int | None
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
            window=config.sliding_windows[index],
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

    def store(self, x_TE: Tensor, heads: Heads) -> Tensor:
        """Put the tokens' keys and values into the pool. Returns the queries (T, H, D)."""
        heads_TND = self.qkv(x_TE, before=self.input_norm).view(len(x_TE), -1, self.head_dim)
        return heads.store(self.index, heads_TND, q_norm=self.q_norm, k_norm=self.k_norm)

    def finish(self, x_TE: Tensor, q_THD: Tensor, heads: Heads) -> Tensor:
        attended_THD = heads.attend(self.index, q_THD, window=self.window)
        x_TE = self.output(attended_THD.flatten(1), residual_TO=x_TE)
        return self.mlp(x_TE, norm=self.mlp_norm)

    @property
    def is_fixed(self) -> bool:
        """Whether what is launched depends on shapes only."""
        return is_plain(self.qkv, self.output) and self.mlp.is_fixed


def _is_packed(layer: DecoderLayer | LatentLayer) -> bool:
    if not isinstance(layer, DecoderLayer) or not isinstance(layer.mlp, GatedMLP):
        return False
    parts = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    return all(isinstance(part.matrix, PackedMatrix) for part in parts)


def expected_tensors(config: ModelConfig) -> Mapping[str, Shape]:
    """The name and shape of every tensor of the checkpoint."""
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {}
    for index in range(config.num_layers):
        tensors |= latent.expected_tensors(config, index) if config.latent else _expected_attention(config, index)
        tensors |= (experts if config.is_sparse(index) else gated_mlp).expected_tensors(config, index)
    tensors |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        tensors["lm_head.weight"] = (config.vocab_size, hidden)
    return tensors


def _expected_attention(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """The tensors of one layer, without its MLP."""
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


def _optional_tensors(config: ModelConfig, found: Iterable[str]) -> frozenset[str]:
    """What may be there and is not read: a tied head, and layers past the last, which predict further tokens."""
    is_past_the_last = re.compile(r"model\.layers\.(\d+)\.").match
    layers = {name: int(match[1]) for name in found if (match := is_past_the_last(name))}
    optional = {name for name, layer in layers.items() if layer >= config.num_layers} if config.latent else set()
    return frozenset(optional | ({"lm_head.weight"} if config.tie_embeddings else set()))
