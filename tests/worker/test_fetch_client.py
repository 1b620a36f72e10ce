"""Channel cache for prefix sources: reuse, limit, idle timeout and lost sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ReplicaLost
from core.types.handoff import PrefixSource
from core.wire.channel import listen, make_server
from tests.support.identities import in_clear, rank
from tests.support.waiting import becomes
from worker.fetch_client import PrefixSourceChannels


class FakeHolder(rpc.PrefixFetchServicer):
    """Source without blocks that records the connections of its calls."""

    def __init__(self) -> None:
        self.peers: list[str] = []

    async def Fetch(
        self, request: pb.FetchRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.FetchEvent]:
        self.peers.append(context.peer())
        yield pb.FetchEvent(served=pb.FetchServed(num_tokens=0))


@asynccontextmanager
async def served(replica: str) -> AsyncIterator[tuple[PrefixSource, FakeHolder]]:
    identity, servicer = in_clear(rank(replica)), FakeHolder()
    server = make_server(identity)
    rpc.add_PrefixFetchServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0", identity)
    await server.start()
    yield PrefixSource(replica=replica, address=f"127.0.0.1:{port}", num_tokens=8), servicer
    await server.stop(None)


@asynccontextmanager
async def channels(**options: Any) -> AsyncIterator[PrefixSourceChannels]:
    made = PrefixSourceChannels(in_clear(rank("decode-9")), **options)
    yield made
    await made.close()
    assert len(made) == 0


async def ask(prefix_sources: PrefixSourceChannels, prefix_source: PrefixSource) -> None:
    async with prefix_sources.to(prefix_source) as channel:
        [event async for event in rpc.PrefixFetchStub(channel).Fetch(pb.FetchRequest(), timeout=10)]


async def test_calls_to_one_source_share_a_channel() -> None:
    async with served("prefill-1") as (prefix_source, servicer), channels() as prefix_sources:
        for _ in range(3):
            await ask(prefix_sources, prefix_source)
        await asyncio.gather(*(ask(prefix_sources, prefix_source) for _ in range(3)))
        assert len(servicer.peers) == 6 and len(set(servicer.peers)) == 1
        assert len(prefix_sources) == 1


async def test_channel_of_a_lost_source_is_closed() -> None:
    async with channels() as prefix_sources:
        async with served("prefill-1") as (prefix_source, _):
            await ask(prefix_sources, prefix_source)
            assert len(prefix_sources) == 1
        with pytest.raises(ReplicaLost):
            await ask(prefix_sources, prefix_source)
        assert len(prefix_sources) == 0


async def test_idle_channel_is_closed() -> None:
    async with served("prefill-1") as (prefix_source, _), channels(idle_s=0.05) as prefix_sources:
        await ask(prefix_sources, prefix_source)
        await becomes(lambda: len(prefix_sources) == 0)
        await ask(prefix_sources, prefix_source)
        assert len(prefix_sources) == 1


async def test_least_recently_used_channels_are_closed() -> None:
    async with served("prefill-1") as (first, servicer), served("prefill-2") as (second, _):
        async with served("prefill-3") as (third, _), channels(max_channels=2) as prefix_sources:
            async with prefix_sources.to(first):  # a channel in use must not be closed
                for prefix_source in (second, third, second):
                    await ask(prefix_sources, prefix_source)
                assert len(prefix_sources) == 2
            await ask(prefix_sources, first)
            await ask(prefix_sources, third)
            await ask(prefix_sources, first)
            assert len(prefix_sources) == 2 and len(set(servicer.peers)) == 1
