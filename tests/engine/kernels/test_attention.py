"""Attention kernels compared with fp32 attention: ragged rows, grouped heads, windows, quantized pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.attention.attention_rule import AttentionRule
from engine.kernels.attention.decode_attention import launch_decode_attention
from engine.kernels.attention.dense_prefill import Carry, Slice, launch_dense_prefill_attention
from engine.kernels.attention.gather_rows import launch_gather_rows
from engine.kernels.attention.kv_splits import KEYS, share_out
from engine.kernels.attention.prefill_attention import launch_prefill_attention
from engine.kernels.attention.queries import QueryGroups, QueryTiles, cut_query_groups, most_queries
from tests.engine.kernels.pools import DEVICE, DTYPES, QUANTIZED, random, random_pool
from tests.support.attention_references import (
    reference_decode_attention,
    reference_dense_prefill_attention,
    reference_gather_rows,
    reference_prefill_attention,
)
from tests.support.grids import pairs, quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Query heads, kv heads, head_dim, block size, rule, format of the pool, dtype.
CASES = [
    (2, 2, 64, 16, {}, None, torch.float16),
    # The groups of SmolLM2.
    (3, 1, 64, 16, {}, "fp8", torch.float16),
    (3, 1, 64, 16, {"soft_cap": 5.0, "chunk": 40}, "int8", torch.float16),
    (4, 2, 80, 8, {"has_sinks": True}, None, torch.float32),
    (2, 1, 64, 16, {"window": 70}, None, torch.float32),
    # More heads than the tile of one warp, and blocks that are not a power of two.
    (18, 1, 32, 48, {"has_sinks": True, "scale": 0.3}, "fp8", torch.float16),
    # Scales that are not adjacent in pairs.
    (2, 2, 64, 1, {}, "int8", torch.float16),
    (2, 1, 32, 8, {"window": 7}, "fp8", torch.float32),
    (2, 1, 32, 8, {"window": 7, "has_sinks": True}, "int8", torch.float32),
    (3, 1, 64, 16, {}, "int4", torch.float16),
    (2, 1, 48, 8, {"window": 70, "soft_cap": 5.0}, "int4", torch.float32),
    # Chunks that are whole blocks of keys, and shorter than a tile of queries.
    (2, 1, 16, 8, {"chunk": 64}, None, torch.float32),
    (2, 1, 32, 8, {"chunk": 10, "has_sinks": True}, "int4", torch.float32),
    # Heads of gpt-oss, Gemma 2, Gemma 4 and others.
    (8, 1, 64, 16, {"window": 128, "has_sinks": True}, None, torch.float16),
    (2, 1, 256, 16, {"soft_cap": 5.0, "scale": 0.1}, None, torch.float16),
    (2, 1, 512, 16, {"window": 70, "scale": 1 / 8}, None, torch.float16),
    (2, 1, 192, 16, {"soft_cap": 5.0, "has_sinks": True}, "int8", torch.float16),
    (1, 1, 512, 16, {"chunk": 70}, "int4", torch.float16),
    *((32, 8, 128, 16, {}, kind, torch.bfloat16) for kind in (None, *QUANTIZED) if torch.bfloat16 in DTYPES),
]
# Each format, each part of a rule, and each kind of shape; for query groups of one query, and of several.
SINGLES = [CASES[i] for i in (0, 5, 6, 10, 11)]
GROUPS = [CASES[i] for i in (2, 3, 7, 12)]


def rule_of(changes: dict, num_heads: int, dim: int) -> AttentionRule:
    """Return the rule with these changes; sinks differ by head and are larger than some scores."""
    changes = {"scale": dim**-0.5} | changes
    return AttentionRule(sinks_H=random(num_heads, seed=9) * 2 if changes.pop("has_sinks", False) else None, **changes)


def seen_of(rule: AttentionRule) -> dict[str, int | None]:
    return {"window": rule.window, "chunk": rule.chunk}


def _singles(tokens_U: torch.Tensor, tables_UB: torch.Tensor, contexts_U: torch.Tensor, *, longest: int) -> QueryGroups:
    """Return groups of one query each."""
    seats_N = torch.arange(len(tokens_U), dtype=torch.int32, device=DEVICE)
    numbers = (tokens_U, torch.ones_like(seats_N), tables_UB, contexts_U, tokens_U, seats_N)
    return QueryGroups.of(numbers, most=1, longest=longest)


def outputs(
    launch: Callable[..., object], reference: Callable[..., object], q: torch.Tensor, *kv: Any, **case: Any
) -> list[torch.Tensor]:
    """Return the outputs of a kernel and of its reference; tokens of other rows stay 7."""
    outs = [torch.full_like(q, 7.0) for _ in range(2)]
    for attend, out in zip((launch, reference), outs, strict=True):
        attend(q, *kv, **case, out_THD=out)
    return outs


def tables_for(contexts: list[int], block_size: int) -> torch.Tensor:
    """Return disjoint blocks in random order; cells past a row's last block are invalid."""
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).split(counts)
    tables = torch.full((len(contexts), max(counts) + 2), 1 << 30, dtype=torch.int32)
    for table, ids in zip(tables, order, strict=True):
        table[: len(ids)] = ids
    return tables.to(DEVICE)


