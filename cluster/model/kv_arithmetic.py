"""How much KV memory a model needs, and how much context a replica can hold. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.model.shape import ModelConfig

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "int8": 1}
_SCALE_BYTES = 2  # bf16, one per token and head, for keys and for values


@dataclass(frozen=True, kw_only=True)
class KVArithmetic:
    """One model on replicas of `tensor_parallel` ranks, with `memory_bytes` for KV on each rank."""

    config: ModelConfig
    dtype: str  # of the pool: "bfloat16", "float16", "float32", "fp8_e4m3" or "int8"
    block_size: int
    tensor_parallel: int
    memory_bytes: float

    @property
    def bytes_per_token_per_rank(self) -> int:
        """With more ranks than KV heads, heads are held more than once."""
        config, per_head = self.config, self.config.kv_dim * _ITEM_BYTES[self.dtype]
        if _ITEM_BYTES[self.dtype] == 1:
            per_head += config.kv_exact_dim + _SCALE_BYTES
        return config.num_layers * config.kv_sides * max(1, config.num_kv_heads // self.tensor_parallel) * per_head

    @property
    def bytes_per_token(self) -> int:
        """All ranks of a replica."""
        return self.bytes_per_token_per_rank * self.tensor_parallel

    @property
    def num_blocks(self) -> int:
        """Of one replica."""
        return int(self.memory_bytes // (self.bytes_per_token_per_rank * self.block_size))

    def max_batch(self, context: int) -> int:
        """How many sequences of `context` tokens fit at a time."""
        return self.num_blocks // -(-context // self.block_size)
