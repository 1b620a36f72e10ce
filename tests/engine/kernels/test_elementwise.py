"""RMSNorm, rotary and gated_mul kernels equal torch within one rounding."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attention.rotary import launch_rotate, reference_rotate
from engine.kernels.gated_mul import SILU, GatedActivation, Kind, launch_gated_mul, reference_gated_mul
from engine.kernels.rms_norm import launch_add_rms_norm, launch_rms_norm, reference_add_rms_norm, reference_rms_norm
from tests.engine.kernels.pools import DEVICE, DTYPES, random

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("rounds_late", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (3, 1025)])
def test_rms_norm_equals_torch(shape: tuple[int, int], dtype: torch.dtype, rounds_late: bool) -> None:
    x, update, weight = (random(*shape[i:], dtype=dtype, seed=i + j) for i, j in ((0, 0), (0, 1), (1, 2)))
    if rounds_late:
        weight = weight.float() + 2**-12
    bound = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(launch_rms_norm(x, weight, 1e-5), reference_rms_norm(x, weight, 1e-5), **bound)
    total, normed = launch_add_rms_norm(x, update, weight, 1e-5)
    expected_total, expected = reference_add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **bound)


def test_rms_norm_of_heads_inside_a_fused_projection() -> None:
    heads = random(7, 10, 64)[:, 3:6]
    weight = random(64)
    normed = launch_rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    torch.testing.assert_close(normed, reference_rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (7, 9, 64, 64), (3, 5, 80, 80), (3, 5, 80, 24), (2, 3, 64, 0)])
def test_rotate_equals_torch(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_tokens, num_heads, dim, rotated = shape
    x = random(num_tokens, num_heads + 2, dim, dtype=dtype)[:, 1:-1]
    angles = random(num_tokens, 1, rotated // 2, seed=5)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    bound = {"atol": 3 * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(launch_rotate(x, cos, sin), reference_rotate(x, cos, sin), **bound)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [
        *(((5, 192), dtype, "silu") for dtype in DTYPES),
        ((1, 2), torch.float32, "silu"),
        ((2, 3000), torch.bfloat16, "gelu"),
        ((5, 192), torch.float32, "gelu"),
        ((2, 3000), torch.float32, "gelu_pytorch_tanh"),
        ((5, 192), torch.bfloat16, "gelu_pytorch_tanh"),
        ((1, 2), torch.bfloat16, "swigluoai"),
        ((2, 3000), torch.float32, "swigluoai"),
        ((1, 3), torch.bfloat16, "relu2"),
        ((2, 1500), torch.float32, "relu2"),
    ],
    ids=str,
)
def test_gated_mul_equals_torch(shape: tuple[int, int], dtype: torch.dtype, kind: Kind) -> None:
    x, activation = random(*shape, dtype=dtype) * 3, GatedActivation(kind, alpha=1.7, limit=2.0)
    # The kernel rounds once.
    expected = reference_gated_mul(x.float(), activation).to(dtype)
    bound = {"atol": TOLERANCE[dtype] / 2, "rtol": TOLERANCE[dtype] / 2}
    torch.testing.assert_close(launch_gated_mul(x, activation), expected, **bound)


def test_gated_mul_keeps_nan() -> None:
    x = torch.tensor([[torch.nan, 1.0, 1.0, torch.nan]], device=DEVICE)
    for activation in (SILU, GatedActivation("swigluoai", limit=2.0)):
        assert launch_gated_mul(x, activation).isnan().all()
    assert torch.equal(launch_gated_mul(x, GatedActivation("relu2")).isnan(), x.isnan())