@pytest.mark.parametrize(
    ("case", "num_programs"),
    quick([*product(CASES, [1, 3]), (CASES[0], 20)], [*zip(SINGLES, cycle([3, 1])), (CASES[0], 20)]),
    ids=str,
)
def test_decode_equals_reference(case: tuple, num_programs: int) -> None:
    num_heads, num_kv_heads, dim, block_size, changes, kind, dtype = case
    rule = rule_of(changes, num_heads, dim)
    # 1, 6 and 2 blocks: programs end inside rows, and rows span programs.
    contexts = [1, 330, 65]
    tables = tables_for(contexts, block_size)
    contexts_R = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    codes, scales = random_pool(400 // block_size + 4, num_kv_heads, block_size, dim, dtype=QUANTIZED.get(kind, dtype))
    q = random(8, num_heads, dim, dtype=dtype)
    outs = outputs(
        launch_decode_attention,
        reference_decode_attention,
        q,
        codes,
        scales,
        query_groups=_singles(torch.tensor([6, 0, 2], device=DEVICE), tables, contexts_R, longest=330),
        rule=rule,
        splits=share_out(contexts_R, **seen_of(rule), num_programs=num_programs),
    )
    # With codes, values are three times as large.
    tolerance = TOLERANCE[dtype] * (3 if kind else 1)
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)
    assert (outs[0][[1, 3, 4, 5, 7]] == 7.0).all(), "tokens of other rows were written"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in GROUPS else pytest.mark.slow) for case in CASES if case[0] < 16 * case[1]],
    ids=str,
)
def test_query_groups_equal_reference(case: tuple) -> None:
    """Rows of 1, 11 and 3 queries, cut by head count, beside a padding group.

    Programs end between a group's last keys, which its first queries do not see.
    """
    num_heads, num_kv_heads, dim, block_size, changes, kind, dtype = case
    rule = rule_of(changes, num_heads, dim)
    lengths, contexts, begins = np.array([1, 11, 3]), np.array([1, 330, 66]), np.array([2, 4, 15])
    most = most_queries(num_heads, num_kv_heads)
    cut = cut_query_groups(lengths, contexts, most=most)
    tables = tables_for(contexts.tolist(), block_size)[torch.from_numpy(cut.rows_U)]
    codes, scales = random_pool(420 // block_size + 4, num_kv_heads, block_size, dim, dtype=QUANTIZED.get(kind, dtype))
    q = random(20, num_heads, dim, dtype=dtype)
    firsts = begins[cut.rows_U] + cut.firsts_U
    numbers = [
        np.append(firsts, 0),
        np.append(cut.counts_U, 1),
        np.append(cut.contexts_U, 0),
        np.append(np.repeat(firsts, cut.counts_U) + cut.places_N, 19),
        np.append(cut.seats_N(most), len(firsts) * most),
    ]
    firsts_U, counts_U, contexts_U, tokens_N, seats_N = (torch.from_numpy(n).int().to(DEVICE) for n in numbers)
    query_groups = QueryGroups(
        firsts_U, counts_U, torch.cat([tables, tables[:1]]), contexts_U, tokens_N, seats_N, most=most, longest=330
    )
    splits = share_out(contexts_U, **seen_of(rule), most=most, num_programs=3)
    case = {"query_groups": query_groups, "rule": rule, "splits": splits}
    outs = outputs(launch_decode_attention, reference_decode_attention, q, codes, scales, **case)
    tolerance = TOLERANCE[dtype] * (3 if kind else 1)
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)
    assert (outs[0][[0, 1, 3, 18]] == 7.0).all(), "tokens of other rows were written"
    assert not outs[0][19].any()


