"""What mutual TLS between processes costs: `python -m tests.benchmarks.mtls`. For a quiet machine.

Two processes: a router's side, which measures, and a worker's, with two ports, one in clear and one behind the guard.
Both are asked in turn, so that the machine's swings hit both: for a unary call, for frames as the step loop of a busy
replica sends them, and for a new connection with its first call. Seconds of processor are those of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from core.identity.credentials import Certificate, Identity, TlsCredentials
from core.process.child_process import ChildProcess
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.wire.channel import open_channel
from core.wire.frame_client import follow_frames
from tests.support.identities import rank, router

WORKER, ROUTER = rank("decode-0"), router()
_WAYS = ("clear", "mTLS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=500, help="unary, of a round")
    parser.add_argument("--frames", type=int, default=2000, help="of a round")
    parser.add_argument("--streams", type=int, default=32, help="tokens of a frame, one of each stream")
    parser.add_argument("--connections", type=int, default=20, help="of a round")
    options = parser.parse_args()
    asyncio.run(_measure(options))


async def _measure(options: argparse.Namespace) -> None:
    far = ChildProcess("tests.benchmarks.mtls_worker", answer_s=60.0)
    ports = far.ask("serve", streams=options.streams)
    identities = {"clear": Identity(ROUTER, None), "mTLS": Identity(ROUTER, _tls_credentials(far.ask("papers")))}
    channels = {way: open_channel(ports[way][0], peer=WORKER, identity=identities[way]) for way in _WAYS}
    found: dict[str, dict[str, list[float]]] = {}

    async def take(what: str, way: str, work: Callable[[], Awaitable[list[float]]]) -> None:
        before = time.process_time() + far.ask("processor_s")
        times = await work()
        used = (time.process_time() + far.ask("processor_s") - before) / len(times)
        found.setdefault(what, {}).setdefault(way, []).extend(times)
        found.setdefault(f"{what}, processor", {}).setdefault(way, []).append(used)

    for turn in range(options.rounds + 1):
        if turn == 1:
            found.clear()  # the first round was to get warm
        for way in _WAYS if turn % 2 else reversed(_WAYS):
            channel, identity, (port, frames_port) = channels[way], identities[way], ports[way]
            await take("unary call", way, lambda channel=channel: _calls(channel, options.calls))
            await take(
                "frame", way, lambda identity=identity, port=frames_port: _frames(port, identity, options.frames)
            )
            await take(
                "connection and first call",
                way,
                lambda identity=identity, port=port: _connections(port, identity, options.connections),
            )
    await asyncio.gather(*(channel.close() for channel in channels.values()))
    far.close()
    _show(found, options)


async def _calls(channel: Any, count: int) -> list[float]:
    stub, request = rpc.DecodeWorkerStub(channel), pb.StopRequest(router=ROUTER.router, streams=[1])
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        await stub.Stop(request)
        times.append(time.perf_counter() - begin)
    return times


async def _frames(port: str, identity: Identity, count: int) -> list[float]:
    """As fast as they come: each time is the mean of all."""
    done, begin = asyncio.Event(), 0.0

    def take(frame: pb.Frame) -> None:
        nonlocal begin
        if not frame.number:
            begin = time.perf_counter()
        elif frame.number == count:
            done.set()

    following = asyncio.ensure_future(follow_frames(port, peer=WORKER, identity=identity, take=take))
    await done.wait()
    seconds = time.perf_counter() - begin
    following.cancel()
    return [seconds / count] * count


async def _connections(port: str, identity: Identity, count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        async with open_channel(port, peer=WORKER, identity=identity) as channel:
            await rpc.DecodeWorkerStub(channel).Stop(pb.StopRequest(router=ROUTER.router))
            times.append(time.perf_counter() - begin)
    return times


def _tls_credentials(told: dict[str, Any]) -> TlsCredentials:
    certificate = Certificate(
        chain=told["chain"].encode(), authorities=told["authorities"].encode(), life_s=told["life_s"]
    )
    return TlsCredentials(certificate=certificate, key=told["key"].encode())


def _show(found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> None:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    print(f"{names[0].partition(': ')[2] if names else 'unknown processor'}, {len(names)} threads")
    print(f"{options.rounds} rounds, in turn; a frame has {options.streams} tokens; µs, median (and 95 % of all below)")
    for what, times in found.items():
        clear, tls = (statistics.median(times[way]) * 1e6 for way in _WAYS)
        high = [statistics.quantiles(times[way], n=20)[-1] * 1e6 for way in _WAYS]
        print(
            f"{what:<38} clear {clear:8.1f} ({high[0]:8.1f})   mTLS {tls:8.1f} ({high[1]:8.1f})   {tls - clear:+8.1f}"
            f" {(tls / clear - 1) * 100:+6.1f} %"
        )


if __name__ == "__main__":
    main()
