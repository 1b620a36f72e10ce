"""Random models without files: complete shapes, and weights seeded by tensor names."""

from __future__ import annotations

import pytest
import torch

from benchmarks.engine.random_models import SHAPES, random_runner
from core.types.errors import SpecError
from engine.batch.batch import Batch
from engine.batch.rows import Row

SMALL = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 64, "intermediate_size": 48}
SMALL |= {"num_attention_heads": 4, "moe_intermediate_size": 32}


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_shapes_have_equal_weights(shape: str) -> None:
    changes = SMALL | ({} if shape == "deepseek-v2-lite" else {"num_key_value_heads": 1})
    changes |= {key: 8 for key in ("num_experts", "n_routed_experts") if key in SHAPES[shape]}
    batch = Batch.of([Row(token_ids=[3, 1, 4], start=0, blocks=[0], num_logits=3)], block_size=16)
    first, second = (
        random_runner(shape, dtype="float32", num_blocks=4, device="cpu", changes=changes).forward(batch)
        for _ in range(2)
    )
    assert first.shape == (3, 100) and torch.equal(first, second)
    assert 0.1 < float(first.std()) < 10 and not torch.equal(first[0], first[1])


def test_unknown_shape_is_rejected() -> None:
    with pytest.raises(SpecError, match="llama-8b"):
        random_runner("llama-9b")
