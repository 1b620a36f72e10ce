"""KV layouts of alike and unlike layers: fingerprints, and bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.model import config as model_config
from core.model.kv_memory import KVArithmetic
from engine.config import EngineConfig
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
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
    assert num_bytes == 3 * layout.block_bytes == 3 * plan.block_bytes_per_rank
    assert plan.num_blocks == 3 and plan.bytes_per_token == num_ranks * layout.bytes_per_token()
    assert layout.block_bytes == sum(map(layout.layer_bytes, range(3)))
