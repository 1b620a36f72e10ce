"""Arithmetic of KV memory: bytes per token, and the context that a replica can hold."""

from __future__ import annotations

from dataclasses import dataclass

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig

# Quantized pool and wire dtypes by their short names in commands and reports.
QUANTIZED = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "int8": 1, "int4": 0.5}
# bf16, per token and head, for keys and for values each: a scale; int4: a scale and a zero.
_SCALE_BYTES = {"fp8_e4m3": 2, "int8": 2, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class KVArithmetic:
    """KV memory of one model on replicas of `tensor_parallel` ranks with `memory_bytes` for KV each."""

    config: ModelConfig
    dtype: str  # of the pool, one of _ITEM_BYTES
    block_size: int
    tensor_parallel: int
    memory_bytes: float
    heads: HeadsConfig | None = None  # draft heads
    activations: str = "bfloat16"  # dtype of the heads' features, and of KV in layers that are not quantized
    unquantized_layers: tuple[int, ...] = ()
    max_running: int = 0  # concurrent sequences, for the heads' features

    @property
    def bytes_per_token_per_rank(self) -> int:
        """KV of all layers. With more ranks than KV heads, heads are replicated."""
        return sum(
            self._layer_bytes(self.activations if layer in self.unquantized_layers else self.dtype, *shape)
            for layer, shape in enumerate(self.config.kv_layers + (self.heads.kv_layers if self.heads else ()))
        )

    @property
    def block_bytes_per_rank(self) -> int:
        """KV block, with the heads' feature of its last position."""
        features = self.heads.feature_bytes(self.config, itemsize=self._itemsize) if self.heads else 0
        return self.bytes_per_token_per_rank * self.block_size + features

    @property
    def bytes_per_token(self) -> int:
        """KV on all ranks of a replica."""
        return self.bytes_per_token_per_rank * self.tensor_parallel

    @property
    def num_blocks(self) -> int:
        """Blocks of one replica's pool."""
        beside = 0
        if self.heads:
            spare_bytes = self.block_size * sum(self._layer_bytes(self.dtype, *shape) for shape in self.heads.kv_layers)
            beside = self.heads.bytes_beside_blocks(
                self.config,
                itemsize=self._itemsize,
                max_running=self.max_running,
                spare_bytes=spare_bytes,
            )
        return max(0, int((self.memory_bytes - beside) // self.block_bytes_per_rank))

    def max_batch(self, context: int) -> int:
        """Return how many sequences of `context` tokens fit at once."""
        return self.num_blocks // -(-context // self.block_size)

    def _layer_bytes(self, dtype: str, num_kv_heads: int, dim: int) -> int:
        """Return the bytes of one layer of one token on one rank. dim: numbers per row."""
        config, per_head = self.config, int(dim * _ITEM_BYTES[dtype])
        if dtype in _SCALE_BYTES:
            per_head += config.kv_exact_dim + _SCALE_BYTES[dtype]
        return config.kv_sides * max(1, num_kv_heads // self.tensor_parallel) * per_head

    @property
    def _itemsize(self) -> int:
        return int(_ITEM_BYTES[self.activations])
