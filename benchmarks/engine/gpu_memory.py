"""GPU memory benchmark: how memory is divided, whether the largest step fits, and what tier transfers cost concurrent
steps.

python -m benchmarks.engine.gpu_memory [memory|tiers|links]
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing as mp
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore

from benchmarks.engine.random_models import SHAPES, RandomCheckpoint
from core.types.request import Sampling
from core.types.tier import Tier
from engine.batch.batch import Batch
from engine.batch.rows import Row
from engine.config import GIB, EngineConfig
from engine.kv.pool import KVPool
from engine.runner.memory_profiling import SAMPLING_BYTES, largest_batch
from engine.runner.runner import ModelRunner
from engine.sampling import sampler
from engine.sampling.params import SamplingRow
from engine.tiers.commands import LoadOrder, LoadResult, LoadSource, Save, TierOrders
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import RankTiers

DEVICE = torch.device("cuda", 0)
SHAPE, MAX_TOKENS, MAX_ROWS, MAX_CONTEXT = "llama-8b", 8192, 256, 32768
HOST_GIB, CHUNK, NUM_MOVED = 4, 2048, 256


def say(label: str, value: object) -> None:
    print(f"{label}: {value}", flush=True)


def free_gib() -> float:
    torch.cuda.synchronize()
    return round(torch.cuda.mem_get_info()[0] / GIB, 2)


def make_runner(**options: Any) -> ModelRunner:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(SHAPES[SHAPE]))
        (directory / "model.safetensors").touch()
        config = EngineConfig(model_dir=directory, device=str(DEVICE), **options)
        return ModelRunner(config, checkpoint=RandomCheckpoint(directory, torch.bfloat16, DEVICE))


def memory() -> None:
    torch.zeros(1, device=DEVICE)
    before, _ = torch.cuda.mem_get_info()
    begin = time.monotonic()
    runner = make_runner(
        max_batch_tokens=MAX_TOKENS,
        max_running=MAX_ROWS,
        max_context=MAX_CONTEXT,
        recorded_rows=MAX_ROWS,
        link_bytes=GIB,
    )
    say("weights, trial step, pool and graphs, s", round(time.monotonic() - begin, 1))
    size, blocks = runner.layout.block_size, runner.pool.num_blocks
    say("pool, GiB", round(blocks * runner.layout.block_bytes / GIB, 2))
    earlier_rule_gib = (before - runner.config.num_parameters * 2) * 0.85 / GIB
    say("pool by the earlier rule, GiB", round(earlier_rule_gib, 2))
    say("free after setup, GiB", free_gib())
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_reserved()
    context = min(MAX_CONTEXT, runner.max_tokens)
    step = largest_batch(max_tokens=MAX_TOKENS, max_rows=MAX_ROWS, max_context=context, block_size=size)
    assert runner.forward(step).isfinite().all()
    say("largest step, additional GiB", round((torch.cuda.max_memory_reserved() - base) / GIB, 2))
    table = list(range(-(-context // size)))
    rows = [Row(token_ids=[1], start=context - 1, blocks=table, num_logits=1)] * MAX_ROWS
    batch = Batch.of(rows, block_size=size)
    logits = runner.forward(batch)
    assert logits.isfinite().all()
    base = torch.cuda.memory_reserved()
    sampling = Sampling(temperature=1.0, top_p=0.99, top_k=runner.config.vocab_size - 1, num_logprobs=5)
    asked = [SamplingRow(sampling=sampling, seed=i, tokens=[1, 2], num_prompt_tokens=2) for i in range(MAX_ROWS)]
    assert None not in sampler.sample(torch.zeros_like(logits), asked).wait()
    say("sampling, bytes per logit", round((torch.cuda.max_memory_reserved() - base) / logits.numel(), 1))
    say("reserved for sampling, bytes per logit", SAMPLING_BYTES)
    say("free at the end, GiB", free_gib())
    begin = time.monotonic()
    for _ in range(3):
        runner.forward(batch)
    torch.cuda.synchronize()
    say(f"replayed decode of {MAX_ROWS} x {context}, ms", round((time.monotonic() - begin) / 3e-3, 2))


class SynchronousTransfers:
    """Earlier tier transfers, as a baseline: on the compute stream, part by part, synchronous."""

    def __init__(self, pool: KVPool, rows: Tensor) -> None:
        self._pool, self._rows = pool, rows

    def save(self, pairs: list[tuple[int, int]]) -> None:
        payloads = self._pool.copy_out([block for block, _ in pairs])
        for (_, place), payload in zip(pairs, payloads, strict=True):
            self._rows[place].copy_(payload)

    def load(self, pairs: list[tuple[int, int]]) -> None:
        for i in range(0, len(pairs), 16):
            some = pairs[i : i + 16]
            payloads = torch.stack([self._rows[place] for _, place in some])
            self._pool.copy_in(payloads, [block for block, _ in some])
            self._pool.synchronize()


class AsyncTransfers:
    def __init__(self, pool: KVPool, host: HostStore) -> None:
        self._has_loaded = threading.Event()
        self._tiers = RankTiers(pool, host=host, disk=None, on_loaded=self._loaded)

    def _loaded(self, result: LoadResult) -> None:
        assert result.num_blocks
        self._has_loaded.set()

    def close(self) -> None:
        self._tiers.close()

    def save(self, pairs: list[tuple[int, int]]) -> None:
        saves = [Save(Tier.HOST, block, place, bytes([place % 256])) for block, place in pairs]
        self._tiers.carry_out(TierOrders(saves=saves))

    def load(self, pairs: list[tuple[int, int]]) -> None:
        sources = [LoadSource(Tier.HOST, place, bytes([place % 256]), block) for block, place in pairs]
        self._has_loaded.clear()
        self._tiers.start_loads(TierOrders(loads=[LoadOrder(1, sources)]))
        assert self._has_loaded.wait(20)


def tiers() -> None:
    runner = make_runner(num_blocks=4096)
    pool, layout = runner.pool, runner.layout
    begin = time.monotonic()
    host = HostStore(num_places=HOST_GIB * GIB // layout.block_bytes, place_bytes=layout.place_bytes, device=DEVICE)
    say(f"locking {HOST_GIB} GiB of memory, s", round(time.monotonic() - begin, 2))
    rows = torch.stack([host.row(place) for place in range(NUM_MOVED)]).pin_memory()
    blocks = list(range(-(-CHUNK // layout.block_size)))
    chunk = Batch.of([Row(token_ids=[1] * CHUNK, start=0, blocks=blocks, num_logits=1)], block_size=layout.block_size)
    moved = [(1000 + i, i) for i in range(NUM_MOVED)]
    mib = NUM_MOVED * layout.block_bytes / 2**20
    new = AsyncTransfers(pool, host)
    ways: dict[str, SynchronousTransfers | AsyncTransfers] = {
        "synchronous": SynchronousTransfers(pool, rows),
        "async": new,
    }

    def step_ms(num: int = 12) -> str:
        taken = []
        for _ in range(num):
            begin = time.monotonic()
            runner.forward(chunk)
            # As the sampler does.
            torch.cuda.current_stream().synchronize()
            taken.append((time.monotonic() - begin) * 1e3)
        taken.sort()
        return f"median {taken[num // 2]:.1f}, most {taken[-1]:.1f}"

    for _ in range(3):
        step_ms(2)
    say(f"a chunk of {CHUNK} alone, ms", step_ms())
    for name, way in ways.items():
        for direction, move in (("save", way.save), ("load", way.load)):
            torch.cuda.synchronize()
            begin = time.monotonic()
            move(moved)
            called = time.monotonic() - begin
            torch.cuda.synchronize()
            taken = time.monotonic() - begin
            say(
                f"{name}: {direction} of {mib:.0f} MiB alone",
                f"{taken * 1e3:.1f} ms, {called * 1e3:.1f} of them in the call",
            )
        beside(name, way.load, moved, step_ms, mib)
        begin = time.monotonic()
        runner.forward(chunk)
        way.save(moved[:64])
        called = time.monotonic() - begin
        runner.forward(chunk)
        torch.cuda.synchronize()
        say(
            f"{name}: chunk, save of 64, chunk, ms",
            f"{(time.monotonic() - begin) * 1e3:.1f}, the second launched after {called * 1e3:.1f}",
        )
    before = pool.copy_out([1000, 1001]).clone()
    new.save(moved[:2])
    pool.copy_in(torch.zeros_like(before), [1000, 1001])
    new.load(moved[:2])
    assert torch.equal(pool.copy_out([1000, 1001]), before)
    new.close()


def beside(
    name: str, load: Callable[[Any], None], moved: list[tuple[int, int]], step_ms: Callable[[], str], mib: float
) -> None:
    has_ended, num = threading.Event(), [0]

    def forever() -> None:
        while not has_ended.is_set():
            load(moved)
            num[0] += 1

    loading = threading.Thread(target=forever)
    loading.start()
    begin = time.monotonic()
    times = step_ms()
    rate = num[0] * mib / 1024 / (time.monotonic() - begin)
    has_ended.set()
    loading.join()
    say(f"{name}: a chunk with concurrent loads, ms", f"{times}; loads {rate:.1f} GiB/s")


def _peer(place: str, is_sender: bool, count: int, ask: Any, tell: Any) -> None:
    from kvtransfer.links.link import LinkEnd, LinkGuard
    from kvtransfer.links.nccl import NcclLink

    os.environ["NCCL_HOSTID"] = str(is_sender)
    torch.zeros(1, device=DEVICE)
    tell.put("up")
    store, links = FileStore(place), []
    for number in range(count):
        ask.get()
        end = LinkEnd(
            store=store,
            prefix=f"link/{number}",
            is_sender=is_sender,
            host="127.0.0.1",
            device=DEVICE,
            timeout_s=20.0,
            guard=LinkGuard(bytes(32)),
        )
        links.append(link := NcclLink(end))
        link.meet()
        payload = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
        (link.send if is_sender else link.recv)(payload).wait(timeout_s=10)
        tell.put("met")
    ask.get()
    os._exit(0)


def links() -> None:
    """Measure the memory of NCCL links with both ends on this GPU.

    NCCL allows that only if the ends claim different hosts, so they use sockets.
    """
    count, context = 4, mp.get_context("spawn")
    torch.zeros(1, device=DEVICE)
    with tempfile.TemporaryDirectory() as name:
        asks, tells = [context.Queue() for _ in range(2)], [context.Queue() for _ in range(2)]
        peers = [
            context.Process(target=_peer, args=(f"{name}/store", bool(i), count, asks[i], tells[i]), daemon=True)
            for i in range(2)
        ]
        for peer in peers:
            peer.start()
        for tell in tells:
            tell.get(timeout=30)
        free = [torch.cuda.mem_get_info()[0]]
        for _ in range(count):
            for ask in asks:
                ask.put("meet")
            for tell in tells:
                tell.get(timeout=30)
            free.append(torch.cuda.mem_get_info()[0])
        say(
            "MiB of a link's end, first and later",
            [round((a - b) / 2**21) for a, b in itertools.pairwise(free)],
        )
        for ask in asks:
            ask.put("end")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with torch.inference_mode(False):
        {"memory": memory, "tiers": tiers, "links": links}[sys.argv[1]]()
