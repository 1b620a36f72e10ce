"""Pairs of runners: one replays its decode steps, the other does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from tests.engine.runner.decode_batches import BLOCK_SIZE, MAX_ROWS, NUM_BLOCKS
from tests.engine.tiny_models import MakeModel

MakePair = Callable[..., tuple[ModelRunner, ModelRunner]]


@pytest.fixture(scope="module")
def make_pair(tiny_model: MakeModel) -> MakePair:
    """make_pair(capture, "llama", pool_dtype="fp8_e4m3", …) -> a runner that replays, and one that does not."""

    def make(
        capture: Any,
        family: str,
        *,
        dtype: str = "float32",
        pool_dtype: str = "auto",
        device: str = "cpu",
        **changes: Any,
    ) -> tuple[ModelRunner, ModelRunner]:
        directory, _ = tiny_model(family, **changes)
        config = EngineConfig(
            model_dir=directory,
            dtype=dtype,
            pool_dtype=pool_dtype,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            device=str(device),
        )
        replaying = ModelRunner(replace(config, recorded_rows=MAX_ROWS), capture=capture)
        return replaying, ModelRunner(config)

    return make
