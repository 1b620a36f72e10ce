"""KV layouts of alike and unlike layers: fingerprints, and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.model import config as model_config
from core.model.kv_memory import CacheShape, KVArithmetic, PoolSizes, WindowArithmetic
from core.types.request import SequenceRequest
from engine.config import GIB, EngineConfig, pool_sizes
from engine.kv.block_manager import BlockManager
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool, window_manager_of
from engine.kv.window_manager import WindowManager
from engine.scheduler.prompts import KVSource, allocate
from engine.scheduler.sequence import Sequence
from tests.core.model.test_config import write, write_no_weights

_SIZE = 4

Numbers = int | tuple[int, ...]


def _fingerprint(num_kv_heads: Numbers, head_dim: Numbers) -> str:
    layout = KVLayout(
        model="m", num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=_SIZE, dtype="bfloat16"
    )
    return layout.fingerprint


def test_fingerprint_of_alike_layers_is_that_of_the_oldest_version() -> None:
    """Replicas of both versions compare it; the oldest one has one number for all layers."""
    assert _fingerprint(2, 8) == _fingerprint((2, 2), (8, 8)) == "f5188ec5821073b328b982fe40e9423a"


def test_fingerprint_names_the_heads_of_each_layer() -> None:
    shapes: list[tuple[Numbers, Numbers]] = [(2, 8), ((2, 4), 8), ((4, 2), 8), (2, (8, 16)), ((2, 4), (16, 8)), (4, 8)]
    assert len({_fingerprint(*shape) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3", "int8", "int4"])
def test_planned_memory_is_what_a_pool_allocates(
    dtype: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's last layer reads the KV of an earlier one; one layer is not quantized."""
    write_no_weights(write(tmp_path))
    alike = model_config.load(tmp_path)
    heads = ((2, 32), (4, 16), (1, 64), (2, 32))
    layers = [replace(alike.layers[0], num_kv_heads=num_heads, head_dim=dim) for num_heads, dim in heads]
    layers[3] = replace(layers[3], kv_layer=0)
    model = replace(alike, num_layers=4, layers=tuple(layers))
    monkeypatch.setattr(model_config, "load", lambda directory, **context: model)
    config = EngineConfig(model_dir=tmp_path, pool_dtype=dtype, block_size=_SIZE, unquantized_layers=(-2,))
    layout = config.layout(tensor_parallel=num_ranks)
    pool = KVPool(layout, num_blocks=3, device=torch.device("cpu"))
    num_bytes = sum(part.nbytes for part in (*pool.codes, *pool.scales))
    plan = KVArithmetic(
        config=model,
        dtype=dtype,
        block_size=_SIZE,
        tensor_parallel=num_ranks,
        memory_bytes=num_bytes,
        unquantized_layers=(1,),
    )
    assert num_bytes == 3 * layout.block_bytes == 3 * plan.cache.block_bytes
    assert plan.sizes.num_blocks == 3 and plan.bytes_per_token == num_ranks * layout.bytes_per_token()
    assert layout.block_bytes == sum(map(layout.layer_bytes, range(3)))


def _windowed_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, windows: list[int | None], max_context: int
) -> tuple[EngineConfig, KVArithmetic, KVArithmetic]:
    """Return the configuration of a model with these windows, and its arithmetic with and without freeing."""
    write_no_weights(write(tmp_path))
    alike = model_config.load(tmp_path)
    layers = tuple(replace(alike.layers[0], window=window) for window in windows)
    model = replace(alike, num_layers=len(layers), layers=layers, max_context=max_context)
    monkeypatch.setattr(model_config, "load", lambda directory, **context: model)
    config = EngineConfig(model_dir=tmp_path, block_size=16, max_batch_tokens=512, frees_windows=True)
    whole = KVArithmetic(
        config=model,
        dtype="bfloat16",
        block_size=16,
        tensor_parallel=1,
        memory_bytes=1 << 28,
        max_running=config.max_running,
    )
    return config, replace(whole, windows=config.windows(config.layout())), whole


@pytest.mark.parametrize("windows", [[1024, None, 1024], [1024, 512], [64, None]])
@pytest.mark.parametrize("max_context", [2048, 32768])
def test_planned_parts_are_what_a_pool_allocates(
    windows: list[int | None], max_context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, freed, whole = _windowed_plan(tmp_path, monkeypatch, windows=windows, max_context=max_context)
    layout = config.layout()
    sizes = pool_sizes(layout, config, gib=freed.memory_bytes / GIB)
    pool = KVPool(
        layout, num_blocks=sizes.num_blocks, num_window_parts=sizes.num_window_parts, device=torch.device("cpu")
    )
    num_bytes = sum(codes.nbytes for codes in pool.codes)
    assert freed.sizes == sizes and sizes.num_blocks >= whole.sizes.num_blocks - 1
    assert num_bytes <= freed.memory_bytes < num_bytes + 2 * layout.block_bytes
    assert window_manager_of(pool, max_batch_tokens=config.max_batch_tokens)


def test_pool_smaller_than_the_largest_context_has_parts_for_cached_prefixes() -> None:
    windows = WindowArithmetic(window=1024, block_size=16, max_context=1 << 20, max_batch_tokens=512)
    num_blocks, num_parts = windows.split(40_000, block_bytes=4, part_bytes=3)
    longest, cache = num_blocks * 16, CacheShape(block_size=16, token_bytes=4, window_token_bytes=3, window=1024)
    twice = PoolSizes(2 * num_blocks, num_window_parts=num_parts)
    assert PoolSizes(100, num_states=3).max_batch(replace(cache, state_bytes=1), 16, max_batch_tokens=0) == 3
    assert longest < windows.max_context and twice.max_batch(cache, longest, max_batch_tokens=512) == 2
    assert num_blocks + 3 * num_parts <= 40_000


def test_pure_window_model_holds_many_more_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted with the arithmetic, and by allocating them."""
    config, freed, whole = _windowed_plan(tmp_path, monkeypatch, windows=[1024, 1024], max_context=32768)
    assert whole.max_batch(32768) >= 2 and freed.max_batch(32768) >= 8 * whole.max_batch(32768)
    sizes = pool_sizes(config.layout(), config, gib=freed.memory_bytes / GIB)
    assert sizes.num_window_parts
    windows = WindowManager(
        sizes.num_window_parts,
        num_blocks=sizes.num_blocks,
        window=1024,
        block_size=16,
        max_batch_tokens=config.max_batch_tokens,
    )
    counts = []
    for blocks in (BlockManager(sizes.num_blocks, windows=windows), BlockManager(whole.sizes.num_blocks)):
        counts.append(0)
        while allocate(_sequence(counts[-1], 32000), blocks, source=KVSource.PREFILL):
            counts[-1] += 1
        blocks.check_integrity()
    assert counts[0] >= 8 * counts[1] >= 16


def _sequence(number: int, num_tokens: int) -> Sequence:
    request = SequenceRequest(id=str(number), token_ids=(number,) * num_tokens, num_prompt_tokens=num_tokens)
    return Sequence(request, 0, model="m", block_size=16, max_context=32768)
