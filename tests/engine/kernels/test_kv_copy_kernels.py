"""Kernels that move KV: bit-identical to their torch references, including manual rounding."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attention.kv_write import launch_write_kv, reference_write_kv
from engine.kernels.kv_wire import launch_pack_kv, launch_unpack_kv, reference_pack_kv, reference_unpack_kv
from engine.kernels.quant.row_quantization import INT4, SCALES, as_bytes, dequantize_rows, quantize_rows
from engine.kv.checksum import checksum, launch_word_sum
from tests.engine.kernels.pools import DEVICE, DTYPES, QUANTIZED, random, random_pool, random_slots

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

# Tokens, heads, block size, head_dim.
SHAPES = [(1, 1, 16, 64), (37, 3, 8, 96), (5, 8, 32, 128)]
POOLS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16} | QUANTIZED


@pytest.mark.parametrize("pool_kind", POOLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_writes_equal_reference(shape: tuple[int, ...], pool_kind: str) -> None:
    num_tokens, num_heads, block_size, dim = shape
    # A fused projection.
    fused = random(num_tokens, 4 * num_heads, dim, dtype=torch.bfloat16)
    k, v = fused[:, 2 * num_heads : 3 * num_heads], fused[:, 3 * num_heads :]
    slots = random_slots(num_tokens, 12, block_size)
    pools = [random_pool(12, num_heads, block_size, dim, dtype=POOLS[pool_kind]) for _ in range(2)]
    launch_write_kv(*pools[0], slots, k, v)
    reference_write_kv(*pools[1], slots, k, v)
    for ours, expected in zip(*pools, strict=True):
        assert expected is None or torch.equal(as_bytes(ours), as_bytes(expected))


def test_negative_slot_writes_nothing() -> None:
    codes, scales = random_pool(2, 2, 8, 64, dtype=torch.float8_e4m3fn)
    before = as_bytes(codes).clone(), scales.clone()
    k, v = random(2, 1, 2, 64)
    launch_write_kv(codes, scales, torch.tensor([-1], device=DEVICE), k, v)
    assert torch.equal(as_bytes(codes), before[0]) and torch.equal(scales, before[1])


def test_e4m3_rounding_equals_torch() -> None:
    """Covers every e4m3 number, the midpoints between neighbours, both sides of each, and non-finite values."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:] + codes[:-1]) / 2
    nudged = [x * (1 + sign * 2.0**-20) for x in (codes, midpoints) for sign in (-1, 1)]
    values = torch.cat([codes, midpoints, *nudged, torch.tensor([31.19, torch.nan])]).clamp(max=448)
    values = torch.cat([values, -values])
    # Rows whose scale is 1, because their largest value is 448.
    rows = torch.cat([values.unsqueeze(-1), torch.full((len(values), 63), 448.0)], dim=-1).unsqueeze(1).to(DEVICE)
    codes, scales = random_pool(1, 1, len(values), 64, dtype=torch.float8_e4m3fn)
    launch_write_kv(codes, scales, torch.arange(len(values), device=DEVICE), rows, rows)
    expected = values.to(torch.float8_e4m3fn).float()
    is_nan = expected.isnan()
    written = codes[0, 0, 0, :, 0].float().cpu()
    assert torch.equal(written[~is_nan], expected[~is_nan]) and written[is_nan].isnan().all()


def test_int8_ties_round_to_even() -> None:
    """Covers every int8 code, the midpoints between neighbours, and both sides of each, in rows with scale 1."""
    codes = torch.arange(-127.0, 128)
    midpoints = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, midpoints, *(midpoints * (1 + sign * 2.0**-20) for sign in (-1, 1))])
    rows = torch.cat([values.unsqueeze(-1), torch.full((len(values), 63), 127.0)], dim=-1).unsqueeze(1).to(DEVICE)
    codes, scales = random_pool(1, 1, len(values), 64, dtype=torch.int8)
    launch_write_kv(codes, scales, torch.arange(len(values), device=DEVICE), rows, rows)
    assert torch.equal(codes[0, 0, 0, :, 0].float().cpu(), values.round()) and (scales == 1).all()


