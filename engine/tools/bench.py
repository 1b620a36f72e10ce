"""The engine alone, in process: tokens per second of decode steps and of prompts, beside the memory's bandwidth.

`bandwidth_share` of a decode step is what reading every weight once would take at that bandwidth, over what it took.

Random token ids, greedy, no end of sequence, no prefix cache, the best of three. What a decode step costs beyond the
model counts too: making the batch, sampling, the sequences' own bookkeeping.

On a GPU decode steps are replayed (engine/decode_graphs.py); `plain_step_ms` is that step launched kernel by kernel.

    cluster bench engine --json
    python -m engine.tools.bench DIRECTORY      where the command line's packages are not installed
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.words.errors import SpecError
from cluster.words.request import Sampling, SequenceRequest
from engine.batch.batch import Batch
from engine.kv.block_manager import BlockManager
from engine.load import device_for, load_runner
from engine.model.transformer import OnLayer
from engine.parallel import TensorParallel
from engine.runner import GIB, ModelRunner, layout_for
from engine.sampler import SamplingRow, sample
from engine.sequence import Sequence

_NUM_STEPS = 128  # of one decode measurement
_NUM_TRIES = 3  # the best counts
_CHUNK = 2048  # prompt tokens in one step, as in a prefill replica
_BLOCK_SIZE = 16
_READ_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}  # for the bandwidth: far beyond any cache


def bench_engine(
    model_dir: Path,
    *,
    dtype: str,
    weights: str,
    pool_dtype: str,
    batches: Seq[int],
    contexts: Seq[int],
    prefills: Seq[int],
    threads: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Measure; returns plain JSON values. threads: of a CPU, None for all processors. Raises SpecError."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecError("cluster bench engine: this machine has no CUDA device that torch can use")
    if threads is not None:
        torch.set_num_threads(threads)
    layout = layout_for(model_dir, dtype=dtype, weights=weights, pool_dtype=pool_dtype, block_size=_BLOCK_SIZE)
    most_tokens = max(
        (n * _blocks_for(tokens + extra) for n, tokens, extra in _needs(batches, contexts, prefills)), default=1
    )
    runner = load_runner(
        model_dir,
        dtype=dtype,
        weights=weights,
        pool_dtype=pool_dtype,
        block_size=_BLOCK_SIZE,
        kv_memory_gib=(most_tokens + 1) * _BLOCK_SIZE * layout.bytes_per_token() / GIB,
        parallel=TensorParallel(),
        replayed_rows=max(batches, default=0),
        device=device,
        progress=lambda fraction: None,
    )
    decodes = [_decode(runner, batch, context) for context, batch in product(contexts, batches)]
    bandwidth, weight_bytes = read_bandwidth(device), _weight_bytes(runner, weights)
    for row in decodes:
        row["bandwidth_share"] = weight_bytes and round(weight_bytes / (row["step_ms"] / 1e3) / bandwidth, 3)
    return {
        "decode": decodes,
        "prefill": [_prefill(runner, num_tokens) for num_tokens in prefills],
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "model": model_dir.name,
        "dtype": dtype,
        "weights": weights,
        "pool_dtype": layout.dtype,
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which a device reads its memory; a CPU with this process's compute threads."""
    num_bytes = _READ_BYTES[device.type]
    data = torch.ones(num_bytes // 4, device=device)
    return num_bytes / min(_timed(lambda: data.sum().item()) for _ in range(5))


def _weight_bytes(runner: ModelRunner, weights: str) -> int | None:
    """What a step reads of the weights; None where that depends on the rows or on the checkpoint's format."""
    config = runner.config
    if config.experts is not None or weights == "quantized":
        return None
    num_read = config.num_parameters
    if not config.tie_embeddings:
        num_read -= config.vocab_size * config.hidden_size
    return num_read * (1 if weights == "int8" else runner.dtype.itemsize)


def _needs(batches: Seq[int], contexts: Seq[int], prefills: Seq[int]) -> Iterable[tuple[int, int, int]]:
    """(sequences, tokens of each, tokens that each adds)"""
    yield from ((batch, context, _NUM_STEPS + 1) for batch, context in product(batches, contexts))
    yield from ((1, num_tokens, 1) for num_tokens in prefills)


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _decode(runner: ModelRunner, batch: int, context: int) -> dict[str, Any]:
    def run(on_layer: OnLayer | None = None) -> float:
        blocks = BlockManager(runner.pool.num_blocks)
        sequences = [make_sequence(runner, blocks, context, seed) for seed in range(batch)]
        for sequence in sequences:
            take_step(runner, blocks, [sequence], [len(sequence.tokens)])
        ones = [1] * batch
        take_step(runner, blocks, sequences, ones, on_layer)
        return _timed(lambda: [take_step(runner, blocks, sequences, ones, on_layer) for _ in range(_NUM_STEPS)])

    seconds = min(run() for _ in range(_NUM_TRIES))
    row = {
        "batch": batch,
        "context": context,
        "tokens_per_s": round(batch * _NUM_STEPS / seconds, 1),
        "step_ms": round(seconds / _NUM_STEPS * 1e3, 3),
    }
    if runner.device.type == "cuda":  # a step whose layers somebody wants to hear of is not replayed
        plain_s = min(run(on_layer=lambda layer: None) for _ in range(_NUM_TRIES))
        row["plain_step_ms"] = round(plain_s / _NUM_STEPS * 1e3, 3)
    return row


def _prefill(runner: ModelRunner, num_tokens: int) -> dict[str, Any]:
    def run() -> float:
        blocks = BlockManager(runner.pool.num_blocks)
        sequence = make_sequence(runner, blocks, num_tokens, 0)
        cuts = [*range(0, num_tokens, _CHUNK), num_tokens]
        return _timed(lambda: [take_step(runner, blocks, [sequence], [end - start]) for start, end in pairwise(cuts)])

    run()  # the first pass meets memory that was never touched
    seconds = min(run() for _ in range(_NUM_TRIES))
    return {"tokens": num_tokens, "tokens_per_s": round(num_tokens / seconds, 1)}


def make_sequence(runner: ModelRunner, blocks: BlockManager, num_tokens: int, seed: int) -> Sequence:
    """A prompt of random tokens, with blocks for it and for the steps of one measurement."""
    token_ids = tuple(np.random.default_rng(seed).integers(0, runner.config.vocab_size, num_tokens).tolist())
    sampling = Sampling(temperature=0.0, max_tokens=_NUM_STEPS + 2)
    request = SequenceRequest(id=str(seed), token_ids=token_ids, num_prompt_tokens=num_tokens, sampling=sampling)
    layout, limit = runner.layout, num_tokens + _NUM_STEPS + 3
    sequence = Sequence(request, 0, model=layout.model, block_size=layout.block_size, max_context=limit)
    taken = blocks.allocate([], min(runner.pool.num_blocks, sequence.num_blocks_for(num_tokens + _NUM_STEPS + 1)))
    assert taken is not None
    sequence.blocks = taken[0]
    return sequence


def take_step(
    runner: ModelRunner,
    blocks: BlockManager,
    sequences: Seq[Sequence],
    counts: Seq[int],
    on_layer: OnLayer | None = None,
) -> None:
    """One step, as a worker takes it."""
    rows = [sequence.row(count) for sequence, count in zip(sequences, counts, strict=True)]
    logits = runner.forward(Batch.of(rows, block_size=runner.layout.block_size), on_layer)
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.computed(count, blocks)
    ready = [sequence for sequence, row in zip(sequences, rows, strict=True) if row.wants_logits]
    sampled = sample(logits, [SamplingRow.of(sequence) for sequence in ready]) if ready else []
    for sequence, token in zip(ready, sampled, strict=True):
        sequence.append(*token)


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    def counts(text: str) -> list[int]:
        return [int(count) for count in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m engine.tools.bench", description="One JSON object on stdout.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batches", "--batch", type=counts, default=[1, 8, 32])
    parser.add_argument("--contexts", "--context", type=counts, default=[128])
    parser.add_argument("--prefills", "--prefill", type=counts, default=[512, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", default="as_stored")
    parser.add_argument("--pool-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu", action="store_true")
    options = vars(parser.parse_args())
    device = device_for(gpus=options.pop("gpu"))
    print(json.dumps(bench_engine(options.pop("model_dir"), device=device, **options)))


if __name__ == "__main__":
    main()
