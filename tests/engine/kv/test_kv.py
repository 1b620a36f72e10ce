"""KV storage: batches, pools, quantized formats, and attention over them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention import attention
from engine.attention.attention import AttentionPlans
from engine.attention.layer_attention import LayerAttention
from engine.batch.batch import Batch
from engine.batch.rows import Row, RowChanges
from engine.kernels.quant.row_quantization import INT4, MOST, SCALES, dequantize_rows, quantize_rows
from engine.kv import layout
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from tests.engine.steps import random

CPU = torch.device("cpu")
BLOCK_SIZE = 4
NUM_BLOCKS = 300
DTYPES = ["float32", "bfloat16", "float16", "fp8_e4m3", "int8", "int4"]


def make_pool(dtype: str, *, num_blocks: int = 64, num_layers: int = 2, **changes: Any) -> KVPool:
    """Return a pool of unlike layers; layer 1 has two heads of 16."""
    facts: dict[str, Any] = {"num_kv_heads": (4, 2), "head_dim": (32, 16), "block_size": BLOCK_SIZE} | changes
    return KVPool(KVLayout(model="m", num_layers=num_layers, dtype=dtype, **facts), num_blocks=num_blocks, device=CPU)


rows = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12), st.booleans()), min_size=1, max_size=6
)  # (start, tokens, needs logits)


def to_rows(shapes: list[tuple[int, int, bool]]) -> list[Row]:
    blocks = iter(np.random.default_rng(1).permutation(NUM_BLOCKS).tolist())
    return [
        Row(
            token_ids=range(start, start + count),
            start=start,
            blocks=[next(blocks) for _ in range(-(-(start + count) // BLOCK_SIZE))],
            num_logits=wants,
        )
        for start, count, wants in shapes
    ]


@given(shapes=rows)
def test_batch_flattens_rows(shapes: list[tuple[int, int, bool]]) -> None:
    made = to_rows(shapes)
    batch = Batch.of(made, block_size=BLOCK_SIZE)
    flat = [(row, position) for row in made for position in range(row.start, row.end)]
    assert batch.positions.tolist() == batch.token_ids.tolist() == [position for _, position in flat]
    for slot, (row, position) in zip(batch.slots, flat, strict=True):
        assert slot == row.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    wanted = [i for i, (row, position) in enumerate(flat) if position >= row.end - row.num_logits]
    assert batch.logits_rows.tolist() == wanted


@given(shapes=rows)
def test_row_changes_round_trip(shapes: list[tuple[int, int, bool]]) -> None:
    changes = RowChanges.of(to_rows(shapes), block_size=BLOCK_SIZE)
    copy = RowChanges.decode(changes.encode())
    for name in RowChanges.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(copy, name), getattr(changes, name))


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_kv_is_read_back(dtype: str) -> None:
    pool = make_pool(dtype)
    slots = torch.from_numpy(np.random.default_rng(0).permutation(64 * BLOCK_SIZE)[:40])
    k, v = random(40, 2, 16), random(40, 2, 16, seed=1)
    pool.write(1, slots, k, v)
    table = np.array([[3, 60, 7], [9, 9, 0]])
    k_read, v_read = pool.gather(1, pool.runs(1, table), torch.float32)
    atol = {"float32": 0.0, "int8": 0.02, "int4": 0.3}.get(dtype, 1e-3)
    rtol = {"bfloat16": 2**-8, "float16": 2**-10, "fp8_e4m3": 2**-3}.get(dtype, 0.0)
    where = {int(slot): i for i, slot in enumerate(slots)}
    for row, column in np.ndindex(2, 3 * BLOCK_SIZE):
        i = where.get(int(table[row, column // BLOCK_SIZE] * BLOCK_SIZE + column % BLOCK_SIZE))
        for got, given_ in ((k_read, k), (v_read, v)):
            expected = torch.zeros(2, 16) if i is None else given_[i]
            torch.testing.assert_close(got[row, :, column], expected, atol=atol, rtol=rtol)
    both = torch.stack([pool.read(1, torch.tensor(blocks), torch.float32) for blocks in table.tolist()], dim=1)
    assert torch.equal(both, torch.stack((k_read, v_read)))
    assert not pool.codes[0].view(torch.uint8).any()


def test_head_ranges_cover_all_heads() -> None:
    def ranges(heads: int, size: int) -> list[tuple[int, int]]:
        layout = make_pool("float32", num_kv_heads=heads, tensor_parallel=size).layout
        return [layout.head_range(0, rank=rank) for rank in range(size)]

    assert ranges(8, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert ranges(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert ranges(3, 3) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("kind", MOST, ids=str)
@given(
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 300.0, 1e20]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    peak=st.sampled_from([1.0, 50.0]),
)
def test_rows_in_8_bits_are_within_half_a_step(
    kind: torch.dtype, scale: float, seed: int, dtype: torch.dtype, peak: float
) -> None:
    """e4m3 has three mantissa bits: an error of 1/16 of the value, or half of its smallest step times the scale.

    The steps of int8 equal the scale, so one large number costs accuracy in the others of its row.
    """
    x = (random(5, 64, seed=seed) * scale).to(dtype)
    x[:, 7] *= peak
    codes, scales = quantize_rows(x, kind)
    assert codes.dtype == kind and scales.dtype == torch.bfloat16
    assert (codes.float().abs() <= MOST[kind]).all() and (scales > 0).all()
    steps = scales.float().unsqueeze(-1)
    error = (dequantize_rows(codes, scales, torch.float32) - x.float()).abs()
    bound = steps / 2 if kind == torch.int8 else x.float().abs() / 16 + steps * 2**-10
    assert (error <= bound * (1 + 2**-20)).all()
    # The scale is rounded up by at most 1/128.
    assert (scales.float() * MOST[kind] <= x.float().abs().amax(dim=-1) * (1 + 2**-7)).all()
    assert (codes.float().abs().amax(dim=-1) >= MOST[kind] / 1.08).all()


def _by_hand(x_D: torch.Tensor) -> torch.Tensor:
    """Return what an int4 row of `x_D` holds, by the formulas alone: a dense rotation and no packing. D: 64."""
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < 64:
        hadamard = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), hadamard)
    # The first 64 fractional bits of pi.
    signs = torch.tensor([1 - 2 * (0x243F6A8885A308D3 >> i & 1) for i in range(64)], dtype=torch.float64)
    y = hadamard @ (signs * x_D.double()) / 8
    scale = ((y.max() - y.min()) / 15).float().bfloat16().float()
    if scale.double() < (y.max() - y.min()) / 15:
        scale = (scale * (1 + 2**-8)).bfloat16().float()
    zero = (y.min().float() + 8 * scale).bfloat16().double()
    steps = ((y - zero) / scale).round().clamp(-8, 7)
    return signs * (hadamard.T @ (zero + scale * steps)) / 8


def test_int4_rows_follow_the_formulas() -> None:
    x = random(200, 64) * torch.logspace(-3, 3, 200).unsqueeze(-1)
    x[50:, 7] *= 40
    x[100:] += 3
    read = dequantize_rows(*quantize_rows(x, INT4), torch.float32)
    size = x.abs().amax(dim=-1, keepdim=True)
    torch.testing.assert_close(read / size, torch.stack([_by_hand(row) for row in x]).float() / size, atol=1e-5, rtol=0)


def test_fingerprint_of_int4_includes_its_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint(dtype: str) -> str:
        return make_pool(dtype, num_blocks=1).layout.fingerprint

    before = fingerprint("int4"), fingerprint("int8")
    monkeypatch.setattr(layout, "INT4_FORMAT", "other signs")
    assert fingerprint("int4") != before[0] and fingerprint("int8") == before[1]


@given(cuts=st.lists(st.integers(0, 40), max_size=6), seed=st.integers(0, 100))
def test_int4_bytes_do_not_depend_on_how_tokens_are_split(cuts: list[int], seed: int) -> None:
    k, v = random(2, 40, 2, 16, seed=seed)
    slots, at_once, in_parts = torch.randperm(64 * BLOCK_SIZE)[:40], make_pool("int4"), make_pool("int4")
    at_once.write(1, slots, k, v)
    for start, end in pairwise([0, *sorted(cuts), 40]):
        in_parts.write(1, slots[start:end], k[start:end], v[start:end])
    assert torch.equal(at_once.copy_out(range(64)), in_parts.copy_out(range(64)))


@pytest.mark.parametrize("kind", SCALES, ids=str)
def test_zero_and_non_finite_rows(kind: torch.dtype) -> None:
    x = torch.zeros(3, 8)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    codes, scales = quantize_rows(x, kind)
    values = dequantize_rows(codes, scales, torch.float32)
    assert (values[0] == 0).all() and scales[0] > 0
    assert not values[1:].isfinite().any()


@pytest.mark.parametrize("kind", MOST, ids=str)
def test_every_code_dequantizes_exactly(kind: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(kind).reshape(2, 128)
    for scale in (1.0, 2.0**-100, 2.0**100):
        scales = torch.full((2,), scale, dtype=torch.bfloat16)
        # The last code of each half is NaN in e4m3.
        values = dequantize_rows(codes, scales, torch.float32)[:, :127]
        assert torch.equal(values, codes.float()[:, :127] * scale)


def test_single_tokens_gather_little_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1, 1, 2, 3, 5, 8, 13, 400, 410, 6, 7]
    batch_rows = to_rows([(length - 1, 1, True) for length in lengths])
    pool = make_pool("float32", num_blocks=NUM_BLOCKS)
    batch = Batch.of(batch_rows, block_size=BLOCK_SIZE)

    def gathered_blocks() -> list[int]:
        plan = AttentionPlans(batch, pool, dtype=torch.float32).of(LayerAttention(layer=0, scale=1.0))
        sizes = [group.runs_2RKB.shape for group in plan.singles]
        return [rows * blocks for _, rows, _, blocks in sizes]

    needed = sum(-(-length // BLOCK_SIZE) for length in lengths)
    assert len(gathered_blocks()) <= 3 and sum(gathered_blocks()) <= 2 * needed
    monkeypatch.setattr(attention, "_MAX_GATHERED", 420)
    assert max(gathered_blocks()) * BLOCK_SIZE <= 420


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_copies_round_trip(dtype: str) -> None:
    source, target = make_pool(dtype), make_pool(dtype)
    blocks = list(range(8))
    slots_T = torch.arange(8 * BLOCK_SIZE)
    for layer, heads in enumerate(source.layout.heads):
        source.write(layer, slots_T, *(random(len(slots_T), *heads, seed=2 * layer + kv) for kv in range(2)))
    payloads = source.copy_out(blocks)
    assert payloads.shape == (8, source.layout.block_bytes)
    target.copy_in(payloads[[5, 3]], [1, 2])
    assert torch.equal(target.copy_out([2, 1]), source.copy_out([3, 5]))
    for layer in range(2):
        copied, original = target.read(layer, torch.tensor([1, 2]), torch.float32), torch.tensor([5, 3])
        assert copied.any() and torch.equal(copied, source.read(layer, original, torch.float32))
    target.copy_block(2, 33)
    assert torch.equal(target.copy_out([33]), source.copy_out([3]))
