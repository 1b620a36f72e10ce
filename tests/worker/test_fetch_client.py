"""Channels to holders of prefixes: one for many calls, few of them, and none to who has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ReplicaLost
from core.types.handoff import Holder
from core.wire.channel import listen, make_server
from tests.support.identities import in_clear, rank
from tests.support.waiting import becomes
from worker.fetch_client import HolderChannels


class FakeHolder(rpc.PrefixHolderServicer):
    """Holds nothing, and remembers by which connections it was asked."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    async def Pull(
        self, request: pb.PullRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PullEvent]:
        self.peers.append(context.peer())
        yield pb.PullEvent(granted=pb.Granted(num_tokens=0))


@asynccontextmanager
async def served(replica: str) -> AsyncIterator[tuple[Holder, FakeHolder]]:
    identity, servicer = in_clear(rank(replica)), FakeHolder()
    server = make_server(identity)
    rpc.add_PrefixHolderServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0", identity)
    await server.start()
    yield Holder(replica=replica, address=f"127.0.0.1:{port}", num_tokens=8), servicer
    await server.stop(None)


@asynccontextmanager
async def channels(**options: Any) -> AsyncIterator[HolderChannels]:
    made = HolderChannels(in_clear(rank("decode-9")), **options)
    yield made
    await made.close()
    assert len(made) == 0


async def ask(holders: HolderChannels, holder: Holder) -> None:
    async with holders.to(holder) as channel:
        try:
            [event async for event in rpc.PrefixHolderStub(channel).Pull(pb.PullRequest(), timeout=10)]
        except aio.AioRpcError as error:
            raise ReplicaLost(str(error.code())) from error


async def test_a_holder_that_is_asked_again_is_asked_by_the_same_connection() -> None:
    async with served("prefill-1") as (holder, servicer), channels() as holders:
        for _ in range(3):
            await ask(holders, holder)
        await asyncio.gather(*(ask(holders, holder) for _ in range(3)))
        assert len(servicer.peers) == 6 and len(set(servicer.peers)) == 1
        assert len(holders) == 1


async def test_a_holder_that_was_lost_has_no_channel_any_more() -> None:
    async with channels() as holders:
        async with served("prefill-1") as (holder, _):
            await ask(holders, holder)
            assert len(holders) == 1
        with pytest.raises(ReplicaLost, match=str(grpc.StatusCode.UNAVAILABLE)):
            await ask(holders, holder)
        assert len(holders) == 0


async def test_a_holder_that_is_asked_no_more_has_none_either() -> None:
    async with served("prefill-1") as (holder, _), channels(idle_s=0.05) as holders:
        await ask(holders, holder)
        await becomes(lambda: len(holders) == 0)
        await ask(holders, holder)
        assert len(holders) == 1


async def test_of_many_holders_those_that_were_asked_last_have_one() -> None:
    async with served("prefill-1") as (first, servicer), served("prefill-2") as (second, _):
        async with served("prefill-3") as (third, _), channels(max_channels=2) as holders:
            async with holders.to(first):  # one in use is not closed for another
                for holder in (second, third, second):
                    await ask(holders, holder)
                assert len(holders) == 2
            await ask(holders, first)
            await ask(holders, third)
            await ask(holders, first)
            assert len(holders) == 2 and len(set(servicer.peers)) == 1