@pytest.mark.parametrize(
    ("most", "changes"),
    quick(
        [(1, {"window": 70}), (3, {"window": 70}), (8, {"window": 70}), (8, {"window": 7}), (8, {"chunk": 192})],
        [(3, {"window": 70}), (8, {"chunk": 192})],
    ),
)
def test_keys_start_at_the_first_query_of_a_group(most: int, changes: dict) -> None:
    """The first query sees a single key of a block, or none of another group's. A group may span two chunks."""
    rule, first, window = rule_of(changes, 16 // most, 32), 2 * KEYS - 1, changes.get("window", 64)
    contexts = torch.tensor([first + window + most - 1, first + window + most], dtype=torch.int32, device=DEVICE)
    codes, _ = random_pool(2 * 14, 1, 16, 32, dtype=torch.float32)
    q, counts = random(2 * most, 16 // most, 32), torch.full_like(contexts, most)
    tokens = torch.arange(2 * most, dtype=torch.int32, device=DEVICE)
    tables = tables_for(contexts.tolist(), 16)
    of_query_groups = (tokens[::most].contiguous(), counts, tables, contexts, tokens, tokens)
    query_groups = QueryGroups.of(of_query_groups, most=most, longest=int(contexts.max()))
    splits = share_out(contexts, **seen_of(rule), most=most, num_programs=2)
    case = {"query_groups": query_groups, "rule": rule, "splits": splits}
    outs = outputs(launch_decode_attention, reference_decode_attention, q, codes, None, **case)
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)


@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), max_size=9), most=st.sampled_from([1, 2, 5, 16])
)
def test_groups_contain_each_query_once(rows: list[tuple[int, int]], most: int) -> None:
    lengths = np.array([length for length, _ in rows], dtype=np.int64)
    contexts = lengths + np.array([before for _, before in rows], dtype=np.int64)
    cut = cut_query_groups(lengths, contexts, most=most)
    assert all(1 <= count <= most for count in cut.counts_U)
    found = [
        (row, first + place, context - count + 1 + place)
        for row, first, count, context in zip(*(numbers.tolist() for numbers in cut), strict=True)
        for place in range(count)
    ]
    assert found == [(row, i, before + i + 1) for row, (length, before) in enumerate(rows) for i in range(length)]
    assert [code // most for code in cut.seats_N(most)] == [
        strip for strip, count in enumerate(cut.counts_U) for _ in range(count)
    ]


def test_row_without_keys_gets_zeros() -> None:
    """Such rows pad the batch of a captured graph."""
    codes, _ = random_pool(2, 2, 8, 64, dtype=torch.float32)
    tokens, tables = torch.tensor([0, 1], device=DEVICE), torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    out, expected = outputs(
        launch_decode_attention,
        reference_decode_attention,
        random(2, 4, 64),
        codes,
        None,
        query_groups=_singles(tokens, tables, contexts, longest=5),
        rule=AttentionRule(scale=0.1),
        splits=share_out(contexts, num_programs=2),
    )
    assert not out[0].any() and not expected[0].any() and out[1].all()


