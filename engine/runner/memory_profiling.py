"""Memory profiling of a GPU rank: run the largest step before the pool exists, and measure its memory.

    weights, kernels ──> the largest step ──> graphs of a few sizes ──> all given back ──> the pool ──> all graphs

All rows use the same few blocks. The results are meaningless and are discarded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.kv.layout import KVLayout
from engine.kv.pool import KVPool
from engine.runner.decode_graphs import Capture, Step, graph_sizes
from engine.runner.device_memory import DeviceMemory, Gauge, out_of_memory

_NUM_BLOCKS = 16
_NUM_GRAPHS = 4  # recorded to measure the memory of one more
# Four times engine.model.transformer.SLICE_BYTES: bf16, fp32, and intermediate results.
_SCORED_BYTES = 128 << 20
# Bytes per logit: an upper bound from a sampler that sorted the vocabulary for top-p and summed in fp64. The present
# GPU sampler needs less. A GPU test (tests/engine/runner/test_device_memory.py) fails if it is too small.
SAMPLING_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class MemoryTrial:
    """Hooks to profile a model over a temporary pool."""

    warm_up: Callable[[KVPool], None]  # loads every kernel
    compute: Callable[[Batch, KVPool], object]
    # Records decode steps of the largest sizes. Arguments: pool, capture, longest context, number of sizes. The result
    # keeps the graphs alive.
    record: Callable[[KVPool, Capture, int, int], object]
    make_capture: Callable[[], Capture] | None  # None: steps are not recorded
    least: Callable[[int], int]  # minimum over the ranks, so that all try the same steps

    def measure(
        self,
        config: EngineConfig,
        gauge: Gauge,
        *,
        layout: KVLayout,
        weights: int,
        vocab_size: int,
        max_context: int,
        device: torch.device,
        num_spare: int = 0,
    ) -> DeviceMemory:
        """Measure the memory of the largest step and of the graphs, and free everything again.

        weights: bytes. max_context: tokens per sequence. num_spare: blocks for the layers of draft heads. Raises
        SpecError if memory runs out.
        """
        try:
            step, graphs = self._try(config, gauge, layout, max_context, device, num_spare)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(device, f"steps of {config.max_batch_tokens} tokens", error) from error
        gc.collect()  # graphs and their callables form reference cycles
        return DeviceMemory(
            total=gauge.total,
            free=gauge.free(),
            weights=weights,
            step=step + _SCORED_BYTES,
            sampling=config.max_running * vocab_size * SAMPLING_BYTES,
            graphs=graphs,
            links=config.link_bytes,
            drafts=config.draft_bytes,
        )

    def _try(
        self,
        config: EngineConfig,
        gauge: Gauge,
        layout: KVLayout,
        max_context: int,
        device: torch.device,
        num_spare: int,
    ) -> tuple[int, int]:
        """Return the bytes of the largest step and of the graphs."""
        pool = KVPool(layout, num_blocks=_NUM_BLOCKS, device=device, num_spare=num_spare)
        self.warm_up(pool)
        # A sequence cannot exceed a pool of all free memory.
        longest = self.least(max(config.block_size, min(max_context, gauge.free() // layout.bytes_per_token())))
        batch = largest_batch(
            max_tokens=config.max_batch_tokens,
            max_rows=config.max_running,
            max_context=longest,
            block_size=config.block_size,
        )
        step = gauge.peak_of(lambda: self.compute(batch, pool))
        if self.make_capture is None:
            return step, 0
        measured = _Measured(self.make_capture(), gauge)
        recorded = self.record(pool, measured, longest, _NUM_GRAPHS)
        del recorded
        return step, measured.bytes_of(len(graph_sizes(config.recorded_rows)))


def largest_batch(*, max_tokens: int, max_rows: int, max_context: int, block_size: int) -> Batch:
    """Return a batch with as many rows as the limits allow, all at the end of the longest context.

    One row is a prompt with all the remaining tokens; each row wants logits.
    """
    num_single = min(max_rows, max_tokens) - 1
    count = min(max_tokens - num_single, max_context)
    blocks = [number % _NUM_BLOCKS for number in range(-(-max_context // block_size))]
    single = Row(token_ids=[0], start=max_context - 1, blocks=blocks, num_logits=1)
    prompt = Row(token_ids=[0] * count, start=max_context - count, blocks=blocks, num_logits=1)
    return Batch.of([single] * num_single + [prompt], block_size=block_size)


class _Measured:
    """Capture that reads the free memory after each recording."""

    def __init__(self, capture: Capture, gauge: Gauge) -> None:
        self._capture = capture
        self._gauge = gauge
        self._free = [gauge.free()]

    def __call__(self, step: Step) -> Step:
        replay = self._capture(step)
        self._free.append(self._gauge.free())
        return replay

    def bytes_of(self, num_graphs: int) -> int:
        """Extrapolate from the recordings. The first graph also takes the shared memory and static inputs, each further
        graph only its launches.
        """
        before, first, last = self._free[0], self._free[1], self._free[-1]
        each = max(0, first - last) / max(1, len(self._free) - 2)
        return max(0, before - first) + int(each * (num_graphs - 1))
