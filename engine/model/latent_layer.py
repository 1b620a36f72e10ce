"""Decoder layer with multi-head latent attention, of the families in core/model/families/deepseek.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from core.model.shape import IndexConfig, ModelConfig
from engine.attention.chosen_positions import IndexedTokens
from engine.attention.latent_heads import Expansion, LatentHeads, Rotation
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear, is_plain
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.experts import MLP, read_mlp
from engine.weights.checkpoint import Shape, Span, expected_matrices

# T tokens, E hidden_size, H query heads of this rank, D head_dim of queries, C latent_dim, J numbers of a row, N
# nope_dim, W value_dim, O numbers of a low-rank query, G index heads, I numbers of an index key

# Epsilon of the norms inside attention; the config's value applies to the other norms only.
_EPS = 1e-6


@dataclass(frozen=True)
class LatentLayer:
    """Layer x + attention(norm(x)), then x + mlp(norm(x)). Heads are split over ranks; every rank stores all rows."""

    index: int
    head_dim: int
    input_norm: RMSNorm
    row_dim: int
    # Outputs: low-rank queries (or full queries), then latent and key.
    down: Linear
    query_norm: RMSNorm | None
    query_up: Linear | None
    latent_norm: RMSNorm
    expansion: Expansion
    # None: attention is not sparse, or uses the positions of an earlier layer.
    indexer: Indexer | None
    output: RowParallelLinear
    mlp_norm: RMSNorm
    mlp: MLP
    scales_queries: bool

    @classmethod
    def read(cls, reader: ShardReader, config: ModelConfig, index: int) -> LatentLayer:
        assert config.latent is not None
        latent, prefix, eps = config.latent, f"model.layers.{index}", config.rms_norm_eps
        attention, (first, end) = f"{prefix}.self_attn", reader.parallel.span(config.num_q_heads)
        q_rows = first * config.head_dim, end * config.head_dim
        return cls(
            index=index,
            head_dim=config.head_dim,
            input_norm=reader.norm(f"{prefix}.input_layernorm", eps),
            row_dim=config.kv_dim,
            down=_read_down(reader, config, attention, q_rows),
            query_norm=reader.norm(f"{attention}.q_a_layernorm", _EPS) if latent.query_dim else None,
            query_up=reader.linear({f"{attention}.q_b_proj": q_rows}) if latent.query_dim else None,
            latent_norm=reader.norm(f"{attention}.kv_a_layernorm", _EPS),
            expansion=_read_expansion(reader, config, f"{attention}.kv_b_proj"),
            indexer=Indexer.read(reader, latent.index, f"{attention}.indexer")
            if latent.index and config.layers[index].has_indexer
            else None,
            output=reader.row_parallel(
                f"{attention}.o_proj",
                (first * latent.value_dim, end * latent.value_dim),
                has_bias=config.has_output_bias,
            ),
            mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm", eps),
            mlp=read_mlp(reader, config, index),
            scales_queries=config.layers[index].scales_queries,
        )

    def store(self, x: Residual, heads: LatentHeads) -> Tensor:
        """Write the tokens' rows to the pool. Returns the queries (T, H, D)."""
        if self.indexer is not None:
            return self._store_indexed(self.indexer, x.normed(self.input_norm), heads)
        q_TO, row_TJ = x.into(self.down, norm=self.input_norm).tensor_split((-self.row_dim,), dim=-1)
        if self.query_up is not None:
            q_TO = self.query_up(q_TO, before=self.query_norm)
        q_THD = torch.unflatten(q_TO, -1, (-1, self.head_dim))
        return heads.store(self.index, q_THD, row_TJ, norm=self.latent_norm, expansion=self.expansion)

    def _store_indexed(self, indexer: Indexer, x_TE: Tensor, heads: LatentHeads) -> Tensor:
        """Store rows with index keys. x: normed."""
        assert self.query_norm is not None and self.query_up is not None
        q_TO, row_TJ = self.down(x_TE).tensor_split((-self.row_dim,), dim=-1)
        q_TO = self.query_norm(q_TO.contiguous())
        return heads.store(
            self.index,
            torch.unflatten(self.query_up(q_TO), -1, (-1, self.head_dim)),
            row_TJ,
            norm=self.latent_norm,
            expansion=self.expansion,
            indexed=indexer(x_TE, q_TO),
        )

    def keep(self, x: Residual, pool: KVPool, slots_T: Tensor, rotation: Rotation) -> None:
        """Write the tokens' rows only, with their index keys if the layer has an indexer."""
        if self.indexer is None:
            row_TJ = x.into(self.down, norm=self.input_norm)[:, -self.row_dim :]
        else:
            x_TE = x.normed(self.input_norm)
            row_TJ = self.down(x_TE)[:, -self.row_dim :]
        latent_TC, key_TP = row_TJ.tensor_split((-rotation.rope_dim,), dim=-1)
        row_TJ = rotation.rows(self.latent_norm(latent_TC.contiguous()), key_TP)
        if self.indexer is not None:
            key_T1I = rotation.index_heads(self.indexer.keys(x_TE).unsqueeze(1), self.indexer.index)
            row_TJ = torch.cat((row_TJ, key_T1I.squeeze(1)), dim=-1)
        pool.write_latents(self.index, slots_T, row_TJ)

    def finish(self, x: Residual, q_THD: Tensor, heads: LatentHeads) -> None:
        attended_THW = heads.attend(self.index, q_THD, self.expansion)
        x.add_product(self.output, attended_THW.flatten(1))
        self.mlp(x, norm=self.mlp_norm)

    @property
    def written(self) -> int:
        return self.index

    @property
    def is_fixed(self) -> bool:
        """True if launches depend only on shapes."""
        products: list[Linear | RowParallelLinear] = [self.down, self.output]
        products += [self.query_up] if self.query_up else []
        products += [self.indexer.query, self.indexer.key] if self.indexer else []
        return is_plain(*products) and self.mlp.is_fixed


