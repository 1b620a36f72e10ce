"""Decoder block of draft layers: attention over the KV pool, and an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
from engine.model.gated_mlp import GatedMLP
from engine.runner import streams
from engine.weights.checkpoint import Shape

# N tokens, R rows, I entry size, E hidden_size, K kv heads, M = 2 K, D head_dim


@dataclass(frozen=True)
class DecoderBlock:
    """y = x + attention(entry), then y + mlp(norm(y)). The caller builds the entry, so attention has no norm before
    it."""

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
        """Read the weights. index: layer in the pool. has_bias: of queries, keys and values."""
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
        """Compute one entry of each row, and write its KV to the pool. -> (R, E)"""
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
    """Return the attention backend of a draft step. Draft layers keep every block, and have spare ones."""
    if pool.device.type == "cuda":
        return KernelHeads(DeviceBatch.of(batch, pool.device), pool, angles)
    if kernels is None:
        return TorchHeads(batch, pool, angles)
    return CompiledHeads(kernels, batch, pool, angles, has_windows=False)


def expected_tensors(shape: ModelConfig, prefix: str, *, entry_size: int) -> Mapping[str, Shape]:
    """Return the shapes of the block's tensors. entry_size: width of an entry."""
    hidden, features = shape.hidden_size, shape.intermediate_size
    q_size, kv_size = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer: dict[str, Shape] = {
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, entry_size),
        "self_attn.k_proj.weight": (kv_size, entry_size),
        "self_attn.v_proj.weight": (kv_size, entry_size),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (features, hidden),
        "mlp.up_proj.weight": (features, hidden),
        "mlp.down_proj.weight": (hidden, features),
    }
    return {f"{prefix}.{name}": size for name, size in layer.items()}
