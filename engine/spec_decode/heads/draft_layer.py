"""Interface of an autoregressive draft layer, and the decoder block of EAGLE's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from core.model.shape import ModelConfig
from engine.attention.cpu_heads import CompiledHeads, store_kv
from engine.attention.heads import Heads, TorchHeads
from engine.attention.layer_attention import Angles, LayerAttention
from engine.attention.rotary import Rotary
from engine.attention.triton_heads import KernelHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Ints
from engine.cpu.library import Kernels
from engine.kernels.attention.rotary import rotate
from engine.kv.layout import head_range
from engine.kv.pool import KVPool
from engine.layers.layers import Linear, RMSNorm, RowParallelLinear
from engine.layers.residual import Residual
from engine.layers.shards import ShardReader
from engine.model.gated_mlp import GatedMLP, mlp_tensors
from engine.runner import streams
from engine.spec_decode.heads.deferred_kv import Entries
from engine.weights.checkpoint import Shape

# T, N tokens, R rows, E hidden_size, W hidden states of a position, D draft vocabulary (of heads: head_dim),
# P places of a draft, B blocks of the longest table, I entry size, K kv heads, M = 2 K


class DraftLayer(Protocol):
    """Layer that maps an entry (a token's embedding and the previous position's feature) to the next feature.

    The keys and values of an entry depend on the entry alone.
    """

    known_D: Tensor | None  # model ids of the draft vocabulary; None: the full vocabulary

    def attach(self, pool: KVPool, /) -> None:
        """Set the pool of its keys and values. Called first."""
        ...

    def features(self, hidden_TW: Tensor, /) -> Tensor:
        """Return the features (T, E) of positions from the model's hidden states, side by side."""
        ...

    def keep(self, entries: Entries, before_NE: Tensor, /) -> None:
        """Write the entries' KV to the pool. before_NE: the previous position's features."""
        ...

    def __call__(self, places: DraftPlaces, place: int, token_ids_R: Tensor, before_RE: Tensor, /) -> Tensor:
        """Compute one entry of each row, and write its KV to the pool. Returns the next features, (R, E).

        They are valid until the next call. Places are computed in order, from 0.
        """
        ...

    def logits(self, feature_RE: Tensor, /) -> Tensor:
        """Return the logits (R, D) fp32 of the token after the entry's, from the last call's features."""
        ...


class DraftPlaces(NamedTuple):
    """Positions of a draft's entries, from each row's last token on."""

    positions_PR: Ints
    tables_RB: Ints  # block tables that cover positions_PR
    block_size: int

    @classmethod
    def behind(cls, positions_R: Ints, num_places: int, *, tables_RB: Ints, block_size: int) -> DraftPlaces:
        """Return `num_places` places from positions_R on."""
        return cls(positions_R + np.arange(num_places)[:, None], tables_RB, block_size)

    @property
    def slots_PR(self) -> Ints:
        """KV slots of the entries."""
        blocks_PR, offsets_PR = np.divmod(self.positions_PR, self.block_size)
        slots_PR: Ints = self.tables_RB[np.arange(len(self.tables_RB)), blocks_PR] * self.block_size + offsets_PR
        return slots_PR

    def batch(self, place: int) -> Batch:
        """Return the entries of one place as a batch without token ids."""
        return Batch.of_next_tokens(self.tables_RB, self.positions_PR[place], block_size=self.block_size)


