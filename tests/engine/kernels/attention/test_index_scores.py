"""Scores of index keys, and the choice of the best, compared with their references and with sorting."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.attention import best_positions
from engine.kernels.attention.best_positions import launch_best_slots
from engine.kernels.attention.index_scores import MOST_SCORE, launch_index_scores
from engine.kernels.attention.kv_splits import share_out
from engine.kernels.quant.row_quantization import quantize_rows
from tests.engine.kernels.pools import DEVICE, EIGHT_BITS, random
from tests.support.attention_references import reference_best_slots, reference_index_scores
from tests.support.grids import quick

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

LATENT, BLOCKS, S = 16, 24, 8
NO_SCORE = 7.0


def tables_of(num_rows: int) -> torch.Tensor:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(2))
    return torch.stack([order.roll(i)[:20] for i in range(num_rows)]).int().to(DEVICE)


@pytest.mark.parametrize(
    ("tile", "contexts", "num_programs", "kind", "dtype"),
    [
        # Decoding rows, one of them padding.
        (1, [150, 0, 65, 3], 3, "wide", torch.float32),
        (1, [150, 0, 65, 3], 3, "int8", torch.float16),
        # Queries of one prompt, the last tile of which is short.
        (4, [0, 70, 140], 2, "wide", torch.float16),
        *quick([(1, [9, 160], 40, "fp8", torch.float16), (4, [0, 70, 140], 1, "int8", torch.float32)], []),
    ],
    ids=str,
)
def test_scores_equal_reference(
    tile: int, contexts: list[int], num_programs: int, kind: str, dtype: torch.dtype
) -> None:
    num_queries, (heads, dim) = max(1, len(contexts) * tile - 3 * (tile > 1)), (5, 18)
    pool, scales = random(BLOCKS, 1, 1, S, LATENT + dim, dtype=dtype, seed=1), None
    if kind in EIGHT_BITS:
        pool, scales = quantize_rows(pool, EIGHT_BITS[kind], exact=dim)
    contexts_R = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    case = {
        "tile": tile,
        "tables_RB": tables_of(len(contexts)) if tile == 1 else tables_of(1).expand(len(contexts), -1),
        "contexts_R": contexts_R,
        "splits": share_out(contexts_R, num_programs=num_programs),
    }
    q, weights = random(num_queries, heads, dim, dtype=dtype), random(num_queries, heads, seed=3)
    weights[0] = MOST_SCORE / 4
    scores = [torch.full((num_queries, 160), NO_SCORE, device=DEVICE) for _ in range(2)]
    for score, scores_QL in zip((launch_index_scores, reference_index_scores), scores, strict=True):
        score(q, weights, pool, scales, scores_QL=scores_QL, **case)
    torch.testing.assert_close(scores[0], scores[1], atol=2e-2, rtol=2e-3)
    for query in range(num_queries):
        context = contexts[query // tile]
        assert (scores[0][query, context:] == NO_SCORE).all() and (scores[0][query, :context] != NO_SCORE).all()
    if contexts[0]:
        assert (scores[0][0] == -MOST_SCORE).any() and scores[0].abs().max() <= MOST_SCORE


def test_best_slots_equal_a_stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores favour the first positions, zeros of either sign are equal, and padding chooses nothing."""
    monkeypatch.setattr(best_positions, "KEYS_AT_ONCE", 128)
    top_k, tile, numbers = 22, 2, random(160, seed=4)
    few = (numbers * 1.5).round() * 0.5 * random(160, seed=5).sign()
    assert (1 / few[few == 0]).unique().numel() == 2
    exactly = torch.full_like(numbers, -1.0)
    exactly[40 : 40 + top_k] = 1.0
    # More equal scores than fit, in two blocks of the kernel, before better ones.
    late = torch.full_like(numbers, -1.0)
    late[:30] = late[130] = 0.0
    late[-3:] = 1.0
    least, extremes = torch.full_like(numbers, -MOST_SCORE), numbers.sign() * MOST_SCORE
    rows = {(0, 160): numbers, (1, 160): few, (2, 160): exactly, (3, 160): least, (4, 160): extremes}
    rows |= {(5, 160): late, (6, 22): numbers, (7, 9): numbers, (8, 0): numbers}
    scores, tables = torch.stack([*rows.values()]), tables_of(5)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32, device=DEVICE)
    choices = {"tile": tile, "block_size": S, "top_k": top_k}
    launched = launch_best_slots(scores, contexts, tables, **choices)
    referred = reference_best_slots(scores, contexts, tables, **choices)
    for query, context in rows:
        best = (-scores[query, :context]).sort(stable=True).indices[:top_k].sort().values
        expected = (tables[query // tile, best // S] * S + best % S).tolist()
        for found in (launched, referred):
            assert found[query, : len(expected)].tolist() == expected
