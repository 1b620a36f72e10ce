"""Replicas that join and leave during a router's calls, and the moves that even out their load."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from core.index.membership import Membership
from core.index.redis_client import connect_redis
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.types.errors import ReplicaLost
from core.types.request import FinishReason, SampledToken, SequenceRequest
from core.wire.frames import FrameHub, FrameServer
from router.serving.discovery import Discovery
from router.serving.grpc_worker import GrpcWorker
from router.serving.rebalance import next_move
from router.serving.replicas import Replica, Replicas
from tests.router.serving.fake_worker import FakeCall
from tests.support.identities import in_clear, rank, router
from tests.support.members import make_member
from tests.support.waiting import becomes

_NAME = "here"
_KEY = bytes(32)
_ROUTER = in_clear(router())

M = TypeVar("M", bound=Message)


@asynccontextmanager
async def _serving(hub: FrameHub) -> AsyncIterator[FrameServer]:
    server = FrameServer(hub, in_clear(rank("decode-0")))
    try:
        yield server
    finally:
        await server.close()


async def _until_alive(replicas: Replicas, *, alive: bool) -> None:
    while any(replica.is_alive for replica in replicas) is not alive:
        await replicas.changed(timeout_s=10)


async def _call(replica: Replica) -> None:
    async for _ in replica.worker.prefill(SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1)):
        pass


async def test_calls_to_a_replica_that_has_left_fail_like_any_loss(redis_url: str) -> None:
    redis = connect_redis(redis_url)
    await redis.flushall()
    membership = Membership(redis, name=_NAME, key=_KEY)
    replicas = Replicas(lambda member: GrpcWorker(member, identity=_ROUTER))
    discovery = Discovery(connect_redis(redis_url), replicas, name=_NAME, key=_KEY)
    calls = aio.server()  # a worker of another role: every method is unimplemented
    address = f"127.0.0.1:{calls.add_insecure_port('127.0.0.1:0')}"
    await calls.start()

    async def enter(server: FrameServer) -> Replica:
        frames_address = f"127.0.0.1:{server.start('127.0.0.1')}"
        await membership.renew(make_member("prefill-0", address=address, frames_address=frames_address))
        await becomes(lambda: replicas.get("prefill-0") is not None)
        await _until_alive(replicas, alive=True)
        replica = replicas.get("prefill-0")
        assert replica
        return replica

    discovery.start()
    try:
        async with _serving(FrameHub()) as server:
            replica = await enter(server)
            await membership.leave("prefill-0")
        await _until_alive(replicas, alive=False)
        received: list[Any] = []
        with pytest.raises(ReplicaLost):  # tokens sent before the reconnect would be missing
            replica.subscribe(1, received.append)
        await becomes(lambda: replicas.get("prefill-0") is None)
        with pytest.raises(ReplicaLost):
            await replica.unless_lost(_call(replica))

        async with _serving(FrameHub()) as server:
            back = await enter(server)  # it may return under the same name
            with pytest.raises(ReplicaLost, match="Method not found"):
                await back.unless_lost(_call(back))
            await replicas.close()
    finally:
        await discovery.close()
        await replicas.close()
        await redis.aclose()
        await calls.stop(None)


async def test_an_odd_stream_ends_alone_and_what_a_newer_version_adds_is_ignored() -> None:
    """An unknown finish reason still ends a choice; a malformed stream fails alone."""

    class Newer(FrameHub):
        async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
            yield _with_more(pb.Frame(number=0, status=_with_more(pb.Status(replica="decode-0"))))
            await subscribed.wait()
            token = _with_more(pb.SampledToken(token_id=1, finish_reason="of a newer version"))
            streams = [pb.StreamTokens(stream=stream, tokens=[token]) for stream in (7, 8, 9)]
            yield pb.Frame(number=1, streams=[_with_more(stream) for stream in streams])
            await asyncio.Event().wait()

    subscribed, received_all = asyncio.Event(), asyncio.Event()
    received: dict[int, list[Any]] = {7: [], 8: [], 9: []}

    def take(stream: int, tokens: Any) -> None:
        received[stream].append(tokens)
        if stream == 8 and not isinstance(tokens, ReplicaLost):
            raise ValueError("it cannot be taken")
        if stream == 9:
            received_all.set()

    async with _serving(Newer()) as server:
        replicas = _following(server)
        await _until_alive(replicas, alive=True)
        replica = replicas.get("decode-0")
        assert replica
        for stream in received:
            replica.subscribe(stream, partial(take, stream))
        subscribed.set()
        await asyncio.wait_for(received_all.wait(), 10)
        assert all(token.finish_reason is FinishReason.STOP for stream in (7, 9) for (token,) in received[stream])
        assert isinstance(received[8][-1], ReplicaLost) and len(received[8]) == 2
        assert replica.is_alive and replica.num_subscribed == 2
        await replicas.close()


def _following(server: FrameServer) -> Replicas:
    """Return the replicas of a router that follows only this server."""
    replicas = Replicas(lambda member: GrpcWorker(member, identity=_ROUTER))
    replicas.add(make_member("decode-0", frames_address=f"127.0.0.1:{server.start('127.0.0.1')}"))
    return replicas


def _with_more(message: M) -> M:
    """Add an unknown field, as a newer version may send."""
    field = b"\xfa\x7f\x05later"  # field 2047: length-delimited, five bytes
    return type(message).FromString(message.SerializeToString() + field)


async def test_a_malformed_frame_loses_the_replica_and_the_reader_reconnects() -> None:
    """Otherwise the reader would end while the replica counts as alive and is still chosen."""

    class Garbled(FrameHub):
        async def frames(self, router: str) -> AsyncGenerator[pb.Frame, None]:
            nonlocal num_calls
            num_calls += 1
            yield pb.Frame(number=0, status=pb.Status(replica="decode-0"))
            if num_calls == 1:
                yield pb.Frame(number=5)
            again.set()
            await asyncio.Event().wait()

    num_calls, again = 0, asyncio.Event()
    async with _serving(Garbled()) as server:
        replicas = _following(server)
        while num_calls < 2:
            await asyncio.wait_for(again.wait(), 10)
            again.clear()
        await _until_alive(replicas, alive=True)
        await replicas.close()


async def test_a_router_that_stood_still_reads_received_frames_first() -> None:
    """Otherwise all its replicas would be lost at once, and every stream with them."""

    queue, loop, changed = asyncio.Queue[pb.Frame](), asyncio.get_running_loop(), asyncio.Event()
    is_given_up = False

    async def follow(take: Callable[[pb.Frame], None]) -> None:
        nonlocal is_given_up
        try:
            while True:
                take(await queue.get())
        finally:
            is_given_up = True

    worker: Any = SimpleNamespace(follow=follow, close=partial(asyncio.sleep, 0))
    replica = Replica(make_member(), worker, on_change=changed.set, tasks=Supervisor(), look_s=0.02)
    queue.put_nowait(pb.Frame(number=0, status=pb.Status(replica="decode-0")))
    await changed.wait()
    sent = pb.Frame(number=1, status=pb.Status(replica="decode-0", running=3))
    arrival = threading.Timer(0.1, loop.call_soon_threadsafe, [queue.put_nowait, sent])
    arrival.start()
    arrival.join()
    threading.Event().wait(10 * 0.02)  # longer than the allowed silence
    await becomes(lambda: replica.status.running == 3 or is_given_up)
    assert replica.is_alive and not is_given_up
    await becomes(lambda: is_given_up)  # afterwards it stays silent
    assert not replica.is_alive
    await replica.close()


async def test_plain_tokens_reach_their_streams_and_need_one_each() -> None:
    call, changed, received = FakeCall[pb.Frame](), asyncio.Event(), list[Any]()

    def take(stream: int, tokens: Any) -> None:
        received.append((stream, tokens))

    async def follow(take: Callable[[pb.Frame], None]) -> None:
        async for frame in call:
            take(frame)

    worker: Any = SimpleNamespace(follow=follow, close=partial(asyncio.sleep, 0))
    replica = Replica(make_member(), worker, on_change=changed.set, tasks=Supervisor())
    call.put(pb.Frame(number=0))
    await becomes(lambda: replica.is_alive)
    for stream in (1, 2):
        replica.subscribe(stream, partial(take, stream))
    last = pb.StreamTokens(stream=1, tokens=[pb.SampledToken(token_id=7, finish_reason="stop")])
    call.put(pb.Frame(number=1, plain_streams=[2, 9, 1], plain_token_ids=[5, 5, 6], streams=[last]))
    await becomes(lambda: len(received) == 3)
    assert received == [(2, [SampledToken(5)]), (1, [SampledToken(6)]), (1, [SampledToken(7, None, FinishReason.STOP)])]
    call.put(pb.Frame(number=2, plain_streams=[1, 2], plain_token_ids=[5]))
    await becomes(lambda: not replica.is_alive)
    assert [type(item) for _, item in received[3:]] == [ReplicaLost] * 2, "the token belongs to an unknown stream"
    assert "1 tokens for 2 streams" in str(received[-1][1])
    await replica.close()


def _loads(*counts: int) -> dict[str, int]:
    return {f"decode-{i}": count for i, count in enumerate(counts)}


def test_a_new_replica_gets_streams_from_the_fullest() -> None:
    assert next_move(_loads(3, 8, 0)) == ("decode-1", "decode-2")


def test_small_gaps_cause_no_moves() -> None:
    assert next_move(_loads(8)) is None
    assert next_move(_loads(3, 0)) is None
    assert next_move(_loads(100, 80)) is None


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 3))
def test_rebalancing_terminates_and_evens_out_the_load(counts: list[int], num_routers: int) -> None:
    """Holds also if several routers see the same load and each moves one stream."""
    loads, num_moves = _loads(*counts), 0
    while move := next_move(loads):
        source, target = move
        loads[source] -= num_routers
        loads[target] += num_routers
        num_moves += 1
        assert num_moves <= sum(counts)
    final = loads.values()
    assert sum(final) == sum(counts) and min(final) >= 0
    assert max(final) - min(final) < max(4, 0.25 * max(final))
