"""gRPC client that fetches prefixes from other replicas."""

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
from core.wire.channel import LastingChannel, open_lasting_channel
from core.wire.messages import to_message
from kvtransfer.protocol.incoming_transfers import Fetch
from worker.rank_group import OtherRanks

_MAX_CHANNELS = 64  # idle channels beyond this number are closed
_IDLE_S = 60.0


class PrefixSourceChannels:
    """Cache of gRPC channels to source replicas. Used on the event loop only.

    A channel is closed after `idle_s` without a call, or when its source is lost.
    """

    def __init__(self, identity: Identity, *, max_channels: int = _MAX_CHANNELS, idle_s: float = _IDLE_S) -> None:
        self._identity = identity
        self._max_channels = max_channels
        self._idle_s = idle_s
        self._connections: OrderedDict[tuple[str, str], _Connection] = OrderedDict()  # least recently used first
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Return the number of open channels."""
        return len(self._connections)

    async def fetch(self, fetch: Fetch[Any], others: OtherRanks, missed: Callable[[str], None]) -> None:
        """Open a fetch on the other ranks, then call its source until the KV has been shipped.

        `missed` is called with the reason on failure. Cancelling this coroutine ends the call.
        """
        prefix_source, first_token = fetch.prefix_source, fetch.handoff.first_token
        request = pb.FetchRequest(handoff=to_message(pb.Handoff, fetch.handoff), hashes=b"".join(fetch.hashes))
        try:
            await others.open(fetch.incoming.opening)
            async with self.to(prefix_source) as channel:
                async for event in rpc.PrefixFetchStub(channel).Fetch(request, timeout=fetch.timeout_s):
                    if event.WhichOneof("event") == "served" and event.served.num_tokens <= first_token:
                        missed(f"prefix is no longer cached on {prefix_source.replica}")
        except ClusterError as error:  # from the source, or from an own rank that did not open the handoff
            missed(str(error))

    @asynccontextmanager
    async def to(self, prefix_source: PrefixSource) -> AsyncIterator[LastingChannel]:
        """Yield a channel for one call. Raises ClusterError if the call fails. After ReplicaLost, the next call opens a
        new channel.
        """
        key = prefix_source.replica, prefix_source.address
        connection = self._connections.get(key)
        if connection is None:
            peer = self._identity.rank(prefix_source.replica, 0)
            connection = self._connections[key] = _Connection(
                open_lasting_channel(prefix_source.address, peer=peer, identity=self._identity)
            )
        connection.num_calls += 1
        if connection.idle_timer:
            connection.idle_timer.cancel()
        try:
            yield connection.channel
        except aio.AioRpcError as rpc_error:
            error = error_of(rpc_error, peer=prefix_source.replica)
            if isinstance(error, ReplicaLost) and self._connections.get(key) is connection:
                del self._connections[key]
            raise error from rpc_error
        finally:
            connection.num_calls -= 1
            self._put_back(key, connection)

    async def close(self) -> None:
        for key in list(self._connections):
            self._forget(key)
        await asyncio.gather(*self._closing)

    def _put_back(self, key: tuple[str, str], connection: _Connection) -> None:
        """Start the idle timer of a channel after a call, and close idle channels above the limit."""
        if self._connections.get(key) is not connection:  # its source was lost
            if not connection.num_calls:
                self._close(connection)
            return
        self._connections.move_to_end(key)
        if not connection.num_calls:
            connection.idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._forget, key)
        unused = [key for key, connection in self._connections.items() if not connection.num_calls]
        for key in unused[: max(0, len(self._connections) - self._max_channels)]:
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        self._close(self._connections.pop(key))

    def _close(self, connection: _Connection) -> None:
        if connection.idle_timer:
            connection.idle_timer.cancel()
        task = asyncio.ensure_future(connection.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


@dataclass(eq=False)
class _Connection:
    channel: LastingChannel
    num_calls: int = 0
    idle_timer: asyncio.TimerHandle | None = None  # closes an idle channel
