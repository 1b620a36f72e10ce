"""Planner and router count bytes from a model's config; pools allocate, and codecs ship, the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from core.model import config as model_config
from core.model.draft_heads import HeadsConfig
from core.model.kv_memory import KVArithmetic
from engine.config import GIB, EngineConfig, pool_sizes
from engine.kv.pool import KVPool
from kvtransfer.protocol.frames import Segment
from kvtransfer.protocol.plan import plan_heads
from kvtransfer.transfer.codec import codec_for
from tests.core.model.test_config import write_no_weights
from tests.engine import tiny_models

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("gemma2", tiny_models.GEMMA | {"layer_types": [f"{w}_attention" for w in ("sliding", "full") * 2][:3]}),
    "states": ("lfm2", tiny_models.LFM2),
    "states of both kinds": ("qwen3_next", tiny_models.DELTA_NET_MOE),
    "latents": ("deepseek_v3", tiny_models.DEEPSEEK_V3),
    "index keys": ("deepseek_v32", tiny_models.DEEPSEEK_V32),
}
_MEMORY = 1 << 20  # bytes


def _config(directory: Path, kind: str, *, pool_dtype: str) -> tuple[EngineConfig, KVArithmetic]:
    """Return the engine's configuration of a tiny model, and the planner's arithmetic."""
    family, changes = _FAMILIES[kind]
    tiny_models.tiny_config(family, **changes).save_pretrained(directory)
    write_no_weights(directory)
    limits = {"max_batch_tokens": 16, "max_running": 3}
    config = EngineConfig(
        model_dir=directory, pool_dtype=pool_dtype, block_size=4, frees_windows=kind == "windows", **limits
    )
    layout = config.layout()
    plan = KVArithmetic(
        config=model_config.load(directory),
        dtype=layout.dtype,
        block_size=4,
        tensor_parallel=1,
        memory_bytes=_MEMORY,
        max_running=3,
        windows=config.windows(layout) if layout.windows else None,
    )
    return config, plan


@pytest.mark.parametrize("pool_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kind", _FAMILIES)
def test_planned_pool_is_the_one_that_a_replica_allocates(kind: str, pool_dtype: str, tmp_path: Path) -> None:
    config, plan = _config(tmp_path, kind, pool_dtype=pool_dtype)
    layout = config.layout()
    sizes = pool_sizes(layout, config, gib=_MEMORY / GIB)
    assert plan.sizes == sizes and plan.cache == layout.cache
    assert (sizes.num_states > 0, sizes.num_window_parts is not None) == ("states" in kind, kind == "windows")
    pool = KVPool(
        layout,
        num_blocks=sizes.num_blocks,
        num_states=sizes.num_states,
        num_window_parts=sizes.num_window_parts,
        device=torch.device("cpu"),
    )
    states = (tensor for layer in pool.states for tensor in layer.tensors)
    num_bytes = sum(part.nbytes for part in (*pool.codes, *pool.scales, *states))
    assert _MEMORY - 2 * layout.block_bytes < num_bytes <= _MEMORY


@pytest.mark.parametrize(("num_tokens", "held"), [(37, 0), (37, 20), (37, 36), (8, 4)])
@pytest.mark.parametrize("kind", _FAMILIES)
def test_predicted_bytes_are_those_that_a_handoff_ships(kind: str, num_tokens: int, held: int, tmp_path: Path) -> None:
    config, plan = _config(tmp_path, kind, pool_dtype="auto")
    layout = config.layout()
    [copy] = plan_heads(sender=layout, receiver=layout)
    codec, ends = codec_for(layout, "raw"), (0, layout.num_layers, layout.num_transferred)
    segments = [
        Segment(
            first_layer=first,
            num_layers=end - first,
            first_token=held,
            num_tokens=num_tokens - held,
            window_start=layout.cache.window_start(num_tokens, held=held),
        )
        for first, end in pairwise(ends)
        if first < end
    ]
    shipped = sum(codec.num_bytes(segment, copy.sender_heads) for segment in segments)
    assert plan.cache.shipped_bytes(num_tokens, held=held) == shipped


def test_states_get_what_draft_heads_leave(tmp_path: Path) -> None:
    config, plan = _config(tmp_path, "states", pool_dtype="auto")
    beside = _MEMORY - 3000
    heads = SimpleNamespace(
        kv_layers=(), feature_bytes=lambda *_, **more: 0, bytes_beside_blocks=lambda *_, **more: beside
    )
    with_heads = replace(plan, heads=cast(HeadsConfig, heads))
    assert with_heads.sizes == pool_sizes(config.layout(), config, gib=_MEMORY / GIB, beside=beside)
    assert with_heads.sizes.num_states < plan.sizes.num_states
