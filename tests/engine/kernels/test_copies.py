"""Kernels that move KV: bit for bit what their torch references do. fp8.py's rounding by hand is exact as well."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.fp8 import quantize_fp8
from engine.kernels.kv_write import launch_write_kv, reference_write_kv
from engine.kernels.wire import launch_pack_kv, launch_unpack_kv, reference_pack_kv, reference_unpack_kv
from tests.engine.kernels.pools import DEVICE, DTYPES, as_numbers, random, random_pool, random_slots

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

SHAPES = [(1, 1, 16, 64), (37, 3, 8, 96), (5, 8, 32, 128)]  # tokens, heads, block size, head_dim
POOLS = ["float32", "float16", "bfloat16", "fp8"]


@pytest.mark.parametrize("pool_kind", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_writes_are_those_of_the_reference(shape: tuple[int, ...], pool_kind: str) -> None:
    num_tokens, num_heads, block_size, dim = shape
    is_fp8 = pool_kind == "fp8"
    dtype = torch.bfloat16 if is_fp8 else getattr(torch, pool_kind)
    fused = random(num_tokens, 4 * num_heads, dim, dtype=torch.bfloat16)  # as the projection leaves it
    k, v = fused[:, 2 * num_heads : 3 * num_heads], fused[:, 3 * num_heads :]
    slots = random_slots(num_tokens, 12, block_size)
    pools = [random_pool(12, num_heads, block_size, dim, dtype=dtype, is_fp8=is_fp8) for _ in range(2)]
    launch_write_kv(*pools[0], slots, k, v)
    reference_write_kv(*pools[1], slots, k, v)
    for ours, expected in zip(*pools, strict=True):
        assert expected is None or torch.equal(as_numbers(ours), as_numbers(expected))


def test_a_negative_slot_writes_nothing() -> None:
    codes, scales = random_pool(2, 2, 8, 64, dtype=torch.float32, is_fp8=True)
    before = as_numbers(codes).clone(), scales.clone()
    k, v = random(2, 1, 2, 64)
    launch_write_kv(codes, scales, torch.tensor([-1], device=DEVICE), k, v)
    assert torch.equal(as_numbers(codes), before[0]) and torch.equal(scales, before[1])


def test_rounding_by_hand_is_torchs() -> None:
    """Every e4m3 number, the midpoints between neighbours, both sides of each; and what is not finite."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    nudged = [x * (1 + sign * 2.0**-20) for x in (codes, midpoints) for sign in (-1, 1)]
    values = torch.cat([codes, midpoints, *nudged, torch.tensor([31.19, torch.nan])]).clamp(max=448)
    values = torch.cat([values, -values])
    # In rows whose scale is 1, because their largest value is 448.
    rows = torch.cat([values.unsqueeze(-1), torch.full((len(values), 63), 448.0)], dim=-1).unsqueeze(1).to(DEVICE)
    codes, scales = random_pool(1, 1, len(values), 64, dtype=torch.float32, is_fp8=True)
    launch_write_kv(codes, scales, torch.arange(len(values), device=DEVICE), rows, rows)
    expected = values.to(torch.float8_e4m3fn).float()
    is_nan = expected.isnan()
    written = codes[0, 0, 0, :, 0].float().cpu()
    assert torch.equal(written[~is_nan], expected[~is_nan]) and written[is_nan].isnan().all()


@pytest.mark.parametrize("kind", ["float16 raw", "bfloat16 raw", "fp8 raw", *(f"{str(d)[6:]} fp8" for d in DTYPES)])
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_and_unpack_are_those_of_the_reference(shape: tuple[int, ...], kind: str) -> None:
    num_tokens, num_heads, block_size, dim = shape
    pool_dtype, wire = kind.split()
    is_quantised = wire == "fp8"
    dtype = torch.float32 if pool_dtype == "fp8" else getattr(torch, pool_dtype)
    pool, _ = random_pool(12, num_heads + 2, block_size, dim, dtype=dtype, is_fp8=pool_dtype == "fp8")
    slots, heads = random_slots(num_tokens, 12, block_size), slice(1, 1 + num_heads)

    def payload() -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = (num_tokens, 2, num_heads)
        codes = torch.zeros(*rows, dim, dtype=torch.float8_e4m3fn if is_quantised else pool.dtype, device=DEVICE)
        return codes, torch.zeros(rows, dtype=torch.bfloat16, device=DEVICE) if is_quantised else None

    ours, expected = payload(), payload()
    launch_pack_kv(pool, slots, heads, *ours)
    reference_pack_kv(pool, slots, heads, *expected)
    for a, b in zip(ours, expected, strict=True):
        assert b is None or (torch.equal(as_numbers(a), as_numbers(b)) and as_numbers(b).any())
    # Into other heads of another pool, of which nothing else is touched.
    targets = [torch.zeros(9, num_heads + 1, 2, block_size, dim, device=DEVICE).to(pool.dtype) for _ in range(2)]
    targets = [target.transpose(1, 2).contiguous() for target in targets]
    slots, heads = random_slots(num_tokens, 9, block_size), slice(0, num_heads)
    launch_unpack_kv(*expected, targets[0], slots, heads)
    reference_unpack_kv(*expected, targets[1], slots, heads)
    assert torch.equal(as_numbers(targets[0]), as_numbers(targets[1])) and as_numbers(targets[0]).any()


def test_quantising_twice_changes_nothing() -> None:
    """What the wire made of a bf16 pool and an FP8 pool makes of the same numbers are the same bytes."""
    k, v = random(2, 9, 2, 64, dtype=torch.bfloat16)
    codes, scales = random_pool(2, 2, 8, 64, dtype=torch.bfloat16, is_fp8=True)
    launch_write_kv(codes, scales, torch.arange(9, device=DEVICE), k, v)
    expected, expected_scales = quantize_fp8(k)
    assert torch.equal(as_numbers(codes[0, 0, :, :8]), as_numbers(expected[:8].transpose(0, 1)))
    assert torch.equal(scales[0, 0, :, :8], expected_scales[:8].T)
