"""FlashInfer attention of steps with prompts: equals torch, and is chosen only if faster. Uses a fake of FlashInfer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.flashinfer_heads import FlashInfer, find_flashinfer, is_possible
from engine.attention.heads import TorchHeads
from engine.attention.layer_attention import LayerAttention
from engine.attention.triton_heads import KernelHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch
from engine.batch.rows import Row
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner import streams
from tests.engine.steps import as_on_gpu, random
from tests.engine.tiny_models import MakeModel, MakeRunner

CPU = torch.device("cpu")
SIZE, DIM = 8, 64


def pool_of(dtype: str = "float32", *, head_dim: int = DIM, num_sides: int = 2) -> KVPool:
    layout = KVLayout(
        model="m", num_layers=2, num_kv_heads=2, head_dim=head_dim, block_size=SIZE, dtype=dtype, num_sides=num_sides
    )
    return KVPool(layout, num_blocks=40, device=CPU)


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 19, [3, 1, 7])],
        [(0, 16, [3, 1]), (12, 13, [5, 0]), (8, 20, [2, 4, 6]), (0, 1, [8])],  # between single tokens
        [(7, 8, [9]), (15, 32, [3, 1, 7, 4])],
    ],
)
def test_mixed_step_equals_torch(spans: list[tuple[int, int, list[int]]]) -> None:
    rows = [Row(token_ids=[0] * (end - start), start=start, blocks=b, num_logits=1) for start, end, b in spans]
    batch = Batch.of(rows, block_size=SIZE)
    fused, angles = random(batch.num_tokens, 4 + 2 * 2, DIM, seed=1), random(batch.num_tokens, 1, DIM // 2, seed=4)
    pools = [pool_of() for _ in range(2)]
    for pool in pools:
        pool.write(1, torch.arange(320), *random(2, 320, 2, DIM, seed=6))
    library = FakeFlashInfer()
    kernels = KernelHeads(DeviceBatch.of(batch, CPU), pools[1], [(angles.cos(), angles.sin())])
    theirs = FlashInfer(library, pools[1], num_q_heads=4, dtype=torch.float32).heads(batch, kernels)
    ours = TorchHeads(batch, pools[0], [(angles.cos(), angles.sin())])
    plain = LayerAttention(layer=1, scale=DIM**-0.5)
    others = [{"scale": 0.2}, {"window": 9}, {"chunk": 9}, {"soft_cap": 2.0}, {"sinks_H": torch.ones(4)}]
    for attention in (plain, *(replace(plain, **changes) for changes in others)):
        q_THD = [heads.store(attention, fused.clone()) for heads in (ours, theirs)]
        found = [heads.attend(attention, q) for heads, q in zip((ours, theirs), q_THD, strict=True)]
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
        assert library.num_runs == 1, "only plain attention is FlashInfer's"


def test_whole_model_equals_torch(tiny_model: MakeModel, make_runner: MakeRunner) -> None:
    """Layers store KV with the kernels' references and attend with FlashInfer."""
    runners = [make_runner(tiny_model("qwen3")[0]) for _ in range(2)]
    rows = [Row([5, 9, 2] * 6, 0, [1, 2, 3], num_logits=1), Row([3], 0, [4], num_logits=1)]
    batch, library = Batch.of(rows, block_size=SIZE), FakeFlashInfer()
    runner, pool = runners[0], runners[0].pool
    flashinfer = FlashInfer(library, pool, num_q_heads=4, dtype=torch.float32)
    found = as_on_gpu(runner, batch, others=partial(flashinfer.heads, batch))
    torch.testing.assert_close(found, runners[1].forward(batch), atol=1e-4, rtol=1e-4)
    assert library.num_runs == pool.layout.num_layers


