"""The replicas as a router sees them, where they come and go under calls of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from google.protobuf.message import Message
from grpc import aio

from core.index.membership import Membership
from core.index.redis_client import connect_redis
from core.process.ports import free_port
from core.process.supervisor import Supervisor
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ReplicaLost
from core.types.request import FinishReason, SampledToken, SequenceRequest
from router.serving.discovery import Discovery
from router.serving.grpc_worker import GrpcWorker
from router.serving.replica import Replica
from router.serving.replicas import Replicas
from tests.router.serving.fake_worker import FakeCall
from tests.support.identities import in_clear, router
from tests.support.members import make_member
from tests.support.waiting import becomes

_NAME = "here"
_KEY = bytes(32)
_ROUTER = in_clear(router())

M = TypeVar("M", bound=Message)


class _Worker(rpc.WorkerServicer):
    async def Frames(self, request: pb.FramesRequest, context: Any) -> AsyncIterator[pb.Frame]:
        yield pb.Frame(status=pb.Status(replica="prefill-0"))
        await asyncio.Event().wait()


async def _serve(port: int) -> aio.Server:
    server = aio.server()
    server.add_insecure_port(f"127.0.0.1:{port}")
    rpc.add_WorkerServicer_to_server(_Worker(), server)
    await server.start()
    return server


async def _until_alive(replicas: Replicas, *, alive: bool) -> None:
    while any(replica.is_alive for replica in replicas) is not alive:
        await replicas.changed(timeout_s=10)


async def _call(replica: Replica) -> None:
    async for _ in replica.worker.prefill(SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1)):
        pass


async def test_who_still_calls_a_replica_that_has_left_loses_it_like_any_other(redis_url: str) -> None:
    port = free_port()
    worker = await _serve(port)
    member = make_member("prefill-0", address=f"127.0.0.1:{port}")
    redis = connect_redis(redis_url)
    await redis.flushall()
    membership = Membership(redis, name=_NAME, key=_KEY)
    await membership.renew(member)
    replicas = Replicas(lambda member: GrpcWorker(member.replica, member.address, identity=_ROUTER))
    discovery = Discovery(connect_redis(redis_url), replicas, name=_NAME, key=_KEY)
    discovery.start()
    try:
        await _until_alive(replicas, alive=True)
        replica = replicas.get("prefill-0")
        assert replica
        await membership.leave("prefill-0")
        await worker.stop(None)
        await _until_alive(replicas, alive=False)
        heard: list[Any] = []
        with pytest.raises(ReplicaLost):  # what it says before it is back would be missing
            replica.subscribe(1, heard.append)
        await becomes(lambda: replicas.get("prefill-0") is None)
        with pytest.raises(ReplicaLost):
            await replica.unless_lost(_call(replica))

        worker = await _serve(port)
        await membership.renew(member)  # it may come back under its name
        await _until_alive(replicas, alive=True)
        back = replicas.get("prefill-0")
        assert back
        with pytest.raises(ReplicaLost, match="Method not found"):
            await back.unless_lost(_call(back))
    finally:
        await discovery.close()
        await replicas.close()
        await redis.aclose()
        await worker.stop(None)


async def test_one_odd_stream_in_a_frame_ends_alone_and_what_a_newer_version_adds_is_passed_over() -> None:
    """A reason for an end that we do not know is an end; a stream that cannot be taken costs itself only."""

    class Newer(rpc.WorkerServicer):
        async def Frames(self, request: pb.FramesRequest, context: Any) -> AsyncIterator[pb.Frame]:
            yield _with_more(pb.Frame(number=0, status=_with_more(pb.Status(replica="decode-0"))))
            await subscribed.wait()
            token = _with_more(pb.SampledToken(token_id=1, finish_reason="of a newer version"))
            streams = [pb.StreamTokens(stream=stream, tokens=[token]) for stream in (7, 8, 9)]
            yield pb.Frame(number=1, streams=[_with_more(stream) for stream in streams])
            await asyncio.Event().wait()

    subscribed, heard_all = asyncio.Event(), asyncio.Event()
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    rpc.add_WorkerServicer_to_server(Newer(), server)
    await server.start()
    member = make_member("decode-0", address=f"127.0.0.1:{port}")
    replicas = Replicas(lambda member: GrpcWorker(member.replica, member.address, identity=_ROUTER))
    replicas.add(member)
    heard: dict[int, list[Any]] = {7: [], 8: [], 9: []}

    def take(stream: int, tokens: Any) -> None:
        heard[stream].append(tokens)
        if stream == 8 and not isinstance(tokens, ReplicaLost):
            raise ValueError("it cannot be taken")
        if stream == 9:
            heard_all.set()

    try:
        await _until_alive(replicas, alive=True)
        replica = replicas.get("decode-0")
        assert replica
        for stream in heard:
            replica.subscribe(stream, partial(take, stream))
        subscribed.set()
        await asyncio.wait_for(heard_all.wait(), 10)
        assert all(token.finish_reason is FinishReason.STOP for stream in (7, 9) for (token,) in heard[stream])
        assert isinstance(heard[8][-1], ReplicaLost) and len(heard[8]) == 2
        assert replica.is_alive and replica.num_subscribed == 2
    finally:
        await replicas.close()
        await server.stop(None)


def _with_more(message: M) -> M:
    """As a newer version may send it: with a field that we do not know."""
    field = b"\xfa\x7f\x05later"  # number 2047, of a length and five bytes
    return type(message).FromString(message.SerializeToString() + field)


async def test_what_is_no_frame_ends_the_reader_no_more_than_the_replica() -> None:
    """Its reader does not end while it counts as alive, to be chosen for ever."""

    class Garbled(rpc.WorkerServicer):
        async def Frames(self, request: pb.FramesRequest, context: Any) -> AsyncIterator[pb.Frame]:
            nonlocal num_calls
            num_calls += 1
            yield pb.Frame(number=0, status=pb.Status(replica="decode-0"))
            if num_calls == 1:
                yield pb.Frame(number=5)
            again.set()
            await asyncio.Event().wait()

    num_calls, again = 0, asyncio.Event()
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    rpc.add_WorkerServicer_to_server(Garbled(), server)
    await server.start()
    replicas = Replicas(lambda member: GrpcWorker(member.replica, member.address, identity=_ROUTER))
    replicas.add(make_member("decode-0", address=f"127.0.0.1:{port}"))
    try:
        while num_calls < 2:
            await asyncio.wait_for(again.wait(), 10)
            again.clear()
        await _until_alive(replicas, alive=True)
    finally:
        await replicas.close()
        await server.stop(None)


async def test_a_router_that_stood_still_reads_first_what_has_come_meanwhile() -> None:
    """Else all its replicas would be lost at once, and every stream with them."""

    class Frames:
        """What a call brings: frames, and a word when it is given up."""

        def __init__(self) -> None:
            self.queue: asyncio.Queue[pb.Frame] = asyncio.Queue()
            self.is_cancelled = False

        def __aiter__(self) -> Frames:
            return self

        async def __anext__(self) -> pb.Frame:
            return await self.queue.get()

        def cancel(self) -> None:
            self.is_cancelled = True

    frames, loop, changed = Frames(), asyncio.get_running_loop(), asyncio.Event()
    worker: Any = SimpleNamespace(frames=lambda taker: frames, close=partial(asyncio.sleep, 0))
    replica = Replica(make_member(), worker, on_change=changed.set, tasks=Supervisor(), look_s=0.02)
    frames.queue.put_nowait(pb.Frame(number=0, status=pb.Status(replica="decode-0")))
    await changed.wait()
    sent = pb.Frame(number=1, status=pb.Status(replica="decode-0", running=3))
    arrival = threading.Timer(0.1, loop.call_soon_threadsafe, [frames.queue.put_nowait, sent])
    arrival.start()
    arrival.join()
    threading.Event().wait(10 * 0.02)  # longer than a replica may be silent
    await becomes(lambda: replica.status.running == 3 or frames.is_cancelled)
    assert replica.is_alive and not frames.is_cancelled
    await becomes(lambda: frames.is_cancelled)  # and then it says nothing more
    assert not replica.is_alive
    await replica.close()


@pytest.mark.parametrize("is_straight", [False, True], ids=["iterated", "straight"])
async def test_plain_tokens_go_where_others_go_and_only_with_a_stream_each(is_straight: bool) -> None:
    call, changed, heard = FakeCall[pb.Frame](), asyncio.Event(), list[Any]()

    def take(stream: int, tokens: Any) -> None:
        heard.append((stream, tokens))

    def frames(taker: Callable[[pb.Frame], None]) -> FakeCall[pb.Frame]:
        nonlocal call
        call = FakeCall(taker=taker if is_straight else None)
        return call

    worker: Any = SimpleNamespace(frames=frames, close=partial(asyncio.sleep, 0))
    replica = Replica(make_member(), worker, on_change=changed.set, tasks=Supervisor())
    await asyncio.sleep(0)
    call.put(pb.Frame(number=0))
    await becomes(lambda: replica.is_alive)
    for stream in (1, 2):
        replica.subscribe(stream, partial(take, stream))
    last = pb.StreamTokens(stream=1, tokens=[pb.SampledToken(token_id=7, finish_reason="stop")])
    call.put(pb.Frame(number=1, plain_streams=[2, 9, 1], plain_token_ids=[5, 5, 6], streams=[last]))
    await becomes(lambda: len(heard) == 3)
    assert heard == [(2, [SampledToken(5)]), (1, [SampledToken(6)]), (1, [SampledToken(7, None, FinishReason.STOP)])]
    call.put(pb.Frame(number=2, plain_streams=[1, 2], plain_token_ids=[5]))
    await becomes(lambda: not replica.is_alive)
    assert [type(told) for _, told in heard[3:]] == [ReplicaLost] * 2, "whose the token is nobody knows"
    assert "of no stream" in str(heard[-1][1])
    await replica.close()
