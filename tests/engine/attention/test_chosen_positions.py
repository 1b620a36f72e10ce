"""Sparse attention: the choice of positions, and its index keys on their way between pools."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.model.shape import IndexConfig
from core.types.errors import SpecError
from engine.attention import chosen_positions, chosen_slots
from engine.attention.chosen_positions import IndexedTokens, Seekers
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner.runner import ModelRunner
from kvtransfer.protocol.frames import Segment
from kvtransfer.transfer.codec import codec_for, slots_of
from tests.engine.steps import as_on_gpu, prompts, random
from tests.engine.tiny_models import DEEPSEEK_V32, GLM_MOE_DSA, MakeModel, MakeRunner, reference_logits

CPU = torch.device("cpu")
LATENT, ROPE, INDEX, HEADS, TOP_K = 24, 8, 14, 5, 6


def make_layout(dtype: str) -> KVLayout:
    """Return a layout of two layers, of which the second has no indexer."""
    return KVLayout(
        model="m",
        num_layers=2,
        num_kv_heads=1,
        head_dim=(LATENT + ROPE + INDEX, LATENT + ROPE),
        block_size=4,
        dtype=dtype,
        num_sides=1,
        exact_dim=(ROPE + INDEX, ROPE),
    )


def filled_pool(dtype: str) -> KVPool:
    pool = KVPool(make_layout(dtype), num_blocks=20, device=CPU)
    for layer, heads in enumerate(pool.layout.heads):
        pool.write_latents(layer, torch.arange(80), random(80, heads.head_dim, seed=layer))
    return pool


@pytest.mark.parametrize("most_products", [1 << 24, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("is_one_row", [False, True])
def test_best_positions_are_chosen(
    is_one_row: bool, dtype: str, most_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a loop over queries. most_products: 1 forces slices of one query."""
    monkeypatch.setattr(chosen_positions, "PRODUCTS_AT_ONCE", most_products)
    pool, contexts = filled_pool(dtype), [22, 5, 6, 7, 19]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    tables = torch.stack([order.roll(row)[:6] for row in range(1 if is_one_row else 5)])
    q, weights = random(7, HEADS, INDEX, seed=2), random(7, HEADS, seed=3)
    index = IndexConfig(num_heads=HEADS, head_dim=INDEX, top_k=TOP_K, is_interleaved=False)
    tokens = torch.tensor([6, 0, 1, 4, 3])
    chosen = IndexedTokens(index, q, torch.empty(0), weights).choose(
        pool, 0, Seekers(tokens, torch.tensor(contexts), tables, longest=max(contexts))
    )
    assert chosen is not None
    for query, (token, context) in enumerate(zip(tokens.tolist(), contexts, strict=True)):
        table = tables[0 if is_one_row else query]
        keys = pool.read(0, table, torch.float32)[0, 0, :context, -INDEX:]
        scores = weights[token] @ (q[token] @ keys.T).relu()
        best = scores.topk(min(TOP_K, context)).indices
        seen = chosen.is_seen_QU[query]
        assert set(chosen.positions_QU[query][seen].tolist()) == set(best.tolist())
        slots = table[best // 4] * 4 + best % 4
        assert set(chosen.slots_QU[query][seen].tolist()) == set(slots.tolist())
        visible = (chosen.mask(24, torch.float32)[query] == 0).nonzero().flatten()
        assert visible.tolist() == sorted(best.tolist())


def test_short_sequences_are_not_scored() -> None:
    index = IndexConfig(num_heads=HEADS, head_dim=INDEX, top_k=TOP_K, is_interleaved=False)
    indexed = IndexedTokens(index, random(1, HEADS, INDEX), torch.empty(0), random(1, HEADS))
    for longest in (TOP_K, TOP_K + 1):
        seekers = Seekers(torch.tensor([0]), torch.tensor([longest]), torch.tensor([[0, 1]]), longest)
        assert (indexed.choose(filled_pool("float32"), 0, seekers) is None) == (longest == TOP_K)


def test_fingerprint_names_the_numbers_that_stay_exact() -> None:
    layouts = [make_layout("int8"), make_layout("bfloat16")]
    prints = {layout.fingerprint for layout in layouts}
    for layout in layouts:
        other = {name: getattr(layout, name) for name in ("model", "num_layers", "num_kv_heads", "head_dim", "dtype")}
        prints.add(KVLayout(**other, block_size=4, num_sides=1, exact_dim=ROPE).fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize(("dtype", "wire"), [("bfloat16", "raw"), ("bfloat16", "fp8_e4m3"), ("int8", "int8")])
def test_index_keys_cross_any_wire_in_bf16(dtype: str, wire: str) -> None:
    source, target = filled_pool(dtype), KVPool(make_layout(dtype), num_blocks=20, device=CPU)
    segment = Segment(first_layer=0, num_layers=2, first_token=3, num_tokens=17)
    codec, heads = codec_for(source.layout, wire), [range(1)] * 2
    payload = torch.empty(codec.num_bytes(segment, heads), dtype=torch.uint8)
    tables = [4, 9, 1, 0, 7], [2, 3, 15, 19, 5]
    codec.pack(source, segment, heads, slots_of(source, tables[0], 3, 17), payload)
    codec.unpack(payload, target, segment, heads, slots_of(target, tables[1], 3, 17))
    before, after = (
        pool.read_tails(0, torch.tensor([table]), INDEX)[0, 3:].float()
        for pool, table in zip((source, target), tables, strict=True)
    )
    assert torch.equal(before, after) and before.any(dim=1).all()
    assert torch.equal(before, random(80, LATENT + ROPE + INDEX)[[16 + 3, *_slots(tables[0])], -INDEX:].bfloat16())


def _slots(table: list[int]) -> list[int]:
    return [block * 4 + offset for block in table[1:] for offset in range(4)]


@pytest.mark.parametrize(("family", "changes"), [("deepseek_v32", DEEPSEEK_V32), ("glm_moe_dsa", GLM_MOE_DSA)])
def test_logits_after_a_handoff_depend_on_the_index_keys(
    family: str, changes: dict[str, Any], tiny_model: MakeModel, make_runner: MakeRunner
) -> None:
    """A replica that got latents without their index keys would attend to other positions."""
    directory, model = tiny_model(family, **changes)
    (tokens,) = prompts(41)
    source, target = make_runner(directory), make_runner(directory)
    source.forward(Batch.of([Row(tokens[:40], 0, range(5), num_logits=1)], block_size=8))
    target.pool.copy_in(source.pool.copy_out(range(5)), range(6, 11))
    expected = reference_logits(model, tokens)[-1:]
    torch.testing.assert_close(_next(target, tokens), expected, atol=2e-4, rtol=1e-4)
    for layer, heads in enumerate(target.layout.heads):
        dim = heads.head_dim - target.config.kv_dim
        if dim:
            target.pool.codes[layer][6:9, ..., -dim:] = 0
    assert (_next(target, tokens) - expected).abs().max() > 0.1


def test_tensors_without_use_are_not_read(tiny_model: MakeModel, make_runner: MakeRunner, tmp_path: Path) -> None:
    """MTP layers of published files, and indexers of layers that share positions."""
    directory, _ = tiny_model("glm_moe_dsa", **GLM_MOE_DSA)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("5.eh_proj", "5.self_attn.indexer.wk", "1.self_attn.indexer.wk"):
        tensors[f"model.layers.{name}.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    make_runner(tmp_path)
    del tensors["model.layers.2.self_attn.indexer.wk.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SpecError, match=r"missing: model\.layers\.2\.self_attn\.indexer\.wk\.weight"):
        make_runner(tmp_path)


def _next(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Compute the last of 41 tokens, whose prompt is in blocks 6 to 10."""
    return runner.forward(Batch.of([Row(tokens[40:], 40, range(6, 12), num_logits=1)], block_size=8)).clone()


@pytest.mark.parametrize("pool_dtype", ["float32", "int8"])
@pytest.mark.parametrize("part_bytes", [1 << 28, 1])
def test_a_step_of_a_gpu_equals_one_of_a_cpu(
    part_bytes: int, pool_dtype: str, tiny_model: MakeModel, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts below and above index_topk beside decode rows, with the kernels' references.

    part_bytes: 1 forces parts of one tile.
    """
    monkeypatch.setattr(chosen_slots, "PART_BYTES", part_bytes)
    directory, _ = tiny_model("glm_moe_dsa", **GLM_MOE_DSA | {"first_k_dense_replace": 5})
    sequences = prompts(40, 50, 9, 30)
    spans = [[(0, 20), (0, 29), (0, 4), (0, 8)], [(20, 21), (29, 50), (4, 5), (8, 13)]]
    spans.append([(21, 22), (49, 50), (5, 6), (13, 30)])
    runners = [make_runner(directory, pool_dtype=pool_dtype) for _ in range(2)]
    for of_step in spans:
        rows = [
            Row(tokens[start:end], start, range(7 * i, 7 * i + 7), num_logits=1)
            for i, (tokens, (start, end)) in enumerate(zip(sequences, of_step, strict=True))
        ]
        batch = Batch.of(rows, block_size=8)
        torch.testing.assert_close(as_on_gpu(runners[0], batch), runners[1].forward(batch), atol=2e-4, rtol=1e-4)