@dataclass(frozen=True)
class Indexer:
    """Index queries, keys and weights of a step's tokens; see engine/attention/chosen_positions.py.

    Every rank computes all heads, so that all choose alike.
    """

    index: IndexConfig
    query: Linear
    key: Linear
    norm_I: Tensor
    bias_I: Tensor
    # fp32, with the factors of heads and products.
    weight_GE: Tensor

    @classmethod
    def read(cls, reader: ShardReader, index: IndexConfig, prefix: str) -> Indexer:
        scale = (index.num_heads * index.head_dim) ** -0.5
        return cls(
            index=index,
            query=reader.linear({f"{prefix}.wq_b": (0, index.num_heads * index.head_dim)}),
            key=reader.linear({f"{prefix}.wk": (0, index.head_dim)}),
            norm_I=reader.tensor(f"{prefix}.k_norm.weight"),
            bias_I=reader.tensor(f"{prefix}.k_norm.bias"),
            weight_GE=reader.tensor(f"{prefix}.weights_proj.weight").float() * scale,
        )

    def __call__(self, x_TE: Tensor, q_TO: Tensor) -> IndexedTokens:
        """Return the outputs before rotation. x: normed input of the layer; q: normed low-rank queries."""
        return IndexedTokens(
            index=self.index,
            q_TGI=torch.unflatten(self.query(q_TO), -1, (self.index.num_heads, self.index.head_dim)),
            key_TI=self.keys(x_TE),
            weights_TG=F.linear(x_TE.float(), self.weight_GE),
        )

    def keys(self, x_TE: Tensor) -> Tensor:
        """Return the keys (T, I) before rotation. x: normed input of the layer."""
        return F.layer_norm(self.key(x_TE), (self.index.head_dim,), self.norm_I, self.bias_I, _EPS)


def expected_tensors(config: ModelConfig, layer: int) -> Mapping[str, Shape]:
    """Return the tensors of one layer, without its MLP."""
    assert config.latent is not None
    hidden, latent, heads = config.hidden_size, config.latent, config.num_q_heads
    prefix, has_bias, query_dim = f"model.layers.{layer}", config.has_qkv_bias, latent.query_dim
    attention, query_size = f"{prefix}.self_attn", heads * config.head_dim
    matrices: dict[str, tuple[Shape, bool]] = {
        "kv_a_proj_with_mqa": ((config.kv_dim, hidden), has_bias),
        "kv_b_proj": ((heads * (latent.nope_dim + latent.value_dim), latent.latent_dim), False),
        "o_proj": ((hidden, heads * latent.value_dim), config.has_output_bias),
    }
    norms: dict[str, Shape] = {
        f"{prefix}.{name}": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
    }
    norms[f"{attention}.kv_a_layernorm"] = (latent.latent_dim,)
    if query_dim:
        matrices |= {"q_a_proj": ((query_dim, hidden), has_bias), "q_b_proj": ((query_size, query_dim), False)}
        norms[f"{attention}.q_a_layernorm"] = (query_dim,)
    else:
        matrices["q_proj"] = ((query_size, hidden), False)
    tensors = {f"{name}.weight": shape for name, shape in norms.items()} | expected_matrices(attention, matrices)
    if config.layers[layer].has_indexer:
        assert latent.index is not None and query_dim is not None
        index = latent.index
        matrices = {
            "wq_b": ((index.num_heads * index.head_dim, query_dim), False),
            "wk": ((index.head_dim, hidden), False),
            "k_norm": ((index.head_dim,), True),
            "weights_proj": ((index.num_heads, hidden), False),
        }
        tensors |= expected_matrices(f"{attention}.indexer", matrices)
    return tensors


def _read_down(reader: ShardReader, config: ModelConfig, attention: str, q_rows: Span) -> Linear:
    assert config.latent is not None
    row, query_dim = f"{attention}.kv_a_proj_with_mqa", config.latent.query_dim
    query = {f"{attention}.q_a_proj": (0, query_dim)} if query_dim else {f"{attention}.q_proj": q_rows}
    down = reader.linear(query | {row: (0, config.kv_dim)}, has_bias=config.has_qkv_bias and bool(query_dim))
    # The bias covers the latent row only: pad it with zeros for the queries.
    if config.has_qkv_bias and not query_dim:
        down = replace(down, bias_O=F.pad(reader.tensor(f"{row}.bias"), (q_rows[1] - q_rows[0], 0)))
    return down


def _read_expansion(reader: ShardReader, config: ModelConfig, name: str) -> Expansion:
    """Read this rank's heads, dequantized, because they are multiplied from both sides."""
    assert config.latent is not None
    reader.note_widened(name, "they are multiplied from both sides")
    latent, (first, end) = config.latent, reader.parallel.span(config.num_q_heads)
    width = latent.nope_dim + latent.value_dim
    rows_OC = reader.tensor(f"{name}.weight", rows=(first * width, end * width))
    key_HNC, value_HWC = rows_OC.view(end - first, width, -1).tensor_split((latent.nope_dim,), dim=1)
    return Expansion(key_HNC.contiguous(), value_HWC.contiguous())
