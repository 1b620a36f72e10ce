"""The calls of a replica that lacks a prefix to those that are said to hold it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from core.identity.credentials import Identity
from core.rpc import worker_pb2 as pb
from core.rpc import worker_pb2_grpc as rpc
from core.types.errors import ClusterError, ReplicaLost
from core.types.handoff import PrefixSource
from core.wire.call_errors import error_of
from core.wire.channel import open_lasting_channel
from core.wire.messages import handoff_to_proto
from core.wire.renewing_channel import LastingChannel
from kvtransfer.protocol.fetches import Fetch
from worker.rank_group import OtherRanks

_MAX_CHANNELS = 64  # that nobody uses at the moment
_IDLE_S = 60.0  # a holder that has left is asked no more


class PrefixSourceChannels:
    """A channel to each holder that was asked of late: who is asked again is there already. Lives on the event loop.

    One that is not used for a minute is closed, and so is one whose holder was lost.
    """

    def __init__(self, identity: Identity, *, max_channels: int = _MAX_CHANNELS, idle_s: float = _IDLE_S) -> None:
        self._identity = identity
        self._max_channels = max_channels
        self._idle_s = idle_s
        self._lines: OrderedDict[tuple[str, str], _Line] = OrderedDict()  # the one used last is the last
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """How many connections are open."""
        return len(self._lines)

    async def ask(self, fetch: Fetch[Any], others: OtherRanks, missed: Callable[[str], None]) -> None:
        """Open a pull on our other ranks, and keep the call to its holder as long as that ships.

        `missed` is called with the reason, if nothing comes of it. Cancelling this ends the call.
        """
        prefix_source, first_token = fetch.prefix_source, fetch.opening.first_token
        request = pb.FetchRequest(handoff=handoff_to_proto(fetch.handoff), hashes=b"".join(fetch.hashes))
        try:
            await others.open(fetch.opening)
            async with self.to(prefix_source) as channel:
                async for event in _events(channel, request, prefix_source, timeout_s=fetch.timeout_s):
                    if event.WhichOneof("event") == "granted" and event.granted.num_tokens <= first_token:
                        missed(f"{prefix_source.replica} does not hold it any more")
        except ClusterError as error:  # the holder's, or one of our own ranks did not open it
            missed(str(error))

    @asynccontextmanager
    async def to(self, prefix_source: PrefixSource) -> AsyncIterator[LastingChannel]:
        """For one call. Where ReplicaLost leaves the block, the next call has a channel of its own."""
        place = prefix_source.replica, prefix_source.address
        line = self._lines.get(place)
        if line is None:
            peer = self._identity.rank(prefix_source.replica, 0)
            line = self._lines[place] = _Line(
                open_lasting_channel(prefix_source.address, peer=peer, identity=self._identity)
            )
        line.begin()
        try:
            yield line.channel
        except ReplicaLost:
            if self._lines.get(place) is line:
                del self._lines[place]
            raise
        finally:
            line.num_calls -= 1
            self._put_back(place, line)

    async def close(self) -> None:
        for place in list(self._lines):
            self._forget(place)
        await asyncio.gather(*self._closing)

    def _put_back(self, place: tuple[str, str], line: _Line) -> None:
        """After a call."""
        if self._lines.get(place) is not line:  # its holder was lost
            if not line.num_calls:
                self._close(line)
            return
        self._lines.move_to_end(place)
        if not line.num_calls:
            line.ending = asyncio.get_running_loop().call_later(self._idle_s, self._forget, place)
        unused = [each for each, other in self._lines.items() if not other.num_calls]
        for each in unused[: max(0, len(self._lines) - self._max_channels)]:
            self._forget(each)

    def _forget(self, place: tuple[str, str]) -> None:
        self._close(self._lines.pop(place))

    def _close(self, line: _Line) -> None:
        if line.ending:
            line.ending.cancel()
        task = asyncio.ensure_future(line.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(eq=False)
class _Line:
    channel: LastingChannel
    num_calls: int = 0
    ending: asyncio.TimerHandle | None = None  # where it has none

    def begin(self) -> None:
        self.num_calls += 1
        if self.ending:
            self.ending.cancel()


async def _events(
    channel: LastingChannel, request: pb.FetchRequest, prefix_source: PrefixSource, *, timeout_s: float
) -> AsyncIterator[pb.FetchEvent]:
    """Raises ClusterError."""
    try:
        async for event in rpc.PrefixFetchStub(channel).Fetch(request, timeout=timeout_s):
            yield event
    except aio.AioRpcError as error:
        raise error_of(error, peer=prefix_source.replica) from error