@pytest.mark.parametrize("num_programs", [1, 7, 300])
@pytest.mark.parametrize("seen", [{}, {"window": 100}, {"chunk": 100}, {"window": 100, "most": 5}])
def test_work_is_split_evenly(num_programs: int, seen: dict[str, int]) -> None:
    """Each block belongs to one program, and programs differ only by the minimum size, for many rows of any lengths."""
    contexts = torch.tensor([0, 5000, 1, 64, 65, 0, *range(140), 3000, 0], dtype=torch.int32)
    splits = share_out(contexts.to(DEVICE), **seen, num_programs=num_programs)
    oldest = (contexts - seen.get("most", 1)).clamp(min=0)
    firsts = (oldest - seen["window"] + 1).clamp(min=0) if "window" in seen else oldest // seen.get("chunk", 1 << 20)
    firsts = firsts * seen.get("chunk", 1) // KEYS
    counts = (contexts + KEYS - 1) // KEYS - firsts
    total = int(counts.sum())
    share = max(4, -(-total // num_programs))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    assert splits.starts_R.tolist() == [*starts.tolist(), share]
    row_of = torch.repeat_interleave(torch.arange(len(contexts)), counts).tolist()
    for program, row in enumerate(splits.rows_W.tolist()):
        first = program * share
        assert row == row_of[first] if first < total else row == len(contexts)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_values_of_any_size_keep_their_weight(kind: str) -> None:
    """Value scales from 2^-30 to 2^30 in one row, and queries beyond the range of fp16."""
    codes, scales = random_pool(10, 1, 16, 64, dtype=QUANTIZED[kind])
    powers = 2.0 ** torch.linspace(-30, 30, 160).view(10, 16).to(DEVICE)
    scales[:, 1, 0] = (scales[:, 1, 0].float() * powers).to(scales.dtype)
    q = random(1, 2, 64) * 2.0**18
    scales[:, 0] *= 2.0**-20
    contexts = torch.tensor([160], dtype=torch.int32, device=DEVICE)
    tables = torch.arange(10, dtype=torch.int32, device=DEVICE).view(1, -1)
    outs = outputs(
        launch_decode_attention,
        reference_decode_attention,
        q.to(torch.bfloat16),
        codes,
        scales,
        query_groups=_singles(torch.tensor([0], device=DEVICE), tables, contexts, longest=160),
        rule=AttentionRule(scale=0.1),
        splits=share_out(contexts, num_programs=2),
    )
    assert outs[1].abs().max() > 1e6
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2 * outs[1].abs().max().item(), rtol=2e-2)


# Fewer code pairs than a matrix unit multiplies, and counts that do not fill a tile.
FEW_PAIRS = [
    (2, 1, 16, 16, {}, "int4", torch.float16),
    (2, 1, 16, 16, {"chunk": 64, "has_sinks": True}, "int8", torch.float16),
    (2, 1, 80, 8, {}, "fp8", torch.float32),
]
# Blocks that are not a power of two.
WIDE_BLOCKS = (2, 1, 32, 48, {"has_sinks": True, "scale": 0.3}, "fp8", torch.float16)
PREFILLS = [
    (case, num_splits, codes_at_once)
    for case, num_splits in [
        *product([*CASES, *FEW_PAIRS, WIDE_BLOCKS], [1]),
        *product([*CASES[1:5], CASES[12], CASES[17]], [3]),
    ]
    for codes_at_once in ((1, 2) if case[5] else (1,))
]


PREFILLS_BY_DEFAULT = [
    *((case, 1, 2 if case[5] else 1) for case in [*(CASES[i] for i in (0, 3, 6, 11, 15)), *FEW_PAIRS]),
    (WIDE_BLOCKS, 1, 2),
    *((CASES[i], 3, at_once) for i, at_once in ((2, 2), (17, 1))),
]


@pytest.mark.parametrize(("case", "num_splits", "codes_at_once"), quick(PREFILLS, PREFILLS_BY_DEFAULT), ids=str)
def test_prefill_equals_reference(case: tuple, num_splits: int, codes_at_once: int) -> None:
    num_heads, num_kv_heads, dim, block_size, changes, kind, dtype = case
    rule = rule_of(changes, num_heads, dim)
    # A whole prompt of two tiles, and chunks after a prefix.
    contexts, lengths = [135, 70, 3], [135, 40, 2]
    # Tokens 0, 176 and 177 belong to other rows.
    begins = np.array([1, 136, 178])
    tables = tables_for(contexts, block_size)
    codes, scales = random_pool(220 // block_size + 4, num_kv_heads, block_size, dim, dtype=QUANTIZED.get(kind, dtype))
    q = random(180, num_heads, dim, dtype=dtype)
    outs = outputs(
        partial(launch_prefill_attention, num_splits=num_splits, codes_at_once=codes_at_once),
        reference_prefill_attention,
        q,
        codes,
        scales,
        tiles=QueryTiles.of(begins, np.array(lengths), np.array(contexts), DEVICE),
        tables_RB=tables,
        contexts_R=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
        rule=rule,
    )
    tolerance = TOLERANCE[dtype] * (3 if kind else 1)
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)
    assert (outs[0][[0, 176, 177]] == 7.0).all(), "tokens of other rows were written"


@pytest.mark.parametrize("kind", [None, *QUANTIZED])
@pytest.mark.parametrize(("block_size", "dim"), [(16, 64), (8, 80)])
def test_gather_rows_equals_reference(kind: str | None, block_size: int, dim: int) -> None:
    codes, scales = random_pool(9, 3, block_size, dim, dtype=QUANTIZED.get(kind, torch.float16))
    blocks = torch.tensor([4, 0, 7, 7, 1], dtype=torch.int32, device=DEVICE)
    ours, expected = (
        gather(codes, scales, blocks, torch.float16) for gather in (launch_gather_rows, reference_gather_rows)
    )
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == (5 * block_size, 3, dim)
        torch.testing.assert_close(a, b, atol=0, rtol=0)


# NumPy warns about keys that are masked after the product.
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "dim", "shared", "changes", "dtype", "size"),
    pairs(
        [(4, 2, 64, 0, {"has_sinks": True}), (3, 3, 32, 16, {}), (2, 1, 24, 0, {"soft_cap": 5.0})],
        DTYPES,
        [1 << 30, 64],
    ),
    ids=str,
)
def test_sliced_dense_prefill_equals_reference(
    num_heads: int, num_kv_heads: int, dim: int, shared: int, changes: dict, dtype: torch.dtype, size: int
) -> None:
    """Each slice continues the results of the previous one. Keys past a row's last one are NaN."""
    contexts, lengths, begins = [135, 70, 3], [135, 40, 2], np.array([1, 136, 178])
    rule = rule_of({"scale": 0.2} | changes, num_heads, dim)
    q = random(180, num_heads, dim + shared, dtype=dtype)
    out, expected = (torch.full((180, num_heads, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    carries = [Carry.empty(180, num_heads, dim, DEVICE) for _ in range(2)]
    tiles = QueryTiles.of(begins, np.array(lengths), np.array(contexts), DEVICE)
    for begin in range(0, 135, size):
        firsts, kept = [], 0
        for context in contexts:
            firsts.append(kept)
            kept += max(0, min(context - begin, size)) + 1
        k, v = (random(kept, num_kv_heads, dim, dtype=dtype, seed=begin + i) for i in range(2))
        keys = random(kept, shared, dtype=dtype, seed=begin + 2) if shared else None
        ends = torch.tensor([*firsts[1:], kept], device=DEVICE) - 1
        for numbers in (k, v) if keys is None else (k, v, keys):
            numbers[ends] = torch.inf
        for attend, target, carry in (
            (launch_dense_prefill_attention, out, carries[0]),
            (reference_dense_prefill_attention, expected, carries[1]),
        ):
            attend(
                q,
                k,
                keys,
                v,
                tiles=tiles,
                firsts_R=torch.tensor(firsts, dtype=torch.int32, device=DEVICE),
                contexts_R=torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
                rule=rule,
                out_THW=target,
                part=Slice(begin, begin + size, is_last=begin + size >= 135, carry=carry if size < 135 else None),
            )
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (out[[0, 176, 177]] == 7.0).all(), "tokens of other rows were written"
