"""Memory plan of a GPU: shares follow measurements, nothing is counted twice, and a lack of room is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.model.draft_heads import HeadsKind, HeadsPlace, load_heads
from core.model.kv_memory import KVArithmetic
from core.types.errors import SpecError
from core.types.request import Sampling
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import GIB, EngineConfig
from engine.runner.decode_graphs import Step, graph_sizes
from engine.runner.device_memory import DeviceMemory
from engine.runner.memory_profiling import SAMPLING_BYTES, largest_batch
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from engine.sampling.params import SamplingRow
from engine.spec_decode.heads.eagle import Eagle
from engine.spec_decode.heads.head_row import Choose, HeadRow
from engine.spec_decode.heads.medusa import Medusa
from tests.engine.spec_decode.heads.head_files import write_eagle, write_medusa
from tests.engine.tiny_models import MakeModel

TOTAL = 80 * GIB
MIB = 1 << 20


def memory(**changes: int) -> DeviceMemory:
    facts = {"total": TOTAL, "free": 60 * GIB, "weights": 18 * GIB, "step": GIB, "sampling": GIB, "graphs": GIB}
    return DeviceMemory(**(facts | {"links": GIB} | changes))


class FakeGauge:
    """Gauge with values set by the test."""

    def __init__(self, *, free: int, weights: int = 0, step: int = 0, graph: int = 0) -> None:
        self.total = TOTAL
        self.captured: list[Step] = []
        self.tokens_of_peak = 0
        self._free, self._step, self._graph = free, step, graph
        self._weights = iter((0, weights))

    def free(self) -> int:
        return self._free - self._graph * len(self.captured)

    def allocated(self) -> int:
        return next(self._weights)

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return self._step

    def capture(self, step: Step) -> Step:
        self.captured.append(step)
        return step


def test_pool_gets_remaining_memory() -> None:
    parts = memory()
    assert parts.taken == 2 * GIB
    assert parts.pool_bytes(None, least=1) == 60 * GIB - 4 * GIB - parts.unplanned
    assert parts.pool_bytes(5 * GIB, least=1) == 5 * GIB
    assert parts.table(50 * GIB) == (
        "of 80.0 GiB: weights 18.0, KV 50.0, largest step 1.0, sampling 1.0, graphs 1.0, links 1.0, CUDA and others "
        "2.0, left 6.0"
    )


def test_error_if_memory_does_not_fit() -> None:
    full = memory(free=5 * GIB, weights=73 * GIB)
    with pytest.raises(SpecError, match=r"of 80\.0 GiB 73\.0 are weights, 2\.0 are taken, .* 5\.6; raise tensor_par"):
        full.pool_bytes(None, least=1)
    with pytest.raises(SpecError, match=r"kv_memory_gib: 70\.0 GiB are not free .* at most 54\.4 are left"):
        memory().pool_bytes(70 * GIB, least=1)


@given(
    max_tokens=st.integers(16, 300),
    max_rows=st.integers(1, 40),
    blocks=st.integers(1, 40),
    size=st.sampled_from([8, 16]),
)
def test_largest_batch_fills_all_limits(max_tokens: int, max_rows: int, blocks: int, size: int) -> None:
    context = blocks * size
    batch = largest_batch(max_tokens=max_tokens, max_rows=max_rows, max_context=context, block_size=size)
    assert len(batch.query_lens) == len(batch.logits_rows) == min(max_rows, max_tokens)
    assert batch.num_tokens == min(max_tokens, min(max_rows, max_tokens) - 1 + context)
    assert (batch.context_lens == context).all() and batch.block_tables.max() < 16


def test_runner_sizes_pool_by_remaining_memory(tiny_model: MakeModel, caplog: pytest.LogCaptureFixture) -> None:
    """Weights count with their size in memory. Graph sizes that are not profiled count like those that are."""
    directory, _ = tiny_model("llama")
    gauge = FakeGauge(free=3 * GIB, weights=GIB, step=100 * MIB, graph=MIB)
    config = EngineConfig(
        model_dir=directory, dtype="float32", max_batch_tokens=64, max_running=9, recorded_rows=9, link_bytes=MIB
    )
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(config, capture=gauge.capture, gauge=gauge)
    graphs = MIB * len(graph_sizes(9))
    sampling = 9 * runner.config.vocab_size * SAMPLING_BYTES
    room = gauge.free() + (len(gauge.captured) - 4) * MIB - graphs - sampling - MIB - 228 * MIB - int(TOTAL * 0.02)
    assert runner.pool.num_blocks == room // runner.layout.block_bytes
    assert len(gauge.captured) == 4 + len(graph_sizes(9)), "expected a few captures in the trial, then all of them"
    assert "memory of cpu, of 80.0 GiB: weights 1.0, KV 1.2" in caplog.text


def test_trial_includes_broadcast_between_ranks(tiny_model: MakeModel) -> None:
    """NCCL allocates its connections with the first broadcast, and keeps them."""
    directory, _ = tiny_model("llama")
    parallel, gauge, done = TensorParallel(), FakeGauge(free=3 * GIB, weights=GIB), list[str]()
    parallel.broadcast_on_device = lambda x: done.append("handed on") or x  # type: ignore[method-assign,func-returns-value]
    gauge.free = lambda: done.append("looked") or 3 * GIB  # type: ignore[method-assign,func-returns-value]
    config = EngineConfig(model_dir=directory, dtype="float32", max_batch_tokens=64, max_running=9)
    ModelRunner(config, parallel, gauge=gauge)
    assert done.index("handed on") < done.index("looked")


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_memory_of_heads_is_reserved(
    kind: HeadsKind, tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runner on a GPU, a runner on a CPU, and a plan count the same bytes."""
    directory, _ = tiny_model("llama")
    (write_eagle if kind == "eagle" else write_medusa)(tmp_path)
    config = EngineConfig(
        model_dir=directory, dtype="float32", max_batch_tokens=64, max_running=9, heads=HeadsPlace(kind, tmp_path)
    )
    layer = 2 * 2 * 16 * 16 * 4  # keys and values, heads, dimensions, positions, bytes
    own = layer // 2 if kind == "eagle" else 0  # one head
    block = 3 * layer + (own + 48 * 4 if kind == "eagle" else 0)
    beside = 9 * (4 * 48 * 4 + own)  # nine rows: features of four steps, a spare block
    heads = Eagle if kind == "eagle" else Medusa
    draft, tried = heads.draft, list[int]()

    def drafted(self: Any, rows: Seq[HeadRow], max_tokens: int, choose: Choose) -> None:
        draft(
            self,
            rows,
            max_tokens,
            lambda logits, known, place: tried.append(len(known)) or choose(logits, known, place),
        )

    monkeypatch.setattr(heads, "draft", drafted)
    gauge = FakeGauge(free=3 * GIB, weights=GIB, step=100 * MIB)
    runner = ModelRunner(config, gauge=gauge)
    room = 3 * GIB - 100 * MIB - 128 * MIB - 9 * runner.config.vocab_size * SAMPLING_BYTES - int(TOTAL * 0.02)
    assert runner.pool.num_blocks == (room - beside) // block
    assert tried == [9], "the trial must include the heads"

    gib = (10 * block + beside) / GIB
    small = replace(config, kv_memory_gib=gib)
    assert ModelRunner(small).pool.num_blocks == 10
    assert ModelRunner(replace(small, kv_memory_gib=gib - 1 / GIB)).pool.num_blocks == 9
    with pytest.raises(SpecError, match=f"plus {beside} bytes of draft heads"):
        ModelRunner(replace(small, kv_memory_gib=beside / GIB))
    plan = KVArithmetic(
        config=runner.config,
        dtype="float32",
        block_size=16,
        tensor_parallel=1,
        memory_bytes=gib * GIB,
        heads=load_heads(kind, tmp_path, runner.config),
        activations="float32",
        max_running=9,
    )
    assert plan.sizes.num_blocks == 10 and plan.cache.block_bytes == block


