"""Capacity of one router: CPU cost per request and per streamed token, and the number of streams that keep their pace.

Three processes: the load, a complete router, and decode replicas that speak the real protocol without computing. CPU
seconds are the router's, over all threads.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.router.clients import TimedStream, open_grpc, open_http
from benchmarks.router.router_side import MAX_RUNNING
from cluster.bench.endpoints import Endpoint, open_endpoint
from core.process.child_process import ChildProcess
from core.process.interpreter import spare_the_old
from core.wire.client_access import EndpointAccess

ENDPOINTS = ("http", "grpc")

_ANSWER_S = 120.0
_ENDLESS = 100_000  # tokens
_OPENED_AT_ONCE = 500  # streams
_PROMPT = range(65, 75)
# Number of letters; each prompt ends with one of them.
_NUM_IDS = 26


@dataclass(frozen=True, kw_only=True)
class RouterLoad:
    """Parameters of the measurement."""

    requests: int = 64
    tokens: int = 64  # per answer
    at_once: int = 16
    # Step time of the replicas during the cost measurement.
    step_s: float = 0.02
    # The best counts: the cost of an undisturbed run.
    rounds: int = 3
    streams: Sequence[int] = (1000, 5000)
    # Total tokens per second of all streams.
    rate: float = 10_000.0
    # Duration of the stream measurement.
    seconds: float = 10.0
    prompt: int = 100_000  # tokens; 0: no long prompt
    # Share of traced requests, to measure the cost of tracing; None: not measured.
    trace_ratio: float | None = None


def bench_router(model_dir: Path, load: RouterLoad, *, profile: Path | None = None) -> dict[str, Any]:
    """Run the benchmark. Returns plain JSON values. profile: file for cProfile statistics of one round over HTTP."""
    return asyncio.run(_measure(model_dir, load, profile))


async def _measure(model_dir: Path, load: RouterLoad, profile: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"costs": {}, "streams": [], "prompts": []}
    async with _started(model_dir, num_replicas=1) as sides:
        sides.worker.ask("set_step", seconds=load.step_s)
        for name in ENDPOINTS:
            async with open_endpoint(sides.endpoint(name), EndpointAccess()) as target:
                found["costs"][name] = await _costs(sides, target, load)
                if load.prompt:
                    found["prompts"].append({"endpoint": name} | await _long_prompt(sides, target, load.prompt))
                if profile and name == "http":
                    sides.router.ask("profile", path="")
                    await _ask_all(target, load, num_tokens=load.tokens)
                    sides.router.ask("profile", path=str(profile))
    if load.trace_ratio is not None:
        found["tracing"] = [await _tracing(model_dir, load, name, load.trace_ratio) for name in ENDPOINTS]
    for number in load.streams:
        for name in ENDPOINTS:
            async with _started(model_dir, num_replicas=-(-number // MAX_RUNNING)) as sides:
                found["streams"].append({"endpoint": name, "streams": number} | await _many(sides, name, number, load))
    return found


@dataclass(frozen=True)
class _Sides:
    router: ChildProcess
    worker: ChildProcess
    ports: dict[str, int]

    def endpoint(self, target: str) -> str:
        return f"{'http://' if target == 'http' else ''}127.0.0.1:{self.ports[target]}"


@asynccontextmanager
async def _started(model_dir: Path, *, num_replicas: int, trace_ratio: float | None = None) -> AsyncIterator[_Sides]:
    worker = ChildProcess("benchmarks.router.worker_side", answer_s=_ANSWER_S)
    try:
        router = ChildProcess("benchmarks.router.router_side", str(model_dir), answer_s=_ANSWER_S)
        try:
            traced = {} if trace_ratio is None else {"collector": worker.ask("collect"), "ratio": trace_ratio}
            workers = worker.ask("serve", number=num_replicas)
            yield _Sides(router, worker, router.ask("serve", workers=workers, **traced))
        finally:
            router.close()
    finally:
        worker.close()


async def _costs(sides: _Sides, target: Endpoint, load: RouterLoad) -> dict[str, Any]:
    """Measure the cost of a request by one-token answers, and the cost of a token by what longer answers add."""
    # Warm up.
    await _ask_all(target, load, num_tokens=4)
    rows = []
    for _ in range(load.rounds):
        used = []
        for num_tokens in (1, load.tokens):
            before = sides.router.ask("processor_s")
            await _ask_all(target, load, num_tokens=num_tokens)
            used.append(sides.router.ask("processor_s") - before)
        rows.append((used[0] / load.requests, (used[1] - used[0]) / (load.requests * (load.tokens - 1))))
    per_request_s, per_token_s = (min(column) for column in zip(*rows, strict=True))
    return {
        "request_ms": round(1e3 * per_request_s, 3),
        "token_ms": round(1e3 * per_token_s, 4),
        "requests_per_core_s": round(1 / per_request_s),
    }


async def _tracing(model_dir: Path, load: RouterLoad, name: str, ratio: float) -> dict[str, Any]:
    """Run the same load on two routers in turns, one of which traces. Returns CPU times per request.

    Includes the export of spans. `costs` is the median over pairs of rounds of their ratio minus 1.
    """
    async with (
        _started(model_dir, num_replicas=1) as without,
        _started(model_dir, num_replicas=1, trace_ratio=ratio) as traced,
        open_endpoint(without.endpoint(name), EndpointAccess()) as plain_endpoint,
        open_endpoint(traced.endpoint(name), EndpointAccess()) as traced_endpoint,
    ):
        sides = [(without, plain_endpoint), (traced, traced_endpoint)]
        for side, target in sides:
            side.worker.ask("set_step", seconds=load.step_s)
            # Warm up.
            await _ask_all(target, load, num_tokens=4)
        rows = []
        for number in range(load.rounds):
            used = {}
            for side, target in sides if number % 2 else reversed(sides):
                before = side.router.ask("processor_s")
                await _ask_all(target, load, num_tokens=load.tokens)
                side.router.ask("flush")
                used[side is traced] = (side.router.ask("processor_s") - before) / load.requests
            rows.append((used[False], used[True]))
    return {
        "endpoint": name,
        "ratio": ratio,
        "request_ms": {
            "without": round(1e3 * min(row[0] for row in rows), 3),
            "traced": round(1e3 * min(row[1] for row in rows), 3),
        },
        "costs": round(statistics.median(with_it / without_it - 1 for without_it, with_it in rows), 4),
    }


async def _long_prompt(sides: _Sides, target: Endpoint, num_tokens: int) -> dict[str, Any]:
    """Measure three different prompts in sequence. Returns the median."""
    used = []
    for seed in range(3):
        ids = random.Random(seed).choices(range(65, 65 + _NUM_IDS), k=num_tokens)
        before = sides.router.ask("processor_s")
        async for _ in target.ask(ids, max_tokens=1, timeout_s=_ANSWER_S):
            pass
        used.append(sides.router.ask("processor_s") - before)
    return {"tokens": num_tokens, "processor_ms": round(1e3 * statistics.median(used), 1)}


async def _many(sides: _Sides, target: str, number: int, load: RouterLoad) -> dict[str, Any]:
    """Measure concurrent streams, none of which starts or ends meanwhile."""
    step_s = number / load.rate
    sides.worker.ask("set_step", seconds=step_s)
    bytes_before = sides.router.ask("memory_bytes")
    prompts = [[*_PROMPT, 65 + i % _NUM_IDS] for i in range(number)]
    ask = {"http": open_http, "grpc": open_grpc}[target]
    streams: list[TimedStream] = []
    # An endpoint rejects too many at once.
    for first in range(0, number, _OPENED_AT_ONCE):
        streams += await ask(sides.ports[target], prompts[first : first + _OPENED_AT_ONCE], num_tokens=_ENDLESS)
        await asyncio.gather(*(stream.begun for stream in streams[first:]))
    # Freeze this process's garbage collector, whose pauses would look like token delays.
    spare_the_old()
    bytes_with = sides.router.ask("memory_bytes")
    await asyncio.sleep(step_s)
    for stream in streams:
        stream.gaps_s.clear()
    began, used, totals = time.perf_counter(), sides.router.ask("processor_s"), sides.worker.ask("totals")
    await asyncio.sleep(load.seconds)
    wall_s, used_s = time.perf_counter() - began, sides.router.ask("processor_s") - used
    later = sides.worker.ask("totals")
    num_come = later["tokens"] - totals["tokens"]
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    sides.router.close()
    # The streams are cut off.
    await asyncio.gather(*(stream.ended for stream in streams), return_exceptions=True)
    beyond = sorted(1e3 * (gap - step_s) for gap in gaps)
    return {
        "step_ms": round(1e3 * step_s),
        "tokens_per_s": round(num_come / wall_s),
        "processor_share": round(used_s / wall_s, 3),
        "token_ms": round(1e3 * used_s / num_come, 4),
        "tokens_per_core_s": round(num_come / used_s),
        "beyond_pace_ms": {
            "p50": round(beyond[len(beyond) // 2], 1),
            "p99": round(beyond[len(beyond) * 99 // 100], 1),
            "max": round(beyond[-1], 1),
        },
        "worker_late_ms": round(later["latest_ms"], 1),
        "memory_kib_per_stream": round((bytes_with - bytes_before) / number / 1024, 1),
    }


async def _ask_all(target: Endpoint, load: RouterLoad, *, num_tokens: int) -> None:
    room = asyncio.Semaphore(load.at_once)

    async def ask(number: int) -> None:
        async with room:
            prompt = [*_PROMPT, 65 + number % _NUM_IDS]
            items = [item async for item in target.ask(prompt, max_tokens=num_tokens, timeout_s=_ANSWER_S)]
        assert sum(item for item in items if isinstance(item, int)) == num_tokens

    async with asyncio.TaskGroup() as group:
        for number in range(load.requests):
            group.create_task(ask(number))
