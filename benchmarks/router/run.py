"""What one router carries: what a request, and a streamed token, cost it, and how many streams it keeps at their pace.

Three processes: the load; a router, with all that is on a token's way in it; and decode replicas that speak the real
protocol and compute nothing. Seconds of processor are the router's, of all its threads.
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
from core.process.gc_tuning import spare_the_old
from core.wire.client_access import EndpointAccess

ENDPOINTS = ("http", "grpc")

_ANSWER_S = 120.0
_ENDLESS = 100_000  # tokens
_OPENED_AT_ONCE = 500  # streams
_PROMPT = range(65, 75)
_NUM_IDS = 26  # letters, one of which ends each prompt


@dataclass(frozen=True, kw_only=True)
class RouterLoad:
    """What is measured."""

    requests: int = 64
    tokens: int = 64  # of an answer
    at_once: int = 16
    step_s: float = 0.02  # of the replicas, while that is measured
    rounds: int = 3  # the best counts: what it costs where nothing disturbs it
    streams: Sequence[int] = (1000, 5000)
    rate: float = 10_000.0  # tokens a second of all streams
    seconds: float = 10.0  # that they are looked at
    prompt: int = 100_000  # tokens; 0: none so long
    trace_ratio: float | None = None  # of requests that are traced, to see what that costs; None: that is not measured


def bench_router(model_dir: Path, load: RouterLoad, *, profile: Path | None = None) -> dict[str, Any]:
    """Plain JSON values. profile: where cProfile's statistics of one round over HTTP go."""
    return asyncio.run(_measure(model_dir, load, profile))


async def _measure(model_dir: Path, load: RouterLoad, profile: Path | None) -> dict[str, Any]:
    found: dict[str, Any] = {"costs": {}, "streams": [], "prompts": []}
    async with _started(model_dir, num_replicas=1) as sides:
        sides.worker.ask("set_step", seconds=load.step_s)
        for name in ENDPOINTS:
            async with open_endpoint(sides.endpoint(name), EndpointAccess()) as target:
                found["costs"][name] = await _costs(sides, target, load)
                if load.prompt:
                    found["prompts"].append({"door": name} | await _long_prompt(sides, target, load.prompt))
                if profile and name == "http":
                    sides.router.ask("profile", path="")
                    await _ask_all(target, load, num_tokens=load.tokens)
                    sides.router.ask("profile", path=str(profile))
    if load.trace_ratio is not None:
        found["tracing"] = [await _tracing(model_dir, load, name, load.trace_ratio) for name in ENDPOINTS]
    for number in load.streams:
        for name in ENDPOINTS:
            async with _started(model_dir, num_replicas=-(-number // MAX_RUNNING)) as sides:
                found["streams"].append({"door": name, "streams": number} | await _many(sides, name, number, load))
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
    """What a request costs is measured with answers of one token, a token with what longer ones take beyond that."""
    await _ask_all(target, load, num_tokens=4)  # to get warm
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
    """The same load on two routers in turns, of which one traces; seconds of processor of whole requests, with what is
    sent. Of each pair of rounds the quotient; of these the median."""
    async with (
        _started(model_dir, num_replicas=1) as without,
        _started(model_dir, num_replicas=1, trace_ratio=ratio) as traced,
        open_endpoint(without.endpoint(name), EndpointAccess()) as plain_endpoint,
        open_endpoint(traced.endpoint(name), EndpointAccess()) as traced_endpoint,
    ):
        sides = [(without, plain_endpoint), (traced, traced_endpoint)]
        for side, target in sides:
            side.worker.ask("set_step", seconds=load.step_s)
            await _ask_all(target, load, num_tokens=4)  # to get warm
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
        "door": name,
        "ratio": ratio,
        "request_ms": {
            "without": round(1e3 * min(row[0] for row in rows), 3),
            "traced": round(1e3 * min(row[1] for row in rows), 3),
        },
        "costs": round(statistics.median(with_it / without_it - 1 for without_it, with_it in rows), 4),
    }


async def _long_prompt(sides: _Sides, target: Endpoint, num_tokens: int) -> dict[str, Any]:
    """Three different ones, one after the other; the median."""
    used = []
    for seed in range(3):
        ids = random.Random(seed).choices(range(65, 65 + _NUM_IDS), k=num_tokens)
        before = sides.router.ask("processor_s")
        async for _ in target.ask(ids, max_tokens=1, timeout_s=_ANSWER_S):
            pass
        used.append(sides.router.ask("processor_s") - before)
    return {"tokens": num_tokens, "processor_ms": round(1e3 * statistics.median(used), 1)}


async def _many(sides: _Sides, target: str, number: int, load: RouterLoad) -> dict[str, Any]:
    """Answers that all run at the same time, and none of which begins or ends meanwhile."""
    step_s = number / load.rate
    sides.worker.ask("set_step", seconds=step_s)
    bytes_before = sides.router.ask("memory_bytes")
    prompts = [[*_PROMPT, 65 + i % _NUM_IDS] for i in range(number)]
    ask = {"http": open_http, "grpc": open_grpc}[target]
    streams: list[TimedStream] = []
    for first in range(0, number, _OPENED_AT_ONCE):  # a door refuses what is too much at once
        streams += await ask(sides.ports[target], prompts[first : first + _OPENED_AT_ONCE], num_tokens=_ENDLESS)
        await asyncio.gather(*(stream.begun for stream in streams[first:]))
    spare_the_old()  # of this process, or its own looks for garbage would seem to be tokens' lateness
    bytes_with = sides.router.ask("memory_bytes")
    await asyncio.sleep(step_s)
    for stream in streams:
        stream.gaps_s.clear()
    began, used, told = time.perf_counter(), sides.router.ask("processor_s"), sides.worker.ask("told")
    await asyncio.sleep(load.seconds)
    wall_s, used_s = time.perf_counter() - began, sides.router.ask("processor_s") - used
    later = sides.worker.ask("told")
    num_come = later["tokens"] - told["tokens"]
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    sides.router.close()
    await asyncio.gather(*(stream.ended for stream in streams), return_exceptions=True)  # they are cut off
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