def test_model_without_room_for_kv_is_rejected(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama")
    config = EngineConfig(model_dir=directory, dtype="float32", max_batch_tokens=64)
    with pytest.raises(SpecError, match="no room for KV on this GPU"):
        ModelRunner(config, gauge=FakeGauge(free=GIB, weights=75 * GIB))


def _runner_on_gpu(directory: Path, *, link_bytes: int) -> ModelRunner:
    config = EngineConfig(
        model_dir=directory,
        device="cuda",
        max_batch_tokens=1024,
        max_running=32,
        recorded_rows=32,
        link_bytes=link_bytes,
    )
    return ModelRunner(config)


@pytest.mark.gpu
def test_gpu_computes_largest_step_beside_full_pool(tiny_model: MakeModel) -> None:
    directory, _ = tiny_model("llama", head_dim=64)
    free = torch.cuda.mem_get_info()[0]
    away = max(0, free - 16 * GIB)  # on any GPU, a pool that is quickly filled with zeros
    runner = _runner_on_gpu(directory, link_bytes=away)
    size, most = runner.layout.block_size, runner.max_tokens
    assert 0 < runner.pool.num_blocks * runner.layout.block_bytes < free - away
    blocks = list(range(-(-most // size)))
    decoding = [Row(token_ids=[1], start=most - 1, blocks=blocks, num_logits=1)] * 32
    assert runner.forward(Batch.of(decoding, block_size=size)).isfinite().all()
    largest = largest_batch(max_tokens=1024, max_rows=32, max_context=most, block_size=size)
    assert runner.forward(largest).shape[0] == 32


@pytest.mark.gpu
def test_sampling_stays_within_reserved_memory() -> None:
    num_rows, vocabulary = 64, 128_256
    logits = torch.zeros(num_rows, vocabulary, device="cuda")  # no nucleus lies within a few tokens
    sampling = Sampling(temperature=1.0, top_p=0.99, top_k=vocabulary - 1, min_p=1e-9, num_logprobs=5)
    rows = [SamplingRow(sampling=sampling, seed=i, tokens=[1, 2], num_prompt_tokens=2) for i in range(num_rows)]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assert None not in sampler.sample(logits, rows).wait()
    assert torch.cuda.max_memory_reserved() - before <= SAMPLING_BYTES * num_rows * vocabulary