def test_plan_waits_until_previous_plan_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper reuses the host memory that its last plan is copied from."""
    events: list[str] = []

    class FakeEvent:
        def __init__(self, name: str) -> None:
            self._name = name

        def wait(self) -> None:
            events.append(f"waits for {self._name}")

    class FakeStreams(streams.AtOnce):
        def mark(self) -> Any:
            name = f"mark {sum(one.startswith('mark') for one in events)}"
            events.append(name)
            return FakeEvent(name)

    ours = FakeStreams()
    monkeypatch.setattr(streams, "streams_of", lambda device: ours)
    pool, batch = pool_of(), Batch.of([Row([0] * 9, 0, [1, 2], num_logits=1)], block_size=SIZE)
    kernels = KernelHeads(DeviceBatch.of(batch, CPU), pool, [(torch.ones(9, 1, 32),) * 2])
    flashinfer = FlashInfer(FakeFlashInfer(), pool, num_q_heads=4, dtype=torch.float32)
    events.clear()
    for _ in range(4):
        flashinfer.heads(batch, kernels)
    assert [one for one in events if one.startswith("waits")][2:] == ["waits for mark 0", "waits for mark 1"]


def _load(name: str) -> FakeFlashInfer:
    assert name == "flashinfer"
    return FakeFlashInfer()


def _absent(name: str) -> Any:
    raise ModuleNotFoundError(name)


def _broken(name: str) -> Any:
    class Broken(FakeFlashInfer):
        def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any) -> Any:
            raise RuntimeError("nvcc is not there")

    return Broken()


@pytest.mark.parametrize(
    ("load", "ours_us", "theirs_us", "is_taken"),
    [
        (_load, 100, 60, True),
        (_load, 100, 95, False),
        (_load, 60, 100, False),
        (_absent, 1, 1, False),
        (_broken, 1, 1, False),
    ],
)
def test_flashinfer_is_used_only_if_faster(
    load: Callable[[str], Any], ours_us: float, theirs_us: float, is_taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    took = iter((ours_us, theirs_us))

    def seconds(run: Callable[[], object]) -> float:
        run()
        return next(took) * 1e-6

    found = find_flashinfer(pool_of(), num_q_heads=4, dtype=torch.float32, load=load, seconds=seconds)
    assert (found is not None) is is_taken
    assert (
        load is not _broken or "FlashInfer is installed but failed; using own kernels: nvcc is not there" in caplog.text
    )


def test_supported_pools() -> None:
    assert is_possible(pool_of("bfloat16"), dtype=torch.bfloat16)
    assert not is_possible(pool_of("fp8_e4m3"), dtype=torch.bfloat16), (
        "FlashInfer supports one scale per pool, not per row"
    )
    assert not is_possible(pool_of("bfloat16", head_dim=80), dtype=torch.bfloat16)
    assert not is_possible(pool_of(), dtype=torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("spans", [[(0, 300, 19)], [(0, 16, 1), (112, 113, 8), (80, 200, 13), (0, 1, 1)]])
def test_flashinfer_on_gpu_equals_torch(spans: list[tuple[int, int, int]]) -> None:
    library, device = pytest.importorskip("flashinfer"), torch.device("cuda")
    layout = KVLayout(model="m", num_layers=1, num_kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16")
    pool, blocks = KVPool(layout, num_blocks=60, device=device), iter(torch.randperm(60).tolist())
    rows = [
        Row([0] * (end - start), start, [next(blocks) for _ in range(count)], num_logits=1)
        for start, end, count in spans
    ]
    batch = Batch.of(rows, block_size=16)
    fused = random(batch.num_tokens, 8 + 2 * 2, 128, seed=1).to(device, torch.bfloat16)
    angles = random(batch.num_tokens, 1, 64, seed=4).to(device, torch.bfloat16)
    pool.write(0, torch.arange(960, device=device), *random(2, 960, 2, 128, seed=6).to(device, torch.bfloat16))
    ours = KernelHeads(DeviceBatch.of(batch, device), pool, [(angles.cos(), angles.sin())])
    theirs = FlashInfer(library, pool, num_q_heads=8, dtype=torch.bfloat16).heads(batch, ours)
    attention = LayerAttention(layer=0, scale=128**-0.5)
    q_THD = ours.store(attention, fused)
    found = [heads.attend(attention, q_THD) for heads in (theirs, ours)]
    torch.testing.assert_close(*found, atol=3e-2, rtol=3e-2)


class FakeFlashInfer:
    """Stand-in for the module. Wrappers keep the tensors of their plan, as FlashInfer does, so reuse is noticed."""

    def __init__(self) -> None:
        self.num_runs = 0

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, kv_layout: str) -> FakeWrapper:
        assert kv_layout == "HND" and workspace.dtype is torch.uint8
        return FakeWrapper(self)


class FakeWrapper:
    def __init__(self, library: FakeFlashInfer) -> None:
        self._library = library
        self._plan: tuple[Any, ...] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        rows = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        assert causal and q_data_type == kv_data_type and num_qo_heads % num_kv_heads == 0
        assert all(of.device.type == "cpu" and of.dtype is torch.int32 for of in rows), (
            "plan arguments on the device would cause a sync"
        )
        assert paged_kv_indices.dtype is torch.int32 and len(paged_kv_indices) == paged_kv_indptr[-1]
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self._plan = (
            *(of.tolist() for of in rows),
            paged_kv_indices,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
        )

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor:
        assert self._plan and q.is_contiguous()
        begins, kv_begins, last_lens, pages, num_heads, num_kv_heads, dim, page_size = self._plan
        assert q.shape == (begins[-1], num_heads, dim) and paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, dim)
        for row, (begin, end) in enumerate(pairwise(begins)):
            first, last = kv_begins[row], kv_begins[row + 1]
            num_keys = (last - first - 1) * page_size + last_lens[row]
            kv_2KLD = paged_kv_cache[pages[first:last].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
            k_HLD, v_HLD = kv_2KLD.repeat_interleave(num_heads // num_kv_heads, dim=1)
            at_T = torch.arange(num_keys - (end - begin), num_keys)
            hidden_TL = torch.arange(num_keys) > at_T[:, None]
            scores_HTL = (q[begin:end].transpose(0, 1) @ k_HLD.transpose(1, 2)) * dim**-0.5
            weights_HTL = scores_HTL.masked_fill(hidden_TL, -torch.inf).softmax(dim=-1)
            out[begin:end] = (weights_HTL @ v_HLD).transpose(0, 1)
        self._library.num_runs += 1
        return out
