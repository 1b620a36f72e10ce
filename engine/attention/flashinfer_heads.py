"""Attention of steps with prompts by FlashInfer (`pip install flashinfer-python`), if installed and faster.

Ye et al. 2025, arXiv:2501.01005. Its layout HND, (blocks, 2, heads, block size, head_dim), is our pool's layout.
FlashInfer computes all rows of steps with a prompt, for pools in the queries' dtype, plain attention and supported head
sizes. Our kernels store the KV and compute the other layers. Not yet run on a GPU here: tests use a stand-in with its
signatures.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.attention.heads import Heads
from engine.attention.layer_attention import LayerAttention
from engine.attention.triton_heads import KernelHeads
from engine.batch.batch import Batch
from engine.batch.device_batch import DeviceBatch, upload
from engine.batch.rows import Row
from engine.kv.pool import KVPool
from engine.runner import streams

logger = logging.getLogger(__name__)

# T tokens, R rows, H query heads of this rank, D head_dim

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
# As FlashInfer's documentation recommends.
_WORKSPACE_BYTES = 128 << 20
# Steps whose plans are kept: a plan is copied to the device only when the device reaches it.
_NUM_PLANS = 2
# Minimum speedup for switching to another implementation's numerics.
_GAIN = 1.1
_TRIED_TOKENS, _NUM_TRIES = 2048, 5

# Measures one run on the device, in seconds.
Seconds = Callable[[Callable[[], object]], float]


class Wrapper(Protocol):
    """Part of FlashInfer's BatchPrefillWithPagedKVCacheWrapper (0.7.2) that we use."""

    def plan(self, *rows: Tensor | int, causal: bool, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
        """Plan one step.

        rows: offsets of each row's queries and of its pages, (R + 1,) on the host; pages, on the device; tokens in each
        row's last page, (R,) on the host; then number of query heads, of KV heads, head_dim, page size.
        """
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor: ...


class FlashInfer:
    """FlashInfer state that persists across steps. Owned by the step thread."""

    def __init__(self, library: Any, pool: KVPool, *, num_q_heads: int, dtype: torch.dtype) -> None:
        """library: the imported flashinfer module."""
        self._pool = pool
        self._num_q_heads = num_q_heads
        self._dtype = dtype
        self._streams = streams.streams_of(pool.device)
        # Each wrapper with the event after its last plan.
        self._wrappers: deque[tuple[Wrapper, streams.Event]] = deque()
        # Shared: only one step runs at a time.
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        for _ in range(_NUM_PLANS):
            self._wrappers.append((library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND"), self._streams.mark()))

    def heads(self, batch: Batch, kernels: Heads) -> Heads:
        """Return the backend of one step. kernels: our backend, which stores the KV and computes other layers."""
        layout = self._pool.layout
        wrapper, planned = self._wrappers.popleft()
        # Planning overwrites the host memory that the last plan is copied from.
        planned.wait()
        counts_R = -(-batch.context_lens // layout.block_size)
        held_RB = np.arange(batch.block_tables.shape[1]) < counts_R[:, None]
        (pages,) = upload([batch.block_tables[held_RB]], self._pool.device)
        wrapper.plan(
            _begins(batch.query_lens),
            _begins(counts_R),
            pages,
            torch.from_numpy(((batch.context_lens - 1) % layout.block_size + 1).astype(np.int32)),
            *(self._num_q_heads, *layout.heads[0], layout.block_size),
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )
        self._wrappers.append((wrapper, self._streams.mark()))
        return FlashInferHeads(wrapper, self._pool, kernels)


class FlashInferHeads:
    """Implements engine.attention.heads.Heads: FlashInfer for layers of plain attention, our kernels for others."""

    def __init__(self, wrapper: Wrapper, pool: KVPool, kernels: Heads) -> None:
        self._wrapper = wrapper
        self._pool = pool
        self._kernels = kernels

    def store(self, attention: LayerAttention, heads_TND: Tensor) -> Tensor:
        return self._kernels.store(attention, heads_TND)

    def attend(self, attention: LayerAttention, q_THD: Tensor) -> Tensor:
        if not attention.is_plain(q_THD.shape[-1]):
            return self._kernels.attend(attention, q_THD)
        q_THD = q_THD.contiguous()
        return self._wrapper.run(q_THD, self._pool.codes[attention.layer], out=torch.empty_like(q_THD))


def find_flashinfer(
    pool: KVPool,
    *,
    num_q_heads: int,
    dtype: torch.dtype,
    load: Callable[[str], Any] = import_module,
    seconds: Seconds | None = None,
) -> FlashInfer | None:
    """Return FlashInfer, or None if it is not installed, does not support these heads, fails, or is not faster.

    The first call compiles its kernels, which takes a minute or more. Leaves the pool unchanged.
    """
    try:
        library = load("flashinfer")
    except ImportError:
        return None
    try:
        found = FlashInfer(library, pool, num_q_heads=num_q_heads, dtype=dtype)
        ours_s, theirs_s = prompt_seconds(
            found, pool, num_q_heads=num_q_heads, dtype=dtype, seconds=seconds or _device_seconds
        )
    # Any failure of the third-party compiler, libraries or device falls back to our kernels.
    except Exception as error:
        logger.warning("FlashInfer is installed but failed; using own kernels: %s", error)
        return None
    is_quicker = theirs_s * _GAIN <= ours_s
    logger.info(
        "measured prefill attention tokens=%d own_us=%.0f flashinfer_us=%.0f using=%s",
        *(_TRIED_TOKENS, ours_s * 1e6, theirs_s * 1e6, "FlashInfer" if is_quicker else "own kernels"),
    )
    return found if is_quicker else None


def is_possible(pool: KVPool, *, dtype: torch.dtype) -> bool:
    """Return True if FlashInfer supports this pool and dtype."""
    layout = pool.layout
    if len({*layout.heads}) > 1:
        # A plan is for heads of one shape.
        return False
    is_known = dtype in _DTYPES and layout.heads[0].head_dim in _HEAD_DIMS
    return is_known and layout.torch_dtype == dtype and layout.num_sides == 2


def prompt_seconds(
    flashinfer: FlashInfer, pool: KVPool, *, num_q_heads: int, dtype: torch.dtype, seconds: Seconds
) -> tuple[float, float]:
    """Return the seconds of one layer's prompt attention with our kernels and with FlashInfer."""
    layout, device, dim = pool.layout, pool.device, pool.layout.heads[0].head_dim
    num_tokens = min(_TRIED_TOKENS, pool.num_blocks * layout.block_size)
    blocks = list(range(-(-num_tokens // layout.block_size)))
    batch = Batch.of([Row([0] * num_tokens, 0, blocks, num_logits=1)], block_size=layout.block_size)
    q_THD = torch.randn(num_tokens, num_q_heads, dim, dtype=dtype, device=device)
    angles = torch.zeros(num_tokens, 1, dim // 2, dtype=dtype, device=device)
    ours = KernelHeads(DeviceBatch.of(batch, device), pool, [(angles, angles)])
    theirs = flashinfer.heads(batch, ours)
    # Layers with a window may have fewer blocks.
    layer = next(layer for layer in range(layout.num_layers) if not layout.is_windowed(layer))
    attention = LayerAttention(layer=layer, scale=dim**-0.5)
    ours_s, theirs_s = (seconds(partial(heads.attend, attention, q_THD)) for heads in (ours, theirs))
    return ours_s, theirs_s


def _device_seconds(run: Callable[[], object]) -> float:
    """Return the best time of several runs, after a warm-up."""
    run()
    times = []
    for _ in range(_NUM_TRIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1e3)
    return min(times)


def _begins(counts_R: Any) -> Tensor:
    """Return the running totals of `counts_R`, from 0: (R + 1,) int32 on the host."""
    return torch.from_numpy(np.cumsum([0, *counts_R]).astype(np.int32))