@dataclass(frozen=True)
class DecoderBlock:
    """Block that computes y = x + attention(entry), then y + mlp(norm(y)). The caller norms the entry."""

    attention: LayerAttention
    head_dim: int
    kv: Linear
    qkv: Linear
    output: RowParallelLinear
    mlp_norm: RMSNorm
    mlp: GatedMLP
    rotary: Rotary
    kernels: Kernels | None

    @classmethod
    def read(
        cls, reader: ShardReader, shape: ModelConfig, prefix: str, *, index: int, has_bias: bool = False
    ) -> DecoderBlock:
        """Read the weights. index: layer in the pool. has_bias: for queries, keys and values."""
        attention, parallel, dim = f"{prefix}.self_attn", reader.parallel, shape.head_dim
        q_first, q_end = parallel.span(shape.num_q_heads)
        kv_first, kv_end = head_range(shape.num_kv_heads, rank=parallel.rank, num_ranks=parallel.size)
        q_rows, kv_rows = (q_first * dim, q_end * dim), (kv_first * dim, kv_end * dim)
        kv = {f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        return cls(
            attention=LayerAttention(layer=index, scale=dim**-0.5),
            head_dim=dim,
            kv=reader.linear(kv, has_bias=has_bias),
            qkv=reader.linear({f"{attention}.q_proj": q_rows} | kv, has_bias=has_bias),
            output=reader.row_parallel(f"{attention}.o_proj", q_rows),
            mlp_norm=reader.norm(f"{prefix}.post_attention_layernorm", shape.rms_norm_eps),
            mlp=GatedMLP.read(reader, shape, f"{prefix}.mlp"),
            rotary=Rotary(shape.ropes[0], reader.device),
            kernels=reader.kernels,
        )

    def keep(self, pool: KVPool, slots_N: Ints, positions_N: Ints, entry_NI: Tensor) -> None:
        """Write the entries' keys and values to the pool."""
        cos_N1F, sin_N1F = self.angles(positions_N, entry_NI)
        kv_NMD = torch.unflatten(self.kv(entry_NI), -1, (-1, self.head_dim))
        if self.kernels is not None:
            store_kv(self.kernels, pool, self.attention, slots_N, kv_NMD, cos_N1F, sin_N1F)
        else:
            k_NKD, v_NKD = kv_NMD.chunk(2, dim=1)
            slots = streams.upload_indices(slots_N, pool.device)
            pool.write(self.attention.layer, slots, rotate(k_NKD, cos_N1F, sin_N1F), v_NKD)

    def __call__(self, batch: Batch, pool: KVPool, entry_RI: Tensor, x_RE: Tensor) -> Tensor:
        """Compute one entry of each row, and write its KV to the pool. Returns (R, E)."""
        heads = heads_of(self.kernels, batch, pool, [self.angles(batch.positions, entry_RI)])
        heads_RMD = torch.unflatten(self.qkv(entry_RI), -1, (-1, self.head_dim))
        q_RHD = heads.store(self.attention, heads_RMD)
        attended_RHD = heads.attend(self.attention, q_RHD)
        x = Residual(x_RE, adds_late=False)
        x.add_product(self.output, attended_RHD.flatten(1))
        self.mlp(x, norm=self.mlp_norm)
        return x.total()

    def angles(self, positions_N: Ints, x_NI: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines with the device and dtype of x: see Rotary."""
        return self.rotary(streams.upload_indices(positions_N, x_NI.device), x_NI.dtype)


def heads_of(kernels: Kernels | None, batch: Batch, pool: KVPool, angles: Angles) -> Heads:
    """Return the attention backend of a draft step. Draft layers have no sliding window."""
    if pool.device.type == "cuda":
        return KernelHeads(DeviceBatch.of(batch, pool.device), pool, angles)
    if kernels is None:
        return TorchHeads(batch, pool, angles)
    return CompiledHeads(kernels, batch, pool, angles, has_windows=False)


def expected_tensors(shape: ModelConfig, prefix: str, *, entry_size: int) -> Mapping[str, Shape]:
    """Return the shapes of the block's tensors. entry_size: width of an entry."""
    hidden = shape.hidden_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, Shape] = {
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, entry_size),
        "self_attn.k_proj.weight": (kv_size, entry_size),
        "self_attn.v_proj.weight": (kv_size, entry_size),
        "self_attn.o_proj.weight": (hidden, q_size),
        **mlp_tensors("mlp", ("gate_proj", "up_proj"), hidden, shape.intermediate_size, has_bias=False),
    }
    return {f"{prefix}.{name}": size for name, size in layer.items()}
