"""Arithmetic of KV memory: bytes per token, and the context that a replica can hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from core.model.draft_heads import HeadsConfig
from core.model.shape import ModelConfig
from core.types.handoff import ROOM_TOKENS

# Quantized pool and wire dtypes by their short names in commands and reports.
QUANTIZED = {"fp8": "fp8_e4m3", "int8": "int8", "int4": "int4"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "int8": 1, "int4": 0.5}
# bf16 numbers per token, head and side (K or V): a scale; for int4 also a zero point.
_SCALE_BYTES = {"fp8_e4m3": 2, "int8": 2, "int4": 4}
# Reuses most prompt tokens of a public trace of conversations; see "State checkpoints" in docs/benchmarks/planner.md.
_TOKENS_PER_STATE = 4096
# States get at least 1 / _LEAST_PART of the memory. Small states, such as LFM2's, are then one per few blocks, so that
# short prefixes can be reused.
_LEAST_PART = 32


def state_slots_for(memory_bytes: int, state_bytes: int, *, token_bytes: int, max_running: int) -> int:
    """Return the number of state slots: two per running sequence (one for a checkpoint), in at most half the memory.

    The number rises to one per _TOKENS_PER_STATE tokens of KV, or to what 1 / _LEAST_PART of the memory holds, if that
    is more. It is at least 2, for one sequence and one checkpoint. token_bytes: KV of one token.
    """
    by_tokens = memory_bytes // (state_bytes + _TOKENS_PER_STATE * token_bytes)
    num_slots = max(2 * max_running, by_tokens, memory_bytes // _LEAST_PART // state_bytes)
    return max(2, min(num_slots, memory_bytes // 2 // state_bytes))


@dataclass(frozen=True, kw_only=True)
class WindowArithmetic:
    """Split of a pool between blocks and parts. A part is what a block holds in layers with an attention window.

    A sequence of the largest context needs blocks for all its tokens, but parts for its window only. The pool has twice
    that ratio of parts to blocks, to leave half for cached prefixes, plus parts for one chunk. Shorter sequences need
    about as many parts, so `split` may give parts a larger share of the memory.
    """

    window: int  # in tokens
    block_size: int
    max_context: int
    max_batch_tokens: int  # limit of a step

    @property
    def num_least(self) -> int:
        """Parts for the largest step, and for one sequence that arrives while its sender still decodes it."""
        return least_parts(window=self.window, block_size=self.block_size, max_batch_tokens=self.max_batch_tokens) + -(
            -ROOM_TOKENS // self.block_size
        )

    def num_parts(self, num_blocks: int) -> int:
        """Return the number of parts of a pool of `num_blocks` blocks, the empty part included.

        A pool smaller than the largest context has as many parts as a pool of that context's size.
        """
        num_shared = math.ceil(max(num_blocks, self._num_context_blocks) * self._share)
        return 1 + min(num_blocks, max(self.num_least, num_shared + self._num_chunk))

    def split(self, memory_bytes: float, *, block_bytes: int, part_bytes: int, max_running: int = 0) -> tuple[int, int]:
        """Return the blocks and parts that fit. block_bytes: of a block and its part.

        Parts for max_running sequences and as many cached prefixes get up to half of the memory. A pool that can hold
        the largest context keeps the blocks for it.
        """
        num_blocks, num_parts = self._largest_split(memory_bytes, block_bytes=block_bytes, part_bytes=part_bytes)
        whole_bytes = block_bytes - part_bytes
        num_kept = self._num_context_blocks if num_blocks >= self._num_context_blocks else 0
        spare_bytes = min(memory_bytes / 2, memory_bytes - num_kept * whole_bytes)
        num_wanted = 1 + self._num_chunk + 2 * max_running * most_parts(self.window, self.block_size)
        num_wanted = min(num_wanted, int(spare_bytes / part_bytes), int(memory_bytes / block_bytes))
        if not whole_bytes or num_wanted <= num_parts:
            return num_blocks, num_parts
        return int((memory_bytes - num_wanted * part_bytes) / whole_bytes), num_wanted

    def _largest_split(self, memory_bytes: float, *, block_bytes: int, part_bytes: int) -> tuple[int, int]:
        """Return the maximum number of blocks that fit, and the number of parts for them."""
        whole_bytes = block_bytes - part_bytes
        low, high = 0, int(memory_bytes / (whole_bytes + self._share * part_bytes))
        while low < high:
            num_blocks = (low + high + 1) // 2
            fits = num_blocks * whole_bytes + self.num_parts(num_blocks) * part_bytes <= memory_bytes
            low, high = (num_blocks, high) if fits else (low, num_blocks - 1)
        return low, self.num_parts(low)

    @property
    def _num_context_blocks(self) -> int:
        return -(-self.max_context // self.block_size)

    @property
    def _num_chunk(self) -> int:
        """Parts for the tokens of the largest step."""
        return -(-self.max_batch_tokens // self.block_size)

    @property
    def _share(self) -> float:
        return min(1.0, 2 * most_parts(self.window, self.block_size) / self._num_context_blocks)


def first_seen(position: int, window: int, block_size: int) -> int:
    """Return the index in a block table of the first block that the query at `position` sees. window: tokens."""
    return max(0, position - window + 1) // block_size


def window_span(window: int, block_size: int) -> int:
    """Return how many blocks before its own block a query at the start of a block sees. window: tokens."""
    return -(-(window - 1) // block_size)


def most_parts(window: int, block_size: int) -> int:
    """Return the maximum number of parts that a sequence of any length holds between steps.

    It needs parts for the window before its next token's block, for that block, and for one more, because parts are
    dropped only when a block is added.
    """
    return window_span(window, block_size) + 2


def least_parts(*, window: int, block_size: int, max_batch_tokens: int) -> int:
    """Return how many parts a pool needs at least: for the largest step, one sequence, and empty part 0."""
    return 1 + most_parts(window, block_size) + -(-max_batch_tokens // block_size)


def reservable_parts(num_parts: int, *, num_blocks: int, block_size: int, max_batch_tokens: int) -> int | None:
    """Return how many parts sequences can reserve: all but part 0 and those set aside for the largest step.

    None: every block can have a part, so nothing needs a reservation.
    """
    return None if num_parts > num_blocks else num_parts - 1 - -(-max_batch_tokens // block_size)


class PoolSizes(NamedTuple):
    """Sizes of the pool of one rank, and so of its replica."""

    num_blocks: int
    num_states: int = 0
    # Part 0 included. None: layers with a window, if any, keep every block; see KVPool.
    num_window_parts: int | None = None

    def max_batch(self, cache: CacheShape, context: int, *, max_batch_tokens: int) -> int:
        """Return how many sequences of `context` tokens fit at once. max_batch_tokens: limit of a step."""
        num_held = -(-context // cache.block_size)
        num_sequences = self.num_blocks // num_held
        if self.num_window_parts is not None:
            num_reservable = reservable_parts(
                self.num_window_parts,
                num_blocks=self.num_blocks,
                block_size=cache.block_size,
                max_batch_tokens=max_batch_tokens,
            )
            if num_reservable is not None:
                num_each = min(num_held, most_parts(cache.window, cache.block_size))
                num_sequences = min(num_sequences, num_reservable // num_each)
        return min(num_sequences, self.num_states) if cache.state_bytes else num_sequences


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Bytes that the layers of a model cache, on one rank or on all ranks of a replica.

    Keys and values, latents and index keys grow with the tokens. If windows are freed, layers with a window keep only
    what later queries see. Recurrent layers have one state per sequence.
    """

    block_size: int
    token_bytes: int  # per token, of all layers but recurrent ones
    window_token_bytes: int = 0  # the part of token_bytes in layers with a window
    window: int = 0  # tokens; 0: no layer frees KV
    state_bytes: int = 0  # per sequence, of all recurrent layers
    feature_bytes: int = 0  # per block, of draft heads

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes + self.feature_bytes

    @property
    def window_part_bytes(self) -> int:
        """Bytes of a block in layers with a window, a part of `block_bytes`."""
        return self.block_size * self.window_token_bytes

    @property
    def place_bytes(self) -> int:
        """Bytes of a block's place in a lower tier: `block_bytes` without its part."""
        return self.block_bytes - self.window_part_bytes

    @property
    def num_pieces(self) -> int:
        """Places that a block's checkpoint takes in a lower tier, without the padding of KVLayout.num_pieces."""
        num_bytes = self.state_bytes or self.window_part_bytes
        return -(-num_bytes // self.place_bytes) if self.place_bytes else 0

    @property
    def num_checkpoints(self) -> int:
        """Number of last blocks of a prefix that need a checkpoint for a sequence to continue after them; 0: none.

        The checkpoint of a block is the state at its end, or its part: what it holds in layers with a window.
        """
        if self.state_bytes:
            return 1
        return window_span(self.window, self.block_size) if self.window else 0

    def of_ranks(self, num_ranks: int) -> CacheShape:
        """Convert the bytes on one of `num_ranks` ranks to the bytes on all ranks of the replica."""
        names = ("token_bytes", "window_token_bytes", "state_bytes", "feature_bytes")
        return replace(self, **{name: num_ranks * getattr(self, name) for name in names})

    def window_start(self, num_tokens: int, *, held: int) -> int:
        """Return the first position that a handoff of [held, num_tokens) ships for layers with a window.

        It is `held` or, if later, the start of the first block that the query at `num_tokens` sees; 0 without a window.
        """
        if not self.window:
            return 0
        return max(held, first_seen(num_tokens, self.window, self.block_size) * self.block_size)

    def shipped_bytes(self, num_tokens: int, *, held: int = 0) -> int:
        """Return the bytes to ship for `num_tokens` tokens to a replica that already holds the first `held`."""
        num_bytes = max(0, num_tokens - held) * self.token_bytes + self.state_bytes
        if self.window:
            num_unseen = min(num_tokens, self.window_start(num_tokens, held=held)) - min(num_tokens, held)
            num_bytes -= num_unseen * self.window_token_bytes
        return num_bytes

    def pool_sizes(self, memory_bytes: int, *, max_running: int, windows: WindowArithmetic | None) -> PoolSizes:
        """Return the sizes of one rank's pool that fits into `memory_bytes`. max_running: concurrent sequences."""
        num_states = 0
        if self.state_bytes:
            num_states = state_slots_for(
                memory_bytes, self.state_bytes, token_bytes=self.token_bytes, max_running=max_running
            )
            memory_bytes -= num_states * self.state_bytes
        if not windows:
            return PoolSizes(max(0, memory_bytes // self.block_bytes), num_states)
        num_blocks, num_parts = windows.split(
            memory_bytes, block_bytes=self.block_bytes, part_bytes=self.window_part_bytes, max_running=max_running
        )
        return PoolSizes(num_blocks, num_states, num_parts)


@dataclass(frozen=True, kw_only=True)
class AnnouncedPool:
    """Pool of a replica as it announces it. Fields with defaults are missing in records of older versions."""

    num_blocks: int
    block_size: int
    bytes_per_token: int  # as shipped, on all ranks
    window: int = 0  # see CacheShape; bytes are of all ranks
    window_bytes_per_token: int = 0
    state_bytes: int = 0
    num_states: int = 0
    num_window_parts: int = 0

    @cached_property
    def cache(self) -> CacheShape:
        """Bytes that its model caches and ships, on all ranks."""
        return CacheShape(
            block_size=self.block_size,
            token_bytes=self.bytes_per_token,
            window_token_bytes=self.window_bytes_per_token,
            window=self.window,
            state_bytes=self.state_bytes,
        )


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
    windows: WindowArithmetic | None = None  # None: layers with a window keep whole contexts

    @cached_property
    def cache(self) -> CacheShape:
        """Bytes on one rank. With more ranks than KV heads, heads are replicated."""
        layers = self.config.kv_layers + (self.heads.kv_layers if self.heads else ())
        dtypes = (self.activations if i in self.unquantized_layers else self.dtype for i in range(len(layers)))
        by_layer = [self._layer_bytes(dtype, *shape) for dtype, shape in zip(dtypes, layers, strict=True)]
        freed = self.config.kv_windows if self.windows else ()
        states = (
            shape.state_bytes(self.tensor_parallel, number_bytes=self._itemsize)
            for shape in self.config.recurrent_layers
        )
        return CacheShape(
            block_size=self.block_size,
            token_bytes=sum(by_layer),
            window_token_bytes=sum(by_layer[layer] for layer, window in enumerate(freed) if window),
            window=max(freed, default=0),
            state_bytes=sum(states),
            feature_bytes=self.heads.feature_bytes(self.config, itemsize=self._itemsize) if self.heads else 0,
        )

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token on all ranks of a replica."""
        return self.cache.token_bytes * self.tensor_parallel

    @cached_property
    def sizes(self) -> PoolSizes:
        """Sizes of one replica's pool."""
        beside = 0
        if self.heads:
            beside = self.heads.bytes_beside_blocks(
                self.config,
                itemsize=self._itemsize,
                max_running=self.max_running,
                spare_bytes=self.block_size * sum(self._layer_bytes(self.dtype, *one) for one in self.heads.kv_layers),
            )
        return self.cache.pool_sizes(
            int(self.memory_bytes) - beside, max_running=self.max_running, windows=self.windows
        )

    def max_batch(self, context: int) -> int:
        """Return how many sequences of `context` tokens fit at once."""
        max_batch_tokens = self.windows.max_batch_tokens if self.windows else 0
        return self.sizes.max_batch(self.cache, context, max_batch_tokens=max_batch_tokens)

    def _layer_bytes(self, dtype: str, num_kv_heads: int, dim: int) -> int:
        """Return the bytes of one layer of one token on one rank. dim: numbers per row."""
        config, per_head = self.config, int(dim * _ITEM_BYTES[dtype])
        if dtype in _SCALE_BYTES:
            per_head += config.kv_exact_dim(dim) + _SCALE_BYTES[dtype]
        return config.kv_sides * max(1, num_kv_heads // self.tensor_parallel) * per_head

    @property
    def _itemsize(self) -> int:
        return int(_ITEM_BYTES[self.activations])
