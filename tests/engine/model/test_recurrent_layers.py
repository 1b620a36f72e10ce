"""States of recurrent layers: what ranks can share, and bytes. test_models.py and test_parallel.py compare results."""

from __future__ import annotations

import pytest

from core.model.recurrent import DeltaNetShape, MambaShape, RecurrentShape, ShortConvShape
from core.types.errors import SpecError

QWEN3_NEXT = DeltaNetShape(
    hidden_size=2048,
    num_key_heads=16,
    num_value_heads=32,
    key_dim=128,
    value_dim=128,
    conv_width=4,
    norm_eps=1e-6,
    is_fused=True,
)
MAMBA = MambaShape(
    hidden_size=40,
    num_heads=8,
    head_dim=16,
    num_groups=2,
    state_dim=24,
    conv_width=3,
    norm_eps=1e-5,
    min_dt=0.001,
    has_bias=True,
    has_conv_bias=True,
)


@pytest.mark.parametrize("shape", [QWEN3_NEXT, MAMBA, ShortConvShape(hidden_size=40, conv_width=3, has_bias=True)])
def test_heads_that_cannot_be_shared_are_refused(shape: RecurrentShape) -> None:
    with pytest.raises(SpecError, match="ranks cannot share"):
        shape.check_ranks(3)


def test_bytes_of_states() -> None:
    """Qwen3-Next: 2 MiB of matrices and 48 KiB of bf16 rows per layer, by four ranks a quarter each."""
    assert (QWEN3_NEXT.matrix_bytes(), QWEN3_NEXT.conv_bytes(number_bytes=2)) == (2 << 20, 48 << 10)
    assert (QWEN3_NEXT.matrix_bytes(4), QWEN3_NEXT.conv_bytes(4, number_bytes=2)) == (512 << 10, 12 << 10)
