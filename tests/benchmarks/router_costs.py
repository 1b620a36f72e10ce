"""What a request, and a streamed token, cost a router: `python -m tests.benchmarks.router_costs`. For a quiet machine.

Three processes: the load; a router, with all that is on a token's way in it; and a worker that speaks the real protocol
and computes nothing. Seconds of processor are the router's, of all its threads. What a request costs is measured with
answers of one token, what a token costs with what longer ones take beyond that. With --streams, many answers over HTTP
at the same time as well: what the router carries, and how long a client waits for a token beyond the worker's pace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from cluster.bench.doors import Door, open_door
from cluster.process.ordered_process import OrderedProcess
from cluster.wire.door_access import DoorAccess

_PROMPT = list(range(65, 75))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the worker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--doors", default="http,grpc")
    parser.add_argument("--streams", type=int, default=0, help="answers at the same time, over HTTP")
    parser.add_argument("--profile", default="", help="a file for what cProfile saw of one round over HTTP")
    print(json.dumps(asyncio.run(_measure(parser.parse_args())), indent=1))


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    worker = OrderedProcess("tests.benchmarks.router_worker", answer_s=60.0)
    router = OrderedProcess("tests.benchmarks.router_process", answer_s=60.0)
    ports = router.ask("serve", worker=worker.ask("serve"))
    worker.ask("set_step", seconds=options.step_ms / 1e3)
    found: dict[str, Any] = {}
    for name in options.doors.split(","):
        endpoint = f"{'http://' if name == 'http' else ''}127.0.0.1:{ports[name]}"
        async with open_door(endpoint, DoorAccess()) as door:
            await _load(door, options, num_tokens=4)  # to get warm
            rows = []
            for _ in range(options.rounds):
                begin, used = time.perf_counter(), []
                for num_tokens in (1, options.tokens):
                    before = router.ask("processor_s")
                    await _load(door, options, num_tokens=num_tokens)
                    used.append(router.ask("processor_s") - before)
                per_token_s = (used[1] - used[0]) / (options.requests * (options.tokens - 1))
                rows.append((used[0] / options.requests, per_token_s, time.perf_counter() - begin))
            per_request_s, per_token_s, wall_s = (statistics.median(column) for column in zip(*rows, strict=True))
            found[name] = {
                "request_ms": round(1e3 * per_request_s, 3),
                "token_ms": round(1e3 * per_token_s, 4),
                "round_s": round(wall_s, 2),
            }
            if options.profile and name == "http":
                router.ask("profile", path="")
                await _load(door, options, num_tokens=options.tokens)
                router.ask("profile", path=options.profile)
    if options.streams:
        found["streams"] = await _many(router, worker, ports["http"], options)
    return found


async def _many(
    router: OrderedProcess, worker: OrderedProcess, port: int, options: argparse.Namespace
) -> dict[str, float]:
    loop, bytes_before = asyncio.get_running_loop(), router.ask("memory_bytes")
    streams = []
    for _ in range(options.streams):
        _, stream = await loop.create_connection(lambda: _Stream(options.tokens), "127.0.0.1", port)
        streams.append(stream)
    await asyncio.gather(*(stream.begun for stream in streams))
    begin, used = time.perf_counter(), router.ask("processor_s")
    bytes_with = router.ask("memory_bytes")
    tokens_before = sum(stream.num_tokens for stream in streams)
    await asyncio.gather(*(stream.ended for stream in streams))
    wall_s, used_s = time.perf_counter() - begin, router.ask("processor_s") - used
    num_tokens = sum(stream.num_tokens for stream in streams) - tokens_before
    beyond = sorted(1e3 * gap - options.step_ms for stream in streams for gap in stream.gaps_s)
    return {
        "tokens_per_s": round(num_tokens / wall_s),
        "processor_share": round(used_s / wall_s, 3),
        "token_ms": round(1e3 * used_s / num_tokens, 4),
        "beyond_pace_ms_p50": round(beyond[len(beyond) // 2], 1),
        "beyond_pace_ms_p99": round(beyond[len(beyond) * 99 // 100], 1),
        "beyond_pace_ms_max": round(beyond[-1], 1),
        "memory_kib_per_stream": round((bytes_with - bytes_before) / options.streams / 1024, 1),
    }


class _Stream(asyncio.Protocol):
    """A client that costs little: it counts events, and does not look into them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = 0
        self.gaps_s: list[float] = []
        self._asked = {"prompt": _PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        self._last = 0.0
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = json.dumps(self._asked | {"stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % len(body) + body)

    def data_received(self, data: bytes) -> None:
        if not (count := data.count(b'"text":')):
            return
        now = time.perf_counter()
        if self._last:
            self.gaps_s.append(now - self._last)
        else:
            self.begun.set_result(None)
        self._last = now
        self.num_tokens += count

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def _load(door: Door, options: argparse.Namespace, *, num_tokens: int) -> None:
    room = asyncio.Semaphore(options.at_once)

    async def ask(number: int) -> None:
        async with room:
            prompt = [*_PROMPT, 65 + number % 26]
            items = [item async for item in door.ask(prompt, max_tokens=num_tokens, timeout_s=60.0)]
        assert sum(item for item in items if isinstance(item, int)) == num_tokens

    async with asyncio.TaskGroup() as group:
        for number in range(options.requests):
            group.create_task(ask(number))


if __name__ == "__main__":
    main()
