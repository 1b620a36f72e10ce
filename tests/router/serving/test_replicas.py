"""The replicas as a router sees them, where they come and go under calls of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from cluster.index.membership import Member, Membership
from cluster.index.presence import connect_redis
from cluster.process.ports import free_port
from cluster.rpc import worker_pb2 as pb
from cluster.rpc import worker_pb2_grpc as rpc
from cluster.words.errors import ReplicaLost
from cluster.words.request import Role, SequenceRequest
from router.serving.discovery import Discovery
from router.serving.grpc_worker import GrpcWorker
from router.serving.replica import Replica
from router.serving.replicas import Replicas
from tests.identities import in_clear, router
from tests.waiting import becomes

_NAME = "here"
_KEY = bytes(32)
_ROUTER = in_clear(router())


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


def _member(replica: str, role: Role, port: int) -> Member:
    return Member(
        replica=replica,
        role=role,
        address=f"127.0.0.1:{port}",
        layout="",
        num_blocks=8,
        block_size=16,
        bytes_per_token=1,
        max_tokens=128,
    )


async def _until_alive(replicas: Replicas, *, alive: bool) -> None:
    while any(replica.is_alive for replica in replicas) is not alive:
        await replicas.changed(timeout_s=10)


async def _call(replica: Replica) -> None:
    async for _ in replica.worker.prefill(SequenceRequest(id="r", token_ids=(1,), num_prompt_tokens=1)):
        pass


async def test_who_still_calls_a_replica_that_has_left_loses_it_like_any_other(redis_url: str) -> None:
    port = free_port()
    worker = await _serve(port)
    member = _member("prefill-0", Role.PREFILL, port)
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


async def test_a_replica_whose_frames_cannot_be_read_is_lost() -> None:
    """Its reader does not end while it counts as alive, to be chosen for ever."""

    class Garbled(rpc.WorkerServicer):
        async def Frames(self, request: pb.FramesRequest, context: Any) -> AsyncIterator[pb.Frame]:
            yield pb.Frame(number=0, status=pb.Status(replica="decode-0"))
            await subscribed.wait()
            token = pb.SampledToken(token_id=1, finish_reason="of a newer version")
            yield pb.Frame(number=1, streams=[pb.StreamTokens(stream=7, tokens=[token])])
            await asyncio.Event().wait()

    subscribed, lost = asyncio.Event(), asyncio.Event()
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    rpc.add_WorkerServicer_to_server(Garbled(), server)
    await server.start()
    member = _member("decode-0", Role.DECODE, port)
    replicas = Replicas(lambda member: GrpcWorker(member.replica, member.address, identity=_ROUTER))
    replicas.add(member)
    try:
        await _until_alive(replicas, alive=True)
        replica = replicas.get("decode-0")
        assert replica
        heard: list[Any] = []
        replica.subscribe(7, lambda tokens: (heard.append(tokens), lost.set())[0])
        subscribed.set()
        await asyncio.wait_for(lost.wait(), 10)
        assert isinstance(heard[0], ReplicaLost) and "cannot be read" in str(heard[0])
    finally:
        await replicas.close()
        await server.stop(None)