# NumPy warns where the interpreter divides infinity by itself, or looks for the largest NaN.
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN slice")
@pytest.mark.parametrize("kind", QUANTIZED)
def test_non_finite_values_propagate(kind: str) -> None:
    """Only their own row is affected."""
    rows = random(6, 1, 64)
    rows[1, 0, 7], rows[2, 0, 3], rows[3, 0, 3], rows[4] = torch.nan, torch.inf, -torch.inf, 0
    codes, scales = random_pool(1, 1, 6, 64, dtype=QUANTIZED[kind])
    launch_write_kv(codes, scales, torch.arange(6, device=DEVICE), rows, rows)
    written = dequantize_rows(codes, scales, torch.float32)[0, 0, 0]
    assert not written[1:4].isfinite().any() and not written[4].any() and (scales[0, 0, 0, [0, 5]] != 0).all()
    expected = dequantize_rows(*quantize_rows(rows, QUANTIZED[kind]), torch.float32)[:, 0]
    torch.testing.assert_close(written[[0, 4, 5]], expected[[0, 4, 5]], atol=0, rtol=0)


@pytest.mark.parametrize(
    "kind", [f"{pool} raw" for pool in POOLS] + [f"{str(d)[6:]} {wire}" for d in DTYPES for wire in QUANTIZED]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_pack_and_unpack_equal_reference(shape: tuple[int, ...], kind: str) -> None:
    num_tokens, num_heads, block_size, dim = shape
    pool_dtype, wire = kind.split()
    is_quantised = wire != "raw"
    pool, _ = random_pool(12, num_heads + 2, block_size, dim, dtype=POOLS[pool_dtype])
    slots, heads = random_slots(num_tokens, 12, block_size), slice(1, 1 + num_heads)

    def payload() -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = (num_tokens, 2, num_heads)
        dtype = QUANTIZED.get(wire, pool.dtype)
        codes = torch.zeros(*rows, dim // 2 if dtype == INT4 else dim, dtype=dtype, device=DEVICE)
        return codes, torch.zeros(rows, dtype=SCALES[dtype], device=DEVICE) if is_quantised else None

    ours, expected = payload(), payload()
    launch_pack_kv(pool, slots, heads, *ours)
    reference_pack_kv(pool, slots, heads, *expected)
    for a, b in zip(ours, expected, strict=True):
        assert b is None or (torch.equal(as_bytes(a), as_bytes(b)) and as_bytes(b).any())
    # Unpack into other heads of another pool, the rest of which must not change.
    targets = [torch.zeros(9, num_heads + 1, 2, *pool.shape[3:], device=DEVICE).to(pool.dtype) for _ in range(2)]
    targets = [target.transpose(1, 2).contiguous() for target in targets]
    slots, heads = random_slots(num_tokens, 9, block_size), slice(0, num_heads)
    launch_unpack_kv(*expected, targets[0], slots, heads)
    reference_unpack_kv(*expected, targets[1], slots, heads)
    assert torch.equal(as_bytes(targets[0]), as_bytes(targets[1])) and as_bytes(targets[0]).any()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_wire_and_pool_quantization_give_the_same_bytes(kind: str) -> None:
    """A quantized wire from a bf16 pool carries the same bytes that a pool of its dtype stores."""
    k, v = random(2, 9, 2, 64, dtype=torch.bfloat16)
    codes, scales = random_pool(2, 2, 8, 64, dtype=QUANTIZED[kind])
    launch_write_kv(codes, scales, torch.arange(9, device=DEVICE), k, v)
    expected, expected_scales = quantize_rows(k, QUANTIZED[kind])
    assert torch.equal(as_bytes(codes[0, 0, :, :8]), as_bytes(expected[:8].transpose(0, 1)))
    assert torch.equal(scales[0, 0, :, :8], expected_scales[:8].T)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 9, 100, 32_768, 32_771, 98_309, 1 << 20])
def test_checksum_kernel_equals_cpu_checksum(num_bytes: int) -> None:
    """Checksums are compared across the wire, between CPU and GPU and between versions."""
    payload = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    expected = checksum(payload)
    assert int(launch_word_sum(payload.to(DEVICE))) % 2**64 == expected
    words = [*payload.tolist(), *bytes(-num_bytes % 8)]
    by_hand = sum(
        int.from_bytes(words[8 * i : 8 * i + 8], "little") * (2 * i + 1) for i in range(min(len(words) // 8, 1000))
    )
    assert num_bytes > 8000 or by_hand % 2**64 == expected
