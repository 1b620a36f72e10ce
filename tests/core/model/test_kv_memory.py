"""Division of a replica's KV memory: state slots and parts of windows beside the blocks."""

from __future__ import annotations

import pytest

from core.model.kv_memory import CacheShape, WindowArithmetic, state_slots_for

_MIB = 1 << 20


@pytest.mark.parametrize(
    ("memory_mib", "state_bytes", "token_bytes", "expected"),
    [
        (40 * 1024, 64 * _MIB, 20 << 10, 284),  # one per 4,096 tokens
        (16 * 1024, 64 * _MIB, 20 << 10, 128),  # at most half of the memory
        (20 * 1024, 64 * _MIB, 64 << 10, 128),  # two per running sequence
        (1024, 64 << 10, 4 << 10, 512),  # a 32nd of the memory
        (100, 64 * _MIB, 20 << 10, 2),
    ],
)
def test_state_slots(memory_mib: int, state_bytes: int, token_bytes: int, expected: int) -> None:
    slots = state_slots_for(memory_mib * _MIB, state_bytes, token_bytes=token_bytes, max_running=64)
    assert slots == expected


@pytest.mark.parametrize(
    ("memory_mib", "of_1k", "of_8k", "longest"),
    [
        (512, 20, 8, 0),  # cannot hold the largest context: half of the memory
        (780, 21, 16, 1),  # the largest context, and what is left
        (1024, 42, 16, 1),
        (16 * 1024, 128, 128, 29),  # parts for all running sequences, and for as many prefixes
    ],
)
def test_parts_of_short_sequences(memory_mib: int, of_1k: int, of_8k: int, longest: int) -> None:
    """A model with a long context, like Gemma 3: a short sequence needs as many parts as a long one."""
    windows = WindowArithmetic(window=512, block_size=16, max_context=128 << 10, max_batch_tokens=512)
    cache = CacheShape(block_size=16, token_bytes=26 << 10, window_token_bytes=22 << 10, window=512)
    sizes = cache.pool_sizes(memory_mib * _MIB, max_running=64, windows=windows)
    found = [sizes.max_batch(cache, context << 10, max_batch_tokens=512) for context in (1, 8, 128)]
    assert found == [of_1k, of_8k, longest]
    assert sizes.num_window_parts
    num_bytes = 16 * (sizes.num_blocks * (4 << 10) + sizes.num_window_parts * (22 << 10))
    assert num_bytes <= memory_mib * _MIB < num_bytes + cache.block_bytes
