"""Measurement of how much of a KV transfer overlaps with prefill, with a real model and two processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import EngineConfig
from engine.runner.runner import ModelRunner
from kvtransfer.links.backends import backend_for
from kvtransfer.profile.near_side import NearSide

_BLOCK_SIZE = 16
_CHUNK = 2048  # prompt tokens in one step, as in a prefill replica
_NUM_TRIES = 2
_NUM_TRIES_ALONE = 5
_AREA_BYTES = 256 << 20  # copies cycle through this much memory to defeat the caches


class ShippedPrompts:
    """Model in this process whose KV is shipped to a pool in the other."""

    def __init__(
        self, near: NearSide, model_dir: Path, *, dtype: str, wire_dtype: str, backend: str, most: int
    ) -> None:
        """most: capacity of each pool in tokens."""
        num_blocks = -(-most // _BLOCK_SIZE) + 1
        config = EngineConfig(model_dir=model_dir, dtype=dtype, block_size=_BLOCK_SIZE, num_blocks=num_blocks)
        self._runner = ModelRunner(config)
        self._sender = near.sender(self._runner.pool, wire_dtype=wire_dtype, backend=backend)

    def measure(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        return [self._measure(num_tokens) for num_tokens in sizes]

    def _measure(self, num_tokens: int) -> dict[str, Any]:
        self._ship_alone(num_tokens)  # warm up: touch all memory
        plain = min(self._compute(num_tokens, lambda batch, layer: None) for _ in range(_NUM_TRIES))
        tries = [self._ship_while_computing(num_tokens) for _ in range(_NUM_TRIES)]
        alone, wire_bytes = min(self._ship_alone(num_tokens) for _ in range(_NUM_TRIES_ALONE))
        prefill = min(prefill for prefill, _ in tries)
        exposed = sorted(exposed for _, exposed in tries)[len(tries) // 2]
        return {
            "tokens": num_tokens,
            "wire_bytes": wire_bytes,
            "transfer_ms": _ms(alone),  # without overlap
            "exposed_ms": _ms(exposed),  # from the end of prefill to the landing
            "hidden_share": round(max(0.0, 1 - exposed / alone), 3),
            "prefill_ms": _ms(prefill),
            "prefill_without_transfer_ms": _ms(plain),
        }

    def _compute(self, num_tokens: int, on_layer: Callable[[Batch, int], None]) -> float:
        """Return the prefill time in seconds."""
        begin = time.monotonic()
        for batch in list(_batches(num_tokens, vocab_size=self._runner.config.vocab_size)):
            self._runner.forward(batch, partial(on_layer, batch))
        return time.monotonic() - begin

    def _ship_while_computing(self, num_tokens: int) -> tuple[float, float]:
        """Return the prefill time and the time from its end to the landing, in seconds."""
        transfer = self._sender.begin(num_tokens)

        def on_layer(batch: Batch, layer: int) -> None:
            transfer.layer_ready(layer, int(batch.positions[0]), int(batch.positions[-1]) + 1)

        begin = time.monotonic()
        seconds = self._compute(num_tokens, on_layer)
        transfer.commit(num_tokens, [1])
        _, landed_at = self._sender.finish(transfer)
        return seconds, landed_at - begin - seconds

    def _ship_alone(self, num_tokens: int) -> tuple[float, int]:
        """Return the time in seconds and the size of a transfer whose KV was computed earlier."""
        transfer = self._sender.begin(num_tokens)
        begin = time.monotonic()
        transfer.all_layers_ready(0, num_tokens)
        transfer.commit(num_tokens, [1])
        shipment, landed_at = self._sender.finish(transfer)
        return landed_at - begin, shipment.wire_bytes


def ship_prompts(
    model_dir: Path, sizes: Sequence[int], *, dtype: str, wire_dtype: str, host_link: str, threads: int
) -> list[dict[str, Any]]:
    """Measure prompts of the given lengths between two processes on the CPU. Raises SpecError."""
    torch.set_num_threads(threads)
    backend = backend_for(torch.device("cpu"), host_link=host_link)
    with NearSide() as near:
        prompts = ShippedPrompts(near, model_dir, dtype=dtype, wire_dtype=wire_dtype, backend=backend, most=max(sizes))
        return prompts.measure(sizes)


def copy_in_memory(*, num_bytes: int, count: int) -> float:
    """Return the seconds that `count` copies of `num_bytes` within memory take with one thread, for comparison."""
    places = max(1, _AREA_BYTES // num_bytes)
    source, target = torch.ones(places, num_bytes, dtype=torch.uint8), torch.ones(places, num_bytes, dtype=torch.uint8)
    begin = time.monotonic()
    for i in range(count):
        target[i % places].copy_(source[i % places])
    return time.monotonic() - begin


def _batches(num_tokens: int, *, vocab_size: int) -> Iterator[Batch]:
    """Yield the chunks of a prompt of random tokens in the pool's first blocks."""
    token_ids = np.random.default_rng(0).integers(0, vocab_size, num_tokens)
    blocks = range(-(-num_tokens // _BLOCK_SIZE))
    for start, end in pairwise([*range(0, num_tokens, _CHUNK), num_tokens]):
        row = Row(
            token_ids=token_ids[start:end].tolist(), start=start, blocks=blocks, num_logits=int(end == num_tokens)
        )
        yield Batch.of([row], block_size=_BLOCK_SIZE)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
